"""What a pipeline is made with: every option once, with its kind and default, looked at before anything starts."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, UsageError, counted
from drumline.core.program import Program
from drumline.pipeline import transports
from drumline.pipeline.assembly import Checkpointing
from drumline.pipeline.lengths import programs
from drumline.pipeline.model import splits
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import Planned
from drumline.runtime.backward.compiled import Compile
from drumline.runtime.batch import Split
from drumline.runtime.blocks.cut import Model
from drumline.runtime.weights.files import Weights
from drumline.schedules import DEFAULT

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Given = TypeVar("Given")

_DECIDED = ("schedule", "num_microbatches", "stages_per_rank", "balance", "cuts")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 1


# What options may be, and how that is said to whoever gave something else.
_COUNT = "a whole number of 1 or more"
_COUNTS = ("num_microbatches", "num_ranks", "stages_per_rank")
_SWITCHES = ("master_weights", "check_finite", "check_model", "merge_weight_gradients", "capture", "weigh", "arrange")
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (lambda one: one is None or _is_count(one), _COUNT)),
    "ahead": (_is_count, _COUNT),
    "seed": (_is_whole, "a whole number"),
    "timeout": (lambda one: (_is_whole(one) or isinstance(one, float)) and 0 < one < math.inf, "seconds above 0"),
    **dict.fromkeys(_SWITCHES, (lambda one: isinstance(one, bool), "True or False")),
    "schedule": (lambda one: isinstance(one, str | Path | Program), "a name, a Program, or a CSV file"),
    "record": (lambda one: isinstance(one, bool | str | Path) and one != "", "True, False, or the folder of a run"),
    "unused": (lambda one: one in ("warn", "raise", "ignore"), '"warn", "raise" or "ignore"'),
}


@dataclass(frozen=True, slots=True)
class Options:
    """What a pipeline is made with; `Pipeline` says what each means."""

    model: Model
    _: KW_ONLY
    loss_fn: Callable[..., Tensor] | None = None
    schedule: str | Path | Program | None = None
    num_microbatches: int | None = None
    num_ranks: int | None = None
    stages_per_rank: int | None = None
    balance: Sequence[int] | str | None = None
    cuts: Sequence[str] | None = None
    plan: Plan | Planned | str | Path | None = None
    example: Any = None
    example_target: Any = None
    weights: str | Path | Weights | None = None
    checkpoint: Checkpointing = "none"
    loss_weight: Callable[[Any], float | Tensor] | None = None
    split: Split | None = None
    unused: str = "warn"
    transport: str = "auto"
    device: torch.device | str | None = None
    seed: int = 0
    precision: str = "fp32"
    master_weights: bool = False
    check_finite: bool = True
    check_model: bool = True
    merge_weight_gradients: bool = False
    timeout: float = 300.0
    ahead: int = 2
    capture: bool = False
    weigh: bool = False
    compile: Compile = False
    record: bool | str | Path = True
    programs: Mapping[str, Program | str | Path | int] | None = None
    arrange: bool = False

    def decided(self) -> Options:
        """Return the same with what a plan decides, every option of its kind and in its range.

        >>> Options(nn.ReLU(), num_ranks="2").decided()
        Traceback (most recent call last):
        drumline.core.errors.UsageError: num_ranks is '2'; expected a whole number of 1 or more
        """
        plan = self.decided_plan()
        decides: dict[str, Any] = {"schedule": DEFAULT if self.schedule is None else self.schedule}
        if plan is not None:
            decides = {"num_ranks": plan.num_ranks, **plan.pipeline_settings}
        options = replace(self, plan=plan, **decides)
        options._check()
        return options

    def _check(self) -> None:
        """Refuse arguments of the wrong kind by their names."""
        for name, (is_right, expected) in _KINDS.items():
            if not is_right(value := getattr(self, name)):
                raise UsageError(f"{name} is {value!r:.80}", expected=expected)
        if self.schedule == "auto":
            self._check_auto()
        if self.arrange and self.capture:
            raise UsageError(
                "arrange is True and capture is True", expected="one of the two: captured steps stay as they are"
            )
        splits.check(self.split)
        programs.check(self.programs)
        device_named(self.device)
        transports.check(self.transport)
        if isinstance(getattr(self.model, "_orig_mod", None), nn.Module):
            raise ModelError(
                "the model was compiled by torch.compile",
                expected="the model itself: each stage is compiled by itself",
                fix="pass what was compiled, and compile=True",
            )

    def _check_auto(self) -> None:
        """Refuse to search where nothing is measured, or where a run would have two programs."""
        if self.programs:
            raise UsageError("programs are named and schedule is 'auto'", expected="one of the two")
        if self.record is False:
            raise UsageError("record is False and schedule is 'auto'", expected="steps that are measured")
        if self.record is not True:
            raise UsageError(
                f"record is {str(self.record)!r} and schedule is 'auto'",
                expected="one program in all of a run",
                fix="save the program that is found, pipe.program.save(FILE.csv), and record a run with"
                " schedule=FILE.csv",
            )

    def decided_plan(self) -> Plan | None:
        """Return the plan, refusing what it decides itself.

        >>> Options(nn.ReLU(), plan="plan.json", schedule="gpipe").decided_plan()
        Traceback (most recent call last):
        drumline.core.errors.UsageError: schedule is 'gpipe' beside a plan; expected one of the two: ...
        """
        if self.plan is None:
            return None
        beside = [name for name in _DECIDED if getattr(self, name) is not None]
        for name in [*beside, *(["checkpoint"] if self.checkpoint != "none" else [])]:
            raise UsageError(
                f"{name} is {getattr(self, name)!r:.60} beside a plan",
                expected="one of the two: a plan decides schedule, microbatches, cut and checkpointing",
                fix=f"leave {name} out, or plan again",
            )
        given = Plan.load(self.plan) if isinstance(self.plan, str | Path) else self.plan
        plan = given.best if isinstance(given, Planned) else given
        if not isinstance(plan, Plan):
            raise UsageError(f"plan is {given!r:.60}", expected="a Plan, or the file of one")
        if self.num_ranks not in (None, plan.num_ranks):
            raise UsageError(
                f"num_ranks is {self.num_ranks!r}", expected=f"{counted(plan.num_ranks, 'rank')}, as planned"
            )
        return plan

    def settings(self) -> dict[str, Any]:
        """Return all of it by name; of a plan, what it decides."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "plan"}


