"""How evenly routers load their experts: a metric of each step of models with dl.MoE."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.pipeline.engine import Engine
from drumline.pipeline.observer import Observer
from drumline.pipeline.record.tally import Told
from drumline.runtime.axes.axes import DATA, Axes
from drumline.runtime.axes.experts.moe import MoE
from drumline.runtime.executor import Step


class ExpertLoads(Observer):
    """Counts what the mixtures of experts of this process's stages do in a step, over all lines of a mesh."""

    def __init__(self, engine: Engine, axes: Axes) -> None:
        self._engine = engine
        self._axes = axes
        self.moved()

    def moved(self) -> None:
        """Find the mixtures of the stages here."""
        modules = (block.module for stage in self._engine.stages() for block in stage.blocks)
        self._blocks = [one for module in modules for one in module.modules() if isinstance(one, MoE)]

    def begin(self, step: Step) -> None:
        """Forget what was counted before."""
        for one in self._blocks:
            one.load = None

    def tell(self, step: Step, each: Sequence[Told]) -> None:
        """Add this process's counts to what its first rank tells."""
        if step.train:
            each[0].loads = [
                self._axes.summed(one.load, *DATA).tolist() for one in self._blocks if one.load is not None
            ]
