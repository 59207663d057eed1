"""Time many programs under one set of costs: those of plain rows in one call of the kernel.

    program  ─► arrays ─┐
    program  ─► arrays ─┼─► what each action needs ─► seconds ─► clock ─► last end, one program after the other
    program  ─► arrays ─┘

A search that tries small programs spends most of its time between calls. Programs with messages of their own,
overlapped pairs, slices or updates are simulated one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from drumline.core import rules
from drumline.core.clock.producers import COMPLETE, listed_needs
from drumline.core.costs import Costs
from drumline.core.graph import PLACE, Floats, Ints, Messages, Number
from drumline.core.kernel.library import Kernel, kernel, pointer
from drumline.core.program import Program
from drumline.core.rules import Backward
from drumline.core.simulate.durations import COMPUTES, stage_table


def makespans_of(programs: Sequence[Program], costs: Costs, alone: Callable[[Program], float]) -> Floats:
    """Return the makespan of every program under the same costs; `alone` simulates one that is not plain."""
    seconds = np.full(len(programs), -1.0)
    library = kernel()
    if library is not None and Messages.of(costs) is Messages.LATENCY and not costs.edges:
        chosen = [at for at, program in enumerate(programs) if _is_plain(program)]
        seconds[chosen] = _by_kernel(library, [programs[at] for at in chosen], costs)
    for at in np.flatnonzero(seconds < 0).tolist():
        seconds[at] = alone(programs[at])
    return seconds


def _is_plain(program: Program) -> bool:
    """Whether a program's actions may be its nodes; the kernel sees whether they only compute."""
    columns = program.columns
    every = columns.code, columns.stage, columns.microbatch, columns.rank, columns.cell
    pairs = program.num_stages * program.num_microbatches
    return (
        program.num_slices == 1
        and all(columns.lengths)
        and not columns.paired.any()
        and len(columns.code) >= pairs
        and all(column.dtype == Number and column.flags.c_contiguous for column in every)
    )


def _by_kernel(library: Kernel, programs: Sequence[Program], costs: Costs) -> Floats:
    """Return the makespans of plain programs; below 0 where the kernel leaves it to others."""
    tables: dict[int, Floats] = {}
    factors: dict[int, Floats] = {}
    all_bounds: list[Ints] = []
    numbers: list[int | None] = []
    for program in programs:
        costs.check_counts(program.num_stages, program.num_microbatches)
        columns, stages, microbatches = program.columns, program.num_stages, program.num_microbatches
        last = np.cumsum(columns.lengths, dtype=np.int64)
        bounds = np.stack((last - np.array(columns.lengths, dtype=np.int64), last), axis=1)
        if stages not in tables:
            tables[stages] = stage_table(costs, stages)
        if costs.microbatch_factor != 1.0 and microbatches not in factors:
            factors[microbatches] = np.array(costs.factors(microbatches))
        every = (columns.code, columns.stage, columns.microbatch, columns.rank, columns.cell, bounds, tables[stages])
        all_bounds.append(bounds)
        numbers += (len(columns.code), len(columns.lengths), stages, microbatches, *map(pointer, every))
        numbers.append(pointer(factors.get(microbatches)))
    records = np.array([number or 0 for number in numbers], dtype=np.int64)
    complete, needs, seconds = COMPLETE[Backward.WHOLE], listed_needs(), np.empty(len(programs))
    known = pointer(PLACE), len(rules.NEEDS), pointer(complete), pointer(needs), pointer(COMPUTES)
    if library.many(len(programs), records, np.array(known, dtype=np.int64), costs.comm, seconds):
        raise MemoryError(f"no memory to time {len(programs)} programs")
    return seconds
