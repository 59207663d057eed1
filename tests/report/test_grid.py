"""A timeline as text: the pictures, their width, labels and colour."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.report.draw.grid import grid, legend
from matrices import examples
from programs import NAMES, build, costs_for, programs


def test_1f1b_as_it_is_drawn_everywhere() -> None:
    assert grid(simulate(build("1f1b", 3, 3)), width=80).splitlines() == [
        "rank 0 |F0 F1 F2 .. .. .. .. B0--- .. B1--- .. B2--- | idle 40% peak 3",
        "rank 1 |.. F0 F1 .. .. B0--- F2 B1--- .. B2--- .. .. | idle 40% peak 2",
        "rank 2 |.. .. F0 B0--- F1 B1--- F2 B2--- .. .. .. .. | idle 40% peak 1",
    ]


@settings(max_examples=examples(60))
@given(programs(), st.data(), st.integers(10, 160))
def test_never_wider_than_the_terminal(program: Program, data: st.DataObject, width: int) -> None:
    timeline = simulate(program, data.draw(costs_for(program)))
    assert all(len(line) <= width for line in grid(timeline, width=width).splitlines())


def test_eight_ranks_and_32_microbatches_stay_legible_at_80_columns() -> None:
    lines = grid(simulate(build("1f1b", 8, 32)), width=80).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert lines[-1].startswith("Compressed: one column is")
    assert "a window." in lines[-1]


@pytest.mark.parametrize("width", [12, 25, 40, 59])
def test_short_lines_have_idle_and_peak_below_them_and_no_sentence_is_cut(width: int) -> None:
    timeline = simulate(build("1f1b", 4, 8))
    below = " ".join(grid(timeline, width=width).splitlines()[4:])
    assert below.startswith("idle 27% 27% 27% 27% peak activations 4 3 2 1 Compressed: one column is ")
    assert below.endswith("Labels need a wider terminal or a window.")
    assert "idle" not in grid(timeline, width=width, figures=False)


def test_a_window_shows_its_labels() -> None:
    lines = grid(simulate(build("1f1b", 8, 32)), width=80, window=(0, 15)).splitlines()
    assert lines[0].startswith("rank 0 |F0 F1 F2")
    assert lines[-1] == "Shown: 0 to 15 of 117."


def test_colour_changes_no_character() -> None:
    timeline = simulate(build("zb-v", 4, 4))
    painted = grid(timeline, colour=True)
    assert "\x1b[" in painted
    assert re.sub(r"\x1b\[[0-9;]*m", "", painted) == grid(timeline)


@pytest.mark.parametrize("name", NAMES)
def test_every_timed_action_is_drawn_once_where_labels_fit(name: str) -> None:
    timeline = simulate(build(name, 4, 4), Costs(update=1))
    lines = grid(timeline, width=400, figures=False).splitlines()
    for rank, track in enumerate(timeline.tracks):
        drawn = lines[rank].split("|")[1].replace("-", "").split()
        assert len([word for word in drawn if word != ".."]) == len(track.actions)


def test_letters_are_explained_where_they_need_it() -> None:
    assert legend(simulate(build("1f1b", 2, 2))) == ""
    said = "Lower-case letters: the rank's second stage. Peak: activations held, one per stage and microbatch."
    assert legend(simulate(build("zb-v", 2, 2))) == said
    assert "going up" in legend(simulate(build("chimera", 2, 2)))


def test_an_action_without_duration_takes_no_column() -> None:
    assert "U" not in grid(simulate(build("pipedream", 2, 2)), width=100, figures=False)
