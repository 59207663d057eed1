"""Exchange gradients of tensors that several ranks hold, and sum them in one order, so that all get the same bits.

    rank 0, 2REDUCE_GRAD  ──── gradients of its copy of stage 2 ────►  rank 3, at its own 2REDUCE_GRAD
    rank 0, its row ended ──── gradients of tied parameters ────────►  every other rank that holds them

The two copies of a stage offer their gradients where the program says so. The gradient of a tied parameter is complete
only when all stages of the rank are done, so it is offered at the end of the row. All are then taken and summed: of two
copies, the owner's comes first; parts of a tied parameter are added in order of rank.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drumline.channel.channel import Channel, Delivery, Wait
from drumline.core.action import Action, Op
from drumline.core.errors import MismatchError
from drumline.core.placement import Placement
from drumline.model.quantised.packed import parts_of
from drumline.model.values import pack, unpack
from drumline.model.weights.tied import HeldTensor, Ties
from drumline.runtime.draft import Clock, Draft
from drumline.runtime.stage import Stage

_BEFORE_ALL_STEPS = -1


Ending = Callable[[Clock, Draft], Iterable[Wait]]
Exchanged = tuple[int, Mapping[int, Stage], Channel, Placement, Ties | None]  # what an exchange is made from


class GradientExchange:
    """One rank's part in the exchanges of a step; without `ties`, only copies of whole stages are exchanged."""

    is_summed = False  # whether gradients of whole stages are summed over lines

    def __init__(
        self,
        rank: int,
        stages: Mapping[int, Stage],
        channel: Channel,
        placement: Placement,
        ties: Ties | None = None,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self.channel = channel
        self.placement = placement
        self.ties = ties
        copied = [] if ties is None else ties.copied(rank)
        self.tied = [tensor for tensor in copied if tensor.is_tied and tensor.is_parameter]
        self._partners = {
            other: both
            for other in range(placement.num_ranks)
            if other != rank and (both := [tensor for tensor in self.tied if other in tensor.ranks])
        }
        # Whether gradients of any parameters are exchanged: those of whole stages, or of tied parameters.
        self._is_whole = bool(placement.mirrored) or self.is_summed
        self.has_any = self._is_whole or bool(self.tied)
        self._by_name: dict[str, nn.Parameter] = {}
        self._offered: list[tuple[Action, Stage, int, int]] = []
        self.renew()

    def renew(self) -> None:
        """Follow parameters that were replaced."""
        if self.ties is not None and self.tied:
            tensors_by_name = self.ties.on(
                (index, block) for index, stage in self.stages.items() for block in stage.blocks
            )
            self._by_name = {tensor.name: tensors_by_name[tensor.name][1] for tensor in self.tied}  # type: ignore[misc]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters whose gradients are exchanged."""
        copies = [param for stage in self.stages.values() for param in stage.parameters] if self._is_whole else []
        return [copy for copy in dict.fromkeys([*copies, *self._by_name.values()]) if copy.requires_grad]

    def begin(self) -> None:
        """Start a step."""
        self._offered.clear()

    def offer(self, action: Action, stage: Stage, other: int, clock: Clock) -> None:
        """Offer a stage's gradients to its other copy, if there is one, on the rank `other`."""
        now = clock.now()
        if other >= 0:
            self._send(action, other, self._own_parameters(stage))
            self._offered.append((action, stage, other, now))

    @property
    def endings(self) -> Sequence[Ending]:
        """What finishes a step whose jobs are done; none where nothing is exchanged."""
        return [self._finish] if self.has_any else []

    def _finish(self, clock: Clock, draft: Draft) -> Generator[Wait, None, None]:
        """Offer tied gradients, then take and sum all of them; yield whenever it must wait for a message."""
        start = clock.now()
        self.offer_tied()
        for action, stage, other, since in self._offered:
            theirs = yield from self._taken(action, other, clock, draft)
            _sum_copies(self._own_parameters(stage), theirs, at_home=self.placement.homes[action.stage] == self.rank)
            draft.exchanges.extend((action.stage, since, clock.now()))
        yield from self.sum_tied(clock, draft, start)

    @property
    def has_ties(self) -> bool:
        """Whether other ranks hold parameters of this one under ties."""
        return bool(self._partners)

    def offer_tied(self, microbatch: int | None = None) -> None:
        """Offer the gradients of tied parameters to all that hold them: those of a step, or up to a microbatch."""
        for other, both in self._partners.items():
            self._send(_meeting(both, microbatch), other, [self._by_name[tensor.name] for tensor in both])

    def sum_tied(
        self, clock: Clock, draft: Draft, start: int, microbatch: int | None = None
    ) -> Generator[Wait, None, None]:
        """Take what others offered of tied parameters, and add it in order of rank; yield whenever it must wait."""
        if not self._partners:
            return
        totals: dict[str, Tensor | None] = {}
        for rank in sorted((self.rank, *self._partners)):
            if rank == self.rank:
                both, parts = self.tied, [_part(self._by_name[tensor.name]) for tensor in self.tied]
            else:
                both = self._partners[rank]
                parts = yield from self._taken(_meeting(both, microbatch), rank, clock, draft)
            for tensor, part in zip(both, parts, strict=True):
                self._add(totals, rank, tensor.name, part)
        for name, total in totals.items():
            _put(self._by_name[name], total)
        draft.exchanges.extend((_meeting(self.tied).stage, start, clock.now()))

    def _add(self, totals: dict[str, Tensor | None], rank: int, name: str, part: Any) -> None:
        """Add a rank's part of a tied parameter's gradient; False means that the rank has frozen the parameter."""
        trains = self._by_name[name].requires_grad
        if trains is (part is False):
            state = ("frozen", "trained") if trains else ("trained", "frozen")
            raise MismatchError(
                f"{name} is {state[0]} on {self.channel.naming.rank(rank)} and {state[1]} on another rank that "
                "holds it",
                expected="the same on all ranks",
            )
        if trains:
            totals[name] = _added(totals.get(name), part)

    def _own_parameters(self, stage: Stage) -> list[nn.Parameter]:
        """Return what the copies of a stage exchange: its parameters without tied ones."""
        parameters = set(self._by_name.values())
        return [param for param in stage.parameters if param not in parameters]

    def _send(self, action: Action, other: int, parameters: Sequence[nn.Parameter]) -> None:
        self.channel.post(action, other)
        self.channel.send(action, other, *pack([_plain_part(_part(param)) for param in parameters]))

    def _taken(self, action: Action, other: int, clock: Clock, draft: Draft) -> Generator[Wait, None, list[Any]]:
        """Wait for the gradients of another rank."""
        asked = since = clock.now()
        delivery = self.channel.take(action, other)
        if delivery is None:
            while delivery is None:
                yield Wait(self.rank, action, action, other)
                asked = clock.now()
                delivery = self.channel.take(action, other)
            draft.waited(since, asked)
        draft.took(action._replace(microbatch=None), other, delivery, asked, clock.now())
        return _heard(delivery)


def share(exchange: GradientExchange) -> Generator[Wait, None, None]:
    """Give the rank's copies the values of their owners, and other ranks' copies the values of its own tensors."""
    assert exchange.ties is not None
    rank, channel, copied = exchange.rank, exchange.channel, exchange.ties.copied(exchange.rank)
    tensors_by_name = exchange.ties.on(
        (index, block) for index, stage in exchange.stages.items() for block in stage.blocks
    )
    channel.begin(_BEFORE_ALL_STEPS)
    others = [other for other in range(exchange.placement.num_ranks) if other != rank]
    asked = {home: both for home in others if (both := [tensor for tensor in copied if tensor.home == home])}
    for home, both in asked.items():
        channel.post(_meeting(both), home)
    for other in others:
        if tensors := [tensor for tensor in copied if tensor.home == rank and other in tensor.ranks]:
            channel.send(
                _meeting(tensors), other, *pack([parts_of(tensors_by_name[tensor.name][1]) for tensor in tensors])
            )
    for home, both in asked.items():
        while (delivery := channel.take(_meeting(both), home)) is None:
            yield Wait(rank, _meeting(both), _meeting(both), home)
        with torch.no_grad():
            for tensor, value in zip(both, unpack(delivery.tensors, delivery.form), strict=True):
                for part, ours in parts_of(tensors_by_name[tensor.name][1]).items():
                    ours.copy_(value[part])


def _meeting(tensors: Sequence[HeldTensor], microbatch: int | None = None) -> Action:
    """Return the action under which two ranks meet: that of the first stage that holds any of the tensors."""
    return Action(min(tensor.stages[0] for tensor in tensors), Op.REDUCE_GRAD, microbatch)


def _part(parameter: nn.Parameter) -> Any:
    """Return a rank's part of a parameter's gradient: None if there is none, False if it is frozen."""
    gradient = parameter.grad if parameter.requires_grad else False
    return gradient.coalesce() if isinstance(gradient, Tensor) and gradient.layout is torch.sparse_coo else gradient


def _plain_part(part: Any) -> Any:
    """Return what to tell other ranks about a part."""
    if isinstance(part, Tensor) and part.layout is torch.sparse_coo:
        return part.indices(), part.values(), tuple(part.shape)
    return part


def _heard(delivery: Delivery) -> list[Any]:
    """Return what another rank told about its parameters."""
    return [_sparse(*entry) if isinstance(entry, tuple) else entry for entry in unpack(delivery.tensors, delivery.form)]


def _sparse(indices: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    # Said by a context: PyTorch before 2.13 warns even where `check_invariants` is given.
    with torch.sparse.check_sparse_tensor_invariants(enable=False):  # type: ignore[no-untyped-call]
        return torch.sparse_coo_tensor(indices, values, shape, is_coalesced=True)


@torch.no_grad()
def _added(total: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """Return the sum of two gradients, either of which may be missing; a new tensor unless one is missing."""
    if total is None or gradient is None:
        return gradient if total is None else total
    if total.layout is not torch.strided and gradient.layout is torch.strided:
        total, gradient = gradient, total
    return total + gradient


def _sum_copies(parameters: Sequence[nn.Parameter], theirs: Sequence[Any], *, at_home: bool) -> None:
    """Sum the gradients of two copies of a stage, the owner's first."""
    for parameter, other in zip(parameters, theirs, strict=True):
        own_part = _part(parameter)
        _put(parameter, _added(own_part, other) if at_home else _added(other, own_part))


def _put(parameter: nn.Parameter, total: Tensor | None) -> None:
    """Set a parameter's gradient to a sum; copy it if it may be another rank's tensor."""
    parameter.grad = total.clone() if parameter.grad is None and total is not None else total
