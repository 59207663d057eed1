"""Traces made by hand from simulated timelines: what analysis must find is known to the nanosecond.

A unit of the timeline is a millisecond. In the `host` style a rank computes on its host and waits inside its labels,
as over gloo. In the `device` style the host has launched everything long before the device runs it, backwards from a
thread of their own, and messages are kernels, as over NCCL.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.simulate.simulate import Simulation
from drumline.core.timeline.spans import Transfer

Event = dict[str, Any]

UNIT = 1000.0  # microseconds
BEGIN = 5e8
BASE = 1_700_000_000_000_000_000
MESSAGE_BYTES = 4 * 256


def event(category: str, name: str, start: float, end: float, *, thread: int = 1, **args: Any) -> Event:
    where = {"pid": 1, "tid": thread, "ts": round(start, 3), "dur": round(end - start, 3)}
    return {"ph": "X", "cat": category, "name": name, **where, "args": args}


def mark(name: str, start: float, end: float) -> Event:
    return event("user_annotation", name, start, end)


class Rank:
    """What one rank's trace needs to know of the timeline: times in microseconds, and messages by their ends."""

    def __init__(self, timeline: Simulation, rank: int, begin: float) -> None:
        self.begin = begin
        track = timeline.tracks[rank]
        self.rows = [
            (action, self.at(start), self.at(end))
            for action, start, end in zip(track.actions, track.starts, track.ends, strict=True)
        ]
        self.received = {
            transfer.action: transfer for transfer in timeline.transfers if transfer.target == rank
        }  # by send, which names the message
        self.sent = {transfer.action: transfer for transfer in timeline.transfers if transfer.source == rank}
        self.num_stages = timeline.program.num_stages

    def at(self, time: float) -> float:
        return self.begin + time * UNIT

    def inputs(self, action: Action) -> Iterator[tuple[Action, Transfer]]:
        for part in action.work:
            for alternatives in rules.needs(part, self.num_stages):
                made = alternatives[0]
                message = rules.message(made, self.num_stages) if made.stage != part.stage else None
                if message is not None and message.send in self.received:
                    yield message.recv, self.received[message.send]

    def outputs(self, action: Action) -> Iterator[tuple[Action, Transfer]]:
        for part in action.work:
            message = rules.message(part, self.num_stages)
            if message is not None and message.send in self.sent:
                yield message.send, self.sent[message.send]


def host_events(rank: Rank, *, style: str = "spelled") -> Iterator[Event]:
    """Yield a rank that computes on its host: all labels spelled out, only forwards and backwards numbered, or none."""
    freed = rank.at(0.0)
    size = {"Input Dims": [[256]], "Input type": ["float"]}
    for action, start, end in rank.rows:
        for receive, transfer in rank.inputs(action):
            yield from [mark(f"PP:{receive}", freed, freed)] if style == "spelled" else []
            yield event("cpu_op", "c10d::recv_", freed, freed)
            yield {**mark("gloo:recv", freed, max(freed, rank.at(transfer.end))), "args": size}
        if style == "spelled":
            yield mark(f"PP:{action}", freed, end)
        elif style == "numbered":
            yield mark(f"{'Forward' if action.op is Op.FORWARD else 'Backward'} {action.microbatch}", freed, end)
        else:
            yield from _linked(action, start, end)
        for send, _ in rank.outputs(action):
            # Without a label of its own, a send is told from the next action's time by a nanosecond.
            at = end if style == "spelled" else end - 0.001
            yield from [mark(f"PP:{send}", at, at)] if style == "spelled" else []
            yield event("cpu_op", "c10d::send", at, at)
            yield {**mark("gloo:send", at, at), "args": size}
        freed = end


def _linked(action: Action, start: float, end: float) -> Iterator[Event]:
    """Yield an action as autograd sees it: an op, or a step of its engine, and one end of the link between the two."""
    link = {"cat": "fwdbwd", "name": "fwdbwd", "id": action.microbatch, "ts": start}
    if action.op is Op.FORWARD:
        number: dict[str, Any] = {"Sequence number": action.microbatch}
        yield event("cpu_op", "aten::mm", start, end, **number)
        yield {**link, "ph": "s"}
    else:
        yield event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", start, end)
        yield {**link, "ph": "f"}


