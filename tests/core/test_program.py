"""Programs as text and as files: what is read, and what is refused with its place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given

from drumline.core import program as module
from drumline.core.costs import Costs
from drumline.core.errors import ProgramError
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from programs import NAMES, build, programs
from refused import refused


@given(programs())
def test_every_program_survives_its_text_form(program: Program) -> None:
    assert Program.parse(program.format()) == program
    assert Program.parse(lower(program).format()) == lower(program)


@pytest.mark.parametrize("name", NAMES)
def test_every_program_survives_a_file(name: str, tmp_path: Path) -> None:
    program = build(name, 4, 8)
    program.save(tmp_path / "one.csv")
    loaded = Program.load(tmp_path / "one.csv")
    assert loaded == program
    assert loaded.name == "one"


def test_idle_slots_windows_line_ends_and_a_byte_order_mark_mean_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"\xef\xbb\xbf0F0,,0B0\r\n,1F0,1B0,\r\n")
    assert Program.load(tmp_path / "a.csv").format() == "0F0,0B0\n1F0,1B0"


def test_counts_follow_from_the_rows() -> None:
    program = build("pipedream-2bw", 2, 3)
    assert (program.num_ranks, program.num_stages, program.num_microbatches) == (2, 2, 12)
    assert program.num_updates == 4
    assert program.num_actions == sum(len(row) for row in program.rows)


def test_programs_are_equal_when_their_rows_are() -> None:
    assert Program.parse("0F0", name="a") == Program.parse("0F0", name="b")
    assert hash(Program.parse("0F0", name="a")) == hash(Program.parse("0F0", name="b"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("0F0,0B0\n1F0,1B0x", "row 2, column 2: '1B0x' is not an action"),
        ("0F0,0B0\n\n1F0,1B0", "row 2 of 3 is empty"),
        ("0F0,0B0\n,,,\n1F0,1B0", "row 2 of 3 is empty"),
        ("", "contains no action"),
        ("\n\n", "contains no action"),
        ("0F0;0B0", "row 1, column 1"),
        ('"0F0","0B0"', "row 1, column 1"),
    ],
)
def test_bad_text_is_refused_with_its_place(text: str, says: str) -> None:
    with refused(ProgramError, says):
        Program.parse(text)


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    lines = build("1f1b", 4, 4).format().splitlines()
    (tmp_path / "gone.csv").write_text("\n".join(lines[:1] + lines[2:]))
    with refused(ProgramError, "no rank runs stage 1"):
        Program.load(tmp_path / "gone.csv")


def test_wrong_encoding_is_named(tmp_path: Path) -> None:
    (tmp_path / "utf16.csv").write_text("0F0,0B0", encoding="utf-16")
    with refused(ProgramError, r"byte 0xff at offset 0 is not UTF-8"):
        Program.load(tmp_path / "utf16.csv")


def test_a_huge_file_is_refused_without_being_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "junk.csv"
    path.touch()
    os.truncate(path, 3 * module.MAX_FILE_BYTES)
    with refused(ProgramError, "larger than 512 MiB"):
        Program.load(path)


def test_a_line_of_junk_is_refused_at_its_first_cell(tmp_path: Path) -> None:
    (tmp_path / "junk.csv").write_text("x" * 2**20 + ",0F0" * 2**18)
    with refused(ProgramError, "row 1, column 1"):
        Program.load(tmp_path / "junk.csv")


def test_more_actions_than_anybody_runs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("MAX_ACTIONS", "MAX_IN_ARRAYS"):
        monkeypatch.setattr(module, limit, 5)
    assert Program.parse("0F0,0F1,0B0\n1F0,1B0").num_actions == 5
    with refused(ProgramError, "row 2: more than 5 actions"):
        Program.parse("0F0,0F1,0B0\n1F0,1B0,1F1")


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    with refused(ProgramError, "not a regular file"):
        Program.load(tmp_path / "pipe.csv")


def test_numbers_far_apart_do_not_fill_memory(tmp_path: Path) -> None:
    (tmp_path / "far.csv").write_text("0F0,999999999B0")
    with refused(ProgramError, "no rank runs stage 1"):
        Program.load(tmp_path / "far.csv")


@pytest.mark.parametrize(("what", "said"), [("a folder", "is a folder"), ("nothing", "No such file")])
def test_what_is_not_a_file_is_refused(what: str, said: str, tmp_path: Path) -> None:
    with refused(ProgramError, said, expected="a CSV file"):
        Program.load(tmp_path if what == "a folder" else tmp_path / "none.csv")


def test_a_program_of_arrays_too_large_to_look_at_is_still_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    small = Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    depths = simulate(small, Costs(comm=0.5)).queue_depths.items()
    queues, columns = {edge: max(depth for _, depth in curve) for edge, curve in depths}, small.columns
    monkeypatch.setattr(module, "MAX_ACTIONS", 7)
    program = Program.of_columns(columns, "large")
    timeline = simulate(program, Costs(comm=0.5))
    assert (timeline.makespan, timeline.peak_activations, len(timeline.critical_path)) == (10.0, (2, 1), 6)
    assert timeline.peak_queues == queues == {(0, 1): 1, (1, 0): 1}
    with refused(ProgramError, "large has 8 actions", expected="at most 7", fix="fewer microbatches"):
        _ = program.rows
