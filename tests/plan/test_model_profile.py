"""Profiles of a model: fitted, interpolated, merged, and refused where damaged."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import PlanError
from drumline.core.measured.costs import Handling
from drumline.plan.device.model_profile import ModelProfile, ProfiledLink, is_profile, merged
from drumline.plan.device.overheads import MessageTime, Overheads, fitted
from drumline.report.plan.profiles import profile_page, profile_svg, profile_text
from profiles import SOME, model_profile
from refused import refused, saying


def test_a_fit_finds_latency_and_bandwidth_through_noise() -> None:
    rng = random.Random(0)
    real = MessageTime(2e-5, 1 / 4e9)
    sizes = (4096, 65536, 524288, 4194304)
    points = [(size, real.at(size) * rng.uniform(0.97, 1.03)) for size in sizes for _ in range(20)]
    found = fitted(points)
    assert found.seconds == pytest.approx(real.seconds, rel=0.05)
    assert found.bytes_per_second == pytest.approx(4e9, rel=0.05)


def test_a_fit_has_no_negative_part() -> None:
    assert fitted([(0, 2.0), (10, 1.0)]).seconds_per_byte == 0
    falling = fitted([(10, 0.5), (20, 2.0)])
    assert falling.seconds == 0
    assert falling.seconds_per_byte > 0
    assert fitted([(10, 3.0)]) == MessageTime(3.0)
    with refused(PlanError, "no message was measured"):
        fitted([])


def test_overheads_are_what_was_measured_at_any_size() -> None:
    told = [(size, Handling(send=1e-6 + 1e-9 * size, take=2e-6, action=5e-6, flight=3e-6)) for size in (100.0, 1000.0)]
    found = Overheads.fitted(told, [(0.0, 1e-5), (1000.0, 2e-5)])
    assert found.send.at(500) == pytest.approx(1.5e-6)
    assert found.take.at(500) == pytest.approx(2e-6)
    assert found.end.at(2000) == pytest.approx(3e-5)
    assert (found.action, found.flight) == (5e-6, 3e-6)


def test_sizes_between_those_measured_lie_on_a_line() -> None:
    profile = model_profile([1.0, 2.0], rows=(1, 4))
    assert profile.at(4) == profile.sizes[1][1]
    paced = replace(profile, paces=(1.0, 1.6))
    assert paced.at(4).layers[1].times.forward == pytest.approx(1.6 * 8.0)
    assert paced.at(2).layers[1].times.forward == pytest.approx(1.2 * 4.0)
    two = profile.at(2)
    assert [layer.times.forward for layer in two.layers] == pytest.approx([2.0, 4.0])
    assert [layer.activation_bytes for layer in two.layers] == [200, 200]
    for rows in (0.5, 5):
        with refused(PlanError, f"microbatches of {rows:g} rows", expected="1 to 4 rows"):
            profile.at(rows)


def test_ranks_profiles_are_merged_by_their_medians() -> None:
    each = [model_profile([seconds], rows=(1,)).at(1) for seconds in (1.0, 5.0, 2.0)]
    assert merged(each).layers[0].times.forward == 2.0
    with refused(PlanError, "the profiles have different blocks"):
        merged([each[0], model_profile([1.0, 2.0], rows=(1,)).at(1)])


def test_a_profile_and_its_file_are_the_same(tmp_path: Path) -> None:
    link = ProfiledLink(0, 1, ((4096, 1e-5), (8192, 2e-5)), MessageTime(1e-6, 1e-9))
    profile = replace(model_profile([1.0, 2.0], overheads=SOME), links=(link,), transport="shared-memory")
    path = tmp_path / "profile.json"
    profile.save(path)
    assert ModelProfile.load(path) == profile
    assert is_profile(path)
    text = profile_text(profile)
    assert "0 -> 1" in text
    assert "microbatches of 4:" in text
    assert profile_svg(profile).count("<title>") == 2 * 3
    assert "<svg" in profile_page(profile)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 2}, saying("the profile has version 2", expected="version 1", fix="measure it again")),
        ({"format": "something"}, saying("not a profile")),
        ({"sizes": []}, saying(r"microbatch sizes are \[\]")),
        ({"sizes": None}, saying("a damaged profile")),
        ({"paces": [1.0]}, saying("1 paces for 3 sizes")),
        ({"model": {"name": "x"}}, saying("a damaged profile")),
    ],
)
def test_a_file_that_is_none_is_refused(change: dict[str, Any], reason: dict[str, str]) -> None:
    table = {**json.loads(model_profile([1.0]).to_json()), **change}
    with refused(PlanError, **reason):
        ModelProfile.from_json(json.dumps(table))


def test_damage_is_named_with_its_file(tmp_path: Path) -> None:
    table = json.loads(model_profile([1.0]).to_json())
    del table["device"]
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(table))
    with refused(PlanError, f"{path}: a damaged profile: 'device' is missing"):
        ModelProfile.load(path)
    table = json.loads(model_profile([1.0]).to_json())
    table["sizes"][0]["profile"]["layers"][0]["weight_bytes"] = -1
    with refused(PlanError, "weight_bytes is -1"):
        ModelProfile.from_json(json.dumps(table))
    for text in ("", "[]", "{", "3"):
        with refused(PlanError, r"not JSON|the JSON holds a|not a profile"):
            ModelProfile.from_json(text)
