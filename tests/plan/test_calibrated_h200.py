"""The shipped calibration of an H200 against the steps that were measured on it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import pytest

from calibrated import BARS, cases, summary, verdicts
from drumline.core.errors import PlanError
from drumline.plan.calibrated.calibration import Calibration
from drumline.plan.calibrated.forecast import Forecaster
from refused import refused

ROOT = Path(__file__).resolve().parents[2]
H200 = Calibration.load(ROOT / "docs" / "profiles" / "h200.json")
ROWS = json.loads((ROOT / "benchmarks" / "data" / "h200_steps.json").read_text(encoding="utf-8"))
ODD = "33-8x2304-bf16-adamw-plain-full"


def test_forecasts_of_the_h200_are_as_far_off_as_the_bars_allow(capsys: pytest.CaptureFixture[str]) -> None:
    found = verdicts(H200, ROWS)
    assert {verdict.name for verdict in found} == set(ROWS) - {ODD}
    assert ODD in capsys.readouterr().out
    for kind, rows in (("busy", [each for each in found if each.row["busy"] >= 0.9]),
                       ("host-bound", [each for each in found if each.row["busy"] < 0.9])):  # fmt: skip
        off = [abs(each.forecast.seconds.middle - each.row["seconds"]) / each.row["seconds"] for each in rows]
        assert len(off) >= 10
        assert (fmean(off) <= BARS[kind][0], max(off) <= BARS[kind][1]) == (True, True)
    bytes_off = [abs(each.forecast.peak_bytes.middle / each.row["peak_bytes"] - 1) for each in found]
    assert (fmean(bytes_off) <= BARS["memory"][0], max(bytes_off) <= BARS["memory"][1]) == (True, True)
    inside = [each.forecast.seconds.low <= each.row["seconds"] <= each.forecast.seconds.high for each in found]
    assert fmean(inside) >= 0.9
    assert all(entry["met"] for entry in summary(found).values())


def test_a_vocabulary_that_nobody_padded_is_refused_with_the_mend() -> None:
    case = next(case for case in cases("cuda") if case.name == ODD)
    with refused(PlanError, "no products like 8192 x 122753 x 2304 in bf16", fix="pad the vocabulary"):
        Forecaster(H200).forecast(case.shape, case.setting)
