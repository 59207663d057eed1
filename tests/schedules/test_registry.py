"""The registry of schedules: all names, counts and options, one's own recipes, and what is refused."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from drumline.core.action import Action, B, F
from drumline.core.errors import ScheduleError
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.schedules import find, generate, schedule, schedules, unregister
from drumline.schedules.registry import MAX_PAIRS
from names import NAMES
from refused import refused, saying


def test_every_schedule_of_the_field_is_there() -> None:
    assert list(schedules()) == NAMES


def test_every_schedule_says_what_it_is() -> None:
    assert all(recipe.summary for recipe in schedules().values())


def test_ones_own_schedule_gets_proof_and_timing() -> None:
    @schedule("mine")
    def mine(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
        """Run every microbatch through on its own."""
        for rank in range(num_ranks):
            yield [op(rank, m) for m in range(num_microbatches) for op in (F, B)]

    try:
        program = generate("mine", num_ranks=3, num_microbatches=2)
        assert find("mine").summary == "Run every microbatch through on its own."
        assert validate(program) == []
        assert simulate(program).makespan == 18
        with refused(ScheduleError, "already registered"):
            schedule("mine")(mine)
    finally:
        unregister("mine")
    with refused(ScheduleError, "unknown schedule 'mine'"):
        generate("mine", num_ranks=3, num_microbatches=2)


@pytest.mark.parametrize(
    ("name", "counts", "says"),
    [
        ("1f1v", (4, 8, None), saying("unknown schedule '1f1v'", fix="did you mean 1f1b")),
        ("ZB_H1", (4, 8, None), saying(fix="did you mean zb-h1")),
        ("x" * 10_000, (4, 8, None), saying(fix="choose one of")),
        ("1f1b", (0, 8, None), saying("the number of ranks is 0")),
        ("1f1b", (4, -1, None), saying("the number of microbatches is -1")),
        ("interleaved-1f1b", (4, 8, 0), saying("the number of stages per rank is 0")),
        ("chimera", (5, 8, None), saying(fix="use 4 or 6")),
        ("dualpipe", (1, 8, None), saying(fix="^use 2$")),
        ("1f1b", (4, 8, 2), saying(expected="exactly 1 per rank")),
        ("zb-v", (4, 8, 3), saying(expected="exactly 2 per rank")),
        ("hanayo", (4, 8, 3), saying(fix="use 2 or 4")),
        ("pipedream-2bw", (4, 3, None), saying(fix="use 4 microbatches")),
        ("gpipe", (1000, MAX_PAIRS, None), saying("too large")),
    ],
)
def test_counts_that_do_not_do_are_refused_with_some_that_would(
    name: str, counts: tuple[int, int, int | None], says: dict[str, str]
) -> None:
    with refused(ScheduleError, **says) as caught:
        generate(name, num_ranks=counts[0], num_microbatches=counts[1], stages_per_rank=counts[2])
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (lambda: [["F0"]], "yields 'F0'"),
        (lambda: 5, "failed with TypeError"),
        (lambda: 1 / 0, "failed with ZeroDivisionError"),
        (lambda: [itertools.repeat(F(0, 0))], "more than 1000000 actions"),
        pytest.param(lambda: itertools.repeat([]), "more than 1000000 actions", marks=pytest.mark.slow),
    ],
)
def test_a_recipe_that_goes_wrong_is_named(rows: Callable[[], Any], says: str) -> None:
    schedule("wrong")(lambda num_ranks, *, num_microbatches: rows())
    try:
        with refused(ScheduleError, f"the recipe of wrong.*{says}"):
            generate("wrong", num_ranks=1, num_microbatches=1)
    finally:
        unregister("wrong")


def test_counts_that_are_not_numbers_are_refused() -> None:
    with refused(ScheduleError, "the number of ranks is '3'"):
        generate("1f1b", num_ranks="3", num_microbatches=2)  # type: ignore[arg-type]


def test_an_unknown_option_is_refused() -> None:
    with refused(ScheduleError, "has no option 'num_stepz'"):
        generate("pipedream-2bw", num_ranks=2, num_microbatches=2, num_stepz=3)
    assert generate("pipedream-2bw", num_ranks=2, num_microbatches=2, num_steps=3).num_updates == 3
