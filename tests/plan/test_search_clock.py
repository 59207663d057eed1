"""Every phase of a search looks at the clock: one that only work moves, so that no machine is too slow or too fast."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from drumline.core.costs import Costs
from drumline.core.placement import Placement
from drumline.core.prove.validate import validate
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds import earliest
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.construct import Builder
from drumline.plan.search.objective import Objective
from drumline.plan.search.search import SearchResult, search
from drumline.plan.search.search_run import Budget, SearchRun
from drumline.schedules import schedules
from drumline.schedules.registry import Schedule

# What takes long in programs of tens of thousands of actions, by phase.
WORK: dict[str, tuple[type, str]] = {
    "swept": (earliest._RankLanes, "tighten"),
    "prepared": (earliest._RankLanes, "__init__"),
    "recipe": (Schedule, "build"),
    "timed": (Objective, "measure"),
    "built": (Builder, "build"),
}
# As much of each as is done where each takes longer than the whole search may.
MOST = {"swept": 8, "prepared": 1, "recipe": 3, "timed": 4, "built": 1}
COSTS, LIMIT = Costs(), Limit(max_activations=3)  # in a V, nothing that is known reaches the bound


class Clock:
    """Stands in for `time`: a second passes with every piece of work of the kinds that take `slow`."""

    def __init__(self, *slow: str) -> None:
        self.slow: Sequence[str] = slow
        self.now, self.done = 0.0, Counter[str]()

    def monotonic(self) -> float:
        return self.now

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for kind, (owner, name) in WORK.items():
            monkeypatch.setattr(owner, name, self._counted(kind, getattr(owner, name)))
        monkeypatch.setattr("drumline.plan.search.search_run.time", self)
        monkeypatch.setattr("drumline.plan.search.search.time", self)

    def _counted(self, kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.done[kind] += 1
            self.now += kind in self.slow
            return work(*args, **options)

        return counted


def found(seconds: float | None, *, limit: Limit = LIMIT, tries: int | None = None) -> SearchResult:
    return search(COSTS, Placement.v(4), num_microbatches=12, limit=limit, seconds=seconds, tries=tries)


@pytest.fixture(autouse=True)
def examples_are_made() -> None:
    """Examples of schedules are made once for all searches."""
    assert all(schedule.example is not None for schedule in schedules().values())


@pytest.mark.slow
def test_a_search_does_much_of_everything_where_nothing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    clock.watch(monkeypatch)
    found(0.5)
    assert all(clock.done[kind] > 2 * most for kind, most in MOST.items()), clock.done


@pytest.mark.parametrize("slow", WORK)
def test_a_phase_ends_when_the_time_is_over(slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(slow)
    clock.watch(monkeypatch)
    made = found(0.5)
    assert clock.done[slow] <= MOST[slow], clock.done
    assert validate(made.program, limit=LIMIT, costs=COSTS) == []
    assert made.bound.value <= made.value * (1 + 1e-9)


def test_a_search_without_any_time_begins_with_the_most_promising_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock("recipe")
    clock.watch(monkeypatch)
    made = found(0.5, limit=Limit(max_activations=9))
    assert [start.name for start in made.starts] == ["zb-v", "one by one", "one by one, joined"]
    assert clock.done["recipe"] == 2  # the next one shows that it is late
    assert made.bound.name == "passage"


def test_with_a_number_of_programs_and_no_seconds_no_clock_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def programs(tries: int, *slow: str) -> tuple[str, int]:
        clock = Clock(*slow)
        with monkeypatch.context() as patch:
            clock.watch(patch)
            made = found(None, tries=tries)
        assert clock.now > 100 or not slow
        return made.program.format(), made.num_tried

    few = programs(40)
    assert programs(40, *WORK) == few
    assert 40 <= few[1] <= 44


def test_programs_of_a_search_with_fewer_microbatches_count_and_are_limited() -> None:
    instance = Instance(COSTS, Placement.v(4), 12, LIMIT)
    run = SearchRun(instance, Objective(instance), Budget(units=3e5, deadline=1e9, tries=50))
    before = run.num_tried
    run.stretch()
    assert before + 20 < run.num_tried <= 52
