"""Lists of blocks that plain training runs rightly and a pipeline does not, unless somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 6
MEMORY: dict[str, Tensor] = {}
SKIPS: list[Tensor] = []


class Marked(Tensor):
    """A tensor of a class of its own."""


class Step(nn.Module):
    """A layer that does something before and after it."""

    def __init__(
        self,
        before: Callable[[Tensor], Any] = lambda x: x,
        after: Callable[[Tensor], Any] = lambda x: x,
    ) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Any:
        return self.after(self.layer(self.before(x)).tanh())


def row(*steps: nn.Module) -> nn.Sequential:
    return nn.Sequential(*steps)


def kept(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Tensor]:
    """Return what calls a function and passes on what it was given."""

    def called(x: Tensor) -> Tensor:
        function(x.detach())
        return x

    return called


def shared_list() -> nn.Sequential:
    skips: list[Tensor] = []
    return row(Step(after=kept(skips.append)), Step(), Step(), Step(before=lambda x: x + skips.pop()))


def last_of_a_global_list() -> nn.Sequential:
    return row(Step(after=kept(lambda x: SKIPS.append(x))), Step(), Step(), Step(before=lambda x: x + SKIPS[-1]))


def global_dict() -> nn.Sequential:
    def keep(x: Tensor) -> None:
        MEMORY["skip"] = x

    return row(Step(after=kept(keep)), Step(), Step(), Step(before=lambda x: x * MEMORY["skip"]))


def shared_dict() -> nn.Sequential:
    memory: dict[str, Tensor] = {}

    def keep(x: Tensor) -> None:
        memory["skip"] = x

    return row(Step(after=kept(keep)), Step(), Step(), Step(before=lambda x: x + memory["skip"]))


class Keeps(Step):
    """Keeps its output for another block, or for its own backward."""

    kept: Tensor

    def forward(self, x: Tensor) -> Any:
        self.kept = super().forward(x).detach()
        return super().forward(x)


def tensor_attribute() -> nn.Sequential:
    first = Keeps()
    return row(first, Step(), Step(), Step(before=lambda x: x + first.kept))


def on_the_class() -> nn.Sequential:
    class Notes(Step):
        notes: list[Tensor] = []  # noqa: RUF012 - a trick

        def forward(self, x: Tensor) -> Any:
            self.notes.append(x.detach())
            return super().forward(x)

    return row(Notes(), Step(), Step(), Step(before=lambda x: x + Notes.notes.pop()))


class Scaled(torch.autograd.Function):
    """Keeps its input on the layer, where the next microbatch overwrites it before the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, layer: Any) -> Tensor:
        layer.input = x
        ctx.layer, ctx.weight = layer, weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.weight, (gradient * ctx.layer.input).flatten(0, -2).sum(0), None


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Any:
        return Scaled.apply(x, self.weight, self)  # type: ignore[no-untyped-call]


def input_on_the_module() -> nn.Sequential:
    return row(Scale(), Step(), Step(), Step())


def own_forward() -> nn.Sequential:
    model = row(Step(), Step(), Step(), Step())
    inner: Any = model.forward
    model.forward = lambda x: inner(x) * 2 + x  # type: ignore[method-assign]
    return model


def under_autocast() -> nn.Sequential:
    model = row(Step(), Step(), Step(), Step())
    model.forward = torch.autocast("cpu", torch.bfloat16)(model.forward)  # type: ignore[method-assign]
    return model


class Called(nn.Sequential):
    def __call__(self, x: Tensor) -> Any:
        return super().__call__(x) + x


def own_call() -> nn.Sequential:
    return Called(Step(), Step(), Step(), Step())


def where_from() -> nn.Sequential:
    def gate(x: Tensor) -> Tensor:
        return 2 * x - x.detach() if x.grad_fn is not None else x

    return row(*(Step(before=gate) for _ in range(4)))


def base_of_a_view() -> nn.Sequential:
    def halves(x: Tensor) -> Tensor:
        return torch.cat([x, x], 1)[:, :WIDTH]

    def based(x: Tensor) -> Tensor:
        return x if x._base is None else x + x._base[:, WIDTH:]

    return row(Step(), Step(after=halves), Step(before=based), Step())


TRICKS: dict[str, Callable[[], nn.Sequential]] = {
    function.__name__: function
    for function in (
        shared_list, last_of_a_global_list, global_dict, shared_dict, tensor_attribute, on_the_class,
        input_on_the_module, own_forward, under_autocast, own_call, where_from, base_of_a_view,
    )
}  # fmt: skip


class Counts(nn.Module):
    """Scales by how often it was called, which a row of blocks does in the same order as plain training."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return self.layer(x) * (1 + 1 / self.calls)


class Draws(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(1)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) + torch.randn(WIDTH, generator=self.generator)


class Averages(nn.Module):
    """Keeps an average in a plain tensor, changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mean = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH)

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.layer(x - self.mean)


class SameForward(nn.Sequential):
    """Has a forward of its own on the instance that does what it always did."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__(*blocks)
        inner: Any = super().forward
        self.forward = lambda x: inner(x)  # type: ignore[method-assign]


def _global() -> nn.Sequential:
    """Count in a variable that blocks share, in the order of their calls."""
    seen = {"calls": 0}

    def count(x: Tensor) -> Tensor:
        seen["calls"] += 1
        return x * (1 + 0.1 * seen["calls"])

    return row(Step(before=count), Step(), Step(), Step())


def in_a_default() -> nn.Sequential:
    def later(x: Tensor, notes: list[Tensor] = []) -> Tensor:  # noqa: B006 - a memory
        notes.append(x.detach())
        return x + notes[0] if len(notes) < 2 else x + notes.pop(0)

    return row(Step(), Step(), Step(after=later), Step())


RIGHT: dict[str, Callable[[], Any]] = {
    "plain": lambda: row(*(Step() for _ in range(4))),
    "a list": lambda: [Step() for _ in range(4)],
    "a dict": lambda: {f"layers.{at}": Step() for at in range(4)},
    "a module list": lambda: nn.ModuleList(Step() for _ in range(4)),
    "batch norm": lambda: row(Step(), nn.BatchNorm1d(WIDTH), Step(), nn.BatchNorm1d(WIDTH)),
    "dropout": lambda: row(Step(), nn.Dropout(0.5), Step(), nn.Dropout(0.5)),
    "a counter": lambda: row(Counts(), Counts(), Counts(), Counts()),
    "a generator": lambda: row(Draws(), Draws(), Draws(), Draws()),
    "an average": lambda: row(Averages(), Averages(), Averages(), Averages()),
    "a counter in a closure": _global,
    "a memory in a default": in_a_default,
    "the same forward": lambda: SameForward(Step(), Step(), Step(), Step()),
    "one block twice": lambda: (lambda step: row(Step(), step, Step(), step))(Step()),
}
