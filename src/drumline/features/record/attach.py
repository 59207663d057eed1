"""How recording attaches to a pipeline."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from drumline.engine.built import Built
from drumline.engine.kit import Kit
from drumline.engine.ranks.tally import Ledger
from drumline.engine.setting import Cut, Setting
from drumline.engine.state.tensors import Holdings
from drumline.features.record.options import RecordOptions
from drumline.features.record.recording import Recording


def fit(kit: Kit, setting: Setting, options: RecordOptions) -> None:
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
    setting: Setting,
    cut: Cut,
    built: Built,
    ledger: Ledger,
    holdings: Holdings,
) -> Recording:
    """Return what records, after it has written what is known before the first step."""
    clocks = [one.clock for one in built.engine.executors]
    left, continues = holdings.has_gradients, options.continue_record
    recording = Recording(folder, setting.crew, ledger, left, clocks, continues=continues)
    recording.describe(setting.options.settings(), built.frozen.program, built.programs, built.assembled, cut.balance)
    return recording
