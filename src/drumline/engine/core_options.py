"""The options of a pipeline itself, each with its type and default; features add theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.core.program import Program
from drumline.core.settings.rule import Rule, one_of
from drumline.engine.options import COUNT, SWITCH, FeatureOptions, is_whole, option
from drumline.engine.stages.assembly import Checkpointing
from drumline.model.block import Model
from drumline.model.weights.files import Weights
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import Planned
from drumline.runtime.backward.compiled import Compile
from drumline.runtime.batch import Split

# The accepted values of options, and how errors describe them.
_YEAR = 31_536_000  # clocks of operating systems overflow far above
_MAYBE_COUNT = Rule(COUNT.expected, lambda value: value is None or COUNT.holds(value))
_INTEGER = Rule("an integer", is_whole)
_SECONDS = Rule(
    f"a positive number of seconds, at most {_YEAR} (a year)",
    lambda value: (is_whole(value) or isinstance(value, float)) and 0 < value <= _YEAR,
)
_SCHEDULE = Rule(
    "a schedule name, a Program, or a CSV file", lambda value: value is None or isinstance(value, str | Path | Program)
)
_INTERFACE = Rule("the name of a network interface, or an address", lambda value: isinstance(value, str))
_UNUSED = one_of("warn", "raise", "ignore")


@dataclass(frozen=True)
class CoreOptions(FeatureOptions):
    """The options of any pipeline; `Pipeline` documents each."""

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
    check_finite: bool = option(True, SWITCH, alike=True)
    merge_weight_gradients: bool = option(False, SWITCH, alike=True)
    timeout: float = option(300.0, _SECONDS)
    ahead: int = option(2, COUNT, alike=True)
    weigh: bool = option(False, SWITCH)
    compile: Compile = False
    programs: Mapping[str, Program | str | Path | int] | None = None

    def settings(self) -> dict[str, Any]:
        """Return all options by name, with the decisions of a plan instead of the plan."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "plan"}
