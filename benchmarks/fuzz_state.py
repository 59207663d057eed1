"""Fuzz state that blocks keep: random kinds of it in random places, each against a plain loop of torch.

    python benchmarks/fuzz_state.py --cases 1000 --json out/fuzz_state.json
    python benchmarks/fuzz_state.py --first 17 --cases 1 --show

Every case trains five steps and compares the gradients of each step, and what is kept at the end, with the plain model
on the same microbatches one by one. It comes to one of these:

    equal      as plain training
    refused    by an error of Drumline's, of one line, that names a block and what it keeps, before any wrong gradient
    wrong      other gradients, or another state at the end
    vague      refused without the name of what is kept, or of its block
    alarm      refused, although what is kept makes no difference
    raw        any other error

All but the first two are failures. A failure prints the command that runs its case alone.
"""

from __future__ import annotations

import argparse
import copy
import json
import linecache
import random
import re
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import IOBase, StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import DrumlineError
from fuzz_outcome import FuzzOutcome
from measure import machine
from state_cases import LATE_STEP, NUM_MICROBATCHES, NUM_STEPS, WIDTH, Case, drawn, source

GOOD = ("equal", "refused")
BAD = ("wrong", "vague", "alarm", "raw")
ROWS = 8
_NEAR = 1e-4


@dataclass(slots=True)
class Trained:
    """What training came to: the gradients of every step, what is kept at the end, and what it raised."""

    gradients: list[list[Tensor]] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)
    error: Exception | None = None
    trace: str = ""


class Outcome(FuzzOutcome):
    """What became of all cases."""

    def add(self, case: Case, came_to: str, how: str) -> None:
        """Count a case."""
        self.counts[came_to] += 1
        checkpoint = "" if case.checkpoint == "none" else ", recomputed"
        for kind in (case.value, case.place, case.time, case.form, case.schedule + checkpoint):
            self.kinds.setdefault(kind, Counter())[came_to] += 1
        if came_to == "refused":
            self.refusals[re.sub(r"block '[^']*'|'[^']*'|\d+(\.\d+)?", "...", how)[:100]] += 1
        if came_to in BAD:
            again = f"python benchmarks/fuzz_state.py --seed {case.seed} --first {case.number} --cases 1 --show"
            form = f" --form {case.form}"
            self.failures.append(f"case {case.number} {came_to}: {case.title}\n    {how}\n    {again}{form}")


def run_module(case: Case, turn: str) -> types.ModuleType:
    """Run a case's source as a module of its own."""
    name = f"state_case_{case.seed}_{case.number}_{turn}"
    text = source(case)
    module = types.ModuleType(name)
    module.__file__ = f"<{name}>"
    linecache.cache[module.__file__] = len(text), None, text.splitlines(keepends=True), module.__file__
    sys.modules[name] = module
    exec(compile(text, module.__file__, "exec"), module.__dict__)
    return module


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return a step's batch and target."""
    chance = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, WIDTH, generator=chance)


def trained(case: Case, turn: str, train: Callable[[nn.Module, Case], Callable[[Tensor, Tensor], None]]) -> Trained:
    """Train a fresh model, and return what that came to."""
    module, result = run_module(case, turn), Trained()
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    try:
        whole = module.Model()
        blocks = list(whole.blocks)
        model = whole if case.form == "traced" else nn.Sequential(*blocks)
        step = train(model, case)
        for number in range(NUM_STEPS):
            for block in blocks:
                block.is_late = number >= LATE_STEP
            model.train(number != NUM_STEPS - 2)
            model.zero_grad()
            step(*batch(number))
            result.gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        result.kept = [plain(module.kept(blocks[at])) for at in case.keepers]
    except Exception as error:
        result.error, result.trace = error, traceback.format_exc()
    finally:
        sys.modules.pop(module.__name__, None)
        linecache.cache.pop(str(module.__file__), None)
    return result


def by_itself(model: nn.Module, case: Case) -> Callable[[Tensor, Tensor], None]:
    """Return plain training's step: microbatch by microbatch."""

    def step(inputs: Tensor, targets: Tensor) -> None:
        for x, y in zip(inputs.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES), strict=True):
            (functional.mse_loss(model(x), y) / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]

    return step


def in_a_pipeline(model: nn.Module, case: Case) -> Callable[[Tensor, Tensor], None]:
    """Return a pipeline's step."""
    options: dict[str, Any] = {"example": batch(0)[0]} if case.form == "traced" else {}
    pipe = dl.Pipeline(
        model,
        loss_fn=functional.mse_loss,
        schedule=case.schedule,
        num_ranks=2,
        num_microbatches=NUM_MICROBATCHES,
        checkpoint=case.checkpoint,
        transport="in-process",
        balance="even",
        record=False,
        check_model=case.checks,
        **options,
    )

    def step(inputs: Tensor, targets: Tensor) -> None:
        pipe.step(inputs, target=targets)

    return step


