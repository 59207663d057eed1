"""Hostile modules: models whose forward does what is hard to follow; each is trained right, or refused with a word.

`ZOO` maps a name to an `Entry`: how to make the model, what happens to it between steps, and, where it must be refused,
the words of the refusal. Everything else must end with the plain model's loss and gradients.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH = 6


@dataclass(frozen=True)
class Entry:
    """One animal: `change(model, step)` is called before every step, on the plain model too."""

    make: Callable[[], nn.Module]
    refused: str = ""  # words of the refusal; right if empty
    change: Callable[[Any, int], None] | None = None
    ambient: Callable[[], Any] | None = None  # a context to train in
    settings: dict[str, Any] | None = None  # of the pipeline
    example: bool = True
    either: bool = False  # refused where there are more stages than it can be cut into, right elsewhere


ZOO: dict[str, Entry] = {}


def right(name: str, **more: Any) -> Callable[[Any], Any]:
    """Register a model that must be trained right."""

    def register(make: Any) -> Any:
        ZOO[name] = Entry(make, **more)
        return make

    return register


def refused(name: str, words: str, **more: Any) -> Callable[[Any], Any]:
    """Register a model that must be refused with these words."""

    def register(make: Any) -> Any:
        ZOO[name] = Entry(make, words, **more)
        return make

    return register


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """Six blocks in a row; subclasses do something between them."""

    def __init__(self, make: Callable[[], nn.Module] = linear, count: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([make() for _ in range(count)])

    def between(self, x: Tensor, at: int) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        for at, block in enumerate(self.blocks):
            x = self.between(block(x), at)
        return x


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooked(
    register: str, hook: Callable[..., Any], where: str = "blocks.2", **settings: Any
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Stack()
        getattr(model.get_submodule(where), register)(hook, **settings)
        return model

    return make


DOUBLES = {
    "forward": ("register_forward_hook", lambda module, given, made: 2 * made, {}),
    "forward pre": ("register_forward_pre_hook", lambda module, given: (2 * given[0],), {}),
    "forward with kwargs": (
        "register_forward_hook", lambda module, given, named, made: 2 * made, {"with_kwargs": True}
    ),
    "forward pre with kwargs": (
        "register_forward_pre_hook", lambda module, given, named: ((2 * given[0],), named), {"with_kwargs": True}
    ),
    "backward": ("register_full_backward_hook", lambda module, given, made: (2 * given[0],), {}),
    "backward pre": ("register_full_backward_pre_hook", lambda module, given: (2 * given[0],), {}),
}  # fmt: skip
for kind, (register, hook, settings) in DOUBLES.items():
    ZOO[f"a {kind} hook on a block"] = Entry(hooked(register, hook, **settings))
    barred = "hook.*the model itself.*put it on a block" if kind.startswith("backward") else ""
    ZOO[f"a {kind} hook on the model"] = Entry(hooked(register, hook, where="", **settings), barred)


class Nested(nn.Module):
    """Blocks in an nn.Sequential of their own, which is called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[linear() for _ in range(5)])
        self.head = linear()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x).tanh())


for kind, (register, hook, settings) in DOUBLES.items():

    def on_container(register: str = register, hook: Any = hook, settings: Any = settings) -> nn.Module:
        model = Nested()
        getattr(model.body, register)(hook, **settings)
        return model

    barred = "hook.*'body'.*put it on a block" if kind.startswith("backward") else ""
    ZOO[f"a {kind} hook on a container"] = Entry(on_container, barred)

    def on_sequential(register: str = register, hook: Any = hook, settings: Any = settings) -> nn.Module:
        model = nn.Sequential(*[linear() for _ in range(6)])
        getattr(model, register)(hook, **settings)
        return model

    barred = "hook.*the model itself.*put it on a block" if kind.startswith("backward") else ""
    ZOO[f"a {kind} hook on a top-level Sequential"] = Entry(on_sequential, barred)
    ZOO[f"a {kind} hook on a top-level Sequential without an example"] = Entry(
        on_sequential, "nn.Sequential with hooks|hook.*the model itself", example=False
    )


