"""Fuzz meshes: random meshes, schedules, losses, labels and dtypes, each against a plain loop of torch.

    python benchmarks/fuzz_mesh.py --cases 2000 --jobs 2 --lines out/fuzz_mesh.jsonl --json out/fuzz_mesh.json

Every case trains two steps and compares losses, gradients, their norm and the state with the plain model on the same
microbatches: in float64 to 1e-10 of the gradients' norm, in other dtypes by measured rounding (see mesh_plain). Cases
of one rank run here, over the in-process channel; others on as many processes. A case comes to one of these:

    equal      as in one process
    refused    by an error of Drumline's that the case foresees, before anything is computed
    wrong      other numbers, or another error of Drumline's: a right model is refused
    traceback  any other error
    died       a rank was killed, or no end within the time allowed

All but the first two are failures. A failure prints the command that runs its case alone. `--lines` has a line of each
case as it ends; cases of which the file has lines already are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import drumline as dl
from drumline.core.errors import DrumlineError
from fuzz_outcome import FuzzOutcome
from measure import machine
from mesh_cases import drawn
from mesh_runs import all_run, line_of, read, write

GOOD = ("equal", "refused")
BAD = ("wrong", "traceback", "died")
_CHUNK = 40  # cases of one start of ranks
_SECONDS_TO_START, _SECONDS_EACH = 600.0, 60.0  # that ranks may take, for a case on average

Line = dict[str, Any]  # of a case, as files have it


class Outcome(FuzzOutcome):
    """What became of all cases."""

    def add(self, line: Line) -> None:
        """Count a case."""
        outcome = line["outcome"]
        self.counts[outcome] += 1
        for kind in line["kinds"]:
            self.kinds.setdefault(kind, Counter())[outcome] += 1
        if outcome == "refused":
            self.refusals[line["foreseen"]] += 1
        elif outcome != "equal":
            self.failures.append(f"case {line['case']} {outcome}: {line['how']}\n    {line['is']}\n    {line['again']}")

    def summary(self) -> dict[str, Any]:
        """Return all of it, as JSON has it."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


def fuzz(
    seed: int,
    numbers: Sequence[int],
    *,
    jobs: int = 1,
    lines: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run these cases, those with the same number of ranks together, by so many processes."""
    outcome, begun = Outcome(seed), time.perf_counter()
    known = [] if lines is None else [item for item in read(lines) if item["seed"] == seed and item["case"] in numbers]
    left = set(numbers) - {entry["case"] for entry in known}
    for at, line in enumerate(_every(known, seed, sorted(left), jobs, lines), 1):
        before = len(outcome.failures)
        outcome.add(line)
        for text in outcome.failures[before:]:
            say(text)
        if at % 100 == 0:
            say(f"{at} cases: {dict(outcome.counts)}")
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _every(known: list[Line], seed: int, numbers: list[int], jobs: int, lines: Path | None) -> Iterator[Line]:
    yield from known
    cases = [drawn(seed, number) for number in numbers]
    chunks = []
    for ranks in sorted({case.ranks for case in cases}):
        own = [case.number for case in cases if case.ranks == ranks]
        chunks += [(seed, ranks, own[at : at + _CHUNK], lines) for at in range(0, len(own), _CHUNK)]
    if jobs == 1:
        for chunk in chunks:
            yield from _of_ranks(*chunk)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        for done in as_completed([pool.submit(_of_ranks, *chunk) for chunk in chunks]):
            yield from done.result()


def _one_thread() -> None:
    torch.set_num_threads(1)


def _of_ranks(seed: int, ranks: int, numbers: list[int], lines: Path | None) -> list[Line]:
    """Run cases of so many ranks; where these die, the case that they were in is left out, and others go on."""
    left, found = numbers, list[Line]()
    while left:
        with tempfile.TemporaryDirectory() as folder:
            own = Path(folder, "lines")
            files = [own] if lines is None else [own, lines.absolute()]
            error = _launched(seed, ranks, left, files)
            ended = read(own)
            found += ended
            left = left[len(ended) :]
            if error and left:
                died = line_of(drawn(seed, left.pop(0)), "died", error, 0.0)
                write(files, died)
                found.append(died)
    return found


def _launched(seed: int, ranks: int, numbers: list[int], files: list[Path]) -> str:
    """Run cases until all have ended or ranks die; return how they died."""
    if ranks == 1:
        all_run(seed, numbers, files)
        return ""
    limit = _SECONDS_TO_START + _SECONDS_EACH * len(numbers)
    try:
        dl.launch(all_run, seed, numbers, files, num_ranks=ranks, timeout=limit)
    except DrumlineError as error:
        return str(error)
    return ""


def table(outcome: Outcome) -> str:
    """Return how many cases came to what, by the axes that they have, and why some were refused."""
    return outcome.table((*GOOD, *BAD), 11)


def main() -> int:
    """Fuzz, print a table, and end with 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat one (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with its own cases (default 1)")
    parser.add_argument("--lines", type=Path, metavar="FILE", help="append a JSON line of each case as it ends")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there, too")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}; expected at least 1")
    _one_thread()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(f"seed {args.seed}")
    numbers = range(args.first, args.first + args.cases)
    outcome = fuzz(args.seed, numbers, jobs=args.jobs, lines=args.lines, say=say)
    print(f"{machine()}; seed {args.seed}\n")
    print(table(outcome))
    for text in outcome.failures:
        print(f"\n{text}")
    if args.json is not None:
        args.json.write_text(json.dumps(outcome.summary(), indent=1), encoding="utf-8")
    return 0 if outcome.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
