"""Fuzz meshes: random meshes, schedules, losses, labels and dtypes, each against a plain loop of torch.

    python benchmarks/fuzz_mesh.py --cases 2000 --json out/fuzz_mesh.json

Every case trains two steps and compares losses, gradients, their norm and the state with the plain model on the same
microbatches, in float64 to 1e-10 of the gradients' norm. It comes to one of these:

    equal      as in one process
    refused    by an error of Drumline's that the case foresees, before anything is computed
    wrong      other numbers, or another error of Drumline's: a right model is refused
    traceback  any other error
    died       a rank was killed, or no end within the time allowed

All but the first two are failures. A failure prints the command that runs its case alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import drumline as dl
from drumline.core.errors import DrumlineError
from measure import machine
from mesh_cases import Case, drawn, plain
from mesh_runs import all_run, run

GOOD = ("equal", "refused")
_CHUNK = 50  # cases of one start of ranks
_SECONDS_TO_START, _SECONDS_EACH = 600.0, 60.0  # that ranks may take, for a case on average

Verdict = tuple[str, str]  # what a case came to, and how


@dataclass(slots=True)
class Outcome:
    """What became of all cases."""

    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # by their reason
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found."""
        return not self.failures

    def add(self, case: Case, verdict: Verdict) -> None:
        """Count a case."""
        self.counts[verdict[0]] += 1
        if verdict[0] == "refused":
            self.refusals[case.refusal] += 1
        elif verdict[0] != "equal":
            self.failures.append(f"{verdict[0]}: {verdict[1]}\n    {case.described()}\n    {case.again}")


def fuzz(seed: int, numbers: Sequence[int], say: Callable[[str], None] = lambda text: None) -> Outcome:
    """Run these cases, those with the same number of ranks together."""
    outcome, begun = Outcome(seed), time.perf_counter()
    cases = [drawn(seed, number) for number in numbers]
    for ranks in sorted({case.ranks for case in cases}):
        for case, verdict in _of_ranks(seed, ranks, [case for case in cases if case.ranks == ranks]):
            before = len(outcome.failures)
            outcome.add(case, verdict)
            for text in outcome.failures[before:]:
                say(f"case {case.number} {text}")
            if sum(outcome.counts.values()) % 100 == 0:
                say(f"{sum(outcome.counts.values())} cases: {dict(outcome.counts)}")
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _of_ranks(seed: int, ranks: int, cases: list[Case]) -> Iterator[tuple[Case, Verdict]]:
    if ranks == 1:
        for case in cases:
            yield case, judged(case, [run(case)])
        return
    left = list(cases)
    while left:
        chunk, left = left[:_CHUNK], left[_CHUNK:]
        with tempfile.TemporaryDirectory() as folder:
            started = Path(folder, "started")
            numbers = [case.number for case in chunk]
            try:
                found = dl.launch(
                    all_run,
                    seed,
                    numbers,
                    started,
                    num_ranks=ranks,
                    timeout=_SECONDS_TO_START + _SECONDS_EACH * len(chunk),
                )
            except DrumlineError as error:
                at = numbers.index(int(started.read_text())) if started.exists() else 0
                yield chunk[at], ("died", str(error))
                # Those before it ran without anybody hearing of it.
                left = chunk[:at] + chunk[at + 1 :] + left
                continue
        for at, case in enumerate(chunk):
            yield case, judged(case, [rank[at] for rank in found])


def judged(case: Case, ranks: Sequence[dict[str, Any]]) -> Verdict:
    """Return what a case came to, from what its ranks tell."""
    errors = [rank["error"] for rank in ranks if "error" in rank]
    for kind in ("hang", "traceback", "WaitTimeout"):
        for name, text in errors:
            if name == kind:
                return "traceback" if kind == "traceback" else "died", text
    if errors:
        text = next((text for name, text in errors if name != "RankFailed"), errors[0][1])
        is_early = not any(rank["losses"] for rank in ranks) and len(errors) == len(ranks)
        if any(one in text for one in case.refusals) and is_early:
            return "refused", text
        return "wrong", f"refused: {text}"
    if case.refusal:
        return "wrong", f"not refused, expected {case.refusal!r}"
    off = difference(case, ranks, plain(case))
    return ("wrong", off) if off else ("equal", "")


