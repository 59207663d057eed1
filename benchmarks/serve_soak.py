"""A long load of a small model: memory, descriptors and threads of the front and of each stage stay as they are.

    PYTHONPATH=tests python benchmarks/serve_soak.py [--requests 100000] [--json FILE]

24 clients send requests of 1 to 8 rows. One in ten has a deadline that may pass, one in ten is cancelled. The
first fifth warms up. From then on every process is looked at 60 times; `risen` says by how much its memory rises.

The bars: memory rises by less than 16 MiB in each process, descriptors and threads by no more than 4; no wrong answer,
and no status beside OK, DEADLINE_EXCEEDED and CANCELLED.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from drumline.serve.wire.protocol import InferRequest, stub
from drumline.serve.wire.tensors import put_inputs, read_outputs
from serve_faults import MOST_GROWTH_MIB, _grown, _held, risen
from served.services import expected, rows_of, write_served
from serving import metric, served

CLIENTS, LOOKS, MOST_MORE = 24, 60, 4
SHARE = 0.1  # of requests that are cancelled, and of those with a short deadline
ALLOWED = {"OK", "DEADLINE_EXCEEDED", "CANCELLED"}


class Load:
    """Requests of all clients, and what came of them."""

    def __init__(self, told: dict[str, Any], requests: int) -> None:
        self._told, self._left = told, requests
        self.codes: Counter[str] = Counter()
        self.wrong = 0

    async def run(self) -> None:
        """Send all requests."""
        async with grpc.aio.insecure_channel(self._told["address"]) as channel:
            infer = stub(channel, "ModelInfer")
            await asyncio.gather(*(self._client(infer, number) for number in range(CLIENTS)))

    async def _client(self, infer: Any, number: int) -> None:
        chance, inputs = random.Random(number), [rows_of(1 + at % 8, 100 * number + at) for at in range(16)]
        answers = [expected(x) for x in inputs]
        while self._left > 0:
            self._left -= 1
            at, drawn = chance.randrange(len(inputs)), chance.random()
            request = InferRequest(model_name="tanh")
            put_inputs(request, {"x": inputs[at]})
            call = infer(request, timeout=chance.uniform(0.0, 0.02) if drawn < SHARE else 60.0)
            if drawn > 1 - SHARE:
                await asyncio.sleep(chance.uniform(0.0, 0.005))
                call.cancel()
            try:
                answer = read_outputs(await call)["y"]
                self.wrong += not np.allclose(answer, answers[at], atol=1e-5)
                self.codes["OK"] += 1
            except grpc.aio.AioRpcError as error:
                self.codes[error.code().name] += 1
            except asyncio.CancelledError:
                self.codes["CANCELLED"] += 1


def soak(folder: Path, requests: int) -> dict[str, Any]:
    """Run the load, and look at the processes."""
    began = time.time()
    with served(folder) as told:
        asyncio.run(Load(told, requests // 5).run())
        before, seen, codes, wrong = _held(told), [], Counter[str](), 0
        for _ in range(LOOKS):
            load = Load(told, requests * 4 // 5 // LOOKS)
            asyncio.run(load.run())
            codes, wrong = codes + load.codes, wrong + load.wrong
            seen.append([mib for mib, _, _ in _held(told)])
        time.sleep(1.0)  # the last cancellations reach the stages
        grown = _grown(before, _held(told)) | {"mib": [risen(each) for each in zip(*seen, strict=True)]}
        left = metric(told, "drumline_queue_requests") + metric(told, "drumline_queue_bytes")
    few = max(*grown["descriptors"], *grown["threads"]) <= MOST_MORE
    fine = max(grown["mib"]) < MOST_GROWTH_MIB and few and set(codes) <= ALLOWED and not wrong and not left
    return {"codes": dict(codes), "wrong": wrong, "left": left, "grown": grown, "seconds": time.time() - began,
            "holds": fine}  # fmt: skip


def main() -> int:
    """Run, print and judge."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        outcome = soak(write_served(Path(work) / "tanh"), args.requests)
    told = ", ".join(f"{key} {value}" for key, value in outcome.items() if key != "holds")
    print(f"{'holds' if outcome['holds'] else 'MISSED':<7}soak of {args.requests} requests: {told}")
    if args.json:
        args.json.write_text(json.dumps({"requests": args.requests, **outcome}, indent=2) + "\n")
    return 0 if outcome["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
