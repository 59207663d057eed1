"""`drumline search`: what it prints, writes, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.cli.main import main
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from some import some

COUNTS = ("--ranks", "4", "--microbatches", "8")


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["search", *words])
    out, err = capsys.readouterr()
    return code, out, err


def test_search_prints_what_simulate_does_and_the_bound(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *COUNTS, "--max-activations", "4", "--json")
    found = json.loads(out)
    assert (code, err) == (0, "")
    assert (found["makespan"], found["lower_bound"], found["gap"]) == (27.0, 27.0, 0.0)
    assert found["peak_activations"] == [4, 4, 4, 4]
    assert found["search_seconds"] >= 0
    assert {"schedule", "ranks", "microbatches", "stages", "bubble", "span_bubble", "idle"} <= found.keys()
    assert found["starts"][0] == {"schedule": "zb-h1", "value": 27.0}


def test_search_writes_what_check_proves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.csv"
    code, out, _ = run(capsys, *COUNTS, "--max-activations", "3", "--tries", "200", "--out", str(path))
    assert code == 0
    assert f"wrote {path}" in out
    program = Program.load(path)
    assert validate(program) == []
    assert main(["check", str(path)]) == 0


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_search_draws_what_it_found(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"found.{suffix}"
    assert run(capsys, *COUNTS, "--max-activations", "4", "--out", str(path))[0] == 0
    assert "4 ranks" in path.read_text(encoding="utf-8")


@pytest.mark.slow
def test_placements_that_do_not_admit_the_counts_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--ranks", "3", "--microbatches", "2", "--placement", "all", "--tries", "20")
    for more in ((), ("--pareto",)):
        found = json.loads(run(capsys, *words, *more, "--json")[1])
        assert [value["placement"] for value in found["left_out"]] == ["bidirectional"]
        assert found["left_out"][0]["error"].startswith("bidirectional cannot use 3 ranks and 2 microbatches")
        assert "bidirectional: left out, bidirectional cannot use 3 ranks" in run(capsys, *words, *more)[1]


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_pareto_is_drawn_with_every_hand_made_schedule(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"front.{suffix}"
    counts = ("--ranks", "2", "--microbatches", "4", "--tries", "50")
    code, out, _ = run(capsys, "--pareto", *counts, "--out", str(path), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["unit"] == "microbatches"
    assert [point["memory"] for point in found["front"]] == sorted(point["memory"] for point in found["front"])
    assert "zb-h1" in path.read_text(encoding="utf-8")


def test_all_placements_are_searched_for_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *COUNTS, "--placement", "all", "--tries", "60", "--json")
    found = json.loads(out)
    assert code == 0
    assert {found["placement"], *(other["placement"] for other in found["others"])} == {
        "linear",
        "loop",
        "v",
        "bidirectional",
    }
    assert all(some(found["value"] <= other["value"] for other in found["others"]))


REFUSED = [
    ((), "--ranks is missing"),
    (("--ranks", "4"), "--microbatches is missing"),
    (("--ranks", "0", "--microbatches", "8"), "--ranks is 0"),
    ((*COUNTS, "--seconds", "0"), "--seconds is 0"),
    ((*COUNTS, "--quantile", "2"), "--quantile is 2"),
    ((*COUNTS, "--out", "x.docx"), "--out is x.docx"),
    ((*COUNTS, "--max-bytes", "10"), "--max-bytes needs to know what a stage holds"),
    ((*COUNTS, "--stages-per-rank", "2"), "linear cannot use 2 stages per rank"),
    (("--ranks", "3", "--microbatches", "8", "--placement", "bidirectional"), "bidirectional cannot use 3 ranks"),
    ((*COUNTS, "--max-activations", "0.5"), "no program keeps every rank within 0.5 pairs"),
    ((*COUNTS, "--jitter", "0.1,0.2"), "jitter has 2 values"),
]


@pytest.mark.parametrize(("words", "reason"), REFUSED)
def test_what_makes_no_sense_is_refused(
    words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    assert reason in err
