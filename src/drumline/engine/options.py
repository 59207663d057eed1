"""Options of a pipeline and of what attaches to it: each knows which values it accepts, and how errors describe these.

A feature's options are a dataclass in its own folder; `Pipeline` takes those of all features that are attached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

from drumline.core.errors import UsageError
from drumline.core.program import Program


class Accepted(NamedTuple):
    """The values that an option accepts, and how errors describe them."""

    is_right: Callable[[Any], bool]
    expected: str


def is_whole(value: Any) -> bool:
    """Whether a value is an integer, and no truth value.

    >>> is_whole(3), is_whole(True)
    (True, False)
    """
    return isinstance(value, int) and not isinstance(value, bool)


SWITCH = Accepted(lambda one: isinstance(one, bool), "True or False")
COUNT = Accepted(lambda one: is_whole(one) and one >= 1, "an integer of at least 1")


def option(default: Any, accepted: Accepted) -> Any:
    """Return a dataclass field with a default that accepts certain values.

    >>> @dataclass(frozen=True, kw_only=True)
    ... class Greeting(FeatureOptions):
    ...     times: int = option(1, COUNT)
    >>> Greeting(times=0).check_values()
    Traceback (most recent call last):
    drumline.core.errors.UsageError: times is 0; expected an integer of at least 1
    """
    return field(default=default, metadata={"accepted": accepted})


@dataclass(frozen=True, kw_only=True)
class FeatureOptions:
    """The options of a feature.

    `ALIKE` names those that must be the same on all ranks.
    """

    ALIKE: ClassVar[tuple[str, ...]] = ()

    def alike(self) -> dict[str, Any]:
        """Return the values that must be the same on all ranks, by name."""
        names = sorted({name for kind in type(self).__mro__ for name in kind.__dict__.get("ALIKE", ())})
        return {name: getattr(self, name) for name in names}

    def check_values(self) -> None:
        """Refuse values of the wrong type or range, by name."""
        for one in fields(self):
            accepted: Accepted | None = one.metadata.get("accepted")
            if accepted is not None and not accepted.is_right(value := getattr(self, one.name)):
                raise UsageError(f"{one.name} is {value!r:.80}", expected=accepted.expected)

    def check_together(self, others: Mapping[str, Any]) -> None:
        """Refuse values that do not go together, `others` being all options by name; each feature says its own."""

    def check_program(self, program: Program, others: Mapping[str, Any]) -> None:
        """Refuse values that do not go together with the program that ranks will run; each feature says its own."""

    # ---- what is asked before ranks connect --------------------------------------------------------------------------

    @property
    def lines(self) -> Any:
        """How ranks form several lines, as the user says it; None for one line."""
        return None

    def first_schedule(self, schedule: Any, stages_per_rank: int | None) -> Any:
        """Return the schedule with which to begin, where the user leaves that open."""
        return schedule

    def schedule_settings(self) -> dict[str, Any]:
        """Return further arguments of `program_for`."""
        return {}
