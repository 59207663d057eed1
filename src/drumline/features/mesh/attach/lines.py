"""The lines of a mesh: what each has of a model and its batches, and what they exchange.

::

    set-up     the model is cut with whole sequences
    tp, ep     parameters of this process's stages become its parts of them, before the engine is built
    zero       optimizer state (1), or parameters and gradients too (3), once all lines have the same values
    a step     each line takes its part of every sequence; lines compare what they were called with; losses are summed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import DATA
from drumline.core.action import Op
from drumline.core.errors import UsageError
from drumline.core.program import Program
from drumline.core.state_actions import with_state
from drumline.engine.lines import Lines, Stages, widest
from drumline.engine.ranks.agreement import plan_of
from drumline.engine.setup import ModelCut, PipelineSetup, agree
from drumline.engine.stages import assembly
from drumline.engine.stages.engine import Around, Engine
from drumline.engine.stages.intake import Intake
from drumline.engine.state.tensors import Holdings
from drumline.engine.unsplit.parts import Parts
from drumline.engine.updates.updates import Updates
from drumline.features.mesh import sequences
from drumline.features.mesh.attach.line_check import LineParts
from drumline.features.mesh.attach.options import MeshOptions
from drumline.features.mesh.context import whole_context
from drumline.features.mesh.experts.parallel import ExpertParallel
from drumline.features.mesh.reduce import Reducer, reducer_for, share_values
from drumline.features.mesh.sharding import FullShards, StateShards
from drumline.features.mesh.tensor.layers import TensorParallel
from drumline.model.layers.styles import StylePlan
from drumline.runtime.sequences import positions_of
from drumline.runtime.step import CalledWith

_KINDS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)  # of losses


class MeshLines(Lines):
    """Several lines that train one model; see `Lines` for the order in which these are called."""

    def __init__(self, options: MeshOptions, setting: PipelineSetup) -> None:
        super().__init__(setting)
        self._device, self._agree = setting.device, partial(agree, setting.crew)
        self._weighs, self._zero = setting.options.weigh, options.zero
        self._program, self._held_stages = setting.program, setting.held_stages
        self._divides_parameters = False  # between data-parallel lines
        self._sequence_parallel = options.sequence_parallel
        self._plan: StylePlan | None = None  # of layers that the axis tp divides
        if self.axes.size("tp") > 1:
            plan = StylePlan.of(options.tensor_parallel, setting.options.model)
            self._plan = plan if self.axes.size("ep") == 1 else plan.without_experts()
        self._tensors: TensorParallel | None = None
        self._experts: ExpertParallel | None = None
        has_parts = self.axes.size("cp") > 1
        self.positions = positions_of(setting.options.model, sequences.BY_CP) if has_parts else None

    def whole(self) -> AbstractContextManager[None]:
        """Refuse masks inside, which would be made for a part of the sequence."""
        return whole_context(self.axes)

    def cut(self, intake: Intake, stages: Stages) -> None:
        """Count what all lines that see other rows count; refuse statistics of a part of the batch."""
        if self.axes.size(*DATA) > 1:
            intake.count_across(partial(self.axes.totals, device=self._device), self.axes.size("cp"))
            assembly.refuse_statistics(
                [block for stage in stages for block in stage],
                "with several lines of a mesh: each sees a part of the batch",
            )

    def completing(self, stages: Stages) -> Callable[[Program], Program]:
        """Return what adds exchanges of gradients, and gathers of divided stages, to a program."""
        if self._plan is not None:
            blocks = [block for stage in stages for block in stage]
            tensors = TensorParallel(self.axes, self._plan, blocks, sequence=self._sequence_parallel)
            self._agree({"tensor_parallel": tensors.described, "sequence_parallel": self._sequence_parallel})
            self._tensors = tensors
        sums = self.axes.size(*DATA) > 1 or (self._tensors is not None and self._tensors.is_partial)
        divided = frozenset(stage for stage in range(self._program.num_stages) if self._level(stage) == 3)
        return partial(_completed, sums=sums, divided=divided)  # which must not keep the model

    def _level(self, stage: int) -> int:
        """Return how much of a stage's state the lines of the mesh divide: ZeRO 0, 1 or 3."""
        zero, num_stages = self._zero, self._program.num_stages
        if isinstance(zero, int):
            return zero
        if unknown := set(zero) - set(range(num_stages)):
            raise UsageError(
                f"zero names stage {min(unknown, key=str)!r}", expected=f"stages from 0 to {num_stages - 1}"
            )
        return zero.get(stage, 0)

    def parts(self, stages: Stages) -> Parts:
        """Return how to compare what this line has with the unsplit model, once all agree on the experts."""
        if self.axes.size("ep") > 1:
            self._experts = ExpertParallel(self.axes, [block for stage in stages for block in stage])
            self._agree({"experts": self._experts.described})
            # By this, lines decide alike whether pairs run in turns.
            self._agree({"weigh": self._weighs})
        has_parts = self.axes.size("tp", "ep", "cp") > 1
        return LineParts(self.axes, self._tensors, self._experts) if has_parts else Parts(self.axes)

    def divide(self, cut: ModelCut) -> None:
        """Replace the layers and experts of this process's stages by its parts of them."""
        own_blocks, others = (
            [block for at, stage in enumerate(cut.stages) if (at in self._held_stages) is mine for block in stage]
            for mine in (True, False)
        )
        if self._tensors is not None:
            self._tensors.divide(own_blocks, others, self._device)
        if self._experts is not None:
            self._experts.divide(own_blocks, self._device)
        self._have_changed(cut)

    def divide_copies(self, cut: ModelCut, copies: Mapping[nn.Module, nn.Module]) -> None:
        """Divide the copies, without memory, of modules that other ranks of the line hold, by the user's own."""
        for parallel in (self._tensors, self._experts):
            if parallel is not None:
                parallel.divide_copies(copies)
        self._have_changed(cut)

    def _have_changed(self, cut: ModelCut) -> None:
        """Let a traced model's watch know that hooks are exchanges, and no change of the user's."""
        plan = plan_of(block for stage in cut.stages for block in stage)
        if plan is not None and (self._tensors is not None or self._experts is not None):
            plan.watch.has_changed()

    def sums_of(self, parameters: Sequence[nn.Parameter]) -> Reducer | None:
        """Return what sums these parameters' gradients over lines, if any hold them."""
        return reducer_for(self.axes, parameters)

    def around(self) -> Sequence[Around]:
        """Return what lets attention see whole sequences, and what explains errors inside of divided layers."""
        around: list[Around] = [partial(whole_context, self.axes)] if self.axes.size("cp") > 1 else []
        return around if self._tensors is None else [*around, self._tensors.exchanges.explaining]

    def share(self, engine: Engine, holdings: Holdings, updates: Updates) -> None:
        """Give all lines the values of the first, then divide the state of which each keeps a part."""
        share_values(self.axes, holdings.tensors())
        levels = {stage.index: self._level(stage.index) for stage in engine.stages()}
        parameters = {stage.index: stage.all_parameters for stage in engine.stages()}
        if 3 in levels.values():
            # Tied ones stay whole: several stages use them, each at its own time.
            tied = [tensor for tensor in holdings.ties.tensors if len(tensor.names) > 1 or tensor.is_copied]
            shared = {name for tensor in tied for name in tensor.names}
            named = {id(param): name for name, param in holdings.named_parameters()}
            divided = {
                index: [param for param in each if param.dim() and named.get(id(param)) not in shared]
                for index, each in parameters.items()
                if levels[index] == 3
            }
            holdings.shards = FullShards(self.axes, divided)
            holdings.renew()
            engine.divide(holdings.shards)
            self._divides_parameters = True
        if any(self._level(stage) == 1 for stage in range(self._program.num_stages)):  # whose layers may come here
            updates.divided = StateShards(
                self.axes, [param for index, each in parameters.items() if levels[index] == 1 for param in each]
            )

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def placed(self, user_call: CalledWith) -> CalledWith | None:
        """Return what a step is called with, with the positions of whole sequences, if lines see parts of them."""
        return None if self.positions is None else CalledWith(*sequences.placed(*user_call, self.positions, self.axes))

    def losses(self, parts: Tensor, kinds: Iterable[torch.dtype]) -> Tensor:
        """Return the microbatches' parts of the loss, summed over all lines that see other tokens."""
        return summed_losses(self.axes, parts, kinds)

    def all_finite(self, finite: bool) -> bool:
        """Whether it holds on all lines that may hold other parts of the same parameters; these call it alike."""
        names = ["dp", "ep", "tp"] if self._divides_parameters else ["ep", "tp"]
        if self.axes.size(*names) == 1:
            return finite
        wrong = torch.tensor([0.0 if finite else 1.0], device=self._device)
        return not self.axes.summed(wrong, *names).item()


