"""Lengths and orders of slices: the search and its bound against every length and every order of small cases."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import combinations, count, pairwise, product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import drumline as dl
from drumline.cli.main import main
from drumline.core.costs import Costs
from drumline.core.errors import CostsError, PlanError
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.slices.curve import SliceCurve, fitted_curve
from drumline.core.timeline.idle import Limit
from drumline.plan.slices.bound import slice_bound
from drumline.plan.slices.dispatch import DispatchRules, all_rules, dispatched
from drumline.plan.slices.lengths import equal_lengths, shortest_longest
from drumline.plan.slices.results import SliceResult
from drumline.plan.slices.search import search_slices
from drumline.plan.slices.units import UnitInstance, UnitRule, peaks_fit
from drumline.plan.slices.work import SlicedWork
from refused import refused, saying

Step = tuple[str, int]  # an op and a unit


def seconds_of(op: str, start: int, end: int, tokens: int, attention: float) -> float:
    """Return the seconds of a slice, where F and W of a whole sequence take 1 and I takes 1, or B takes 2."""
    share, pairs = (end - start) / tokens, (end * end - start * start) / (tokens * tokens)
    both = min(1.0, 2 * attention)  # of I, which has the attention of both halves
    rest = 2 * attention - both  # of W, if that is more than I
    return {
        "F": (1 - attention) * share + attention * pairs,
        "B": 2 * ((1 - attention) * share + attention * pairs),
        "I": (1 - both) * share + both * pairs,
        "W": (1 - rest) * share + rest * pairs,
    }[op]


def step_of(rows: Sequence[Sequence[Step]], lengths: Sequence[int], attention: float) -> float | None:
    """Return when the last action of rows on a line of ranks ends; None if ranks wait for each other."""
    tokens, ends = sum(lengths), [sum(lengths[:number]) for number in range(len(lengths) + 1)]
    ended: dict[tuple[int, str, int], float] = {}
    free, at = [0.0] * len(rows), [0] * len(rows)
    while any(place < len(row) for place, row in zip(at, rows, strict=True)):
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row):
                op, unit = row[at[rank]]
                if op == "W":
                    need = [(rank, "I", unit)]
                elif op == "F":
                    need = [(rank - 1, "F", unit)] if rank else []
                else:
                    need = [(rank + 1, op, unit)] if rank < len(rows) - 1 else [(rank, "F", unit)]
                if any(each not in ended for each in need):
                    break
                start = max([free[rank], *(ended[each] for each in need)])
                number = unit % len(lengths)
                free[rank] = start + seconds_of(op, ends[number], ends[number + 1], tokens, attention)
                ended[rank, op, unit] = free[rank]
                at[rank], moved = at[rank] + 1, True
        if not moved:
            return None
    return max(free)


def merged(chains: Sequence[Sequence[Step]]) -> Iterator[list[Step]]:
    """Yield every order that keeps each chain's own."""
    left = [chain for chain in chains if chain]
    if not left:
        yield []
    for number, chain in enumerate(left):
        others = [*left[:number], chain[1:], *left[number + 1 :]]
        yield from ([chain[0], *rest] for rest in merged(others))


def with_weights(row: Sequence[Step]) -> Iterator[list[Step]]:
    """Yield every order of a row with a W after each of its I."""
    waiting = [unit for op, unit in row if op == "I"]
    for places in product(range(1, len(row) + 1), repeat=len(waiting)):
        if any(("I", unit) not in row[:place] for unit, place in zip(waiting, places, strict=True)):
            continue
        order: list[Step] = []
        for place in range(len(row) + 1):
            order += [("W", unit) for unit, own in zip(waiting, places, strict=True) if own == place]
            order += row[place : place + 1]
        yield order


@cache
def rows_of(microbatches: int, slices: int, back: str) -> list[list[Step]]:
    """Return every row of a rank in which slices go forward in order and back in reverse."""
    chains = []
    for microbatch in range(microbatches):
        units = range(microbatch * slices, (microbatch + 1) * slices)
        chains.append([*(("F", unit) for unit in units), *((back, unit) for unit in reversed(units))])
    rows = list(merged(chains))
    return rows if back == "B" else [row for each in rows for row in with_weights(each)]


def compositions(blocks: int, slices: int, multiple: int) -> Iterator[tuple[int, ...]]:
    """Yield all lengths of slices."""
    for cuts in combinations(range(1, blocks), slices - 1):
        yield tuple((end - start) * multiple for start, end in pairwise([0, *cuts, blocks]))


def least_of_all(ranks: int, microbatches: int, slices: int, blocks: int, attention: float, back: str) -> float:
    """Return the shortest step of all lengths and all orders."""
    rows = rows_of(microbatches, slices, back)
    steps = (
        step_of(chosen, lengths, attention)
        for lengths in compositions(blocks, slices, 16)
        for chosen in product(rows, repeat=ranks)
    )
    return min(step for step in steps if step is not None)


def found(ranks: int, **options: Any) -> SliceResult:
    return search_slices(Costs(), Placement.linear(ranks), **{"multiple": 16, "tries": 400, **options})


