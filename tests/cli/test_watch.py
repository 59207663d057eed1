"""`drumline watch`: a line per step, JSON, the drawn terminal, and what it refuses."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from drumline.cli.main import main
from drumline.schedules import generate
from simulated_runs import per_stage, write_simulated_run

PROGRAM = generate("1f1b", num_ranks=2, num_microbatches=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = write_simulated_run(tmp_path / "run", PROGRAM, per_stage(1e-3, 2e-3))
    (path / "ended.json").write_text('{"run": "abc"}')
    return path


def test_a_line_per_step_where_nobody_draws(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("   ")[0] for line in lines] == ["step 0", "step 1", "step 2", "the run has ended"]


def test_once_shows_the_last_step(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(folder), "--once"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("step 2   loss 0.3333")


def test_json_is_an_object_per_step_and_one_with_once(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(folder), "--json"]) == 0
    assert [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()] == [0, 1, 2]
    assert main(["watch", str(folder), "--json", "--once"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["step"] == 2


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nothing", "--wait", "0.01"), "no such folder"),
        (("empty", "--wait", "0.01"), "does not contain config.json"),
        (("empty", "--once"), "does not contain a run"),
        (("run", "--wait", "-1"), "--wait is -1"),
        (("run", "--once", "--tensorboard", "x"), "the package tensorboard is not installed"),
    ],
)
def test_what_there_is_nothing_to_watch_of_is_refused(
    folder: Path, words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    (folder.parent / "empty").mkdir()
    name, *rest = words
    assert main(["watch", str(folder.parent / name), *rest, "--json"]) == 2
    assert says in json.loads(capsys.readouterr().out)["error"]


def test_a_run_without_a_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_simulated_run(tmp_path / "run", PROGRAM, per_stage(1e-3, 2e-3), num_steps=0)
    assert main(["watch", str(path), "--once"]) == 2
    assert "has no step yet" in capsys.readouterr().err


def test_a_terminal_is_drawn_in_place(folder: Path) -> None:
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "drumline.cli.main", "watch", str(folder)]
    environment = {**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8"}
    with subprocess.Popen(words, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                piece = os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            shown += piece
        assert process.wait(timeout=250) == 0
    os.close(ours)
    text = shown.decode()
    assert "run: 1f1b, 2 ranks, 2 stages, 4 microbatches\x1b[K" in text
    assert "step 2   loss 0.3333" in text
    assert text.rstrip().endswith("the run has ended")
