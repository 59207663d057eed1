"""Calls over one gRPC stream that stays open: what front and stages exchange.

In Python a unary call of gRPC takes about 2.5 times as long as a message on an open stream and its answer. So the front
keeps a stream to the first stage, and every stage one to the next:

    caller                                     stage
      ── CALL number, seconds left, body ────►
      ◄── LEFT number ────────────────────────     to a caller that ASKed: the microbatch has left this stage
      ◄── DONE number, times, body ───────────     or FAIL number, code of gRPC, why; or LOST number, stage, why
      ── CANCEL number ──────────────────────►     nobody waits any more

If a stream breaks, calls that were sent fail with its status, and those that were not wait for the next stream.

Before the first frame both sides name the export and the stage, in gRPC's metadata. If they do not name the same, the
stage refuses the stream, or the caller ends it: nothing is sent, and calls wait for the right stage.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections import deque
from enum import IntEnum
from typing import NamedTuple

import grpc

SERVICE, FLOW, STRUCK = "drumline.Stage", "Flow", "Struck"
EXPORT = "drumline-export"  # the metadata that names export and stage
PAUSE = 0.05  # seconds before a stream that broke is opened again
_HEAD = struct.Struct("<BQdI")  # kind, number, seconds left or code, bytes of the text


class Failed(Exception):
    """A request that cannot be answered: gRPC's code, and why."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        self.code, self.why = code, why
        super().__init__(f"{code.name}: {why}")


class Lost(Failed):
    """A request that a stage had been sent when the connection to it broke: it may have been computing it."""

    def __init__(self, stage: int, why: str) -> None:
        self.stage = stage
        super().__init__(grpc.StatusCode.UNAVAILABLE, why)


class FrameKind(IntEnum):
    """What a frame is."""

    CALL, ASK, CANCEL, LEFT, DONE, FAIL, LOST = range(7)


class Frame(NamedTuple):
    """A message of the stream.

    >>> Frame.parse(bytes(Frame(FrameKind.FAIL, 7, 3, "why", b"body")))
    Frame(kind=<FrameKind.FAIL: 5>, number=7, value=3.0, text='why', body=b'body')
    """

    kind: FrameKind
    number: int
    value: float = 0.0  # of a call the seconds left, of a failure the code, of a loss the stage
    text: str = ""
    body: bytes = b""

    def __bytes__(self) -> bytes:
        text = self.text.encode()
        return _HEAD.pack(self.kind, self.number, self.value, len(text)) + text + self.body

    @staticmethod
    def parse(data: bytes) -> Frame:
        """Read what `bytes` made; ValueError if it is something else."""
        if len(data) < _HEAD.size:
            raise ValueError(f"a frame of {len(data)} bytes; expected {_HEAD.size} or more")
        kind, number, value, size = _HEAD.unpack_from(data)
        end = _HEAD.size + size
        if not math.isfinite(value):
            raise ValueError(f"a frame with {value} seconds; expected a number")
        if end > len(data):
            raise ValueError(f"a frame whose text has {size} bytes, of {len(data) - _HEAD.size} behind its head")
        return Frame(FrameKind(kind), number, value, data[_HEAD.size : end].decode(), data[end:])


class Answer(NamedTuple):
    """What comes back: a response as bytes, and what the stages measured, as text."""

    body: bytes
    times: str = ""


class Outgoing:
    """Frames to be written, one at a time: gRPC allows no second write before the first has ended."""

    def __init__(self) -> None:
        self._frames: deque[tuple[int, bytes]] = deque()
        self._filled = asyncio.Event()
        self._is_closed = False
        self.bytes = 0

    def put(self, number: int, frame: bytes, *, first: bool = False) -> None:
        """Have a frame of a call written, after the others or before them."""
        (self._frames.appendleft if first else self._frames.append)((number, frame))
        self.bytes += len(frame)
        self._filled.set()

    async def take(self) -> tuple[int, bytes] | None:
        """Return the next frame; waits for one, and returns None after the last."""
        await self.filled()
        if not self._frames:
            return None
        frame = self._frames.popleft()
        self.bytes -= len(frame[1])
        return frame

    async def filled(self) -> None:
        """Wait until there is a frame, or none will come."""
        while not self._frames and not self._is_closed:
            self._filled.clear()
            await self._filled.wait()

    def close(self) -> None:
        """Have no more frames after those that are there."""
        self._is_closed = True
        self._filled.set()

    def clear(self) -> None:
        """Forget all frames."""
        self._frames.clear()
        self.bytes = 0

    def remove(self, number: int) -> None:
        """Forget the frames of a call."""
        self._frames = deque(frame for frame in self._frames if frame[0] != number)
        self.bytes = sum(len(frame) for _, frame in self._frames)
