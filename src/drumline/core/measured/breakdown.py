"""A rank's step in parts that sum to it: compute, transfer, waiting, overhead, and what is left over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.core.measured.account import Doing, Here, Piece, account
from drumline.core.measured.record import COLUMNS, OVERHEADS, Record

NANO = 1e-9

_PARTS = {
    Doing.COMPUTE: "busy",
    Doing.SEND: "transfer",
    Doing.TAKE: "transfer",
    Doing.WAIT: "wait",
    Doing.FLIGHT: "transfer",
    Doing.EXCHANGE: "transfer",
    Doing.OVERHEAD: "overhead",
    Doing.LEAVE: "wait",
    Doing.STREAM_WAIT: "wait",
    Doing.STREAM_FLIGHT: "transfer",
    Doing.NOTHING: "unexplained",
}
_LEAVE = OVERHEADS.index("leave")
_WIDTH = len(COLUMNS["messages"])
_SOURCE, _MADE = COLUMNS["messages"].index("source"), COLUMNS["messages"].index("made")


@dataclass(frozen=True, slots=True)
class Parts:
    """One rank's step in seconds, by what the rank did; each is the sum of spans of its own, but the last.

    `busy` is computing, `transfer` moving messages or having them on their way while it had nothing else to do, `wait`
    waiting for another rank to make one, `overhead` the executor's own. What no span covers is `unexplained`.
    """

    busy: float
    transfer: float
    wait: float
    overhead: float
    unexplained: float

    @property
    def total(self) -> float:
        """The seconds from the call of `step` to its end."""
        return self.busy + self.transfer + self.wait + self.overhead + self.unexplained


def parts_of(pieces: Sequence[Piece]) -> Parts:
    """Return the parts that the pieces of a step add up to.

    >>> parts_of([Piece(0, 10, Doing.OVERHEAD), Piece(10, 90, Doing.COMPUTE), Piece(90, 100, Doing.SEND)])
    Parts(busy=8e-08, transfer=1e-08, wait=0.0, overhead=1e-08, unexplained=0.0)
    """
    sums = dict.fromkeys(("busy", "transfer", "wait", "overhead", "unexplained"), 0)
    for piece in pieces:
        sums[_PARTS[piece.doing]] += piece.end - piece.start
    return Parts(*(nanoseconds * NANO for nanoseconds in sums.values()))


def summed_parts(record: Record, here: Here) -> Parts:
    """Return the same from a record, by adding its columns up: quick enough for every step.

    On a host no two spans are at once, so that nothing has to be laid out in time first.

    >>> summed_parts(Record(0, begin_ns=0, end_ns=100, starts=[10], ends=[90]), lambda rank, moment: moment)
    Parts(busy=8e-08, transfer=0.0, wait=0.0, overhead=0.0, unexplained=2e-08)
    """
    if record.on_device or record.exchanges:
        return parts_of(account(record, here))
    busy = sum(record.ends) - sum(record.starts)
    transfer, overhead = _length(record, "sends") + _length(record, "messages"), _length(record, "overheads")
    wait = 0
    if _LEAVE in (kinds := record.column("overheads", "kind")):  # once, when the row has ended
        at = 3 * kinds.index(_LEAVE)
        wait = record.overheads[at + 2] - record.overheads[at + 1]
        overhead -= wait
    for message, start, end in record.rows("waits"):
        at = message * _WIDTH
        made = here(record.messages[at + _SOURCE], record.messages[at + _MADE])
        made = min(max(made, start), end)
        wait += made - start
        transfer += end - made
    left = record.end_ns - record.begin_ns - busy - transfer - wait - overhead
    return Parts(*(nanoseconds * NANO for nanoseconds in (busy, transfer, wait, overhead, left)))


def _length(record: Record, table: str) -> int:
    return sum(record.column(table, "to")) - sum(record.column(table, "from"))
