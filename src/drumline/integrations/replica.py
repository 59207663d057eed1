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
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, DistributedType, PartialState

from drumline.channel.devices.visible import group_backend

_CPU = torch.device("cpu")


def begin(args: Any) -> None:
    """Let the accelerator that comes next see one replica; join the other processes, if accelerate has not."""
    args._n_gpu = min(args.n_gpu, 1)  # else several cards of one process would become replicas
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group(group_backend())
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
    _tell(
        distributed_type=DistributedType.NO,
        num_processes=num_lines,
        process_index=int(os.environ.get("RANK", "0")),
        local_process_index=int(os.environ.get("LOCAL_RANK", "0")),
    )
    if PartialState._shared_state.get("device", _CPU).type == "cpu":
        _tell(device=_CPU)


@contextmanager
def seen_as(**facts: Any) -> Iterator[None]:
    """Let accelerate and transformers see another state for a while."""
    before = {name: PartialState._shared_state[name] for name in facts}
    _tell(**facts)
    try:
        yield
    finally:
        _tell(**before)


def _tell(**facts: Any) -> None:
    for state in (PartialState, AcceleratorState):
        if state._shared_state:  # else it is not made yet, and reads the other one then
            state._shared_state.update(facts)
