"""How evenly routers load their experts: a metric of each step of models with dl.MoE."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from drumline.pipeline.observer import Observer
from drumline.pipeline.record.tally import Told
from drumline.runtime.axes.axes import DATA, Axes
from drumline.runtime.axes.experts.moe import MoE
from drumline.runtime.executor import Step


class ExpertLoads(Observer):
    """Counts what the mixtures of experts of this process's stages do in a step, over all lines of a mesh."""

    def __init__(self, modules: Iterable[nn.Module], axes: Axes) -> None:
        self._blocks = [one for module in modules for one in module.modules() if isinstance(one, MoE)]
        self._axes = axes

    def begin(self, step: Step) -> None:
        """Forget what was counted before."""
        for one in self._blocks:
            one.load = None

    again = begin

    def tell(self, step: Step, each: Sequence[Told]) -> None:
        """Add this process's counts to what its first rank tells."""
        if step.train:
            each[0].loads = [
                self._axes.summed(one.load, *DATA).tolist() for one in self._blocks if one.load is not None
            ]
