"""How the lines of a mesh divide a model: its layers over tp, its experts over ep, and its state between lines of data.

::

    tp, ep    parameters of this process's stages become its parts of them, before the engine is built
    zero      optimizer state (1), or parameters and gradients too (3), once all lines have the same values
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import DATA
from drumline.core.action import Op
from drumline.core.errors import UsageError
from drumline.core.program import Program
from drumline.core.state import with_state
from drumline.engine.ranks.agreement import plan_of
from drumline.engine.setting import Setting, agree
from drumline.engine.stages.engine import Engine
from drumline.engine.state.tensors import Holdings
from drumline.engine.updates.updates import Updates
from drumline.features.mesh.attach.options import MeshOptions
from drumline.features.mesh.experts.parallel import ExpertParallel
from drumline.features.mesh.sharding import FullShards, StateShards
from drumline.features.mesh.tensor.layers import TensorParallel
from drumline.model.block import Block
from drumline.model.layers.styles import Plan

Stages = Sequence[Sequence[Block]]


@dataclass(frozen=True, slots=True)
class Dividing:
    """What the options divide; `held` are this process's stages, and `agree` raises unless all ranks say the same."""

    plan: Plan | None  # of layers that the axis tp divides
    sequence_parallel: bool
    zero: int | Mapping[int, int]
    axes: Axes
    program: Program
    held: Sequence[int]
    device: torch.device
    agree: Callable[[dict[str, Any]], None]

    @classmethod
    def of(cls, options: MeshOptions, setting: Setting) -> Dividing:
        """Return what a pipeline's options divide; it does not keep the model."""
        axes, model = setting.axes, setting.options.model
        plan = Plan.of(options.tensor_parallel, model) if axes.size("tp") > 1 else None
        if plan is not None and axes.size("ep") > 1:
            plan = plan.without_experts()
        own = (options.sequence_parallel, options.zero, axes, setting.program, setting.held, setting.device)
        return cls(plan, *own, partial(agree, setting.crew))

    def tensors(self, stages: Stages) -> TensorParallel | None:
        """Return how the axis tp divides the model's layers, after all ranks agree on it; None without that axis."""
        if self.plan is None:
            return None
        blocks = [block for stage in stages for block in stage]
        tensors = TensorParallel(self.axes, self.plan, blocks, sequence=self.sequence_parallel)
        self.agree({"tensor_parallel": tensors.described, "sequence_parallel": self.sequence_parallel})
        return tensors

    def experts(self, stages: Stages) -> ExpertParallel | None:
        """Return the experts that the axis ep divides, after all ranks agree on them; None without that axis."""
        if self.axes.size("ep") == 1:
            return None
        experts = ExpertParallel(self.axes, [block for stage in stages for block in stage])
        self.agree({"experts": experts.described})
        return experts

    def divide(self, stages: Stages, tensors: TensorParallel | None, experts: ExpertParallel | None) -> None:
        """Replace the parameters and the experts of this process's stages by its parts of them."""
        own, others = (
            [block for at, stage in enumerate(stages) if (at in self.held) is mine for block in stage]
            for mine in (True, False)
        )
        if tensors is not None:
            tensors.divide(own, others, self.device)
        if experts is not None:
            experts.divide(own, self.device)
        plan = plan_of(block for stage in stages for block in stage)
        if plan is not None and (tensors is not None or experts is not None):
            plan.watch.has_changed()  # the exchanges are no change of the user's

    def completing(self, tensors: TensorParallel | None) -> Callable[[Program], Program]:
        """Return what adds the actions on parameters and gradients that the mesh needs to a program."""
        sums = self.axes.size(*DATA) > 1 or (tensors is not None and tensors.is_partial)
        divided = frozenset(stage for stage in range(self.program.num_stages) if self._level(stage) == 3)
        return partial(_completed, sums=sums, divided=divided)  # which must not keep the model

    def _level(self, stage: int) -> int:
        """Return how much of a stage's state the lines of the mesh divide: ZeRO 0, 1 or 3."""
        zero = self.zero
        if isinstance(zero, int):
            return zero
        if unknown := set(zero) - set(range(self.program.num_stages)):
            raise UsageError(
                f"zero names stage {min(unknown, key=str)!r}",
                expected=f"stages from 0 to {self.program.num_stages - 1}",
            )
        return zero.get(stage, 0)

    def divide_state(self, engine: Engine, holdings: Holdings, updates: Updates) -> None:
        """Divide state between the lines of the mesh, once they have the same values."""
        levels = {stage.index: self._level(stage.index) for stage in engine.stages()}
        shared = {name for one in holdings.ties.tensors if len(one.names) > 1 or one.is_copied for name in one.names}
        named = {id(one): name for name, one in holdings.named_parameters()}
        parameters = {stage.index: stage.all_parameters for stage in engine.stages()}
        if 3 in levels.values():
            # Tied ones stay whole: several stages use them, each at its own time.
            divided = {
                index: [one for one in each if one.dim() and named.get(id(one)) not in shared]
                for index, each in parameters.items()
                if levels[index] == 3
            }
            holdings.shards = FullShards(self.axes, divided)
            holdings.renew()
            engine.divide(holdings.shards)
        if 1 in levels.values():
            updates.divided = StateShards(
                self.axes, [one for index, each in parameters.items() if levels[index] == 1 for one in each]
            )


def _completed(program: Program, *, sums: bool, divided: frozenset[int]) -> Program:
    """Return a program with exchanges of gradients if lines sum them, and gathers of the stages that they divide."""
    if sums:
        program = with_state(program, frozenset({Op.REDUCE_GRAD}))
    return with_state(program, frozenset({Op.UNSHARD, Op.RESHARD}), divided, ahead=1) if divided else program
