"""Tell accelerate what a pipeline is: one replica of the model on several processes.

accelerate takes every process for a replica, unless its state says otherwise. `PartialState` is that state: everything in
accelerate, and all that transformers asks of it, reads it. So this is the one place that says how many replicas there are.

    num_processes     lines of the pipeline: each gets its share of the data, as a replica would
    process_index     the rank: one process logs and saves
    distributed_type  NO: nothing is wrapped, gathered or averaged; the pipeline does that
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.state import AcceleratorState, DistributedType, PartialState


def one_replica(args: Any) -> None:
    """Let accelerate and transformers see one replica, before the accelerator is made."""
    device = args.device  # starts the process group, where a launcher asks for one
    AcceleratorState._reset_state()
    args._n_gpu = min(args.n_gpu, 1)  # else several cards of one process would become replicas
    state = PartialState()
    state.distributed_type, state.num_processes = DistributedType.NO, 1
    state.process_index = int(os.environ.get("RANK", "0"))
    state.local_process_index = int(os.environ.get("LOCAL_RANK", "0"))
    state.device = torch.device(device)


@contextmanager
def seen_as(**facts: Any) -> Iterator[None]:
    """Let accelerate and transformers see another state for a while."""
    states = [state._shared_state for state in (PartialState, AcceleratorState)]
    before = [dict(state) for state in states]
    for state in states:
        state.update(facts)
    try:
        yield
    finally:
        for state, former in zip(states, before, strict=True):
            state.update({name: former[name] for name in facts if name in former})


def set_lines(count: int) -> None:
    """Let accelerate and transformers see a replica for each line of a mesh."""
    for state in (PartialState, AcceleratorState):
        state._shared_state["num_processes"] = count
