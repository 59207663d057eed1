"""A service whose system gives it nothing: descriptors, a log that nobody reads, a disk, memory for a stage.

    PYTHONPATH=tests python benchmarks/serve_limits.py [--only PATTERN] [--json FILE]

    descriptors  the front may open no more; a stage is killed. It cannot be started again until the limit is lifted
    disk         the front may write no file, as on a full disk; a stage is killed
    closed log   the reader of the log has gone; a stage is killed
    stalled log  the reader of the log reads nothing; every request is logged, until the pipe is full and beyond
    memory       a stage gets no more memory, and a request needs more than it has
    answers      requests of 320 bytes at once, whose answers have 40 MiB each: the front admits as many as it may hold

The bars: no wrong answer, none lost that was not at work in a killed stage, and within 5 s of the relief the service
answers. Meanwhile it answers, or says that it is not ready or not alive. Needs Linux.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import grpc
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from drumline.serve.wire.files import digest_of
from drumline.serve.wire.manifest import Manifest, ManifestStage, Sizes, Tensor
from drumline.serve.wire.protocol import message, stub
from served.services import channel_to, expected, inferred, rows_of, status_of, together, write_served
from serving import first_object, stages_of

MOST_SECONDS_BACK, HELD = 5.0, 4.0  # seconds: until it answers after relief, and how long it gets nothing
WIDE = 1024


class Service:
    """A service in a process of its own, and what its clients see."""

    def __init__(self, front: int, address: str) -> None:
        self.front, self.address = front, address

    @property
    def stages(self) -> dict[int, int]:
        """The processes of the stages."""
        return stages_of([self.front])

    def says(self, call: str, field: str) -> bool:
        """Ask whether it is live or ready."""
        with channel_to(self.address) as channel:
            return bool(getattr(stub(channel, call)(message(f"{call}Request")(), timeout=30), field))

    def seconds_back(self, width: int = 8) -> float:
        """Return how long it takes until a request is answered rightly; infinite if that takes too long."""
        began, x = time.monotonic(), rows_of(2, width=width)
        with channel_to(self.address) as channel:
            while time.monotonic() < began + 10 * MOST_SECONDS_BACK:
                with contextlib.suppress(grpc.RpcError):
                    answer = inferred(channel, {"x": x}, timeout=1)["y"]
                    return time.monotonic() - began if np.allclose(answer, expected(x), atol=1e-5) else float("inf")
        return float("inf")


@contextlib.contextmanager
def service(folder: Path, *flags: str, log: TextIO | int = subprocess.DEVNULL) -> Iterator[Service]:
    """Serve a folder; `log` is where its stderr goes."""
    command = [sys.executable, "-m", "drumline", "serve", str(folder), "--listen", "127.0.0.1:0", "--metrics", "none"]
    with subprocess.Popen([*command, "--json", *flags], stdout=subprocess.PIPE, stderr=log, text=True) as process:
        try:
            assert process.stdout is not None
            yield Service(process.pid, json.loads(first_object(process.stdout))["address"])
        finally:
            process.terminate()
            process.wait(60)


def refused(folder: Path, limit: int, amount: Callable[[int], int]) -> dict[str, Any]:
    """Give the front no more of something, kill a stage, and give it again after a while."""
    with service(folder) as running:
        before = resource.prlimit(running.front, limit)
        resource.prlimit(running.front, limit, (amount(running.front), before[1]))
        os.kill(running.stages[1], signal.SIGKILL)
        time.sleep(HELD)
        meanwhile = not running.stages.get(1)
        resource.prlimit(running.front, limit, before)
        back = running.seconds_back()
        alive = running.says("ServerLive", "live")
    return {"was_down": meanwhile, "seconds_back": back, "alive": alive,
            "holds": meanwhile and back < MOST_SECONDS_BACK and alive}  # fmt: skip


def descriptors_of(front: int) -> int:
    """Return a limit that leaves room for a client's connection, and not for a process and its pipes."""
    return max(map(int, os.listdir(f"/proc/{front}/fd"))) + 3


def closed(folder: Path) -> dict[str, Any]:
    """Close the log, and kill a stage."""
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as log, service(folder, "--log-requests", log=log) as running:
        os.close(reading)
        first = running.seconds_back()
        os.kill(running.stages[0], signal.SIGKILL)
        time.sleep(0.5)
        back = running.seconds_back()
        alive = running.says("ServerLive", "live")
    return {"seconds_back": [first, back], "alive": alive, "holds": max(first, back) < MOST_SECONDS_BACK and alive}


