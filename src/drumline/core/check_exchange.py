"""Checks of what happens to parameters and gradients: gather and release, exchange between copies, optimizer steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.index import Index, Place
from drumline.core.violation import Violation


def check(index: Index) -> Iterator[Violation]:
    """Yield every violation of parameter state, gradient exchange and updates."""
    last_release = _releases(index)
    yield from _sharding(index)
    yield from _exchanges(index, last_release)
    yield from _updates(index)


def _releases(index: Index) -> dict[tuple[int, int], Place]:
    """Return the last backward of every (rank, stage)."""
    last: dict[tuple[int, int], Place] = {}
    for action, places in index.places.items():
        if action.op in rules.RELEASES:
            for place in places:
                key = (place.rank, action.stage)
                last[key] = max(last.get(key, place), place)
    return last


def _sharding(index: Index) -> Iterator[Violation]:
    for rank, row in enumerate(index.program.rows):
        managed = {action.stage for action in row if action.op is Op.UNSHARD}
        gathered: set[int] = set()
        for at, action in enumerate(row):
            if action.op is Op.UNSHARD:
                gathered.add(action.stage)
            elif action.op is Op.RESHARD:
                if action.stage not in gathered:
                    yield Violation(rank, at, action, "releases parameters that were not gathered")
                gathered.discard(action.stage)
            elif action.is_compute:
                for part in action.work:
                    if part.stage in managed and part.stage not in gathered:
                        yield Violation(rank, at, part, f"runs while stage {part.stage} is not gathered")


def _exchanges(index: Index, last_release: dict[tuple[int, int], Place]) -> Iterator[Violation]:
    found: dict[tuple[int, int], int] = {}
    orders: dict[int, list[int]] = defaultdict(list)
    for rank, row in enumerate(index.program.rows):
        for at, action in enumerate(row):
            if action.op is not Op.REDUCE_GRAD:
                continue
            if (rank, action.stage) in found:
                yield Violation(rank, at, action, "exchanges the same gradients again")
            found[rank, action.stage] = at
            last = last_release.get((rank, action.stage))
            if last is None:
                yield Violation(rank, at, action, f"exchanges gradients that rank {rank} never makes")
            elif last.position > at:
                late = index.program.rows[rank][last.position]
                yield Violation(rank, at, action, f"runs before the stage's last backward {late}")
            orders[rank].append(action.stage)
    if index.placement.mirrored:
        yield from _between_copies(index, last_release, found, orders)


def _between_copies(
    index: Index,
    last_release: dict[tuple[int, int], Place],
    found: dict[tuple[int, int], int],
    orders: dict[int, list[int]],
) -> Iterator[Violation]:
    """Check that both copies of every stage exchange their gradients, in one order on both ranks."""
    for rank, stage in sorted(last_release):
        if (rank, stage) not in found:
            reason = f"is missing: stage {stage} has copies on two ranks"
            yield Violation(rank, None, Action(stage, Op.REDUCE_GRAD), reason)
    for rank in range(index.program.num_ranks // 2):
        mirror = index.program.num_ranks - 1 - rank
        common = set(orders[rank]) & set(orders[mirror])
        here, there = ([stage for stage in orders[one] if stage in common] for one in (rank, mirror))
        for mine, theirs in zip(here, there, strict=False):
            if mine != theirs:
                reason = f"is exchanged while rank {rank} exchanges stage {mine}: one pair of ranks, two orders"
                yield Violation(mirror, found[mirror, theirs], Action(theirs, Op.REDUCE_GRAD), reason)
                break


def _released(index: Index) -> dict[tuple[int, int], dict[int, Place]]:
    """Return, per (rank, stage), where each microbatch's weight gradient is made."""
    released: dict[tuple[int, int], dict[int, Place]] = defaultdict(dict)
    for action, places in index.places.items():
        if action.op in rules.RELEASES and action.microbatch is not None:
            released[places[0].rank, action.stage][action.microbatch] = places[0]
    return released


def _updates(index: Index) -> Iterator[Violation]:
    """Check that every gradient reaches exactly one optimizer step, after it was made."""
    if not index.program.num_updates:
        return
    released = _released(index)
    taken: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(index.program.rows):
        for at, action in enumerate(row):
            if action.op is not Op.UPDATE or action.microbatch is None:
                continue
            key = (rank, action.stage)
            upto = taken.get(key, -1)
            if action.microbatch <= upto:
                yield Violation(rank, at, action, f"comes after {action.stage}UPDATE{upto}, which took its gradients")
            if key not in released:
                yield Violation(rank, at, action, f"updates a stage that rank {rank} does not train")
            for microbatch, place in released[key].items():
                if upto < microbatch <= action.microbatch and place.position > at:
                    yield Violation(rank, at, action, f"runs before {row[place.position]}")
            taken[key] = max(upto, action.microbatch)
    for (rank, stage), made in sorted(released.items()):
        if made and taken.get((rank, stage), -1) < max(made):
            missing = Action(stage, Op.UPDATE, max(made))
            yield Violation(rank, None, missing, "is missing: its gradients reach no optimizer step")
