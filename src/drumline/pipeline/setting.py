"""What all parts of the set-up are made from: the options, where this rank computes, the ranks, and the program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drumline.channel.lines.axes import Axes
from drumline.core.program import Program
from drumline.engine.ranks import transports
from drumline.engine.ranks.crew import Crew
from drumline.pipeline.options import Options


@dataclass(frozen=True, slots=True)
class Setting:
    """A pipeline that is being set up, on this process; the ranks are connected."""

    options: Options
    device: torch.device
    crew: Crew
    program: Program

    @property
    def axes(self) -> Axes:
        """This process's place in the mesh."""
        return self.crew.axes

    @property
    def held(self) -> list[int]:
        """The stages of this process."""
        placement = self.program.placement
        return sorted({at for channel in self.crew.channels for at in placement.stages_of(channel.rank)})

    @property
    def schedule(self) -> str:
        """The name of the schedule, which one without a flush has."""
        assert isinstance(self.options.schedule, str)
        return self.options.schedule

    @property
    def record(self) -> bool | str | Path:
        """What to record here; line 0 writes the folder of a run, and the others keep their last step."""
        given = self.options.record
        return given if isinstance(given, bool) or self.axes.number == 0 else True

    def agree(self, described: dict[str, Any]) -> None:
        """Raise the same error on all ranks unless all got the same settings."""
        transports.agree(self.crew.collect("set-up", described), self.crew.called)
        self.axes.agree(described)
