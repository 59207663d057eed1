"""Where to cut for serving: by what blocks take in ONNX Runtime, not by what they take in PyTorch.

Every block is timed as its own graph, and the cut with the shortest largest stage follows. Fused graphs take other
times than their blocks, so the stages are timed too. As long as that promises a gain, the cut is made again, with each
stage's blocks scaled to the stage's time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from drumline.core.errors import ModelError, counted
from drumline.plan.cut.cuts import Counts, ends_of, shortest_largest

GAIN = 0.03  # a new cut must promise this much to be tried


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
    begins, ends = np.arange(len(seconds))[:, None], np.arange(len(seconds) + 1)[None, :]
    counts = shortest_largest([np.where(begins < ends, sums[None, :] - sums[:-1, None], np.inf)] * num_stages)
    assert counts is not None, "every cut into no more stages than blocks is allowed"
    return counts


def rescaled(seconds: Sequence[float], counts: Counts, stages: Sequence[float]) -> list[float]:
    """Return blocks' seconds that add up to the stages' measured ones.

    >>> rescaled([1.0, 1.0, 2.0], (2, 1), [4.0, 2.0])
    [2.0, 2.0, 2.0]
    """
    values: list[float] = []
    for (first, end), measured in zip(pairwise(ends_of(counts)), stages, strict=True):
        total = sum(seconds[first:end])
        scale = measured / total if total > 0 else 1.0
        values += [duration * scale for duration in seconds[first:end]]
    return values


def largest(seconds: Sequence[float], counts: Counts) -> float:
    """Return the seconds of the largest stage.

    >>> largest([1.0, 2.0, 4.0], (2, 1))
    4.0
    """
    return max(sum(seconds[first:end]) for first, end in pairwise(ends_of(counts)))