def difference(case: Case, ranks: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> str:
    """Return the first thing in which a case differs from plain torch, empty if there is none."""
    every = chain(
        *(_in_losses(step, case.near, ranks, wanted) for step in range(2)),
        *(_in_gradients(step, case.near, ranks, wanted) for step in range(2)),
        _in_the_end(case, ranks, wanted),
    )
    return next(every, "")


def _in_losses(step: int, near: float, ranks: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> Iterator[str]:
    for at, rank in enumerate(ranks):
        loss, other = rank["losses"][step], wanted["losses"][step]
        if not abs(loss - other) <= near * max(abs(other), 1.0):
            yield f"step {step}: the loss on rank {at} is {loss!r}, and {other!r} in plain torch"
        if loss != ranks[0]["losses"][step]:
            yield f"step {step}: ranks 0 and {at} have different losses"


def _in_gradients(step: int, near: float, ranks: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> Iterator[str]:
    known = wanted["gradients"][step]
    size = norm(known)
    for at, rank in enumerate(ranks):
        for name, one in rank["gradients"][step].items():
            if name not in known:
                yield f"step {step}: {name} has a gradient on rank {at}, and none in plain torch"
            elif not (off := float((one - known[name]).norm())) <= near * size:
                yield f"step {step}: the gradient of {name} on rank {at} is off by {off / size:.3g} of all"
    if missing := known.keys() - {name for rank in ranks for name in rank["gradients"][step]}:
        yield f"step {step}: no gradient of {', '.join(sorted(missing))}"


def _in_the_end(case: Case, ranks: Sequence[dict[str, Any]], wanted: dict[str, Any]) -> Iterator[str]:
    numbers = {"norm": norm(wanted["gradients"][1])}
    if case.evaluates:
        numbers["evaluated"] = wanted["evaluated"]
    for at, rank in enumerate(ranks):
        for what, one in numbers.items():
            if not abs(rank[what] - one) <= case.near * max(abs(one), 1.0):
                yield f"{what} on rank {at} is {rank[what]!r}, and {one!r} in plain torch"
    state = {name: one for rank in ranks for name, one in rank["state"].items()}
    if state.keys() != wanted["state"].keys():
        yield f"the state differs in {', '.join(sorted(state.keys() ^ wanted['state'].keys()))}"
    scale = norm(wanted["state"])
    for name, one in state.items():
        other = wanted["state"].get(name, one)
        if not float((one.double() - other.double()).norm()) <= case.near * scale:
            yield f"the state's {name} is off"


def norm(tensors: dict[str, torch.Tensor]) -> float:
    """Return the norm of all of them together."""
    return float(torch.stack([one.double().norm() for one in tensors.values()]).norm())


def table(outcome: Outcome) -> str:
    """Return how many cases came to what, and why some were refused."""
    lines = [f"{'outcome':<12}{'cases':>8}"]
    lines += [f"{name:<12}{outcome.counts[name]:>8}" for name in (*GOOD, "wrong", "traceback", "died")]
    lines += ["", *(f"{count:>6} refused: {reason}" for reason, count in outcome.refusals.most_common())]
    return "\n".join([*lines, "", f"{outcome.seconds:.0f} s"])


def main() -> int:
    """Fuzz, print a table, and end with 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat one (default 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    args = parser.parse_args()
    torch.set_num_threads(1)

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    say(f"seed {args.seed}")
    outcome = fuzz(args.seed, range(args.first, args.first + args.cases), say)
    print(f"{machine()}; seed {args.seed}\n")
    print(table(outcome))
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(outcome), indent=1))
    return 0 if outcome.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
