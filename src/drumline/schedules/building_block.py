"""Schedules from a building block (arXiv 2405.15362): one microbatch's slots on every rank, repeated every six.

A rank with two stages in a V does six things per microbatch: two F, two I, two W. A block gives F and I their slots
so that no two on one rank are equal modulo six; repeating it every six slots collides nowhere, and the two W take
what slots are left. How long the block stays on a rank is what it costs in memory: a sixth of that many pairs are
held at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from drumline.core import rules
from drumline.core.action import Action, F, I, Op, W

Offsets = Callable[[int], tuple[int, int, int, int]]


def from_block(num_ranks: int, num_microbatches: int, offsets: Offsets) -> list[list[Action]]:
    """Return the rows of a V-shaped program whose F and I follow the repeated block.

    `offsets(rank)` are the slots of F going down, F going up, I of the upper stage, I of the lower one. W runs
    where the rank would idle, or where the block's own peak of pairs would be passed.
    """
    order = [list(_repeated(rank, num_ranks, num_microbatches, offsets(rank))) for rank in range(num_ranks)]
    peak = max(_peak(row) for row in order)
    plain = [[action for action in row if action.op is not Op.BACKWARD_WEIGHT] for row in order]
    return _fill_with_weights(plain, 2 * num_ranks, peak)


def _repeated(rank: int, num_ranks: int, num_microbatches: int, slots: tuple[int, int, int, int]) -> Iterator[Action]:
    """Yield the block's repetition with every W in the first free slot after its I."""
    down, up = rank, 2 * num_ranks - 1 - rank
    taken: dict[int, Action] = {}
    for m in range(num_microbatches):
        for slot, action in zip(slots, (F(down, m), F(up, m), I(up, m), I(down, m)), strict=True):
            assert slot + 6 * m not in taken, f"the block collides on rank {rank}"
            taken[slot + 6 * m] = action
    owed: list[Action] = []
    for slot in range(max(taken) + 1):
        if slot in taken:
            action = taken[slot]
            yield action
            if action.op is Op.BACKWARD_INPUT:
                owed.append(W(action.stage, action.microbatch or 0))
        elif owed:
            yield owed.pop(0)
    yield from owed


def _peak(row: list[Action]) -> int:
    held = peak = 0
    for action in row:
        held += (action.op is Op.FORWARD) - (action.op is Op.BACKWARD_WEIGHT)
        peak = max(peak, held)
    return peak


def _fill_with_weights(order: list[list[Action]], num_stages: int, peak: int) -> list[list[Action]]:
    """Run the rows slot by slot, F and I in their order, W where nothing else can run."""
    rows: list[list[Action]] = [[] for _ in order]
    owed: list[deque[Action]] = [deque() for _ in order]
    waiting, held = [deque(row) for row in order], [0] * len(order)
    done: set[tuple[int, Op, int | None]] = set()
    while any(waiting) or any(owed):
        running: list[Action] = []
        for rank, row in enumerate(waiting):
            if row and (row[0].op is not Op.FORWARD or held[rank] < peak) and _ready(row[0], num_stages, done):
                action = row.popleft()
                if action.op is Op.FORWARD:
                    held[rank] += 1
                else:
                    owed[rank].append(W(action.stage, action.microbatch or 0))
            elif owed[rank]:
                action = owed[rank].popleft()
                held[rank] -= 1
            else:
                continue
            rows[rank].append(action)
            running.append(action)
        assert running, "a building block's order cannot run"
        done.update((action.stage, action.op, action.microbatch) for action in running)
    return rows


def _ready(action: Action, num_stages: int, done: set[tuple[int, Op, int | None]]) -> bool:
    """Whether all that `rules` says the action needs is done; spelled out, because it is asked for every slot."""
    for need in rules.NEEDS[action.op]:
        stage = action.stage + need.stage_offset
        if 0 <= stage < num_stages:
            for op in need.ops:
                if (stage, op, action.microbatch) in done:
                    break
            else:
                return False
    return True