@pytest.mark.parametrize(
    ("ranks", "microbatches", "slices", "blocks", "attention", "back", "is_tight"),
    [
        (3, 1, 3, 12, 0.5, "B", True),
        (2, 2, 2, 4, 0.4, "B", True),
        (2, 1, 2, 8, 0.3, "I", False),
        (3, 1, 2, 5, 0.6, "I", False),
    ],
)
def test_no_lengths_and_no_order_beat_the_search_or_pass_the_bound(
    ranks: int, microbatches: int, slices: int, blocks: int, attention: float, back: str, is_tight: bool
) -> None:
    least = least_of_all(ranks, microbatches, slices, blocks, attention, back)
    result = found(
        ranks,
        num_microbatches=microbatches,
        slices=slices,
        tokens=16 * blocks,
        attention=attention,
        split=back == "I",
    )
    assert result.value == pytest.approx(least, rel=1e-9)
    assert result.bound <= least * (1 + 1e-9)
    assert (result.bound >= least * (1 - 1e-9)) == is_tight


def test_a_result_takes_as_long_as_its_rows_by_hand() -> None:
    result = found(3, num_microbatches=2, slices=3, tokens=192, attention=0.7, tries=60)
    rows = [[(str(action.op), action.microbatch) for action in row] for row in result.program.rows]
    names = {"FORWARD": "F", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W", "BACKWARD": "B"}
    steps = [[(names.get(op, op), unit or 0) for op, unit in row] for row in rows]
    assert step_of(steps, result.lengths, 0.7) == pytest.approx(result.value, rel=1e-9)
    assert result.timeline.makespan == pytest.approx(result.value, rel=1e-9)
    assert not validate(result.program)


@pytest.mark.parametrize("slices", [4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_lengths_save_a_tenth_at_eight_ranks_where_attention_takes_three_tenths(slices: int, microbatches: int) -> None:
    for attention in (0.3, 0.5):
        result = found(8, num_microbatches=microbatches, slices=slices, attention=attention, split=False, tries=10)
        assert result.gain is not None
        assert result.gain >= 0.1
        assert result.gap < 0.01


def test_the_bound_of_whole_backwards_is_that_of_the_docs() -> None:
    for ranks, microbatches, slices in ((8, 4, 16), (4, 1, 2)):
        work = SlicedWork.of(Costs(forward=2, backward=5), ranks, tokens=64)
        bound = slice_bound(
            work, Placement.linear(ranks), num_microbatches=microbatches, num_slices=slices, multiple=64 // slices
        )
        assert bound.whole == pytest.approx((microbatches + (ranks - 1) / slices) * 7, rel=1e-9)


def test_a_slow_last_stage_and_messages_enter_the_bound() -> None:
    costs = Costs(forward=[1, 1, 3], backward_input=[1, 1, 3], backward_weight=[1, 1, 3], comm=0.25)
    options: Any = {"num_microbatches": 2, "slices": 2, "tokens": 64, "attention": 0.4, "multiple": 16}
    result = search_slices(costs, Placement.linear(3), **options, tries=100)
    assert 18 + 0.5 < result.bound <= result.value  # the last rank's work, and the way to it


def test_shortest_longest_is_the_best_of_all_lengths() -> None:
    for attention, overhead in ((0.0, 0.0), (0.45, 8.0), (1.0, 0.0)):
        curve = SliceCurve.of(1.0, 160, attention=attention, overhead=overhead)

        def longest(lengths: Sequence[int], curve: SliceCurve = curve) -> float:
            ends = [sum(lengths[:number]) for number in range(len(lengths) + 1)]
            return max(curve.at(start, end) for start, end in pairwise(ends))

        lengths, least = shortest_longest(curve, 160, 4, 16)
        assert longest(lengths) == min(map(longest, compositions(10, 4, 16)))
        assert least <= longest(lengths)


def test_every_dispatched_order_is_legal_and_in_the_order_of_slices() -> None:
    for placement in (Placement.linear(3), Placement.loop(2, stages_per_rank=2), Placement.v(2)):
        work = SlicedWork.of(Costs(), placement.num_stages, tokens=96, attention=0.5)
        table = work.table((48, 32, 16))
        units = UnitInstance(work.costs_of((48, 32, 16), 1), placement, 3, table=table)
        rules = [DispatchRules(ahead=-3, whole=True), *all_rules(3, whole=False, bounded=False)[:6]]
        for each in rules:
            program = Program(units.program(dispatched(units, 3, each)).rows, num_slices=3)
            assert not validate(program)


def test_a_dispatched_order_holds_no_more_than_its_limit() -> None:
    work = SlicedWork.of(Costs(activation_bytes=1.0), 3, tokens=96)
    costs, table = work.costs_of((48, 32, 16), 3), np.tile(work.table((48, 32, 16)), (1, 3, 1))
    units = UnitInstance(costs, Placement.linear(3), 9, Limit(max_bytes=1.5), table)
    assert peaks_fit(units, dispatched(units, 3, DispatchRules(ahead=9, eager=True, whole=True)))


def test_a_limit_holds_in_microbatches_and_in_bytes() -> None:
    options: Any = {"num_microbatches": 4, "slices": 4, "attention": 0.4, "tries": 30}
    least, free = found(4, limit=Limit(max_activations=2), **options), found(4, **options)
    shares = [length / 4096 for length in least.lengths] * 4
    for row in least.program.rows:
        held = most = 0.0
        for action in row:
            if str(action)[1] == "F":
                held += shares[action.microbatch or 0]
            elif str(action)[1] in "BW":
                held -= shares[action.microbatch or 0]
            most = max(most, held)
        assert most <= 2 + 1e-9
    assert free.value < least.value
    costs = Costs(activation_bytes=100)
    in_bytes = search_slices(costs, Placement.linear(4), limit=Limit(max_bytes=200), multiple=16, **options)
    assert in_bytes.value == pytest.approx(least.value, rel=1e-9)
    assert max(in_bytes.timeline.peak_bytes or ()) <= 200
    with refused(PlanError, "within the limit"):
        found(4, limit=Limit(max_activations=0.5), **options)


def test_tries_alone_find_the_same_each_time_and_seconds_end_every_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = {"num_microbatches": 1, "slices": 4, "attention": 0.5}
    first, second = (found(4, seed=3, tries=300, **options) for _ in range(2))
    assert (first.value, first.lengths, first.program) == (second.value, second.lengths, second.program)
    ticks = count(step=0.1)  # each look at the clock takes a tenth of a second
    for module in ("search", "lengths_search"):
        monkeypatch.setattr(f"drumline.plan.slices.{module}.time", SimpleNamespace(monotonic=lambda: next(ticks)))
    for seconds, most in ((1e-6, 30), (2.0, 60)):  # the schedules, which a result needs, and a few more
        late = found(4, seconds=seconds, tries=None, **options)
        assert late.num_tried <= most
        assert late.value >= first.value


def test_of_several_numbers_of_slices_the_best_counts() -> None:
    costly = found(4, num_microbatches=1, slices=[4, 64], tokens=1024, overhead=32.0, split=False, tries=20)
    free = found(4, num_microbatches=1, slices=[4, 64], tokens=1024, split=False, tries=20)
    assert (costly.num_slices, free.num_slices) == (4, 64)


def test_what_cannot_be_searched_is_refused() -> None:
    for changed, kind, message in (
        ({"slices": 0}, PlanError, saying("slices is 0")),
        ({"tokens": 100}, PlanError, saying(expected="multiple of 16")),
        ({"slices": 400}, PlanError, saying(fix="256 slices or fewer")),
        ({"attention": 1.5}, CostsError, saying(r"attention is 1\.5")),
        ({"attention": [0.1]}, CostsError, saying(expected="one for each of 2")),
        ({"seconds": 0.0}, PlanError, saying(expected="more than 0")),
    ):
        with refused(kind, **message):
            found(2, **{"num_microbatches": 1, "slices": 4, **changed})
    with refused(PlanError, expected="not bidirectional"):
        dl.search_slices(Costs(), Placement.bidirectional(2, mirrored=[1]), num_microbatches=2, slices=2)


def test_a_curve_is_fitted_to_what_slices_took() -> None:
    true = SliceCurve(3e-4, 2e-6, 5e-10)
    points = [(a, b, true.at(a, b)) for a, b in ((0, 256), (0, 1024), (512, 1024), (1536, 2048), (0, 2048))]
    fitted = fitted_curve(points)
    for start, end in ((0, 2048), (1024, 1152)):
        assert fitted.at(start, end) == pytest.approx(true.at(start, end), rel=1e-6)
    falling = fitted_curve([(0, 100, 2.0), (0, 200, 1.0)])
    assert min(falling.fixed, falling.per_token, falling.per_pair) >= 0


def test_only_what_the_rule_of_slices_needs_keeps_its_order() -> None:
    rule, (f, i, w, b) = UnitRule(num_units=4, num_slices=2), range(4)
    kept = [(f, 4 + f), (f, i), (f, b), (f, w), (f, 4 + i), (4 + i, i), (4 + b, b), (i, w)]
    free = [(f, 8 + f), (w, 4 + i), (i, 8 + f), (4 + i, w), (w, f + 8), (f, 16 + f), (f, 4 + w)]
    assert [rule.keeps(*pair) for pair in kept] == [True] * len(kept)
    assert [rule.keeps(*pair) for pair in free] == [False] * len(free)


def test_equal_lengths_differ_by_one_multiple_at_most() -> None:
    assert equal_lengths(112, 3, 16) == (48, 32, 32)


def test_the_command_prints_lengths_and_writes_the_program(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    flags = ["search", "-r", "4", "-m", "1", "--slices", "4", "--attention", "0.4", "--tries", "12"]
    out = tmp_path / "found.csv"
    assert main([*flags, "--json", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert sum(told["lengths"]) == 4096
    assert told["lower_bound"] <= told["value"] <= told["reference_value"]
    assert out.read_text().split("\n")[0].startswith("0F0.0,0F0.1")
    assert main([*flags, "--whole-backwards"]) == 0
    assert "proven optimal" in capsys.readouterr().out
    assert main([*flags, "--pareto"]) == 2
