"""The trace of a model's forward: calls of blocks and of functions between them, and the values they pass on.

    value 0 ──► model.embed ──► 2 ──► mul ──► 3 ──► model.layers.0 ──► 4 ──► ...        calls, in the order they ran
    value 1 ──► arange ... ──► 7 ────────────────────┘                                   values, one per tensor

A cut between two calls must carry every value that is created before it and used after it. Values that depend only on
the model's inputs (masks, positions) need not travel: the inputs may be smaller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from drumline.model.values import Path

Autocast = tuple[str, bool, torch.dtype]  # device type, whether it is on, and its dtype


@dataclass(frozen=True, slots=True)
class Call:
    """One call: of a block if `block` names one, otherwise of `function`."""

    function: Callable[..., Any] | None
    block: str
    form: Any  # of (args, kwargs), from `pack`
    takes: tuple[int, ...]  # the values among its arguments
    makes: tuple[tuple[Path, int], ...]  # the new values in its result
    changes: tuple[int, ...] = ()  # values that it changes in place
    has_grad: bool | None = None  # whether gradients are on, if the forward switched them itself
    autocast: Autocast | None = None
    reads: tuple[str, ...] = ()  # parameters and buffers that the block uses but does not own

    @property
    def is_plain(self) -> bool:
        """Whether it calls a function that changes nothing in place and draws no random numbers."""
        return not (self.block or self.changes or may_draw(self.function))


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor: created by a call, given as an input, or part of the model's state."""

    num_bytes: int
    storage: int  # the same number for values that share memory
    state: str = ""  # its name, if it is a parameter or buffer
    constant: Any = None  # a tensor that is neither and existed before
    kind: str = ""  # its dtype and shape
    is_uneven: bool = False  # whether its shape depends on values: rows that a mask picks


@dataclass(frozen=True, slots=True)
class Barrier:
    """Why no cut is possible after call `first` and up to call `last`."""

    first: int
    last: int
    reason: str


@dataclass(eq=False)
class CallGraph:
    """The calls of one forward, and their values."""

    values: list[Value] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    output_form: Any = None
    outputs: tuple[int, ...] = ()
    barriers: list[Barrier] = field(default_factory=list)
    changed: frozenset[str] = frozenset()  # parts of the model's state that calls change in place

    def is_carried(self, value: int) -> bool:
        """Whether a value must be passed from call to call, because it does not exist on every rank."""
        return not self.values[value].state and self.values[value].constant is None

    @cached_property
    def made_at(self) -> dict[int, int]:
        """The call that creates each carried value; -1 for inputs."""
        calls_by_value = dict.fromkeys(self.inputs, -1)
        for at, call in enumerate(self.calls):
            calls_by_value.update((value, at) for _, value in call.makes)
        return calls_by_value

    @cached_property
    def last_use(self) -> dict[int, int]:
        """The last call that uses each value, `len(calls)` for those of the output."""
        last_use: dict[int, int] = {}
        for at, call in enumerate(self.calls):
            if at not in self.idle:
                last_use.update(dict.fromkeys(call.takes, at))
        last_use.update(dict.fromkeys(self.outputs, len(self.calls)))
        return last_use

    @cached_property
    def idle(self) -> frozenset[int]:
        """The calls without effect: nobody uses their results, and they change and draw nothing."""
        wanted = set(self.outputs)
        idle_calls = set()
        for at in reversed(range(len(self.calls))):
            call = self.calls[at]
            if call.is_plain and wanted.isdisjoint(number for _, number in call.makes):
                idle_calls.add(at)
            else:
                wanted.update(call.takes)
        return frozenset(idle_calls)

    def live(self, at: int) -> list[int]:
        """Return the values created before call `at` and used there or later, in order of creation."""
        return [value for value, where in self.made_at.items() if where < at <= self.last_use.get(value, -1)]

    @cached_property
    def repeatable(self) -> frozenset[int]:
        """The values that plain functions, without state or randomness, compute from the inputs alone."""
        changed = {self.values[value].storage for call in self.calls for value in call.changes}
        values_now = {value for value in self.inputs if self.values[value].storage not in changed}
        for call in self.calls:
            fits = all(value in values_now or self.values[value].constant is not None for value in call.takes)
            if call.is_plain and fits and not any(self.values[value].storage in changed for _, value in call.makes):
                values_now |= {value for _, value in call.makes}
        return frozenset(values_now)

    def bytes_of(self, values: Iterable[int]) -> int:
        """Return the total bytes of some values."""
        return sum(self.values[value].num_bytes for value in values)

    def origins(
        self, wanted: Iterable[int], changes: Mapping[int, Sequence[int]] | None = None
    ) -> tuple[set[int], set[int]]:
        """Return the inputs from which values are computed, and the calls that compute them.

        `changes`, if given, are the calls that change values in place, by value: they count too.
        """
        seen_values: set[int] = set()
        calls: set[int] = set()
        todo, changed = list(wanted), changes or {}
        while todo:
            value = todo.pop()
            if value not in seen_values and (self.is_carried(value) or value in changed):
                seen_values.add(value)
                here = {*changed.get(value, ()), self.made_at.get(value, -1)} - {-1}
                calls |= here
                todo += [number for at in here for number in self.calls[at].takes]
                todo += [number for at in here if changed for _, number in self.calls[at].makes]
        return seen_values & set(self.inputs), calls


_CHANCE = (
    "dropout", "rand", "bernoulli", "multinomial", "normal", "uniform", "exponential", "rrelu", "poisson", "gumbel"
)  # fmt: skip


def may_draw(function: Callable[..., Any] | None) -> bool:
    """Whether a function may draw random numbers, judging by its name.

    >>> may_draw(torch.rand), may_draw(torch.add)
    (True, False)
    """
    return any(part in getattr(function, "__name__", "") for part in _CHANCE)


@dataclass(frozen=True, slots=True)
class Crossing:
    """What is passed on before a call: inside a stage all of `whole`; across a cut `sent`, the rest is recomputed."""

    whole: tuple[int, ...]
    sent: tuple[int, ...]
    again: tuple[int, ...]  # the calls that recompute the rest


_EFFORT = 16  # how many bytes to recompute at most for each byte not sent


def crossings(graph: CallGraph, starts: Sequence[int]) -> list[Crossing]:
    """Return what is passed on before each of the calls in `starts`, which are in order."""
    found_crossings: list[Crossing] = []
    kept_inputs: set[int] = set()  # inputs that a later cut sends, so that earlier ones must too
    for at in reversed(starts):
        live = graph.live(at)
        whole = [*live, *sorted(kept_inputs - set(live))]
        crossing = _made_again(graph, whole)
        kept_inputs |= set(crossing.sent) & set(graph.inputs)
        found_crossings.append(crossing)
    return found_crossings[::-1]


def _made_again(graph: CallGraph, whole: Sequence[int]) -> Crossing:
    """Recompute values instead of sending them if that moves fewer bytes."""
    again = {value for value in whole if value in graph.repeatable} - set(graph.inputs)
    inputs, calls = graph.origins(again)
    rest = [value for value in whole if value not in again]
    sent = [*rest, *sorted(inputs - set(rest))]
    effort = graph.bytes_of(value for call in calls for _, value in graph.calls[call].makes)
    saved = graph.bytes_of(whole) - graph.bytes_of(sent)
    if saved <= 0 or effort > _EFFORT * saved:
        return Crossing(tuple(whole), tuple(whole), ())
    return Crossing((*whole, *sorted(inputs - set(whole))), tuple(sent), tuple(sorted(calls)))
