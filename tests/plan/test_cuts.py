"""Cuts against brute force, for both objectives."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from chains import cuts
from drumline.core.graph import Floats
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.cuts import dealt, shortest_largest, shortest_step
from drumline.plan.cut.partition import partition
from drumline.plan.cut.peaks import held_by
from names import build

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


@pytest.mark.slow
def test_both_objectives_equal_brute_force_on_500_random_chains() -> None:
    refused = 0
    for seed in range(500):
        tables, num_blocks, num_stages, num_microbatches = drawn(seed)
        every = [stages_of(tables, cut) for cut in cuts(num_blocks, num_stages)]
        largest, shortest = min(map(max, every)), min(step(row, num_microbatches) for row in every)
        even, quick = shortest_largest(tables), shortest_step(tables, num_microbatches)
        if largest == math.inf:
            assert even is None
            assert quick is None
            refused += 1
            continue
        assert even is not None
        assert quick is not None
        assert max(stages_of(tables, even)) == largest, seed
        assert sum(stages_of(tables, even)) == min(sum(row) for row in every if max(row) == largest), seed
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


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-v", "hanayo"])
def test_equal_blocks_that_are_dealt_leave_no_rank_longer_than_the_exact_cut(name: str) -> None:
    rng = random.Random(0)
    for _ in range(12):
        program = build(name, rng.choice([2, 3]), 6)
        homes, num_blocks = program.placement.homes, program.num_stages + rng.randint(0, 9)
        extra = [0.0] * program.num_stages
        extra[0], extra[-1] = rng.choice([0.0, 0.001, 1.5]), rng.choice([0.0, 0.6, 3.0])
        blocks = [1.0] * num_blocks
        blocks[0], blocks[-1] = blocks[0] + extra[0], blocks[-1] + extra[-1]
        exact = partition([BlockCosts(block) for block in blocks], program.num_stages, held_pairs=held_by(program))
        assert exact.is_exact
        stages = [count + more for count, more in zip(dealt(num_blocks, homes, extra), extra, strict=True)]
        largest = [
            max(sum(value for value, home in zip(each, homes, strict=True) if home == rank) for rank in set(homes))
            for each in (stages, exact.seconds)
        ]
        assert largest[0] == pytest.approx(largest[1])
