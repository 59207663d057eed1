"""One rank's trace, reduced to what concerns its pipeline.

    kept                                   from                                          for
    marks of actions, steps, other work    annotations of the host; Python frames        what ran, and when
    calls                                  c10d::send and c10d::recv_, with the          messages: posted, done, bytes
                                           backend's annotation and its kernels
    kernels, with when they were launched  the device                                    when the device computed
    links from forward to backward ops     autograd                                      schedules without labels

Times are whole nanoseconds since the epoch, by the clock of the rank's host.
"""

from __future__ import annotations

import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeGuard

import numpy as np

from drumline.core.graph import Ints
from drumline.report.kineto.calls import MessageEnd, PostedEvent, args_of, calls_of, elements_bytes, shape_bytes
from drumline.report.kineto.events import Event, events

_STEP = re.compile(r"ProfilerStep#([0-9]{1,15})")
_ACTION = re.compile(r"PP:(?!:).+|(?:Forward|Backward) [0-9]{1,9}")
_FRAME = re.compile(r".*torch/distributed/pipelining/stage\.py\(\d+\): (?:forward|backward|backward_weight)_one_chunk")
_MESSAGE = re.compile(r"(\w+):(send|recv|coalesced)\b")
_COLLECTIVE = re.compile(r"nccl|rccl|oneccl|hccl", re.IGNORECASE)
_BACKWARD = "autograd::engine::evaluate_function"
_MOST = 2**61  # nanoseconds, 73 years: the sum of two still fits in 64 bits
_SENDS = {"c10d::send": True, "c10d::recv_": False, "c10d::recv_any_source_": False}


class Mark(NamedTuple):
    """A name for the host's time from `start` to `end`."""

    name: str
    start: int
    end: int


class Kernels(NamedTuple):
    """What the device ran, in launch order; `moves` is 1 for communication, and 0 for compute."""

    launch: Ints
    start: Ints
    end: Ints
    moves: Ints


