"""Models of the matrix of state whose parameters share memory or have hooks, and those that torch cannot split."""

# ruff: noqa: D101, D102

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from state_kinds import WIDTH, Keeps
from state_models import Plain, row

NODES: list[Any] = []  # a node dies with its hooks unless somebody holds it
Change = Callable[[nn.Sequential], object]


def weights(model: nn.Sequential) -> list[Any]:
    """Return the layers' weights."""
    return [block.layer.weight for block in model]  # type: ignore[union-attr]


# ---- memory that parameters share ------------------------------------------------------------------------------------


def tied_by_data() -> nn.Sequential:
    model = row()
    weights(model)[3].data = weights(model)[0].data
    return model


def tied_transposed() -> nn.Sequential:
    model = row()
    weights(model)[3].data = weights(model)[0].data.t()
    return model


def part_of_a_weight() -> nn.Sequential:
    model = row()
    last: Any = model[3]
    last.layer.bias = nn.Parameter(weights(model)[0].data[2])
    return model


class Shifts(Keeps):
    shift: Tensor

    def begin(self) -> None:
        self.register_buffer("shift", torch.zeros(WIDTH))

    def scale(self, x: Tensor) -> Any:
        return 1 + self.shift


def buffer_over_a_bias() -> nn.Sequential:
    model = row(Shifts())
    first, last = model[0], model[3]
    last.shift = first.layer.bias.data  # type: ignore[union-attr]
    return model


class Marked(Tensor):
    """A tensor of a class of its own."""


class Marks(Plain):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).as_subclass(Marked)


class Doubles(Plain):
    """Does something else to marked tensors."""

    def forward(self, x: Tensor) -> Any:
        twice = isinstance(x, Marked)
        return super().forward(x.as_subclass(Tensor)) * (2 if twice else 1)


def marked() -> nn.Sequential:
    return nn.Sequential(Plain(), Marks(), Doubles(), Plain())


# ---- hooks -----------------------------------------------------------------------------------------------------------


def changed(change: Change) -> Callable[[], nn.Sequential]:
    """Return what makes four layers, changed."""

    def make() -> nn.Sequential:
        model = row()
        change(model)
        return model

    return make


def halving(weight: nn.Parameter, *, before: bool, holds: bool = True) -> None:
    """Let what is added to a gradient be halved, in front of the sum or behind it."""
    node = get_gradient_edge(weight).node
    NODES.extend([node] if holds else [])
    if before:
        node.register_prehook(lambda gradients: (gradients[0] * 0.5,))
        return

    def halve(*_: Any) -> None:
        assert weight.grad is not None
        weight.grad.mul_(0.5)

    node.register_hook(halve)


def halved_before(model: nn.Sequential) -> None:
    for weight in weights(model):
        halving(weight, before=True)


def halved_after(model: nn.Sequential) -> None:
    for weight in weights(model):
        halving(weight, before=False)


def halved_by_nobody(model: nn.Sequential) -> None:
    """Put hooks on nodes that nobody holds, which die at once."""
    for weight in weights(model):
        halving(weight, before=True, holds=False)


class HalvesInside(Plain):
    """Puts a hook on its weight's node in every forward, where nobody holds the node but the graph."""

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if torch.is_grad_enabled() and y.requires_grad:
            weight = self.layer.weight
            assert isinstance(weight, nn.Parameter)
            halving(weight, before=True, holds=False)
        return y


def halving_inside() -> nn.Sequential:
    return row(*(HalvesInside() for _ in range(4)))


def clamped(model: nn.Sequential) -> None:
    for param in model.parameters():
        param.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))  # type: ignore[no-untyped-call]


def counted(model: nn.Sequential) -> None:
    """Let a hook of each weight scale gradients by how often it ran."""
    for weight in weights(model):
        calls: list[int] = []

        def scaled(gradient: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return gradient * (len(calls) % 3)

        weight.register_hook(scaled)


def capped(model: nn.Sequential) -> None:
    def cap(param: Tensor) -> None:
        assert param.grad is not None
        param.grad.clamp_(-0.01, 0.01)

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(cap)  # type: ignore[no-untyped-call]


def stepping(model: nn.Sequential) -> None:
    """Let a hook of each parameter step an optimizer and drop the gradient."""
    optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in model.parameters()}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in optimizers:
        param.register_post_accumulate_grad_hook(step)  # type: ignore[no-untyped-call]


