"""The options of a pipeline, each with its type and default, checked before anything starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError, UsageError, counted
from drumline.core.program import Program
from drumline.engine.model import splits
from drumline.engine.options import COUNT, SWITCH, Accepted, is_whole, option
from drumline.engine.program import programs
from drumline.engine.ranks import transports
from drumline.engine.stages.assembly import Checkpointing
from drumline.model.block import Model
from drumline.model.weights.files import Weights
from drumline.pipeline.attached import AttachedOptions
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import Planned
from drumline.runtime.backward.compiled import Compile
from drumline.runtime.batch import Split
from drumline.schedules import DEFAULT

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Given = TypeVar("Given")

_DECIDED = ("schedule", "num_microbatches", "stages_per_rank", "balance", "cuts")


# The accepted values of options, and how errors describe them.
_YEAR = 31_536_000  # clocks of operating systems overflow far above
_MAYBE_COUNT = Accepted(lambda one: one is None or COUNT.is_right(one), COUNT.expected)
_INTEGER = Accepted(is_whole, "an integer")
_SECONDS = Accepted(
    lambda one: (is_whole(one) or isinstance(one, float)) and 0 < one <= _YEAR,
    f"a positive number of seconds, at most {_YEAR} (a year)",
)
_SCHEDULE = Accepted(
    lambda one: one is None or isinstance(one, str | Path | Program), "a schedule name, a Program, or a CSV file"
)
_INTERFACE = Accepted(lambda one: isinstance(one, str), "the name of a network interface, or an address")
_UNUSED = Accepted(lambda one: one in ("warn", "raise", "ignore"), '"warn", "raise" or "ignore"')


@dataclass(frozen=True)
class Options(AttachedOptions):
    """The options of a pipeline, and of the features that are attached to it; `Pipeline` documents each."""

    ALIKE: ClassVar[tuple[str, ...]] = ("check_finite", "merge_weight_gradients", "ahead")
    model: Model
    _: KW_ONLY
    loss_fn: Callable[..., Tensor] | None = None
    schedule: str | Path | Program | None = option(None, _SCHEDULE)
    num_microbatches: int | None = option(None, _MAYBE_COUNT)
    num_ranks: int | None = option(None, _MAYBE_COUNT)
    stages_per_rank: int | None = option(None, _MAYBE_COUNT)
    balance: Sequence[int] | str | None = None
    cuts: Sequence[str] | None = None
    plan: Plan | Planned | str | Path | None = None
    example: Any = None
    example_target: Any = None
    weights: str | Path | Weights | None = None
    checkpoint: Checkpointing = "none"
    loss_weight: Callable[[Any], float | Tensor] | None = None
    split: Split | None = None
    unused: str = option("warn", _UNUSED)
    transport: str = "auto"
    interface: str = option("", _INTERFACE)
    device: torch.device | str | None = None
    seed: int = option(0, _INTEGER)
    precision: str = "fp32"
    check_finite: bool = option(True, SWITCH)
    merge_weight_gradients: bool = option(False, SWITCH)
    timeout: float = option(300.0, _SECONDS)
    ahead: int = option(2, COUNT)
    weigh: bool = option(False, SWITCH)
    compile: Compile = False
    programs: Mapping[str, Program | str | Path | int] | None = None

    def decided(self) -> Options:
        """Return the options with the plan's decisions applied and every value checked.

        >>> Options(nn.ReLU(), num_ranks="2").decided()
        Traceback (most recent call last):
        drumline.core.errors.UsageError: num_ranks is '2'; expected an integer of at least 1
        """
        plan = self.decided_plan()
        decides: dict[str, Any] = {"schedule": DEFAULT if self.schedule is None else self.schedule}
        if plan is not None:
            decides = {"num_ranks": plan.num_ranks, **plan.pipeline_settings}
        options = replace(self, plan=plan, **decides)
        options._check()
        return options

    def _check(self) -> None:
        """Refuse values of the wrong type or range, by name, and what does not go together."""
        self.check_values()
        splits.check(self.split)
        programs.check(self.programs)
        device_named(self.device)
        transports.check(self.transport)
        self.check_together(self.settings())
        if isinstance(self.model, nn.Module) and any(map(_is_divided, self.model.parameters())):
            raise ModelError(
                "the model's parameters are DTensors: fully_shard or parallelize_module has divided them",
                expected="the plain model: Drumline divides it",
                fix="pass mesh= with zero=3 or tensor_parallel= instead",
            )
        if isinstance(getattr(self.model, "_orig_mod", None), nn.Module):
            raise ModelError(
                "the model is already compiled by torch.compile",
                expected="the original model: Drumline compiles each stage separately",
                fix="pass the original model and compile=True",
            )

    def decided_plan(self) -> Plan | None:
        """Return the plan; refuse options that it sets itself.

        >>> Options(nn.ReLU(), plan="plan.json", schedule="gpipe").decided_plan()
        Traceback (most recent call last):
        drumline.core.errors.UsageError: schedule is 'gpipe' but a plan is given too; expected only one of them: ...
        """
        if self.plan is None:
            return None
        beside = [name for name in _DECIDED if getattr(self, name) is not None]
        for name in [*beside, *(["checkpoint"] if self.checkpoint != "none" else [])]:
            raise UsageError(
                f"{name} is {getattr(self, name)!r:.60} but a plan is given too",
                expected="only one of them: a plan sets the schedule, microbatches, cut and checkpointing",
                fix=f"omit {name}, or make another plan",
            )
        given = Plan.load(self.plan) if isinstance(self.plan, str | Path) else self.plan
        plan = given.best if isinstance(given, Planned) else given
        if not isinstance(plan, Plan):
            raise UsageError(f"plan is {given!r:.60}", expected="a Plan or the path of a plan file")
        if self.num_ranks not in (None, plan.num_ranks):
            raise UsageError(
                f"num_ranks is {self.num_ranks!r}", expected=f"{counted(plan.num_ranks, 'rank')}, as in the plan"
            )
        return plan

    def settings(self) -> dict[str, Any]:
        """Return all options by name, with the decisions of a plan in place of the plan."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "plan"}


