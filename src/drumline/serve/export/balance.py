"""Where to cut for serving: by what blocks take in ONNX Runtime, not by what they take in PyTorch.

Each kind of block is exported and timed once: blocks with the same modules, weights and shapes share the time. The cut
with the shortest largest stage follows. Fused graphs take other times than their blocks, so the stages are timed too,
and the cut is made again with each stage's blocks scaled to the stage's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from drumline.core.errors import ModelError, counted
from drumline.plan.cut.cuts import Counts, ends_of, shortest_largest
from drumline.serve.export.chain import Chain
from drumline.serve.export.onnx import seconds_of, write_onnx
from drumline.serve.wire.manifest import Dimensions

GAIN = 0.03  # a new cut must promise this much to be tried


def block_seconds(
    chain: Chain, folder: Path, dimensions: Dimensions, tell: Callable[[str], None] = lambda text: None
) -> list[float]:
    """Return the seconds of every block in ONNX Runtime."""
    known: dict[object, float] = {}
    found = []
    for at, block in enumerate(chain.blocks):
        before, behind = chain.boundaries[at : at + 2]
        module = chain.stage(at, at + 1)
        shapes = tuple((tuple(one.shape), str(one.dtype)) for one in module.state_dict().values())
        kinds = tuple(type(one).__name__ for one in module.modules())
        taken = tuple(one.shape for one in (*before.tensors, *behind.tensors))
        key = kinds, shapes, taken, at == 0
        if key not in known:
            tell(f"timing block {block.name}")
            path = folder / f"block{at}" / "model.onnx"
            write_onnx(module, before, behind, path, dimensions)
            known[key] = seconds_of(path, before)
        found.append(known[key])
    return found


def best_cut(seconds: Sequence[float], num_stages: int) -> Counts:
    """Return the blocks of each stage that make the largest stage shortest.

    >>> best_cut([1.0, 1.0, 1.0, 3.0], 2)
    (3, 1)
    """
    if not 1 <= num_stages <= len(seconds):
        raise ModelError(
            f"the model has {counted(len(seconds), 'block')} for {counted(num_stages, 'stage')}",
            expected="at least one block per stage",
            fix=f"use --stages {len(seconds)} or fewer",
        )
    sums = np.append(0.0, np.cumsum(seconds))
    table = np.where(np.arange(len(seconds))[:, None] < np.arange(len(seconds) + 1)[None, :], sums - sums[:-1, None], np.inf)
    found = shortest_largest([table] * num_stages)
    assert found is not None, "every cut into no more stages than blocks is allowed"
    return found


def rescaled(seconds: Sequence[float], counts: Counts, stages: Sequence[float]) -> list[float]:
    """Return blocks' seconds that add up to the stages' measured ones.

    >>> rescaled([1.0, 1.0, 2.0], (2, 1), [4.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    ends = ends_of(counts)
    found: list[float] = []
    for first, end, measured in zip(ends, ends[1:], stages, strict=False):
        total = sum(seconds[first:end])
        scale = measured / total if total > 0 else 1.0
        found += [one * scale for one in seconds[first:end]]
    return found


def largest(seconds: Sequence[float], counts: Counts) -> float:
    """Return the seconds of the largest stage."""
    ends = ends_of(counts)
    return max(sum(seconds[first:end]) for first, end in zip(ends, ends[1:], strict=False))
