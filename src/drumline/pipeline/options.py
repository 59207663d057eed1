"""The options of a pipeline, each with its type and default, checked before anything starts."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from drumline.adapt.settings import KEEP, Adapt
from drumline.channel.lines import grid as meshes
from drumline.core.errors import ModelError, UsageError, counted
from drumline.core.program import Program
from drumline.engine.model import splits
from drumline.engine.program import programs
from drumline.engine.ranks import transports
from drumline.engine.stages.assembly import Checkpointing
from drumline.features.check.sentinels import When, is_when
from drumline.features.mesh import sequences
from drumline.features.mesh.tensor import styles
from drumline.model.block import Model
from drumline.model.weights.files import Weights
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import Planned
from drumline.runtime.backward.compiled import Compile
from drumline.runtime.batch import Split
from drumline.schedules import DEFAULT

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")
Given = TypeVar("Given")

_DECIDED = ("schedule", "num_microbatches", "stages_per_rank", "balance", "cuts")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_whole(value) and value >= 1


_NOT_COMPILED = {
    "cp": "compiled attention would see a part of the sequence only",
    "ep": "exchanges of tokens are not part of compiled code",
    "tp": "exchanges inside divided layers are not part of compiled code",
}
# The accepted values of each option, and how errors describe them.
_COUNT = "an integer of at least 1"
_YEAR = 31_536_000  # clocks of operating systems overflow far above
_COUNTS = ("num_microbatches", "num_ranks", "stages_per_rank")
_SWITCHES = (
    "master_weights", "check_finite", "merge_weight_gradients", "capture", "weigh", "arrange",
    "continue_record", "sequence_parallel", "vertical_sync",
)  # fmt: skip
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(_COUNTS, (lambda one: one is None or _is_count(one), _COUNT)),
    "ahead": (_is_count, _COUNT),
    "seed": (_is_whole, "an integer"),
    "timeout": (
        lambda one: (_is_whole(one) or isinstance(one, float)) and 0 < one <= _YEAR,
        f"a positive number of seconds, at most {_YEAR} (a year)",
    ),
    **dict.fromkeys(_SWITCHES, (lambda one: isinstance(one, bool), "True or False")),
    "check_model": (is_when, 'True, False, "first", or a number of steps between two checks'),
    "schedule": (lambda one: isinstance(one, str | Path | Program), "a schedule name, a Program, or a CSV file"),
    "record": (lambda one: isinstance(one, bool | str | Path) and one != "", "True, False, or a folder for the run"),
    "zero": (
        lambda one: all(
            _is_whole(each) and each in (0, 1, 3) for each in (one.values() if isinstance(one, Mapping) else [one])
        ),
        "0 (nothing is divided), 1 (optimizer state) or 3 (parameters and gradients too), or a dict of these by stage",
    ),
    "interface": (lambda one: isinstance(one, str), "the name of a network interface, or an address"),
    "unused": (lambda one: one in ("warn", "raise", "ignore"), '"warn", "raise" or "ignore"'),
}


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a pipeline; `Pipeline` documents each."""

    model: Model
    _: KW_ONLY
    loss_fn: Callable[..., Tensor] | None = None
    schedule: str | Path | Program | None = None
    num_microbatches: int | None = None
    num_ranks: int | None = None
    stages_per_rank: int | None = None
    vertical_sync: bool = False
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
    interface: str = ""
    device: torch.device | str | None = None
    seed: int = 0
    precision: str = "fp32"
    master_weights: bool = False
    check_finite: bool = True
    check_model: When = True
    merge_weight_gradients: bool = False
    timeout: float = 300.0
    ahead: int = 2
    capture: bool = False
    weigh: bool = False
    compile: Compile = False
    record: bool | str | Path = True
    continue_record: bool = False
    programs: Mapping[str, Program | str | Path | int] | None = None
    arrange: bool = False
    mesh: Mapping[str, int] | DeviceMesh | None = None
    zero: int | Mapping[int, int] = 0
    tensor_parallel: Mapping[str, Any] | None = None
    sequence_parallel: bool = False
    adapt: bool | Mapping[str, Any] | Adapt = False

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
        """Refuse values of the wrong type or range, by name."""
        for name, (is_right, expected) in _KINDS.items():
            if not is_right(value := getattr(self, name)):
                raise UsageError(f"{name} is {value!r:.80}", expected=expected)
        if self.schedule == "auto":
            self._check_auto()
        self._check_adapt()
        if self.arrange and self.capture:
            raise UsageError(
                "arrange is True and capture is True", expected="one of the two: captured steps stay as they are"
            )
        splits.check(self.split)
        programs.check(self.programs)
        device_named(self.device)
        transports.check(self.transport)
        self._check_mesh({} if self.mesh is None else meshes.described(self.mesh)[0])
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

    def _check_mesh(self, sizes: Mapping[str, int]) -> None:
        """Refuse what does not go together with several lines."""
        if self.zero and sizes.get("dp", 1) == 1:
            raise UsageError(
                f"zero is {self.zero}, and the mesh has no dp",
                expected="data-parallel lines that can divide state",
                fix='pass mesh={"pp": ..., "dp": ...}, or zero=0',
            )
        if sizes.get("cp", 1) > 1:
            sequences.positions_of(self.model)
        if self.capture and any(size > 1 for axis, size in sizes.items() if axis != "pp"):
            raise UsageError(
                f"capture is True and the mesh is {meshes.shown(sizes)}",
                expected="one line: the exchanges between lines are not part of CUDA graphs",
                fix="use capture=False",
            )
        for axis, why in _NOT_COMPILED.items():
            if self.compile and sizes.get(axis, 1) > 1:
                raise UsageError(
                    f"compile is {self.compile!r:.40} and the mesh is {meshes.shown(sizes)}",
                    expected=f"compile=False with {axis}: {why}",
                )
        if sizes.get("tp", 1) > 1:
            styles.Plan.of(self.tensor_parallel, self.model)
        elif self.sequence_parallel:
            raise UsageError(
                "sequence_parallel is True, and the mesh has no tp",
                expected="tensor-parallel lines, which divide the tokens between their layers",
                fix='pass mesh={"pp": ..., "tp": ...}, or sequence_parallel=False',
            )

    def _check_auto(self) -> None:
        """Refuse to search if nothing is measured, or if steps may name programs."""
        if self.programs:
            raise UsageError("programs are named and schedule is 'auto'", expected="only one of them")
        if self.record is False:
            raise UsageError("record is False and schedule is 'auto'", expected="record=True, to measure steps")

    @property
    def moves_layers(self) -> bool:
        """Whether layers may move between ranks while training goes on."""
        adapt = Adapt.of(self.adapt)
        return adapt is not None and adapt.rebalance != KEEP

    def _check_adapt(self) -> None:
        """Refuse to adapt if nothing is measured."""
        if Adapt.of(self.adapt) is None:
            return
        if self.record is False:
            raise UsageError("record is False and adapt is set", expected="record=True, to measure steps")
        if self.capture:
            raise UsageError(
                "capture is True and adapt is set",
                expected="one of the two: the actions of a captured step have no times",
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
        signature = signature.replace(parameters=[own, *signature.parameters.values()], return_annotation=None)

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
