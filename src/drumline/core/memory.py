"""What a rank holds, action by action.

A (stage, microbatch) pair is held from the start of its F to the end of its B (or W, if split). In an overlapped pair F
counts before B. A frozen stage releases the pair earlier: after I if I is its whole backward, after F if it has none.
All of this follows from the rows alone, whatever the times.

In slices, a pair of a stage and a slice is held like that. From the first backward of a microbatch to its last, the
stage also holds gradients of its keys and values: each slice adds to those of the slices before it.

    0F0.0 0F0.1 0F0.2 0B0.2 0B0.1 0B0.0
                      └─ gradients ──┘

Programs that take optimizer steps without a flush also hold weight versions and gradient buffers.

    0F0 0F1 0B0 0UPDATE0 0F2 0B1 0UPDATE1 0B2 ...
     └─ version 0 ─┘      └ version 1      1B1 still needs version 0: two versions are held

A forward uses the newest version of its stage, after all UPDATEs before it in its row. Its backward uses the same
version. So a version stays in memory while a pair still needs it. UPDATE m uses the gradients of the microbatches up to
m that no earlier UPDATE used; gradients of later ones accumulate separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.graph import CODE, OPS, Floats, Ints, Number
from drumline.core.kernel.library import kernel
from drumline.core.program import Program, once_per_program
from drumline.core.rules import Backward


@dataclass(frozen=True, eq=False)
class Holding:
    """One rank's memory: pairs and bytes while each timed action runs, and after it; a row of two for each.

    Bytes are None if unknown. They include the stash, `static_bytes` (weights, gradients, optimizer), and the memory of
    further weight versions and gradient buffers.
    """

    pair_counts: Ints
    byte_counts: Floats | None
    static_bytes: float
    peak_versions: int
    peak_stash_bytes: float | None

    @cached_property
    def pairs(self) -> list[tuple[int, int]]:
        """The pairs as plain numbers."""
        return list(zip(*self.pair_counts.T.tolist(), strict=True))

    @cached_property
    def bytes(self) -> list[tuple[float, float]] | None:
        """The bytes as plain numbers."""
        return None if self.byte_counts is None else list(zip(*self.byte_counts.T.tolist(), strict=True))

    @property
    def peak_pairs(self) -> int:
        """The most pairs held at once."""
        return int(self.pair_counts[:, 0].max(initial=0))

    @property
    def peak_bytes(self) -> float | None:
        """The most bytes held at once, or None if unknown."""
        if self.byte_counts is None:
            return None
        return float(self.byte_counts[:, 0].max()) if len(self.byte_counts) else self.static_bytes


def holdings(program: Program, costs: Costs) -> tuple[Holding, ...]:
    r"""Return what every rank holds.

    >>> [holding.peak_pairs for holding in holdings(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"), Costs())]
    [2, 1]
    """
    counted = _counted(program)
    costs.check_counts(program.num_stages, program.num_microbatches, program.num_slices)
    if not costs.knows_bytes:
        return counted
    sizes, extra = Sizes.of(program, costs), versions(program, costs)
    columns = program.timed_columns
    stages: list[list[int]] = [[] for _ in range(columns.num_ranks)]
    for place in np.unique(columns.rank.astype(np.int64) * program.num_stages + columns.stage).tolist():
        rank, stage = divmod(place, program.num_stages)
        stages[rank].append(stage)
    found_holdings = []
    for rank, (stash, plain) in enumerate(zip(stashes(program, costs), counted, strict=True)):
        static = sum(sizes.static[stage] for stage in stages[rank])
        total = static + stash + (0.0 if extra is None else extra[rank].bytes)
        peak_stash = float(stash[:, 0].max(initial=0.0))
        found_holdings.append(Holding(plain.pair_counts, total, static, plain.peak_versions, peak_stash))
    return tuple(found_holdings)


def stashes(program: Program, costs: Costs) -> list[Floats]:
    r"""Return the activation bytes of every rank while each timed action runs, and after it, with slices' gradients.

    >>> program = Program.parse("0F0.0,0F0.1,0B0.1,0B0.0")
    >>> stashes(program, Costs(activation_bytes=4, key_value_bytes=1))[0].tolist()
    [[2.0, 2.0], [4.0, 4.0], [5.0, 3.0], [3.0, 0.0]]
    """
    each = np.split(_stash(program, Sizes.of(program, costs)), np.cumsum(program.timed_columns.lengths)[:-1])
    return _with_gradients(program, costs, each)


def _with_gradients(program: Program, costs: Costs, rows: list[Floats]) -> list[Floats]:
    """Return the stashes with the gradients of keys and values that slices add up, rank by rank."""
    if program.num_slices == 1 or costs.key_value_bytes == 0.0:
        return rows
    columns, each = program.timed_columns, costs.per_stage("key_value_bytes", program.num_stages)
    factor = np.array(costs.factors(program.num_microbatches))
    position, (microbatch, number) = columns.position, np.divmod(columns.microbatch, program.num_slices)
    back = np.isin(columns.code, [CODE[Op.BACKWARD], CODE[Op.BACKWARD_INPUT]])
    rows = [stash.copy() for stash in rows]
    for (rank, stage), at in columns.by_stage(np.flatnonzero(back)):
        begins, ends = at[number[at] == program.num_slices - 1], at[number[at] == 0]
        bounds = 2 * position[begins], 2 * position[ends] + 1, columns.lengths[rank]
        rows[rank] += each[stage] * _open_meanwhile(*bounds, factor[microbatch[begins]], factor[microbatch[ends]])
    return rows


def _stash(program: Program, sizes: Sizes) -> Floats:
    """Return the activation bytes held while each timed action runs, and after it: a row of two for each, all ranks."""
    columns, library = program.timed_columns, kernel()
    stash = np.zeros((sum(columns.lengths), 2))
    if library is None:
        rows = [sizes.stash(timed) for timed in program.timed_rows]
        return np.array(list(chain.from_iterable(rows))).reshape(-1, 2)
    changes = np.zeros((2, len(OPS), program.num_stages))
    for (op, stage), change in sizes.change.items():
        changes[:, CODE[op], stage] = change
    numbers = columns.rank, columns.cell, columns.code, columns.stage, columns.microbatch
    library.stash(len(columns.code), *numbers, program.num_stages, *changes, np.array(sizes.factors), stash)
    return stash


def weighed_holdings(program: Program, weighed: Sequence[Sequence[tuple[int, int]]]) -> tuple[Holding, ...]:
    r"""Return what every rank holds, with the bytes that were measured during and after each timed action.

    >>> program = Program.parse("0F0,0B0")
    >>> [holding.peak_bytes for holding in weighed_holdings(program, [[(16, 16), (80, 0)]])]
    [80.0]
    """
    found_holdings = []
    for plain, each in zip(holdings(program, Costs()), weighed, strict=True):
        sizes = np.array([tuple(pair) for pair in each], dtype=np.float64).reshape(-1, 2)
        peak = float(sizes[:, 0].max(initial=0.0))
        found_holdings.append(Holding(plain.pair_counts, sizes, 0.0, plain.peak_versions, peak))
    return tuple(found_holdings)


def stage_bytes(program: Program, weighed: Sequence[Sequence[tuple[int, int]]]) -> dict[str, Any]:
    r"""Return what a microbatch holds in every stage, as fields of `Costs`: medians of the measured bytes.

    A stage runs its forward again if its backward holds more than before and after it.

    >>> stage_bytes(Program.parse("0F0,0B0"), [[(16, 16), (80, 0)]])
    {'activation_bytes': [80.0], 'held_until_weight_bytes': [80.0], 'recompute': [True], 'checkpoint_bytes': [16.0]}
    """
    changes: dict[tuple[int, Op], list[int]] = {}
    recomputed: dict[int, list[int]] = {}
    for row, sizes in zip(program.timed_rows, weighed, strict=True):
        before = 0
        for action, (during, after) in zip(row, sizes, strict=True):
            changes.setdefault((action.stage, action.op), []).append(after - before)
            if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT):
                more = during - before if during > max(before, after) else 0
                recomputed.setdefault(action.stage, []).append(more)
            before = after
    stages = range(program.num_stages)
    whole = program.num_slices
    kept_bytes = [float(median(changes[stage, Op.FORWARD])) * whole for stage in stages]
    again = [float(median(recomputed.get(stage, [0]))) * whole for stage in stages]
    # If I never ran, nothing is known to be freed before W.
    freed = [
        float(median(changes[stage, Op.BACKWARD_INPUT])) * whole
        if (stage, Op.BACKWARD_INPUT) in changes
        else again[stage]
        for stage in stages
    ]
    return {
        "activation_bytes": [first + more for first, more in zip(kept_bytes, again, strict=True)],
        "held_until_weight_bytes": [first + change for first, change in zip(kept_bytes, freed, strict=True)],
        "recompute": [more > 0 for more in again],
        "checkpoint_bytes": kept_bytes,
    }


@once_per_program
def _counted(program: Program) -> tuple[Holding, ...]:
    """Return pairs and versions, which follow from the rows alone."""
    extra = versions(program, Costs())
    peaks = [1] * program.num_ranks if extra is None else [rank.peak for rank in extra]
    return tuple(Holding(pairs, None, 0.0, peak, None) for pairs, peak in zip(_pairs(program), peaks, strict=True))


def _pairs(program: Program) -> Iterator[Ints]:
    """Yield, rank by rank, the pairs held while each timed action runs, and after it: a row of two for each."""
    columns, library = program.timed_columns, kernel()
    bounds, releasing = np.cumsum(columns.lengths)[:-1], _releasing(program)
    if library is not None:
        pairs = np.zeros((sum(columns.lengths), 2), dtype=Number)
        numbers = columns.rank, columns.cell, columns.code, columns.stage
        library.pairs(len(columns.code), *numbers, program.num_stages, _BEGINS, releasing.astype(np.uint8), pairs)
        yield from np.split(pairs, bounds)
        return
    begun = np.where(columns.code == CODE[Op.FORWARD], 1, 0)
    ended = -releasing[columns.code, columns.stage]
    first = np.flatnonzero(columns.heads)
    more, less = (np.add.reduceat(change, first) if len(first) else first for change in (begun, ended))
    for begins, ends in zip(np.split(more, bounds), np.split(less, bounds), strict=True):
        after = np.cumsum(begins + ends)
        yield np.stack((after - ends, after), axis=1).astype(Number)


def _releasing(program: Program) -> Ints:
    """Return 1 for each (op, stage) that releases a pair when it ends."""
    table = np.zeros((len(OPS), program.num_stages), dtype=np.int64)
    table[[CODE[op] for op in rules.RELEASES]] = 1
    table[CODE[Op.FORWARD]] = [kind is Backward.NONE for kind in program.backwards]
    table[CODE[Op.BACKWARD_INPUT]] = [kind is Backward.INPUT for kind in program.backwards]
    return table


class Sizes(NamedTuple):
    """Bytes per stage: `change` is what each (op, stage) adds when it starts and when it ends, at a factor of 1."""

    change: dict[tuple[Op, int], tuple[float, float]]
    static: list[float]
    factors: tuple[float, ...]

    @staticmethod
    def of(program: Program, costs: Costs) -> Sizes:
        """Apply the costs to the stages of a program."""
        stages = program.num_stages
        full = costs.per_stage("activation_bytes", stages)
        until_weight = full
        if costs.held_until_weight_bytes is not None:
            until_weight = costs.per_stage("held_until_weight_bytes", stages)
        recomputes, checkpoint = costs.recomputes(stages), costs.per_stage("checkpoint_bytes", stages)
        # Later slices need keys and values.
        beside = costs.per_stage("key_value_bytes", stages) if program.num_slices > 1 else (0.0,) * stages
        change: dict[tuple[Op, int], tuple[float, float]] = {}
        for stage, kind in enumerate(program.backwards):
            kept_bytes = checkpoint[stage] + beside[stage] if recomputes[stage] else full[stage]
            again = full[stage] - kept_bytes
            change[Op.FORWARD, stage] = (kept_bytes, -kept_bytes if kind is Backward.NONE else 0.0)
            change[Op.BACKWARD, stage] = (again, -full[stage])
            more = max(until_weight[stage] - full[stage], 0.0)  # gradients that I makes for W, beyond what I frees
            change[Op.BACKWARD_INPUT, stage] = (again + more, until_weight[stage] - full[stage] - more)
            if kind is Backward.INPUT:
                change[Op.BACKWARD_INPUT, stage] = (again, -full[stage])
            change[Op.BACKWARD_WEIGHT, stage] = (0.0, -until_weight[stage])
        parameters = (costs.per_stage(f"{what}_bytes", stages) for what in ("weight", "gradient", "optimizer"))
        static = [
            weight + (gradient + optimizer if kind is Backward.WHOLE else 0.0)
            for kind, weight, gradient, optimizer in zip(program.backwards, *parameters, strict=True)
        ]
        return Sizes(change, static, costs.byte_factors(program.num_units, program.num_slices))

    def stash(self, timed: Sequence[Action]) -> list[tuple[float, float]]:
        """Return the activation bytes held while each action runs, and after it."""
        held_stash: list[tuple[float, float]] = []
        size = 0.0
        for action in timed:
            during = size
            for stage, op, microbatch, _ in action.parts or (action,):
                more, less = self.change.get((op, stage), (0.0, 0.0))
                factor = 1.0 if microbatch is None else self.factors[microbatch]
                during += more * factor
                size += (more + less) * factor
            held_stash.append((during, size))
        return held_stash


_FORWARD, _UPDATE = CODE[Op.FORWARD], CODE[Op.UPDATE]
_BEGINS = np.array([op is Op.FORWARD for op in OPS], dtype=np.uint8)
_RELEASES = np.array([op in rules.RELEASES for op in OPS])


class VersionMemory(NamedTuple):
    """What versions and second gradient buffers add, during and after each timed action; and the most versions."""

    bytes: Floats
    peak: int


def versions(program: Program, costs: Costs) -> list[VersionMemory] | None:
    """Return what every rank's weight versions cost beyond the first; None if the program contains no updates.

    >>> program = Program.parse("0F0,0F1,0B0,0UPDATE0,0F2,0B1,0UPDATE1,0B2,0UPDATE2")
    >>> versions(program, Costs(weight_bytes=10))[0].peak
    2
    """
    if not program.num_updates:
        return None
    weight, gradient = (costs.per_stage(f"{what}_bytes", program.num_stages) for what in ("weight", "gradient"))
    columns = program.timed_columns
    position = columns.position
    extra, peaks = [np.zeros((length, 2)) for length in columns.lengths], [1] * columns.num_ranks
    for (rank, stage), at in columns.by_stage():
        row = columns.code[at], columns.microbatch[at], position[at], columns.lengths[rank]
        old, buffers = _old_versions(*row), _gradient_buffers(*row)
        extra[rank] += weight[stage] * old + gradient[stage] * np.maximum(buffers - 1, 0)
        peaks[rank] = max(peaks[rank], 1 + int(old[:, 0].max(initial=0)))
    return [VersionMemory(each, peak) for each, peak in zip(extra, peaks, strict=True)]


def _old_versions(code: Ints, microbatch: Ints, position: Ints, length: int) -> Floats:
    """Count a stage's versions that an UPDATE has replaced and a pair still needs, from the end of that UPDATE."""
    updated = position[code == _UPDATE]
    forward, release = code == _FORWARD, _RELEASES[code]
    num_seen = np.zeros(int(microbatch.max(initial=0)) + 1, dtype=np.int64)
    num_seen[microbatch[forward]] = np.searchsorted(updated, position[forward])
    last_needed = np.full(len(updated) + 1, -1)
    np.maximum.at(last_needed, num_seen[microbatch[release]], position[release])
    outlives = last_needed[:-1] > updated
    return _open_meanwhile(2 * updated[outlives] + 1, 2 * last_needed[:-1][outlives] + 1, length)


def _gradient_buffers(code: Ints, microbatch: Ints, position: Ints, length: int) -> Floats:
    """Count a stage's accumulating steps: from the start of their first gradient to the end of their UPDATE."""
    updates, release = code == _UPDATE, _RELEASES[code]
    updated = position[updates]
    step = np.searchsorted(microbatch[updates], microbatch[release])
    first = np.full(len(updated) + 1, length)
    np.minimum.at(first, step, position[release])
    begun = first[:-1] < updated
    return _open_meanwhile(2 * first[:-1][begun], 2 * updated[begun] + 1, length)


def _open_meanwhile(
    begins: Ints, ends: Ints, length: int, more: Floats | None = None, less: Floats | None = None
) -> Floats:
    """Return how many intervals are open while each action runs and after it; moments 2i and 2i + 1 are action i's.

    An interval counts once, or as much as `more` says where it begins and `less` where it ends.
    """
    change = np.bincount(begins, more, 2 * length) - np.bincount(ends, less, 2 * length)
    return np.cumsum(change).reshape(length, 2).astype(float)
