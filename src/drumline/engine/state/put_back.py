"""What recomputed blocks find again: said on stderr by the process that runs them, in the step that finds it.

drumline: recomputed, block '0' finds calls, chance again
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from drumline.engine.ranks.observer import Observer
from drumline.engine.stages.engine import Engine
from drumline.runtime.ledger import Ledger
from drumline.runtime.step import Step

_MOST = 4  # names in a line


class PutBack(Observer):
    """Says which state of blocks is put back."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_said = 0
        self.moved()

    def moved(self) -> None:
        """Find the recomputed segments here."""
        segments = [segment for stage in self._engine.stages() for segment in stage.segments]
        self._ledgers = [segment.ledger for segment in segments if segment.checkpointed and segment.ledger.is_needed]
        self._num_said = sum(ledger.num_kept for ledger in self._ledgers)

    @property
    def is_idle(self) -> bool:
        """Whether no recomputed block here can keep anything."""
        return not self._ledgers

    def end(self, step: Step) -> None:
        """Say what is new."""
        if sum(ledger.num_kept for ledger in self._ledgers) > self._num_said:
            self._num_said = sum(ledger.num_kept for ledger in self._ledgers)
            for block, names in kept_in(self._ledgers).items():
                print(f"drumline: recomputed, block {block!r} finds {_row(names)} again", file=sys.stderr)


def kept_in(ledgers: Iterable[Ledger]) -> dict[str, list[str]]:
    """Return what forwards have changed beside parameters and buffers, by block."""
    kept_values: dict[str, list[str]] = {}
    for block, name in (pair for ledger in ledgers for pair in ledger.kept_values()):
        if name not in kept_values.setdefault(block, []):
            kept_values[block].append(name)
    return kept_values


def _row(names: list[str]) -> str:
    """Return some names in a row.

    >>> _row(["calls"]), _row(["a", "b", "c", "d", "e", "f"])
    ('calls', 'a, b, c, d and 2 more')
    """
    more = len(names) - _MOST
    return ", ".join(names[:_MOST]) + (f" and {more} more" if more > 0 else "")
