"""What does not go with a schedule without a flush."""

from __future__ import annotations

from typing import TypeGuard

from drumline.core.errors import ProgramError, RunError
from drumline.core.settings.clash import Clash, Facts, Given, call, fact
from drumline.engine.together import AFTER, NAMED_PROGRAM, NO_FLUSH
from drumline.schedules import find, schedules


def is_named(schedule: object) -> TypeGuard[str]:
    """Whether a schedule is given by its name."""
    return isinstance(schedule, str) and schedule in schedules()


def is_synchronous(schedule: str, *, vertical_sync: bool) -> bool:
    """Whether an update comes at the same place in the rows of all ranks.

    >>> is_synchronous("pipedream", vertical_sync=False), is_synchronous("pipedream-2bw", vertical_sync=False)
    (False, True)
    """
    return vertical_sync or "vertical_sync" not in find(schedule).options


def _is_apart(facts: Facts) -> bool:
    schedule, sync = facts.get("schedule"), facts.get("vertical_sync", False)
    return NO_FLUSH.holds(facts) and is_named(schedule) and not is_synchronous(schedule, vertical_sync=sync)


_ANY_MESH = Given("mesh", "a `mesh`", fact("mesh").holds, "the mesh is {mesh_name}")
_SEVERAL_STEPS = Given("share", "several steps for one update", lambda facts: facts.get("share", 1) != 1)
_FROM_A_FILE = Given("schedule", "a program from a file", lambda facts: not is_named(facts.get("schedule")),
                     "the schedule is given as a program")  # fmt: skip
_APART = Given("schedule", "`pipedream` without `vertical_sync`", _is_apart,
               "{program_name} makes an update at different times on different ranks")  # fmt: skip
_NEEDS_A_FLUSH = {
    fact("capture"): "a CUDA graph holds a whole step",
    fact("compile"): "compiled code may keep its own weights for the backward",
    fact("programs"): "its rows never end and follow one program",
    NAMED_PROGRAM: "its rows never end and follow one program",
    call("take_program"): "programs can change only if no microbatch is in flight",
    fact("adapt"): "programs and cuts can change only if no microbatch is in flight",
    fact("arrange"): "the order of microbatches continues from step to step",
    _ANY_MESH: "an update uses the gradients of one line only",
    _SEVERAL_STEPS: "every step makes its own updates",
    fact("precision", "fp16"): "all ranks would have to agree on a loss scale before every update",
    AFTER: "updates are made inside of a step",
}
CLASHES = (
    *(Clash(needs, NO_FLUSH, "a flushed schedule", why, ("schedule", "1f1b")) for needs, why in _NEEDS_A_FLUSH.items()),
    Clash(_FROM_A_FILE, NO_FLUSH, "the name of its schedule", "rows of a file end",
          fix="pass schedule='{program_name}'", kind=ProgramError),
    Clash(fact("max_norm"), _APART, "updates at the same place in all rows",
          "ranks can add up their norms only where all of them update", ("vertical_sync", True)),
    Clash(call("clip_grad_norm_"), NO_FLUSH, "no call of it", "the gradients of all ranks never exist at the same time",
          fix="pass max_norm= to pipe.optimizer", kind=RunError),
)  # fmt: skip
