"""Forecast a step on a calibrated device: seconds and bytes, each as an interval.

The device computes for the sum of its works. The host launches them meanwhile: the longer of both is the step, and a
step for which that is the host is called host-bound. On a CPU there is nobody to run ahead, so both add up.

Real steps in the calibration say how far such a sum is from a step, on this device. The middle moves by their median,
and the interval is as wide as they scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean, median, stdev
from typing import NamedTuple

from drumline.plan.calibrated.calibration import Calibration, MeasuredStep, plain_shape
from drumline.plan.calibrated.prices import Prices
from drumline.plan.calibrated.setting import LOSS_ROWS, StepSetting, refuse_others
from drumline.plan.calibrated.step_list import parameter_sizes, step_tape
from drumline.plan.calibrated.step_tape import StepTape, Work
from drumline.plan.cluster.transformer import Transformer

ROUNDING = 512  # an accelerator's allocator gives multiples of this
ALIGNMENT = 16  # bytes that an accelerator's fast products read at once
# What the host's seconds are measured on: so small that the device waits.
TINY = {"hidden": 64, "num_heads": 1, "feedforward": 64, "vocabulary": 128, "sequence": 16}
_BUSY = 0.9  # from this share of a step on, the device is what takes the time
_UNKNOWN = 0.25  # half of an interval without real steps to judge it by
_LEAST = {"seconds": 0.015, "bytes": 0.01}  # scatter that real steps are taken to have at least
# Student's t for 90% within, by the number of steps less one.
_STUDENT = (6.31, 2.92, 2.35, 2.13, 2.02, 1.94, 1.89, 1.86, 1.83, 1.81)


class Interval(NamedTuple):
    """A value, and between which bounds nine of ten real ones are expected."""

    low: float
    middle: float
    high: float

    @property
    def half(self) -> float:
        """Half of the width, as a share of the middle."""
        return (self.high - self.low) / 2 / self.middle


@dataclass(frozen=True, slots=True)
class StepForecast:
    """A step: seconds and bytes, what takes them, and whether the host is the longer."""

    seconds: Interval
    peak_bytes: Interval
    device_seconds: float
    host_seconds: float
    host_bound: bool
    standing_bytes: int  # parameters, gradients and the optimizer's states
    shares: dict[str, float]  # of the device's seconds, by what they are for
    num_judges: int  # real steps that made the interval
    kernels: int


class Forecaster:
    """Forecasts for one calibration."""

    def __init__(self, calibration: Calibration) -> None:
        self._calibration = calibration
        self._prices = Prices(calibration)
        self._sums: dict[MeasuredStep, _Raw] = {}

    def forecast(self, shape: Transformer, setting: StepSetting) -> StepForecast:
        """Return the forecast of a step; refuses a model that is not like the plain one."""
        refuse_others(shape)
        raw = self._raw(shape, setting)
        seconds, judges = self._interval("seconds", raw)
        size, _ = self._interval("bytes", raw)
        gradients = sum(parameter_sizes(shape)) * setting.width
        return StepForecast(
            seconds, size, raw.device, raw.host, raw.host_bound, raw.tape.standing + gradients,
            _shares(raw.tape, self._prices), judges, sum(raw.tape.works.values()),
        )  # fmt: skip

    def _raw(self, shape: Transformer, setting: StepSetting) -> _Raw:
        """Return the sums, without what real steps say of them."""
        tape = self._tape(shape, setting)
        between = self._between * sum(tape.works.values())
        device = math.fsum(count * self._prices.of(work).seconds for work, count in tape.works.items()) + between
        square = math.fsum((count * math.prod(self._prices.of(work))) ** 2 for work, count in tape.works.items())
        host = self._host(shape, setting)
        total = device + host if self._calibration.on_host else max(device, host)
        size = tape.peak + self._calibration.device.workspace_bytes
        bound = not self._calibration.on_host and host > device
        return _Raw(tape, device, host, total, size, math.sqrt(square) / device, bound)

    @cached_property
    def _between(self) -> float:
        """The seconds between two kernels when the device has enough to do, by the real steps that keep it busy."""
        waits = [
            step.seconds * (1 - step.busy) / sum(self._tape(step.shape, step.setting).works.values())
            for step in self._calibration.steps
            if step.busy >= _BUSY
        ]
        return median(waits) if waits else 0.0

    def _tape(self, shape: Transformer, setting: StepSetting) -> StepTape:
        on_host = self._calibration.on_host
        return step_tape(
            shape, setting, fused_norms=not on_host, rounding=1 if on_host else ROUNDING,
            alignment=1 if on_host else ALIGNMENT, workspace=self._prices.workspace,
        )  # fmt: skip

    def _host(self, shape: Transformer, setting: StepSetting) -> float:
        """Return the host's seconds; on a CPU those beyond the works of the tiny steps that they are measured on."""
        recompute = "-recomputed" if setting.recompute == "full" else ""
        tokens = setting.rows * shape.sequence
        parts = [self._line(f"layers{recompute}", shape.num_layers)]
        if setting.loss == "fused":
            parts.append(self._slope("pieces") * (-(-tokens // LOSS_ROWS) - 1))
        sizes = len(parameter_sizes(shape))
        if setting.optimizer == "muon":
            matrices = 7 * shape.num_layers
            parts += [self._line("muon", matrices), self._line("adamw", sizes - matrices)]
        else:
            parts.append(self._line(setting.optimizer, sizes))
        return max(math.fsum(parts), 0.0)

    def _points(self, kind: str) -> list[tuple[int, float]]:
        """Return sizes and seconds of what the host does; on a CPU, less the seconds of the works inside."""
        measured: dict[int, list[float]] = {}
        for entry in self._calibration.host:
            if entry.kind == kind:
                measured.setdefault(entry.size, []).append(entry.seconds)
        points = [(size, fmean(seconds)) for size, seconds in sorted(measured.items())]
        if self._calibration.on_host:
            points = [(size, seconds - self._inside(kind, size)) for size, seconds in points]
        return points

    def _inside(self, kind: str, size: int) -> float:
        """Return the seconds of the works in a tiny step."""
        setting = StepSetting(rows=1, dtype="fp32", recompute="full" if kind.endswith("recomputed") else "none")
        if kind.startswith("layers"):
            tape = step_tape(plain_shape("tiny", num_layers=size, **TINY), setting, fused_norms=False, update=False)
            works = dict(tape.works)
        elif kind == "muon":
            works = {Work("muon", "fp32", (TINY["hidden"], TINY["hidden"])): size}
        elif kind == "pieces":
            return 0.0
        else:
            alone = kind == "adamw-loop"
            works = {Work(kind, "fp32", (TINY["hidden"] ** 2 * (1 if alone else size),)): size if alone else 1}
        return math.fsum(count * self._prices.of(work).seconds for work, count in works.items())

    def _line(self, kind: str, size: int) -> float:
        points = self._points(kind)
        if not points:
            return 0.0
        (first, seconds), slope = points[0], self._slope(kind)
        return max(seconds + slope * (size - first), 0.0)

    def _slope(self, kind: str) -> float:
        points = self._points(kind)
        if len(points) < 2:
            return 0.0
        (first, low), (last, high) = points[0], points[-1]
        return max((high - low) / (last - first), 0.0)

    def _interval(self, what: str, raw: _Raw) -> tuple[Interval, int]:
        """Return the interval of seconds or bytes, and how many real steps made it."""
        value = raw.seconds if what == "seconds" else raw.bytes
        looks: dict[tuple[Transformer, StepSetting], list[float]] = {}
        for step in self._calibration.steps:
            if (ratio := self._ratio(what, step, raw)) > 0:
                looks.setdefault((step.shape, step.setting), []).append(math.log(ratio))
        ratios = [fmean(each) for each in looks.values()]  # several looks at a step are one judge
        if len(ratios) < 2:
            half = max(_UNKNOWN, min(raw.error, 0.9)) if what == "seconds" else _UNKNOWN
            return Interval(value * (1 - half), value, value * (1 + half)), len(ratios)
        middle = value * math.exp(median(ratios))
        scatter = max(stdev(ratios), _LEAST[what]) * math.sqrt(1 + 1 / len(ratios))
        half = _STUDENT[min(len(ratios) - 2, len(_STUDENT) - 1)] * scatter
        return Interval(middle * math.exp(-half), middle, middle * math.exp(half)), len(ratios)

    def _ratio(self, what: str, step: MeasuredStep, raw: _Raw) -> float:
        """Return a real step over its own forecast; 0 for a step of the other kind, which judges nothing here."""
        if step not in self._sums:
            self._sums[step] = self._raw(step.shape, step.setting)
        sums = self._sums[step]
        if what == "bytes":
            return step.peak_bytes / sums.bytes if step.peak_bytes else 0.0
        return step.seconds / sums.seconds if sums.host_bound == raw.host_bound else 0.0


class _Raw(NamedTuple):
    tape: StepTape
    device: float
    host: float
    seconds: float
    bytes: float
    error: float
    host_bound: bool


_USES = {"product": "products", "attention": "attention", "norm": "norms", "embedding": "embedding and loss"}
_USES |= dict.fromkeys(("softmax", "nll", "cast", "exp", "times"), "embedding and loss")
_USES |= dict.fromkeys(("adamw", "muon"), "optimizer")


def _shares(tape: StepTape, prices: Prices) -> dict[str, float]:
    """Return the seconds of the device by what they are for, largest first."""
    totals: dict[str, float] = {}
    for work, count in tape.works.items():
        use = _USES.get(work.kind.partition("-")[0], "single numbers")
        totals[use] = totals.get(use, 0.0) + count * prices.of(work).seconds
    return dict(sorted(totals.items(), key=lambda item: -item[1]))