def device_events(rank: Rank) -> Iterator[Event]:
    launches, hosts = count(1), count()
    size: dict[str, Any] = {"In msg nelems": 256, "dtype": "Float"}

    def launched(name: str, kernel_start: float, kernel_end: float, at: float, thread: int = 1) -> Iterator[Event]:
        number = next(launches)
        yield event("cuda_runtime", "cudaLaunchKernel", at, at, thread=thread, correlation=number)
        yield event("kernel", name, kernel_start, kernel_end, correlation=number, stream=7)

    def label(name: str) -> tuple[Event, float]:
        start = rank.begin - 900 + next(hosts) * 0.1
        return mark(f"PP:{name}", start, start + 0.08), start + 0.04

    def moved(action: Action, kind: str, start: float, end: float) -> Iterator[Event]:
        shown, at = label(str(action))
        yield shown
        yield event("cpu_op", f"c10d::{'send' if kind == 'send' else 'recv_'}", at - 0.02, at - 0.01)
        yield event("cpu_op", "record_param_comms", at - 0.02, at - 0.01, **{"Collective name": kind, **size})
        yield mark("nccl:coalesced", at - 0.005, at + 0.01)
        yield from launched("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", start, end, at)

    freed = rank.at(0.0)
    for action, start, end in rank.rows:
        for receive, transfer in rank.inputs(action):
            yield from moved(receive, "recv", min(freed, rank.at(transfer.made)), rank.at(transfer.end))
        shown, at = label(str(action))
        yield shown
        backward = any(part.op is not Op.FORWARD for part in action.work)
        length = end - start
        yield from launched("gemm", start, start + 0.4 * length, at, 77 if backward else 1)
        yield from launched("gemm", start + 0.6 * length, end, at + 0.01, 77 if backward else 1)
        if not backward:  # the profiler's own annotation of the device, which backwards do not get
            yield event("gpu_user_annotation", f"PP:{action}", start, end)
        for send, transfer in rank.outputs(action):
            yield from moved(send, "send", end, rank.at(transfer.end))
        freed = end


STYLES: dict[str, Callable[[Rank], Iterator[Event]]] = {
    "host": host_events,
    "numbered": partial(host_events, style="numbered"),
    "links": partial(host_events, style="links"),
    "device": device_events,
}


def info(rank: int, world_size: int, groups: Sequence[tuple[str, Sequence[int]]] = ()) -> Event:
    """Return the header of a trace."""
    config = [{"pg_name": name, "pg_desc": name, "ranks": list(ranks)} for name, ranks in groups]
    return {"backend": "gloo", "rank": rank, "world_size": world_size, "pg_config": config}


def save(path: Path, events: Sequence[Event], **header: Any) -> Path:
    """Write one trace."""
    text = json.dumps({"schemaVersion": 1, "baseTimeNanoseconds": BASE, **header, "traceEvents": list(events)})
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(), mtime=0))
    else:
        path.write_text(text, encoding="utf-8")
    return path


def written(
    timeline: Simulation,
    folder: Path,
    *,
    style: str = "host",
    skews: Sequence[float] = (),
    hosts: Sequence[str] = (),
    num_steps: int = 1,
    more: Callable[[int, float], Sequence[Event]] = lambda rank, begin: (),
) -> Path:
    """Write one trace per rank, with clocks that are off by `skews` microseconds, and return the folder."""
    folder.mkdir(exist_ok=True)
    length = (timeline.makespan + 4) * UNIT
    for rank in range(timeline.num_ranks):
        events = []
        for step in range(num_steps):
            begin = BEGIN + step * length
            events.append(mark(f"ProfilerStep#{step}", begin - UNIT, begin + length - UNIT))
            events += STYLES[style](Rank(timeline, rank, begin))
            events += more(rank, begin)
        for entry in events:
            entry["ts"] = round(entry["ts"] + (skews[rank] if skews else 0.0), 3)
        names = {"host_name": hosts[rank]} if hosts else {"host_name": "one"}
        save(folder / f"rank{rank}.json.gz", events, distributedInfo=info(rank, timeline.num_ranks), **names)
    return folder
