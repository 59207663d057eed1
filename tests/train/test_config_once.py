"""A setting is stated once: where its field changes, flags, errors, the written config and the reference follow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# Puts changed modules in place of ours, and prints what a user then sees.
SHOW = """
import contextlib, importlib.util, io, json, sys
for name, path in json.loads(sys.argv[1]).items():
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

import drumline as dl
from drumline.adapt.settings import Adapt
from drumline.cli.main import main
from train.test_config_docs import reference

def said(*words):
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told):
        main(["train", *words, "--print-config"])
    return told.getvalue()

def refused(**given):
    try:
        Adapt(**given)
    except dl.DrumlineError as error:
        return str(error)

print(json.dumps({
    "help": " ".join(said("--help").split()),
    "config": said(),
    "errors": " ".join(said("--steps", "0", "--adapt", "--set", "adapt.patience=0").split()),
    "refusal of a pipeline": refused(patience=0),
    "reference": reference(),
}))
"""
# A module, what a field of it states, and what the field is made to state instead.
CHANGES = {
    "adapt.settings": (
        'setting(3, "steps in a row for which a rank must be too slow", STEPS)',
        'setting(9, "seconds without rain", SECONDS)',
    ),
    "train.config.settings": (
        'setting(100, "optimizer steps", STEPS)',
        'setting(7, "seconds of work", SECONDS)',
    ),
}
YEAR = "a number above 0 and at most 31536000, a year"
SEEN = {
    "help": ["--steps N seconds of work (default 7)"],
    "config": [
        "\nsteps = 7                               # seconds of work\n",
        "\npatience = 9                            # seconds without rain\n",
    ],
    "errors": [
        f"--steps: run.steps is 0; expected {YEAR}",
        f"--set adapt.patience: adapt.patience is 0; expected {YEAR}",
    ],
    "refusal of a pipeline": [f"adapt: patience is 0; expected {YEAR}"],
    "reference": [
        f"\n| `steps` | `7` | {YEAR}, in seconds | seconds of work |\n",
        f"\n| `patience` | `9` | {YEAR}, in seconds | seconds without rain |\n",
    ],
}


def changed(module: str, folder: Path) -> Path:
    """Write a module of ours with its changed field into a folder, and return its file."""
    stated, instead = CHANGES[module]
    text = (ROOT / "src" / "drumline" / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    assert text.count(stated) == 1
    path = folder / f"{module}.py"
    path.write_text(text.replace(stated, instead), encoding="utf-8")
    return path


@pytest.mark.slow
def test_flags_errors_the_written_config_and_the_reference_follow_a_changed_field(tmp_path: Path) -> None:
    modules = {f"drumline.{module}": str(changed(module, tmp_path)) for module in CHANGES}
    command = [sys.executable, "-c", SHOW, json.dumps(modules)]
    done = subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(done.stdout)
    for what, lines in SEEN.items():
        assert [line for line in lines if line not in found[what]] == [], found[what]
