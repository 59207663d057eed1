"""Clocks with offset and drift, against the true time that a test knows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from drumline.core.measured.align import Dial, align
from drumline.core.measured.record import Record
from matrices import examples


class World:
    """Ranks in a row that send each other messages; every clock but the first is off and runs wrong."""

    def __init__(self, num_ranks: int, *, drift: float, seconds: float, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.num_ranks = num_ranks
        self.length = seconds * 1e9
        self.offsets = [0] + [self.random.randint(-(10**13), 10**13) for _ in range(num_ranks - 1)]
        self.drifts = [0.0] + [self.random.uniform(-drift, drift) for _ in range(num_ranks - 1)]

    def shown(self, rank: int, moment: float) -> int:
        return int(moment * (1 + self.drifts[rank])) + self.offsets[rank]

    def begin(self, step: int) -> float:
        return 1e12 + step * self.length * 1.2

    def step(self, number: int, num_messages: int = 8, *, forwards_first: bool = False) -> list[Record]:
        begin = self.begin(number)
        rows: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for message in range(num_messages):
            for low in range(self.num_ranks - 1):
                for source, target in ((low, low + 1), (low + 1, low)):
                    part = (message + self.random.random()) / num_messages
                    part = part / 2 + (source > target) / 2 if forwards_first else part
                    left = begin + self.length * part
                    came = left + 20_000 * (1 + self.random.expovariate(0.3))
                    made, taken = self.shown(source, left), self.shown(target, came)
                    rows[target] += [0, 0, 0, message, source, made, made, taken, taken, taken, 1]
        return [
            Record(
                rank,
                number,
                begin_ns=self.shown(rank, begin),
                end_ns=self.shown(rank, begin + self.length),
                clock=rank,
                messages=rows[rank],
            )
            for rank in range(self.num_ranks)
        ]

    def errors(self, dials: tuple[Dial, ...], step: int) -> list[tuple[float, float]]:
        """Return how far off every clock is read over a step, and how far it may be."""
        moments = [self.begin(step) + part * self.length for part in (0.0, 0.5, 1.0)]
        return [
            (abs(dial.common(self.shown(rank, moment)) - moment), dial.error_ns)
            for rank, dial in enumerate(dials)
            for moment in moments
        ]


def in_order(records: list[Record], dials: tuple[Dial, ...]) -> bool:
    return all(
        dials[source].common(made) <= dials[record.rank].common(taken) + 1
        for record in records
        for _, _, _, _, source, made, _, _, taken, _, _ in record.rows("messages")
    )


@pytest.mark.parametrize("seconds", [0.05, 2.0, 60.0])
@pytest.mark.parametrize("num_steps", [1, 2, 12])
@pytest.mark.parametrize("num_ranks", [2, 5])
def test_every_clock_is_read_within_its_error_and_no_message_comes_before_it_left(
    num_ranks: int, num_steps: int, seconds: float
) -> None:
    seeds = range(examples(5))
    assert seeds
    for seed in seeds:
        world = World(num_ranks, drift=2e-4, seconds=seconds, seed=seed)
        steps = [world.step(number) for number in range(num_steps)]
        for at in {0, num_steps - 1}:
            dials = align(steps, at)
            assert all(off <= error + 2 for off, error in world.errors(dials, at))
            assert in_order(steps[at], dials)
            assert dials[0] == Dial(dials[0].own_ns, dials[0].own_ns)


def test_forwards_that_all_come_before_backwards_are_enough() -> None:
    world = World(4, drift=1e-4, seconds=5.0)
    steps = [world.step(number, forwards_first=True) for number in range(8)]
    dials = align(steps)
    assert all(off <= error + 2 for off, error in world.errors(dials, 7))
    assert in_order(steps[-1], dials)
    assert max(dial.error_ns for dial in dials) < 1_000_000  # of 5 s, in which a clock drifts by half a millisecond


def test_more_steps_tell_more() -> None:
    world = World(3, drift=1e-4, seconds=1.0)
    steps = [world.step(number) for number in range(12)]
    alone, together = (max(dial.error_ns for dial in align(each)) for each in (steps[-1:], steps))
    assert together < alone


def test_clocks_with_one_number_need_no_alignment() -> None:
    records = [Record(rank, clock=7, begin_ns=rank) for rank in range(3)]
    assert align([records]) == (Dial(),) * 3


def test_ranks_that_share_a_clock_are_read_alike() -> None:
    world = World(3, drift=1e-4, seconds=1.0)
    world.offsets[2], world.drifts[2] = world.offsets[1], world.drifts[1]
    steps = [world.step(number) for number in range(4)]
    both = [[replace(record, clock=min(record.rank, 1)) for record in records] for records in steps]
    dials = align(both)
    assert dials[1] == dials[2]
    assert in_order(both[-1], dials)


def test_clocks_that_jump_are_said_to_be_far_off() -> None:
    world = World(2, drift=0.0, seconds=1.0)
    before = world.step(0)
    world.offsets[1] += 50_000_000
    late = world.step(0, num_messages=8)
    jumped = [replace(line, messages=[*line.messages, *more.messages]) for line, more in zip(before, late, strict=True)]
    assert max(dial.error_ns for dial in align([jumped])) > 10_000_000


def two_clocks(offset_ns: int, begin_ns: int, rng: random.Random) -> list[Record]:
    """Return a step of some 60 ms in which messages go to and fro, between clocks that differ by so much."""
    to_first: list[int] = []
    to_second: list[int] = []
    now = begin_ns
    for number in range(6):
        for target, arrivals in ((1, to_second), (0, to_first)):
            now += rng.randint(2_000_000, 9_000_000)
            left = now + offset_ns * (1 - target)
            came = now + offset_ns * target + rng.randint(20_000, 60_000)
            arrivals += [number, 0, 1 - target, number, 1 - target, left, left, came, came, came + 5, 64]
    first = Record(0, begin_ns=begin_ns, end_ns=now, clock=1, messages=to_first)
    return [first, Record(1, begin_ns=begin_ns + offset_ns, end_ns=now + offset_ns, clock=2, messages=to_second)]


@pytest.mark.parametrize("seed", range(20))
def test_a_clock_that_is_set_between_steps_keeps_messages_in_order(seed: int) -> None:
    rng = random.Random(seed)
    jump = rng.choice([-1, 1]) * rng.randint(50_000, 3_000_000)
    steps = [two_clocks(5_000_000, 1_000_000, rng), two_clocks(5_000_000 + jump, 400_000_000, rng)]
    assert in_order(steps[-1], align(steps))
