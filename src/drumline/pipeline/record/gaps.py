"""What happens on this process's ranks between two steps, in pieces that do not overlap.

step ──┤tell│write│      │ clip    │hear│ clip │ update │      │ data │├── step
outside                               outside
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from drumline.core.measured.record import BETWEEN
from drumline.runtime.clock import Clock
from drumline.runtime.draft import Draft


class Between:
    """Times by kind since the last step, on each rank by its own clock.

    >>> between = Between([Clock()])
    >>> with between.during("clip"), between.during("hear"):
    ...     pass
    >>> draft = Draft(0)
    >>> between.hand_over([draft])
    >>> [BETWEEN[kind] for kind in draft.between[::3]]
    ['clip', 'hear', 'clip']
    """

    def __init__(self, clocks: Sequence[Clock]) -> None:
        self._clocks = clocks
        self._open: list[int] = []  # kinds, the innermost last
        self._from: list[int] = []  # by rank, since when the innermost goes on
        self._rows: list[list[int]] = [[] for _ in clocks]
        self._since = [clock.now() for clock in clocks]

    @contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """Count what runs inside as `kind`, but for what inside of it has a kind of its own."""
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()

    def enter(self, kind: str) -> None:
        """Begin a piece."""
        self._cut()
        self._open.append(BETWEEN.index(kind))

    def leave(self) -> None:
        """End the innermost piece; nothing if a step has begun since, as one may inside of an optimizer's step."""
        self._cut()
        if self._open:
            self._open.pop()

    def _cut(self) -> None:
        moments = [clock.now() for clock in self._clocks]
        if self._open:
            for rows, start, end in zip(self._rows, self._from, moments, strict=True):
                rows.extend((self._open[-1], start, end))
        self._from = moments

    def hand_over(self, drafts: Sequence[Draft]) -> None:
        """Let the next step's drafts have what is known, up to now; begins them."""
        self._cut()
        self._open.clear()
        for at, (draft, clock) in enumerate(zip(drafts, self._clocks, strict=True)):
            draft.since_ns, draft.between = self._since[at], self._rows[at]
            draft.begin_ns = clock.now()
            self._rows[at] = []

    def ended(self, drafts: Sequence[Draft]) -> None:
        """Begin anew where the step ended."""
        self._since = [draft.end_ns for draft in drafts]
