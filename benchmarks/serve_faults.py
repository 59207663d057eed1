"""A service under faults: dead, stopped and disturbed stages, clients that go, garbage, and a soak.

    PYTHONPATH=tests python benchmarks/serve_faults.py [--short] [--json FILE]

    kill        kill -9 of each stage under load. Without repeats only requests inside it fail, with UNAVAILABLE; with
                repeats none does; the service is back within 5 s
    slow        a stage stands still for 2 s: requests with a deadline of 1 s get DEADLINE_EXCEEDED, queues stay bounded
    gone        clients that cancel: nothing is left in queue or pipe
    garbage     10,000 pieces of garbage at all ports: no stage is started again, memory and descriptors stay
    soak        requests for two minutes: memory of every process stays

Stages are small graphs made by hand. The short form has a twentieth of the garbage and of the soak.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from drumline.serve.wire.protocol import InferRequest, stub
from drumline.serve.wire.tensors import put_inputs, read_outputs
from served.fuzzing import garbage_at
from served.services import WIDTH, expected, rows_of, write_served
from serving import by_stage, descriptors, metric, resident_mib, served

CLIENTS, MOST_SECONDS_BACK = 8, 5.0
MOST_GROWTH_MIB = 16.0


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
                        self.answers.append((time.monotonic(), error.code().name))

            async def disturb() -> None:
                await asyncio.sleep(after)
                await fault()

            tasks = [client(number) for number in range(CLIENTS)]
            await asyncio.gather(*tasks, *([disturb()] if fault else []))

    @property
    def codes(self) -> dict[str, int]:
        """How often each status came."""
        return dict(Counter(code for _, code in self.answers))


def kill(folder: Path, stage: int, retries: int) -> dict[str, Any]:
    moment = 0.0
    with served(folder, "--retries", str(retries)) as told:
        watched = Watched(told)

        async def fault() -> None:
            nonlocal moment
            moment = time.monotonic()
            os.kill(told["processes"][stage], signal.SIGKILL)

        asyncio.run(watched.run(8.0, fault, 2.0))
    failed = {code: count for code, count in watched.codes.items() if code != "OK"}
    # A request that began before the kill and had left the stage may still be answered: look behind the last failure.
    quiet = [at for at, code in watched.answers if at > moment]
    gaps = [b - a for a, b in zip([moment, *quiet], quiet, strict=False)]
    back = max(gaps, default=99.0)
    fine = set(failed) <= {"UNAVAILABLE"} and sum(failed.values()) <= (0 if retries else CLIENTS) and not watched.wrong
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
    fine = set(watched.codes) <= {"OK", "DEADLINE_EXCEEDED"} and watched.answers[-1][1] == "OK" and not watched.wrong
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


def _held(told: dict[str, Any]) -> list[tuple[float, int]]:
    return [(resident_mib(one), descriptors(one)) for one in (told["front"], *told["processes"])]


def garbage(folder: Path, cases: int) -> dict[str, Any]:
    with served(folder) as told:
        ports = [int(one.rpartition(":")[2]) for one in (told["address"], *told["stages"])] + [told["metrics_port"]]
        for port in ports:
            garbage_at(port, cases=max(cases // 20, 20), seed=port)  # what a process allocates once
        before = _held(told)
        sent = sum(garbage_at(port, cases=cases // len(ports), seed=port + 1) for port in ports)
        time.sleep(2.0)
        after = _held(told)
        restarts = sum(by_stage(told, "drumline_stage_restarts_total").values())
        watched = Watched(told)
        asyncio.run(watched.run(1.0))
    grown = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    opened = [b[1] - a[1] for a, b in zip(before, after, strict=True)]
    fine = not restarts and max(grown) < MOST_GROWTH_MIB and max(opened) <= 4 and set(watched.codes) == {"OK"}
    return {"cases": sent, "restarts": restarts, "grown_mib": grown, "descriptors": opened, "holds": fine}


def soak(folder: Path, seconds: float) -> dict[str, Any]:
    with served(folder) as told:
        asyncio.run(Watched(told).run(seconds / 4))
        before = _held(told)
        watched = Watched(told)
        asyncio.run(watched.run(seconds))
        after = _held(told)
    grown = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    fine = max(grown) < MOST_GROWTH_MIB and set(watched.codes) == {"OK"} and not watched.wrong
    return {"codes": watched.codes, "grown_mib": grown, "holds": fine}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    share = 20 if args.short else 1
    with tempfile.TemporaryDirectory() as work:
        folder = write_served(Path(work) / "tanh", width=WIDTH)
        found: dict[str, dict[str, Any]] = {
            f"kill stage {stage}, {retries} repeats": kill(folder, stage, retries)
            for stage in (0, 1)
            for retries in (0, 1)
        }
        found["slow stage"] = slow(folder)
        found["clients that go"] = gone(folder, 1000 // share)
        found["garbage"] = garbage(folder, 10_000 // share)
        found["soak"] = soak(folder, 120.0 / share)
    for name, one in found.items():
        told = ", ".join(f"{key} {value}" for key, value in one.items() if key != "holds")
        print(f"{'holds' if one['holds'] else 'MISSED':<7}{name}: {told}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(one["holds"] for one in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
