"""Tell accelerate what a pipeline is: one replica of the model on several processes.

accelerate takes every process for a replica, unless its state says otherwise. `PartialState` is that state: everything
in accelerate, and all that transformers asks of it, reads it. So this is the one place that says how many replicas
there are.

    num_processes     lines of the pipeline: each gets its share of the data, as a replica would
    process_index     the rank: one process logs and saves
    device            this rank's; accelerate numbers several processes on a CPU "cpu:0", which torch.load does not know
    distributed_type  NO: nothing is wrapped, gathered or averaged; the pipeline does that
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState

from drumline.model.patches import put_in

_CPU = torch.device("cpu")


def begin(args: Any) -> None:
    """Let the accelerator that comes next see one replica."""
    args._n_gpu = min(args.n_gpu, 1)  # else several cards of one process would become replicas
    if args.device.type == "cpu":
        args._setup_devices = _CPU  # what `args.device` returns
    AcceleratorState._reset_state()
    declare(1)


def declare(num_lines: int) -> None:
    """Let accelerate and transformers see a replica for each line, whatever was made in this process meanwhile.

    >>> state = PartialState()
    >>> with seen_as(num_processes=state.num_processes):
    ...     declare(2)
    ...     state.num_processes
    2
    """
    rank, local_rank = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
    facts = {"num_processes": num_lines, "process_index": rank, "local_process_index": local_rank}
    for state in _states():
        state.update(distributed_type=DistributedType.NO, **facts)
        if state.get("device", _CPU).type == "cpu":
            state["device"] = _CPU


def seen_as(**facts: Any) -> AbstractContextManager[None]:
    """Let accelerate and transformers see another state for a while."""
    return put_in((state, name, value) for state in _states() for name, value in facts.items())


def _states() -> list[dict[str, Any]]:
    return [kind._shared_state for kind in (PartialState, AcceleratorState) if kind._shared_state]
