"""Calibrations of a device that does not exist: its seconds follow a law, so that every forecast has an answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from drumline.plan.calibrated.calibration import (
    CalibratedDevice,
    Calibration,
    MeasuredSize,
    MeasuredStep,
    MeasuredWork,
    plain_shape,
)
from drumline.plan.calibrated.setting import StepSetting
from drumline.plan.calibrated.step_tape import Work
from drumline.profile.calibrate.works import ACCELERATOR, HOST, Sizes, works

START = 3e-6
PEAK = {"bf16": 7e14, "fp32": 5e13, "tf32": 3e14, "fp8": 1.3e15}
BYTES_PER_SECOND = 3.5e12
WIDTH = {"bf16": 2, "fp32": 4, "tf32": 4, "fp8": 1}
HOST_LAYER, HOST_ENDS, HOST_TENSOR = 1.5e-3, 1e-3, 2e-6


def law(work: Work) -> float:
    """Return the seconds of a work: small products and short attention reach less of the peak."""
    kind, dtype, shape = work
    numbers = math.prod(shape)
    if kind.startswith("product"):
        rows, columns, depth = shape
        share = rows / (rows + 300) * columns / (columns + 300) * depth / (depth + 100)
        return START + 2 * numbers / (PEAK[dtype] * share)
    if kind.startswith("attention"):
        rows, length, heads, _, width = shape
        share = 0.6 * length / (length + 500) * width / (width + 32)
        flops = 2 * rows * heads * length**2 * width * (2.5 if kind.endswith("backward") else 1)
        return START + flops / (PEAK[dtype] * share)
    if kind == "muon":
        long, short = shape
        return 30 * START + 10 * (2 * long * short**2 + short**3) / (0.5 * PEAK["bf16"])
    if kind.startswith("embedding"):
        tokens, width, words = shape
        numbers = tokens * width * 2 + (words * width if kind.endswith("backward") else 0)
    return START + 3 * numbers * WIDTH[dtype] / BYTES_PER_SECOND


def calibration(
    *,
    kind: str = "cuda",
    dtypes: Sequence[str] = ("bf16", "fp32", "tf32"),
    sizes: Sizes | None = None,
    seconds: Callable[[Work], float] = law,
    steps: Sequence[MeasuredStep] = (),
    every: int = 1,
) -> Calibration:
    """Return a calibration of that device; of its works, `every` so many."""
    listed = works(sizes or (HOST if kind == "cpu" else ACCELERATOR), dtypes)[::every]
    host = [
        MeasuredSize(f"layers{ending}", layers, HOST_ENDS + HOST_LAYER * layers * factor, 0.01)
        for ending, factor in (("", 1.0), ("-recomputed", 1.5))
        for layers in (2, 6)
    ]
    host += [
        MeasuredSize(name, tensors, HOST_TENSOR * tensors, 0.01)
        for name in ("adamw", "adamw-foreach", "adamw-loop", "muon")
        for tensors in (10, 50)
    ]
    host += [MeasuredSize("pieces", 1, 1e-3, 0.0), MeasuredSize("pieces", 5, 1.8e-3, 0.0)]
    return Calibration(
        CalibratedDevice("Imaginary 1", kind, 132, 140 * 2**30, 64 * 2**20, "2.11.0", "3.12.0"),
        "2026-11-19 10:00 UTC",
        199.5,
        tuple(MeasuredWork(work, seconds(work), 0.01) for work in listed),
        tuple(host),
        (MeasuredSize("to-device", 2**20, 1e-4, 0.02),),
        tuple(steps),
        ("messages: one device",),
    )


LARGE = plain_shape(
    "large",
    num_layers=4,
    hidden=3072,
    num_heads=24,
    num_key_value_heads=8,
    feedforward=9216,
    vocabulary=64000,
    sequence=3000,
)
SMALL = plain_shape("small", num_layers=24, hidden=512, num_heads=8, vocabulary=32000, sequence=512)
SETTING = StepSetting(rows=4)
