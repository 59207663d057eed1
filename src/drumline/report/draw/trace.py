"""A timeline as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing: Chrome's JSON event format, gzipped.

    process     one per rank
    threads     compute; gradient exchange; messages to each other rank; idle time by cause; for a measured step also
                the time before it: waiting for data, the optimizer
    flows       from the action that made a message to the action that used it
    counters    pairs and bytes held by the rank; messages waiting on each edge into it

Perfetto drops slices that overlap on one thread without nesting. So times are whole nanoseconds, and messages or
exchanges that run at the same time get separate threads.
"""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from drumline.core import rules
from drumline.core.action import Action
from drumline.core.timeline.timeline import Timeline

Event = dict[str, Any]

_COMPUTE, _IDLE = 1, 2
_NANOSECONDS = 1e9  # per second


def trace(timeline: Timeline) -> bytes:
    """Return the gzipped trace; one unit of the timeline becomes a second.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> data = trace(simulate(Program.parse("0F0,0B0")))
    >>> [event["name"] for event in json.loads(gzip.decompress(data))["traceEvents"] if event["ph"] == "X"]
    ['0F0', '0B0']
    """
    figures = {"program": timeline.program.name, "makespan": timeline.makespan, "bubble": timeline.bubble}
    return _zipped(list(_events(timeline)), {**figures, "nanoseconds_per_unit": _NANOSECONDS})


def traces(timelines: Mapping[str, Timeline]) -> bytes:
    """Return one gzipped trace of several named timelines, with the ranks of each after those of the previous one.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> step = simulate(Program.parse("0F0,0B0"))
    >>> events = json.loads(gzip.decompress(traces({"measured": step, "simulated": step})))["traceEvents"]
    >>> [event["args"]["name"] for event in events if event["name"] == "process_name"]
    ['measured, rank 0 (stage 0)', 'simulated, rank 0 (stage 0)']
    """
    events: list[Event] = []
    first_rank = first_id = 0
    for name, timeline in timelines.items():
        for event in _events(timeline):
            moved = {**event, "pid": event["pid"] + first_rank}
            if "id" in event:
                moved["id"] = event["id"] + first_id
            if event["name"] == "process_name":
                moved["args"] = {"name": f"{name}, {event['args']['name']}"}
            if event["name"] == "process_sort_index":
                moved["args"] = {"sort_index": moved["pid"]}
            events.append(moved)
        first_rank += timeline.num_ranks
        first_id += len(timeline.transfers)
    return _zipped(events, {"timelines": list(timelines)})


def _zipped(listed: list[Event], other: Event) -> bytes:
    document = {"traceEvents": listed, "displayTimeUnit": "ns", "otherData": other}
    # No time stamp in the header, so that equal timelines give equal files.
    return gzip.compress(json.dumps(document, separators=(",", ":")).encode(), mtime=0)


def _events(timeline: Timeline) -> Iterator[Event]:
    """Yield the trace's events, names of processes and threads first."""
    clock = _TraceTime(min((interval.start for interval in timeline.between), default=timeline.start))
    threads = _Threads(clock)
    messages = threads.of([(t.source, f"to rank {t.target}", t.start, t.end) for t in timeline.transfers])
    exchanges = threads.of([(swap.rank, "exchange", swap.start, swap.end) for swap in timeline.exchanges])
    between = threads.of([(period.rank, "between steps", period.start, period.end) for period in timeline.between])
    yield from _names(timeline, threads)
    for rank, track in enumerate(timeline.tracks):
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            yield clock.slice(rank, _COMPUTE, str(action), start, end, category=action.op.value)
    for span, thread in zip(timeline.exchanges, exchanges, strict=True):
        yield clock.slice(span.rank, thread, str(span.action), span.start, span.end, category="exchange")
    for passed, thread in zip(timeline.between, between, strict=True):
        yield clock.slice(passed.rank, thread, passed.kind, passed.start, passed.end, category="between steps")
    for idle in timeline.causes:
        why = {"why": str(idle)}
        yield clock.slice(idle.rank, _IDLE, idle.cause.value, idle.start, idle.end, category="idle", args=why)
    yield from _transfers(timeline, clock, messages)
    yield from _counters(timeline, clock)


class _TraceTime(NamedTuple):
    """Converts times to whole nanoseconds, written as microseconds as the format requires."""

    start: float

    def nanoseconds(self, time: float) -> int:
        return round((time - self.start) * _NANOSECONDS)

    def at(self, time: float) -> float:
        return self.nanoseconds(time) / 1000

    def slice(
        self, rank: int, thread: int, name: str, start: float, end: float, *, category: str, args: Event | None = None
    ) -> Event:
        low, high = self.nanoseconds(start), self.nanoseconds(end)
        where = {"name": name, "cat": category, "pid": rank, "tid": thread, "ts": low / 1000}
        length: Event = {"ph": "X", "dur": (high - low) / 1000} if high > low else {"ph": "i", "s": "t"}
        return {**where, **length, "args": args or {}}


