"""`pytest --forks 2`: every test runs once, what a file shares is made once, and whoever dies fails one test alone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from some import some

FILE = """
import os, signal
import pytest

@pytest.fixture(scope="module")
def shared():
    with open("made", "a") as file:
        file.write(f"{__name__}\\n")

@pytest.mark.parametrize("number", range(12))
def test_passes(shared, number, tmp_path):
    (tmp_path / "own").touch(exist_ok=False)

def test_fails(shared):
    print("printed before")
    assert "left" == "right"

def test_passes_after_a_failure():
    pass
"""
DYING = "import os, signal\ndef test_dies(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_goes_on(): pass\n"
ENDING = "import os\ndef test_ends():\n    os._exit(3)\n"
LONG = "import pytest\n@pytest.mark.parametrize('number', range(200))\ndef test_passes(number): pass\n"


def test_tests_run_side_by_side(tmp_path: Path) -> None:
    files = {"a": FILE, "b": FILE, "c": DYING, "d": ENDING, "e": LONG}
    for name, text in files.items():
        (tmp_path / f"test_{name}.py").write_text(text, encoding="utf-8")
    told = run(tmp_path, "-rA")
    assert told.count("PASSED ") == 2 * 13 + 1 + 200
    assert len(set(re.findall("^PASSED (.*)", told, re.MULTILINE))) == 2 * 13 + 1 + 200
    failed = dict(re.findall(r"^FAILED (\S+) - (.*)", told, re.MULTILINE))
    assert failed == {
        "test_a.py::test_fails": "AssertionError: assert 'left' == 'right'",
        "test_b.py::test_fails": "AssertionError: assert 'left' == 'right'",
        "test_c.py::test_dies": "the process that ran it ended with SIGKILL",
        "test_d.py::test_ends": "the process that ran it ended with code 3",
    }
    assert told.splitlines().count("printed before") == 2
    assert sorted((tmp_path / "made").read_text(encoding="utf-8").split()) == ["test_a", "test_b"]


def test_a_file_that_cannot_be_collected_stops_all(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("import no_such_module\n", encoding="utf-8")
    (tmp_path / "test_b.py").write_text(DYING, encoding="utf-8")
    told = run(tmp_path)
    assert "ERROR test_a.py" in told
    assert "FAILED" not in told


def run(folder: Path, *words: str) -> str:
    """Run the tests of a folder in two processes, and return what is said."""
    command = [sys.executable, "-m", "pytest", "-p", "forked_tests", "--forks", "2", "-q", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "PYTEST_ADDOPTS": "", "COLUMNS": "200"}
    done = subprocess.run(
        [*command, *words, "--rootdir", str(folder), "--basetemp", str(folder / "tmp"), "."],
        cwd=folder, env=env, capture_output=True, text=True, timeout=250, check=False,
    )  # fmt: skip
    assert done.returncode in (1, 2), done.stdout + done.stderr
    return "\n".join(some(done.stdout.splitlines()))
