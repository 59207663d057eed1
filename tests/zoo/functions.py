"""Checkpoints, custom autograd functions, transforms and modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from zoo.entry import ZOO, Entry, Stack, linear, refused, right


@right("reentrant checkpoints between blocks")
class Reentrant(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = x + checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=True)
        return x


class ReentrantFirst(Stack):
    """The first block gets no gradient, for what it is given wants none: reentrant checkpoints are like this."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        x = checkpoint(self.blocks[0], x, use_reentrant=True)
        for block in self.blocks[1:]:
            x = block(x)
        return x


ZOO["a reentrant checkpoint of the input"] = Entry(ReentrantFirst)


@right("a reentrant checkpoint around what is used twice")
class ReentrantTwice(Stack):
    def forward(self, x: Tensor) -> Any:
        x = self.blocks[0](x)
        made = checkpoint(lambda a: self.blocks[2](self.blocks[1](a)), x, use_reentrant=True)
        x = made * x
        for block in self.blocks[3:]:
            x = block(x)
        return x


@right("checkpoints between blocks that are not reentrant")
class NotReentrant(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = x + checkpoint(lambda x, block=block: block(x).tanh(), x, use_reentrant=False)
        return x


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient


@right("a function with its own backward between blocks")
class Rounds(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return Straight.apply(x)  # type: ignore[no-untyped-call]


class Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Any) -> Any:
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.block(x), gradient)
        return x.grad, None


@refused("a function that calls a block it is given", "Calls.*'blocks.0'", fix="call the block outside")
class CallsBlock(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = Calls.apply(x, block)  # type: ignore[no-untyped-call]
        return x


@refused("a function that calls a block in a closure", "Calls.*'blocks.0'", fix="call the block outside")
class CallsClosure(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = Calls.apply(x, lambda x, block=block: block(x))  # type: ignore[no-untyped-call]
        return x


class Doubles(torch.autograd.Function):
    """Changes its input in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return 2 * gradient


@right("a function that changes its input")
class Dirty(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        y = x + 1
        Doubles.apply(y)  # type: ignore[no-untyped-call]
        return y


@refused("vmap between blocks", expected="torch.vmap", fix="move it into a block")
class Maps(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return torch.vmap(lambda row: row * 2 + 1)(x)


@refused("vmap around a block", "'blocks.0'.*torch.func", fix="call it directly")
class MapsBlock(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = torch.vmap(block)(x)
        return x


class MapsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        return torch.vmap(self.layer)(x)


ZOO["vmap inside of blocks"] = Entry(lambda: Stack(MapsInside))


@refused(
    "other parameters for a block", "'blocks.0'.*parameters or buffers that are not its own", fix="functional_call"
)
class Functional(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            doubled = {name: 2 * param for name, param in block.named_parameters()}
            x = torch.func.functional_call(block, doubled, (x,))
        return x


@refused("a gradient taken between blocks", "takes a gradient between its blocks", fix="move it into a block")
class Energy(Stack):
    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        made = super().forward(x)
        (force,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return made + force


@refused("a backward between blocks", "takes a gradient between its blocks", fix="move it into a block")
class Backward(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        if at == 2 and x.requires_grad:
            torch.autograd.backward(x.square().mean(), retain_graph=True)
        return x


@contextmanager
def _lossy() -> Iterator[None]:
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x * 2, lambda x: x):
        yield


@refused("saved tensors changed around blocks", "'blocks.0'.*saved_tensors_hooks")
class Saves(Stack):
    def forward(self, x: Tensor) -> Any:
        with _lossy():
            return super().forward(x)


class Triples(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return 3 * made if func is functional.linear else made


@refused("a mode around blocks", "'blocks.0'.*Triples")
class Modes(Stack):
    def forward(self, x: Tensor) -> Any:
        with Triples():
            return super().forward(x)
