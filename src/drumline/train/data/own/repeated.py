"""Data that are gone through again in every epoch, and continue exactly where a run stopped.

    count    at the start of an epoch the state of all random numbers is kept; to continue, the epoch begins from it
             again, and the batches that were used are read and passed over
    state    data that have `state_dict` and `load_state_dict` are asked; the random numbers are as they were, too

A digest of all batches of the epoch goes with the position. Batches that are passed over must have the same: so data
that have changed since, or that draw from somewhere else, are noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from drumline.core.errors import UsageError
from drumline.train.data.items.batch import Batch, BatchStream
from drumline.train.data.own.digests import joined
from drumline.train.data.own.draws import Draws
from drumline.train.models.built import IGNORED, Built

FORMS = "a Data, (training, validation), or batches that can be gone through again: a list, a DataLoader"
_STATE = 2
END = object()


class DataSource:
    """What a user's function gave to be gone through, with the random numbers that it draws."""

    def __init__(self, batches: Any) -> None:
        self.batches, self.draws = batches, Draws(batches)
        self.has_state = all(callable(getattr(batches, name, None)) for name in ("state_dict", "load_state_dict"))
        self._batches: Iterator[Any] | None = None

    def begin(self, epoch: int) -> None:
        """Begin an epoch; what has to know its number is told."""
        self.close()
        with self.draws.running():
            for part in _parts(self.batches):
                if callable(getattr(part, "set_epoch", None)):
                    part.set_epoch(epoch)
            self._batches = iter(self.batches)

    def next(self) -> Any:
        """Return the next batch, or END."""
        assert self._batches is not None
        with self.draws.running():
            return next(self._batches, END)

    def state(self) -> Any:
        """Return where the data say they are."""
        with self.draws.running():
            return self.batches.state_dict()

    def load(self, state: Any) -> None:
        """Let the data continue from where they said."""
        self.close()
        with self.draws.running():
            self.batches.load_state_dict(state)

    def close(self) -> None:
        """Let go of the epoch under way, with processes that read for it."""
        self._batches = None
        if not self.has_state and getattr(self.batches, "persistent_workers", False):
            # Workers that live on would draw on: a run that continues could not bring them to the same point.
            self.batches._iterator = None


def _parts(batches: Any) -> Iterator[Any]:
    """Yield a loader, its sampler, its batch sampler, the sampler of that, and the data set, each once."""
    seen_parts: list[Any] = []
    batch_sampler = getattr(batches, "batch_sampler", None)
    sampler = getattr(batch_sampler, "sampler", None)
    for part in (batches, getattr(batches, "sampler", None), batch_sampler, sampler, getattr(batches, "dataset", None)):
        if part is not None and not any(part is other for other in seen_parts):
            seen_parts.append(part)
            yield part


class RepeatedStream(BatchStream):
    """Batches of something that is gone through again in every epoch."""

    def __init__(self, source: DataSource, built: Built, name: str, *, exact: bool = True) -> None:
        self.source, self.built, self.name, self.exact = source, built, name, exact
        self.epoch = self.batches = 0
        self._begun = source.draws.state()  # of the random numbers, at the start of the epoch
        self._digest = ""  # digest of the epoch's batches so far
        self._saved: dict[str, Any] | None = None  # the position from which to continue

    def __iter__(self) -> Iterator[Batch]:
        while True:
            saved, self._saved = self._saved, None
            if saved is None:
                self.batches, self._digest, self._begun = 0, "", self.source.draws.state()
                self.source.begin(self.epoch)
            else:
                self._go_on(saved)
            while (item := self.source.next()) is not END:
                self.batches += 1
                self._digest = joined(self._digest, item)
                yield batch_of(item, self.built, self.name)
            if not self.batches:
                raise UsageError(f"{self.name} gives no batch", expected=FORMS)
            self.epoch += 1

    def _go_on(self, saved: dict[str, Any]) -> None:
        """Begin the epoch of a position as it began before, and pass over what was used."""
        source = self.source
        self.epoch, self.batches, self._begun = saved["epoch"], saved["batches"], saved["begun"]
        source.draws.restore(self._begun)
        if source.has_state:
            source.load(saved["source"])
            source.draws.restore(self._begun)
            source.begin(self.epoch)
            if self.batches:
                source.draws.restore(saved["now"])
            self._digest = saved["seen"]
            return
        source.begin(self.epoch)
        self._digest = ""
        for at in range(self.batches):
            if (item := source.next()) is END:
                self._refuse(f"{self.name} gives {at} batches in an epoch of which {self.batches} were used")
                break
            self._digest = joined(self._digest, item)
        if self._digest != saved["seen"]:
            self._refuse(f"{self.name} gives other batches than those that this run was trained on")

    def _refuse(self, what: str) -> None:
        """Refuse data that do not continue exactly, or only warn if that is allowed."""
        error = UsageError(
            what,
            expected="the same data, in the same order, from the same seeds",
            fix="bring back what was changed, or set data.exact = false to continue all the same",
        )
        if self.exact:
            raise error
        logging.getLogger("drumline").warning("%s", error)

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and batch, random numbers at the start of the epoch, and what the source itself says."""
        if self._saved is not None:
            return self._saved
        own_state = self.source.state() if self.source.has_state else None
        now = self.source.draws.state() if self.source.has_state else None
        place = {"epoch": self.epoch, "batches": self.batches, "seen": self._digest}
        return {"version": _STATE, **place, "begun": self._begun, "now": now, "source": own_state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position, with the next batch that is asked for."""
        if state.get("version") != _STATE:
            raise UsageError(
                f"the position in the data of {self.name} was saved by another version of Drumline",
                expected=f"version {_STATE}, which keeps random numbers too",
                fix="continue with the version that saved it",
            )
        if (state["source"] is not None) != self.source.has_state:
            which = "with" if self.source.has_state else "without"
            raise UsageError(f"{self.name} gives data {which} their own state_dict", expected="the same as before")
        self._saved = state

    def close(self) -> None:
        """End processes that read ahead."""
        self.source.close()


def batch_of(pair: Any, built: Built, name: str) -> Batch:
    """Return what the user's data yield as a batch."""
    if isinstance(pair, Batch):
        return pair
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise UsageError(f"{name} gave a {type(pair).__name__}", expected="Batch or (inputs, target)")
    inputs, target = pair
    named = dict(inputs) if isinstance(inputs, dict) else {built.inputs: inputs}
    counted = padded = 0
    if isinstance(target, Tensor):
        rows = len(target) if target.dim() else 1
        padded = rows if target.is_floating_point() else target.numel()
        counted = rows if target.is_floating_point() else int((target != IGNORED).sum())
    return Batch(named, target, num_tokens=counted, num_padded=padded)