def counting_backwards(model: nn.Sequential) -> None:
    """Let a hook of each block scale the gradient of its input by how often it ran."""
    for block in model:
        calls: list[int] = []

        def scaled(module: nn.Module, gradients: Any, outer: Any, calls: list[int] = calls) -> Any:
            calls.append(1)
            return tuple(None if each is None else each * (1 + len(calls) % 3) for each in gradients)

        block.register_full_backward_hook(scaled)


def counting_forwards(model: nn.Sequential) -> None:
    """Let a hook of each block scale its output by how often it ran."""
    for block in model:
        calls: list[int] = []

        def scaled(module: nn.Module, inputs: Any, output: Tensor, calls: list[int] = calls) -> Tensor:
            calls.append(1)
            return output * (1 + len(calls) % 3)

        block.register_forward_hook(scaled)


class CountsGradients(Plain):
    """Counts in a hook of a tensor, and scales its gradient by this."""

    def begin(self) -> None:
        self.calls = 0

    def counted(self, gradient: Tensor) -> Tensor:
        self.calls += 1
        return gradient * (1 + self.calls % 3)

    def forward(self, x: Tensor) -> Any:
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(self.counted)
        return y


def counting_gradients() -> nn.Sequential:
    return row(*(CountsGradients() for _ in range(4)))


# ---- what torch cannot split or copy ---------------------------------------------------------------------------------


class Checkpointed(Plain):
    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(lambda x: self.layer(x).tanh(), x.clone(), use_reentrant=True)


class CheckpointedCounter(Plain):
    """Has a reentrant checkpoint whose inside counts: plain training runs it twice before the next microbatch."""

    def begin(self) -> None:
        self.calls = 0

    def inside(self, x: Tensor) -> Any:
        self.calls += 1
        return self.layer(x).tanh() * (1 + self.calls % 3)

    def forward(self, x: Tensor) -> Any:
        return x + checkpoint(self.inside, x.clone(), use_reentrant=True)


def checkpoints() -> nn.Sequential:
    return nn.Sequential(Plain(), Checkpointed(), Plain(), Checkpointed())


def counting_checkpoints() -> nn.Sequential:
    return nn.Sequential(Plain(), CheckpointedCounter(), Plain(), CheckpointedCounter())


def weight_normed(model: nn.Sequential) -> None:
    for block in (model[0], model[3]):
        assert isinstance(block.layer, nn.Module)
        nn.utils.weight_norm(block.layer)


def pruned(model: nn.Sequential) -> None:
    for block in (model[0], model[3]):
        prune.l1_unstructured(block.layer, "weight", 0.5)  # type: ignore[no-untyped-call]


class Forgets(Plain):
    """Leaves something out when it is copied, as for a pickle."""

    def begin(self) -> None:
        self.factor = lambda x: 2 * x

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "factor"}

    def scale(self, x: Tensor) -> Any:
        return self.factor(x)  # type: ignore[no-untyped-call]


def forgetting() -> nn.Sequential:
    return row(Forgets())


def skipped(model: nn.Sequential) -> None:
    """Let a hook keep a block's output, and another add it two blocks later."""
    seen: list[Tensor] = []
    model[0].register_forward_hook(lambda module, given, output: seen.append(output))
    model[3].register_forward_hook(lambda module, given, output: output + seen[-1])


class Branches(Plain):
    """Raises on values that make no sense, and branches on others, inside of a block."""

    def forward(self, x: Tensor) -> Any:
        if x.isnan().any():
            raise ValueError("not a number")
        return super().forward(x if x.sum() > 0 else x * 2)


def branching() -> nn.Sequential:
    return row(Branches(), Branches())
