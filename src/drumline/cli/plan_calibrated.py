"""`drumline plan MODEL --hardware mine.json`: forecast a step on one device that `drumline calibrate` has measured."""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from drumline.cli import flags, plan_cluster, plan_profile
from drumline.cli.output import TEXTS, Paper, deliver
from drumline.core.errors import UsageError
from drumline.plan.calibrated.calibration import Calibration, is_calibration

if TYPE_CHECKING:
    from drumline.plan.cluster.transformer import Transformer

_SHARED = ("hardware", "sequence", "recompute", "optimizer", "gpus", "nodes")
_DEFAULTS = {"dtype": "bf16", "loss": "plain"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that only forecasts with a calibration have."""
    add = flags.adder(parser, "a model on one calibrated device (--hardware FILE from `drumline calibrate`)")
    add("--dtype", "number format of parameters, gradients and optimizer (default bf16)", ("bf16", "fp32", "tf32"))
    add("--loss", "plain cross entropy, or fused: logits by pieces (default plain)", ("plain", "fused"))


def is_for(args: argparse.Namespace) -> bool:
    """Whether --hardware names a calibration."""
    return args.hardware is not None and is_calibration(args.hardware)


def run(args: argparse.Namespace, model: Transformer) -> int:
    """Forecast, print and write."""
    from drumline.plan.calibrated.forecast import Forecaster
    from drumline.report.plan.calibrations import forecast_text

    args.formats = TEXTS
    _check(args)
    calibration = Calibration.load(args.hardware)
    shape = model if args.sequence is None else replace(model, sequence=args.sequence)
    setting = _setting(args)
    forecast = Forecaster(calibration).forecast(shape, setting)
    free = 1 - (0.0 if args.headroom is None else args.headroom)
    limit = free * (args.memory or calibration.device.memory_bytes)

    def make(form: str, paper: Paper) -> str:
        return forecast_text(calibration, shape, setting, forecast, limit, width=paper.width)

    def summary() -> dict[str, Any]:
        numbers = asdict(forecast)
        intervals = {name: getattr(forecast, name)._asdict() for name in ("seconds", "peak_bytes")}
        head = {"model": shape.name, "device": calibration.device.name, "calibrated": calibration.date}
        return {**head, "setting": asdict(setting), "sequence": shape.sequence, "limit_bytes": limit,
                **numbers, **intervals}  # fmt: skip

    deliver(args, make, summary, gap="\n")
    return 0


def _setting(args: argparse.Namespace) -> Any:
    from drumline.plan.calibrated.setting import StepSetting

    optimizer = "adamw" if args.optimizer == "adam" else args.optimizer
    return StepSetting(
        args.batch,
        args.dtype or _DEFAULTS["dtype"],
        args.loss or _DEFAULTS["loss"],
        optimizer,
        args.recompute or "none",
    )


def _check(args: argparse.Namespace) -> None:
    flags.require(args, "batch", example=f"plan {args.subject} --hardware {args.hardware} --batch 8")
    flags.check_counts(args, "batch", "sequence")
    for name in ("gpus", "nodes"):
        if getattr(args, name) not in (None, 1):
            raise UsageError(
                f"--{name} is {getattr(args, name)}, but {args.hardware} is a calibration",
                expected="one device",
                fix="name hardware like h200 for a plan of a cluster",
            )
    parser = argparse.ArgumentParser(add_help=False)
    plan_cluster.add_arguments(parser)
    plan_profile.add_arguments(parser)
    for action in parser._actions:
        if action.dest not in _SHARED and getattr(args, action.dest) != action.default:
            raise UsageError(f"{action.option_strings[-1]} is not for a calibrated device", fix="omit it")