def plain(value: Any) -> Any:
    """Return what is kept as something that can be compared; what it gives next stands for a generator."""
    if isinstance(value, Tensor | np.ndarray):
        return value.tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple) or type(value).__name__ == "deque":
        return [plain(item) for item in value]
    if isinstance(value, torch.Generator):
        other = torch.Generator()
        other.set_state(value.get_state())
        return torch.rand(3, generator=other).tolist()
    if isinstance(value, np.random.Generator | random.Random):
        return copy.deepcopy(value).random()
    if isinstance(value, np.random.RandomState):
        return copy.deepcopy(value).rand()
    if isinstance(value, IOBase):
        return value.readline()
    if hasattr(value, "__next__"):
        return next(value)
    if hasattr(type(value), "__slots__") and not hasattr(value, "__dict__"):
        return [plain(getattr(value, name)) for name in type(value).__slots__]
    return plain(vars(value)) if hasattr(value, "__dict__") else value


def is_near(value: Any, other: Any) -> bool:
    """Whether two such values are the same but for rounding."""
    if isinstance(value, float | int) and isinstance(other, float | int):
        return abs(value - other) <= _NEAR * max(1.0, abs(value))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(is_near(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(is_near, value, other))
    return bool(value == other)


def judged(case: Case) -> tuple[str, str]:
    """Run a case, and return what it came to and how."""
    wanted = trained(case, "plain", by_itself)
    if wanted.error is not None:
        return "raw", f"plain training fails:\n{wanted.trace}"
    said = StringIO()
    with redirect_stderr(said):
        result = trained(case, "piped", in_a_pipeline)
    for step, (gradients, others) in enumerate(zip(result.gradients, wanted.gradients, strict=False)):
        off = max(
            (
                float((mine - other).norm() / (other.norm() + 1e-12))
                for mine, other in zip(gradients, others, strict=True)
            ),
            default=1.0,
        )
        if not off <= _NEAR:
            return "wrong", f"gradients of step {step} are {off:.2g} of their size off" + _after(result)
    if result.error is not None:
        text = f"{type(result.error).__name__}: {result.error}"
        if not isinstance(result.error, DrumlineError):
            return "raw", result.trace
        if case.is_pure:
            return "alarm", text
        return ("refused" if is_named(case, str(result.error)) else "vague"), text
    if not case.is_last_seen_by_chance and not is_near(wanted.kept, result.kept):
        return "wrong", f"it keeps {result.kept}, expected {wanted.kept}"[:400]
    return "equal", said.getvalue().strip()


def _after(result: Trained) -> str:
    return "" if result.error is None else f", and then {type(result.error).__name__}: {result.error}"


NAMES = re.compile(r"\b(state|box|_kept|others|helper|turn|get|put)\b|STATE|BOX|ALIVE")


def is_named(case: Case, text: str) -> bool:
    """Whether a refusal is one line that names a block and what it keeps."""
    return (
        "\n" not in text
        and re.search(r"(block|of|in|because) '[\w.]+'", text) is not None
        and NAMES.search(text) is not None
    )


def fuzz(cases: Sequence[Case], *, jobs: int = 1, say: Callable[[str], None] = lambda text: None) -> Outcome:
    """Run cases, by so many processes."""
    outcome, begun = Outcome(cases[0].seed), time.perf_counter()
    for at, (case, (came_to, how)) in enumerate(zip(cases, _every(cases, jobs), strict=True), 1):
        before = len(outcome.failures)
        outcome.add(case, came_to, how)
        for text in outcome.failures[before:]:
            say(text)
        if at % 100 == 0:
            say(f"{at} cases: {dict(outcome.counts)}")
    outcome.seconds = time.perf_counter() - begun
    return outcome


def _every(cases: Sequence[Case], jobs: int) -> Iterable[tuple[str, str]]:
    if jobs == 1:
        yield from map(judged, cases)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_one_thread) as pool:
        yield from pool.map(judged, cases, chunksize=10)


def _one_thread() -> None:
    torch.set_num_threads(1)


def table(outcome: Outcome) -> str:
    """Return how many cases came to what, by what they keep and where, and why some were refused."""
    return outcome.table((*GOOD, *BAD), 9)


def main() -> int:
    """Fuzz, print a table, and end with 1 if anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000, help="how many (default 1000)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case, to repeat one (default 0)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default 0)")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with its own cases (default 1)")
    parser.add_argument("--form", choices=("chain", "traced"), default="", help="lists of blocks, or traced models")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose title has this text")
    parser.add_argument("--show", action="store_true", help="print the sources too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there, too")
    args = parser.parse_args()
    _one_thread()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    cases = [drawn(args.seed, number, args.form) for number in range(args.first, args.first + args.cases)]
    cases = [case for case in cases if args.only in case.title]
    if args.show:
        for case in cases:
            print(f"# {case.title}\n{source(case)}")
    outcome = fuzz(cases, jobs=args.jobs, say=say)
    print(f"{machine()}; seed {args.seed}\n")
    print(table(outcome))
    if args.json is not None:
        summary = {"counts": outcome.counts, "kinds": outcome.kinds, "refusals": outcome.refusals}
        args.json.write_text(json.dumps({**summary, "failures": outcome.failures}, indent=1), encoding="utf-8")
    return 0 if outcome.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
