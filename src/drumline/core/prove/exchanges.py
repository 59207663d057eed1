"""Checks on parameters and gradients: gather and release, exchange between copies, optimizer steps.

The UPDATEs of a stage divide its microbatches into steps. A step's gradients are made first. If the stage exchanges
gradients at all, it does so once per step, after the step's last backward and before its UPDATE. Two copies of a stage
take the same steps.

    0B0 0B1 0REDUCE_GRAD 0UPDATE1   0B2 0B3 0REDUCE_GRAD 0UPDATE3
    └──────── step 0 ──────────┘    └──────── step 1 ──────────┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.graph import CODE, OPS, Flags, Ints
from drumline.core.prove.index import Index, RowPosition
from drumline.core.prove.violation import Violation


@dataclass
class GradientBook:
    """Where one rank makes, exchanges and uses the gradients of one stage, as positions in its row."""

    gradients: dict[int, int] = field(default_factory=dict)
    exchanges: list[int] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)

    @staticmethod
    def of(code: Ints, microbatch: Ints, position: Ints) -> GradientBook:
        """Collect the entries of a row in order; if something is made twice, the first counts."""
        makes, updates = (flags[code] & (microbatch >= 0) for flags in (_MAKES, _UPDATES))
        return GradientBook(
            dict(zip(microbatch[makes][::-1].tolist(), position[makes][::-1].tolist(), strict=True)),
            position[_EXCHANGES[code]].tolist(),
            list(zip(microbatch[updates].tolist(), position[updates].tolist(), strict=True)),
        )

    @property
    def steps(self) -> list[int]:
        """The position of every step's last backward; gradients that no UPDATE uses form their own final step."""
        ends = [microbatch for microbatch, _ in self.updates]
        last = np.full(len(ends) + 1, -1)
        np.maximum.at(last, np.searchsorted(ends, list(self.gradients)), list(self.gradients.values()))
        positions: list[int] = last[last >= 0].tolist()
        return positions


def _flags(ops: Iterable[Op]) -> Flags:
    return np.isin(np.arange(len(OPS)), [CODE[op] for op in ops])


_MAKES, _EXCHANGES, _UPDATES = _flags(rules.RELEASES), _flags({Op.REDUCE_GRAD}), _flags({Op.UPDATE})


def gradient_books(index: Index) -> dict[tuple[int, int], GradientBook]:
    """Return the book of every (rank, stage)."""
    columns = index.program.columns
    entered = np.flatnonzero((_MAKES | _EXCHANGES | _UPDATES)[columns.code])
    position = columns.position
    return {
        key: GradientBook.of(columns.code[book], columns.microbatch[book], position[book])
        for key, book in columns.by_stage(entered)
    }


def check(index: Index) -> Iterator[Violation]:
    """Yield every violation of parameter state, gradient exchange and updates."""
    if index.ops & {Op.UNSHARD, Op.RESHARD}:
        yield from _sharding(index)
    if not index.ops & {Op.UPDATE, Op.REDUCE_GRAD} and not index.placement.mirrored:
        return
    books = gradient_books(index)
    for (rank, stage), book in sorted(books.items()):
        yield from _updates(index, rank, stage, book)
        yield from _exchanges(index, rank, stage, book)
    yield from _between_copies(index, books)


def waits_for_exchange(index: Index) -> dict[RowPosition, list[RowPosition]]:
    """Return, per UPDATE, the exchange of the other copy that must be posted before it can run."""
    waits: dict[RowPosition, list[RowPosition]] = {}
    if not {Op.UPDATE, Op.REDUCE_GRAD} <= index.ops:
        return waits
    books = gradient_books(index)
    for (rank, stage), book in books.items():
        for other in index.placement.ranks_of(stage) if stage < index.placement.num_stages else ():
            theirs = books.get((other, stage))
            if other != rank and theirs is not None:
                for (_, at), mine, needed in zip(book.updates, book.exchanges, theirs.exchanges, strict=False):
                    if mine < at:
                        waits.setdefault(RowPosition(rank, at), []).append(RowPosition(other, needed))
    return waits


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
            elif managed and action.is_compute:
                for part in action.work:
                    if part.stage in managed and part.stage not in gathered:
                        yield Violation(rank, at, part, f"runs while stage {part.stage} is not gathered")


