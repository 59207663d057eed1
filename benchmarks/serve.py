"""A served pipeline against its bars, and against the same model without a pipeline.

    python benchmarks/serve.py [--short] [--no-pin] [--json FILE]

Two GPTs are exported: a small one, for exactness and overhead, and one whose two stages take at least 10 ms for a row
(its rows are as long as that needs). Services, and the sessions that they are compared with, are processes of their
own; this process is the client.

    exact       10,000 requests of 1 to 8 rows from 8 concurrent clients: every answer held against PyTorch
    overhead    one request at a time, in turns: the front, both stages by hand, and a bare call of `grpc.aio`
    saturated   16 requests at a time for 30 s: throughput, bubble, each stage's processor seconds beside wall
    poisson     random arrivals at 70% of that: time in the pipe, waiting beside the mean wait of an M/D/1 queue
    peers       the service with one microbatch at a time, and the whole model in one session on one and on two threads,
                in turns with the pipelined service

Stages have cores of their own (`--pin`); `--no-pin` leaves them to the system. Where there are four cores or more, the
front and the client have others, apart from each other. A bar of time is judged if other machines on the host and
other processes took less than 3% of the cores' time meanwhile; else it is printed as not judged.

The short form has a twelfth of the requests and an eighth of the seconds: it shows that everything runs. The whole one
takes about 8 minutes on two cores. It prints what is going on to stderr, and ends with 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

from drumline.serve.cores import own_cores, processor_of
from drumline.serve.export.check import TOLERANCE, Subject, plain_outputs
from drumline.serve.export.export import export
from drumline.serve.load.generator import Demand, Loader, Result
from drumline.serve.session import open_session
from drumline.serve.wire.manifest import Manifest
from drumline.train.config.settings import BatchSettings, ModelSettings, RunSettings, TrainSettings
from drumline.train.models.build import build_model
from measure import Stolen, machine
from serve_overhead import overhead
from serve_text import text_of
from serving import by_stage, metric, on_cores, processor_seconds, served

VOCABULARY, LONGEST = 257, 256
SMALL = ModelSettings(num_layers=4, hidden=64, num_heads=4)
LARGE = ModelSettings(num_layers=8, hidden=384, num_heads=6)
LEAST_STAGE, MOST_IN_PIPE, MOST_BUBBLE, LEAST_GAIN, MOST_STOLEN = 0.010, 0.050, 0.10, 1.75, 0.03
SATURATING, SHARE, CLIENTS = 16, 0.7, 8
LOADS = "saturated", "poisson"
PARTS = "stages", "exact", "overhead", *LOADS, "peers"


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Places:
    """Cores of the service's stages, of its front, and of the client; empty: wherever the system puts them."""

    stages: tuple[int, ...] = ()
    front: tuple[int, ...] = ()
    client: tuple[int, ...] = ()

    @property
    def service(self) -> tuple[int, ...]:
        """Those of stages and front."""
        return self.stages + self.front

    @staticmethod
    def among(cores: Sequence[int]) -> Places:
        """Share cores out; fewer than four are left to the system."""
        if len(cores) < 4:
            return Places()
        taken = {processor_of(core) for core in cores[:2]}
        others = [core for core in cores[2:] if processor_of(core) not in taken]
        others = others if len(others) > 1 else list(cores[2:])
        return Places(tuple(cores[:2]), tuple(others[::2]), tuple(others[1::2]))


def judged(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a part measured, and what others took of the cores' time meanwhile."""
    stolen = Stolen()
    measured = part()
    share, others = stolen.share, stolen.others
    return {**measured, "stolen": share, "others": others, "judged": share + others < MOST_STOLEN}


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


def exact(folder: Path, model: torch.nn.Module, requests: int, flags: Sequence[str], places: Places) -> dict[str, Any]:
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

    with served(folder, *flags, cores=places.service) as told:
        found = asyncio.run(run(told["address"]))
    errors = sum((result.codes for result in found), Counter[str]())
    del errors["OK"]
    asked = requests // CLIENTS * CLIENTS
    return {"requests": asked, "answered": answers, "errors": dict(errors), "largest_relative": worst,
            "holds": answers == asked and worst <= TOLERANCE}  # fmt: skip


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
    folder: Path, length: int, seconds: float, record: Path, flags: Sequence[str], places: Places
) -> dict[str, Any]:
    """Return the saturated load and the random one."""
    with served(folder, "--record", str(record), *flags, cores=places.service) as told:
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
        then = by_stage(told, "drumline_stage_compute_seconds_sum")
        window = metric(told, "drumline_pipe_window")
        slowest = max(busy) / max(full.rows, 1) * full.seconds / wall
    bubble = 1 - sum(busy) / (len(busy) * wall)
    saturated = {
        "seconds": wall, "rows_per_second": peak, "bubble": bubble, "stage_busy_seconds": busy,
        "stage_row_ms": [seconds / max(full.rows, 1) * 1e3 for seconds in busy],
        "rows_per_microbatch": rows / max(count, 1), **cut,
        "stage_processor_seconds": used, "errors": full.to_json()["errors"], "holds": bubble < MOST_BUBBLE,
    }  # fmt: skip
    told_of = some.to_json()
    in_pipe = told_of["pipe_seconds"]["p99"]
    random = {
        "rate": rate, "requests": told_of["requests"], "errors": told_of["errors"], "pipe_window": window,
        "stage_row_ms": [(then[stage] - after[stage]) / max(some.rows, 1) * 1e3 for stage in sorted(after)],
        "pipe_p50_ms": told_of["pipe_seconds"]["p50"] * 1e3, "pipe_p99_ms": in_pipe * 1e3,
        "latency_p50_ms": told_of["latency_seconds"]["p50"] * 1e3,
        "latency_p99_ms": told_of["latency_seconds"]["p99"] * 1e3,
        "wait_mean_ms": mean(some.queues) * 1e3, "wait_p99_ms": told_of["queue_seconds"]["p99"] * 1e3,
        "md1_wait_mean_ms": SHARE * slowest / (2 * (1 - SHARE)) * 1e3, "holds": in_pipe < MOST_IN_PIPE,
    }  # fmt: skip
    return {"saturated": saturated, "poisson": random}


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


