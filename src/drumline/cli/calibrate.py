"""`drumline calibrate`: measure this device, kernel by kernel and in whole steps, for forecasts of steps on it."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

from drumline.cli import flags
from drumline.cli.output import TEXTS, Paper, deliver, files_of, progress, pytorch
from drumline.core.errors import UsageError

if TYPE_CHECKING:
    from drumline.plan.calibrated.calibration import Calibration

EXAMPLE = "drumline calibrate --out mine.json"
_DTYPES = ("bf16", "fp32", "tf32", "fp8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, whole = flags.adder(parser), flags.whole_number
    add("FILE", "a calibration to show again instead of measuring (- reads stdin)", flags.file, nargs="?")
    add("--device NAME", "PyTorch device to measure (default: this machine's accelerator, or cpu)")
    add("--seconds S", "seconds to measure; works that matter most come first", flags.number, 200.0)
    add("--dtypes NAME,...", "number formats to measure: bf16, fp32, tf32, fp8 (default: the device's)", flags.names)
    add("--devices N", "devices that exchange messages (default: all of this machine's accelerators)", whole)
    add("--threads N", "threads on a CPU (default: as PyTorch chooses)", whole)
    flags.add_out(parser, TEXTS, "write FILE.json for `drumline plan --hardware`, or FILE.txt")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure or read, write and show."""
    from drumline.plan.calibrated.calibration import Calibration

    calibration = _measured(args) if args.file is None else Calibration.load(args.file)

    def make(form: str, paper: Paper) -> str:
        from drumline.report.plan.calibrations import calibration_text

        return calibration_text(calibration, width=paper.width)

    def summary() -> dict[str, Any]:
        table: dict[str, Any] = json.loads(calibration.to_json())
        files = [str(path) for path, _ in files_of(args)]
        return {**table, "out": files} if args.json and files else table

    deliver(args, make, summary, gap="\n")
    return 0


def _measured(args: argparse.Namespace) -> Calibration:
    for name in ("devices", "threads"):
        flags.check_counts(args, name)
    if args.seconds <= 0:
        raise UsageError(f"--seconds is {args.seconds:g}", expected="more than 0")
    if unknown := [name for name in args.dtypes or () if name not in _DTYPES]:
        raise UsageError(f"--dtypes names {unknown[0]!r}", expected=f"some of {', '.join(_DTYPES)}")
    with pytorch("calibrate measures kernels"):
        from drumline.profile.calibrate.start import calibrated
    return calibrated(
        args.device,
        seconds=args.seconds,
        dtypes=args.dtypes,
        num_devices=args.devices,
        num_threads=args.threads,
        say=lambda text: progress(f"calibrating: {text}"),
    )
