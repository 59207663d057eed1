"""The lines of a mesh: what each has of a model and its batches, and what they exchange.

::

    set-up     the model is cut with whole sequences; layers, experts and state are divided; all get the same values
    a step     each line takes its part of every sequence; lines compare what they were called with; losses are summed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

import torch
from torch import Tensor, nn

from drumline.channel.lines.grid import DATA
from drumline.core.program import Program
from drumline.engine.lines import Lines, Stages
from drumline.engine.setting import Cut, Setting, agree
from drumline.engine.stages import assembly
from drumline.engine.stages.engine import Around, Engine
from drumline.engine.stages.intake import Intake
from drumline.engine.state.tensors import Holdings
from drumline.engine.unsplit.parts import Parts
from drumline.engine.updates.updates import Updates
from drumline.features.mesh import sequences
from drumline.features.mesh.attach.checked import LineParts
from drumline.features.mesh.attach.dividing import Dividing
from drumline.features.mesh.attach.options import MeshOptions
from drumline.features.mesh.context import whole_context
from drumline.features.mesh.experts.parallel import ExpertParallel
from drumline.features.mesh.losses import summed_losses
from drumline.features.mesh.reduce import Reducer, reducer_for, share_values
from drumline.features.mesh.tensor.layers import TensorParallel
from drumline.runtime.step import CalledWith


class MeshLines(Lines):
    """Several lines that train one model; see `Lines` for the order in which these are called."""

    def __init__(self, options: MeshOptions, setting: Setting) -> None:
        super().__init__(setting)
        self._device, self._agree = setting.device, partial(agree, setting.crew)
        self._weighs, self._divides_state = setting.options.weigh, bool(options.zero)
        self._dividing = Dividing.of(options, setting)
        self._divides_parameters = False  # between data-parallel lines
        self._tensors: TensorParallel | None = None
        self._experts: ExpertParallel | None = None
        has_parts = self.axes.size("cp") > 1
        self.positions = sequences.positions_of(setting.options.model) if has_parts else None

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
        self._tensors = self._dividing.tensors(stages)
        return self._dividing.completing(self._tensors)

    def parts(self, stages: Stages) -> Parts:
        """Return how to compare what this line has with the unsplit model, once all agree on the experts."""
        self._experts = self._dividing.experts(stages)
        if self._experts is not None:
            # By this, lines decide alike whether pairs run in turns.
            self._agree({"weigh": self._weighs})
        has_parts = self.axes.size("tp", "ep", "cp") > 1
        return LineParts(self.axes, self._tensors, self._experts) if has_parts else Parts(self.axes)

    def divide(self, cut: Cut) -> None:
        """Replace the layers and experts of this process's stages by its parts of them."""
        self._dividing.divide(cut.stages, self._tensors, self._experts)

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
        if self._divides_state:
            self._dividing.divide_state(engine, holdings, updates)
            self._divides_parameters = holdings.shards is not None

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def divided(self, call: CalledWith) -> CalledWith:
        """Return what a step is called with, with this line's part of every sequence."""
        return call if self.positions is None else CalledWith(*sequences.divided(*call, self.positions, self.axes))

    def placed(self, given: CalledWith) -> CalledWith | None:
        """Return what a step is called with, with the positions of whole sequences, if lines see parts of them."""
        return None if self.positions is None else CalledWith(*sequences.placed(*given, self.positions, self.axes))

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
