"""What importing loads, and what it offers."""

from __future__ import annotations

import subprocess
import sys

import pytest

import drumline

WITHOUT_TORCH = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ImportError("torch is forbidden here")

sys.meta_path.insert(0, Forbidden())
import importlib, pkgutil
import drumline
for package in ("core", "schedules", "plan", "report", "cli"):
    home = importlib.import_module(f"drumline.{package}")
    for module in pkgutil.walk_packages(home.__path__, f"drumline.{package}."):
        importlib.import_module(module.name)
from drumline.cli.main import main
raise SystemExit(main(["simulate", "1f1b", "--ranks", "4", "--microbatches", "8", "--json"]))
"""

LOADED = """
import sys
import drumline
heavy = {"torch", "numpy", "argparse"} & set(sys.modules)
assert not heavy, heavy
from drumline.cli.main import main
main(["simulate", "1f1b", "--ranks", "4", "--microbatches", "8"])
assert "torch" not in sys.modules
"""

NOT_INSTALLED = """
import sys
sys.modules["torch"] = None
import drumline
from drumline.core.errors import UsageError
refused = set()
for name in drumline.__all__:
    try:
        getattr(drumline, name)
    except ImportError as error:
        fix = "in your clone of Drumline, run: pip install -e '.[train]'"
        assert str(error) == f"drumline.{name} needs PyTorch; {fix}", error
        assert isinstance(error, UsageError) and error.name == "torch"
        refused.add(name)
assert {"MoE", "Pipeline", "balance", "materialise", "profile_model", "verify"} <= refused, refused
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


NEED_TORCH = (
    "channel",
    "engine",
    "features",
    "model",
    "pipeline",
    "runtime",
    "verification",
)  # the layers that public names needing torch come from


def test_the_pure_half_works_with_torch_made_unimportable() -> None:
    run(WITHOUT_TORCH)


def test_importing_drumline_loads_neither_torch_nor_numpy_and_simulating_no_torch() -> None:
    run(LOADED)


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(drumline.__all__) == sorted(drumline._HOME) == dir(drumline)
    for name in drumline.__all__:
        if not drumline._HOME[name].startswith(NEED_TORCH):
            assert getattr(drumline, name).__doc__


def test_names_that_need_torch_say_what_to_install_where_it_is_missing() -> None:
    run(NOT_INSTALLED)


@pytest.mark.torch
def test_every_public_name_that_needs_torch_is_there_and_documented() -> None:
    names = [name for name, home in drumline._HOME.items() if home.startswith(NEED_TORCH)]
    assert {"Microbatches", "Pipeline", "launch", "verify"} <= set(names)
    for name in names:
        assert getattr(drumline, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    assert not hasattr(drumline, "no_such_name")


@pytest.mark.torch
def test_a_pipeline_is_imported_without_torchs_compiler() -> None:
    """Importing that takes as long as importing torch itself, on every rank."""
    run("import sys, drumline.pipeline.pipeline\nassert 'torch._dynamo' not in sys.modules")
