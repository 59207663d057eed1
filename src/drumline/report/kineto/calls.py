"""Sends and receives of a rank, assembled from several kinds of trace events.

::

    c10d::recv_            ├──────────┤                     the host posts it
    record_param_comms        ├────┤                        the number of elements and their type
    gloo:recv                     ├───────────────────┤     ends when the host has waited for it: done
    nccl:coalesced                    ├──┤                  launches the kernel, for every call since the last
    ncclDevKernel_SendRecv               ·     ├──────┤     the device moves it: begun and done
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

# Backends whose calls end on the host: their annotation lasts until the host has waited.
_ON_HOST = frozenset({"gloo", "mpi", "ucc"})
_NAMES_BY_SIZE = {
    1: ("char", "signed char", "byte", "unsigned char", "bool", "float8_e4m3fn", "float8_e5m2"),
    2: ("half", "float16", "bfloat16", "short", "short int"),
    4: ("float", "float32", "int", "int32"),
    8: ("double", "float64", "long", "long int", "int64", "complexfloat"),
    16: ("complexdouble",),
}
_SIZES = {name: size for size, names in _NAMES_BY_SIZE.items() for name in names}


class PostedEvent(NamedTuple):
    """One event about a send or a receive; `source` says which kind: c10d, metadata, or a backend."""

    sends: bool
    start: int
    end: int
    num_bytes: float | None
    source: str


class MessageEnd(NamedTuple):
    """A send or a receive: posted by the host from `start` to `end`, moving from `begun`, and `done` if known.

    `on_device` says whether the last two are times of the device.
    """

    sends: bool
    start: int
    end: int
    begun: int
    done: int | None
    num_bytes: float | None
    on_device: bool = False


def calls_of(posted: Sequence[PostedEvent], moved: Sequence[tuple[int, int, int]]) -> tuple[MessageEnd, ...]:
    """Return the calls in order; `moved` are the kernels that move messages, as (launch, start, end).

    >>> op, annotation = PostedEvent(False, 0, 10, None, "c10d"), PostedEvent(False, 4, 90, 64.0, "gloo")
    >>> calls_of([op, annotation], [])
    (MessageEnd(sends=False, start=0, end=10, begun=0, done=90, num_bytes=64.0, on_device=False),)
    >>> calls_of([op], [(12, 40, 95)])
    (MessageEnd(sends=False, start=0, end=10, begun=40, done=95, num_bytes=None, on_device=True),)
    """
    ordered = sorted(posted, key=lambda event: (event.start, -event.end))
    ops = [event for event in ordered if event.source == "c10d"] or [e for e in ordered if e.source != "metadata"]
    starts = [event.start for event in ordered]
    return tuple(_on_device([_call(op, ordered, starts) for op in ops], moved))


def _call(op: PostedEvent, ordered: Sequence[PostedEvent], starts: Sequence[int]) -> MessageEnd:
    within = ordered[bisect_left(starts, op.start) : bisect_right(starts, op.end)]
    said = [event for event in within if event.sends == op.sends and event.source != "c10d"]
    waited = [event.end for event in (op, *said) if event.source in _ON_HOST]
    sizes = [event.num_bytes for event in (*said, op) if event.num_bytes is not None]
    return MessageEnd(op.sends, op.start, op.end, op.start, max(waited, default=None), sizes[0] if sizes else None)


def _on_device(calls: list[MessageEnd], moved: Sequence[tuple[int, int, int]]) -> list[MessageEnd]:
    """Add the times of their kernels to the calls: a kernel moves everything posted since the previous one."""
    upcoming, batch = 0, range(0)
    for launch, start, end in sorted(moved):
        first = upcoming
        while upcoming < len(calls) and calls[upcoming].start <= launch:
            upcoming += 1
        batch = range(first, upcoming) or batch  # a second kernel for what the last one began to move
        for at in batch:
            done = calls[at].done if calls[at].on_device else None
            begun = calls[at].begun if calls[at].on_device else start
            calls[at] = calls[at]._replace(begun=min(begun, start), done=max(done or end, end), on_device=True)
    return calls


def elements_bytes(event: dict[str, Any]) -> float | None:
    """Return the size in a record_param_comms event, or None.

    >>> elements_bytes({"args": {"In msg nelems": 1024, "dtype": "BFloat16"}})
    2048.0
    """
    args = args_of(event)
    count, size = args.get("In msg nelems"), _SIZES.get(str(args.get("dtype")).lower())
    return float(count * size) if _is_size(count) and size is not None else None


def shape_bytes(event: dict[str, Any]) -> float | None:
    """Return the size according to an event's recorded shapes, or None if none were recorded.

    >>> shape_bytes({"args": {"Input Dims": [[32, 128]], "Input type": ["c10::BFloat16"]}})
    8192.0
    """
    args = args_of(event)
    shapes, types = args.get("Input Dims"), args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list) or not shapes or not types:
        return None
    size = _SIZES.get(str(types[0]).lower().removeprefix("c10::"))
    shape = shapes[0]
    if size is None or not shape or not isinstance(shape, list) or not all(map(_is_size, shape)):
        return None
    size_found = math.prod(shape) * size
    return float(size_found) if _is_size(size_found) else None


def args_of(event: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an event, besides its name and times.

    >>> args_of({"name": "recv"})
    {}
    """
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _is_size(number: object) -> TypeGuard[int]:
    """Whether it is a plausible count of elements or bytes."""
    return type(number) is int and 0 <= number < 2**62
