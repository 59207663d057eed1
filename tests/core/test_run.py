from __future__ import annotations

import json
from pathlib import Path

import pytest

from drumline.core.errors import RecordError
from drumline.core.record import Record
from drumline.core.run import Run, read_run
from records import PROGRAM, line, two_ranks, write_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "run")
    return tmp_path / "run"


def add(folder: Path, name: str, text: str) -> None:
    with (folder / name).open("a") as file:
        file.write(text)


def test_a_run_gives_back_what_its_ranks_wrote(folder: Path) -> None:
    run = read_run(folder)
    assert (run.steps, run.num_steps, run.id) == ((0, 1, 2), 3, "abc")
    assert run.program == PROGRAM
    assert run.program.name == "1f1b"
    assert run.timeline(1).records == two_ranks(1, 2000)
    assert run.timeline().records == run.timeline(2).records
    assert [one["step"] for one in run.metrics()] == [0, 1, 2]
    assert repr(run).endswith("'1f1b', num_steps=3)")


def test_a_run_is_read_while_it_grows(folder: Path) -> None:
    run = read_run(folder)
    first, second = two_ranks(3, 9000)
    add(folder, "rank0.jsonl", line(first))
    assert run.steps == (0, 1, 2), "rank 1 has not written it"
    text = line(second)
    add(folder, "rank1.jsonl", text[:40])
    assert run.steps == (0, 1, 2), "rank 1 is in the middle of it"
    add(folder, "rank1.jsonl", text[40:])
    assert run.num_steps == 4
    assert run.timeline().records == (first, second)


def test_a_killed_run_is_read_up_to_its_last_complete_line(folder: Path) -> None:
    path = folder / "rank1.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    (folder / "metrics.jsonl").write_bytes((folder / "metrics.jsonl").read_bytes()[:-2])
    run = read_run(folder)
    assert run.steps == (0, 1)
    assert run.timeline().records == two_ranks(1, 2000)
    assert len(run.metrics()) == 2


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, steps=())
    run = read_run(tmp_path)
    assert run.num_steps == 0
    with pytest.raises(RecordError, match="no step that all ranks have written yet"):
        run.timeline()


def test_a_step_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(RecordError, match=r"no step 7 in .*; expected one of 0 to 2"):
        read_run(folder).timeline(7)


def test_a_captured_step_has_no_timeline(folder: Path) -> None:
    for rank in range(2):
        add(folder, f"rank{rank}.jsonl", line(Record(rank, 3, begin_ns=10, end_ns=20)))
    run = read_run(folder)
    assert run.steps == (0, 1, 2, 3)
    with pytest.raises(RecordError, match="step 3 was captured"):
        run.timeline()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"there is no run in .*; expected a folder with config.json"):
        read_run(tmp_path)
    with pytest.raises(RecordError, match="is no folder"):
        read_run(tmp_path / "nothing")


def test_missing_ranks_are_named(folder: Path) -> None:
    (folder / "rank1.jsonl").unlink()
    with pytest.raises(RecordError, match="no record of rank 1; expected files of all 2 ranks; copy those"):
        read_run(folder)


@pytest.mark.parametrize("name", ["plan.json", "environment.json", "rank1.jsonl"])
def test_files_of_two_runs_are_told_apart(folder: Path, tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "other", run="xyz")
    (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with pytest.raises(RecordError, match=f"{name} belongs to the run xyz; expected abc"):
        Run(folder).timeline()


def test_a_line_that_no_run_wrote_is_named(folder: Path) -> None:
    add(folder, "rank0.jsonl", "hello\n")
    with pytest.raises(RecordError, match=r"line 4 of .*rank0.jsonl is not one that a run wrote"):
        read_run(folder).num_steps  # noqa: B018 - it reads


def test_a_line_that_is_no_record_is_named(folder: Path) -> None:
    for rank in range(2):
        add(folder, f"rank{rank}.jsonl", '{"run":"abc","step":3,"rank":0}\n')
    with pytest.raises(
        RecordError, match=r"the line of step 3 in .*rank0.jsonl is no record: a damaged record: 'since_ns' is missing"
    ):
        read_run(folder).timeline()


def test_another_format_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"run": "abc", "format": 99}))
    with pytest.raises(RecordError, match="in the format 99"):
        read_run(folder)


@pytest.mark.parametrize("name", ["config.json", "plan.json"])
def test_an_object_that_cannot_be_read_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with pytest.raises(RecordError, match=f"{name}: not JSON"):
        read_run(folder)
