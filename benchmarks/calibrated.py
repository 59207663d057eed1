"""Forecasts of steps on one calibrated device against real steps.

    python benchmarks/calibrated.py --calibrate DIR [--seconds S] [--device NAME]     on the device, once
    python benchmarks/calibrated.py --measure DIR [--seconds S] [--device NAME]       on the device, until all are there
    python benchmarks/calibrated.py --judge DIR [--first N] [--json FILE]             anywhere, from the files
    python benchmarks/calibrated.py --judge docs/profiles/h200.json --steps benchmarks/data/h200_steps.json

`--calibrate` writes DIR/calibration.json. `--measure` trains 36 models (on a CPU 10 small ones) and writes a file for
each: medians of 30 steps, the share of a step in which the device computes, and the most bytes that tensors took. It
goes on where it stopped, and stops after S seconds. No model or setting is one of those that `drumline calibrate`
trains itself. `--judge` forecasts each from the calibration alone and compares; `--first N` leaves out those before N.

`--processor-time` counts, on a CPU with one thread, the process's own time: for machines that others use as well.

Needs PyTorch and a source tree: PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from drumline.core.errors import PlanError
from drumline.plan.calibrated.calibration import Calibration, plain_shape
from drumline.plan.calibrated.forecast import Forecaster, StepForecast
from drumline.plan.calibrated.setting import StepSetting
from drumline.plan.cluster.transformer import Transformer

Clock = Callable[[], float]
STEPS = 30
BUSY = 0.9  # from this share on, the device counts as busy
# Mean and worst error of seconds where the device is busy, where it is not, and of bytes; coverage; half of a width.
BARS = {"busy": (0.05, 0.12), "host-bound": (0.15, 0.30), "memory": (0.03, 0.06)}
COVERED, HALF = 0.90, 0.08

# layers, width, heads, heads of keys, feed-forward width (0: four times), vocabulary, tokens; then the setting.
ACCELERATOR: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((24, 512, 8, 8, 0, 32000, 512), {"rows": 4}),
    ((24, 1024, 16, 16, 0, 32000, 1024), {"rows": 8}),
    ((16, 2048, 16, 8, 5632, 128256, 2048), {"rows": 4}),
    ((8, 4096, 32, 8, 14336, 128256, 2048), {"rows": 2}),
    ((4, 8192, 64, 8, 28672, 32000, 4096), {"rows": 1}),
    ((2, 8192, 64, 64, 22016, 256000, 2048), {"rows": 2, "loss": "fused"}),
    ((12, 1536, 12, 12, 0, 50304, 2048), {"rows": 8}),
    ((6, 2560, 20, 20, 0, 65536, 8192), {"rows": 1, "recompute": "full"}),
    ((4, 2048, 16, 16, 0, 32000, 32768), {"rows": 1, "loss": "fused", "recompute": "full"}),
    ((2, 4096, 32, 4, 0, 64000, 32768), {"rows": 1, "loss": "fused"}),
    ((24, 1024, 8, 2, 0, 100352, 2048), {"rows": 4, "loss": "fused"}),
    ((10, 3072, 24, 8, 8192, 128256, 4096), {"rows": 2, "recompute": "full"}),
    ((2, 512, 8, 8, 0, 262144, 512), {"rows": 16}),
    ((3, 1024, 16, 16, 0, 262144, 4096), {"rows": 4}),
    ((8, 2048, 16, 16, 0, 32000, 2048), {"rows": 4, "optimizer": "muon"}),
    ((4, 4096, 32, 32, 11008, 50000, 4096), {"rows": 2, "optimizer": "muon", "recompute": "full"}),
    ((16, 1024, 16, 16, 2816, 32000, 1024), {"rows": 4, "optimizer": "muon"}),
    ((24, 512, 8, 4, 1408, 32000, 512), {"rows": 2, "optimizer": "muon"}),
    ((4, 1024, 16, 16, 0, 32000, 1024), {"rows": 4, "dtype": "fp32"}),
    ((2, 2048, 16, 16, 0, 50000, 2048), {"rows": 2, "dtype": "fp32", "recompute": "full"}),
    ((6, 768, 12, 4, 2048, 32000, 512), {"rows": 8, "dtype": "fp32", "loss": "fused"}),
    ((2, 4096, 32, 32, 0, 32000, 1024), {"rows": 2, "dtype": "fp32", "optimizer": "muon"}),
    ((20, 640, 10, 10, 0, 49152, 512), {"rows": 2, "recompute": "full"}),
    ((6, 6144, 48, 8, 16384, 92544, 2048), {"rows": 2}),
    # Those above were measured before the forecast was mended for them; these were written down after that.
    ((20, 768, 12, 12, 0, 50304, 1024), {"rows": 2}),
    ((32, 512, 8, 8, 0, 32000, 256), {"rows": 4}),
    ((12, 896, 14, 2, 4864, 151936, 512), {"rows": 1}),
    ((28, 1024, 16, 8, 3072, 151936, 1024), {"rows": 2}),
    ((16, 640, 10, 10, 0, 32000, 512), {"rows": 4, "recompute": "full"}),
    ((20, 768, 12, 12, 0, 32000, 512), {"rows": 2, "optimizer": "muon"}),
    ((6, 4096, 32, 8, 14336, 128256, 4096), {"rows": 1}),
    ((3, 5120, 40, 8, 27648, 152064, 2048), {"rows": 2, "loss": "fused"}),
    ((8, 2304, 36, 36, 5760, 122753, 4096), {"rows": 2, "recompute": "full"}),
    ((5, 3584, 28, 4, 18944, 152064, 4096), {"rows": 1, "optimizer": "muon"}),
    ((12, 2048, 32, 4, 0, 32000, 8192), {"rows": 1}),
    ((4, 1536, 24, 24, 4096, 64000, 2048), {"rows": 2, "dtype": "fp32"}),
)
HOST: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 160, 4, 4, 0, 3000, 96), {"rows": 2}),
    ((4, 128, 4, 2, 352, 1000, 128), {"rows": 1}),
    ((2, 256, 8, 8, 0, 2000, 128), {"rows": 1, "recompute": "full"}),
    ((3, 224, 7, 7, 600, 6000, 64), {"rows": 2, "loss": "fused"}),
    ((2, 320, 5, 5, 0, 1000, 128), {"rows": 1}),
    ((6, 96, 3, 1, 256, 500, 64), {"rows": 4, "recompute": "full"}),
    ((2, 128, 2, 2, 0, 1000, 512), {"rows": 1, "loss": "fused"}),
    ((3, 192, 6, 6, 512, 1000, 64), {"rows": 2, "optimizer": "adamw-foreach"}),
    ((2, 192, 6, 2, 0, 8000, 64), {"rows": 1, "optimizer": "adamw-loop"}),
    ((2, 128, 4, 4, 512, 1000, 64), {"rows": 1, "optimizer": "muon"}),
)


_NAMED = ("dtype", "optimizer", "loss", "recompute")


class Case(NamedTuple):
    """A model and its setting."""

    name: str
    shape: Transformer
    setting: StepSetting


class Verdict(NamedTuple):
    """A forecast beside the real step."""

    name: str
    row: dict[str, Any]
    forecast: StepForecast

    @property
    def is_busy(self) -> bool:
        """Whether the device computed for most of the step."""
        return bool(self.row["busy"] >= BUSY)

    @property
    def error(self) -> float:
        """Return the forecast seconds over the real ones, less 1."""
        return float(self.forecast.seconds.middle / self.row["seconds"] - 1)

    @property
    def memory_error(self) -> float:
        """Return the forecast bytes over the real ones, less 1."""
        return float(self.forecast.peak_bytes.middle / self.row["peak_bytes"] - 1)

    @property
    def covers(self) -> tuple[bool, bool]:
        """Whether both intervals contain what was measured."""
        seconds, size = self.forecast.seconds, self.forecast.peak_bytes
        return seconds.low <= self.row["seconds"] <= seconds.high, size.low <= self.row["peak_bytes"] <= size.high


def cases(kind: str) -> list[Case]:
    """Return the cases for a kind of device."""
    listed = HOST if kind == "cpu" else ACCELERATOR
    names = ("num_layers", "hidden", "num_heads", "num_key_value_heads", "feedforward", "vocabulary", "sequence")
    usual = {"dtype": "fp32" if kind == "cpu" else "bf16"}
    return [
        Case(
            "-".join((f"{at + 1:02d}", f"{sizes[0]}x{sizes[1]}", *(str(getattr(setting, key)) for key in _NAMED))),
            plain_shape("step", **dict(zip(names, sizes, strict=True))),
            setting,
        )
        for at, (sizes, how) in enumerate(listed)
        for setting in [StepSetting(**{**usual, **how})]
    ]


def device_of(name: str | None) -> Any:
    import torch

    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    usual = "cpu" if present is None else f"{present.type}:0"
    return torch.device(name or usual)


def calibrate(folder: Path, name: str | None, seconds: float, threads: int | None, now: Clock) -> None:
    from drumline.profile.calibrate.start import calibrated

    path = folder / "calibration.json"
    if path.exists():
        print(f"{path} is there already; delete it to calibrate again")
        return
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} s  {text}", flush=True)

    dtypes = ["fp32"] if device_of(name).type == "cpu" else None  # what its cases are in
    found = calibrated(name, seconds=seconds, dtypes=dtypes, num_threads=threads, say=say, clock=now)
    found.save(path)
    print(f"wrote {path}: {len(found.works)} works, {len(found.steps)} real steps; missing: {list(found.missing)}")


def measure(folder: Path, name: str | None, seconds: float, threads: int | None, now: Clock) -> bool:
    """Measure the cases that have no file yet; return whether all have one."""
    import torch

    from drumline.profile.calibrate.real_steps import measured_step

    device = device_of(name)
    if threads:
        torch.set_num_threads(threads)
    begun, listed = time.monotonic(), cases(device.type)
    for case in listed:
        path = folder / f"{case.name}.json"
        if path.exists():
            continue
        if time.monotonic() - begun > seconds:
            left = sum(not (folder / f"{each.name}.json").exists() for each in listed)
            print(f"stopped after {seconds:g} s; {left} of {len(listed)} are left: run it again")
            return False
        try:
            step = measured_step(case.shape, case.setting, device, STEPS, now)
        except torch.OutOfMemoryError as error:
            print(f"{case.name}: {str(error).splitlines()[0]}")
            path.write_text(json.dumps({"error": str(error).splitlines()[0]}) + "\n", encoding="utf-8")
            continue
        finally:
            gc.collect()
            if device.type != "cpu":
                torch.accelerator.empty_cache()
        row = {key: getattr(step, key) for key in ("seconds", "spread", "busy", "peak_bytes")}
        row |= {"torch": torch.__version__, "steps": STEPS}
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
        print(
            f"{time.monotonic() - begun:6.1f} s  {case.name}: {step.seconds * 1e3:.2f} ms, spread {step.spread:.1%}, "
            f"busy {step.busy:.0%}, peak {step.peak_bytes / 2**30:.2f} GiB",
            flush=True,
        )
    return True


def measured_rows(folder: Path) -> dict[str, Any]:
    """Return what `--measure` wrote, by the names of cases."""
    paths = sorted(folder.glob("[0-9]*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def verdicts(calibration: Calibration, rows: dict[str, Any]) -> list[Verdict]:
    """Forecast every case that was measured."""
    forecaster = Forecaster(calibration)
    found = []
    for case in cases(calibration.device.kind):
        row = rows.get(case.name, {"error": "not measured"})
        if "error" in row:
            continue
        try:
            found.append(Verdict(case.name, row, forecaster.forecast(case.shape, case.setting)))
        except PlanError as error:
            print(f"{case.name:46} {row['seconds'] * 1e3:9.2f} ms refused: {error}")
    return found


def summary(found: list[Verdict]) -> dict[str, Any]:
    """Return mean and worst errors beside their bars, and what the intervals cover."""
    groups = {
        "busy": [verdict.error for verdict in found if verdict.is_busy],
        "host-bound": [verdict.error for verdict in found if not verdict.is_busy],
        "memory": [verdict.memory_error for verdict in found],
    }
    table: dict[str, Any] = {}
    for name, errors in groups.items():
        if errors:
            sizes = [abs(error) for error in errors]
            met = fmean(sizes) <= BARS[name][0] and max(sizes) <= BARS[name][1]
            table[name] = {"count": len(sizes), "mean": fmean(sizes), "worst": max(sizes), "met": met}
    for at, name in enumerate(("seconds", "peak_bytes")):
        halves = [getattr(verdict.forecast, name).half for verdict in found]
        share = fmean(verdict.covers[at] for verdict in found)
        met = share >= COVERED and median(halves) <= HALF
        table[f"interval of {name}"] = {"covered": share, "half": median(halves), "met": met}
    wrong = [verdict.name for verdict in found if verdict.forecast.host_bound == verdict.is_busy]
    table["named wrongly"] = {"cases": wrong, "met": not wrong}
    return table


def judge(where: Path, steps: Path | None, first: int, file: Path | None) -> bool:
    """Print every case from that number on, and the summary; return whether all bars are met."""
    calibration = Calibration.load(where if steps else where / "calibration.json")
    rows = json.loads(steps.read_text(encoding="utf-8")) if steps else measured_rows(where)
    found = [verdict for verdict in verdicts(calibration, rows) if int(verdict.name.partition("-")[0]) >= first]
    if not found:
        print(f"{steps or where} has no measured steps: run --measure first")
        return False
    for verdict in found:
        forecast, row = verdict.forecast, verdict.row
        print(
            f"{verdict.name:46} {row['seconds'] * 1e3:9.2f} ms {forecast.seconds.middle * 1e3:9.2f} "
            f"{verdict.error:+7.1%} ±{forecast.seconds.half:5.1%} {'in' if verdict.covers[0] else 'out':3}  "
            f"busy {row['busy']:4.0%} {'host-bound' if forecast.host_bound else '':10}  "
            f"{row['peak_bytes'] / 2**30:7.2f} GiB {verdict.memory_error:+6.1%} {'in' if verdict.covers[1] else 'out'}"
        )
    table = summary(found)
    for name, entry in table.items():
        numbers = ", ".join(
            f"{key} {value:.1%}" if isinstance(value, float) else f"{key} {value}"
            for key, value in entry.items()
            if key != "met"
        )
        print(f"{name:24} {numbers}  {'met' if entry['met'] else 'MISSED'}")
    if file is not None:
        file.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return all(entry["met"] for entry in table.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    for name in ("calibrate", "measure", "judge"):
        what.add_argument(f"--{name}", type=Path, metavar="DIR")
    parser.add_argument("--seconds", type=float, help="of this run; 200 to calibrate, else 500")
    parser.add_argument("--device")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--processor-time", action="store_true")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--steps", type=Path, help="a file of all measured steps; then --judge names a calibration")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    folder = args.calibrate or args.measure or args.judge
    if args.judge:
        return 0 if judge(folder, args.steps, args.first, args.json) else 1
    now = time.process_time if args.processor_time else time.perf_counter
    folder.mkdir(parents=True, exist_ok=True)
    if args.calibrate:
        calibrate(folder, args.device, args.seconds or 200.0, args.threads, now)
        return 0
    return 0 if measure(folder, args.device, args.seconds or 500.0, args.threads, now) else 1


if __name__ == "__main__":
    sys.exit(main())
