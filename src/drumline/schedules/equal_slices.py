"""What formulas say of slices: those of a schedule for as many short microbatches, if all slices take the same time."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.schedules.formulas import Pace, Paces
from drumline.schedules.registry import schedules


def equal_slices_seconds(program: Program, costs: Costs) -> float | None:
    """Return the makespan of a schedule in slices if all of them took the same time; None if no formula says it.

    >>> from drumline.schedules import generate
    >>> program = generate("1f1b", num_ranks=4, num_microbatches=4, slices=4)
    >>> equal_slices_seconds(program, Costs(attention=0.5)), equal_slices_seconds(program, Costs(comm=1))
    (14.25, None)
    """
    schedule = schedules().get(program.name.removesuffix(f" in {program.num_slices} slices"))
    if program.num_slices == 1 or schedule is None or not schedule.formula_in_slices:
        return None
    stages_per_rank, rest = divmod(program.num_stages, program.num_ranks)
    counts = program.num_ranks, program.num_units, stages_per_rank
    late = program.num_units - program.num_slices < program.num_ranks - 1  # W of no earlier microbatch fills the end
    fields = (costs.forward, costs.backward_input, costs.backward_weight, costs.microbatch_factor)
    if rest or schedule.makespan is None or any(isinstance(value, Sequence) for value in fields):
        return None
    if schedule.makespan_holds is not None and not schedule.makespan_holds(*counts):
        return None
    if (schedule.splits_backward and late) or program.num_units < program.num_ranks:
        return None
    if costs.comm or costs.edges or costs.has_finite_links or costs.recompute or costs.backward is not None:
        return None
    part = stages_per_rank / program.num_slices
    forward, first, second, factor = (float(value) for value in fields if not isinstance(value, Sequence))
    pace = Pace(program.num_ranks, *(seconds * factor * part for seconds in (forward, first, second)))
    return schedule.makespan(Paces([pace], program.num_units, stages_per_rank))
