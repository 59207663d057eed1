"""Services in processes of their own, for benchmarks: started, looked at from outside, stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO


def first_object(lines: Iterable[str]) -> str:
    """Return the lines of the JSON object that a command prints first, without waiting for its end."""
    found = []
    for line in lines:
        found.append(line)
        if line.startswith("}"):
            break
    return "".join(found)


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Stay on some cores for a while, with all processes that start meanwhile; none named: wherever it may be."""
    before = os.sched_getaffinity(0) if cores else set()
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        if cores:
            os.sched_setaffinity(0, before)


def _started(command: list[str], cores: Collection[int], log: TextIO) -> subprocess.Popen[str]:
    with on_cores(cores):
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)


@contextlib.contextmanager
def served(folder: Path, *flags: str, cores: Collection[int] = ()) -> Iterator[dict[str, Any]]:
    """Serve a folder in processes of its own; yields address, metrics port and the stages' processes.

    `cores` are those that the service may use; none named: all that this process may.
    """
    command = [sys.executable, "-m", "drumline", "serve", str(folder), "--listen", "127.0.0.1:0"]
    command += ["--metrics", "127.0.0.1:0", "--json", *flags]
    with (
        tempfile.TemporaryFile("w+") as log,
        _started(command, cores, log) as process,
    ):
        try:
            assert process.stdout is not None
            told = json.loads(first_object(process.stdout))
            ready = _ready_stages(log)
            told["front"] = process.pid
            told["processes"] = [value["process"] for value in ready if "process" in value]
            told["stages"] = [value["address"] for value in ready]
            yield told
        finally:
            process.terminate()
            process.wait(60)


def _ready_stages(log: TextIO) -> list[dict[str, Any]]:
    """Return what a log says of each stage that is ready, once it says that the service is; a thread writes it."""
    while True:
        # Without a seek: the process that writes has the same place in the file, and would write over what is there.
        text = os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0).decode()
        lines = [json.loads(line) for line in text.splitlines(True) if line.startswith("{") and line.endswith("\n")]
        if any(line["event"] == "serving" for line in lines):
            ready = [line for line in lines if line["event"] == "stage ready"]
            return sorted(ready, key=lambda value: int(value["stage"]))
        time.sleep(0.01)


def metrics_text(told: dict[str, Any]) -> str:
    """Return all metrics of a service."""
    with urllib.request.urlopen(f"http://127.0.0.1:{told['metrics_port']}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def by_stage(told: dict[str, Any], name: str) -> dict[str, float]:
    """Return a metric of a service by stage."""
    found = re.findall(rf'^{name}{{stage="(\d+)"}} (\S+)$', metrics_text(told), re.MULTILINE)
    return {stage: float(value) for stage, value in found}


def processor_seconds(process: int) -> float:
    """Return what a process has computed, in its own code and the system's."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(process: int) -> float:
    """Return the memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def descriptors(process: int) -> int:
    """Return how many files and connections a process has open."""
    return len(os.listdir(f"/proc/{process}/fd"))


def metric(told: dict[str, Any], name: str) -> float:
    """Return a metric of a service without labels."""
    found = re.search(rf"^{name} (\S+)$", metrics_text(told), re.MULTILINE)
    return float(found[1]) if found else 0.0


def stages_of(parents: Iterable[int]) -> dict[int, int]:
    """Return the processes of stages that these processes keep now, by the stages' numbers."""
    wanted, stages = set(parents), {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            words = (path / "cmdline").read_bytes().split(b"\0")
            if parent in wanted and b"drumline.serve.stage" in words:
                stages[int(json.loads(words[words.index(b"drumline.serve.stage") + 1])["number"])] = int(path.name)
    return stages