def _is_divided(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a DTensor; without importing that, which takes a second."""
    return any(kind.__module__.startswith("torch.distributed.tensor") for kind in type(parameter).__mro__)


def made_with(
    options: Callable[Arguments, Given],
) -> Callable[[Callable[[Made, Given], None]], Callable[Concatenate[Made, Arguments], None]]:
    """Let a class take the arguments of its options: `Pipeline(model, seed=1)` gets `Options(model, seed=1)`.

    >>> class Pipeline:
    ...     @made_with(Options)
    ...     def __init__(self, options): self.seed = options.seed
    >>> Pipeline(nn.ReLU(), seed=1).seed, inspect.signature(Pipeline).parameters["seed"].default
    (1, 0)
    """

    def decorate(init: Callable[[Made, Given], None]) -> Callable[Concatenate[Made, Arguments], None]:
        own = next(iter(inspect.signature(init).parameters.values()))
        signature = inspect.signature(options)
        first = list(getattr(options, "__annotations__", ()))  # those of the pipeline itself, then those of features
        shown = sorted(signature.parameters.values(), key=lambda one: one.name not in first)
        signature = signature.replace(parameters=[own, *shown], return_annotation=None)

        @functools.wraps(init)
        def made(self: Made, /, *args: Arguments.args, **named: Arguments.kwargs) -> None:
            signature.bind(self, *args, **named)  # raises without naming Options, which the user does not know
            init(self, options(*args, **named))

        setattr(made, "__signature__", signature)  # noqa: B010 - what help() shows
        return made

    return decorate


def device_named(device: Any) -> torch.device | None:
    """Return the device that a user names, if this machine has it; None for None.

    >>> device_named("gpu")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: device is 'gpu'; expected a PyTorch device, such as cpu or cuda:0
    """
    if device is None:
        return None
    expected = "a PyTorch device, such as cpu or cuda:0"
    if not isinstance(device, str | torch.device):
        raise UsageError(f"device is {device!r}", expected=expected)
    try:
        found = torch.device(device)
    except RuntimeError:
        raise UsageError(f"device is {device!r}", expected=expected) from None
    there = torch.accelerator.current_accelerator(check_available=True)
    if found.type not in ("cpu", "meta") and (there is None or there.type != found.type):
        here = "cpu" if there is None else f"cpu or {there.type}"
        raise UsageError(f"device is {str(device)!r}, but PyTorch finds no such device", expected=here)
    return found