class _Threads:
    """Threads of each rank, by name; what runs at the same time never shares one, and the first free one is used."""

    def __init__(self, clock: _TraceTime) -> None:
        self.clock = clock
        self.busy_until: dict[tuple[int, str], list[int]] = defaultdict(list)
        self.numbers: dict[int, dict[str, int]] = defaultdict(lambda: {"compute": _COMPUTE, "idle, by cause": _IDLE})

    def of(self, spans: Sequence[tuple[int, str, float, float]]) -> list[int]:
        """Return the threads of spans, given as (rank, name, start, end), assigned in order of start."""
        threads = [0] * len(spans)
        for index in sorted(range(len(spans)), key=lambda at: spans[at][2]):
            rank, name, start, end = spans[index]
            threads[index] = self.first_free(rank, name, self.clock.nanoseconds(start), self.clock.nanoseconds(end))
        return threads

    def first_free(self, rank: int, name: str, start: int, end: int) -> int:
        """Return the number of the first free thread called `name`, and mark it busy."""
        busy = self.busy_until[rank, name]
        free = next((at for at, until in enumerate(busy) if until <= start), len(busy))
        busy[free : free + 1] = [end]
        numbers = self.numbers[rank]
        return numbers.setdefault(name if free == 0 else f"{name} ({free + 1})", 1 + len(numbers))


def _names(timeline: Timeline, threads: _Threads) -> Iterator[Event]:
    for rank in range(timeline.num_ranks):
        stages = timeline.program.placement.stages_of(rank)
        title = f"rank {rank} (stage{'s' if len(stages) > 1 else ''} {', '.join(map(str, stages))})"
        yield _meta(rank, 0, "process_name", {"name": title})
        yield _meta(rank, 0, "process_sort_index", {"sort_index": rank})
        for name, number in threads.numbers[rank].items():
            yield _meta(rank, number, "thread_name", {"name": name})
            yield _meta(rank, number, "thread_sort_index", {"sort_index": number})


def _meta(rank: int, thread: int, name: str, args: Event) -> Event:
    return {"ph": "M", "pid": rank, "tid": thread, "name": name, "args": args}


def _transfers(timeline: Timeline, clock: _TraceTime, threads: list[int]) -> Iterator[Event]:
    for index, (transfer, thread) in enumerate(zip(timeline.transfers, threads, strict=True)):
        args = {"bytes": transfer.num_bytes}
        name = str(transfer.action)
        yield clock.slice(transfer.source, thread, name, transfer.start, transfer.end, category="transfer", args=args)
        ready = _producer_start(timeline, transfer.action)
        used = _next_start(timeline, transfer.target, transfer.consumed)
        if ready is not None and used is not None:
            flow = {"name": name, "cat": "message", "id": index + 1, "tid": _COMPUTE}
            yield {**flow, "ph": "s", "pid": transfer.source, "ts": clock.at(ready)}
            yield {**flow, "ph": "f", "bp": "e", "pid": transfer.target, "ts": clock.at(used)}


def _producer_start(timeline: Timeline, send: Action) -> float | None:
    places = (timeline.located.get(producer[:3]) for producer in rules.producers(send))
    return next((timeline.tracks[rank].starts[at] for rank, at in filter(None, places)), None)


def _next_start(timeline: Timeline, rank: int, time: float) -> float | None:
    """Return when the rank's next action starts: an arrow must end inside a slice, and messages come before it."""
    starts = timeline.tracks[rank].starts
    at = bisect_left(starts, time)
    return starts[at] if at < len(starts) else None


def _counters(timeline: Timeline, clock: _TraceTime) -> Iterator[Event]:
    for rank, (track, holding) in enumerate(zip(timeline.tracks, timeline.memory, strict=True)):
        for name, amounts in (("pairs held", holding.pairs), ("bytes held", holding.bytes)):
            for index, (during, after) in enumerate(amounts or ()):
                yield _count(rank, name, clock.at(track.starts[index]), during)
                yield _count(rank, name, clock.at(track.ends[index]), after)
    for (source, target), curve in timeline.queue_depths.items():
        for time, depth in curve:
            yield _count(target, f"queue from rank {source}", clock.at(time), depth)


def _count(rank: int, name: str, time: float, value: float) -> Event:
    return {"ph": "C", "pid": rank, "tid": 0, "name": name, "ts": time, "args": {"value": value}}
