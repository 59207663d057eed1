"""A service under faults: dead, stopped and disturbed stages, clients that go, wrong requests, garbage, and a soak.

    PYTHONPATH=tests python benchmarks/serve_faults.py [--short] [--only PATTERN] [--json FILE]

    kill        kill -9 of each stage under load. Only requests inside it fail, with UNAVAILABLE that names the stage,
                and with repeats only those that it was computing; the service is back within 5 s
    hang        a stage stops for good: the same, 1 s (--hang) later
    slow        a stage stands still for 2 s: requests with a deadline of 1 s get DEADLINE_EXCEEDED, queues stay bounded
    gone        clients that cancel: nothing is left in queue or pipe
    wrong       shapes, types, names and bytes that do not fit get INVALID_ARGUMENT that names the input; a deadline
                that has passed gets DEADLINE_EXCEEDED
    tls         mutual TLS: no certificate, one of another authority and no TLS get no connection
    garbage     10,000 pieces of garbage and of oversized tensors at all ports (front, stages, metrics): no stage is
                started again, memory, threads and descriptors stay
    soak        requests for two minutes: memory of every process stays

Stages are small graphs made by hand. The short form has a twentieth of the garbage and of the soak. The whole one takes
about 8 minutes on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import numpy as np

from drumline.serve.wire.links import Tls
from drumline.serve.wire.manifest import read_manifest
from drumline.serve.wire.protocol import InferRequest, stub
from drumline.serve.wire.tensors import put_inputs, read_outputs
from served.certificates import Authority
from served.fuzzing import garbage_at
from served.services import (
    WIDTH,
    Running,
    channel_to,
    expected,
    inferred,
    request_of,
    rows_of,
    serving,
    status_of,
    write_served,
)
from serving import by_stage, descriptors, metric, resident_mib, served

CLIENTS, MOST_SECONDS_BACK = 8, 5.0
MOST_GROWTH_MIB = 16.0
LIMIT = 2**20  # bytes of a message, where garbage is sent
LOOKS = 25  # at the memory of every process, while garbage is sent to one port


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


class Watched:
    """Clients that send requests one after the other, and note when which status came."""

    def __init__(self, told: dict[str, Any], timeout: float = 30.0) -> None:
        self._told, self._timeout = told, timeout
        self.answers: list[tuple[float, str]] = []
        self.wrong = 0

    async def run(self, seconds: float, fault: Any = None, after: float = 0.0) -> None:
        """Send for so many seconds; `fault` happens after some of them."""
        end = time.monotonic() + seconds
        async with grpc.aio.insecure_channel(self._told["address"]) as channel:
            infer = stub(channel, "ModelInfer")

            async def client(number: int) -> None:
                at = 0
                while time.monotonic() < end:
                    at += 1
                    x = rows_of(1 + at % 8, seed=number * 100_000 + at)
                    request = InferRequest(model_name="tanh")
                    put_inputs(request, {"x": x})
                    try:
                        answer = read_outputs(await infer(request, timeout=self._timeout))["y"]
                        self.wrong += not np.allclose(answer, expected(x), atol=1e-5)
                        self.answers.append((time.monotonic(), "OK"))
                    except grpc.aio.AioRpcError as error:
                        told, _, why = (error.details() or "").partition(":")
                        named = f", {told}" if told.startswith("stage ") else ""
                        named += ", at work on this" if why.endswith("at work on this") else ""
                        self.answers.append((time.monotonic(), error.code().name + named))

            async def disturb() -> None:
                await asyncio.sleep(after)
                await fault()

            tasks = [client(number) for number in range(CLIENTS)]
            await asyncio.gather(*tasks, *([disturb()] if fault else []))

    @property
    def codes(self) -> dict[str, int]:
        """How often each status came."""
        return dict(Counter(code for _, code in self.answers))


def kill(folder: Path, stage: int, retries: int, how: signal.Signals = signal.SIGKILL) -> dict[str, Any]:
    moment = 0.0
    with served(folder, "--retries", str(retries), "--hang", "1" if how is signal.SIGSTOP else "30") as told:
        watched = Watched(told)

        async def fault() -> None:
            nonlocal moment
            moment = time.monotonic()
            os.kill(told["processes"][stage], how)

        asyncio.run(watched.run(8.0, fault, 2.0))
    failed = {code: count for code, count in watched.codes.items() if code != "OK"}
    # The longest time without an answer since the kill: some requests had left the stage and are still answered.
    quiet = [at for at, code in watched.answers if at > moment and code == "OK"]
    gaps = [b - a for a, b in zip([moment, *quiet], quiet, strict=False)]
    back = max(gaps, default=99.0)
    fine = (
        set(failed) <= {f"UNAVAILABLE, stage {stage}{more}" for more in (", at work on this", "")[: 2 - retries]}
        and sum(failed.values()) <= CLIENTS
        and not watched.wrong
    )
    return {"stage": stage, "retries": retries, "codes": watched.codes, "seconds_back": back,
            "holds": fine and back < MOST_SECONDS_BACK}  # fmt: skip


def slow(folder: Path) -> dict[str, Any]:
    with served(folder, "--max-requests", "64") as told:
        watched = Watched(told, timeout=1.0)

        async def fault() -> None:
            os.kill(told["processes"][1], signal.SIGSTOP)
            await asyncio.sleep(2.0)
            os.kill(told["processes"][1], signal.SIGCONT)

        asyncio.run(watched.run(6.0, fault, 1.0))
        queued = metric(told, "drumline_queue_requests")
    late = {code for code in watched.codes if code.startswith("DEADLINE_EXCEEDED")}
    fine = bool(late) and set(watched.codes) == {"OK", *late} and watched.answers[-1][1] == "OK" and not watched.wrong
    return {"codes": watched.codes, "queued_after": queued, "holds": fine and queued == 0}


def gone(folder: Path, clients: int) -> dict[str, Any]:
    async def run(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            infer = stub(channel, "ModelInfer")
            for number in range(clients):
                request = InferRequest(model_name="tanh")
                put_inputs(request, {"x": rows_of(64, seed=number)})
                call = infer(request, timeout=30)
                await asyncio.sleep(0.001 * (number % 5))
                call.cancel()

    with served(folder) as told:
        asyncio.run(run(told["address"]))
        watched = Watched(told)
        asyncio.run(watched.run(1.0))
        time.sleep(0.5)
        left = metric(told, "drumline_queue_requests") + metric(told, "drumline_pipe_microbatches")
    return {
        "clients": clients,
        "left": left,
        "codes": watched.codes,
        "holds": left == 0 and set(watched.codes) == {"OK"},
    }


def wrong(running: Running) -> dict[str, Any]:
    """Return what clients are told whose requests do not fit."""
    told: dict[str, str] = {}
    with channel_to(running.address) as channel:
        call = stub(channel, "ModelInfer")
        for name, change in WRONG.items():
            request = request_of({"x": rows_of(2)})
            change(request)
            code, why = status_of(partial(call, request, timeout=30))
            told[name] = f"{code.name}: {why}"
        code, _ = status_of(partial(call, request_of({"x": rows_of(2)}), timeout=1e-6))
    fine = all(text.startswith("INVALID_ARGUMENT: input ") for text in told.values())
    return {"told": told, "deadline": code.name, "holds": fine and code is grpc.StatusCode.DEADLINE_EXCEEDED}


WRONG: dict[str, Callable[[Any], None]] = {
    "type": lambda request: setattr(request.inputs[0], "datatype", "INT64"),
    "name": lambda request: setattr(request.inputs[0], "name", "z"),
    "width": lambda request: request.inputs[0].shape.__setitem__(1, WIDTH + 1),
    "dimensions": lambda request: request.inputs[0].shape.append(1),
    "rows": lambda request: request.inputs[0].shape.__setitem__(0, 2**60),
    "no rows": lambda request: request.inputs[0].shape.__setitem__(0, 0),
    "bytes": lambda request: request.raw_input_contents.__setitem__(0, b"7 bytes"),
    "missing": lambda request: request.ClearField("inputs") or request.ClearField("raw_input_contents"),
}


def tls(folder: Path, work: Path) -> dict[str, Any]:
    """Return the status that clients with each certificate get."""
    ours, others = Authority(work, "ours"), Authority(work, "others")
    server, client, foreign = ours.sign("server"), ours.sign("client"), others.sign("foreign")
    ways = {
        "right": Tls(*client, ours.path),
        "another authority's": Tls(*foreign, ours.path),
        "none": Tls(authority=ours.path),
        "another server expected": Tls(*client, others.path),
    }
    found = {}
    with serving(folder, tls=Tls(*server, ours.path)) as running:
        for name, way in ways.items():
            with grpc.secure_channel(running.address, way.channel()) as channel:
                found[name] = status_of(partial(inferred, channel, {"x": rows_of(1)}, timeout=5))[0].name
        with channel_to(running.address) as channel:
            found["no TLS"] = status_of(partial(inferred, channel, {"x": rows_of(1)}, timeout=5))[0].name
    fine = found.pop("right") == "OK" and set(found.values()) == {"UNAVAILABLE"}
    return {"told": found, "holds": fine}


def _held(told: dict[str, Any]) -> list[tuple[float, int, int]]:
    processes = (told["front"], *told["processes"])
    return [(resident_mib(item), descriptors(item), len(os.listdir(f"/proc/{item}/task"))) for item in processes]


def _grown(before: list[tuple[float, int, int]], after: list[tuple[float, int, int]]) -> dict[str, list[float]]:
    names = ("mib", "descriptors", "threads")
    return {name: [b[at] - a[at] for a, b in zip(before, after, strict=True)] for at, name in enumerate(names)}


def risen(values: Sequence[float]) -> float:
    """Return by how much a noisy value rises from first to last: what its last third is above its first, by medians.

    Messages of a megabyte come and go, and with them what an allocator keeps; two single looks differ by 10 MiB.
    """
    third = len(values) // 3
    return 1.5 * (median(values[-third:]) - median(values[:third]))


def garbage(folder: Path, cases: int) -> dict[str, Any]:
    with served(folder, "--max-message", str(LIMIT)) as told:
        manifest = read_manifest(folder)
        ports = [(told["address"], ""), (f"127.0.0.1:{told['metrics_port']}", "")]
        ports += [(address, manifest.handshake(number)) for number, address in enumerate(told["stages"])]
        for seed, (port, export) in enumerate(ports):  # until allocators have what they keep
            garbage_at(port, cases=cases // 8, seed=seed, limit=LIMIT, export=export)
        before, sent = _held(told), 0
        rising = [0.0] * len(before)
        for seed, (port, export) in enumerate(ports):
            tell(f"garbage: {sent} of {cases}")
            seen = []
            for turn in range(LOOKS):
                share, drawn = cases // len(ports) // LOOKS, 1000 * seed + turn
                sent += garbage_at(port, cases=share, seed=drawn, limit=LIMIT, export=export)
                seen.append([mib for mib, _, _ in _held(told)])
            rising = [
                all_so_far + risen(each) for all_so_far, each in zip(rising, zip(*seen, strict=True), strict=True)
            ]
        time.sleep(2.0)
        grown = _grown(before, _held(told)) | {"mib": rising}
        restarts = sum(by_stage(told, "drumline_stage_restarts_total").values())
        watched = Watched(told)
        asyncio.run(watched.run(1.0))
    fine = not restarts and max(grown["mib"]) < MOST_GROWTH_MIB and set(watched.codes) == {"OK"} and not watched.wrong
    fine = fine and max(grown["descriptors"]) <= 4 and max(grown["threads"]) <= 4
    return {"cases": sent, "restarts": restarts, "grown": grown, "holds": fine}


def soak(folder: Path, seconds: float) -> dict[str, Any]:
    with served(folder) as told:
        asyncio.run(Watched(told).run(seconds / 4))
        before = _held(told)
        watched = Watched(told)
        asyncio.run(watched.run(seconds))
        grown = _grown(before, _held(told))
    fine = max(grown["mib"]) < MOST_GROWTH_MIB and set(watched.codes) == {"OK"} and not watched.wrong
    return {"codes": watched.codes, "grown": grown, "holds": fine}


def _wrong(folder: Path) -> dict[str, Any]:
    with serving(folder) as running:
        return wrong(running)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="faults whose name matches, as a shell would")
    args = parser.parse_args(words)
    share = 20 if args.short else 1
    with tempfile.TemporaryDirectory() as work:
        folder = write_served(Path(work) / "tanh", width=WIDTH)
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            f"kill stage {stage}, {retries} repeats": partial(kill, folder, stage, retries)
            for stage in (0, 1)
            for retries in (0, 1)
        }
        cases |= {
            "stage that hangs": partial(kill, folder, 1, 1, signal.SIGSTOP),
            "slow stage": partial(slow, folder),
            "clients that go": partial(gone, folder, 1000 // share),
            "wrong requests": partial(_wrong, folder),
            "wrong certificates": partial(tls, folder, Path(work)),
            "garbage": partial(garbage, folder, 10_000 // share),
            "soak": partial(soak, folder, 120.0 / share),
        }
        found = {}
        for name, case in cases.items():
            if fnmatch(name, args.only):
                tell(name)
                found[name] = case()
    for name, entry in found.items():
        told = ", ".join(f"{key} {value}" for key, value in entry.items() if key != "holds")
        print(f"{'holds' if entry['holds'] else 'MISSED':<7}{name}: {told}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(entry["holds"] for entry in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
