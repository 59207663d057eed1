"""What a message costs between two ranks of this machine: shared memory against gloo, in one interleaved run.

    python benchmarks/messages.py [--rounds 30] [--trips 40]

A trip is a message there and one of the same size back, so that both ranks sleep and wake up in turn, as the ranks of a
pipeline do; the table has half a trip, that is one message from `send` to the tensor in the other rank's hands. The
peer is torch.distributed by itself, `isend` and `irecv` over gloo, as torch's own pipelines use it. Busy is the CPU
time of both ranks for a message, spinning and the backend's threads included.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from drumline.channel.channel import Channel, Wait
from drumline.channel.distributed import DistributedChannel
from drumline.channel.shared_memory import SharedMemoryChannel
from drumline.core.action import Action
from drumline.report.draw.table import table
from measure import interleaved, machine

KIB = (16, 128, 512)
FORTH, BACK, USER = Action.parse("1RECV_F0"), Action.parse("0RECV_B0"), Action.parse("0F0")


class Trips:
    """Trips over a Drumline channel, each a step of its own."""

    def __init__(self, channel: Channel, num_trips: int) -> None:
        self.channel = channel
        self.num_trips = num_trips
        self.step = 0

    def run(self, payload: torch.Tensor) -> None:
        """Send the payload there and back, again and again."""
        channel, rank = self.channel, self.channel.rank
        for _ in range(self.num_trips):
            self.step += 1
            channel.begin(self.step)
            if rank == 0:
                channel.send(FORTH, 1, (payload,), None)
                self.get(BACK, 1)
            else:
                channel.send(BACK, 0, (self.get(FORTH, 0),), None)

    def get(self, receive: Action, source: int) -> torch.Tensor:
        """Wait for a message as the executor does."""
        self.channel.post(receive, source)
        delivery = self.channel.take(receive, source)
        while delivery is None:
            wait = Wait(self.channel.rank, USER, receive, source)
            self.channel.block(wait, time.perf_counter_ns() + 60_000_000_000)
            delivery = self.channel.take(receive, source)
        return delivery.tensors[0]


def plain_trips(payload: torch.Tensor, rank: int, num_trips: int) -> None:
    for _ in range(num_trips):
        arrived = torch.empty_like(payload)
        works = [dist.isend(payload, 1), dist.irecv(arrived, 1)] if rank == 0 else [dist.irecv(arrived, 0)]
        for work in works:
            assert work is not None
            work.wait()
        if rank == 1:
            work = dist.isend(arrived, 0)
            assert work is not None
            work.wait()


def run(rank: int, port: int, rounds: int, num_trips: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=2)
    shared = Trips(SharedMemoryChannel(rank, 2, store=store), num_trips)
    gloo = Trips(DistributedChannel(rank, 2, store=store, backend="gloo"), num_trips)
    contestants: dict[str, Callable[[], object]] = {}
    busy: dict[str, list[float]] = {}

    def contestant(name: str, trips: Callable[[], None]) -> None:
        def timed() -> None:
            start = time.process_time()
            trips()
            busy.setdefault(name, []).append(time.process_time() - start)

        contestants[name] = timed

    for kib in KIB:
        payload = torch.randn(kib * 256)
        contestant(f"torch {kib}", partial(plain_trips, payload, rank, num_trips))
        contestant(f"gloo {kib}", partial(gloo.run, payload))
        contestant(f"shared {kib}", partial(shared.run, payload))
    timings = interleaved(contestants, rounds=rounds)
    per_message = 1e6 / (2 * num_trips)
    mine = {name: sorted(seconds)[len(seconds) // 2] for name, seconds in busy.items()}
    shared.channel.tell("busy", mine)
    both = shared.channel.hear("busy", time.perf_counter_ns() + 60_000_000_000)
    shared.channel.close()
    gloo.channel.close()
    dist.destroy_process_group()
    return {
        name: {
            "microseconds": timing.median * per_message,
            "spread": timing.spread,
            "busy": sum(value[name] for value in both) * per_message,
        }
        for name, timing in timings.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--trips", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rank", type=int, nargs=2, help=argparse.SUPPRESS, metavar=("RANK", "PORT"))
    args = parser.parse_args()
    if args.rank:
        run(args.rank[0], args.rank[1], args.rounds, args.trips)
        return
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shape = ["--rounds", str(args.rounds), "--trips", str(args.trips)]
    other = subprocess.Popen([sys.executable, __file__, *shape, "--rank", "1", str(store.port)])
    try:
        results = run(0, store.port, args.rounds, args.trips)
    finally:
        other.wait(60)
    if args.json:
        print(json.dumps(results))
        return
    print(f"{machine()}; medians of {args.rounds} interleaved rounds of {args.trips} trips\n")
    names = {"torch": "torch isend/irecv, gloo", "gloo": "Drumline over gloo", "shared": "Drumline in shared memory"}
    rows = []
    for kib in KIB:
        peer = results[f"torch {kib}"]["microseconds"]
        for short, name in names.items():
            result = results[f"{short} {kib}"]
            numbers = [f"{result['microseconds']:.0f}", f"±{result['spread']:.0%}", f"{result['busy']:.0f}"]
            rows.append([str(kib), name, *numbers, f"{peer / result['microseconds']:.2f}"])
    print(table(["KiB", "", "us a message", "", "us busy", "times as fast as torch"], rows, left=2))


if __name__ == "__main__":
    main()
