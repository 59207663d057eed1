"""A served pipeline against its bars, and against the same model without a pipeline.

    python benchmarks/serve.py [--short] [--no-pin] [--json FILE]

Two GPTs are exported: a small one, for exactness and overhead, and one whose two stages take at least 10 ms for a row
(its rows are as long as that needs). Services, and the sessions that they are compared with, are processes of their
own; this process is the client.

    exact       10,000 requests of 1 to 8 rows from 8 concurrent clients: every answer held against PyTorch
    overhead    one request at a time: the front, against calling both stages one after the other from here
    saturated   16 requests at a time for 30 s: throughput, bubble, each stage's processor seconds beside wall
    poisson     random arrivals at 70% of that: time in the pipe, waiting beside the mean wait of an M/D/1 queue
    peers       the service with one microbatch at a time, and the whole model in one session on one and on two threads,
                in turns with the pipelined service

Stages have cores of their own (`--pin`); `--no-pin` leaves them to the system. The short form has a twelfth of the
requests and an eighth of the seconds: it shows that everything runs. The whole one takes about 8 minutes on two cores.
It prints what is going on to stderr, how much of the cores other machines on the host took, and ends with 1 if a bar is
missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import grpc
import numpy as np
import torch

from drumline.report.draw.table import table
from drumline.serve.export.check import TOLERANCE, Subject, plain_outputs
from drumline.serve.export.export import export
from drumline.serve.load.generator import Demand, Loader, Result
from drumline.serve.session import open_session
from drumline.serve.stage_calls import ALONE
from drumline.serve.wire.frames import EXPORT
from drumline.serve.wire.manifest import Manifest, read_manifest
from drumline.serve.wire.protocol import InferRequest, stub
from drumline.serve.wire.tensors import put_inputs, read_outputs
from drumline.train.config.settings import BatchSettings, ModelSettings, RunSettings, TrainSettings
from drumline.train.models.build import build_model
from measure import Stolen, machine
from serving import by_stage, metric, processor_seconds, served

VOCABULARY, LONGEST = 257, 256
SMALL = ModelSettings(num_layers=4, hidden=64, num_heads=4)
LARGE = ModelSettings(num_layers=8, hidden=384, num_heads=6)
LEAST_STAGE, MOST_IN_PIPE, MOST_BUBBLE, MOST_OVERHEAD = 0.010, 0.050, 0.10, 0.001
SATURATING, SHARE, CLIENTS = 16, 0.7, 8


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def built(settings: ModelSettings) -> torch.nn.Module:
    return build_model(
        TrainSettings(model=settings, batch=BatchSettings(sequence=LONGEST), run=RunSettings(seed=1))
    ).model.eval()


def exported(model: torch.nn.Module, out: Path, num_stages: int, length: int) -> Manifest:
    def example(rows: int, size: int) -> dict[str, torch.Tensor]:
        return {"tokens": torch.randint(VOCABULARY, (rows, size))}

    subject = Subject("gpt", model, example, {"length": LONGEST})
    return export(subject, out, num_stages=num_stages, rows=2, length=length)


def stage_seconds(folder: Path, manifest: Manifest, length: int) -> list[float]:
    """Return what each stage takes for one row of a length, with nothing else running."""
    arrays: dict[str, Any] = {"tokens": np.zeros((1, length), np.int64)}
    found = []
    for stage in manifest.stages:
        session = open_session(folder / stage.file)
        names = [output.name for output in stage.outputs]
        taken = []
        for _ in range(7):
            start = time.perf_counter()
            made = session.run(names, arrays)
            taken.append(time.perf_counter() - start)
        arrays = dict(zip(names, made, strict=True))
        found.append(min(taken))
    return found


def length_for(folder: Path, manifest: Manifest) -> int:
    """Return the shortest length, in steps of 4, at which every stage takes at least 10 ms a row, and some more."""
    for length in range(4, LONGEST, 4):
        if min(stage_seconds(folder, manifest, length)) >= LEAST_STAGE * 1.02:
            return length
    return LONGEST


# ---- exactness ---------------------------------------------------------------------------------------------------


def exact(folder: Path, model: torch.nn.Module, requests: int, flags: Sequence[str]) -> dict[str, Any]:
    """Return how far answers are from PyTorch's: random tokens, so that another request's answer is far off."""
    worst, answers = 0.0, 0

    def compare(inputs: dict[str, Any], outputs: dict[str, Any]) -> None:
        nonlocal worst, answers
        (right,) = plain_outputs(model, {"tokens": torch.from_numpy(inputs["tokens"])})
        assert outputs["output"].shape == right.shape
        worst = max(worst, float(np.abs(outputs["output"] - right).max() / np.abs(right).max()))
        answers += 1
        if answers % max(requests // 10, 1) == 0:
            tell(f"exact: {answers} of {requests}")

    async def client(address: str, number: int) -> Result:
        async with Loader(address) as loader:
            demand = Demand(1, 8, length=8, below=VOCABULARY, seed=number)
            return await loader.closed(1, 0, demand, requests // CLIENTS, compare)

    async def run(address: str) -> list[Result]:
        return await asyncio.gather(*(client(address, number) for number in range(CLIENTS)))

    with served(folder, *flags) as told:
        found = asyncio.run(run(told["address"]))
    errors = sum((result.codes for result in found), Counter[str]())
    del errors["OK"]
    asked = requests // CLIENTS * CLIENTS
    return {"requests": asked, "answered": answers, "errors": dict(errors), "largest_relative": worst,
            "holds": answers == asked and worst <= TOLERANCE}  # fmt: skip


# ---- overhead ----------------------------------------------------------------------------------------------------


def overhead(folder: Path, length: int, rounds: int, flags: Sequence[str]) -> dict[str, Any]:
    """Return the median of both ways, in turns."""
    tokens, manifest = {"tokens": np.zeros((1, length), np.int64)}, read_manifest(folder)

    async def run(told: dict[str, Any]) -> tuple[list[float], list[float]]:
        async with contextlib.AsyncExitStack() as kept:
            channels = [
                await kept.enter_async_context(grpc.aio.insecure_channel(stage))
                for stage in (told["address"], *told["stages"])
            ]
            calls = [stub(channel, "ModelInfer") for channel in channels]

            async def through() -> None:
                request = InferRequest(model_name="gpt")
                put_inputs(request, tokens)
                read_outputs(await calls[0](request, timeout=30))

            async def by_hand() -> None:
                arrays: dict[str, Any] = tokens
                for stage, call in enumerate(calls[1:]):
                    request = InferRequest(model_name="gpt")
                    put_inputs(request, arrays)
                    alone = (ALONE, "1"), (EXPORT, manifest.handshake(stage))
                    arrays = read_outputs(await call(request, timeout=30, metadata=alone))

            taken: tuple[list[float], list[float]] = ([], [])
            for turn in range(rounds + 10):
                for way, found in zip((through, by_hand), taken, strict=True):
                    start = time.perf_counter()
                    await way()
                    if turn >= 10:
                        found.append(time.perf_counter() - start)
            return taken

    with served(folder, *flags) as told:
        front, hand = asyncio.run(run(told))
    added = median(front) - median(hand)
    pairs = [a - b for a, b in zip(front, hand, strict=True)]
    return {"rounds": rounds, "front_ms": median(front) * 1e3, "by_hand_ms": median(hand) * 1e3,
            "added_ms": added * 1e3, "pairs_ms": [value * 1e3 for value in np.percentile(pairs, (10, 50, 90))],
            "holds": added < MOST_OVERHEAD}  # fmt: skip


# ---- load --------------------------------------------------------------------------------------------------------


def closed(address: str, seconds: float, length: int) -> Result:
    async def run() -> Result:
        async with Loader(address) as loader:
            await loader.closed(SATURATING, min(2.0, seconds / 4), Demand(length=length, below=VOCABULARY))
            return await loader.closed(SATURATING, seconds, Demand(length=length, below=VOCABULARY))

    return asyncio.run(run())


def poisson(address: str, rate: float, seconds: float, length: int) -> Result:
    async def run() -> Result:
        async with Loader(address) as loader:
            return await loader.opened(rate, seconds, Demand(length=length, below=VOCABULARY))

    return asyncio.run(run())


def loaded(
    folder: Path, length: int, seconds: float, record: Path, flags: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the saturated load and the random one."""
    with served(folder, "--record", str(record), *flags) as told:
        closed(told["address"], min(3.0, seconds), length)
        computed = by_stage(told, "drumline_stage_compute_seconds_sum")
        used, begun = [processor_seconds(process) for process in told["processes"]], time.perf_counter()
        tell(f"saturated: {SATURATING} at a time for {seconds:g} s")
        full = closed(told["address"], seconds, length)
        wall = time.perf_counter() - begun
        after = by_stage(told, "drumline_stage_compute_seconds_sum")
        used = [processor_seconds(process) - first for process, first in zip(told["processes"], used, strict=True)]
        busy = [after[stage] - computed[stage] for stage in sorted(after)]
        cut = {name: metric(told, f"drumline_{name}") for name in ("microbatches_per_batch", "pipe_window")}
        count, rows = (metric(told, f"drumline_microbatch_rows_{name}") for name in ("count", "sum"))
        peak = full.rows / full.seconds
        rate = SHARE * peak
        tell(f"poisson: {rate:.1f} a second for {seconds:g} s")
        some = poisson(told["address"], rate, seconds, length)
        slowest = max(busy) / max(full.rows, 1) * full.seconds / wall
    bubble = 1 - sum(busy) / (len(busy) * wall)
    saturated = {
        "seconds": wall, "rows_per_second": peak, "bubble": bubble, "stage_busy_seconds": busy,
        "rows_per_microbatch": rows / max(count, 1), **cut,
        "stage_processor_seconds": used, "errors": full.to_json()["errors"], "holds": bubble < MOST_BUBBLE,
    }  # fmt: skip
    told_of = some.to_json()
    in_pipe = told_of["pipe_seconds"]["p99"]
    random = {
        "rate": rate, "requests": told_of["requests"], "errors": told_of["errors"],
        "pipe_p50_ms": told_of["pipe_seconds"]["p50"] * 1e3, "pipe_p99_ms": in_pipe * 1e3,
        "latency_p50_ms": told_of["latency_seconds"]["p50"] * 1e3,
        "latency_p99_ms": told_of["latency_seconds"]["p99"] * 1e3,
        "wait_mean_ms": mean(some.queues) * 1e3, "wait_p99_ms": told_of["queue_seconds"]["p99"] * 1e3,
        "md1_wait_mean_ms": SHARE * slowest / (2 * (1 - SHARE)) * 1e3, "holds": in_pipe < MOST_IN_PIPE,
    }  # fmt: skip
    return saturated, random