def _adds_hook(model: Any, step: int) -> None:
    if step == 1:
        model.handle = model.blocks[1].register_forward_hook(lambda module, given, made: 3 * made)
    if step == 2:
        model.handle.remove()


ZOO["a hook that comes and goes"] = Entry(Stack, change=_adds_hook)


def _adds_to_container(model: Any, step: int) -> None:
    if step == 1:
        model.handle = model.body.register_forward_hook(lambda module, given, made: 3 * made)
    if step == 2:
        model.handle.remove()


ZOO["a hook on a container that comes and goes"] = Entry(Nested, change=_adds_to_container)


def _adds_to_chain(model: Any, step: int) -> None:
    if step == 1:
        model.register_forward_hook(lambda module, given, made: 3 * made)


ZOO["a hook on a top-level Sequential that comes later"] = Entry(
    lambda: nn.Sequential(*[linear() for _ in range(6)]), "hook", change=_adds_to_chain
)


@contextmanager
def global_forward_hook() -> Iterator[None]:
    def doubles(module: nn.Module, given: Any, made: Any) -> Any:
        return 1.5 * made if isinstance(module, nn.Linear) else None

    handle = nn.modules.module.register_module_forward_hook(doubles)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def global_backward_hook() -> Iterator[None]:
    def doubles(module: nn.Module, given: Any, made: Any) -> Any:
        return (1.5 * given[0],) if isinstance(module, nn.Linear) and given[0] is not None else None

    handle = nn.modules.module.register_module_full_backward_hook(doubles)
    try:
        yield
    finally:
        handle.remove()


ZOO["a global forward hook"] = Entry(Stack, ambient=global_forward_hook)
ZOO["a global backward hook"] = Entry(Stack, "global.*backward hook", ambient=global_backward_hook)


@right("hooks collect features in a local list, twice")
class LocalFeatures(Stack):
    """Puts hooks on its blocks for the time of the forward, as Hugging Face's models do."""

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        handles = [block.register_forward_hook(lambda module, given, made: kept.append(made)) for block in self.blocks]
        made = super().forward(x)
        for handle in handles:
            handle.remove()
        return made + torch.stack(kept).sum(0)


