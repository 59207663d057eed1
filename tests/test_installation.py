"""Installing: with a compiler the wheel holds the kernel and names its platform; without one it installs as well."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from drumline.core.kernel.build import HERE, file_name
from extras import needed
from kernels import library

needed("hatchling", "dev")
ROOT = Path(__file__).parents[1]
ASKS = """
import json, drumline
from drumline.core.kernel.library import kernel
from pathlib import Path
timeline = drumline.simulate(drumline.generate("1f1b", num_ranks=4, num_microbatches=8))
print(json.dumps([str(Path(drumline.__file__).parents[1]), kernel() is not None, timeline.makespan, timeline.start]))
"""
pytestmark = pytest.mark.slow


def wheel(folder: Path, compiler: str | None) -> Path:
    """Build a wheel of this tree, with this value of CC."""
    env = {name: value for name, value in os.environ.items() if name != "CC"} | ({"CC": compiler} if compiler else {})
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    assert ("the kernel is not compiled" in done.stdout + done.stderr) == (compiler is not None)
    return built


def asked(folder: Path) -> Any:
    env = os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run([sys.executable, "-c", ASKS], env=env, capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    return json.loads(done.stdout)


@pytest.mark.parametrize("compiler", ["/nonexistent", "false"], ids=["no compiler", "a broken one"])
def test_without_a_compiler_the_package_installs_and_gives_the_same_numbers(tmp_path: Path, compiler: str) -> None:
    built = wheel(tmp_path, compiler)
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".shared")]
        archive.extractall(tmp_path / "site")
    assert asked(tmp_path / "site") == [str(tmp_path / "site"), False, 33.0, 0.0]


def test_a_wheel_that_is_built_here_brings_the_kernel(tmp_path: Path) -> None:
    library()  # skips where there is no compiler
    built = wheel(tmp_path, None)
    assert "-py3-none-" in built.name
    assert not built.name.endswith("-any.whl")
    options = ["--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-compile"]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(tmp_path / "site"), str(built)], check=True
    )
    assert asked(tmp_path / "site") == [str(tmp_path / "site"), True, 33.0, 0.0]


class Shown:
    """Stands in for hatch's application."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def display_warning(self, text: str) -> None:
        self.warnings.append(text)


def test_an_editable_installation_compiles_beside_the_sources_and_fails_in_no_tree(tmp_path: Path) -> None:
    library()
    hook = runpy.run_path(str(ROOT / "hatch_build.py"))["KernelHook"]
    copy = tmp_path / "src/drumline/core/kernel"
    for warnings in (1, 0):
        shown, data = Shown(), dict[str, Any]()
        hook(str(tmp_path), {}, None, None, "", "wheel", app=shown).initialize("editable", data)
        assert (len(shown.warnings), data) == (warnings, {})  # at first there is nothing to compile
        sources = shutil.ignore_patterns("*.shared", "*.stamp", "__pycache__")
        shutil.copytree(HERE, copy, ignore=sources, dirs_exist_ok=True)
    assert (copy / file_name()).is_file()
