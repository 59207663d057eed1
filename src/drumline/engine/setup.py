"""What all parts of the set-up are made from: the options, where this rank computes, the ranks, and the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from drumline.channel.lines.axes import Axes
from drumline.core.program import Program
from drumline.core.settings.clash import Together
from drumline.engine.core_options import CoreOptions
from drumline.engine.ranks import transports
from drumline.engine.ranks.crew import Crew
from drumline.engine.stages.balance import Balance
from drumline.engine.stages.intake import Intake
from drumline.model.block import Block
from drumline.model.precision import Precision
from drumline.plan.device.blocks import Profile


@dataclass(frozen=True, slots=True)
class PipelineSetup:
    """A pipeline that is being set up, on this process; the ranks are connected."""

    options: CoreOptions
    device: torch.device
    crew: Crew
    program: Program
    together: Together
    balance: Balance | None = None  # the cut, if blocks were timed to choose the program

    @property
    def axes(self) -> Axes:
        """This process's place in the mesh."""
        return self.crew.axes

    @property
    def held_stages(self) -> list[int]:
        """The stages of this process."""
        placement = self.program.placement
        return sorted({at for channel in self.crew.channels for at in placement.stages_of(channel.rank)})

    def agree(self, described: dict[str, Any]) -> None:
        """Raise the same error on all ranks unless all got the same settings."""
        agree(self.crew, described)


def agree(crew: Crew, described: dict[str, Any]) -> None:
    """Raise the same error on all ranks of all lines unless all describe the same."""
    transports.agree(crew.collect("set-up", described), crew.naming)
    crew.axes.agree(described)


@dataclass(frozen=True, slots=True)
class ModelCut:
    """The model as blocks of stages, and what splits and counts its batches."""

    intake: Intake
    numbers: Precision
    values: dict[str, bytes]  # digests of the model's values as given, if ranks must agree on them
    stages: list[tuple[Block, ...]]
    balance: Balance | None
    profile: Profile | None

    @property
    def blocks(self) -> list[Block]:
        """The blocks of all stages."""
        return [block for stage in self.stages for block in stage]
