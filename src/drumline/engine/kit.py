"""What a pipeline is put together from: plain parts, unless a feature puts its own in their places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drumline.engine.flow import Flow
from drumline.engine.ground import Ground
from drumline.engine.lines import Lines
from drumline.engine.no_check import NoCheck
from drumline.engine.program.programs import Programs
from drumline.engine.ranks.journal import Journal
from drumline.engine.ranks.tally import TallyLedger
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.stages.engine import Engine
from drumline.engine.stages.intake import Intake
from drumline.engine.state.tensors import Holdings
from drumline.engine.unsplit.parts import Parts
from drumline.model.weights.tied import Ties
from drumline.runtime.execute.executor import Executor


def _flushed(setting: PipelineSetup, ground: Ground) -> Flow:
    return Flow(ground, check_finite=setting.options.check_finite or ground.updates.precision.scales)


def _unwritten(
    setting: PipelineSetup, cut: ModelCut, programs: Programs, ledger: TallyLedger, holdings: Holdings
) -> Journal:
    return Journal(ledger, holdings.has_gradients)


@dataclass
class Kit:
    """The parts of a pipeline, or what makes them; the set-up takes each from here.

    >>> Kit().engine.__name__, Kit(measures=True).measures
    ('Engine', True)
    """

    intake: type[Intake] = Intake  # splits batches
    engine: type[Engine] = Engine  # runs the programs of this process's ranks
    executor: type[Executor] = Executor  # runs a rank's row
    lines: Callable[[PipelineSetup], Lines] = Lines
    check: Callable[[PipelineSetup, ModelCut, Parts, tuple[int, int, str] | None], NoCheck] = NoCheck
    journal: Callable[[PipelineSetup, ModelCut, Programs, TallyLedger, Holdings], Journal] = _unwritten
    flow: Callable[[PipelineSetup, Ground], Flow] = _flushed
    # Refuses tied tensors, before ranks have them.
    admit: Callable[[PipelineSetup, Ties], None] = lambda setting, ties: None
    measures: bool = False  # whether steps are measured
    weighs_first: bool = False  # whether the bytes of the first step are counted
    times_blocks: bool = False  # whether blocks are timed although the cut is given
