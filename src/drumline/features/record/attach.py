"""How recording attaches to a pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from drumline.engine.kit import Kit
from drumline.engine.program.programs import Programs
from drumline.engine.ranks.tally import TallyLedger
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.state.tensors import Holdings
from drumline.features.record.options import RecordOptions
from drumline.features.record.recording import Recording


def fit(kit: Kit, setting: PipelineSetup, options: RecordOptions) -> None:
    """Have steps measured and noted, unless the user does not want that.

    Line 0 of a mesh writes the folder of a run, and the others keep their last step.
    """
    if options.record is not False:
        folder = options.folder if setting.axes.number == 0 else None
        kit.measures, kit.weighs_first = True, folder is not None
        kit.journal = partial(_recording, options, folder)


def _recording(
    options: RecordOptions,
    folder: str | Path | None,
    setting: PipelineSetup,
    cut: ModelCut,
    programs: Programs,
    ledger: TallyLedger,
    holdings: Holdings,
) -> Recording:
    """Return what records, after it has written what is known before the first step."""
    clocks = [executor.clock for executor in holdings.executors]
    left, continues = holdings.has_gradients, options.continue_record
    recording = Recording(folder, setting.crew, ledger, left, clocks, continues=continues)
    recording.describe(setting, cut, programs)
    return recording
