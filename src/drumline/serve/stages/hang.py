"""Whether a stage hangs: by what it writes to its ledger, and by time that the front itself has watched.

A stage hangs if for so many seconds
- its event loop has not turned: the process is stopped, or stuck;
- it is in one computation, whose thread has used no processor time: it waits for a disk, or forever;
- it is in one computation that nobody waits for any more, and does not react: a kernel that never returns.

So a stage that computes for long is left alone as long as anybody waits for it. If the whole machine stands still, the
front does as well. It therefore counts no more than two of its own looks apart, however long it could not look.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from drumline.serve.ledger import LedgerState

SHORTEST_HANG = 1.0  # seconds of a bound; stages give a sign of life five times as often
_LOOKS = 10  # within the bound
_LONGEST_LOOK = 1.0


@dataclass(slots=True)
class HangWatch:
    """Looks at one stage again and again.

    >>> now = iter((0.0, 1.0, 2.0, 3.0))
    >>> watch = HangWatch(2.0, clock=lambda: next(now), every=1.0)
    >>> [watch.look(LedgerState(beat=7)) for _ in range(4)]
    ['', '', '', 'its event loop has not turned for 2 s']
    """

    bound: float  # seconds; 0: nothing counts as hanging
    clock: Callable[[], float] = time.monotonic
    every: float = 0.0  # seconds between two looks; 0: as the bound needs it
    _last_state: LedgerState | None = None
    _at: float = 0.0
    _still: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.every = self.every or min(_LONGEST_LOOK, self.bound / _LOOKS)

    def look(self, state: LedgerState) -> str:
        """Return why the stage hangs, or an empty text."""
        now, before = self.clock(), self._last_state
        passed = min(now - self._at, 2 * self.every)
        self._last_state, self._at = state, now
        if before is None or not self.bound:
            return ""
        same = state.computing != 0 and state.computing == before.computing
        signs = {
            "its event loop has not turned": state.beat == before.beat,
            "it computes, and uses no processor time": same and state.worked == before.worked,
            "no request waits for what it computes": same and state.unwanted == state.computing,
        }
        for what, is_still in signs.items():
            self._still[what] = self._still.get(what, 0.0) + passed if is_still else 0.0
        return next((f"{what} for {self.bound:g} s" for what in signs if self._still[what] > self.bound), "")
