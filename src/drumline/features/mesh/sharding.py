"""Divide what the lines of a mesh would hold twice: optimizer state (ZeRO-1), or parameters and gradients too (ZeRO-3).

    ZeRO-1   parameters and gradients are whole on every line. Each line's optimizer updates its piece of every
             parameter, a view of its memory; then all lines gather the pieces of the others.
    ZeRO-3   each line keeps a piece of every parameter. 2UNSHARD gathers the whole stage, 2RESHARD frees it, and
             2REDUCE_GRAD leaves each line the sum of its piece's gradient.

A piece is a part of a flattened parameter, so that all lines hold equally much. Optimizers that look at whole matrices,
such as Muon, get whole parameters instead, each on one line. A parameter without dimensions stays whole on every line:
its optimizer's state could not be told from a count of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Work
from torch.optim import Optimizer

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.slices import FlatSlice, Slice, slice_of
from drumline.engine.updates.attached import Divides
from drumline.engine.updates.whole_matrices import by_element
from drumline.features.mesh.reduce import summed_over
from drumline.model.precision import gradient_dtype

AXIS = "dp"

# torch 2.13 renames these two, and warns of the older names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def piece_of(whole: nn.Parameter, axes: Axes, owner: int | None = None) -> tuple[FlatSlice, Tensor]:
    """Return this line's piece of a parameter, as a view of it, and where it lies."""
    inner = slice_of(whole)
    assert inner is None or isinstance(inner, Slice)
    part = FlatSlice(AXIS, tuple(whole.shape), owner, inner)
    return part, part.local(whole.detach(), axes.place(AXIS), axes.size(AXIS))


def _marked(piece: nn.Parameter, whole: nn.Parameter, part: FlatSlice) -> nn.Parameter:
    """Return a piece that knows where it lies, with gradients as precise as those of its whole."""
    setattr(piece, "slice", part)  # noqa: B010 - an attribute that torch's class does not declare
    return _mark_precise(piece, whole)


def _mark_precise(piece: nn.Parameter, whole: nn.Parameter) -> nn.Parameter:
    precise = getattr(whole, "grad_dtype", None)
    if precise is not None and precise is not piece.dtype:
        piece.grad_dtype = precise
    return piece


class Division(NamedTuple):
    """How a parameter's state is divided: `part` is None as long as no optimizer has it."""

    part: Slice | FlatSlice | None