class Links(NamedTuple):
    """Autograd's own links: forward ops, the engine's backward steps, and which op led to which step."""

    forward: Ints  # (n, 2): start and end of every forward op that has a backward
    backward: Ints  # (n, 2): start and end of every step of the engine
    pairs: Ints  # (n, 2): start of a forward op, and a moment within its backward


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What is kept from one file."""

    path: Path
    actions: tuple[Mark, ...]
    frames: tuple[Mark, ...]
    steps: tuple[Mark, ...]
    others: tuple[Mark, ...]
    calls: tuple[MessageEnd, ...]
    kernels: Kernels
    links: Links

    @property
    def has_device(self) -> bool:
        """Whether anything ran on a device: then only its times count."""
        return bool((self.kernels.moves == 0).any())

    @property
    def bounds(self) -> tuple[int, int]:
        """The first start and the last end of what is kept."""
        marks = (*self.actions, *self.frames, *self.steps, *self.others)
        stretches = [(mark.start, mark.end) for mark in marks] + [(call.start, call.end) for call in self.calls]
        for rows in (self.links.forward, self.links.backward):
            stretches += [(int(rows[:, 0].min()), int(rows[:, 1].max()))] if len(rows) else []
        return min((low for low, _ in stretches), default=0), max((high for _, high in stretches), default=0)


def read(path: Path) -> RankTrace:
    """Read what the trace at `path` says about the pipeline.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder, "rank0.json")
    ...     label = '{"ph": "X", "cat": "user_annotation", "name": "PP:0F0", "ts": 2.5, "dur": 1}'
    ...     _ = path.write_text('{"baseTimeNanoseconds": 1000, "traceEvents": [' + label + "]}")
    ...     read(path).actions
    (Mark(name='PP:0F0', start=3500, end=4500),)
    """
    reader = _Reader()
    takers = reader.takers
    header: Event = {}
    for event in events(path, header):
        kind = event.get("cat")
        if isinstance(kind, str) and kind in takers:
            takers[kind](event)
    return reader.recording(path, header)


class _Reader:
    """Sorts events by kind; the order in which they arrive does not matter."""

    def __init__(self) -> None:
        self.marks: dict[str, list[Mark]] = defaultdict(list)  # actions, frames, steps, messages, others
        self.posted: list[PostedEvent] = []
        self.ops, self.engine = array("q"), array("q")  # start, end
        self.kernels = array("q")  # correlation, start, end, moves
        self.launches: dict[int, int] = {}  # launch time by correlation
        self.links: dict[str, dict[int, int]] = defaultdict(dict)

    @property
    def takers(self) -> dict[str, Callable[[Event], None]]:
        runtimes = ("cuda_runtime", "cuda_driver", "hip_runtime", "xpu_runtime", "privateuse1_runtime", "mtia_runtime")
        return {
            "user_annotation": self.annotation,
            "cpu_op": self.op,
            "python_function": self.frame,
            "fwdbwd": self.link,
            **dict.fromkeys(runtimes, self.launch),
            **dict.fromkeys(("kernel", "gpu_memcpy", "gpu_memset"), self.kernel),
        }

    def annotation(self, event: Event) -> None:
        if (mark := _mark(event)) is None:
            return
        if _STEP.fullmatch(mark.name):
            kind = "steps"
        elif _ACTION.fullmatch(mark.name):
            kind = "actions"
        elif (message := _MESSAGE.match(mark.name)) is None:
            kind = "others"
        else:
            kind = "messages"
            if message[2] != "coalesced":
                self.posted.append(PostedEvent(message[2] == "send", *mark[1:], shape_bytes(event), message[1]))
        self.marks[kind].append(mark)

    def frame(self, event: Event) -> None:
        if _FRAME.fullmatch(str(event.get("name", ""))) and (mark := _mark(event)) is not None:
            self.marks["frames"].append(mark)

    def op(self, event: Event) -> None:
        if (mark := _mark(event)) is None:
            return
        if mark.name.startswith(_BACKWARD):
            self.engine.extend(mark[1:])
        elif mark.name.startswith("c10d::"):
            if mark.name in _SENDS:
                self.posted.append(PostedEvent(_SENDS[mark.name], *mark[1:], shape_bytes(event), "c10d"))
            else:
                self.marks["others"].append(mark)
        elif mark.name == "record_param_comms":
            kind = args_of(event).get("Collective name")
            if kind in ("send", "recv"):
                self.posted.append(PostedEvent(kind == "send", *mark[1:], elements_bytes(event), "metadata"))
        elif "Sequence number" in args_of(event):
            self.ops.extend(mark[1:])

    def link(self, event: Event) -> None:
        moment, number = _moment(event.get("ts")), event.get("id")
        if moment is not None and _is_whole(number):
            self.links[str(event.get("ph"))][number] = moment

    def launch(self, event: Event) -> None:
        correlation, start = args_of(event).get("correlation"), _moment(event.get("ts"))
        if _is_whole(correlation) and start is not None:
            self.launches[correlation] = start

    def kernel(self, event: Event) -> None:
        correlation = args_of(event).get("correlation")
        if _is_whole(correlation) and (mark := _mark(event)) is not None:
            self.kernels.extend((correlation, *mark[1:], 1 if _COLLECTIVE.search(mark.name) else 0))

    def recording(self, path: Path, header: Event) -> RankTrace:
        """Return everything in time order, on the clock that the header names."""
        base = header.get("baseTimeNanoseconds")
        zero = base if _is_whole(base) and abs(base) <= _MOST else 0

        def in_order(kind: str) -> tuple[Mark, ...]:
            """Outer marks come before the marks inside them."""
            shifted = (Mark(name, start + zero, end + zero) for name, start, end in self.marks[kind])
            return tuple(sorted(shifted, key=lambda mark: (mark.start, -mark.end)))

        kernels = self._kernels(zero)
        posted = [event._replace(start=event.start + zero, end=event.end + zero) for event in self.posted]
        return RankTrace(
            path,
            tuple(sorted(in_order("actions"), key=lambda mark: (mark.start, mark.end))),  # one after the other
            in_order("frames"),
            in_order("steps"),
            in_order("others"),
            calls_of(posted, _launched(kernels, in_order("messages"))),
            kernels,
            Links(_pairs(self.ops, zero), _pairs(self.engine, zero), self._linked(zero)),
        )

    def _kernels(self, zero: int) -> Kernels:
        rows = np.array(self.kernels, dtype=np.int64).reshape(-1, 4)
        launch = np.array([self.launches.get(row, -1) for row in rows[:, 0].tolist()], dtype=np.int64)
        known = launch >= 0
        rows, launch = rows[known], launch[known]
        order = np.lexsort((rows[:, 1], launch))
        rows = rows[order]
        return Kernels(launch[order] + zero, rows[:, 1] + zero, rows[:, 2] + zero, rows[:, 3])

    def _linked(self, zero: int) -> Ints:
        sources, targets = self.links["s"], self.links["f"]
        pairs = sorted((sources[number] + zero, targets[number] + zero) for number in sources.keys() & targets.keys())
        return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _launched(kernels: Kernels, marks: Sequence[Mark]) -> list[tuple[int, int, int]]:
    """Return (launch, start, end) of the communication kernels that were launched within one of these marks."""
    launch, start, end = (column[kernels.moves == 1] for column in kernels[:3])
    moved = list(zip(launch.tolist(), start.tolist(), end.tolist(), strict=True))
    bounds = (np.searchsorted(launch, (low, high + 1)) for _, low, high in marks)
    return sorted({entry for first, last in bounds for entry in moved[first:last]})


def _pairs(flat: array[int], zero: int) -> Ints:
    rows = np.array(flat, dtype=np.int64).reshape(-1, 2) + zero
    return rows[np.argsort(rows[:, 0], kind="stable")]


def _is_whole(number: object) -> TypeGuard[int]:
    """Whether it is a whole number of at most 64 bits."""
    return type(number) is int and -(2**63) <= number < 2**63


def _moment(time: object) -> int | None:
    """Return microseconds as whole nanoseconds; None if it is not a time."""
    return round(time * 1000) if type(time) in (int, float) and abs(time) * 1000 <= _MOST else None  # type: ignore


def _mark(event: Event) -> Mark | None:
    """Return a complete event's name and times; None if it has none."""
    start, length = _moment(event.get("ts")), _moment(event.get("dur", 0))
    if event.get("ph") != "X" or start is None or length is None:
        return None
    name = event.get("name", "")
    text = name if isinstance(name, str) else str(type(name))
    return Mark(text if text.isascii() else _written(text), start, start + max(length, 0))


def _written(text: str) -> str:
    """Return text that can be encoded: JSON allows halves of characters, and UTF-8 does not."""
    return text.encode(errors="replace").decode()