@refused("hooks collect features in the model's own list", "'feats'.*'blocks.0'")
class OwnFeatures(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.feats: list[Tensor] = []
        for block in self.blocks:
            block.register_forward_hook(lambda module, given, made: self.feats.append(made))

    def forward(self, x: Tensor) -> Any:
        self.feats.clear()
        made = super().forward(x)
        return made + torch.stack(self.feats).sum(0)


@refused("hooks collect features in a list that the forward makes anew", "feats")
class NewFeatures(OwnFeatures):
    def forward(self, x: Tensor) -> Any:
        self.feats = []
        made = Stack.forward(self, x)
        return made + torch.stack(self.feats).sum(0)


def _collector() -> nn.Module:
    model = Features()
    feats = model.feats

    def keep(module: nn.Module, given: Any, made: Tensor) -> None:
        feats.append(made)

    model.blocks[1].register_forward_hook(keep)
    return model


class Features(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.feats: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        made = super().forward(x)
        return made + 2 * self.feats.pop()


ZOO["a hook's closure holds the model's list"] = Entry(_collector, "feats")


@refused("a hook on a tensor between blocks", "hook on a tensor between its blocks.*move it into a block")
class TensorHook(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        if at == 2:
            x.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return x


@refused("a hook on a node between blocks", "hook on a node.*move it into a block")
class NodeHook(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        if at == 2 and x.grad_fn is not None:
            x.grad_fn.register_hook(lambda given, made: (2 * given[0], *given[1:]))
        return x


class HooksInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        x = self.layer(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return x * 1.5


ZOO["a hook on a tensor inside of blocks"] = Entry(lambda: Stack(HooksInside))


# ---- modes -----------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = linear(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x))


@refused("a block's mode set between blocks", "training.*'blocks.2.norm'")
class SetsMode(Stack):
    def __init__(self) -> None:
        super().__init__(Normed)

    def between(self, x: Tensor, at: int) -> Any:
        if at == 1:
            self.blocks[2].norm.eval()
        return x


@refused("a block's mode flipped and put back", "training.*'blocks.2'")
class FlipsMode(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(linear(), nn.Dropout(0.5)))

    def forward(self, x: Tensor) -> Any:
        self.blocks[2].eval()
        made = super().forward(x)
        self.blocks[2].train()
        return made


class UsesMode(Stack):
    """Dropout and the like between blocks, by the model's own mode and a child's."""

    def __init__(self) -> None:
        super().__init__(Normed)

    def between(self, x: Tensor, at: int) -> Any:
        x = x * 2 if self.training else x
        return x * 3 if self.blocks[2].training else x


def _evaluates_child(model: Any, step: int) -> None:
    model.blocks[2].train(step != 1)


def _evaluates(model: Any, step: int) -> None:
    model.train(step == 1)


ZOO["a child is put into eval mode between steps"] = Entry(UsesMode, change=_evaluates_child)
ZOO["the model is put into eval mode between steps"] = Entry(UsesMode, change=_evaluates)


@right("autocast around blocks", settings={"tolerance": 1e-2})
class Autocasts(Stack):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks[:3]:
                x = block(x)
        for block in self.blocks[3:]:
            x = block(x.float())
        return x


@right("a branch on autocast", settings={"precision": "bf16"})
class AsksAutocast(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return x * 2 if torch.is_autocast_enabled("cpu") else x


@right("regions without gradient")
class WithoutGradient(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        with torch.no_grad():
            largest = x.abs().max()
            most = self.blocks[0](x).mean()
        return x / largest + most


@right("an inference region")
class Infers(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        with torch.inference_mode():
            largest = float(WIDTH) + 0 * torch.ones(1)
        return x / largest.clone()


@right("a gradient switched off and on")
class SwitchesGradient(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        torch.set_grad_enabled(at != 2)
        made = x * 2 if torch.is_grad_enabled() else x + self.blocks[0](x)
        torch.set_grad_enabled(True)
        return made + x


# ---- branches --------------------------------------------------------------------------------------------------------

ASKS: dict[str, Callable[[Tensor], bool]] = {
    "requires_grad": lambda x: x.requires_grad,
    "grad_fn": lambda x: x.grad_fn is not None,
    "the name of grad_fn": lambda x: type(x.grad_fn).__name__ == "AddmmBackward0",
    "is_leaf": lambda x: not x.is_leaf,
    "is_contiguous()": lambda x: not x.t().is_contiguous(),
    "stride()": lambda x: x.t().stride() == (1, WIDTH),
    "grad mode": lambda x: torch.is_grad_enabled(),
    "is_inference()": lambda x: not x.is_inference(),
    "_version": lambda x: x._version == 0,
    "the type": lambda x: type(x) in (Tensor, nn.Parameter),
}
for what, ask in ASKS.items():

    def asking(ask: Any = ask) -> nn.Module:
        class Asks(Stack):
            def between(self, x: Tensor, at: int) -> Any:
                return x * 2 if ask(x) else x

        return Asks()

    ZOO[f"a branch on {what}"] = Entry(asking)

# What nothing but a comparison with the model itself can see: Python is not asked when it looks at a type.
ONLY_BY_CHECK = frozenset({"a branch on the type"})


class Transposes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x if x.shape[-1] == WIDTH else x.t()).t()


@right("a branch on what blocks hand over transposed")
class AsksTransposed(Stack):
    def __init__(self) -> None:
        super().__init__(Transposes)

    def between(self, x: Tensor, at: int) -> Any:
        return x.contiguous().t() if x.is_contiguous() else 2 * x.t()


class AsksInside(nn.Module):
    def __init__(self, ask: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.layer, self.ask = linear(), ask

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * (2 if self.ask(x) else 1)


for what in ("requires_grad", "grad_fn", "is_leaf"):
    ask = ASKS[what]
    ZOO[f"a branch on {what} inside of two blocks"] = Entry(
        lambda ask=ask: _two(AsksInside(ask), AsksInside(ask))  # type: ignore[misc]
    )


def _two(first: nn.Module, second: nn.Module) -> nn.Module:
    model = Stack(count=8)
    model.blocks[2], model.blocks[5] = first, second
    return model


@refused("a branch on the numbers in a tensor", "decides by the numbers in a tensor.*move it into a block")
class Decides(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return -x if x.sum() > 0 else x


@refused("a branch on a number read with item()", "decides by the numbers in a tensor.*move it into a block")
class Items(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return x * max(x.abs().max().item(), 1.0)


@refused("a branch on Python's random numbers", "random.*inside of a block")
class Drops(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            if random.random() < 0.5:
                x = block(x)
        return x


class DecidesInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        x = self.layer(x)
        return -x if x.sum() > 0 else x


ZOO["a branch on the numbers in a tensor inside of blocks"] = Entry(lambda: Stack(DecidesInside))


class HookedDecision(Stack):
    """Blocks that cannot run on stand-ins, with hooks that collect what they return."""

    def __init__(self) -> None:
        super().__init__(DecidesInside)

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        handles = [block.register_forward_hook(lambda module, given, made: kept.append(made)) for block in self.blocks]
        made = super().forward(x)
        for handle in handles:
            handle.remove()
        return made + torch.stack(kept).sum(0)


ZOO["hooks on blocks that decide by numbers"] = Entry(HookedDecision)


@refused("hooks inside of blocks that decide by numbers", "made and did not return")
class InnerFeatures(Stack):
    def __init__(self) -> None:
        super().__init__(DecidesInside)

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        handles = [
            block.layer.register_forward_hook(lambda module, given, made: kept.append(made)) for block in self.blocks
        ]
        made = super().forward(x)
        for handle in handles:
            handle.remove()
        return made + torch.stack(kept).sum(0)


# ---- memory ----------------------------------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = linear(), 1.0

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * self.scale


@refused("an attribute of blocks set between blocks", "'scale' of 'blocks.0'.*pass it to the block")
class SetsScale(Stack):
    def __init__(self) -> None:
        super().__init__(Scaled)

    def forward(self, x: Tensor) -> Any:
        for at, block in enumerate(self.blocks):
            block.scale = 0.5 + at
            x = block(x)
        return x


class Anneals(Stack):
    def __init__(self) -> None:
        super().__init__(Scaled)
        self.factor, self.settings = 1.0, {"shift": 0.5}
        self.config = SimpleNamespace(power=1)
        self.fixed = torch.ones(WIDTH)

    def between(self, x: Tensor, at: int) -> Any:
        return x**self.config.power * self.factor * self.blocks[0].scale + self.settings["shift"] * self.fixed


def annealing(change: Callable[[Any, int], Any]) -> Entry:
    return Entry(Anneals, change=change)


ZOO["an annealed attribute"] = annealing(lambda model, step: setattr(model, "factor", 1.0 - 0.25 * step))
ZOO["an annealed attribute of a block"] = annealing(lambda model, step: setattr(model.blocks[0], "scale", 1.0 + step))
ZOO["an annealed entry of a dict"] = annealing(lambda model, step: model.settings.update(shift=0.1 * step))
ZOO["an annealed field of an object"] = annealing(lambda model, step: setattr(model.config, "power", 1 + step % 2))
ZOO["a tensor changed in place"] = annealing(lambda model, step: model.fixed.add_(step))
ZOO["a tensor exchanged"] = annealing(lambda model, step: setattr(model, "fixed", torch.full((WIDTH,), 1.0 + step)))
ZOO["a number that becomes another kind of number"] = annealing(
    lambda model, step: setattr(model, "factor", (True, 1, 1.0)[step])
)

SETTINGS = {"scale": 1.0}
FACTOR = 1.0


class Globals(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return _scaled(x) * FACTOR


def _scaled(x: Tensor) -> Tensor:
    return x * SETTINGS["scale"]


def _sets_global(model: Any, step: int) -> None:
    global FACTOR
    FACTOR = 1.0 + step


ZOO["an annealed entry of a global dict"] = Entry(Globals, change=lambda model, step: SETTINGS.update(scale=1.0 + step))
ZOO["an annealed global"] = Entry(Globals, change=_sets_global)


def _closed_over() -> nn.Module:
    scale = [1.0]

    class Closed(Stack):
        def between(self, x: Tensor, at: int) -> Any:
            return x * scale[0]

    model = Closed()
    model.__dict__["anneal"] = lambda step: scale.__setitem__(0, 1.0 + step)
    return model


ZOO["an annealed variable of a closure"] = Entry(_closed_over, change=lambda model, step: model.anneal(step))


class ClassLevel(Stack):
    factor = 1.0

    def between(self, x: Tensor, at: int) -> Any:
        return x * self.factor


ZOO["an annealed attribute of the class"] = Entry(
    ClassLevel, change=lambda model, step: setattr(ClassLevel, "factor", 1.0 + step)
)


class Buffered(Stack):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def between(self, x: Tensor, at: int) -> Any:
        return x * self.scale


def _exchanges_buffer(model: Any, step: int) -> None:
    if step == 1:
        model.scale = torch.full((WIDTH,), 3.0)


ZOO["an exchanged buffer"] = Entry(Buffered, change=_exchanges_buffer)
ZOO["a buffer changed in place between steps"] = Entry(
    Buffered, change=lambda model, step: (model.scale.mul_(2.0), None)[1]
)


def _exchanges_block(model: Any, step: int) -> None:
    if step == 1:
        torch.manual_seed(5)
        model.blocks[2] = linear()


def _exchanges_inside(model: Any, step: int) -> None:
    if step == 1:
        torch.manual_seed(5)
        model.blocks[2].layer = linear()


ZOO["an exchanged block"] = Entry(Stack, "'blocks.2'.*make a new pipeline", change=_exchanges_block)
ZOO["an exchanged module inside of a block"] = Entry(
    lambda: Stack(Scaled), "'blocks.2.layer'.*make a new pipeline", change=_exchanges_inside
)
ZOO["an exchanged block of a Sequential"] = Entry(
    lambda: nn.Sequential(*[Scaled() for _ in range(6)]),
    "'2.layer'.*make a new pipeline",
    change=lambda model, step: step == 1 and setattr(model[2], "layer", linear()),
)
ZOO["a frozen parameter by which the forward decides"] = Entry(
    lambda: AsksFrozen(), change=lambda model, step: model.blocks[5].requires_grad_(step != 1) and None
)


class AsksFrozen(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return x * 2 if self.blocks[5].weight.requires_grad else x


@refused("a counter between blocks", "'count'.*in a block, or outside of the forward")
class Counts(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return super().forward(x) * self.count


@refused("a counter in a dict between blocks", "'state'.*in a block, or outside of the forward")
class CountsInDict(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"count": 0}

    def forward(self, x: Tensor) -> Any:
        self.state["count"] += 1
        return super().forward(x) * self.state["count"]


@refused("a first batch that is remembered", "'first'.*in a block, or outside of the forward")
class First(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.first: Any = None

    def between(self, x: Tensor, at: int) -> Any:
        if self.first is None:
            self.first = x.detach().mean()
        return x * self.first


@right("positions that are made once")
class Positions(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.positions: Any = None

    def between(self, x: Tensor, at: int) -> Any:
        if self.positions is None:
            self.positions = torch.arange(WIDTH) / WIDTH
        return x + self.positions


@right("an attribute that is set before it is read")
class Notes(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        self.last, self.at = x, at
        return self.last * (1 + self.at)


class CountsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.count = linear(), 0

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.layer(x) * (1 + self.count % 3)


ZOO["a counter inside of blocks"] = Entry(lambda: Stack(CountsInside))


@refused("a block that counts is called on several stages", "the model has 2 blocks for 4 stages", either=True)
class CountsTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = CountsInside(), linear()

    def forward(self, x: Tensor) -> Any:
        for _ in range(5):
            x = self.block(x)
        return self.head(x)


@refused("a block's counter read between blocks", "'count' of 'blocks.0'")
class ReadsCount(Stack):
    def __init__(self) -> None:
        super().__init__(CountsInside)

    def between(self, x: Tensor, at: int) -> Any:
        return x * (1 + self.blocks[0].count)


class ReadsOther(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.layer = linear()
        self.__dict__["other"] = other

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * (1 + self.other.count)  # type: ignore[operator]


def _reads_other() -> nn.Module:
    counts = CountsInside()
    return _two(counts, ReadsOther(counts))


ZOO["a block that reads another one's counter"] = Entry(_reads_other)


class Appends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor, kept: list[Tensor]) -> Any:
        x = self.layer(x)
        kept.append(x * 2)
        return x


@refused("a list that blocks append to", "'blocks.0' changes a list.*return")
class PassesList(Stack):
    def __init__(self) -> None:
        super().__init__(Appends)

    def forward(self, x: Tensor) -> Any:
        kept: list[Tensor] = []
        for block in self.blocks:
            x = block(x, kept)
        return x + sum(kept)


class Pops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, kept: list[Tensor]) -> Any:
        return self.layer(kept.pop())


@refused("a list that blocks take from", "'blocks.0' changes a list.*return")
class TakesList(Stack):
    def __init__(self) -> None:
        super().__init__(Pops)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = block([2 * x, x])
        return x


# ---- buffers ---------------------------------------------------------------------------------------------------------


class Averages(nn.Module):
    """Keeps an average of what it sees, as normalisations do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.layer(x - self.mean)


ZOO["averages inside of blocks"] = Entry(lambda: Stack(Averages))


class ReadsMean(nn.Module):
    def __init__(self, other: Averages) -> None:
        super().__init__()
        self.layer = linear()
        self.mean = other.mean

    def forward(self, x: Tensor) -> Any:
        return self.layer(x + self.mean)


class SharesMean(ReadsMean):
    def __init__(self, other: Averages) -> None:
        super().__init__(other)
        del self.mean
        self.register_buffer("mean", other.mean)


def _shares_buffer(kind: Any) -> nn.Module:
    model = Stack(count=8)
    averages = Averages()
    model.blocks[0], model.blocks[7] = averages, kind(averages)
    return model


BUFFER = "buffer.*mean.*changes|changes.*mean"
ZOO["a buffer changed in one stage and read in another"] = Entry(lambda: _shares_buffer(SharesMean), BUFFER)
ZOO["a buffer read as an attribute in another stage"] = Entry(
    lambda: _shares_buffer(ReadsMean), "has the buffer 'blocks.0.mean' of another stage.*register"
)
ZOO["a buffer of a Sequential read as an attribute in another stage"] = Entry(
    lambda: nn.Sequential(*_shares_buffer(ReadsMean).blocks),  # type: ignore[arg-type]
    "'7' has the buffer '0.mean' of another stage as its attribute 'mean'.*register",
)
ZOO["a buffer of a Sequential changed in one stage and read in another"] = Entry(
    lambda: nn.Sequential(*_shares_buffer(SharesMean).blocks),  # type: ignore[arg-type]
    BUFFER,
)


@refused("a block with an average called on several stages", BUFFER)
class AveragesTwice(CountsTwice):
    def __init__(self) -> None:
        super().__init__()
        self.block = Averages()  # type: ignore[assignment]


@refused("a block with running statistics called on several stages", "running statistics")
class NormsTwice(CountsTwice):
    def __init__(self) -> None:
        super().__init__()
        self.block = Normed()  # type: ignore[assignment]


@refused("a buffer changed between blocks of two stages", BUFFER)
class ChangesBetween(Stack):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor, at: int) -> Any:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - self.mean


@refused("a buffer exchanged between blocks", "in the place of the buffer 'mean'.*copy_")
class ExchangesBetween(ChangesBetween):
    def between(self, x: Tensor, at: int) -> Any:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean


# ---- functions -------------------------------------------------------------------------------------------------------


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


@refused("a function that calls a block it is given", "Calls.*'blocks.0'.*call it outside")
class CallsBlock(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = Calls.apply(x, block)  # type: ignore[no-untyped-call]
        return x


@refused("a function that calls a block in a closure", "Calls.*'blocks.0'.*call it outside")
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


@refused("vmap between blocks", "torch.vmap.*move it into a block")
class Maps(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return torch.vmap(lambda row: row * 2 + 1)(x)


@refused("vmap around a block", "'blocks.0'.*torch.func.*call it as it is")
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


@refused("other parameters for a block", "'blocks.0'.*other parameters.*functional_call")
class Functional(Stack):
    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            doubled = {name: 2 * one for name, one in block.named_parameters()}
            x = torch.func.functional_call(block, doubled, (x,))
        return x


@refused("a gradient taken between blocks", "takes a gradient between its blocks.*move it into a block")
class Energy(Stack):
    def forward(self, x: Tensor) -> Any:
        x = x.detach().requires_grad_()
        made = super().forward(x)
        (force,) = torch.autograd.grad(made.sum(), x, create_graph=True)
        return made + force


@refused("a backward between blocks", "takes a gradient between its blocks.*move it into a block")
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


# ---- shapes of models ------------------------------------------------------------------------------------------------


@right("one list of blocks used again")
class Again(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([linear() for _ in range(3)])
        self.same = self.blocks

    def forward(self, x: Tensor) -> Any:
        for block in [*self.blocks, *self.same]:
            x = block(x).tanh()
        return x


@right("recursion")
class Recursive(Stack):
    def forward(self, x: Tensor, at: int = 0) -> Any:
        if at == len(self.blocks):
            return x
        return x + self.forward(self.blocks[at](x), at + 1)


@right("a generator of blocks' outputs")
class Generates(Stack):
    def outputs(self, x: Tensor) -> Iterator[Tensor]:
        for block in self.blocks:
            x = block(x)
            yield x

    def forward(self, x: Tensor) -> Any:
        return torch.stack(list(self.outputs(x))).sum(0)


class Pair(NamedTuple):
    x: Tensor
    more: Tensor


@dataclass
class Fields:
    x: Tensor
    more: Tensor


class Wraps(nn.Module):
    def __init__(self, wrap: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.wrap = linear(), wrap

    def forward(self, x: Tensor) -> Any:
        x = self.layer(x)
        return self.wrap(x, 2 * x)


WRAPS = {"a named tuple": Pair, "a dataclass": Fields, "a dict": lambda x, more: {"x": x, "more": more}}
for what, wrap in WRAPS.items():

    def wrapping(wrap: Any = wrap) -> nn.Module:
        class Unwraps(Stack):
            def __init__(self) -> None:
                super().__init__(lambda: Wraps(wrap))

            def between(self, x: Any, at: int) -> Any:
                return x["x"] + x["more"].tanh() if isinstance(x, dict) else x.x + x.more.tanh()

        return Unwraps()

    ZOO[f"blocks that return {what}"] = Entry(wrapping)


@right("changes in place and views between blocks")
class InPlace(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        x = x * 1.0
        x[:, 0] = 0.0
        flat = x.view(-1)
        flat.mul_(2.0)
        return flat.view_as(x)


@right("a weight used between blocks")
class Shares(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return functional.linear(x, self.blocks[0].weight)


@right("a weight tied by an attribute")
class Ties(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[5].weight = self.blocks[0].weight


ZOO["weight norm"] = Entry(lambda: Stack(lambda: parametrizations.weight_norm(linear())))
ZOO["spectral norm"] = Entry(lambda: Stack(lambda: parametrizations.spectral_norm(linear())))


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return x.triu() + x.triu(1).transpose(-1, -2)


def _parametrized() -> nn.Module:
    def make() -> nn.Module:
        layer = linear()
        parametrize.register_parametrization(layer, "weight", Symmetric())
        return layer

    return Stack(make)


ZOO["parametrizations"] = Entry(_parametrized)


@refused("parametrizations cached around blocks", "'blocks.0'.*parametrize.cached")
class Cached(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: parametrizations.spectral_norm(linear()))

    def forward(self, x: Tensor) -> Any:
        with parametrize.cached():
            return super().forward(x)


@refused("a tensor that trains and is no parameter", "wants a gradient and is no parameter.*nn.Parameter")
class Loose(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.loose = torch.ones(WIDTH, requires_grad=True)

    def between(self, x: Tensor, at: int) -> Any:
        return x * self.loose


@right("an input whose requires_grad is set")
class Wants(Stack):
    def forward(self, x: Tensor) -> Any:
        y = x.detach().clone()
        y.requires_grad_(True)
        return super().forward(y * 2 if y.requires_grad else y)


class CallsItself(nn.Module):
    """Does something around its own call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def __call__(self, x: Tensor) -> Any:
        return 1.5 * super().__call__(x)

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


ZOO["blocks whose call does more"] = Entry(lambda: Stack(CallsItself))


@right("a block's forward called by itself")
class Bypasses(Stack):
    def forward(self, x: Tensor) -> Any:
        for at, block in enumerate(self.blocks):
            x = block.forward(x) if at == 2 else block(x)
        return x


@refused(
    "a mark on a tensor for the next block", "gives 'blocks.1' a tensor with the attribute 'scale'.*pass it beside"
)
class Marks(Stack):
    def __init__(self) -> None:
        super().__init__(ReadsMark)

    def between(self, x: Tensor, at: int) -> Any:
        x.scale = 2.0  # type: ignore[attr-defined]
        return x


class ReadsMark(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        return self.layer(x) * getattr(x, "scale", 1.0)


SEEN: list[Tensor] = []


@refused("hooks collect features in a global list", "changes SEEN.*variable of the forward's own")
class GlobalFeatures(Stack):
    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.register_forward_hook(lambda module, given, made: SEEN.append(made))

    def forward(self, x: Tensor) -> Any:
        SEEN.clear()
        made = super().forward(x)
        return made + torch.stack(SEEN).sum(0)


@functools.lru_cache
def _table(width: int) -> Tensor:
    return torch.arange(width) / width


TABLES: dict[int, Tensor] = {}


class LooksUp(nn.Module):
    """Uses tables that are made once, for all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, x: Tensor) -> Any:
        if WIDTH not in TABLES:
            TABLES[WIDTH] = torch.ones(WIDTH)
        return self.layer(x) + _table(WIDTH) * TABLES[WIDTH]


ZOO["tables that are made once for all blocks"] = Entry(lambda: Stack(LooksUp))


@refused("a hook that the forward puts on a block for a while", "puts a hook on 'blocks.2'.*outside of the forward")
class HooksForAWhile(Stack):
    def forward(self, x: Tensor) -> Any:
        handle = self.blocks[2].register_forward_hook(lambda module, given, made: 2 * made)
        made = super().forward(x)
        handle.remove()
        return made


@refused("an attribute of a tensor set by hand", "sets `.data`.*move it into a block")
class SetsData(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        y = x * 1
        y.data = 2 * y.data
        return y
