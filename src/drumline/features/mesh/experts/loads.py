"""How evenly routers load their experts: a metric of each step of models with dl.MoE, or experts of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import DATA
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport
from drumline.engine.stages.engine import Engine
from drumline.features.mesh.experts.parallel import is_experts, taken
from drumline.model.blocks.script import Script
from drumline.model.layers.moe import Experts, MoE
from drumline.model.layers.routing import is_traced
from drumline.runtime.step import Step


class _Counted:
    """Counts what a router sends to a module of experts, of which this line may hold a part."""

    def __init__(self, module: nn.Module, num_experts: int) -> None:
        self._num_experts = num_experts
        self.load: Tensor | None = None  # as in MoE: what each expert got, and behind it what none got
        # First of all hooks: lines that divide the experts exchange tokens in another one.
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)

    @torch.no_grad()
    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        index = taken(args, kwargs)[1]
        if module.training and not is_traced(index):
            counts = torch.bincount(index.reshape(-1), minlength=self._num_experts + 1)
            self.load = counts if self.load is None else self.load + counts


class ExpertLoads(Observer):
    """Counts what the mixtures of experts of this process's stages do in a step, over all lines of a mesh.

    With `hooks`, experts that are not dl.MoE's are counted too; `plan` is the script of a model that was traced.
    """

    def __init__(self, engine: Engine, axes: Axes, plan: Script | None, *, hooks: bool = True) -> None:
        self._engine, self._axes, self._plan, self._hooks = engine, axes, plan, hooks
        self._counted: dict[nn.Module, _Counted] = {}
        self.moved()

    def moved(self) -> None:
        """Find the mixtures of the stages here."""
        modules = (block.module for block in self._engine.blocks())
        self._blocks: list[MoE | _Counted] = []
        for e in dict.fromkeys(layer for module in modules for layer in module.modules()):
            if isinstance(e, MoE):
                self._blocks.append(e)
            elif self._hooks and is_experts(e) and not isinstance(e, Experts):
                self._blocks.append(self._counter(e))
        if self._plan is not None:
            self._plan.watch.has_changed()  # the hooks are no change of the user's

    def _counter(self, module: nn.Module) -> _Counted:
        if module not in self._counted:
            self._counted[module] = _Counted(module, int(vars(module)["num_experts"]) * self._axes.size("ep"))
        return self._counted[module]

    @property
    def is_idle(self) -> bool:
        """Whether the stages here have no experts."""
        return not self._blocks

    def begin(self, step: Step) -> None:
        """Forget what was counted before."""
        for block in self._blocks:
            block.load = None

    again = begin

    def tell(self, step: Step, each: Sequence[RankReport]) -> None:
        """Add this process's counts to what its first rank tells."""
        if step.train:
            each[0].loads = [
                self._axes.summed(block.load, *DATA).tolist() for block in self._blocks if block.load is not None
            ]
