"""Forecasts from calibrations: prices between measured sizes, the file, the host, intervals, refusals."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from calibrations import HOST_ENDS, HOST_LAYER, HOST_TENSOR, LARGE, SETTING, SMALL, calibration, law
from drumline.core.errors import PlanError
from drumline.plan.calibrated.calibration import Calibration, MeasuredStep, is_calibration
from drumline.plan.calibrated.forecast import Forecaster
from drumline.plan.calibrated.prices import Prices
from drumline.plan.calibrated.setting import StepSetting, refuse_others
from drumline.plan.calibrated.step_list import parameter_sizes, step_tape
from drumline.plan.calibrated.step_tape import StepTape, Work
from drumline.plan.cluster.models import MODELS
from drumline.plan.cluster.transformer import Transformer
from drumline.report.plan.calibrations import calibration_text
from refused import refused, saying

FULL = calibration()
ALONE = Forecaster(FULL)


def off(found: float, wanted: float) -> float:
    return abs(math.log(found / wanted))


def test_prices_between_measured_sizes_follow_the_law() -> None:
    prices = Prices(FULL)
    tape = step_tape(LARGE, SETTING)
    errors = {work: off(prices.of(work).seconds, law(work)) for work in tape.works}
    assert len(errors) > 30
    assert max(errors.values()) < 0.12, max(errors.items(), key=lambda item: item[1])
    assert median(errors.values()) < 0.02
    total = sum(count * prices.of(work).seconds for work, count in tape.works.items())
    assert off(total, sum(count * law(work) for work, count in tape.works.items())) < 0.02


def test_few_points_are_enough_for_a_rough_price() -> None:
    prices = Prices(calibration(every=4))
    tape = step_tape(LARGE, SETTING)
    total = sum(count * prices.of(work).seconds for work, count in tape.works.items())
    assert off(total, sum(count * law(work) for work, count in tape.works.items())) < 0.05


def test_a_measured_work_has_its_own_price() -> None:
    prices = Prices(FULL)
    entries = FULL.works[::20]
    assert len(entries) > 50
    assert [prices.of(entry.work).seconds for entry in entries] == pytest.approx([entry.seconds for entry in entries])


def test_errors_of_prices_grow_with_the_noise_of_the_points() -> None:
    def noisy(work: Work) -> float:
        return law(work) * (1.2 if hash(work) % 2 else 1 / 1.2)

    work = Work("product", "bf16", (3000, 3000, 3000))
    assert Prices(calibration(seconds=noisy)).of(work).error > 0.1 > 4 * Prices(FULL).of(work).error


def test_a_kind_without_measurements_is_named() -> None:
    with refused(PlanError, "no embedding in fp32", fix="--dtypes"):
        Forecaster(calibration(dtypes=("bf16",))).forecast(SMALL, replace(SETTING, dtype="fp32"))


def test_the_device_takes_the_sum_of_its_works_and_the_host_is_shorter() -> None:
    forecast = ALONE.forecast(LARGE, SETTING)
    tape = step_tape(LARGE, SETTING)
    assert not forecast.host_bound
    assert forecast.kernels == sum(tape.works.values())
    assert forecast.seconds.middle == forecast.device_seconds
    assert sum(forecast.shares.values()) == pytest.approx(forecast.device_seconds)


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ({}, HOST_ENDS + 24 * HOST_LAYER + (24 * 9 + 3) * HOST_TENSOR),
        ({"recompute": "full"}, HOST_ENDS + 24 * 1.5 * HOST_LAYER + (24 * 9 + 3) * HOST_TENSOR),
        ({"loss": "fused", "rows": 6}, HOST_ENDS + 24 * HOST_LAYER + 2 * 2e-4 + (24 * 9 + 3) * HOST_TENSOR),
        ({"optimizer": "muon"}, HOST_ENDS + 24 * HOST_LAYER + (24 * 9 + 3) * HOST_TENSOR),
    ],
)
def test_a_step_that_the_host_launches_too_slowly_is_called_host_bound(setting: dict[str, Any], wanted: float) -> None:
    forecast = ALONE.forecast(SMALL, replace(StepSetting(rows=1), **setting))
    assert forecast.host_bound
    assert forecast.seconds.middle == forecast.host_seconds == pytest.approx(wanted)


def test_on_a_cpu_nothing_runs_ahead() -> None:
    setting = StepSetting(rows=1, dtype="fp32")
    forecast = Forecaster(calibration(kind="cpu", dtypes=("fp32",))).forecast(replace(SMALL, vocabulary=500), setting)
    assert not forecast.host_bound
    assert forecast.seconds.middle == forecast.device_seconds + forecast.host_seconds


def real_steps(factors: list[float], bytes_factors: list[float]) -> list[MeasuredStep]:
    """Return real steps so many times as long, and with so many times the bytes, as the calibration alone says."""
    steps = []
    for number, (factor, size) in enumerate(zip(factors, bytes_factors, strict=True)):
        shape = replace(LARGE, num_layers=2 + number)
        forecast = ALONE.forecast(shape, SETTING)
        peak = round(size * forecast.peak_bytes.middle)
        steps.append(MeasuredStep(shape, SETTING, factor * forecast.seconds.middle, 0.01, peak))
    return steps


def test_the_middle_moves_by_the_median_of_real_steps_and_the_width_by_their_scatter() -> None:
    factors = [1.02, 1.05, 1.05, 1.05, 1.08]
    found = Forecaster(calibration(steps=real_steps(factors, [1.01] * 5))).forecast(LARGE, SETTING)
    alone = ALONE.forecast(LARGE, SETTING)
    assert found.seconds.middle == pytest.approx(1.05 * alone.seconds.middle)
    logs = [math.log(factor) for factor in factors]
    scatter = math.sqrt(sum((value - sum(logs) / 5) ** 2 for value in logs) / 4)
    least = 2.13 * scatter * math.sqrt(1.2)  # Student's t of five values, for 90%
    assert math.log(found.seconds.high / found.seconds.middle) == pytest.approx(least)
    assert found.peak_bytes.middle == pytest.approx(1.01 * alone.peak_bytes.middle, rel=1e-6)
    assert found.peak_bytes.half == pytest.approx(math.sinh(2.13 * 0.01 * math.sqrt(1.2)), rel=1e-6)
    assert (found.num_judges, alone.num_judges) == (5, 0)


def test_a_busy_device_waits_between_kernels_as_in_real_steps_that_keep_it_busy() -> None:
    shapes = [replace(LARGE, num_layers=layers) for layers in (2, 3, 4)]
    kernels = [sum(step_tape(shape, SETTING).works.values()) for shape in shapes]
    waits = [1e-6, 2e-6, 9e-6]
    busy = [MeasuredStep(shape, SETTING, 0.1, 0.01, 0, 1 - wait * number / 0.1)
            for shape, number, wait in zip(shapes, kernels, waits, strict=True)]  # fmt: skip
    idle = MeasuredStep(SMALL, SETTING, 0.1, 0.01, 0, 0.3)  # waits for its host
    forecast = Forecaster(calibration(steps=[*busy, idle])).forecast(LARGE, SETTING)
    added = forecast.device_seconds - ALONE.forecast(LARGE, SETTING).device_seconds
    assert added == pytest.approx(2e-6 * forecast.kernels)


def test_several_looks_at_the_host_count_by_their_mean() -> None:
    again = [replace(entry, seconds=1.5 * entry.seconds) for entry in FULL.host]
    twice = Forecaster(replace(FULL, host=(*FULL.host, *again))).forecast(SMALL, StepSetting(rows=1))
    once = ALONE.forecast(SMALL, StepSetting(rows=1))
    assert twice.host_seconds == pytest.approx(1.25 * once.host_seconds)


def test_each_piece_of_a_fused_loss_adds_to_the_gradient_that_is_there() -> None:
    tape = step_tape(replace(SMALL, vocabulary=5000), StepSetting(rows=3, loss="fused"))
    tokens = 3 * SMALL.sequence
    passes = tape.works[Work("fill", "bf16", (5000 * SMALL.hidden,))]
    assert passes == 1 + math.ceil(tokens / 1024)


def test_products_of_odd_sizes_have_prices_of_their_own_on_an_accelerator() -> None:
    slow = calibration(seconds=lambda work: law(work) * (5 if work.kind.endswith("-unaligned") else 1))
    odd, even = (replace(LARGE, vocabulary=words) for words in (50001, 50000))
    forecast = {shape.vocabulary: Forecaster(slow).forecast(shape, SETTING) for shape in (odd, even)}
    head = sum(
        count * law(work) for work, count in step_tape(odd, SETTING).works.items()
        if work.kind.startswith("product") and 50001 in work.shape
    )  # fmt: skip
    added = forecast[50001].device_seconds - forecast[50000].device_seconds
    assert added == pytest.approx(4 * head, rel=0.15)


def test_device_bound_steps_do_not_judge_host_bound_ones() -> None:
    judged = Forecaster(calibration(steps=real_steps([1.5, 1.5, 1.5], [1.0] * 3)))
    assert judged.forecast(SMALL, StepSetting(rows=1)).num_judges == 0
    assert judged.forecast(LARGE, SETTING).num_judges == 3


def test_without_real_steps_the_interval_is_wide() -> None:
    interval = ALONE.forecast(LARGE, SETTING).seconds
    assert (interval.low / interval.middle, interval.high / interval.middle) == pytest.approx((0.75, 1.25))


def test_memory_grows_by_what_a_setting_keeps() -> None:
    def peak(**setting: Any) -> float:
        return ALONE.forecast(LARGE, replace(SETTING, **setting)).peak_bytes.middle

    assert peak(recompute="full") < peak()
    assert peak(loss="fused") < peak()
    assert peak(rows=8) > 1.7 * peak(rows=4) - peak(rows=1)
    assert peak(dtype="fp32") > 1.5 * peak()


def test_the_workspace_of_the_device_and_its_rounding_count() -> None:
    plain = step_tape(LARGE, SETTING, rounding=512).peak
    assert ALONE.forecast(LARGE, SETTING).peak_bytes.middle == plain + 64 * 2**20
    tape = StepTape("fp32", rounding=512, workspace=lambda work: 100.0)
    tape.new(a=1, b=513)
    tape.run("add", 8)
    assert (tape.live, tape.peak) == (1536, 1636)


def test_products_alone_are_in_tf32() -> None:
    works = step_tape(LARGE, replace(SETTING, dtype="tf32")).works
    assert {work.kind for work in works if work.dtype == "tf32"} == {"product", "product-input", "product-weight"}
    assert {work.dtype for work in works} == {"tf32", "fp32"}


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-foreach", "adamw-loop", "muon"])
def test_states_of_the_optimizer_are_there_from_step_to_step(optimizer: str) -> None:
    setting = replace(SETTING, optimizer=optimizer)
    matrices = sum(size for size in parameter_sizes(LARGE) if size > LARGE.hidden)
    ends = 2 * LARGE.vocabulary * LARGE.hidden
    numbers = sum(parameter_sizes(LARGE))
    states = 2 * numbers - (matrices - ends if optimizer == "muon" else 0)
    counts = {"adamw": 4 * 9 + 3, "muon": 4 * 2 + 3}.get(optimizer, 0)
    tables = 2 * LARGE.sequence * LARGE.head_width
    assert step_tape(LARGE, setting).standing == 2 * (numbers + states + tables) + 4 * counts


def test_a_file_is_read_back_and_has_one_measurement_per_line(tmp_path: Path) -> None:
    found = calibration(every=20, steps=real_steps([1.0, 1.1], [1.0, 1.0]))
    found.save(tmp_path / "mine.json")
    text = (tmp_path / "mine.json").read_text()
    again = Calibration.load(tmp_path / "mine.json")
    assert [entry.setting for entry in again.steps] == [entry.setting for entry in found.steps]
    assert [replace(entry.shape, name="large") for entry in again.steps] == [entry.shape for entry in found.steps]
    assert replace(again, steps=()) == replace(found, steps=())
    assert again.to_json() + "\n" == text
    assert is_calibration(tmp_path / "mine.json")
    assert (
        text.count('"spread"')
        == text.count('"spread"', text.index('"works"'))
        == len([line for line in text.splitlines() if '"spread"' in line])
    )


def test_a_calibration_is_told_with_its_rates_and_even_if_it_is_short() -> None:
    steps = real_steps([1.0, 1.1], [1.0, 1.0])
    assert "2 x 3072" in calibration_text(calibration(every=100, steps=steps), width=100)
    told = calibration_text(calibration(steps=steps), width=100)
    assert told.startswith("Imaginary 1 (cuda), 132 processors, 140 GiB\nPyTorch 2.11.0, Python 3.12.0\nmeasured 2026")
    assert max(map(len, told.splitlines())) <= 100
    assert "missing:\n- messages: one device" in told
    for part in ("product-weight", "layers-recomputed", "to-device", "2 x 3072"):
        assert part in told


def broken(**changes: Any) -> str:
    table = json.loads(calibration(every=200).to_json())
    for path, value in changes.items():
        *names, last = path.split("__")
        inner = table
        for name in names:
            inner = inner[int(name) if name.isdecimal() else name]
        if value is None:
            del inner[last]
        else:
            inner[last] = value
    return json.dumps(table)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": 2}, saying("version 2", expected="version 1", fix="calibrate again")),
        ({"format": "drumline profile"}, saying("not a calibration", expected="drumline calibrate")),
        ({"device": None}, saying("'device' is missing", expected="drumline calibrate")),
        ({"device__torch": None}, saying("'device.torch' is missing")),
        ({"works__0__seconds": -1.0}, saying(r"works\[0\].seconds is -1.0", expected="a number")),
        ({"works__0__shape": ["a"]}, saying(r"works\[0\].shape\[0\] is 'a'", expected="whole number")),
        ({"works__0__colour": "red"}, saying(r"unknown name 'works\[0\].colour'")),
        ({"works": []}, saying("no measured works", fix="calibrate again")),
        ({"host__0__size": None}, saying(r"'host\[0\].size' is missing")),
        ({"missing": "nothing"}, saying("missing is 'nothing'", expected="a list")),
    ],
)
def test_a_damaged_file_is_refused_by_what_is_wrong(
    changes: dict[str, Any], words: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(broken(**changes))
    with refused(PlanError, **words) as caught:
        Calibration.load(path)
    assert str(path) in caught.value.error


@pytest.mark.parametrize("name", sorted(MODELS))
def test_models_with_other_layers_are_refused_by_what_differs(name: str) -> None:
    if name.startswith("llama"):
        refuse_others(MODELS[name])
    else:
        with refused(PlanError, name, expected="like Llama", fix="h200"):
            refuse_others(MODELS[name])


def test_a_tied_table_has_one_gradient() -> None:
    tied = replace(LARGE, tied=True)
    table = LARGE.vocabulary * LARGE.hidden
    assert sum(parameter_sizes(LARGE)) - sum(parameter_sizes(tied)) == table
    kinds = [step_tape(shape, SETTING).works[Work("add", "bf16", (table,))] for shape in (LARGE, tied)]
    assert kinds == [0, 1]


def test_sizes_of_a_transformer_are_counted_as_the_planner_counts() -> None:
    layers = LARGE.num_layers * LARGE.dense_layer_parameters
    total = layers + LARGE.embedding_parameters + LARGE.head_parameters
    assert sum(parameter_sizes(LARGE)) == total
    assert isinstance(LARGE, Transformer)