def peers(
    folder: Path, whole: Path, length: int, seconds: float, rounds: int, flags: Sequence[str], places: Places
) -> dict[str, Any]:
    """Return rows a second of each, in turns."""
    found: dict[str, list[float]] = {}
    cores = places.service
    with (
        served(folder, *flags, cores=cores) as pipelined,
        served(folder, "--window", "1", *flags, cores=cores) as one_at_a_time,
    ):
        for at in range(rounds):
            tell(f"peers: round {at + 1} of {rounds}")
            for name, address in (("pipelined", pipelined), ("unpipelined", one_at_a_time)):
                result = closed(address["address"], seconds, length)
                found.setdefault(name, []).append(result.rows / result.seconds)
            for threads in (1, 2):
                with on_cores(places.stages):
                    rate = one_session(whole, threads, length, seconds)
                found.setdefault(f"one session, {threads} thread{'s' * (threads > 1)}", []).append(rate)
    medians = {name: {"rows_per_second": median(rates), "rounds": rates} for name, rates in found.items()}
    gain = median(found["pipelined"]) / median(found["unpipelined"])
    return {"services": medians, "gain": gain, "holds": gain >= LEAST_GAIN}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--no-pin", dest="pin", action="store_false", help="serve without --pin")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(words)
    stolen, flags = Stolen(), ["--pin"] if args.pin else []
    cores = own_cores()
    places = Places.among(cores) if args.pin else Places()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as made, on_cores(places.client):
        found = measured(Path(made), args.short, flags, places)
    found["machine"] = f"{machine(len(cores))}{', stages pinned to cores' if args.pin else ''}"
    found["places"] = [places.stages, places.front, places.client]
    found["stolen"], found["others"] = stolen.share, stolen.others
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    print(text_of(found))
    parts = [found[name] for name in PARTS]
    return 0 if all(part["holds"] or not part.get("judged", True) for part in parts) else 1


def measured(work: Path, short: bool, flags: Sequence[str], places: Places) -> dict[str, Any]:
    """Return what every part measured."""
    requests, seconds, rounds = (800, 4.0, 1) if short else (10_000, 32.0, 3)
    small, large = built(SMALL), built(LARGE)
    tell("exporting three models")
    exported(small, work / "small", 2, 8)
    manifest = exported(large, work / "large", 2, 32)
    exported(large, work / "whole", 1, 32)

    def stages() -> dict[str, Any]:
        length = length_for(work / "large", manifest)
        alone = stage_seconds(work / "large", manifest, length)
        tell(f"stages: {', '.join(f'{value * 1e3:.1f} ms' for value in alone)} for a row of {length} tokens")
        blocks = [len(stage.blocks) for stage in manifest.stages]
        return {"length": length, "seconds": alone, "blocks": blocks, "holds": min(alone) >= LEAST_STAGE}

    first = judged(stages)
    length = first["length"]
    exactly = exact(work / "small", small, requests, flags, places)
    tell("overhead: three ways in turns")
    added = judged(lambda: overhead(work / "small", 8, rounds * 300, flags, places.service, places.front))
    both = judged(lambda: loaded(work / "large", length, seconds, work / "run", flags, places))
    load = {name: {**both[name], **{key: both[key] for key in ("stolen", "others", "judged")}} for name in LOADS}
    others = judged(lambda: peers(work / "large", work / "whole", length, seconds / 3, rounds, flags, places))
    return {"stages": first, "exact": exactly, "overhead": added, **load, "peers": others}


if __name__ == "__main__":
    sys.exit(main())
