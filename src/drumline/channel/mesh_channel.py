"""The common part of the real channels: messages identified by step and action, waits and words over the mesh."""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections import deque
from functools import partial
from typing import Any, Generic, TypeVar

from drumline.channel.channel import Channel, Wait, step_topic
from drumline.channel.layout import MessageLayout, MessageLayouts
from drumline.channel.mesh import FIRST_OWN_KIND, ControlMesh
from drumline.core.action import Action, Op
from drumline.core.errors import MismatchError

Arrived = TypeVar("Arrived")

_LAYOUT = FIRST_OWN_KIND
FIRST_MESSAGE_KIND = FIRST_OWN_KIND + 1  # the subclass's kinds start here
_STEP = struct.Struct("<q")
_ACTION = struct.Struct("<iiB")
KEY_BYTES = _STEP.size + _ACTION.size
_OPS = tuple(Op)
_EXPECTED = "the same calls on every rank: step on all ranks, or eval_step on all ranks"
_OP_NUMBERS = {op: number for number, op in enumerate(_OPS)}


def key_text(key: bytes) -> str:
    """Return a message's key in words.

    >>> key_text(step_code(3) + action_code(Action.parse("2RECV_F0")))
    '2RECV_F0 of step 3'
    """
    step, _ = mode_of(key)
    stage, microbatch, op = _ACTION.unpack_from(key, _STEP.size)
    return f"{Action(stage, _OPS[op], None if microbatch < 0 else microbatch)} of step {step}"


def step_code(step: int, *, train: bool = True, program: int = 0) -> bytes:
    """Return the first part of the keys of a step's messages: its number, whether it trains, a byte of its program."""
    return _STEP.pack(((2 * step + (not train)) << 8) + program)


def mode_of(key: bytes) -> tuple[int, bool]:
    """Return the step that a message belongs to, and whether it trains.

    >>> mode_of(step_code(3)), mode_of(step_code(-1, train=False))
    ((3, True), (-1, False))
    """
    (code,) = _STEP.unpack_from(key)
    return code >> 9, not code >> 8 & 1


def action_code(action: Action) -> bytes:
    """Return the second part of a message's key."""
    assert not action.parts, f"{action} receives nothing"
    microbatch = -1 if action.microbatch is None else action.microbatch
    return _ACTION.pack(action.stage, microbatch, _OP_NUMBERS[action.op])