def made_with(
    options: Callable[Arguments, Given],
) -> Callable[[Callable[[Made, Given], None]], Callable[Concatenate[Made, Arguments], None]]:
    """Let a class be made with what its options are made with: `Pipeline(model, seed=1)` gets `Options(model, seed=1)`.

    >>> class Pipeline:
    ...     @made_with(Options)
    ...     def __init__(self, options): self.seed = options.seed
    >>> Pipeline(nn.ReLU(), seed=1).seed, inspect.signature(Pipeline).parameters["seed"].default
    (1, 0)
    """

    def decorate(init: Callable[[Made, Given], None]) -> Callable[Concatenate[Made, Arguments], None]:
        own = next(iter(inspect.signature(init).parameters.values()))
        signature = inspect.signature(options)
        signature = signature.replace(parameters=[own, *signature.parameters.values()], return_annotation=None)

        @functools.wraps(init)
        def made(self: Made, /, *args: Arguments.args, **named: Arguments.kwargs) -> None:
            signature.bind(self, *args, **named)  # raises without a name that the user does not know
            init(self, options(*args, **named))

        setattr(made, "__signature__", signature)  # noqa: B010 - what help() shows
        return made

    return decorate


def device_named(device: Any) -> torch.device | None:
    """Return the device that a user names, if it is there; None for none.

    >>> device_named("gpu")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: device is 'gpu'; expected a device of PyTorch's, such as cpu or cuda:0
    """
    if device is None:
        return None
    expected = "a device of PyTorch's, such as cpu or cuda:0"
    if not isinstance(device, str | torch.device):
        raise UsageError(f"device is {device!r}", expected=expected)
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device is {device!r}", expected=expected) from None
    there = torch.accelerator.current_accelerator(check_available=True)
    if found.type not in ("cpu", "meta") and (there is None or there.type != found.type):
        here = "cpu" if there is None else f"cpu or {there.type}"
        raise UsageError(f"device is {str(device)!r}, and PyTorch finds none here", expected=here)
    return found
