"""The folder of a run: what is read back, also while it grows, and what is refused by its file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import RecordError
from drumline.core.measured.record import Record
from drumline.core.measured.run import Run, read_run
from records import PROGRAM, line, two_ranks, write_run
from refused import refused, saying


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
    assert [metric["step"] for metric in run.metrics()] == [0, 1, 2]
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


def test_clocks_are_read_as_they_were_in_the_step(folder: Path) -> None:
    for rank in range(2):  # each with a clock of its own, which show the same time
        steps = [replace(two_ranks(step, 1000 * (step + 1))[rank], clock=rank) for step in range(3)]
        (folder / f"rank{rank}.jsonl").write_text("".join(map(line, steps)))
    run = read_run(folder)
    for step in range(3):
        assert [dial.common_ns for dial in run.timeline(step).dials] == [1000 * (step + 1)] * 2


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    write_run(tmp_path, steps=())
    run = read_run(tmp_path)
    assert run.num_steps == 0
    with refused(RecordError, r"no step in .* is complete on all ranks yet"):
        run.timeline()


def test_a_step_that_is_not_there_is_named(folder: Path) -> None:
    with refused(RecordError, "has no step 7", expected="step 0 to 2"):
        read_run(folder).timeline(7)


def test_a_captured_step_has_no_timeline(folder: Path) -> None:
    for rank in range(2):
        add(folder, f"rank{rank}.jsonl", line(Record(rank, 3, begin_ns=10, end_ns=20)))
    run = read_run(folder)
    assert run.steps == (0, 1, 2, 3)
    with refused(RecordError, "step 3 was captured"):
        run.timeline()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with refused(RecordError, "does not contain a run", expected="config.json"):
        read_run(tmp_path)
    with refused(RecordError, "no such folder"):
        read_run(tmp_path / "nothing")


def test_missing_ranks_are_named(folder: Path) -> None:
    (folder / "rank1.jsonl").unlink()
    with refused(RecordError, "no record of rank 1", expected="files of all 2 ranks", fix="copy the files"):
        read_run(folder)


@pytest.mark.parametrize("name", ["plan.json", "environment.json", "rank1.jsonl"])
def test_files_of_two_runs_are_told_apart(folder: Path, tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "other", run="xyz")
    (folder / name).write_bytes((tmp_path / "other" / name).read_bytes())
    with refused(RecordError, f"{name} belongs to the run xyz", expected="abc"):
        Run(folder).timeline()


def test_a_line_that_no_run_wrote_is_named(folder: Path) -> None:
    add(folder, "rank0.jsonl", "hello\n")
    with refused(RecordError, r"line 4 of .*rank0.jsonl was not written by a run"):
        read_run(folder).num_steps  # noqa: B018 - it reads


def test_a_line_that_is_no_record_is_named(folder: Path) -> None:
    for rank in range(2):
        add(folder, f"rank{rank}.jsonl", '{"run":"abc","step":3,"rank":0}\n')
    with refused(
        RecordError, r"the line of step 3 in .*rank0.jsonl is not a record: a damaged record: 'since_ns' is missing"
    ):
        read_run(folder).timeline()


@pytest.mark.parametrize("name", ["config.json", "plan.json"])
def test_an_object_that_names_no_run_is_refused(folder: Path, name: str) -> None:
    for text in ('{"format": 1}', '{"run": 3}'):
        (folder / name).write_text(text)
        with refused(RecordError, f"{name} does not name a run", expected="the file as the run wrote it"):
            read_run(folder)


def test_an_object_that_is_gone_is_missing(folder: Path) -> None:
    (folder / "plan.json").unlink()
    with refused(RecordError, "plan.json is missing", expected="one folder"):
        read_run(folder).plan  # noqa: B018 - it reads


def test_a_line_with_bytes_of_another_is_named_by_its_step(folder: Path) -> None:
    add(folder, "rank0.jsonl", '{"run":"abc","step":3,"rank":0\n')
    add(folder, "rank1.jsonl", '{"run":"abc","step":3,"rank":1\n')
    with refused(RecordError, r"the line of step 3 in .*rank0.jsonl: not JSON"):
        read_run(folder).timeline(3)


def test_another_format_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"run": "abc", "format": 99}))
    with refused(RecordError, "uses the format 99"):
        read_run(folder)


@pytest.mark.parametrize("name", ["config.json", "plan.json"])
def test_an_object_that_cannot_be_read_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text("{")
    with refused(RecordError, f"{name}: not JSON"):
        read_run(folder)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"starts": [10]}, saying("starts has 1 number", expected="one for each of 2 timed actions")),
        ({"ends": []}, saying("ends has 0 numbers")),
        ({"ends": [5, 450]}, saying("action 0 ends 5 ns before it starts")),
        ({"starts": [10, 2.5]}, saying("starts is", expected="whole numbers of at most 64 bits")),
        ({"starts": [10, 2**63]}, saying("starts is", expected="whole numbers of at most 64 bits")),
        ({"held": "x"}, saying("held is 'x'")),
        ({"waits": [0, 1]}, saying("waits is", expected="3 per row")),
        ({"waits": [7, 1, 2]}, saying("message of waits is 7", expected="a whole number from 0 to 0")),
        ({"sends": [1, 0, 0, 9, 1, 2, 3]}, saying("target of sends is 9", expected="a whole number from 0 to 1")),
        ({"sends": [1, 0, 5, 1, 1, 2, 3]}, saying("sends contains 1RECV_F5, which the program does not send")),
        ({"sends": [0, 0, 0, 1, 1, 2, 3]}, saying("sends contains 0RECV_F0, which the program does not send")),
        ({"overheads": [9, 1, 2]}, saying("kind of overheads is 9")),
        ({"overheads": [0, 2**62, 2]}, saying("from of overheads is 4611686018427387904")),
        ({"begin_ns": None}, saying("begin_ns is None", expected="a whole number")),
        ({"end_ns": -1}, saying("end_ns is -1")),
        ({"rank": 1}, saying("rank is 1", expected="^0")),
        ({"on_device": 2}, saying("on_device is 2", expected="0 or 1")),
        ({"peaks": [-3, 0]}, saying("bytes of peaks is -3")),
    ],
)
def test_a_record_that_points_nowhere_is_refused_by_its_column(
    folder: Path, change: dict[str, Any], says: dict[str, str]
) -> None:
    first, second = two_ranks(3, 9000)
    table = json.loads(line(first)) | change
    add(folder, "rank0.jsonl", json.dumps(table, separators=(",", ":")) + "\n")
    add(folder, "rank1.jsonl", line(second))
    with refused(RecordError, **says) as caught:
        read_run(folder).timeline(3)
    assert caught.value.error.startswith("the line of step 3 in ")
    assert "rank0.jsonl is not a record: a damaged record: " in caught.value.error


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"blocks": [["0"]]}, saying("blocks is", expected="the blocks of 2 stages")),
        ({"blocks": [["0"], [1]]}, saying(r"blocks\[1\]\[0\] is 1", expected="text")),
        ({"schedule": None}, saying("schedule is None", expected="text")),
        ({"guessed_costs": [1, "x"]}, saying(r"guessed_costs\[1\] is 'x'")),
        ({"predicted": {"blocks": [{"forward": 1}]}}, saying(r"'predicted.blocks\[0\].backward' is missing")),
        ({"predicted": 5}, saying("predicted is 5", expected="an object")),
    ],
)
def test_a_plan_that_reports_cannot_use_is_refused(folder: Path, change: dict[str, Any], says: dict[str, str]) -> None:
    (folder / "plan.json").write_text(json.dumps({"run": "abc", "schedule": "1f1b", **change}))
    with refused(RecordError, **says) as caught:
        read_run(folder)
    assert "plan.json: a damaged run: " in caught.value.error


def test_metrics_that_are_no_numbers_are_refused_and_endless_ones_left_out(folder: Path) -> None:
    add(folder, "metrics.jsonl", '{"run":"abc","step":3,"pp/bubble":1e300,"grad_norm":null}\n')
    assert read_run(folder).metrics()[-1] == {"run": "abc", "step": 3, "pp/bubble": None, "grad_norm": None}
    add(folder, "metrics.jsonl", '{"run":"abc","step":4,"pp/bubble":"half"}\n')
    with refused(RecordError, r"step 4 in .*metrics.jsonl has 'half' for 'pp/bubble'"):
        read_run(folder).metrics()


def test_a_program_that_cannot_have_run_is_refused(folder: Path) -> None:
    (folder / "program.csv").write_text("0F0,0B0\n1B0,1F0\n")
    with refused(RecordError, r"program.csv cannot have run: rank 1, position 0: 1B0 runs before 1F0"):
        read_run(folder)


def test_a_step_that_took_no_time_is_refused(folder: Path) -> None:
    for rank, record in enumerate(two_ranks(3, 9000)):
        still = {"begin_ns": 9000, "starts": [0, 0], "ends": [0, 0]}
        add(folder, f"rank{rank}.jsonl", json.dumps(json.loads(line(record)) | still, separators=(",", ":")) + "\n")
    with refused(RecordError, r"step 3 in .* took 0 seconds"):
        read_run(folder).timeline(3)
