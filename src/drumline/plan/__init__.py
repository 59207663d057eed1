"""Decide what to run: cuts, programs and plans. The package itself is callable: `plan` makes a plan from a profile."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Plan(ModuleType):
    """A package that can be called: `dl.plan(profile, num_ranks=2, batch=16)`."""

    def __call__(self, *args: Any, **settings: Any) -> Any:
        from drumline.plan.device.planner import plan as make

        return make(*args, **settings)


plan = sys.modules[__name__]
plan.__class__ = _Plan
