"""Slices in commands: every one that takes a schedule takes them, or says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.schedules import generate

SMALL = generate("1f1b", num_ranks=2, num_microbatches=2, slices=2)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main([*words, "--json"])
    out, _ = capsys.readouterr()
    found: dict[str, Any] = json.loads(out)
    return code, found


COUNTS = ("1f1b", "--ranks", "2", "--microbatches", "2")
LENGTHS = ("--slices", "700,500,448,400", "--attention", "0.4")


def test_every_command_of_a_schedule_takes_slices(capsys: pytest.CaptureFixture[str]) -> None:
    costs = Costs(attention=0.4, slice_lengths=(700, 500, 448, 400), activation_bytes=8, key_value_bytes=1)
    program = generate("1f1b", num_ranks=2, num_microbatches=2, slices=4)
    bytes_too = (*LENGTHS, "--activation-bytes", "8", "--key-value-bytes", "1")
    wanted = simulate(program, costs)
    code, found = run(capsys, "simulate", *COUNTS, *bytes_too)
    assert (code, found["makespan"], found["peak_bytes"]) == (0, wanted.makespan, list(wanted.peak_bytes or ()))
    assert (found["microbatches"], found["slices"], found["critical_path"][0]) == (2, 4, "0F0.0")
    shown = run(capsys, "show", *COUNTS, *LENGTHS, "--format", "csv")[1]
    assert (shown["text"], shown["slices"], shown["rows"][1][0]) == (program.format(), 4, "1F0.0")
    assert run(capsys, "check", *COUNTS, "--slices", "4")[1]["ok"]
    assert run(capsys, "replicas", *COUNTS, "--slices", "4")[1]["slices"] == 4
    (row,) = run(capsys, "compare", *COUNTS, *bytes_too)[1]["rows"]
    assert (row["schedule"], row["makespan"]) == ("1f1b in 4 slices", wanted.makespan)


def test_a_file_has_its_own_slices(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "sliced.csv"
    SMALL.save(path)
    assert Program.load(path) == SMALL
    assert run(capsys, "simulate", str(path))[1]["slices"] == 2
    assert run(capsys, "simulate", str(path), "--slices", "3,1")[1]["slices"] == 2
    code, found = run(capsys, "check", str(path), "--slices", "4")
    assert (code, found["error"]) == (2, f"--slices is 4, but {path} has 2")
    assert [row["slices"] for row in run(capsys, "compare", str(path), "1f1b")[1]["rows"]] == [2, 2]
    path.write_text("0F0.1,0F0.0,0B0.1,0B0.0\n")
    code, found = run(capsys, "check", str(path))
    assert (code, found["violations"][0]["action"]) == (1, "0F0.1")


REFUSED = {
    ("simulate", "chimera", "--slices", "4"): "chimera cannot run microbatches in 4 slices",
    ("show", "1f1b", "--slices", "0"): "--slices has 0",
    ("show", "1f1b", "--slices", "4", "--format", "torch"): "PyTorch cannot run '1f1b in 4 slices'",
    ("simulate", "1f1b", "--slices", "4", "--attention", "2"): "attention is 2 of the time",
    ("simulate", "1f1b", "--slices", "4", "--key-value-bytes", "2"): "key_value_bytes needs activation_bytes",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_sliced_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys, *words)
    assert code == 2
    assert REFUSED[words] in found["error"]
