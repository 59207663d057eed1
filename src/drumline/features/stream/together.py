"""What does not go with a schedule without a flush."""

from __future__ import annotations

from typing import TypeGuard

from drumline.core.errors import ProgramError, RunError
from drumline.core.settings.clash import Clash, Facts, Given, called, given
from drumline.engine.together import AFTER, BEFORE, NAMED_PROGRAM, NO_FLUSH
from drumline.schedules import find, schedules

_FLUSHED, _WITH_A_FLUSH = "a flushed schedule", ("schedule", "1f1b")


def is_named(schedule: object) -> TypeGuard[str]:
    """Whether a schedule is given by its name."""
    return isinstance(schedule, str) and schedule in schedules()


def is_synchronous(schedule: str, *, vertical_sync: bool) -> bool:
    """Whether an update comes at the same place in the rows of all ranks.

    >>> is_synchronous("pipedream", vertical_sync=False), is_synchronous("pipedream-2bw", vertical_sync=False)
    (False, True)
    """
    return vertical_sync or "vertical_sync" not in find(schedule).options


def _updates_apart(facts: Facts) -> bool:
    schedule = facts.get("schedule")
    return (
        facts.get("flushed") is False
        and is_named(schedule)
        and not is_synchronous(schedule, vertical_sync=facts["vertical_sync"])
    )


_UNNAMED = Given(
    "schedule",
    "a program from a file",
    lambda facts: not is_named(facts.get("schedule")),
    "the schedule is given as a program",
)
_APART = Given(
    "schedule",
    "`pipedream` without `vertical_sync`",
    _updates_apart,
    "{program_name} makes an update at different times on different ranks",
)
_SEVERAL_STEPS = Given("share", "several steps for one update", lambda facts: facts.get("share", 1) != 1)
_OPTIONS = {
    "capture": "CUDA graphs are of whole steps",
    "compile": "compiled code may keep weights of its own for the backward",
    "programs": "its rows go on for ever, by one program",
    "arrange": "the order of microbatches goes on from step to step",
    "adapt": "programs and cuts change where no microbatch is in flight",
}
CLASHES = (
    *(Clash(given(name), NO_FLUSH, _FLUSHED, why, _WITH_A_FLUSH) for name, why in _OPTIONS.items()),
    Clash(
        Given("mesh", "a `mesh`", given("mesh").holds, "the mesh is {mesh_name}"),
        NO_FLUSH,
        _FLUSHED,
        "an update takes what one line has",
        _WITH_A_FLUSH,
    ),
    Clash(
        given("precision", "fp16"),
        NO_FLUSH,
        '"fp32" or "bf16"',
        "all ranks would have to agree on a loss scale before every update",
        ("precision", "bf16"),
    ),
    Clash(_SEVERAL_STEPS, NO_FLUSH, "1", "every step makes its own updates"),
    Clash(
        _UNNAMED,
        NO_FLUSH,
        "the name of its schedule",
        "its rows go on for ever",
        fix="pass schedule='{program_name}'",
        kind=ProgramError,
    ),
    Clash(AFTER, NO_FLUSH, _FLUSHED, "others update inside of a step", BEFORE),
    Clash(
        given("max_norm"),
        _APART,
        "an update at the same place in all rows",
        "there ranks can add up their norms",
        ("vertical_sync", True),
    ),
    Clash(
        called("clip_grad_norm_"),
        NO_FLUSH,
        "no call of it",
        "the gradients of all ranks are never there at once",
        fix="pass max_norm= to pipe.optimizer",
        kind=RunError,
    ),
    Clash(NAMED_PROGRAM, NO_FLUSH, "one schedule in all steps", "its rows go on for ever"),
    Clash(called("take_program"), NO_FLUSH, "two flushed schedules", "between their steps no microbatch is in flight"),
)
