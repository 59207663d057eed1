"""Plans in slices of sequences: when they are chosen, what they predict, and what a file keeps of them."""

from __future__ import annotations

import json
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
