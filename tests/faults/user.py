"""What a user brings to `drumline train`: a model, data, and code that fails at a moment that the environment names.

    FAULT={"do": "kill", "rank": 1, "step": 7, "at": "backward", "marker": "/tmp/.../fired"}

`pace` makes every step last so many seconds more, for faults that come from outside. `whole` names a checkpoint that
must have appeared before the fault strikes: threads write checkpoints, and a busy machine lets them fall behind. A
fault strikes once: the marker file says when it did, and after how many steps of this rank. A restarted rank finds the
marker and trains on, unless the fault comes `again`. Drumline knows nothing of this file but its two functions,
`build_model` and `build_data`.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

WIDTH, CLASSES, BLOCKS, ROWS, LENGTH = 64, 5, 6, 16, 16
NUM_BATCHES = 5  # an epoch is shorter than a run, so that a position in the data means something
_GIVEN: dict[str, Any] = json.loads(os.environ.get("FAULT", "{}"))
_steps = 0  # optimizer steps that this process has made


def _is_here(at: str) -> bool:
    mine = int(os.environ.get("RANK", "0")) == _GIVEN.get("rank")
    return mine and at == _GIVEN.get("at") and _steps >= int(_GIVEN["step"])


def moment(at: str) -> bool:
    """Strike if this is the rank, step and moment; returns whether the caller has to do the damage itself."""
    if not _is_here(at):
        return False
    if "whole" in _GIVEN:
        _await(_GIVEN["whole"])
    try:
        with open(_GIVEN["marker"], "w" if _GIVEN.get("again") else "x", encoding="utf-8") as file:
            json.dump({"time": time.time(), "steps": _steps, "pid": os.getpid()}, file)
    except FileExistsError:
        return False
    _STRIKES[_GIVEN["do"]]()
    return True


def _raise() -> None:
    raise KeyError("no such layer: injected")


def _linger() -> None:
    time.sleep(3600)


def _await(path: str) -> None:
    """Wait until a file or folder is there, five minutes at most."""
    limit = time.monotonic() + 300.0
    while not os.path.exists(path) and time.monotonic() < limit:
        time.sleep(0.05)


def _pause() -> None:
    """Wait until the harness says to go on."""
    _await(f"{_GIVEN['marker']}.go")


def _shrink() -> None:
    """Let no file of this process grow beyond 48 KiB, as a quota does."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 << 10, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def _fill() -> None:
    """Fill the disk of the run to its last byte."""
    with open(_GIVEN["filler"], "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 12))
        except OSError:
            pass


_STRIKES: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "leave": lambda: os._exit(0),
    "quit": lambda: sys.exit(0),
    "raise": _raise,
    "hang": _linger,
    "pause": _pause,
    "shrink": _shrink,
    "fill": _fill,
    "nan": lambda: None,  # done where a gradient is at hand
    "nothing": lambda: None,  # the harness waits for the moment, and does something itself
}


def _count(*_: Any) -> None:
    global _steps
    moment("optimizer done")
    _steps += 1
    time.sleep(_GIVEN.get("pace", 0.0))


def _before(*_: Any) -> None:
    moment("optimizer")


def _watched(name: str, at: str, path_of: Callable[[Any], str]) -> None:
    """Let a function of `os` be a moment where it writes the checkpoint of the fault's step, and no earlier one."""
    right, written = getattr(os, name), f".step-{int(_GIVEN['step']):08d}."

    def call(file: Any, *args: Any, **kwargs: Any) -> Any:
        if written in path_of(file):
            moment(at)
        return right(file, *args, **kwargs)

    setattr(os, name, call)