class MeshChannel(ControlMesh, Channel, Generic[Arrived]):
    """A mesh as a channel: headers travel over its links, and the subclass carries the payload.

    The layouts of messages travel in separate packets, each once, before its first message.
    """

    looks_every_ms: int | None = None  # how often to check `_unsent` while nothing arrives

    def __init__(self, rank: int, num_ranks: int, **connecting: Any) -> None:
        """Connect all ranks, as `ControlMesh` does."""
        super().__init__(rank, num_ranks, **connecting)
        self._step = 0
        self._trains = True
        self._step_code = self._call_code = step_code(0)  # of messages, and of the step that runs
        self._codes: dict[Action, bytes] = {}
        # By source, messages that arrived but were not taken; another with the same key is kept separately, in order.
        self._inbox: list[dict[bytes, Arrived]] = [{} for _ in range(num_ranks)]
        self._again: list[deque[tuple[bytes, Arrived]]] = [deque() for _ in range(num_ranks)]
        self._layouts = {peer: MessageLayouts() for peer in self.links}
        self._peer_layouts: dict[int, dict[int, MessageLayout]] = {peer: {} for peer in self.links}
        self.on(_LAYOUT, self._on_layout)

    @abstractmethod
    def _unsent(self) -> tuple[int, bytes] | None:
        """Return target and key of a message that has not left, if any."""

    def _key(self, receive: Action) -> bytes:
        code = self._codes.get(receive)
        if code is None:
            code = self._codes[receive] = action_code(receive)
        return self._step_code + code

    def _tell_layout(self, target: int, layout: MessageLayout) -> None:
        """Send a layout to a peer that does not know it."""
        if not layout.is_told:
            layout.is_told = True
            self.send_packet(target, bytes((_LAYOUT,)) + layout.text())

    def _on_layout(self, source: int, packet: bytes, fds: list[int]) -> None:
        layout = MessageLayout.parse(memoryview(packet)[1:])
        self._peer_layouts[source][layout.number] = layout

    def _arrive(self, source: int, key: bytes, message: Arrived) -> None:
        inbox = self._inbox[source]
        if key in inbox:
            self._again[source].append((key, message))
        else:
            inbox[key] = message

    def _pick(self, source: int, key: bytes) -> Arrived | None:
        """Remove a message from those that arrived."""
        message = self._inbox[source].pop(key, None)
        if message is None:
            return None
        if self._again[source]:
            again, self._again[source] = self._again[source], deque()
            for other, later in again:
                self._arrive(source, other, later)
        return message

    def begin(self, step: int, *, train: bool = True, program: int = 0, since: int | None = None) -> None:
        """Start a step; every message of earlier steps, or of those before `since`, must have been taken."""
        self._step, self._trains = step, train
        self._step_code = self._call_code = step_code(step, train=train, program=program)
        oldest = step if since is None else since
        for source, inbox in enumerate(self._inbox):
            for key in inbox:
                if mode_of(key)[0] < oldest:
                    raise MismatchError(
                        f"{self.naming.rank(self.rank)} never received {key_text(key)} from {self.naming.rank(source)}",
                        expected=_EXPECTED,
                    )

    def belongs(self, step: int) -> None:
        """Let messages belong to another step."""
        self._step_code = step_code(step)

    def block(self, wait: Wait, deadline_ns: int) -> None:
        """Return after the message is here."""
        key, inbox = self._key(wait.receive), self._inbox[wait.source]
        needs, refuse = (lambda: (wait.source,)), partial(self._refuse_ended, wait.source, wait)
        self.wait(lambda: key in inbox, wait, deadline_ns, needs=needs, refuse=refuse)

    def _refuse_ended(self, rank: int, what: Wait | str) -> None:
        """Refuse to wait for a rank that has finished the step: everything it sent is here."""
        for key in self._inbox[rank]:
            if mode_of(key) == (self._step, self._trains) and key[: _STEP.size] != self._call_code:
                raise MismatchError(
                    f"call {self._step}: {self.naming.several(self.rank, rank)} run different programs",
                    expected="the same program= on every rank",
                )
        ended, other = self.messages(step_topic(self._step)), self.naming.rank(rank)
        if rank in ended:
            method = "step" if getattr(ended[rank], "train", True) else "eval_step"
            raise MismatchError(
                f"{self._said(what)}, but {other} finished call {self._step} without it, in {method}",
                expected=_EXPECTED,
            )
        for key in self._inbox[rank]:
            if mode_of(key) == (self._step, not self._trains):
                mine, theirs = ("step", "eval_step") if self._trains else ("eval_step", "step")
                raise MismatchError(
                    f"call {self._step}: {self.naming.rank(self.rank)} ran {mine} and {other} ran {theirs}",
                    expected=_EXPECTED,
                )

    def flush(self, deadline_ns: int) -> None:
        """Return after everything sent has left."""
        self.pump()
        unsent = self._unsent()
        if unsent is None and self.all_sent:
            return
        what = f"{self.naming.rank(self.rank)} waits to send its last packets"
        if unsent is not None:
            other = self.naming.rank(unsent[0])
            what = f"{self.naming.rank(self.rank)} waits for {other} to make room for {key_text(unsent[1])}"
        self.wait(
            lambda: self._unsent() is None and self.all_sent,
            what,
            deadline_ns,
            needs=lambda: () if (late := self._unsent()) is None else (late[0],),
            every_ms=self.looks_every_ms,
            refuse=lambda: None if (late := self._unsent()) is None else self._refuse_ended(late[0], what),
        )
