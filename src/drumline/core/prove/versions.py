"""Weight versions and gradient buffers of programs that take optimizer steps without a flush.

    0F0 0F1 0B0 0UPDATE0 0F2 0B1 0UPDATE1 0B2 ...
     └─ version 0 ─┘      └ version 1      1B1 still needs version 0: two versions are held

A forward sees the newest version of its stage, that is all UPDATEs before it in its row, and its backward sees the
same one: a version stays in memory while a pair still needs it. UPDATE m takes the gradients of the microbatches up
to m that no earlier UPDATE took; gradients of later ones accumulate apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from drumline.core import rules
from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.columns import Columns
from drumline.core.simulate.graph import CODE, OPS, Floats, Ints

_FORWARD, _UPDATE = CODE[Op.FORWARD], CODE[Op.UPDATE]
_RELEASES = np.array([op in rules.RELEASES for op in OPS])


@dataclass(frozen=True, slots=True)
class Versions:
    """What versions and second gradient buffers add, while each timed action runs and after it; the most versions."""

    bytes: Sequence[tuple[float, float]]
    peak: int


def versions(program: Program, costs: Costs) -> list[Versions] | None:
    """Return what every rank's weight versions cost beyond the first; None where the program takes no steps itself.

    >>> program = Program.parse("0F0,0F1,0B0,0UPDATE0,0F2,0B1,0UPDATE1,0B2,0UPDATE2")
    >>> versions(program, Costs(weight_bytes=10))[0].peak
    2
    """
    if not program.num_updates:
        return None
    weight, gradient = (costs.per_stage(f"{what}_bytes", program.num_stages) for what in ("weight", "gradient"))
    return [_of_row(row, weight, gradient) for row in _rows(program.timed_columns)]


@dataclass(frozen=True, slots=True)
class _Row:
    """Timed plain actions of one rank, by their position among the timed ones."""

    stage: Ints
    code: Ints
    microbatch: Ints
    position: Ints

    def of_stage(self, stage: int) -> _Row:
        here = self.stage == stage
        return _Row(self.stage[here], self.code[here], self.microbatch[here], self.position[here])


def _rows(columns: Columns) -> Iterator[_Row]:
    bounds = np.searchsorted(columns.rank, np.arange(1, columns.num_ranks))
    wanted = (columns.stage, columns.code, columns.microbatch, columns.position)
    for parts in zip(*(np.split(column, bounds) for column in wanted), strict=True):
        yield _Row(*parts)


def _of_row(row: _Row, weight: Sequence[float], gradient: Sequence[float]) -> Versions:
    length = int(row.position.max(initial=-1)) + 1
    extra, peak = np.zeros((length, 2)), 1
    for stage in np.unique(row.stage).tolist():
        own = row.of_stage(stage)
        old, buffers = _old_versions(own, length), _gradient_buffers(own, length)
        extra += weight[stage] * old + gradient[stage] * np.maximum(buffers - 1, 0)
        peak = max(peak, 1 + int(old[:, 0].max(initial=0)))
    return Versions(list(zip(extra[:, 0].tolist(), extra[:, 1].tolist(), strict=True)), peak)


def _old_versions(row: _Row, length: int) -> Floats:
    """Count one stage's versions that an UPDATE has replaced and a pair still needs: from that UPDATE's end on."""
    updated = row.position[row.code == _UPDATE]
    forward, release = row.code == _FORWARD, _RELEASES[row.code]
    seen = np.zeros(int(row.microbatch.max(initial=0)) + 1, dtype=np.int64)
    seen[row.microbatch[forward]] = np.searchsorted(updated, row.position[forward])
    last_needed = np.full(len(updated) + 1, -1)
    np.maximum.at(last_needed, seen[row.microbatch[release]], row.position[release])
    outlives = last_needed[:-1] > updated
    return _counted(2 * updated[outlives] + 1, 2 * last_needed[:-1][outlives] + 1, length)


def _gradient_buffers(row: _Row, length: int) -> Floats:
    """Count one stage's steps that accumulate: from the start of their first gradient to the end of their UPDATE."""
    updates, release = row.code == _UPDATE, _RELEASES[row.code]
    updated = row.position[updates]
    step = np.searchsorted(row.microbatch[updates], row.microbatch[release])
    first = np.full(len(updated) + 1, length)
    np.minimum.at(first, step, row.position[release])
    begun = first[:-1] < updated
    return _counted(2 * first[:-1][begun], 2 * updated[begun] + 1, length)


def _counted(begins: Ints, ends: Ints, length: int) -> Floats:
    """Return how many intervals are open while each action runs and after it; moments 2i and 2i + 1 are action i's."""
    change = np.bincount(begins, minlength=2 * length) - np.bincount(ends, minlength=2 * length)
    return np.cumsum(change).reshape(length, 2).astype(float)
