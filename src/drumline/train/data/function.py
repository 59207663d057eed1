"""Data that a user's `build_data` gives: a Data, (training, validation), or anything that can be gone through again.

What it yields is a `Batch`, or (inputs, target). Loaders that can say where they are, such as torchdata's
StatefulDataLoader, are asked; of others the batches of the epoch are counted, and passed over to go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Tensor

from drumline.core.errors import UsageError
from drumline.train.config.settings import TrainSettings
from drumline.train.data.batch import Batch, Data, Stream
from drumline.train.models.built import IGNORED, Built
from drumline.train.models.function import called, named_function, users_code

_FORMS = "a Data, (training, validation), or batches that can be gone through again: a list, a DataLoader"


def data_by_function(settings: TrainSettings, built: Built, *, rank: int, size: int) -> Data:
    """Return what the user's function makes, called with those of settings, built, rank, size, seed that it takes."""
    name = settings.data.function
    seed = settings.run.seed if settings.data.seed is None else settings.data.seed
    offered = {
        "settings": settings,
        "built": built,
        "tokenizer": built.tokenizer,
        "rank": rank,
        "size": size,
        "seed": seed,
    }
    function = named_function(name, key="data.function")
    with users_code(name):
        made = called(function, offered, settings.data.arguments, key="data")
    if isinstance(made, Data):
        return made
    pair = isinstance(made, tuple) and len(made) == 2 and not isinstance(made[0], Tensor)
    training, held = made if pair else (made, ())
    if not isinstance(training, Iterable) or isinstance(training, Iterator):
        raise UsageError(f"{name} returned a {type(training).__name__}", expected=_FORMS)
    batches = islice(held, settings.evaluation.batches if settings.evaluation.every else 0)
    validation = tuple(_batch(one, built, name) for one in batches)
    return Data(RepeatedStream(training, built, name), validation, num_tokens=0)


class RepeatedStream(Stream):
    """Batches of something that is gone through again in every epoch."""

    def __init__(self, source: Any, built: Built, name: str) -> None:
        self.source, self.built, self.name = source, built, name
        self.epoch = self.batches = 0
        self._skip = 0
        self._own = hasattr(source, "state_dict") and hasattr(source, "load_state_dict")

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if hasattr(self.source, "set_epoch"):
                self.source.set_epoch(self.epoch)
            some = False
            for one in islice(iter(self.source), self._skip, None):
                self._skip, some = 0, True
                self.batches += 1
                yield _batch(one, self.built, self.name)
            if not some and not self.batches:
                raise UsageError(f"{self.name} gives no batch", expected=_FORMS)
            self.epoch, self.batches, self._skip = self.epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and batch, and what the source itself says."""
        own = self.source.state_dict() if self._own else None
        return {"epoch": self.epoch, "batches": self.batches, "source": own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.epoch, self.batches = state["epoch"], state["batches"]
        self._skip = 0 if self._own else self.batches
        if self._own:
            self.source.load_state_dict(state["source"])


def _batch(one: Any, built: Built, name: str) -> Batch:
    if isinstance(one, Batch):
        return one
    if not isinstance(one, tuple | list) or len(one) != 2:
        raise UsageError(f"{name} gave a {type(one).__name__}", expected="Batch or (inputs, target)")
    inputs, target = one
    named = dict(inputs) if isinstance(inputs, dict) else {built.inputs: inputs}
    counted = padded = 0
    if isinstance(target, Tensor):
        padded = target.numel() if not target.is_floating_point() else len(target)
        counted = int((target != IGNORED).sum()) if not target.is_floating_point() else len(target)
    return Batch(named, target, num_tokens=counted, num_padded=padded)
