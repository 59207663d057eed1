"""The two copies of a stage in two-directional schedules: the second gets the first one's values.

Ranks of several processes first tell what their copies look like, as a digest. Only where the two differ are values
sent, one stage at a time, so that no rank ever holds much more than its own stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from drumline.pipeline import assembly
from drumline.pipeline.crew import Crew
from drumline.runtime.executor import Executor
from drumline.runtime.stage import Stage


def share_copies(crew: Crew, executors: Sequence[Executor], homes: Sequence[int]) -> None:
    """Give every stage that is not at home the values of the one that is."""
    differing = range(len(homes)) if crew.alone else _differing(crew, executors[0])
    for index in differing:
        told = crew.all_told("weights", [_state(one, index) if homes[index] == one.rank else None for one in executors])
        values = next(one for one in told if one is not None)
        with torch.no_grad():
            for executor in executors:
                if index in executor.stages and homes[index] != executor.rank:
                    for tensor, value in zip(assembly.state(executor.stages[index]), values, strict=True):
                        tensor.copy_(value)


def _state(executor: Executor, index: int) -> list[Tensor]:
    return [tensor.detach().cpu() for tensor in assembly.state(executor.stages[index])]


def _differing(crew: Crew, executor: Executor) -> list[int]:
    """Return the stages whose copies differ."""
    mine = {index: _digest(stage) for index, stage in executor.stages.items()}
    found: dict[int, set[bytes]] = {}
    for one in crew.all_told("digests", [mine]):
        for index, digest in one.items():
            found.setdefault(index, set()).add(digest)
    return sorted(index for index, digests in found.items() if len(digests) > 1)


def _digest(stage: Stage) -> bytes:
    """Return what stands for all of a stage's values."""
    made = blake2b(digest_size=16)
    for tensor in assembly.state(stage):
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        made.update(flat.view(torch.uint8).numpy().data if flat.numel() else b"")
    return made.digest()
