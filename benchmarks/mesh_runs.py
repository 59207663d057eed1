"""What the ranks of the mesh fuzzer do: run one case after the other; rank 0 judges each and writes a line of it.

A case runs in processes that other cases have run in, because starting some takes longer than most cases. A rank that
dies takes the cases behind it along: the lines say where it was.
"""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import drumline as dl
from drumline.channel.lines.slices import put_together, slice_of
from drumline.core.errors import DrumlineError
from mesh_cases import Case, drawn, example
from mesh_judge import judged

WAIT = 120.0  # seconds for another rank
_LONGEST = 400.0  # for a case


class _Hang(BaseException):
    """A case took too long."""


def all_run(seed: int, numbers: Sequence[int], lines: Sequence[Path]) -> None:
    """Run cases on this rank, and have a line of each appended to files as it ends."""
    for number in numbers:
        case, began = drawn(seed, number), time.perf_counter()
        told: list[Any] = [run(case)]
        if dist.is_initialized() and case.ranks > 1:
            # A rank that fails late must not make others wait in the next case.
            own, told = told[0], [None] * case.ranks
            dist.all_gather_object(told, own)
        if case.ranks == 1 or dist.get_rank() == 0:
            write(lines, line_of(case, *judged(case, told), time.perf_counter() - began))


def line_of(case: Case, outcome: str, how: str, seconds: float) -> dict[str, Any]:
    """Return what is written of a case."""
    return {
        "seed": case.seed, "case": case.number, "outcome": outcome, "how": how, "foreseen": case.refusal,
        "kinds": case.kinds, "seconds": round(seconds, 3), "is": case.described(), "again": case.again,
    }  # fmt: skip


def write(files: Sequence[Path], line: dict[str, Any]) -> None:
    """Append a line to files."""
    for path in files:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if there is none."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def run(case: Case) -> dict[str, Any]:
    """Run a case; an error is told with how far it came."""
    found: dict[str, Any] = {"losses": [], "gradients": []}
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _run(case, found)
    except _Hang:
        found["error"] = ("hang", f"no end after {_LONGEST:g} s")
    except DrumlineError as error:
        found["error"] = (type(error).__name__, str(error))
    except Exception as error:
        found["error"] = ("traceback", f"{type(error).__name__}: {error}")
    return found


@contextmanager
def _limited() -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise _Hang

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, _LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _run(case: Case, found: dict[str, Any]) -> None:
    given: dict[str, Any] = {"loss_fn": None if case.own else case.function.function, "balance": "even", **case.options}
    if case.ranks == 1:
        given |= {"num_ranks": case.mesh["pp"], "transport": "in-process"}
    else:
        given["mesh"] = case.mesh
    if case.kind != "chain":
        x = example(case)
        given["example"] = {"x": x, "labels": x} if case.own else x
    with dl.Pipeline(case.model(plain=False), device="cpu", timeout=WAIT, unused="ignore", **given) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=case.rate)
        for step in range(2):
            loss = _stepped(case, pipe, step, pipe.step)
            pipe.settle()
            found["losses"].append(loss)
            found["gradients"].append(_gradients(pipe))
            found["norm"] = float(pipe.clip_grad_norm_(float("inf")))
            if case.updates and not step:
                optimizer.step()
                optimizer.zero_grad()
        found["state"] = {name: entry.clone() for name, entry in pipe.state_dict().items()}
        if case.evaluates:
            found["evaluated"] = _stepped(case, pipe, 1, pipe.eval_step)


def _stepped(case: Case, pipe: dl.Pipeline, step: int, call: Any) -> float:
    x, y = zip(*case.microbatches(step)[pipe.axes.rows[0]], strict=True)
    given: tuple[Any, Any] = (dl.Microbatches(x), dl.Microbatches(y)) if case.apart else (torch.cat(x), torch.cat(y))
    loss = call(given[0], **{"labels" if case.own else "target": given[1]}).loss
    assert loss is not None
    return float(loss)


def _gradients(pipe: dl.Pipeline) -> dict[str, Tensor]:
    """Return the whole gradients of this rank's parameters; all lines call it alike."""
    return {
        name: put_together(param.grad.detach().double(), slice_of(param), pipe.axes).clone()
        for name, param in pipe.named_parameters()
        if param.grad is not None
    }
