"""Files of plans and profiles: every number below what it can be is refused, wherever in the file it stands."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from drumline.core.errors import PlanError
from drumline.plan.device.blocks import Profile
from drumline.plan.device.model_profile import ModelProfile, ProfiledLink
from drumline.plan.device.overheads import MessageTime
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import plan
from profiles import SOME, model_profile
from refused import refused

# Differences, and what is left over of a step, may be negative.
MAY_BE_NEGATIVE = {"seconds", "action"}
AT_LEAST_ONE = {"batch", "microbatch_size", "counts", "rows", "num_ranks"}
# Written for readers; the plan's program and its other numbers say the same.
NOT_READ = {"bubble", "microbatches", "placement", "ranks", "stages", "stages_per_rank", "step_seconds", "total"}
Path = tuple[str | int, ...]


def profile_table() -> dict[str, Any]:
    link = ProfiledLink(0, 1, ((4096, 1e-5), (8192, 2e-5)), MessageTime(1e-6, 1e-9))
    made = replace(model_profile([1.0, 2.0], overheads=SOME), links=(link,))
    table: dict[str, Any] = json.loads(made.to_json())
    return table


def plan_table() -> dict[str, Any]:
    profile = model_profile([1.0, 2.0, 3.0], overheads=SOME)
    found = plan(profile, num_ranks=2, batch=4, memory_bytes=10_000, seconds=0.0).best
    table: dict[str, Any] = json.loads(found.to_json())
    return table


def numbers(table: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the places of all numbers that are read, but for the version."""
    if isinstance(table, dict | list):
        for key, value in table.items() if isinstance(table, dict) else enumerate(table):
            if key not in NOT_READ:
                yield from numbers(value, (*path, key))
    elif isinstance(table, int | float) and not isinstance(table, bool) and path != ("version",):
        yield path


def changed(table: dict[str, Any], path: Path, value: Any) -> str:
    made = copy.deepcopy(table)
    place: Any = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(made)


@pytest.mark.parametrize("kind", [Plan, ModelProfile])
def test_numbers_below_what_they_can_be_are_refused(kind: Any) -> None:
    table = plan_table() if kind is Plan else profile_table()
    assert kind.from_json(json.dumps(table))
    places = list(numbers(table))
    assert len(places) > 20
    for path in places:
        names = {str(key) for key in path}
        wrong: list[Any] = ["1", float("inf")]
        if not names & MAY_BE_NEGATIVE:
            wrong.append(-1)
        if names & AT_LEAST_ONE:
            wrong.append(0)
        for value in wrong:
            with pytest.raises(PlanError):
                kind.from_json(changed(table, path, value))


@pytest.mark.parametrize("path", [(), ("layers", 0), ("layers", 0, "times"), ("overhead",)])
def test_a_profile_with_what_it_cannot_have_is_refused(path: tuple[Any, ...]) -> None:
    table = json.loads(model_profile([0.001, 0.002]).sizes[0][1].to_json())
    assert Profile.from_json(json.dumps(table)).layers
    inside = table
    for step in path:
        inside = inside[step]
    inside["wieght_bytes"] = 1
    with refused(PlanError, "wieght_bytes"):
        Profile.from_json(json.dumps(table))
