"""Sum a stage's gradients over the lines that saw other tokens, while the rank goes on with other stages.

    2W7   last backward of stage 2
    2REDUCE_GRAD    gradients are copied into buckets; each bucket's all-reduce starts
    0B6 0B7 ...     other stages run meanwhile
    end of the row  wait for the buckets, and copy the sums back

A bucket also counts on how many lines each of its parameters has a gradient. One that no line reached stays without,
as in one process; a line that did not reach it contributes zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Work

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import AXES, DATA
from drumline.channel.lines.slices import sharded_over
from drumline.core.errors import ModelError
from drumline.model.precision import gradient_dtype
from drumline.model.quantised.packed import parts_of

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_BUCKET_BYTES = 25 * 2**20  # as in torch's DistributedDataParallel


@dataclass(slots=True, eq=False)
class GradientBucket:
    """Gradients of one dtype on their way: `flat` holds all of them, and a flag for each."""

    parameters: Sequence[nn.Parameter]
    flat: Tensor
    work: Work
    axes: tuple[str, ...]
    ended: int = 0  # when it had its sums, if that is known


def summed_over(parameter: Tensor) -> tuple[str, ...]:
    """Return the axes over which a parameter's gradient is summed: those along which lines hold copies of it.

    Lines along an axis hold different parts of a parameter that has a `slice`. A parameter whose copies along an axis
    are applied to parts of the same values says so: `parameter.partial_over = ("tp",)`.

    >>> from drumline.channel.lines.slices import Slice
    >>> expert = nn.Parameter(torch.ones(1)); expert.slice = Slice("ep", 0)
    >>> summed_over(nn.Parameter(torch.ones(1))), summed_over(expert)
    (('dp', 'cp', 'ep'), ('dp', 'cp'))
    """
    sharded = sharded_over(parameter)
    return (*(name for name in DATA if name not in sharded), *getattr(parameter, "partial_over", ()))


class Reducer:
    """Sums gradients over axes of the mesh."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes

    def start(self, parameters: Sequence[nn.Parameter], now: Callable[[], int] = lambda: 0) -> list[GradientBucket]:
        """Start to sum the gradients of these parameters; all ranks along the axes call it in the same order.

        A clock, `now`, notes when each bucket had its sums, on a host.
        """
        buckets = [self._begun(axes, each) for axes, each in self._divided(parameters)]
        for bucket in (bucket for bucket in buckets if bucket.flat.is_cpu):
            bucket.work.get_future().add_done_callback(partial(_note_end, bucket, now))
        return buckets

    def finish(self, buckets: Sequence[GradientBucket], what: str) -> None:
        """Wait for the sums, and give them to the parameters."""
        for bucket in buckets:
            self.axes.wait(bucket.work, what, bucket.axes)
            _give(bucket)

    def _divided(self, parameters: Sequence[nn.Parameter]) -> Iterator[tuple[tuple[str, ...], list[nn.Parameter]]]:
        """Yield the parameters in buckets of one kind, in the same order on all ranks."""
        kinds: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = {}
        for param in parameters:
            axes = summed_over(param)
            if self.axes.group(*axes) is not None:
                kinds.setdefault((axes, gradient_dtype(param)), []).append(param)
        for (axes, dtype), listed in kinds.items():
            bucket: list[nn.Parameter] = []
            for param in listed:
                size = sum(each.numel() for each in bucket) + param.numel()
                if bucket and size * dtype.itemsize > _BUCKET_BYTES:
                    yield axes, bucket
                    bucket = []
                bucket.append(param)
            yield axes, bucket

    @torch.no_grad()
    def _begun(self, axes: tuple[str, ...], parameters: list[nn.Parameter]) -> GradientBucket:
        first = parameters[0]
        total = sum(param.numel() for param in parameters)
        flat = torch.zeros(total + len(parameters), dtype=gradient_dtype(first), device=first.device)
        flags = [0.0] * len(parameters)
        for at, (parameter, place) in enumerate(zip(parameters, _places(flat, parameters), strict=True)):
            gradient = parameter.grad
            if gradient is not None:
                if gradient.layout is not torch.strided:
                    raise ModelError(
                        f"a parameter of shape {tuple(parameter.shape)} has a sparse gradient",
                        expected="dense gradients, if several lines of a mesh sum them",
                        fix="use sparse=False in nn.Embedding",
                    )
                flags[at] = 1.0
                place.copy_(gradient)
        flat[total:] = torch.tensor(flags, dtype=flat.dtype)
        work = dist.all_reduce(flat, group=self.axes.group(*axes), async_op=True)
        assert work is not None
        return GradientBucket(parameters, flat, work, axes)


def reducer_for(axes: Axes, parameters: Sequence[nn.Parameter]) -> Reducer | None:
    """Return what sums these parameters' gradients over other lines, if there are any that hold them."""
    sums = axes.size(*DATA) > 1 or any(axes.size(*summed_over(param)) > 1 for param in parameters)
    return Reducer(axes) if sums else None


def _note_end(bucket: GradientBucket, now: Callable[[], int], _: object) -> None:
    bucket.ended = now()


@torch.no_grad()
def share_values(axes: Axes, tensors: Iterable[Tensor]) -> None:
    """Give all copies of each tensor along the mesh the values of the first; all ranks call it alike.

    Of a packed tensor, its codes and scales are sent.
    """
    works = []
    for tensor in tensors:
        along = tuple(name for name in AXES[1:] if name not in sharded_over(tensor))
        group = axes.group(*along)
        for part in parts_of(tensor).values() if group is not None else ():
            numbers = part.view(torch.uint8) if part.dtype in _FLOAT8 else part  # not every backend sends these
            plain = numbers.contiguous()
            work = dist.broadcast(plain, axes.members(*along)[0], group=group, async_op=True)
            assert work is not None
            works.append((numbers, plain, work, along))
    for tensor, plain, work, along in works:
        axes.wait(work, "sharing the model's first values", along)
        if plain.data_ptr() != tensor.data_ptr():
            tensor.copy_(plain)


@torch.no_grad()
def _give(bucket: GradientBucket) -> None:
    flags = bucket.flat[-len(bucket.parameters) :].tolist()
    for parameter, flag, place in zip(bucket.parameters, flags, _places(bucket.flat, bucket.parameters), strict=True):
        if flag and parameter.grad is None:
            parameter.grad = place.clone()
        elif flag and parameter.grad is not None:
            parameter.grad.copy_(place)


def _places(flat: Tensor, parameters: Sequence[nn.Parameter]) -> Iterator[Tensor]:
    at = 0
    for param in parameters:
        yield flat[at : at + param.numel()].view(param.shape)
        at += param.numel()
