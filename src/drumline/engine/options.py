"""Options of a pipeline and of what attaches to it: each knows which values it accepts, and how errors describe these.

A feature's options are a dataclass in its own folder; `Pipeline` takes those of all features that are attached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from drumline.core.errors import UsageError
from drumline.core.settings.rule import Rule


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, and no truth value.

    >>> is_whole(3), is_whole(True)
    (True, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


SWITCH = Rule("True or False", lambda value: isinstance(value, bool))
_SOMETHING = object()
COUNT = Rule("an integer of at least 1", lambda value: is_whole(value) and value >= 1)


def option(default: Any, rule: Rule, *, alike: bool = False) -> Any:
    """Return a dataclass field with a default that accepts certain values; all ranks the same one if `alike`.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Greeting(FeatureOptions):
    ...     times: int = option(1, COUNT)
    >>> Greeting(times=0).check_values()
    Traceback (most recent call last):
    drumline.core.errors.UsageError: times is 0; expected an integer of at least 1
    """
    return field(default=default, metadata={"rule": rule, "alike": alike})


def _known(value: Any) -> Any:
    """Return a plain value; instead of another, something that keeps nothing alive.

    >>> _known("1f1b"), _known({}), _known({"long": 2}) is _SOMETHING
    ('1f1b', None, True)
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return None if isinstance(value, Mapping) and not value else _SOMETHING


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """The options of a feature."""

    def alike(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, by name."""
        names = sorted(entry.name for entry in fields(self) if entry.metadata.get("alike"))
        return {name: getattr(self, name) for name in names}

    def check_values(self) -> None:
        """Refuse values of the wrong type or range, by name."""
        for entry in fields(self):
            rule: Rule | None = entry.metadata.get("rule")
            if rule is not None and not rule.holds(value := getattr(self, entry.name)):
                raise UsageError(f"{entry.name} is {value!r:.80}", expected=rule.expected)

    def refuse_model(self, model: Any) -> None:
        """Refuse a model with which these values cannot run; each feature says its own."""

    def facts(self) -> dict[str, Any]:
        """Return what is known of the options, by name: plain values, of others whether they are given.

        Whoever keeps them keeps no model alive. A plan is not among them, but what it decides.
        """
        return {entry.name: _known(getattr(self, entry.name)) for entry in fields(self) if entry.name != "plan"}

    # ---- what is asked before ranks connect --------------------------------------------------------------------------

    @property
    def lines(self) -> Any:
        """How ranks form several lines, as the user says it; None for one line."""
        return None

    def first_schedule(self, schedule: Any, stages_per_rank: int | None) -> Any:
        """Return the schedule with which to begin, where the user leaves that open."""
        return schedule

    def leaves_placement(self, schedule: Any) -> bool:
        """Whether the set-up may choose how many stages a rank holds."""
        return False

    def schedule_settings(self) -> dict[str, Any]:
        """Return further arguments of `program_for`."""
        return {}
