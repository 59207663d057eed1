"""A service whose folder is replaced and whose stages are killed: every answer is that of the export it began with.

    PYTHONPATH=tests python benchmarks/serve_replaced.py [--requests 10000] [--replaced 5] [--kills 10] [--json FILE]

Eight clients send requests. At even distances among them the folder is replaced by another export, in turn by
overwriting its files and as a whole, or a stage is killed (kill -9). Each stage is killed after a replacement, so that
it starts from what the front holds. Once with stages of the front's own machine, once with `--hosts`.

The bars: no wrong answer, and no request fails that was not at work in a killed stage, as its status says.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from drumline.serve.wire.links import free_port
from drumline.serve.wire.protocol import InferRequest, message, stub
from drumline.serve.wire.tensors import put_inputs, read_outputs
from served.services import expected, rows_of, write_served
from serving import served, stages_of

CLIENTS, STAGES = 8, 2
AT_WORK = ", at work on this"  # how a stage ends that was killed


def overwrite(source: Path, target: Path) -> None:
    """Put the files of one export over those of another, where they are."""
    for path in source.rglob("*.*"):
        (target / path.relative_to(source)).write_bytes(path.read_bytes())


def exchange(source: Path, target: Path) -> None:
    """Put one export in the place of another."""
    shutil.rmtree(target)
    shutil.copytree(source, target)


@contextlib.contextmanager
def hosted(folder: Path) -> Iterator[tuple[list[str], list[int]]]:
    """Start each stage by its own command, the last one first; yields addresses and processes."""
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(STAGES)]
    started = []
    try:
        for number in reversed(range(STAGES)):
            command = [sys.executable, "-m", "drumline", "serve", str(folder), "--stage", str(number)]
            command += ["--listen", addresses[number]]
            command += ["--next", addresses[number + 1]] if number + 1 < STAGES else []
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
            out = started[-1].stdout
            assert out is not None
            assert out.readline() == "ready\n"
        yield addresses, [process.pid for process in started]
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.communicate(timeout=60)


def events(replaced: int, kills: int, replace: Sequence[Callable[[], None]], kill: Callable[[int], None]) -> list[Any]:
    """Return what happens, in turn: replacements among kills, each stage after some replacement."""
    found: list[Any] = []
    for at in range(kills):
        if at * replaced // kills != (at - 1) * replaced // kills or at == 0:
            found.append(replace[len(found) % len(replace)])
        found.append(partial(kill, at % STAGES))
    return found


class Load:
    """Requests of several clients, with what came of them, and what happens among them."""

    def __init__(self, address: str, requests: int, happenings: Sequence[Callable[[], None]]) -> None:
        self._address, self._left = address, requests
        self._at = [requests * (number + 1) // (len(happenings) + 1) for number in range(len(happenings))]
        self._happenings = list(happenings)
        self.codes: Counter[str] = Counter()
        self.wrong = 0

    async def run(self) -> None:
        """Send all requests."""
        async with grpc.aio.insecure_channel(self._address) as channel:
            infer, ready = stub(channel, "ModelInfer"), stub(channel, "ServerReady")
            await asyncio.gather(self._happen(ready), *(self._client(infer, number) for number in range(CLIENTS)))

    async def _client(self, infer: Any, number: int) -> None:
        seed = number * 1_000_000
        while self._left > 0:
            self._left -= 1
            seed += 1
            x = rows_of(1 + seed % 8, seed)
            request = InferRequest(model_name="tanh")
            put_inputs(request, {"x": x})
            try:
                answer = read_outputs(await infer(request, timeout=120))["y"]
            except grpc.aio.AioRpcError as error:
                why = error.details() or ""
                self.codes[f"{error.code().name}: {why[8:] if why.startswith('stage ') else why}"] += 1
            else:
                self.codes["OK"] += 1
                self.wrong += not np.allclose(answer, expected(x, STAGES), atol=1e-5)

    async def _happen(self, ready: Any) -> None:
        """Let each thing happen at its request, and wait until the service is ready again."""
        for left, happen in zip(sorted(self._at, reverse=True), self._happenings, strict=True):
            while self._left > left:
                await asyncio.sleep(0.002)
            happen()
            await asyncio.sleep(0.05)  # until it is noticed
            while not (await ready(message("ServerReadyRequest")(), timeout=60)).ready:
                await asyncio.sleep(0.01)


def case(work: Path, *, is_hosted: bool, requests: int, replaced: int, kills: int) -> dict[str, Any]:
    """Run one of both ways, and judge it."""
    folder, other = write_served(work / "tanh"), write_served(work / "other", repeat=3)
    with contextlib.ExitStack() as stack:
        addresses, parents = stack.enter_context(hosted(folder)) if is_hosted else ([], [])
        told = stack.enter_context(served(folder, *(["--hosts", ",".join(addresses)] if is_hosted else [])))
        parents = parents or [told["front"]]

        def kill(number: int) -> None:
            os.kill(stages_of(parents)[number], signal.SIGKILL)

        replace = (partial(overwrite, other, folder), partial(exchange, other, folder))
        load = Load(told["address"], requests, events(replaced, kills, replace, kill))
        began = time.time()
        asyncio.run(load.run())
    lost = {code: count for code, count in load.codes.items() if code != "OK" and not code.endswith(AT_WORK)}
    return {"codes": dict(load.codes), "wrong": load.wrong, "lost": lost, "seconds": time.time() - began,
            "holds": not lost and not load.wrong and sum(load.codes.values()) == requests}  # fmt: skip


def main() -> int:
    """Run both ways, print and judge."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--replaced", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    counts = {"requests": args.requests, "replaced": args.replaced, "kills": args.kills}
    outcomes = {}
    for name, is_hosted in (("local", False), ("hosts", True)):
        with tempfile.TemporaryDirectory() as work:
            outcomes[name] = case(Path(work), is_hosted=is_hosted, **counts)
        told = ", ".join(f"{key} {value}" for key, value in outcomes[name].items() if key != "holds")
        print(f"{'holds' if outcomes[name]['holds'] else 'MISSED':<7}{name}: {counts}: {told}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({**counts, **outcomes}, indent=2) + "\n")
    return 0 if all(entry["holds"] for entry in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
