"""What a line has of a model and its batches, if several lines train it side by side: here, all of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce

import torch
from torch import Tensor, nn

from drumline.core.program import Program
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.stages.engine import Around, Engine
from drumline.engine.stages.intake import Intake
from drumline.engine.state.tensors import Holdings
from drumline.engine.unsplit.parts import Parts
from drumline.engine.updates.updates import Updates
from drumline.model.block import Block
from drumline.runtime.gradients.lines import Sums
from drumline.runtime.step import CalledWith

Stages = Sequence[Sequence[Block]]


class Lines:
    """A line that is alone: it has the whole model, and sees every row; a subclass divides these between lines.

    Methods are listed in the order in which a pipeline's set-up calls them, alike on all ranks. What lives as long as
    the pipeline does not keep the setting, which holds the whole model.
    """

    def __init__(self, setting: PipelineSetup) -> None:
        self.axes = setting.axes

    def whole(self) -> AbstractContextManager[None]:
        """Have blocks see whole sequences inside, while the model is cut."""
        return nullcontext()

    def cut(self, intake: Intake, stages: Stages) -> None:
        """Take note of the model in stages, and of what counts its batches."""

    def completing(self, stages: Stages) -> Callable[[Program], Program]:
        """Return what adds the actions on parameters and gradients that lines need to a program."""
        return _as_it_is

    def parts(self, stages: Stages) -> Parts:
        """Return how to compare what this line has with the unsplit model."""
        return Parts(self.axes)

    def divide(self, cut: ModelCut) -> None:
        """Replace the parameters of this process's stages by its parts of them."""

    def divide_copies(self, cut: ModelCut, copies: Mapping[nn.Module, nn.Module]) -> None:
        """Divide the copies, without memory, of modules that other ranks of the line hold, by the user's own."""

    def sums_of(self, parameters: Sequence[nn.Parameter]) -> Sums | None:
        """Return what sums these parameters' gradients over lines, if any do."""
        return None

    def around(self) -> Sequence[Around]:
        """Return what is around the rows of a step."""
        return ()

    def share(self, engine: Engine, holdings: Holdings, updates: Updates) -> None:
        """Give all lines the same values, then divide the state of which each line keeps a part."""

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def placed(self, user_call: CalledWith) -> CalledWith | None:
        """Return what a step is called with, with whole sequences, if lines see parts of them."""
        return None

    def losses(self, parts: Tensor, kinds: Iterable[torch.dtype]) -> Tensor:
        """Return the microbatches' parts of the loss over all lines; `kinds` are the dtypes of those that count."""
        return parts.to(widest(kinds) or parts.dtype)

    def all_finite(self, finite: bool) -> bool:
        """Whether it holds on all lines that may hold other parts of the same parameters."""
        return finite


def _as_it_is(program: Program) -> Program:
    return program


def widest(kinds: Iterable[torch.dtype]) -> torch.dtype | None:
    """Return the dtype that holds what all of these hold, None of none.

    >>> widest([torch.bfloat16, torch.float16])
    torch.float32
    """
    listed = list(kinds)
    return reduce(torch.promote_types, listed) if listed else None
