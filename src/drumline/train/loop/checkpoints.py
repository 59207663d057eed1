"""A run's checkpoints: saved in its folder while it trains, and the point from which another run continues.

    FOLDER/checkpoints/step-00000100/    see checkpoint/folder.py

Beside what `pipe.save` keeps, a checkpoint has the position in the data and the tokens so far. A learning rate is a
function of the step. So a run that continues takes the same batches at the same rates as one that never stopped. Every
checkpoint of a Hugging Face model has its configuration and tokenizer too, so that transformers loads it. With an
adapter it has the adapter alone, as PEFT saves it, and the tokenizer.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from drumline.checkpoint.extra_files import Maker
from drumline.checkpoint.folder import checkpoints
from drumline.checkpoint.saves import Saving, saves
from drumline.core.errors import RecordError, RunError, UsageError
from drumline.pipeline.pipeline import Pipeline
from drumline.train.config.settings import TrainSettings
from drumline.train.data.items.batch import Data
from drumline.train.data.position import own_position, position_of
from drumline.train.models.built import Adapter
from drumline.train.models.companion_files import files_beside
from drumline.train.tune.adapter_files import adapter_files
from drumline.train.tune.same_adapter import check_base, check_same

FOLDER = "checkpoints"


def found_in(resume: str) -> Path:
    """Return the folder of checkpoints that `checkpoint.resume` names.

    >>> found_in("no-such-run")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: checkpoint.resume: no-such-run holds no checkpoint; expected the folder of ...
    """
    if path := checkpoints_of(resume):
        return path
    raise UsageError(
        f"checkpoint.resume: {resume} holds no checkpoint",
        expected="the folder of a run that saved some, or of one checkpoint",
        fix="leave it out to start a new run; --continue restarts a run that stopped before its first checkpoint",
    )


def checkpoints_of(run: str | Path) -> Path | None:
    """Return the folder of checkpoints of a run, of such a folder, or of one checkpoint; None if it has none."""
    return next((path for path in (Path(run), Path(run) / FOLDER) if checkpoints(path)), None)


def check_resumed(settings: TrainSettings, adapter: Adapter | None, *, continues: bool) -> None:
    """Refuse to go on with another adapter or base than the newest checkpoint's, before anything is written."""
    own_folder = checkpoints_of(Path(settings.folder) / FOLDER) if continues else None
    folder = own_folder or (checkpoints_of(settings.checkpoint.resume) if settings.checkpoint.resume else None)
    if folder is not None:
        newest = checkpoints(folder)[0]
        check_same(adapter, newest)
        check_base(settings, newest)


class Checkpoints:
    """Saves a run, and brings one back."""

    def __init__(
        self,
        pipe: Pipeline,
        settings: TrainSettings,
        data: Data,
        folder: Path,
        *,
        adapter: Adapter | None = None,
        continues: bool = False,
    ) -> None:
        self._pipe, self._settings, self._data, self._continues = pipe, settings, data, continues
        self._saves = saves(pipe)
        self._folder = folder / FOLDER
        self._last: Saving | None = None
        self._only = None if adapter is None else frozenset(adapter.names)
        self._beside: dict[str, str | bytes | Path | Maker] = {}
        if pipe.rank == pipe.axes.number == 0:
            self._beside |= files_beside(settings)
            self._beside |= {} if adapter is None else adapter_files(adapter)

    def resume(self) -> dict[str, Any]:
        """Continue from the run's own newest checkpoint, else from the one that the settings name, else at step 0.

        Returns the step it was saved after, and the counts.
        """
        resume = self._settings.checkpoint.resume
        loaded = self._saves.load(self._folder, missing_ok=True) if self._continues else None
        if loaded is None and resume and checkpoints_of(resume):
            loaded = self._saves.load(found_in(resume), missing_ok=False)
        if loaded is None:
            return {"step": 0}
        extra = loaded.extra
        if not isinstance(extra, dict) or "data" not in extra:
            raise UsageError(
                f"checkpoint.resume: {loaded.path} has no position in the data",
                expected="a checkpoint of drumline train",
                fix="load it with pipe.load in a loop of your own",
            )
        self._data.training.load_state_dict(own_position(extra["data"], *self._pipe.axes.rows))
        return {**extra, "step": loaded.step}

    def is_due(self, step: int) -> bool:
        """Whether it is time to save after a step."""
        settings, is_last = self._settings.checkpoint, step == self._settings.run.steps
        return bool(settings.every and step % settings.every == 0) or (is_last and settings.at_end)

    def after(self, step: int, counts: dict[str, Any]) -> None:
        """Save after a step, if it is time; all ranks call it alike."""
        is_last = step == self._settings.run.steps
        if self.is_due(step):
            self._save(step, counts, is_last=is_last)
        if is_last and self._last is not None:
            self._last.wait()

    def now(self, step: int, counts: dict[str, Any]) -> Path:
        """Save after a step at which the run stops, unless it was saved by then; returns the whole checkpoint."""
        if self._last is None or self._last.step != step or self._last.error is not None:
            self._save(step, counts, is_last=True)
        assert self._last is not None
        return self._last.wait()

    @property
    def newest(self) -> str:
        """The folder of the newest checkpoint that this run has begun, if any."""
        return "" if self._last is None else str(self._last.path)

    def _save(self, step: int, counts: dict[str, Any], *, is_last: bool) -> None:
        """Begin a checkpoint; where it cannot begin, continue without unless it is the last."""
        self._look()
        extra = {**counts, "data": position_of(self._data.training, self._pipe)}
        keep = self._settings.checkpoint.keep
        try:
            how: dict[str, Any] = {"keep": keep, "files": self._beside, "only": self._only}
            self._last = self._saves.save(self._folder, step=step, extra=extra, **how)
        except RecordError as error:
            if is_last:
                raise RunError(error.error, expected=error.expected, fix=error.fix) from error
            self._warn(error)

    def _look(self) -> None:
        """Warn of a checkpoint that could not be written."""
        if self._last is not None and self._last.done and self._last.error is not None:
            self._warn(self._last.error)

    def _warn(self, error: BaseException) -> None:
        if self._pipe.rank == self._pipe.axes.number == 0:
            logging.getLogger("drumline").warning("training continues without a checkpoint: %s", error)