def _completed(program: Program, *, sums: bool, divided: frozenset[int]) -> Program:
    """Return a program with exchanges of gradients if lines sum them, and gathers of the stages that they divide."""
    if sums:
        program = with_state(program, frozenset({Op.REDUCE_GRAD}))
    return with_state(program, frozenset({Op.UNSHARD, Op.RESHARD}), divided, ahead=1) if divided else program


def summed_losses(axes: Axes, parts: Tensor, kinds: Iterable[torch.dtype]) -> Tensor:
    """Return the sums of the microbatches' parts of the loss over all lines that see other tokens.

    `kinds` are the dtypes of the losses that this line has, none if it counts no label. All lines call it alike: each
    sends float64 numbers, one of each microbatch, and flags that say which dtypes its losses have. The loss has the
    dtype that they have together::

        line 0   microbatches 0 and 1 count labels    0.7  0.2    float32  yes    bfloat16  no
        line 1   microbatch 1 counts none             0.1  0.0    float32  yes    bfloat16  no
        sum                                           0.8  0.2    2               0            a float32

    >>> value = Axes.single(num_ranks=1)
    >>> summed_losses(value, torch.tensor([0.5, 0.0]), [torch.bfloat16]).dtype
    torch.bfloat16
    """
    dtypes = set(kinds)
    if axes.group(*DATA) is None:
        return parts.to(widest(dtypes) or parts.dtype)
    flags = torch.tensor([float(dtype in dtypes) for dtype in _KINDS], dtype=torch.float64).to(parts.device)
    total = axes.summed(torch.cat([parts.to(torch.float64), flags]), *DATA)
    dtypes_told = [kind for kind, flag in zip(_KINDS, total[len(parts) :].tolist(), strict=True) if flag]
    return total[: len(parts)].to(widest(dtypes_told) or parts.dtype)
