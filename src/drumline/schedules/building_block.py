"""Schedules from a building block (arXiv 2405.15362): one microbatch's slots on every rank, repeated every six.

A rank with two stages in a V does six things per microbatch: two F, two I, two W. A block assigns slots to F and I so
that no two on a rank are equal modulo six. Repeating it every six slots then never collides, and the two W take the
remaining slots. The time the block spends on a rank determines its memory: the rank holds a sixth of that many pairs at
once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from drumline.core import rules
from drumline.core.action import Action, F, I, Op, W
from drumline.core.graph import CODE, Number
from drumline.core.kernel.library import Kernel, kernel
from drumline.schedules.cells import blank

Offsets = Callable[[int], tuple[int, int, int, int]]
Key = tuple[Op, int]

_STEP = 6  # slots of a block
_CODES = np.array([CODE[op] for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)], dtype=Number)
# A local name: looking the op up on its class in every slot would take a quarter of the time.
_FORWARD = Op.FORWARD
_ORDERED = (_FORWARD, Op.BACKWARD_INPUT)


def from_block(num_ranks: int, num_microbatches: int, offsets: Offsets) -> Iterable[Iterable[Action]]:
    """Return the rows of a V-shaped program whose F and I follow the repeated block.

    `offsets(rank)` returns the slots of F going down, F going up, I of the upper stage, I of the lower one. W runs
    where the rank would idle, or where the rank would exceed the block's own peak of pairs.
    """
    library = kernel()
    if library is None:
        return _in_python(num_ranks, num_microbatches, offsets)
    slots = np.array([offsets(rank) for rank in range(num_ranks)], dtype=np.int64)
    collides = (np.diff(np.sort(slots % _STEP, axis=1), axis=1) == 0).any(axis=1)
    assert not collides.any(), f"the block collides on rank {collides.argmax()}"
    every = blank(num_ranks * _STEP * num_microbatches)
    counts = num_ranks, num_microbatches, _STEP, slots, _CODES
    refused = library.block(*counts, every.stage, every.code, every.microbatch)
    if refused == Kernel.OUT_OF_MEMORY:
        raise MemoryError(f"no memory to repeat a block on {num_ranks} ranks")
    assert not refused, "a building block's order cannot run"
    return every.rows_of(_STEP * num_microbatches)


def _in_python(num_ranks: int, num_microbatches: int, offsets: Offsets) -> list[list[Action]]:
    """Return the same rows, without a kernel."""
    order = [_repeated(rank, num_ranks, num_microbatches, offsets(rank)) for rank in range(num_ranks)]
    peak = max(map(_peak, order))
    return _fill_with_weights([list(taken.values()) for taken in order], 2 * num_ranks, peak)


def _repeated(rank: int, num_ranks: int, num_microbatches: int, slots: tuple[int, int, int, int]) -> dict[int, Action]:
    """Return the repeated block on a rank by slot, in order."""
    down, up = rank, 2 * num_ranks - 1 - rank
    taken: dict[int, Action] = {}
    for op, stage, slot in zip((F, F, I, I), (down, up, up, down), slots, strict=True):
        taken |= {slot + _STEP * m: op(stage, m) for m in range(num_microbatches)}
    assert len(taken) == 4 * num_microbatches, f"the block collides on rank {rank}"
    return dict(sorted(taken.items()))


def _peak(taken: dict[int, Action]) -> int:
    """Return the most pairs held if every W takes the first free slot after its I."""
    held_paid = peak = owed = free_from = 0
    for slot, action in taken.items():
        paid = min(owed, slot - free_from)
        held_paid -= paid
        owed -= paid
        free_from = slot + 1
        if action.op is _FORWARD:
            held_paid += 1
            peak = max(peak, held_paid)
        else:
            owed += 1
    return peak


def _fill_with_weights(order: list[list[Action]], num_stages: int, peak: int) -> list[list[Action]]:
    """Run the rows slot by slot, F and I in their order, W where nothing else can run."""
    rows: list[list[Action]] = [[] for _ in order]
    owed: list[deque[Action]] = [deque() for _ in order]
    waiting, num_held = [deque(row) for row in order], [0] * len(order)
    inputs = _inputs(num_stages)
    # A stage runs its F, and its I, in microbatch order, so their count says which are done.
    done = {(op, stage): 0 for op in _ORDERED for stage in range(num_stages)}
    while any(waiting) or any(owed):
        ran, running = False, []
        for rank, row in enumerate(waiting):
            if row and (row[0].op is not _FORWARD or num_held[rank] < peak) and _ready(row[0], inputs, done):
                action = row.popleft()
                running.append((action.op, action.stage))
                if action.op is _FORWARD:
                    num_held[rank] += 1
                else:
                    owed[rank].append(W(action.stage, action.microbatch or 0))
            elif owed[rank]:
                action = owed[rank].popleft()
                num_held[rank] -= 1
            else:
                continue
            rows[rank].append(action)
            ran = True
        assert ran, "a building block's order cannot run"
        for key in running:
            done[key] += 1
    return rows


def _inputs(num_stages: int) -> dict[Key, Key]:
    """Return what F and I need from a neighbouring stage, by `rules`; F of their own stage comes before them."""
    return {
        (op, stage): (kind, stage + need.stage_offset)
        for op in _ORDERED
        for need in rules.NEEDS[op]
        for kind in need.ops
        for stage in range(num_stages)
        if need.stage_offset and kind in _ORDERED and 0 <= stage + need.stage_offset < num_stages
    }


def _ready(action: Action, inputs: dict[Key, Key], done: dict[Key, int]) -> bool:
    stage, op, microbatch, _ = action
    source = inputs.get((op, stage))
    return source is None or done[source] > (microbatch or 0)
