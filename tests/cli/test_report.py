"""`drumline report`: text, JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.schedules import generate
from simulated_runs import even_blocks, per_stage, write_simulated_run

PROGRAM = generate("1f1b", num_ranks=2, num_microbatches=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_simulated_run(tmp_path / "run", PROGRAM, per_stage(1e-3, 2e-3), blocks=even_blocks(2, 4))


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def run_json(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, dict[str, Any]]:
    code, out, err = run(capsys, *words, "--json")
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return code, found


def test_text_goes_to_the_terminal_and_writes_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "report", folder, "--format", "text")
    assert code == 0
    assert "Rank 1 is 100% slower: move block 4 to rank 0" in out
    assert not (folder / "report.html").exists()


def test_json_is_one_object_with_a_report_per_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_json(capsys, "report", folder, folder, "--step", "1")
    assert code == 0
    assert [path["step"] for path in found["runs"]] == [1, 1]
    assert found["runs"][0]["advice"]["remedies"][0]["settings"] == {"balance": [5, 3]}
    assert "out" not in found


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--step", "7"), "has no step 7"),
        (("--step", "x"), "'x' is not a whole number"),
        (("--out", "report.docx"), "--out is report.docx"),
    ],
)
def test_what_makes_no_sense_is_refused(
    folder: Path, words: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = run_json(capsys, "report", folder, *words)
    assert code == 2
    assert says in found["error"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "report", tmp_path)
    assert code == 2
    says = "expected a folder with config.json; pass the run's own folder"
    assert err == f"drumline: {tmp_path} does not contain a run\n  {says}\n"
