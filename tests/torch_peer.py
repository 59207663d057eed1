"""PyTorch's own generators, asked for their orders without any process group."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from drumline.core.action import Action, Op
from drumline.core.program import Program

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)

SINGLE = {"gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B"}
MULTI = {
    "looped-bfs": "ScheduleLoopedBFS",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
    "interleaved-zb": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipe-v": "ScheduleDualPipeV",
}


def stages(num_ranks: int, per_rank: int) -> list[Any]:
    """What a schedule's constructor wants to know of its stages, and no more."""
    count = num_ranks * per_rank
    return [
        SimpleNamespace(
            num_stages=count, group_size=num_ranks, group_rank=0, submod=None, stage_index=index, is_last=False
        )
        for index in range(per_rank)
    ]


def multi(name: str, num_ranks: int, num_microbatches: int, per_rank: int = 2) -> Any | None:
    """Return the peer's schedule object, or None where the peer refuses the counts."""
    try:
        return getattr(schedules, MULTI[name])(stages(num_ranks, per_rank), num_microbatches, loss_fn=lambda o, t: o)
    except (ValueError, AssertionError):
        return None


def order(name: str, num_ranks: int, num_microbatches: int, per_rank: int = 2) -> Program | None:
    """Return the peer's compute order as a program, or None where the peer refuses the counts."""
    if name in MULTI:
        made = multi(name, num_ranks, num_microbatches, per_rank)
        return None if made is None else _program(made.pipeline_order, num_ranks)
    if name == "1f1b" and num_microbatches < num_ranks:
        return None  # its constructor refuses, which needs a process group to be seen
    return Program.of([_recorded(name, rank, num_ranks, num_microbatches) for rank in range(num_ranks)], "torch")


def _recorded(name: str, rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Run the peer's own loop over a stage that only notes what it is asked to do.

    `_get_pipeline_order` would be shorter, but numbers 1f1b's forwards on the last rank from 1 (torch 2.13).
    """
    row: list[Action] = []

    def note(op: Op) -> Callable[..., None]:
        return lambda microbatch, *_, **__: row.append(Action(rank, op, microbatch))

    stage = MagicMock(stage_index=rank, is_last=False)
    stage.forward_one_chunk = note(Op.FORWARD)
    stage.backward_one_chunk = note(Op.BACKWARD)
    for ops in ("get_fwd_recv_ops", "get_fwd_send_ops", "get_bwd_recv_ops", "get_bwd_send_ops"):
        setattr(stage, ops, lambda microbatch: [])
    bare = object.__new__(getattr(schedules, SINGLE[name]))
    bare._stage, bare._num_stages, bare._n_microbatches = stage, num_ranks, num_microbatches
    bare._loss_fn, bare._internal_losses, bare._has_backward, bare.scale_grads = None, [], True, True
    bare._check_inputs = lambda *_: ([()] * num_microbatches, [{}] * num_microbatches)
    bare._initialize_stage = lambda *_: None
    bare._step_microbatches(return_outputs=False)
    return row


def _program(pipeline_order: dict[int, list[Any]], num_ranks: int) -> Program:
    rows = [
        [Action.parse(str(action)) for action in pipeline_order[rank] if action is not None]
        for rank in range(num_ranks)
    ]
    return Program.of([[action for action in row if action.op is not Op.REDUCE_GRAD] for row in rows], "torch")


def load_csv(path: Path, program: Program, *, communication: bool) -> Any:
    """Let the peer's runtime load a CSV and return it."""
    per_rank = program.num_stages // program.num_ranks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runtime = schedules._PipelineScheduleRuntime(
            stages(program.num_ranks, per_rank), program.num_microbatches, loss_fn=lambda o, t: o
        )
        runtime._load_csv(str(path), format="compute_comms" if communication else "compute_only")
    return runtime
