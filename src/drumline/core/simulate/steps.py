r"""Several steps of a flushed program in a row: what a step takes if ranks wait for each other before they update.

::

    before   every rank waits for the last gradient of all ranks, updates, and begins the next step
    after    every rank updates when its own gradients are done, and begins the next step (validated="after")
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.errors import ProgramError
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate

_NUM_STEPS = 4  # by then, steps follow each other alike


@dataclass(frozen=True, slots=True)
class SteadySeconds:
    """The seconds from one step to the next, with updates validated before and after they are made."""

    before: float
    after: float

    @property
    def gain(self) -> float:
        """By how many times steps are faster if no rank waits for others before it updates."""
        return self.before / self.after


def several_steps(program: Program, num_steps: int) -> Program:
    r"""Return a program that runs another so many times; each rank updates its stages at its own end of each.

    >>> print(several_steps(Program.parse("0F0,0B0\n1F0,1B0"), 2))
    0F0,0B0,0UPDATE0,0F1,0B1,0UPDATE1
    1F0,1B0,1UPDATE0,1F1,1B1,1UPDATE1
    """
    if program.num_updates:
        raise ProgramError(
            f"program {program.name!r} updates weights while it runs", expected="a flushed program, as 1f1b is"
        )
    size, plain = program.num_units, program.compute_only()
    rows = []
    for row in plain.rows:
        trained = dict.fromkeys(part.stage for action in row for part in action.work if part.op in _MAKES)
        actions: list[Action] = []
        for step in range(num_steps):
            actions += [action.later(step * size) for action in row]
            actions += [Action(stage, Op.UPDATE, (step + 1) * size - 1) for stage in sorted(trained)]
        rows.append(tuple(actions))
    return program.rearranged(rows)


def in_groups(program: Program, num_groups: int) -> Program:
    r"""Return a program for so many times its microbatches: one group after the other, and no update between them.

    A rank holds no more activations than with one group, since it begins the next only when its own part is done.

    >>> groups = in_groups(Program.parse("0F0,0B0\n1F0,1B0", name="one by one"), 2)
    >>> print(f"{groups.name}\n{groups}")
    one by one in groups of 1
    0F0,0B0,0F1,0B1
    1F0,1B0,1F1,1B1
    """
    if num_groups == 1:
        return program
    new_program = several_steps(program, num_groups).without({Op.UPDATE})
    return replace(new_program, name=f"{program.name} in groups of {program.num_microbatches}")


_MAKES = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


def step_seconds(program: Program, costs: Costs) -> SteadySeconds:
    """Return what a step takes once steps follow each other; `costs.update` is the optimizer's part of it.

    >>> from drumline.schedules import generate
    >>> program = generate("zb-h2", num_ranks=4, num_microbatches=8)
    >>> step_seconds(program, Costs(backward_input=1, backward_weight=1, update=1))
    SteadySeconds(before=28.0, after=25.0)
    """
    ends = [simulate(several_steps(program, count), costs).makespan for count in (_NUM_STEPS - 1, _NUM_STEPS)]
    alone = simulate(program.compute_only(), costs)
    simulation = simulate(several_steps(program, 1), costs)
    updates = [
        sum(end - start for action, start, end in zip(*track, strict=True) if action.op is Op.UPDATE)
        for track in ((each.actions, each.starts, each.ends) for each in simulation.tracks)
    ]
    return SteadySeconds(alone.makespan + max(updates), ends[1] - ends[0])
