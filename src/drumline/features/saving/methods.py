"""`save` and `load` of a pipeline."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, overload

from drumline.checkpoint.extra_files import Maker
from drumline.checkpoint.saves import Loaded, Saving
from drumline.engine.site import Methods
from drumline.engine.state.keeper import Keeper
from drumline.features.saving.state import State


class SavingMethods(Methods):
    """Checkpoints of all that training needs to continue."""

    @cached_property
    def _state(self) -> State:
        return State(self._site, [observer for observer in self._site.observers.each if isinstance(observer, Keeper)])

    def _finish(self, most_seconds: float | None) -> None:
        super()._finish(most_seconds)
        self._state.finish(most_seconds)

    def save(
        self,
        folder: str | Path,
        *,
        step: int | None = None,
        extra: Any = None,
        keep: int | None = None,
        files: Mapping[str, str | bytes | Path | Maker] | None = None,
        only: Collection[str] | None = None,
        wait: bool = False,
    ) -> Saving:
        """Save everything that training needs to continue, as a checkpoint in `folder`; call it on every rank.

        It returns as soon as the state is copied aside; a thread writes it while training continues, and the checkpoint
        appears once every rank has written its part. `wait`, or `.wait()` of what is returned, waits for that.
        `extra` is data of your own, such as the position in the data: numbers, texts, bytes, tensors and arrays, in
        lists, tuples, sets and dicts. `files` are further files to store in the checkpoint, by name: their text or
        bytes, a path to copy from, or a function that writes the file. The function gets the folder of the checkpoint,
        which has all ranks' tensors, and the file. `only` names the parameters and buffers to store, such as those of
        an adapter; `load` then leaves all others as they are. `keep` is how many whole checkpoints of this run stay,
        this one included; older ones are removed, and then damaged ones and those that a rewind has left.

        >>> import tempfile
        >>> from torch import nn
        >>> import drumline as dl
        >>> with dl.Pipeline([nn.Linear(1, 1)], loss_fn=nn.functional.mse_loss, num_microbatches=1) as pipe:
        ...     saving = pipe.save(tempfile.mkdtemp(), extra={"epoch": 3}, wait=True)
        ...     loaded = pipe.load(saving.path)
        >>> saving.path.name, loaded.extra
        ('step-00000000', {'epoch': 3})
        """
        saving = self._state.save(folder, step, extra, keep, files, only)
        if wait:
            saving.wait()
        return saving

    @overload
    def load(self, folder: str | Path, *, optimizers: bool = True) -> Loaded: ...

    @overload
    def load(self, folder: str | Path, *, optimizers: bool = True, missing_ok: bool) -> Loaded | None: ...

    def load(self, folder: str | Path, *, optimizers: bool = True, missing_ok: bool = False) -> Loaded | None:
        """Continue from the newest whole checkpoint of a folder's run, or from the one given; call it on every rank.

        Parameters, buffers, optimizer state, float32 copies, the loss scale, random generators and the step's number
        come back bit for bit. Schedule, cut and number of ranks may differ from those that saved. Make the optimizers
        first; `optimizers=False` loads the model alone. A damaged checkpoint is passed over with a warning. If training
        continued from an earlier checkpoint before, later steps of the line that was left are not the newest. With
        `missing_ok`, a folder without checkpoints returns None. Steps that the run folder has recorded beyond the
        checkpoint are cut off: they will run again.
        """
        return self._state.load(folder, optimizers=optimizers, missing_ok=missing_ok)
