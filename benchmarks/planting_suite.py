"""One run of the whole suite with marked code: writes which tests reach which blocks, and how long each takes."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from planting import ROOT
from planting_blocks import write_marked
from planting_reach import Reach, digest_of, packed, read, sources, this_machine, unpacked
from planting_trees import ENDING, NO_TESTS, Ran, Trees, run_tests

# Folders whose files take longest go first, so that none is left alone at the end.
_LONGEST = (
    "mesh", "train", "pipeline", "served", "cli", "hosts", "peers", "tests",
    "channel", "runtime", "model", "plan", "report",
)  # fmt: skip


def units() -> dict[str, list[str]]:
    """Return what is run together: a test file each; helpers and the package's doctests by folder."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if path.name.startswith("test_"):
            found[name] = [name]
        elif ">>>" in path.read_text(encoding="utf-8") and path.name != "conftest.py":
            found.setdefault(f"doctests of {path.parent.relative_to(ROOT)}", []).append(name)
    for name in sources():
        if ">>>" in (ROOT / name).read_text(encoding="utf-8"):
            found.setdefault(f"doctests of {'/'.join(name.split('/')[:3])}", []).append(name)
    return found


def extend(path: Path, jobs: int, limit: float, deadline: float = float("inf"), only: Sequence[str] = ()) -> Reach:
    """Run what is not in the file yet with marked code, append what it reached, and return all that is known."""
    reach = read(path)
    stale = {
        unit: files
        for unit, files in units().items()
        if (not only or any(name in unit for name in only))
        and any(reach.done.get(name) != digest_of(ROOT / name) for name in files)
    }
    if not stale:
        return reach
    print(f"reach: {len(stale)} of {len(units())} units of tests to run, {jobs} at a time", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees = Trees(Path(folder), min(jobs, len(stale)))
        plain = Trees(Path(folder), max(1, jobs // 4), "plain")
        numbered = _mark(trees.all)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"sources": numbered, "machine": this_machine()}) + "\n")

            def run(unit: str) -> tuple[str, Ran | None, list[dict[str, Any]]]:
                if time.monotonic() > deadline or ENDING.is_set():
                    return unit, None, []
                with trees.free_copy() as tree, tempfile.TemporaryDirectory(dir=folder) as raw:
                    left = min(limit, deadline + 30 - time.monotonic())
                    ran = run_tests(tree, stale[unit], left, first=False, env={"PLANTED_REACH": raw})
                    told = list(_resolved(Path(raw)))
                _again(told, plain, limit, deadline)
                return unit, ran, told

            order = sorted(stale, key=lambda name: (-reach.seconds.get(name, 0.0), _guess(name)))
            for number, done in enumerate(as_completed([pool.submit(run, unit) for unit in order]), 1):
                unit, ran, told = done.result()
                if ran is None or ENDING.is_set() or (ran.timed_out and time.monotonic() > deadline):
                    continue  # not run, or not to its end: the next run does
                for entry in told:
                    file.write(json.dumps(entry) + "\n")
                left_out = _left_out(stale[unit], ran)
                hashes = {name: digest_of(ROOT / name) for name in stale[unit]}
                end = {"done": hashes, "unit": unit, "seconds": round(ran.seconds, 2), "left_out": left_out}
                file.write(json.dumps(end) + "\n")
                file.flush()
                gone = sum(entry["outcome"] == "failed" for entry in told)
                said = f"{len(told)} tests, {ran.seconds:.0f} s"
                said += f", {gone} fail without a change" if gone else ""
                said += "".join(f"; left out: {name}: {why}" for name, why in left_out.items())
                print(f"[{number}/{len(order)}, {time.monotonic() - began:.0f} s] {unit}: {said}", flush=True)
    return read(path)


def _again(told: list[dict[str, Any]], plain: Trees, limit: float, deadline: float) -> None:
    """Run what failed without marks: compilers refuse them. What passes then may reach all that its file's tests do."""
    failed = {entry["test"]: entry for entry in told if entry["outcome"] == "failed"}
    left = min(limit, deadline + 30 - time.monotonic())
    if not failed or left <= 0:
        return
    files = sorted({name.split("::")[0] for name in failed})
    with plain.free_copy() as tree:
        chosen = [(name, 60 + 10 * entry["seconds"]) for name, entry in failed.items()]
        ran = run_tests(tree, files, left, first=False, chosen=chosen)
    every = 0
    for entry in told:
        every |= unpacked(entry["blocks"])
    for name in set(ran.ended) - set(ran.failed):
        failed[name] |= {"outcome": "passed", "blocks": packed(every)}


def _guess(unit: str) -> tuple[int, int]:
    """Return where a unit of unknown length belongs."""
    folder = Path(unit).parent.name
    rank = _LONGEST.index(folder) if folder in _LONGEST else len(_LONGEST)
    return rank, -(ROOT / unit).stat().st_size if (ROOT / unit).exists() else 0


def _mark(trees: Sequence[Path]) -> dict[str, tuple[str, int, int]]:
    """Mark all files of the package in all trees; return how their blocks are numbered."""
    first, found = 0, {}
    for name in sources():
        written, count = write_marked(trees[0] / name, first)
        found[name] = (digest_of(trees[0] / name), first, count)
        first += count
        for tree in trees[1:]:
            target = tree / written.relative_to(trees[0])
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(written, target)
    return found


def _left_out(files: Sequence[str], ran: Ran) -> dict[str, str]:
    """Return the files that cannot be run here, and why."""
    lines = [line for line in ran.output.splitlines() if line.strip()]
    last = lines[-1][:150] if lines else "no output"
    if ran.timed_out:
        return dict.fromkeys(files, f"took longer than {ran.seconds:.0f} s")
    if not ran.ended and not ran.uncollected and ran.code not in (0, NO_TESTS):
        return dict.fromkeys(files, last)
    return {file: last for file in files if file in ran.uncollected}


def _resolved(raw: Path) -> Iterator[dict[str, Any]]:
    """Yield what each test of a process reached, with what was set up for it and others."""
    for path in sorted(raw.glob("reach-*.jsonl")):
        told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        shared: dict[tuple[str, str], int] = {}
        for report in told:
            if "fixture" in report:
                key = (report["fixture"], report["file"])
                shared[key] = shared.get(key, 0) | unpacked(report["blocks"])
        for report in told:
            if "test" in report:
                file = report["test"].split("::")[0]
                bits = unpacked(report["blocks"])
                for (name, place), more in shared.items():
                    if name in report["uses"] and (place in ("", ".") or file.startswith(place)):
                        bits |= more
                yield {**{key: report[key] for key in ("test", "outcome", "seconds")}, "blocks": packed(bits)}