_SESSION = """
import sys, time
import numpy as np
from pathlib import Path
from drumline.serve.session import open_session
path, threads, rows, length, seconds = Path(sys.argv[1]), *map(int, sys.argv[2:5]), float(sys.argv[5])
session = open_session(path, threads=threads)
tokens = np.zeros((rows, length), np.int64)
session.run(None, {"tokens": tokens})
done, begun = 0, time.perf_counter()
while time.perf_counter() - begun < seconds:
    session.run(None, {"tokens": tokens})
    done += rows
print(done / (time.perf_counter() - begun))
"""


def one_session(whole: Path, threads: int, length: int, seconds: float) -> float:
    command = [sys.executable, "-c", _SESSION, str(whole / "stage0" / "model.onnx"), str(threads), "1", str(length)]
    done = subprocess.run([*command, str(seconds)], check=True, capture_output=True, text=True, timeout=seconds + 120)
    return float(done.stdout)


def peers(folder: Path, whole: Path, length: int, seconds: float, rounds: int, flags: Sequence[str]) -> dict[str, Any]:
    """Return rows a second of each, in turns."""
    found: dict[str, list[float]] = {}
    with served(folder, *flags) as pipelined, served(folder, "--window", "1", *flags) as one_at_a_time:
        for at in range(rounds):
            tell(f"peers: round {at + 1} of {rounds}")
            for name, address in (("pipelined", pipelined), ("unpipelined", one_at_a_time)):
                result = closed(address["address"], seconds, length)
                found.setdefault(name, []).append(result.rows / result.seconds)
            for threads in (1, 2):
                rate = one_session(whole, threads, length, seconds)
                found.setdefault(f"one session, {threads} thread{'s' * (threads > 1)}", []).append(rate)
    return {name: {"rows_per_second": median(rates), "rounds": rates} for name, rates in found.items()}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--no-pin", dest="pin", action="store_false", help="serve without --pin")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    stolen, flags = Stolen(), ["--pin"] if args.pin else []
    torch.set_num_threads(1)
    torch.manual_seed(0)
    requests, seconds, rounds = (800, 4.0, 1) if args.short else (10_000, 32.0, 3)
    with tempfile.TemporaryDirectory() as made:
        work = Path(made)
        small, large = built(SMALL), built(LARGE)
        tell("exporting three models")
        exported(small, work / "small", 2, 8)
        manifest = exported(large, work / "large", 2, 32)
        exported(large, work / "whole", 1, 32)
        length = length_for(work / "large", manifest)
        alone = stage_seconds(work / "large", manifest, length)
        tell(f"stages: {', '.join(f'{value * 1e3:.1f} ms' for value in alone)} for a row of {length} tokens")
        found: dict[str, Any] = {
            "machine": f"{machine(len(os.sched_getaffinity(0)))}{', stages pinned to cores' if args.pin else ''}",
            "stages": {"length": length, "seconds": alone, "blocks": [len(stage.blocks) for stage in manifest.stages],
                       "holds": min(alone) >= LEAST_STAGE},
            "exact": exact(work / "small", small, requests, flags),
            "overhead": overhead(work / "small", 8, rounds * 300, flags),
        }  # fmt: skip
        found["saturated"], found["poisson"] = loaded(work / "large", length, seconds, work / "run", flags)
        found["peers"] = peers(work / "large", work / "whole", length, seconds / 3, rounds, flags)
        found["stolen"] = stolen.share
    print(_text(found))
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0 if all(entry["holds"] for entry in found.values() if isinstance(entry, dict) and "holds" in entry) else 1


