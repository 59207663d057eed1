"""What a loss can be a mean over: everything that it counts of its targets.

    labels that are not ignored, by class weights     of every cross_entropy and nll_loss
    places where a mask is true                       t != 0, target["mask"]
    numbers made of the target                        mask.sum(), weights.sum()

They are written out as a function of the target, so that all microbatches can be counted before the first one runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.engine.loss.rules.watching import Known, Watched
from drumline.model.graph.emit import Emitter
from drumline.model.loss.calls import Labels, labels_of
from drumline.model.loss.counts import Count, labels_counted
from drumline.model.loss.terms import Term
from drumline.model.values import mapped, pack

_MOST = 8  # different counts of one loss

Tally = Labels | int  # labels that count, or the number of a value: a mask or a single number


def tallies_of(seen: Watched, known: Known) -> list[Tally]:
    """Return what a loss was seen to count of its target."""
    graph = seen.graph
    found: dict[Tally, None] = {}
    for call in graph.calls:
        labels = labels_of(graph, call, known.values)
        if labels is not None and not seen.tensors[labels.target].is_floating_point():
            found[labels] = None
    for value in sorted(one for one in known.values if graph.is_carried(one)):
        tensor = seen.tensors[value]
        if (tensor.dtype is torch.bool and tensor.dim()) or (not tensor.dim() and not tensor.is_complex()):
            found[value] = None
    return list(found)[:_MOST]


def counted_in(seen: Watched, tallies: Sequence[Tally]) -> list[float]:
    """Return what was counted in a call that was watched."""
    with torch.no_grad():
        return [float(_count(one, seen.tensors.__getitem__)) for one in tallies]


class Tallies:
    """The counts of one loss function, for one kind of target, written out as a function of the target."""

    def __init__(self, seen: Watched, known: Known) -> None:
        graph = seen.graph
        self.found = tallies_of(seen, known)
        if not self.found:
            return
        wanted = list(dict.fromkeys(one for tally in self.found for one in _values(tally)))
        graph.outputs = (*graph.outputs[:1], *wanted)  # or what only the host reads would be left out
        emitter = Emitter(graph)
        self._places = {value: at for at, value in enumerate(wanted)}
        returns = f"({''.join(f'{emitter.expression(None, [value])}, ' for value in wanted)})"
        calls = known.calls_for(graph, wanted)
        self._num_outputs = seen.num_outputs
        self._changes = any(graph.calls[at].changes for at in calls)
        self._run = emitter.function(graph.inputs, calls, returns, kept=wanted)

    def of(self, target: Any) -> list[Count]:
        """Return all counts of a target; those on an accelerator as tensors, which nobody waits for."""
        if not self.found:
            return []
        given = mapped(target, Tensor.clone) if self._changes else target
        with torch.no_grad():
            made = self._run(None, *[torch.empty(0)] * self._num_outputs, *pack(given)[0])
            return [_plain(_count(one, lambda value: made[self._places[value]])) for one in self.found]


def place_of(term: Term, tallies: Sequence[Tally]) -> int | None:
    """Return which of the counts a part of the loss says that it is a mean over."""
    wanted = term.labels if term.labels is not None else term.divided
    return list(tallies).index(wanted) if wanted is not None and wanted in tallies else None


def _count(tally: Tally, value_of: Callable[[int], Tensor]) -> Tensor:
    if not isinstance(tally, Labels):
        value = value_of(tally)
        return value.sum() if value.dim() else value
    weight = None if tally.weight is None else value_of(tally.weight)
    return labels_counted(value_of(tally.target), tally.ignored, weight)


def _values(tally: Tally) -> list[int]:
    if not isinstance(tally, Labels):
        return [tally]
    return [tally.target] if tally.weight is None else [tally.target, tally.weight]


def _plain(count: Tensor) -> Count:
    return float(count.detach()) if count.is_cpu else count.detach().double()
