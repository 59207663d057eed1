"""Plans in slices of sequences: when they are chosen, what they predict, and what a file keeps of them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from drumline.core.errors import PlanError
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import Planned, plan
from drumline.plan.device.slice_profile import SliceProfile, TimedSlice
from drumline.plan.device.sliced import SlicedCandidate, lengths_of
from drumline.schedules import find, schedule, unregister
from profiles import model_profile
from refused import refused

TOKENS = 1024


def timed(fixed: float = 0.0, attention: float = 0.4) -> SliceProfile:
    """Return slices of a model whose whole sequence takes 3 s, and `fixed` more for each slice."""
    slices = []
    for number in (1, 2, 4, 8):
        each = TOKENS // number
        for start in range(0, TOKENS, each):
            end = start + each
            share = (1 - attention) * each / TOKENS + attention * (end**2 - start**2) / TOKENS**2
            slices.append(TimedSlice(start, end, share + fixed / 3, 2 * share + 2 * fixed / 3))
    return SliceProfile(1, TOKENS, tuple(slices), key_value_bytes=40.0)


def profiled(fixed: float = 0.0, attention: float = 0.4, **options: Any) -> ModelProfile:
    return replace(model_profile([0.125] * 8, rows=(1, 2), **options), slices=timed(fixed, attention))


def planned(batch: int, profile: ModelProfile | None = None, **options: Any) -> Planned:
    known = profiled() if profile is None else profile
    return plan(known, **{"num_ranks": 4, "batch": batch, "seconds": 0, "schedules": ["1f1b"], **options})


def test_slices_are_chosen_where_microbatches_are_few() -> None:
    few = planned(1).best
    assert few.slices
    assert few.program.num_slices == len(few.slices)
    assert few.step_seconds < 0.6 * planned(1, slices=False).best.step_seconds
    assert not any(
        each.program.num_slices > 1
        for each in planned(16, profile=profiled(), schedules=["1f1b"]).candidates
        if each.rows == 1
    )
    assert not planned(1, profile=replace(profiled(), slices=None)).best.slices


def test_the_step_of_equal_slices_is_that_of_the_formula() -> None:
    found = planned(1, profile=profiled(attention=0.0))
    (four,) = [c for c in found.candidates if isinstance(c, SlicedCandidate) and c.lengths == (256,) * 4]
    assert four.step_seconds == pytest.approx(3 / 4 * (1 + 3 / 4))  # (M + (P-1)/S)(F+B) of a stage
    assert four.seconds.total == pytest.approx(four.step_seconds)
    assert four.seconds.compute == pytest.approx(3 / 4)


def test_short_slices_that_cost_much_are_not_chosen() -> None:
    cheap, costly = (planned(1, profile=profiled(fixed)) for fixed in (0.0, 0.5))
    assert len(cheap.best.slices) > len(costly.best.slices)
    assert sum(len(c.program.name) for c in cheap.candidates)  # they are all named
    assert planned(1, profile=profiled(9.0)).best.slices == ()


def test_ranks_hold_slices_and_the_gradients_of_keys_and_values() -> None:
    found = planned(4, schedules=["1f1b"])
    whole = next(c for c in found.candidates if c.program.num_slices == 1 and c.rows == 1)
    four = next(c for c in found.candidates if isinstance(c, SlicedCandidate) and c.lengths == (256,) * 4)
    # 1f1b: 4 microbatches of 2 blocks of 100 bytes; sliced: (4-0+3)/4 of them, and a stage's gradients: 40 / 4
    static = 4 * 2 * 50
    assert whole.cut.rank_bytes[0] - static == pytest.approx(4 * 200)
    assert four.cut.rank_bytes[0] - static == pytest.approx(7 / 4 * 200 + 10, abs=11)
    none = replace(profiled(), slices=replace(timed(), key_value_bytes=0.0))
    less = next(c for c in planned(4, profile=none).candidates if c.summary().get("slices") == [256] * 4)
    assert four.cut.rank_bytes[0] > less.cut.rank_bytes[0]
    assert sum(item.total for item in four.rank_bytes) == pytest.approx(sum(four.cut.rank_bytes))


def test_lengths_are_never_shorter_than_what_was_measured() -> None:
    assert {min(lengths) >= 128 for lengths in lengths_of(timed())} == {True}
    assert max(map(len, lengths_of(timed()))) == 8
    assert any(len(set(lengths)) > 1 for lengths in lengths_of(timed()))


def test_a_plan_keeps_its_slices_in_its_file_and_refuses_damaged_ones(tmp_path: Any) -> None:
    best = planned(1).best
    best.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert (again.slices, again.program) == (best.slices, best.program)
    assert again.pipeline_settings["slices"] == best.slices
    table = json.loads(best.to_json())
    table["slices"] = table["slices"][1:]
    with refused(PlanError, "damaged plan: slices has"):
        Plan.from_json(json.dumps(table))


def test_a_profile_keeps_what_its_slices_took() -> None:
    profile = profiled()
    assert ModelProfile.from_json(profile.to_json()).slices == profile.slices
    table = json.loads(profile.to_json())
    table["slices"]["slices"][0]["end"] = TOKENS + 1
    with refused(PlanError, "a slice from 0 to 1025"):
        ModelProfile.from_json(json.dumps(table))
    assert timed().attention == pytest.approx(0.4)


def of_blocks(attention: Sequence[float]) -> SliceProfile:
    """Return a model of blocks that take a second each, F and B, of which attention takes these parts."""
    whole = timed(attention=sum(attention) / len(attention))

    def kind(part: float) -> tuple[TimedSlice, ...]:
        bounds = [(each.start / TOKENS, each.end / TOKENS) for each in whole.slices]
        shares = [(1 - part) * (b - a) + part * (b * b - a * a) for a, b in bounds]
        each = zip(whole.slices, shares, strict=True)
        return tuple(replace(known, forward=share, backward=2 * share) for known, share in each)

    kinds = tuple(map(kind, attention))
    slices = tuple(
        replace(each, forward=sum(k[at].forward for k in kinds), backward=sum(k[at].backward for k in kinds))
        for at, each in enumerate(whole.slices)
    )
    return replace(whole, slices=slices, blocks=tuple(range(len(attention))), kinds=kinds)


def test_stages_have_the_curves_of_their_blocks() -> None:
    blocks = of_blocks([0.0, 0.8, 0.8, 0.0])
    profile = replace(model_profile([1.0] * 4), slices=blocks)
    found = plan(profile, num_ranks=4, batch=1, seconds=0, schedules=["1f1b"])
    (four,) = [c for c in found.candidates if isinstance(c, SlicedCandidate) and c.lengths == (256,) * 4]
    grows = [0.8 * part + 0.2 * 0.25 for part in (1 / 16, 3 / 16, 5 / 16, 7 / 16)]
    parts: Any = four.costs.slice_factor
    assert [pytest.approx(each) for each in parts] == [[0.25] * 4, grows, grows, [0.25] * 4]
    plain = plan(replace(profile, slices=replace(blocks, blocks=(), kinds=())), num_ranks=4, batch=1, seconds=0,
                 schedules=["1f1b"])  # fmt: skip
    (same,) = [c for c in plain.candidates if isinstance(c, SlicedCandidate) and c.lengths == (256,) * 4]
    middle = [0.4 * part + 0.6 * 0.25 for part in (1 / 16, 3 / 16, 5 / 16, 7 / 16)]
    assert same.costs.slice_factor == pytest.approx(middle)
    assert four.step_seconds > same.step_seconds  # the longest slice of a stage with attention is longer
    assert four.seconds.total == pytest.approx(four.step_seconds)


def test_a_stage_of_several_blocks_pays_for_one_call() -> None:
    def fixed(seconds: float, parts: float) -> tuple[TimedSlice, ...]:
        every = (0, 1024), (0, 512), (512, 1024), (0, 256)
        return tuple(TimedSlice(a, b, seconds + parts * (b - a) / 1024, 0.0) for a, b in every)

    # Each block takes 0.1 s whatever its slices, of which the call is 0.06: whole, they take 0.06 + 3 x 0.04.
    profile = SliceProfile(1, 1024, fixed(0.18, 6.0), 0.0, (0, 1, 1), (fixed(0.1, 2.0), fixed(0.1, 2.0)))
    first, second = profile.stage_curves((1, 2))
    assert (first.fixed, second.fixed) == pytest.approx((0.1, 0.14))
    assert second.at(0, 512) == pytest.approx(0.14 + 2.0)


def test_a_profile_keeps_what_slices_of_its_blocks_took() -> None:
    profile = replace(profiled(), slices=of_blocks([0.0, 0.5] * 4))
    text = profile.to_json()
    assert ModelProfile.from_json(text).slices == profile.slices
    table = json.loads(text)
    table["slices"]["blocks"][0] = 8
    with refused(PlanError, "a block of kind 8"):
        ModelProfile.from_json(json.dumps(table))
    del table["slices"]["blocks"], table["slices"]["kinds"]  # as an older profile
    older = ModelProfile.from_json(json.dumps(table)).slices
    assert older is not None
    assert not older.knows_blocks((4, 4))


def test_what_is_tried_in_slices_is_a_fact_of_the_schedule() -> None:
    @schedule("own", formula_in_slices=True)
    def own(num_ranks: int, *, num_microbatches: int) -> Any:
        yield from find("gpipe").recipe(num_ranks, num_microbatches=num_microbatches)

    try:
        names = {each.program.name for each in planned(1, schedules=["own", "zb-v"]).candidates}
    finally:
        unregister("own")
    assert {"own in 2 slices", "own in 4 slices"} <= names
    assert not any(name.startswith("zb-v in ") for name in names)
