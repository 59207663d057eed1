"""How slices of sequences attach to a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from drumline.core.slices.division import SliceLengths
from drumline.engine.kit import Kit
from drumline.engine.lines import Lines
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport
from drumline.engine.setup import PipelineSetup
from drumline.engine.site import Site
from drumline.engine.together import AUTO
from drumline.features.slices.calls import SliceCalls
from drumline.features.slices.following import follow
from drumline.features.slices.on_demand import SlicedIntake, SlicesOnDemand
from drumline.features.slices.options import SliceOptions
from drumline.features.slices.units import BY_SLICES, in_one_piece, in_sequences, in_units
from drumline.runtime.sequences import Takes, positions_of, without_packing
from drumline.runtime.step import CalledWith, Step


def is_open(setting: PipelineSetup, options: SliceOptions) -> bool:
    """Whether measured steps decide if there are slices."""
    return setting.options.schedule == AUTO and options.division.num_slices == 1


def fit(kit: Kit, setting: PipelineSetup, options: SliceOptions) -> None:
    """Have sequences divided, if the user asks for it."""
    if options.division.num_slices > 1:
        kit.lines = partial(_with_sequences, kit.lines)
        kit.intake = type("EverSlicedIntake", (SlicedIntake,), {"num_slices": options.division.num_slices})
    elif is_open(setting, options):
        kit.intake = SlicedIntake


def _with_sequences(make: Callable[[PipelineSetup], Lines], setting: PipelineSetup) -> Lines:
    """Return the lines of a pipeline, which know whole sequences.

    While its model is traced, positions do not mean packed documents.
    """
    lines = make(setting)
    around = lines.around
    lines.placed = partial(in_one_piece, takes=positions_of(setting.options.model, BY_SLICES))  # type: ignore[method-assign]
    lines.whole = without_packing  # type: ignore[method-assign]
    lines.around = lambda: [without_packing, *around()]  # type: ignore[method-assign]
    return lines


def attach(site: Site, setting: PipelineSetup, options: SliceOptions) -> Observer | None:
    """Return what divides the sequences of every step, if the user asks for it, or what may once they are measured."""
    if is_open(setting, options):
        return SlicesOnDemand(site, setting.options.model, setting.program)
    if options.division.num_slices == 1:
        return None
    return Slices(site, options.division, positions_of(setting.options.model, BY_SLICES))


class Slices(Observer):
    """Divides the sequences of every step, and lets stages know which slice they run."""

    order = -1  # what else takes a call, takes units

    def __init__(self, site: Site, division: SliceLengths, takes: Takes) -> None:
        self._site, self._division, self._takes = site, division, takes
        self._calls = SliceCalls(division)
        site.engine.assembly.randomness.alike = division.num_slices
        for stage in site.engine.stages():
            follow(stage, self._calls)

    def take_call(self, step: Step, call: CalledWith) -> CalledWith:
        """Return a step's arguments in units."""
        units = in_units(call, self._takes, self._division, self._site.frozen.program.num_microbatches)
        self._calls.begin(units)
        return units

    def tell(self, step: Step, each: Sequence[RankReport]) -> None:
        """Return whole sequences of the last stage's output."""
        if step.outputs:
            step.outputs, step.is_split = {0: in_sequences(step, self._division.num_slices)}, False

    def end(self, step: Step) -> None:
        """Forget the step's sequences."""
        self._calls.clear()
