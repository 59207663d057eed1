"""What a loss can be a mean over: everything that it counts of its targets.

    labels that are not ignored, by class weights     of every cross_entropy and nll_loss
    places where a mask is true                       t != 0, target["mask"]
    numbers made of the target                        mask.sum(), weights.sum()

They are written out as a function of the target, so that all microbatches can be counted before the first one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drumline.engine.loss.rules.watching import KnownValues, LossCall
from drumline.model.loss.calls import BY_LABEL, Tally, labels_in
from drumline.model.loss.counts import Count, Counter, counted, values_of
from drumline.model.loss.terms import Term
from drumline.model.values import mapped, pack

_MOST = 8  # different counts of one loss


def tallies_of(seen_call: LossCall, known: KnownValues) -> list[Tally]:
    """Return what a loss was seen to count of its target."""
    graph, is_known = seen_call.graph, known.values.__contains__
    tallies: dict[Tally, None] = {}
    for call in (new_call for new_call in graph.calls if new_call.function in BY_LABEL):
        labels = labels_in(call, is_known, lambda value: is_known(value) or not graph.is_carried(value))
        if labels is not None and not seen_call.tensors[labels.target].is_floating_point():
            tallies[labels] = None
    for value in sorted(number for number in known.values if graph.is_carried(number)):
        tensor = seen_call.tensors[value]
        if (tensor.dtype is torch.bool and tensor.dim()) or (not tensor.dim() and not tensor.is_complex()):
            tallies[value] = None
    return list(tallies)[:_MOST]


def counted_in(call: LossCall, tallies: Sequence[Tally]) -> list[float]:
    """Return what was counted in a call that was watched."""
    with torch.no_grad():
        return [float(counted(tally, call.tensors.__getitem__)) for tally in tallies]


class Tallies:
    """The counts of one loss function, for one kind of target, written out as a function of the target."""

    def __init__(self, call: LossCall, known: KnownValues) -> None:
        graph = call.graph
        self.tallies = tallies_of(call, known)
        if not self.tallies:
            return
        wanted = list(dict.fromkeys(value for tally in self.tallies for value in values_of(tally)))
        graph.outputs = (*graph.outputs[:1], *wanted)  # or what only the host reads would be left out
        calls = graph.origins(wanted, known.changes)[1]
        self._num_outputs = call.num_outputs
        self._changes = any(graph.calls[at].changes for at in calls)
        self._counter = Counter(graph, self.tallies, lambda _: calls)

    def of(self, target: Any) -> list[Count]:
        """Return all counts of a target; those on an accelerator as tensors, which nobody waits for."""
        if not self.tallies:
            return []
        given_target = mapped(target, Tensor.clone) if self._changes else target
        with torch.no_grad():
            value_of = self._counter.values([*[torch.empty(0)] * self._num_outputs, *pack(given_target)[0]])
            return [_plain(counted(labels, value_of)) for labels in self.tallies]


def place_of(term: Term, tallies: Sequence[Tally]) -> int | None:
    """Return which of the counts a part of the loss says that it is a mean over."""
    return None if term.tally is None or term.tally not in tallies else list(tallies).index(term.tally)


def _plain(count: Tensor) -> Count:
    return float(count.detach()) if count.is_cpu else count.detach().double()
