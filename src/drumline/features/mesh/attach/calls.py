"""What the lines of a mesh do with a step's arguments: each takes its part of them, and all compare the rest."""

from __future__ import annotations

from collections.abc import Callable

from drumline.channel.lines.grid import DATA
from drumline.engine.program.programs import digest_of
from drumline.engine.ranks.agreement import Given, begun
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.same_rows import agree_on_rows
from drumline.engine.site import Site
from drumline.features.mesh.attach.lines import MeshLines
from drumline.model.values import pack
from drumline.runtime.step import CalledWith, Step

_STEP, _EVALUATED, _KINDS = 100, 200, 1000  # the kinds of step on which lines agree


class LineCalls(Observer):
    """Refuses steps for which lines were called with what does not go together."""

    def __init__(self, site: Site, lines: MeshLines) -> None:
        self._site, self._lines, self._axes = site, lines, lines.axes
        self._whole: Callable[[], Given] | None = None  # fingerprint of the step's whole sequences

    def given(self, step: Step, call: CalledWith) -> CalledWith:
        """Return this line's part of a step's arguments."""
        if self._lines.positions is None:
            return call
        self._whole = begun((call.batch, call.named), call.target)
        return self._lines.divided(call)

    def compared(self, step: Step, given: Callable[[], Given]) -> None:
        """Raise where lines were called with what does not go together, before they exchange anything."""
        site, axes, device = self._site, self._axes, self._site.intake.device
        if axes.size("tp") > 1:
            agree_on_rows(axes, "tp", given(), step.number, device)
        if self._whole is not None:
            agree_on_rows(axes, "cp", self._whole(), step.number, device)
        own = site.programs.own == step.program
        if axes.size(*DATA) > 1 and "last" in site.engine.ends and not (step.train and own):
            kind = _STEP if step.train else _EVALUATED + min(len(pack(step.target)[0]), _STEP)
            number = 0 if own else int(digest_of(site.programs[step.program])[:4], 16)
            axes.agree_on_call(kind + _KINDS * number, device)