def _updates(index: Index, rank: int, stage: int, book: GradientBook) -> Iterator[Violation]:
    """Check that every gradient reaches exactly one optimizer step, after it was made."""
    row = index.program.rows[rank]
    taken = -1
    by_microbatch = sorted(book.gradients.items())
    for microbatch, at in book.updates:
        if microbatch <= taken:
            yield Violation(rank, at, row[at], f"comes after {stage}UPDATE{taken}, which used its gradients")
        if not book.gradients:
            yield Violation(rank, at, row[at], f"updates a stage that rank {rank} does not train")
        while by_microbatch and by_microbatch[0][0] <= microbatch:
            _, last_made = by_microbatch.pop(0)
            if last_made > at:
                yield Violation(rank, at, row[at], f"runs before {row[last_made]}")
        taken = max(taken, microbatch)
    if by_microbatch and index.program.num_updates:
        missing = Action(stage, Op.UPDATE, by_microbatch[-1][0])
        yield Violation(rank, None, missing, "is missing: no optimizer step uses these gradients")


def _exchanges(index: Index, rank: int, stage: int, book: GradientBook) -> Iterator[Violation]:
    """Check that each step's gradients are exchanged once, after its last backward and before its update."""
    row = index.program.rows[rank]
    action = Action(stage, Op.REDUCE_GRAD)
    has_copy = stage < index.placement.num_stages and len(index.placement.ranks_of(stage)) > 1
    if not book.gradients:
        for at in book.exchanges:
            yield Violation(rank, at, action, f"exchanges gradients that rank {rank} never makes")
        return
    if not book.exchanges and not has_copy:
        return
    steps = book.steps
    for at in book.exchanges[len(steps) :]:
        yield Violation(rank, at, action, "exchanges the same gradients again")
    for step, last in enumerate(steps):
        if step >= len(book.exchanges):
            why = "has copies on two ranks" if has_copy else "exchanges gradients in its other steps"
            yield Violation(rank, None, action, f"is missing: stage {stage} {why}")
            continue
        at = book.exchanges[step]
        if at < last:
            yield Violation(rank, at, action, f"runs before {row[last]}, whose gradients it exchanges")
        if step < len(book.updates) and book.updates[step][1] < at:
            update = book.updates[step][1]
            yield Violation(rank, update, row[update], f"runs before {action} has exchanged its gradients")


def _between_copies(index: Index, books: dict[tuple[int, int], GradientBook]) -> Iterator[Violation]:
    """Check that the two copies of a stage take the same steps, and exchange in one order."""
    if not index.placement.mirrored:
        return
    num_ranks, rows = index.program.num_ranks, index.program.rows
    for stage in range(index.placement.num_stages):
        pair = [(rank, books.get((rank, stage), GradientBook())) for rank in index.placement.ranks_of(stage)]
        steps = [[microbatch for microbatch, _ in book.updates] for _, book in pair]
        if len(pair) == 2 and steps[0] != steps[1]:
            each = zip(pair, steps, strict=True)
            taken = ", ".join(f"rank {rank} after microbatches {listed or 'none'}" for (rank, _), listed in each)
            yield Violation(pair[0][0], None, None, f"the copies of stage {stage} take different steps: {taken}")
    exchanges: dict[int, list[int]] = defaultdict(list)
    for (rank, _), book in books.items():
        exchanges[rank] += book.exchanges
    for rank in range(num_ranks // 2):
        here, there = ([(at, rows[n][at]) for at in sorted(exchanges[n])] for n in (rank, num_ranks - 1 - rank))
        # If one of the two never exchanges a stage, that is a missing exchange, not a wrong order.
        common = {action for _, action in here} & {action for _, action in there}
        pairs = zip(*([entry for entry in row if entry[1] in common] for row in (here, there)), strict=False)
        for (_, mine), (at, theirs) in pairs:
            if mine != theirs:
                reason = f"is exchanged while rank {rank} exchanges stage {mine.stage}: their orders differ"
                yield Violation(num_ranks - 1 - rank, at, theirs, reason)
                break