class StateShards(Divides):
    """ZeRO-1: the pieces that this line's optimizers update, by parameter."""

    def __init__(self, axes: Axes, parameters: Iterable[nn.Parameter]) -> None:
        self._axes = axes
        self._divided = {param for param in parameters if param.dim()}
        self._pieces: dict[nn.Parameter, nn.Parameter] = {}
        self._num_elements = [0] * axes.size(AXIS)  # elements that whole parameters give each line

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what an optimizer updates of a parameter here: its piece, or the parameter if it is not divided."""
        return self._pieces.get(parameter, parameter)

    def divide(self, parameters: Sequence[nn.Parameter], kind: type[Optimizer]) -> None:
        """Divide parameters for an optimizer of a kind; whole ones go to the line that has least so far."""
        for param in (param for param in parameters if param in self._divided and param not in self._pieces):
            owner = None
            if not by_element(kind):
                owner = self._num_elements.index(min(self._num_elements))
            self._divide(param, owner)
            self._count(self._pieces[param], param.numel())

    def _divide(self, parameter: nn.Parameter, owner: int | None) -> None:
        part, view = piece_of(parameter, self._axes, owner)
        # Of a matrix, the other lines hold an empty one: Muon refuses anything else.
        rows = len(parameter) if view.numel() else 0
        piece = nn.Parameter(view if owner is None else view.view(rows, *parameter.shape[1:]))
        self._pieces[parameter] = _marked(piece, parameter, part)

    def handed_over(self, parameter: nn.Parameter) -> Division | None:
        """Return how a parameter is divided, for the rank to which it moves; None if it is not."""
        piece = self._pieces.get(parameter)
        return Division(None if piece is None else slice_of(piece)) if parameter in self._divided else None

    def drop(self, parameter: nn.Parameter) -> None:
        """Forget a parameter that has left."""
        self._divided.discard(parameter)
        self._count(self._pieces.pop(parameter, None), -parameter.numel())

    def take_over(self, parameter: nn.Parameter, division: Division) -> None:
        """Divide a parameter that has come, as it was divided where it was."""
        self._divided.add(parameter)
        if isinstance(division.part, FlatSlice):
            self._divide(parameter, division.part.owner)
            self._count(self._pieces[parameter], parameter.numel())

    def _count(self, piece: nn.Parameter | None, num_elements: int) -> None:
        part = None if piece is None else slice_of(piece)
        if isinstance(part, FlatSlice) and part.owner is not None:
            self._num_elements[part.owner] += num_elements

    @torch.no_grad()
    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before an optimizer steps, give the pieces their parts of the gradients.

        An empty piece of a divided parameter gets an empty gradient, so that every line has the same states to save.
        """
        for param in parameters:
            piece = self._pieces.get(param)
            if piece is not None:
                found_slice = slice_of(piece)
                assert isinstance(found_slice, FlatSlice)
                first, last = found_slice.span(self._axes.place(AXIS), self._axes.size(AXIS))
                part = param.detach().reshape(-1)[first:last].view(piece.shape)
                if not param.is_contiguous() and not torch.equal(piece, part):  # then the piece is a copy, not a view
                    piece.copy_(part)
                piece.grad = None
                if param.grad is not None and (piece.numel() or found_slice.owner is None):
                    piece.grad = param.grad.reshape(-1)[first:last].view(piece.shape)

    @torch.no_grad()
    def give(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the optimizer stepped, gather the pieces that other lines updated; all lines call it alike."""
        size = self._axes.size(AXIS)
        divided = [param for param in parameters if param in self._pieces]
        for dtype in dict.fromkeys(param.dtype for param in divided):
            each = [param for param in divided if param.dtype is dtype]
            spans = [[_span(self._pieces[param], at, size) for param in each] for at in range(size)]
            lengths = [sum(last - first for first, last in row) for row in spans]
            own_tensor = torch.zeros(max(lengths), dtype=dtype, device=each[0].device)
            _copy(own_tensor, [self._pieces[param].reshape(-1) for param in each])
            every = self._axes.gathered(own_tensor, AXIS)
            wholes = [p.detach().contiguous().view(-1) for p in each]  # views, unless its elements lie otherwise
            for at in range(size):
                _spread(every[at], [tensor[a:b] for tensor, (a, b) in zip(wholes, spans[at], strict=True)])
            for param, whole in zip(each, wholes, strict=True):
                if not param.is_contiguous():
                    param.copy_(whole.view(param.shape))
        for param in divided:
            self._pieces[param].grad = None


def _span(piece: Tensor, place: int, size: int) -> tuple[int, int]:
    part = slice_of(piece)
    assert isinstance(part, FlatSlice)
    return part.span(place, size)


def _copy(flat: Tensor, parts: Iterable[Tensor]) -> None:
    at = 0
    for part in parts:
        flat[at : at + part.numel()].copy_(part)
        at += part.numel()


def _spread(flat: Tensor, parts: Iterable[Tensor]) -> None:
    at = 0
    for part in parts:
        part.copy_(flat[at : at + part.numel()])
        at += part.numel()


@dataclass(slots=True, eq=False)
class _Kind:
    """The divided parameters of a stage of one dtype, with the pieces of all lines side by side in flat tensors."""

    parameters: list[nn.Parameter]
    pieces: list[nn.Parameter]
    along: tuple[str, ...]  # other axes over which their gradients are summed
    flat: Tensor | None = None
    work: Work | None = None


@dataclass(slots=True, eq=False)
class ShardSum:
    """Gradients of a kind on their way to the lines that keep them."""

    kind: _Kind
    own_part: Tensor
    flat: Tensor
    flags: Tensor
    works: list[Work] = field(default_factory=list)


class FullShards:
    """ZeRO-3: the pieces of this process's parameters, by stage; whole ones exist while their stage is gathered."""

    def __init__(self, axes: Axes, stages: Mapping[int, Sequence[nn.Parameter]]) -> None:
        self._axes, self._size, self._place = axes, axes.size(AXIS), axes.place(AXIS)
        self.pieces: dict[nn.Parameter, nn.Parameter] = {}
        self._is_whole = set(stages)
        for param in (param for parameters in stages.values() for param in parameters):
            part, view = piece_of(param, axes)
            self._put(param, view.clone(), part)
        self._lay_out(stages)

    def _lay_out(self, stages: Mapping[int, Sequence[nn.Parameter]]) -> None:
        self._kinds: dict[int, list[_Kind]] = {}
        for stage, parameters in stages.items():
            kinds: dict[tuple[torch.dtype, bool, tuple[str, ...]], _Kind] = {}
            for param in parameters:
                along = tuple(name for name in summed_over(param) if name != AXIS)
                kind = kinds.setdefault((param.dtype, param.requires_grad, along), _Kind([], [], along))
                kind.parameters.append(param)
                kind.pieces.append(self.pieces[param])
            self._kinds[stage] = list(kinds.values())

    def _put(self, parameter: nn.Parameter, value: Tensor, part: FlatSlice) -> None:
        piece = nn.Parameter(value, requires_grad=parameter.requires_grad)
        self.pieces[parameter] = _marked(piece, parameter, part)

    def drop(self, parameter: Tensor) -> None:
        """Forget the piece of a parameter that has left."""
        if isinstance(parameter, nn.Parameter):
            self.pieces.pop(parameter, None)

    def take_over(self, parameter: nn.Parameter, value: Tensor) -> None:
        """Keep this piece of a parameter that has come; `recut` gives it a stage."""
        inner = slice_of(parameter)
        assert inner is None or isinstance(inner, Slice)
        self._put(parameter, value, FlatSlice(AXIS, tuple(parameter.shape), inner=inner))

    def recut(self, stages: Mapping[int, Sequence[nn.Parameter]]) -> None:
        """Have these parameters in the stages from now on, of those that are divided; all lines call it alike."""
        divided = {stage: [param for param in each if param in self.pieces] for stage, each in stages.items()}
        for param in (param for parameters in divided.values() for param in parameters):
            _mark_precise(self.pieces[param], param)
        whole, self._is_whole = sorted(self._is_whole), set()
        self._lay_out(divided)
        for stage in whole:  # before the first step
            self.unshard(stage)
            self.gathered(stage)

    def shown(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what this line keeps of a parameter: its piece, or the parameter if it is not divided."""
        return self.pieces.get(parameter, parameter)

    def divides(self, stage: int) -> bool:
        """Whether the parameters of a stage are divided."""
        return stage in self._kinds

    def is_whole(self, stage: int) -> bool:
        """Whether a stage's parameters are all there."""
        return stage in self._is_whole or stage not in self._kinds

    @torch.no_grad()
    def unshard(self, stage: int) -> None:
        """Begin to gather a stage's parameters; all lines call it alike."""
        if self.is_whole(stage):
            return
        for kind in self._kinds[stage]:
            own_tensor = torch.zeros(self._length(kind), dtype=kind.pieces[0].dtype, device=kind.pieces[0].device)
            _copy(own_tensor, kind.pieces)
            kind.flat = own_tensor.new_empty(self._size * own_tensor.numel())
            kind.work = _all_gather(kind.flat, own_tensor, group=self._axes.group(AXIS), async_op=True)

    @torch.no_grad()
    def gathered(self, stage: int) -> None:
        """Wait until a stage is gathered."""
        if self.is_whole(stage):
            return
        for kind in self._kinds[stage]:
            assert kind.work is not None, "gathering has begun"
            assert kind.flat is not None
            self._axes.wait(kind.work, f"{stage}UNSHARD, gathering the parameters of stage {stage}", [AXIS])
            rows = kind.flat.view(self._size, -1)
            for param in kind.parameters:
                param.data = torch.empty(param.shape, dtype=param.dtype, device=param.device)
            for at in range(self._size):
                _spread(rows[at], self._views(kind, at))
            kind.flat = kind.work = None
        self._is_whole.add(stage)

    def reshard(self, stage: int) -> None:
        """Free the whole parameters of a stage."""
        if stage in self._is_whole:
            self._is_whole.discard(stage)
            for param in (param for kind in self._kinds[stage] for param in kind.parameters):
                param.data = param.data.new_empty(1).expand(param.shape)  # keeps its shape, and no memory

    def renew(self) -> None:
        """Take over values that were loaded into gathered parameters."""
        for parameter, piece in self.pieces.items():
            with torch.no_grad():
                piece.copy_(piece_of(parameter, self._axes)[1])

    @torch.no_grad()
    def start(self, stage: int) -> list[ShardSum]:
        """Begin to sum a stage's gradients, each line getting those of its pieces; frees the whole gradients."""
        sums = []
        for kind in (sort for sort in self._kinds.get(stage, ()) if sort.pieces[0].requires_grad):
            first = kind.parameters[0]
            dtype = gradient_dtype(first)
            flat = torch.zeros(self._size * self._length(kind), dtype=dtype, device=first.device)
            flags = torch.tensor([p.grad is not None for p in kind.parameters], dtype=dtype, device=first.device)
            rows = flat.view(self._size, -1)
            for at in range(self._size):
                _copy_gradients(rows[at], kind.parameters, [_span(piece, at, self._size) for piece in kind.pieces])
            for param in kind.parameters:
                param.grad = None
            sums.append(self._begun(ShardSum(kind, rows[self._place], flat, flags)))
        return sums

    def _begun(self, shard_sum: ShardSum) -> ShardSum:
        group = self._axes.group(AXIS)
        if shard_sum.flat.is_cpu:  # gloo has no reduce-scatter of its own that runs by itself
            works = [dist.all_reduce(shard_sum.flat, group=group, async_op=True)]
        else:
            shard_sum.own_part = torch.empty_like(shard_sum.own_part)
            works = [_reduce_scatter(shard_sum.own_part, shard_sum.flat, group=group, async_op=True)]
        works.append(dist.all_reduce(shard_sum.flags, group=group, async_op=True))
        shard_sum.works = [work for work in works if work is not None]
        return shard_sum

    @torch.no_grad()
    def finish(self, sums: Sequence[ShardSum], what: str) -> None:
        """Wait for the sums, and add them to the gradients of the pieces."""
        for total in sums:
            for work in total.works:
                self._axes.wait(work, what, [AXIS])
            at, sums_here = 0, self._axes.summed(total.own_part, *total.kind.along)
            flags = self._axes.summed(total.flags, *total.kind.along).tolist()
            for piece, flag in zip(total.kind.pieces, flags, strict=True):
                own_tensor = sums_here[at : at + piece.numel()]
                at += piece.numel()
                if flag:
                    piece.grad = own_tensor.clone() if piece.grad is None else piece.grad.add_(own_tensor)

    def _length(self, kind: _Kind) -> int:
        """Return the elements that the line with most of them has of a kind."""
        spans = [[_span(piece, at, self._size) for piece in kind.pieces] for at in range(self._size)]
        return max(sum(last - first for first, last in row) for row in spans)

    def _views(self, kind: _Kind, place: int) -> Iterator[Tensor]:
        for param, piece in zip(kind.parameters, kind.pieces, strict=True):
            first, last = _span(piece, place, self._size)
            yield param.detach().view(-1)[first:last]


def _copy_gradients(flat: Tensor, parameters: Sequence[nn.Parameter], spans: Sequence[tuple[int, int]]) -> None:
    at = 0
    for param, (first, last) in zip(parameters, spans, strict=True):
        if param.grad is not None:
            flat[at : at + last - first].copy_(param.grad.reshape(-1)[first:last])
        at += last - first
