"""A brute-force model of three channels, from the text of a program alone: it shares no code with what it judges.

Ranks take their actions one by one. A send or a receive is posted and stands in its rank's queue, one per directed
edge, per pair of ranks or per rank; a message moves when it stands first in its queue on both sides. F waits for the
message with its input, B and I for that with their gradient, a WAIT for the message of its send. What can never move
hangs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

CHANNELS = ("edge", "pair", "rank")

_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)")
Part = tuple[int, str, int]  # stage, word, microbatch (-1: none)
Cell = tuple[Part, ...]
Message = tuple[str, int, int]  # "F" or "B", the stage that sends it, microbatch
State = tuple[tuple[int, ...], tuple[Message, ...]]  # how far each rank is, and what has moved


class Model:
    """A program's cells, rank by rank, and which rank holds which (stage, microbatch)."""

    def __init__(self, text: str, channel: str) -> None:
        self.channel = channel
        self.rows = [[_cell(cell) for cell in line.split(",") if cell] for line in text.strip().splitlines()]
        held = [(rank, part) for rank, row in enumerate(self.rows) for cell in row for part in cell]
        self.homes = {(stage, number): rank for rank, (stage, word, number) in held if word == "F"}
        self.last = max(stage for stage, _ in self.homes)

    def ends(self, message: Message) -> tuple[int, int]:
        """Return the ranks that send and receive a message."""
        _, stage, number = message
        return self.homes[stage, number], self.homes[_taker(message)[0], number]

    def key(self, rank: int, message: Message) -> object:
        """Return which of its queues a rank puts a message in."""
        source, target = self.ends(message)
        return {"edge": (rank, source, target), "pair": (rank, source + target - rank), "rank": rank}[self.channel]

    def ready(self, part: Part, passed: set[Part], moved: set[Message]) -> bool:
        """Whether a rank that has `passed` all these can take an action, given the messages that have moved."""
        stage, word, number = part
        if word == "F":
            return stage == 0 or self.has(("F", stage - 1, number), passed, moved)
        if word in ("B", "I"):
            answered = stage == self.last or self.has(("B", stage + 1, number), passed, moved)
            return answered and (stage, "F", number) in passed
        if word == "W":
            return (stage, "I", number) in passed
        if word in ("SEND_F", "SEND_B"):
            return _made((word[-1], stage, number), passed)  # nothing to send yet: that row never goes on
        if word in ("WAIT_SEND_F", "WAIT_SEND_B"):
            return (word[-1], stage, number) in moved and (stage, word[5:], number) in passed
        return True

    def has(self, message: Message, passed: set[Part], moved: set[Message]) -> bool:
        """Whether a rank has an input: from its own row, or taken in."""
        source, target = self.ends(message)
        return _made(message, passed) if source == target else message in moved and _taker(message) in passed


def hangs(text: str, channel: str) -> bool:
    """Whether a program with its messages spelled out does not run to its end on a channel."""
    model = Model(text, channel)
    at = [0] * len(model.rows)
    passed: list[set[Part]] = [set() for _ in model.rows]
    moved: set[Message] = set()
    queues: dict[object, list[Message]] = {}
    going = True
    while going:
        going = False
        for rank, row in enumerate(model.rows):
            while at[rank] < len(row) and all(model.ready(part, passed[rank], moved) for part in row[at[rank]]):
                cell = row[at[rank]]
                passed[rank].update(cell)
                at[rank] += 1
                going = True
                if (message := _posted(cell)) is not None:
                    queues.setdefault(model.key(rank, message), []).append(message)
        for message in {queue[0] for queue in queues.values() if queue}:
            both = [queues.get(model.key(rank, message)) for rank in model.ends(message)]
            if all(queue and queue[0] == message for queue in both):
                for queue in both:
                    assert queue
                    queue.pop(0)
                moved.add(message)
                going = True
    return at != [len(row) for row in model.rows] or any(queues.values())


def ways(text: str, channel: str) -> set[bool]:
    """Return whether a program hangs, for every order in which its steps can be taken; for the smallest programs."""
    model = Model(text, channel)
    found: set[bool] = set()
    start: State = (0,) * len(model.rows), ()
    seen, left = {start}, [start]
    while left:
        state = left.pop()
        behind = list(_steps(model, state))
        if not behind:
            posted = {_posted(cell) for row in model.rows for cell in row} - {None}
            found.add(state[0] != tuple(map(len, model.rows)) or set(state[1]) != posted)
        left += [entry for entry in behind if entry not in seen]
        seen.update(behind)
    return found


def _steps(model: Model, state: State) -> Iterator[State]:
    """Yield every state that one step of a rank or of a message leads to."""
    at, moved = state
    queues: dict[object, list[Message]] = {}
    for rank, row in enumerate(model.rows):
        passed = {part for cell in row[: at[rank]] for part in cell}
        if at[rank] < len(row) and all(model.ready(part, passed, set(moved)) for part in row[at[rank]]):
            yield (*at[:rank], at[rank] + 1, *at[rank + 1 :]), moved
        for cell in row[: at[rank]]:
            if (message := _posted(cell)) is not None and message not in moved:
                queues.setdefault(model.key(rank, message), []).append(message)
    for message in {queue[0] for queue in queues.values()}:
        if all(queues.get(model.key(rank, message), [])[:1] == [message] for rank in model.ends(message)):
            yield at, tuple(sorted((*moved, message)))


def _cell(text: str) -> Cell:
    return tuple((int(s), w, int(m or -1)) for s, w, m in _CELL.findall(text.removesuffix("OVERLAP_F_B")))


def _posted(cell: Cell) -> Message | None:
    """Return the message that a send or a receive belongs to."""
    stage, word, number = cell[0]
    if word in ("SEND_F", "SEND_B"):
        return word[-1], stage, number
    if word in ("RECV_F", "RECV_B"):
        return word[-1], stage + (-1 if word == "RECV_F" else 1), number
    return None


def _taker(message: Message) -> Part:
    way, stage, number = message
    return stage + (1 if way == "F" else -1), f"RECV_{way}", number


def _made(message: Message, passed: set[Part]) -> bool:
    way, stage, number = message
    return any((stage, word, number) in passed for word in (("F",) if way == "F" else ("B", "I")))
