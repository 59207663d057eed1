"""The options of a pipeline, each with its type and default, checked before anything starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn

from drumline.channel.devices.visible import device_named
from drumline.core.errors import ModelError, UsageError, counted
from drumline.core.settings.clash import Together
from drumline.engine.core_options import CoreOptions
from drumline.engine.model import splits
from drumline.engine.program import programs
from drumline.engine.ranks import transports
from drumline.engine.together import PLANNED
from drumline.model.quantised.packed import is_packed, refuse_strange, settle
from drumline.pipeline.attached import AttachedOptions
from drumline.pipeline.together import table
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import Planned
from drumline.schedules import DEFAULT

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Given = TypeVar("Given")


@dataclass(frozen=True)
class Options(CoreOptions, AttachedOptions):
    """The options of a pipeline, and of the features that are attached to it; `Pipeline` documents each."""

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
        modules = _modules(self.model)
        settle(module for model in modules for module in model.modules())
        quantised = any(is_packed(param) for model in modules for param in model.parameters())
        Together(table(), {**self.facts(), "quantised": quantised}).refuse()
        self.refuse_model(self.model)
        if isinstance(self.model, nn.Module) and any(map(_is_divided, self.model.parameters())):
            raise ModelError(
                "the model's parameters are DTensors: fully_shard or parallelize_module has divided them",
                expected="the plain model: Drumline divides it",
                fix="pass mesh= with zero=3 or tensor_parallel= instead",
            )
        for number, model in enumerate(modules):
            name = "" if model is self.model else f"of block {number}: "
            refuse_strange((f"{name}{key}", param) for key, param in model.named_parameters())
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
        drumline.core.errors.UsageError: schedule is 'gpipe', and plan is 'plan.json'; expected only one of them: ...
        """
        if self.plan is None:
            return None
        beside = {name: getattr(self, name) for name in PLANNED}
        Together(table(), {"plan": self.plan, **beside}).refuse()
        given_plan = Plan.load(self.plan) if isinstance(self.plan, str | Path) else self.plan
        plan = given_plan.best if isinstance(given_plan, Planned) else given_plan
        if not isinstance(plan, Plan):
            raise UsageError(f"plan is {given_plan!r:.60}", expected="a Plan or the path of a plan file")
        if self.num_ranks not in (None, plan.num_ranks):
            raise UsageError(
                f"num_ranks is {self.num_ranks!r}", expected=f"{counted(plan.num_ranks, 'rank')}, as in the plan"
            )
        slices = getattr(self, "slices", 1)
        if plan.slices and slices not in (1, plan.slices):
            raise UsageError(
                f"slices is {slices!r:.60}, and the plan divides sequences itself",
                expected=f"slices of {', '.join(map(str, plan.slices))} tokens, as in the plan",
                fix="leave out slices=, or plan again with slices=False",
            )
        return plan


def taken(**wanted: Any) -> dict[str, Any]:
    """Return those of these options that a pipeline takes, with the features that are attached to it here.

    >>> taken(seed=3, sed=4)
    {'seed': 3}
    """
    names = {field.name for field in fields(Options)}
    return {name: value for name, value in wanted.items() if name in names}


def _modules(model: Any) -> list[nn.Module]:
    """Return a model as modules: itself, or those of a list or a dict."""
    listed = model.values() if isinstance(model, Mapping) else [model] if isinstance(model, nn.Module) else model
    return [module for module in listed if isinstance(module, nn.Module)] if isinstance(listed, Iterable) else []


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
        own_parameter = next(iter(inspect.signature(init).parameters.values()))
        signature = inspect.signature(options)
        first = list(CoreOptions.__annotations__)  # then those of features
        shown = sorted(signature.parameters.values(), key=lambda param: param.name not in first)
        signature = signature.replace(parameters=[own_parameter, *shown], return_annotation=None)

        @functools.wraps(init)
        def construct(self: Made, /, *args: Arguments.args, **named: Arguments.kwargs) -> None:
            signature.bind(self, *args, **named)  # raises without naming Options, which the user does not know
            init(self, options(*args, **named))

        setattr(construct, "__signature__", signature)  # noqa: B010 - what help() shows
        return construct

    return decorate