def _text(found: dict[str, Any]) -> str:
    """Return a table with a row for each bar, and below it what is only told."""
    stages, exactly, added, full, some = (found[key] for key in ("stages", "exact", "overhead", "saturated", "poisson"))
    bars = [
        (stages, f"each stage takes 10 ms or more for a row ({stages['length']} tokens)",
         " and ".join(f"{duration * 1e3:.1f} ms" for duration in stages["seconds"])),
        (exactly, f"{exactly['requests']} answers within 1e-5 of PyTorch's, none lost or swapped",
         f"{exactly['answered']} answers, {exactly['largest_relative']:.2g}"),
        (added, "the front adds less than 1 ms, one request at a time",
         f"{added['added_ms']:+.2f} ms: {added['front_ms']:.2f}, by hand {added['by_hand_ms']:.2f}"),
        (full, f"bubble under 10% over {full['seconds']:.0f} s, {SATURATING} requests at a time",
         f"{full['bubble']:.1%}"),
        (some, f"p99 in the pipe under 50 ms at {some['rate']:.1f}/s (70% of peak)", f"{some['pipe_p99_ms']:.1f} ms"),
    ]  # fmt: skip
    rows = [["holds" if item["holds"] else "MISSED", bar, value] for item, bar, value in bars]
    used = [
        f"  stage {at}: {busy:.1f} s computing, {cpu:.1f} s of processor, {full['seconds']:.1f} s of wall"
        for at, (busy, cpu) in enumerate(zip(full["stage_busy_seconds"], full["stage_processor_seconds"], strict=True))
    ]
    low, middle, high = added["pairs_ms"]
    lines = [
        f"{found['machine']}; {found['stolen']:.1%} of their time went to other machines on the host",
        table(("", "bar", "measured"), rows, width=150, left=3),
        f"overhead in pairs: p10 {low:+.2f}, p50 {middle:+.2f}, p90 {high:+.2f} ms, of {added['rounds']}",
        f"saturated: {full['rows_per_second']:.1f} rows/s, {full['rows_per_microbatch']:.1f} rows a microbatch,"
        f" M {full['microbatches_per_batch']:g}, {full['pipe_window']:g} in the pipe",
        *used,
        f"poisson: in the pipe p50 {some['pipe_p50_ms']:.1f} ms; requests p50 {some['latency_p50_ms']:.1f},"
        f" p99 {some['latency_p99_ms']:.1f} ms; waiting mean {some['wait_mean_ms']:.1f},"
        f" p99 {some['wait_p99_ms']:.1f} ms; an M/D/1 queue waits {some['md1_wait_mean_ms']:.1f} ms on average",
    ]
    pipelined = found["peers"]["pipelined"]["rows_per_second"]
    for name, peer in found["peers"].items():
        rates = ", ".join(f"{rate:.1f}" for rate in peer["rounds"])
        ratio = pipelined / peer["rows_per_second"]
        lines.append(f"{name}: {peer['rows_per_second']:.1f} rows/s ({rates}); pipelined is {ratio:.2f} times")
    errors = {name: found[name]["errors"] for name in ("exact", "saturated", "poisson") if found[name]["errors"]}
    return "\n".join([*lines, *([f"errors: {errors}"] if errors else [])])


if __name__ == "__main__":
    sys.exit(main())
