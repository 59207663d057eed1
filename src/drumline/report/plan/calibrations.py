"""A calibration as tables for the terminal, and a forecast made with it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from textwrap import wrap

from drumline.core.errors import PlanError, counted
from drumline.core.units import duration, percent, size_text
from drumline.plan.calibrated.calibration import Calibration, MeasuredSize, MeasuredWork
from drumline.plan.calibrated.forecast import Forecaster, Interval, StepForecast
from drumline.plan.calibrated.prices import demand
from drumline.plan.calibrated.setting import StepSetting
from drumline.plan.cluster.transformer import Transformer
from drumline.report.draw.table import table


def calibration_text(calibration: Calibration, *, width: int = 120) -> str:
    """Return what was measured: works by kind, the host, copies and messages, real steps, and what is missing."""
    device = calibration.device
    processors = counted(device.num_processors, "thread" if calibration.on_host else "processor")
    lines = [
        *wrap(f"{device.name} ({device.kind}), {processors}, {size_text(device.memory_bytes)}", width),
        *wrap(f"PyTorch {device.torch}, Python {device.python}", width),
        *wrap(f"measured {calibration.date} in {calibration.seconds:.0f} s", width),
        "",
        table(*_works(calibration.works), width=width, left=2, keep=("best rate",)),
    ]
    for name, entries in (("host", calibration.host), ("copy or message", calibration.transfers)):
        if entries:
            lines += ["", table(*_sizes(name, entries), width=width)]
    if calibration.steps:
        lines += ["", table(*_steps(calibration), width=width, keep=("forecast",))]
    if calibration.missing:
        lines += [
            "",
            "missing:",
            *(line for reason in calibration.missing for line in wrap(f"- {reason}", width, subsequent_indent="  ")),
        ]
    return "\n".join(lines)


def _works(works: Sequence[MeasuredWork]) -> tuple[list[str], list[list[str]]]:
    groups: dict[tuple[str, str], list[MeasuredWork]] = defaultdict(list)
    for entry in works:
        groups[entry.work.kind, entry.work.dtype].append(entry)
    rows = [
        [kind, dtype, str(len(entries)), duration(min(entry.seconds for entry in entries)), _rate(entries),
         percent(median(entry.spread for entry in entries))]
        for (kind, dtype), entries in sorted(groups.items())
    ]  # fmt: skip
    return ["work", "numbers", "sizes", "shortest", "best rate", "spread"], rows


def _rate(entries: Sequence[MeasuredWork]) -> str:
    """Return the best rate: of operations, or of bytes where there are none."""
    flops = max(demand(entry.work).flops / entry.seconds for entry in entries)
    if flops:
        return f"{flops / 1e12:.3g} TFLOP/s"
    return f"{max(demand(entry.work).bytes / entry.seconds for entry in entries) / 1e9:.3g} GB/s"


def _sizes(name: str, entries: Sequence[MeasuredSize]) -> tuple[list[str], list[list[str]]]:
    groups: dict[str, list[MeasuredSize]] = defaultdict(list)
    for entry in entries:
        groups[entry.kind].append(entry)
    rows = [
        [kind, f"{first.size:,}", duration(first.seconds), f"{last.size:,}", duration(last.seconds),
         percent(max(first.spread, last.spread))]
        for kind, group in groups.items()
        for first, last in [(group[0], group[-1])]
    ]  # fmt: skip
    return [name, "least", "takes", "most", "takes", "spread"], rows


def _steps(calibration: Calibration) -> tuple[list[str], list[list[str]]]:
    """Return real steps beside their forecasts, which they have themselves moved."""
    rows, forecaster = [], Forecaster(calibration)
    for step in calibration.steps:
        shape = step.shape
        try:
            forecast = forecaster.forecast(shape, step.setting)
            numbers = duration(forecast.seconds.middle), size_text(forecast.peak_bytes.middle)
        except PlanError:  # works that it launches were not measured
            numbers = "", ""
        rows.append(
            [
                f"{shape.num_layers} x {shape.hidden}, {step.setting.rows} x {shape.sequence}, {step.setting.dtype}",
                duration(step.seconds),
                percent(step.spread),
                percent(step.busy),
                numbers[0],
                size_text(step.peak_bytes) if step.peak_bytes else "",
                numbers[1] if step.peak_bytes else "",
            ]
        )
    return ["real step", "takes", "spread", "busy", "forecast", "peak", "forecast peak"], rows


def forecast_text(
    calibration: Calibration,
    shape: Transformer,
    setting: StepSetting,
    forecast: StepForecast,
    limit: float,
    *,
    width: int = 120,
) -> str:
    """Return a forecast for the terminal."""
    tokens = setting.rows * shape.sequence
    bound = "host-bound: the device waits for the host" if forecast.host_bound else "the device is busy"
    if calibration.on_host:
        bound = "on the CPU itself"
    room = "fits" if forecast.peak_bytes.high <= limit else "may not fit"
    room = "does not fit" if forecast.peak_bytes.low > limit else room
    lines = [
        f"{shape.name} on one {calibration.device.name}, calibrated {calibration.date}",
        f"{setting.rows} sequences of {shape.sequence} tokens per step, {setting.dtype}, {setting.loss} loss, "
        f"{setting.optimizer}, {'no' if setting.recompute == 'none' else setting.recompute} recomputation",
        "",
        f"step    {_between(forecast.seconds, duration)}, {bound}",
        f"tokens  {tokens / forecast.seconds.high:,.0f} to {tokens / forecast.seconds.low:,.0f} per second",
        f"memory  {_between(forecast.peak_bytes, size_text)}, {room} in {size_text(limit)}",
        "",
        f"device  {duration(forecast.device_seconds)} in {forecast.kernels:,} works: {_parts(forecast)}",
        f"host    {duration(forecast.host_seconds)}{' besides' if calibration.on_host else ' to launch them'}",
        f"kept    {size_text(forecast.standing_bytes)} of parameters, gradients and states of the optimizer",
        "",
        _judged(forecast),
    ]
    return "\n".join(piece for line in lines for piece in wrap(line, width, subsequent_indent=" " * 8) or [""])


def _between(interval: Interval, spelled: object) -> str:
    assert callable(spelled)
    return f"{spelled(interval.low)} to {spelled(interval.high)}, probably {spelled(interval.middle)}"


def _parts(forecast: StepForecast) -> str:
    total = sum(forecast.shares.values())
    return ", ".join(f"{name} {percent(seconds / total)}" for name, seconds in forecast.shares.items())


def _judged(forecast: StepForecast) -> str:
    if forecast.num_judges < 2:
        return "The calibration has no real steps like this one: the interval is a guess."
    return f"The interval comes from {forecast.num_judges} real steps of the calibration: nine of ten should be inside."