def stalled(folder: Path) -> dict[str, Any]:
    """Log every request to a pipe that nobody reads."""
    reading, writing = os.pipe()
    slowest, wrong, count = 0.0, 0, 3000  # a pipe holds about 600 lines
    with os.fdopen(reading), os.fdopen(writing, "w") as log, service(folder, "--log-requests", log=log) as running:
        with channel_to(running.address) as channel:
            for seed in range(count):
                x, began = rows_of(1, seed), time.monotonic()
                wrong += not np.allclose(inferred(channel, {"x": x}, timeout=30)["y"], expected(x), atol=1e-5)
                slowest = max(slowest, time.monotonic() - began)
        os.kill(running.stages[0], signal.SIGKILL)
        time.sleep(0.5)
        back = running.seconds_back()
    return {"requests": count, "wrong": wrong, "slowest_seconds": slowest, "seconds_back": back,
            "holds": not wrong and back < MOST_SECONDS_BACK}  # fmt: skip


def memory(folder: Path) -> dict[str, Any]:
    """Let a stage have no more address space, and ask for more than it has."""
    with service(folder, "--microbatch-rows", "4096", "--max-queue", "1GiB") as running:
        first = running.seconds_back(WIDE)
        stage = running.stages[0]
        pages = int(Path(f"/proc/{stage}/statm").read_text().split()[0])
        before = resource.prlimit(stage, resource.RLIMIT_AS)
        resource.prlimit(stage, resource.RLIMIT_AS, (pages * resource.getpagesize() + 2**20, before[1]))
        with channel_to(running.address) as channel:
            code, why = status_of(partial(inferred, channel, {"x": rows_of(4000, width=WIDE)}, timeout=60))
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(stage, resource.RLIMIT_AS, before)
        back = running.seconds_back(WIDE)
    fine = code in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
    return {"status": f"{code.name}: {why[:120]}", "seconds_back": [first, back],
            "holds": fine and back < MOST_SECONDS_BACK}  # fmt: skip


def write_wide(folder: Path) -> Path:
    """Write a model that answers each row of 8 numbers with 4 MiB."""
    x, y = Tensor("x", "FP32", ("batch", 8)), Tensor("y", "FP32", ("batch", 2**20))
    ends = [helper.make_tensor_value_info(end.name, TensorProto.FLOAT, end.shape) for end in (x, y)]
    repeats = numpy_helper.from_array(np.array([1, 2**17]), "repeats")
    tile = helper.make_node("Tile", ["x", "repeats"], ["y"])
    graph = helper.make_graph([tile], "wide", ends[:1], ends[1:], [repeats])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 10
    name = "stage0/model.onnx"
    (folder / name).parent.mkdir(parents=True)
    onnx.save(model, str(folder / name))
    stage = ManifestStage(name, {name: digest_of(folder / name)}, (x,), (y,))
    Manifest("tanh", (x,), (y,), {"batch": Sizes()}, (stage,)).save(folder)
    return folder


def answers(folder: Path) -> dict[str, Any]:
    """Ask for an answer that no message may have, and then for 960 MiB at once."""
    codes: Counter[str] = Counter()
    with service(folder, "--max-queue", "128MiB") as running, channel_to(running.address) as channel:

        def ask(rows: int, seed: int) -> None:
            x = rows_of(rows, seed)
            try:
                answer = inferred(channel, {"x": x}, timeout=120)["y"]
                codes["OK" if (answer[:, ::8] == x[:, :1]).all() else "wrong"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1

        ask(1, 0)
        before = peak_mib(running.front)
        ask(100, 0)
        refused_mib = peak_mib(running.front) - before
        together(24, partial(ask, 10))
        grown = peak_mib(running.front) - before
    fine = set(codes) == {"OK", "RESOURCE_EXHAUSTED"} and refused_mib < 1 and grown < 4 * 128
    return {"codes": dict(codes), "mib_of_a_refused_answer": refused_mib, "mib_grown": grown, "holds": fine}


def peak_mib(process: int) -> float:
    """Return the most memory that a process has had."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))


def main() -> int:
    """Run the cases, print and judge."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--only", default="*", metavar="PATTERN")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    outcomes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as work:
        narrow, wide = write_served(Path(work) / "tanh"), write_served(Path(work) / "wide", width=WIDE)
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            "descriptors": partial(refused, narrow, resource.RLIMIT_NOFILE, descriptors_of),
            "disk": partial(refused, narrow, resource.RLIMIT_FSIZE, lambda front: 0),
            "closed log": partial(closed, narrow),
            "stalled log": partial(stalled, narrow),
            "memory": partial(memory, wide),
            "answers": partial(answers, write_wide(Path(work) / "answers")),
        }
        for name, run in cases.items():
            if fnmatch(name, args.only):
                outcomes[name] = run()
                told = ", ".join(f"{key} {value}" for key, value in outcomes[name].items() if key != "holds")
                print(f"{'holds' if outcomes[name]['holds'] else 'MISSED':<7}{name}: {told}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(outcomes, indent=2) + "\n")
    return 0 if all(entry["holds"] for entry in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
