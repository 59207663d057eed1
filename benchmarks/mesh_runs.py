"""What the ranks of the mesh fuzzer do: run one case after the other, and tell what came of each.

A case runs in processes that other cases have run in, because starting some takes longer than most cases. A rank that
dies takes the cases behind it along: `started` says where it was.
"""

from __future__ import annotations

import signal
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
from drumline.core.errors import DrumlineError
from drumline.runtime.axes.slices import put_together, slice_of
from mesh_cases import Case, drawn, example

WAIT = 120.0  # seconds for another rank
_LONGEST = 400.0  # for a case


class _Hang(BaseException):
    """A case took too long."""


def all_run(seed: int, numbers: Sequence[int], started: Path | None = None) -> list[dict[str, Any]]:
    """Run cases on this rank, and return what came of each."""
    found = []
    for number in numbers:
        if started is not None and dist.get_rank() == 0:
            started.write_text(str(number), encoding="utf-8")
        found.append(run(drawn(seed, number)))
        if dist.is_initialized():
            dist.barrier()  # a rank that fails late must not make others wait in the next case
    return found


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
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for step in range(2):
            loss = _stepped(case, pipe, step, pipe.step)
            pipe.settle()
            found["losses"].append(loss)
            found["gradients"].append(_gradients(pipe))
            found["norm"] = float(pipe.clip_grad_norm_(float("inf")))
            if case.updates and not step:
                optimizer.step()
                optimizer.zero_grad()
        found["state"] = {name: one.clone() for name, one in pipe.state_dict().items()}
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
        name: put_together(one.grad.detach().double(), slice_of(one), pipe.axes).clone()
        for name, one in pipe.named_parameters()
        if one.grad is not None
    }
