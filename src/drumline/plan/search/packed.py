"""An instance as the kernel reads it: counts and the addresses of arrays, eight bytes each (rows.h, construct.c).

Every rank's row has room for its actions all split, from its offset on:

    rows      0F0 0I0 0W0 0F1 0B1  -  | 1F0 1B0  -  1F1 1B1  -        offsets  0 6 12        lengths  5 4
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from drumline.core.graph import Ints, Messages
from drumline.core.kernel.library import pointer
from drumline.plan.search.bounds.instance import Instance, Rows

Entry = npt.NDArray[np.int64] | npt.NDArray[np.float64] | int | None

OBJECTIVES = ("makespan", "span", "steady")


class PackedInstance:
    """The entries of one instance, for one objective; `at_end` are seconds that follow each rank's last action.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> packed = PackedInstance(Instance(Costs(), Placement.linear(2), num_microbatches=1))
    >>> flat, lengths = packed.flat([[0, 3], [4, 7]])
    >>> flat.tolist(), lengths.tolist(), packed.rows(flat, lengths)
    ([0, 3, 0, 4, 7, 0], [2, 2], [[0, 3], [4, 7]])
    """

    def __init__(self, instance: Instance, objective: str = "makespan", at_end: Sequence[float] = ()) -> None:
        self.instance = instance
        room = 3 * np.bincount(instance.homes.ravel(), minlength=instance.num_ranks)
        self.offsets = np.concatenate(([0], np.cumsum(room)))
        resources = instance.resources
        in_order = len(set(instance.costs.factors(instance.num_microbatches))) == 1
        self._entries: list[Entry] = [
            instance.num_ranks,
            instance.num_actions,
            len(resources),
            4 * instance.num_microbatches,
            int(in_order),
            OBJECTIVES.index(objective),
            _flat(instance.homes),
            _flat(instance.needs),
            _flat(instance.links) if instance.messages is Messages.LINKS else None,
            _flat(instance.times),
            _flat(instance.transfers),
            _flat(instance.latencies - instance.transfers)
            if instance.messages is Messages.LINKS
            else _flat(instance.latencies),
            _flat(instance.latencies),
            np.array([resource.during for resource in resources], dtype=np.float64),
            np.array([resource.after for resource in resources], dtype=np.float64),
            np.array([resource.always for resource in resources], dtype=np.float64),
            np.array([resource.most for resource in resources], dtype=np.float64),
            np.array(list(at_end) or [0.0] * instance.num_ranks, dtype=np.float64),
            self.offsets,
        ]
        self._record = record(*self._entries)
        self.address = pointer(self._record)

    def flat(self, rows: Rows) -> tuple[Ints, Ints]:
        """Return the rows in their places, and their lengths."""
        flat, lengths = np.zeros(int(self.offsets[-1]), dtype=np.int64), [len(row) for row in rows]
        for row, offset, length in zip(rows, self.offsets.tolist(), lengths, strict=False):
            flat[offset : offset + length] = row
        return flat, np.array(lengths)

    def rows(self, flat: Ints, lengths: Ints) -> Rows:
        """Return the rows as plain numbers."""
        bounds = zip(self.offsets.tolist(), lengths.tolist(), strict=False)
        return [flat[offset : offset + length].tolist() for offset, length in bounds]


def record(*entries: Entry) -> Ints:
    """Return numbers, and the addresses of arrays; the arrays must outlive the record.

    >>> record(3, None).tolist()
    [3, 0]
    """
    return np.array([each if isinstance(each, int) else pointer(each) or 0 for each in entries], dtype=np.int64)


def _flat(table: Any) -> Any:
    return np.ascontiguousarray(table).ravel()
