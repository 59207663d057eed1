"""Every kind of state that blocks keep, on every way to run: plain PyTorch training's numbers, or one refusal by name.

    python benchmarks/state_matrix.py
    python benchmarks/state_matrix.py --only "own generator" --show

A cell is a kind of state, as a list of blocks or in a traced model, on a schedule, in one process or on two. It trains
five steps with an optimizer, and comes to one of these:

    right      the gradients of every step, the weights and what is kept are plain training's
    refused    by one line with a block or parameter, what it keeps, and a fix, before any wrong gradient
    wrong      other gradients, weights or state
    vague      refused without a name or a fix
    alarm      refused, although the table of kinds says that it trains
    raw        any other error

All but the first two are failures.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from io import StringIO
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, RankFailed
from fuzz_state import is_near, plain
from hook_models import NODES
from measure import machine
from state_case_table import KINDS, WAYS, Kind
from state_kinds import WIDTH, Keeps
from state_models import Around, begin_anew

ROWS, NUM_MICROBATCHES, NUM_STEPS = 8, 4, 5
FORMS, WORLDS = ("chain", "traced"), ("one process", "two processes")
OUTCOMES = ("right", "refused", "wrong", "vague", "alarm", "raw")
_NEAR = 1e-4


class Cell(NamedTuple):
    """One kind on one way to run."""

    kind: Kind
    form: str
    way: str

    @property
    def title(self) -> str:
        """Say which."""
        return f"{self.kind.name} | {self.form} | {self.way}"


class Result(NamedTuple):
    """What a cell came to, and how."""

    came_to: str
    how: str = ""


@dataclass(slots=True)
class Trained:
    """What training came to, by parameter and by block."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None


def cells(only: str = "") -> list[Cell]:
    """Return all cells whose title has a text."""
    every = [Cell(kind, form, way) for kind in KINDS for form in FORMS if form in kind.forms for way in WAYS]
    return [cell for cell in every if only in cell.title]


def model_of(cell: Cell) -> nn.Module:
    """Return a new model, the same every time; what is outside of it begins anew."""
    begin_anew()
    NODES.clear()
    torch.manual_seed(0)
    blocks = cell.kind.make()
    return blocks if cell.form == "chain" else cell.kind.whole(blocks)


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return a step's batch and target."""
    chance = torch.Generator().manual_seed(step)
    return torch.randn(ROWS, WIDTH, generator=chance), torch.randn(ROWS, WIDTH, generator=chance)


def plainly(cell: Cell) -> Trained:
    """Train by a plain loop of torch over the microbatches."""
    model = model_of(cell)

    def step(inputs: Tensor, targets: Tensor) -> None:
        for x, y in zip(inputs.chunk(NUM_MICROBATCHES), targets.chunk(NUM_MICROBATCHES), strict=True):
            (functional.mse_loss(model(x), y) / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call]

    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.05)
    return _trained(cell, model, step, optimizer, lambda: dict(model.named_parameters()))


def piped(cell: Cell, *, is_alone: bool) -> Trained:
    """Train by a pipeline, here or with the other rank of this launch."""
    model = model_of(cell)
    options: dict[str, Any] = {"example": batch(0)[0]} if cell.form == "traced" else {}
    options |= {"num_ranks": 2, "transport": "in-process"} if is_alone else {"transport": "shared-memory"}
    options |= {**WAYS[cell.way], **cell.kind.options(cell.way)}
    result = Trained()
    try:
        with dl.Pipeline(
            model,
            loss_fn=functional.mse_loss,
            num_microbatches=NUM_MICROBATCHES,
            balance="even",
            device="cpu",
            record=False,
            **options,
        ) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.05)
            result = _trained(
                cell,
                model,
                lambda inputs, targets: pipe.step(inputs, target=targets),
                optimizer,
                lambda: dict(pipe.named_parameters()),
                pipe.settle,
            )
    except Exception as error:
        result.error = result.error or error
    return result


