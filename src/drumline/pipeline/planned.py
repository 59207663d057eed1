"""A pipeline that is made from a plan: the plan decides, and nothing beside it may."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drumline.core.errors import UsageError, counted
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import Planned

_DECIDED = ("schedule", "num_microbatches", "stages_per_rank", "balance", "cuts")


def planned(given: Mapping[str, Any]) -> Plan | None:
    """Return the plan that a pipeline was given, refusing what it decides itself.

    >>> planned({"plan": "plan.json", "schedule": "gpipe"})
    Traceback (most recent call last):
    drumline.core.errors.UsageError: schedule is 'gpipe' beside a plan; expected one of the two: ...
    """
    plan = given.get("plan")
    if plan is None:
        return None
    beside = [name for name in _DECIDED if given.get(name) is not None]
    if given.get("checkpoint", "none") != "none":
        beside.append("checkpoint")
    for name in beside:
        raise UsageError(
            f"{name} is {given[name]!r:.60} beside a plan",
            expected="one of the two: a plan decides schedule, microbatches, cut and checkpointing",
            fix=f"leave {name} out, or plan again",
        )
    if isinstance(plan, str | Path):
        plan = Plan.load(plan)
    found = plan.best if isinstance(plan, Planned) else plan
    if not isinstance(found, Plan):
        raise UsageError(f"plan is {plan!r:.60}", expected="a Plan, or the file of one")
    asked = given.get("num_ranks")
    if asked not in (None, found.num_ranks):
        raise UsageError(f"num_ranks is {asked!r}", expected=f"{counted(found.num_ranks, 'rank')}, as planned")
    return found