def _moves_layers() -> None:
    """Move layers from rank 0 to rank 1 before the fifth step, and back before that of the fault; sending is a moment.

    Checkpoints in between are of the other cut. Rank 0 gets nothing but a promise where rank 1 is killed.
    """
    from drumline.channel import transfer
    from drumline.pipeline.pipeline import Pipeline

    step, messages = Pipeline.step, transfer._messages
    wanted = {4: [2, 5], int(_GIVEN["step"]): [4, 3]}  # of seven blocks

    def moves(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        if _steps in wanted:
            move = pipe.repartition(balance=wanted.pop(_steps))
            assert move.bytes_moved, "nothing has moved"
        return step(pipe, *args, **kwargs)

    def sends(*args: Any) -> Any:
        moment("moving")
        return messages(*args)

    setattr(Pipeline, "step", moves)  # noqa: B010
    setattr(transfer, "_messages", sends)  # noqa: B010


if _GIVEN:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_count)
    _watched("fsync", "saving", lambda number: os.readlink(f"/proc/self/fd/{number}"))
    _watched("rename", "publishing", os.path.basename)  # of the folder itself, not of a file in it
    if _GIVEN.get("at") == "moving":
        _moves_layers()


class Moment(torch.autograd.Function):
    """The identity, which knows when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return x."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        """Return the gradient, or NaN where that is the fault."""
        return grad * float("nan") if moment("backward") and _GIVEN["do"] == "nan" else grad


class Block(nn.Module):
    """A linear layer or experts, tanh and dropout, and the moments of their forward and backward."""

    def __init__(self, width: int, dropout: float, linear: nn.Module) -> None:
        super().__init__()
        self.linear, self.drop = linear, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next block gets."""
        moment("forward")
        found: Tensor = Moment.apply(self.drop(torch.tanh(self.linear(x))))  # type: ignore[no-untyped-call]
        return found


class Attention(nn.Module):
    """Causal attention of every token to those before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inwards, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what every token has read."""
        q, k, v = self.inwards(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        found: Tensor = self.out(read.transpose(1, 2).flatten(2))
        return found


class Reader(nn.Module):
    """A causal model of float64, so that only the order of sums differs between whole sequences and slices."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.inwards, self.places = nn.Linear(width, width), nn.Embedding(LENGTH, width)
        self.layers = nn.ModuleList(Block(width, dropout, Attention(width)) for _ in range(BLOCKS - 1))
        self.head = nn.Linear(width, CLASSES)
        self.double()

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Return what every token is."""
        places = torch.arange(x.shape[1], device=x.device) if positions is None else positions
        x = self.inwards(x) + self.places(places)
        for layer in self.layers:
            x = layer(x)
        found: Tensor = self.head(x)
        return found


def _of_tokens(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def build_model(
    width: int = WIDTH, dropout: float = 0.0, seed: int = 0, lines: str = "", *, reads: bool = False
) -> tuple[nn.Module, Any]:
    """Return the model and its loss; lines of a mesh may divide its layers, or the experts that it then has."""
    torch.manual_seed(seed)
    random.seed(seed)  # checkpoints keep these as well
    np.random.seed(seed)
    if reads:
        return Reader(width, dropout), _of_tokens
    blocks = [Block(width, dropout, _inner(width, lines)) for _ in range(BLOCKS)]
    model = nn.Sequential(*blocks, nn.Linear(width, CLASSES))
    if lines == "tp":
        model.tensor_parallel_plan = {"*.linear": "colwise_gather"}  # type: ignore[assignment]
    return model, nn.functional.cross_entropy


def _inner(width: int, lines: str) -> nn.Module:
    if lines != "ep":
        return nn.Linear(width, width)
    from drumline import MoE

    return MoE(width, width, num_experts=4)


def build_data(
    width: int = WIDTH, seed: int = 0, nan_at: int = -1, *, reads: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """Return the batches of an epoch, of sequences if the model reads; `nan_at` has a NaN in its second microbatch."""
    generator = torch.Generator().manual_seed(seed + 1)
    batches, shape = [], (ROWS, LENGTH) if reads else (ROWS,)
    for at in range(NUM_BATCHES):
        x = torch.randn(*shape, width, generator=generator, dtype=torch.float64 if reads else torch.float32)
        y = torch.randint(CLASSES, shape, generator=generator)
        if at == nan_at:
            x[ROWS // 4, 0] = float("nan")
        batches.append((x, y))
    return batches