def _trained(
    cell: Cell,
    model: nn.Module,
    step: Callable[[Tensor, Tensor], object],
    optimizer: Any,
    parameters: Callable[[], dict[str, nn.Parameter]],
    settle: Callable[[], object] = lambda: None,
) -> Trained:
    result = Trained()
    try:
        for number in range(NUM_STEPS):
            cell.kind.turn(model, number)
            step(*batch(number))
            settle()
            gradients = {name: p.grad.clone() for name, p in parameters().items() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
            settle()
            result.gradients.append(gradients)
        result.weights = {name: param.detach().clone() for name, param in parameters().items()}
        here = {name.rpartition(".layer.")[0] for name in parameters()}
        result.state = {
            name: state_of(module)
            for name, module in model.named_modules()
            if isinstance(module, Keeps | Around) and (name in here or not name)
        }
    except Exception as error:
        result.error = error
    finally:
        begin_anew()
    return result


def state_of(module: nn.Module) -> dict[str, Any]:
    """Return what a module keeps: its attributes and buffers, as values that can be compared."""
    own = {name: value for name, value in vars(module).items() if not name.startswith("_") and not callable(value)}
    own |= dict(module._buffers)
    return {name: plain(value) for name, value in own.items() if not _is_machinery(value)}


def _is_machinery(value: Any) -> bool:
    """Whether a value cannot be compared: a lock, the system's chance, a weak reference, a list of modules."""
    name = type(value).__name__
    return name in ("lock", "SystemRandom", "weakref", "ReferenceType") or (
        isinstance(value, list) and any(isinstance(item, nn.Module) for item in value)
    )


def judged(cell: Cell, *, is_alone: bool) -> Result:
    """Run a cell, and return what it came to here."""
    with warnings.catch_warnings(), redirect_stderr(StringIO()):
        warnings.simplefilter("ignore")
        wanted = plainly(cell)
        result = piped(cell, is_alone=is_alone)
    if wanted.error is not None:
        return Result("raw", f"plain training fails: {wanted.error!r}")
    for step, (gradients, others) in enumerate(zip(result.gradients, wanted.gradients, strict=False)):
        if difference := _difference(gradients, others):
            return Result("wrong", f"step {step}: {difference}{_after(result)}")
    if result.error is not None:
        return _refusal(cell, result.error, is_alone=is_alone)
    if difference := _difference(result.weights, wanted.weights):
        return Result("wrong", f"in the end {difference}")
    for name, state in result.state.items():
        is_here = bool(name) or is_alone  # what is between blocks, the rank of one stage has
        if is_here and not is_near(wanted.state[name], state):
            return Result("wrong", f"{name or 'the model'} keeps {state}, expected {wanted.state[name]}"[:300])
    if not result.weights:
        return Result("wrong", "no weights")
    return Result("right")


def _difference(tensors: dict[str, Tensor], others: dict[str, Tensor]) -> str:
    for name, tensor in tensors.items():
        if name not in others:
            return f"{name} has a gradient, and none in plain training"
        off = float((tensor - others[name]).norm() / (others[name].norm() + 1e-12))
        if not (off <= _NEAR or (tensor - others[name]).norm() < 1e-7):
            return f"{name} is {off:.2g} of its size off"
    return "" if tensors else "no gradients"


def _after(result: Trained) -> str:
    return "" if result.error is None else f", and then {type(result.error).__name__}: {result.error}"


NAMED = re.compile(r"'[\w.]+'|hook calls|blocks? ")


def _refusal(cell: Cell, error: Exception, *, is_alone: bool) -> Result:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, RankFailed):
        return Result("other", text)
    if not isinstance(error, DrumlineError):
        return Result("raw", text[:400])
    if "\n" in str(error) or not error.fix or not re.search(cell.kind.names, str(error)):
        return Result("vague", text)
    is_expected = cell.way in cell.kind.refused or f"{cell.form} {cell.way}" in cell.kind.refused
    if not is_expected and not (cell.kind.refused_apart and not is_alone):
        return Result("alarm", text)
    return Result("refused", text)


def on_rank(titles: Sequence[str]) -> list[Result]:
    """Judge cells with the other rank of this launch."""
    torch.set_num_threads(1)
    every = {cell.title: cell for cell in cells()}
    return [judged(every[title], is_alone=False) for title in titles]


def together(results: Sequence[Result]) -> Result:
    """Return what a cell came to on all ranks: the worst; a rank may hear from another that it refuses."""
    own = [result for result in results if result.came_to != "other"] or [Result("raw", results[0].how)]
    worst = max(own, key=lambda result: OUTCOMES.index(result.came_to))
    some = {result.came_to for result in results}
    if "refused" in some and "right" in some:
        return Result("wrong", f"one rank refuses, the other does not know: {worst.how}")
    return worst


def in_one_process(every: Sequence[Cell]) -> Iterator[tuple[Cell, Result]]:
    """Run cells here."""
    for cell in every:
        yield cell, judged(cell, is_alone=True)


def on_two_processes(every: Sequence[Cell]) -> Iterator[tuple[Cell, Result]]:
    """Run cells in one launch of two processes."""
    ranks = launch(on_rank, [cell.title for cell in every], num_ranks=2)
    for cell, *results in zip(every, *ranks, strict=True):
        yield cell, together(results)


def table(counts: dict[tuple[str, ...], Counter[str]]) -> str:
    """Return how many cells came to what."""
    lines = [f"{'':<34}" + "".join(f"{name:>9}" for name in OUTCOMES)]
    for key, count in counts.items():
        lines.append(f"{' | '.join(key):<34}" + "".join(f"{count[name]:>9}" for name in OUTCOMES))
    total = sum(counts.values(), Counter[str]())
    return "\n".join([*lines, f"{'all':<34}" + "".join(f"{total[name]:>9}" for name in OUTCOMES)])


def main() -> int:
    """Run the matrix, print a table, and end with 1 if a cell is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="TEXT", default="", help="cells whose title has this text")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every Nth of them (default 1)")
    parser.add_argument("--world", choices=WORLDS, help="in one process alone, or on two alone")
    parser.add_argument("--show", action="store_true", help="print every cell, not failures alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun, failures = time.perf_counter(), 0
    counts: dict[tuple[str, ...], Counter[str]] = {}
    for world, run in zip(WORLDS, (in_one_process, on_two_processes), strict=True):
        for cell, result in run(cells(args.only)[:: args.every]) if args.world in (None, world) else ():
            counts.setdefault((world, cell.form, cell.way), Counter())[result.came_to] += 1
            is_bad = result.came_to not in ("right", "refused")
            failures += is_bad
            if is_bad or args.show:
                print(f"{world} | {cell.title}: {result.came_to} {result.how}", file=sys.stderr, flush=True)
    print(f"{machine()}\n\n{table(counts)}\n\n{time.perf_counter() - begun:.0f} s")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
