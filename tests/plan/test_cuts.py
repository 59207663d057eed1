from __future__ import annotations

import math
import random

import numpy as np

from chains import cuts
from drumline.core.simulate.graph import Floats
from drumline.plan.cut.cuts import shortest_largest, shortest_step

Tables = list[Floats]


def drawn(seed: int) -> tuple[Tables, int, int, int]:
    """Return the tables of a random chain: stages of different speeds, some runs forbidden."""
    rng = random.Random(seed)
    num_blocks = rng.randint(1, 8)
    num_stages, num_microbatches = rng.randint(1, num_blocks), rng.randint(1, 9)
    blocks = [rng.randint(0, 12) for _ in range(num_blocks)]
    forbidden = rng.choice([0.0, 0.1, 0.4])
    tables = []
    for _ in range(num_stages):
        speed, own = rng.choice([1, 1, 2]), rng.randint(0, 3)
        table = np.full((num_blocks, num_blocks + 1), np.inf)
        for first in range(num_blocks):
            for end in range(first + 1, num_blocks + 1):
                if rng.random() >= forbidden:
                    table[first, end] = speed * sum(blocks[first:end]) + own
        tables.append(table)
    return tables, num_blocks, num_stages, num_microbatches


def stages_of(tables: Tables, counts: tuple[int, ...]) -> list[float]:
    ends = np.cumsum([0, *counts])
    return [float(table[i, j]) for table, i, j in zip(tables, ends, ends[1:], strict=False)]


def step(stages: list[float], num_microbatches: int) -> float:
    return math.inf if math.inf in stages else sum(stages) + (num_microbatches - 1) * max(stages)


def test_both_objectives_equal_brute_force_on_500_random_chains() -> None:
    refused = 0
    for seed in range(500):
        tables, num_blocks, num_stages, num_microbatches = drawn(seed)
        every = [stages_of(tables, one) for one in cuts(num_blocks, num_stages)]
        largest, shortest = min(map(max, every)), min(step(one, num_microbatches) for one in every)
        even, quick = shortest_largest(tables), shortest_step(tables, num_microbatches)
        if largest == math.inf:
            assert even is None
            assert quick is None
            refused += 1
            continue
        assert even is not None
        assert quick is not None
        assert max(stages_of(tables, even)) == largest, seed
        assert sum(stages_of(tables, even)) == min(sum(one) for one in every if max(one) == largest), seed
        assert step(stages_of(tables, quick), num_microbatches) == shortest, seed
    assert 0 < refused < 250  # both kinds were among them


def test_with_one_microbatch_a_slow_rank_gets_less_than_would_be_even() -> None:
    tables = []
    for speed in (1.0, 2.0):
        table = np.full((6, 7), np.inf)
        for first in range(6):
            for end in range(first + 1, 7):
                table[first, end] = speed * 2 * (end - first)
        tables.append(table)
    assert shortest_largest(tables) == (4, 2)  # 8 and 8
    assert shortest_step(tables, 1) == (5, 1)  # 10 and 4: the sum is shorter
    assert shortest_step(tables, 100) == (4, 2)
