"""Batches without end: in an order that seed and epoch decide, from any position, read ahead by a thread or processes.

    epoch 0                            epoch 1
    ├─ window 0 ─┤├─ window 1 ─┤...    ├─ window 0 ─┤...      a window is shuffled samples, made into units
    │u u u u u u││u u u u u u u│       │u u u u u u │         a step takes the next so many units, on all ranks the same
    └─ step 0 ─┘└─ step 1 ─┘...                               a rank fills its share of them

A position is (epoch, window, unit) and what is carried; it stays the same however much is read ahead.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from drumline.core.errors import UsageError
from drumline.train.data.fill import Fill
from drumline.train.data.items.batch import Batch
from drumline.train.data.items.fingerprint import Part, changed
from drumline.train.data.items.fingerprint import fingerprint as taken
from drumline.train.data.items.order import Indices, Shuffle
from drumline.train.data.layouts import RowLayout, Unit

_AHEAD = 2
_STATE = 1


@dataclass(frozen=True, slots=True)
class Position:
    """Where a stream is: the next unit, and the samples carried into its window."""

    epoch: int = 0
    window: int = 0
    unit: int = 0
    carried: tuple[int, ...] = ()


class Steps:
    """The units of every step from a position on."""

    def __init__(self, layout: RowLayout, *, seed: int, shuffle: bool = True) -> None:
        self.layout, self.seed, self.shuffle = layout, seed, shuffle
        self._last_window: tuple[Any, list[Unit], Indices] | None = None

    def step(self, at: Position) -> tuple[list[Unit], Position]:
        """Return the units of the step at a position, and the position behind it."""
        taken: list[Unit] = []
        while True:
            units, carried = self._window(at)
            more = units[at.unit : at.unit + self.layout.per_step - len(taken)]
            taken += more
            at = Position(at.epoch, at.window, at.unit + len(more), at.carried)
            if len(taken) == self.layout.per_step:
                return taken, at
            ends = (at.window + 1) * self.layout.window >= self.layout.samples.num
            at = Position(at.epoch + ends, 0 if ends else at.window + 1, 0, tuple(carried.tolist()))

    def _window(self, at: Position) -> tuple[list[Unit], Indices]:
        key = (at.epoch, at.window, at.carried)
        if self._last_window is None or self._last_window[0] != key:
            size, num = self.layout.window, self.layout.samples.num
            start, stop = at.window * size, min((at.window + 1) * size, num)
            samples = np.arange(start, stop, dtype=np.int64)
            if self.shuffle:
                samples = Shuffle(num, key=(self.seed, at.epoch)).at(start, stop)
            samples = np.concatenate([np.array(at.carried, dtype=np.int64), samples])
            units, carried = self.layout.units(samples, last=stop == num)
            if self.shuffle and len(units) > 1:
                order = Shuffle(len(units), key=(self.seed, at.epoch, at.window)).at(0, len(units))
                units = [units[number] for number in order]
            self._last_window = (key, units, carried)
        return self._last_window[1], self._last_window[2]


class PlannedStream:
    """The batches of one data-parallel rank; see `Stream`."""

    is_alike = True  # its position is the same on every rank

    def __init__(
        self,
        steps: Steps,
        fill: Fill,
        *,
        rank: int = 0,
        workers: int = 0,
        contents: Sequence[Part] = (),
        fingerprint: str = "sampled",
    ) -> None:
        self.steps, self.fill, self.rank, self.workers = steps, fill, rank, workers
        self._contents = contents
        self._fingerprint = taken(contents, fingerprint)  # now: files may change while they are trained on
        self._at = Position()
        self._open: list[Iterator[Any]] = []

    def __iter__(self) -> Iterator[Batch]:
        self.close()
        ahead = _by_processes(self) if self.workers else _by_thread(self)
        self._open.append(ahead)
        try:
            for batch, at in ahead:
                self._at = at
                yield batch
        finally:
            ahead.close()

    def close(self) -> None:
        """End what reads ahead."""
        while self._open:
            reader: Any = self._open.pop()
            reader.close()

    def plans(self) -> Iterator[tuple[list[list[Unit]], Position]]:
        """Yield what this rank fills in every step, and the position behind it."""
        at = self._at
        while True:
            units, at = self.steps.step(at)
            yield self.steps.layout.share(units, self.rank), at

    def state_dict(self) -> dict[str, Any]:
        """Return the position behind the last batch that was given out."""
        at = self._at
        place = {"epoch": at.epoch, "window": at.window, "unit": at.unit, "carried": list(at.carried)}
        return {"version": _STATE, **place, "of": self._described(), "contents": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position; the data and how they are laid out must be the same."""
        if state.get("version") != _STATE:
            expected = f"version {_STATE}, of this version of Drumline"
            raise UsageError(f"the position in the data has version {state.get('version')!r:.40}", expected=expected)
        then, now = state["of"], self._described()
        for name, value in now.items():
            if then.get(name) != value:
                raise UsageError(
                    f"the position in the data was saved with {name} = {then.get(name)!r:.60}, not {value!r:.60}",
                    expected="the same data and lengths as before",
                )
        if what := changed(state["contents"], self._fingerprint, self._contents) if state.get("contents") else "":
            raise UsageError(
                f"the data have changed since the position was saved: {what}",
                expected="the contents that the run was trained on",
                fix="restore them, or start a new run: leave out --resume",
            )
        self.close()
        self._at = Position(state["epoch"], state["window"], state["unit"], tuple(state["carried"]))

    def _described(self) -> dict[str, Any]:
        return {"seed": self.steps.seed, "shuffle": self.steps.shuffle, **self.steps.layout.described()}


def _by_thread(stream: PlannedStream) -> Any:
    """Yield batches that a thread makes ahead; it ends with the generator."""
    plans = stream.plans()

    def make() -> tuple[Batch, Position]:
        plan, at = next(plans)
        return stream.fill(plan), at

    with ThreadPoolExecutor(1, thread_name_prefix="drumline-data") as thread:
        ahead = deque(thread.submit(make) for _ in range(_AHEAD))
        try:
            while True:
                ahead.append(thread.submit(make))
                yield ahead.popleft().result()
        finally:
            thread.shutdown(cancel_futures=True)


def _leave_group(_number: int) -> None:
    """Leave the process group: signals to it ask the rank to stop after its step, for which it needs this process."""
    os.setsid()


class _Filling:
    """A data set for torch's loader: what is asked for by a plan is its batch."""

    def __init__(self, fill: Fill) -> None:
        self.fill = fill

    def __getitem__(self, plan: tuple[Any, Position]) -> tuple[Batch, Position]:
        return self.fill(plan[0]), plan[1]


def _by_processes(stream: PlannedStream) -> Any:
    """Yield batches that other processes fill, in the order of their plans."""
    from torch.utils.data import DataLoader

    class Plans:
        def __iter__(self) -> Iterator[Any]:
            return stream.plans()

    loader: Any = DataLoader(
        _Filling(stream.fill),  # type: ignore[arg-type]
        sampler=Plans(),
        batch_size=None,
        num_workers=stream.workers,
        worker_init_fn=_leave_group,
        multiprocessing_context="spawn",
        timeout=120,
    )
    batches = iter(loader)
    try:
        yield from batches
    finally:
        batches._shutdown_workers()
