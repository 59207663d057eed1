"""Hooks of all kinds, in all places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from refused import saying
from zoo.entry import ZOO, Entry, Stack, linear, refused, right


def hooked(
    register: str, hook: Callable[..., Any], where: str = "blocks.2", **settings: Any
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Stack()
        getattr(model.get_submodule(where), register)(hook, **settings)
        return model

    return make


DOUBLES: dict[str, tuple[str, Any, dict[str, Any]]] = {
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
ON_LAST = "register it on the last block"
for kind, (register, hook, settings) in DOUBLES.items():
    ZOO[f"a {kind} hook on a block"] = Entry(hooked(register, hook, **settings))
    barred = saying("hook.*the model itself", fix=ON_LAST) if kind.startswith("backward") else None
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

    barred = saying("hook.*'body'", fix=ON_LAST) if kind.startswith("backward") else None
    ZOO[f"a {kind} hook on a container"] = Entry(on_container, barred)

    def on_sequential(register: str = register, hook: Any = hook, settings: Any = settings) -> nn.Module:
        model = nn.Sequential(*[linear() for _ in range(6)])
        getattr(model, register)(hook, **settings)
        return model

    barred = saying("hook.*the model itself", fix=ON_LAST) if kind.startswith("backward") else None
    ZOO[f"a {kind} hook on a top-level Sequential"] = Entry(on_sequential, barred)
    ZOO[f"a {kind} hook on a top-level Sequential without an example"] = Entry(
        on_sequential, saying("nn.Sequential with its own hooks|hook.*the model itself"), example=False
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
    lambda: nn.Sequential(*[linear() for _ in range(6)]), saying("hook"), change=_adds_to_chain
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
ZOO["a global backward hook"] = Entry(Stack, saying("global.*backward hook"), ambient=global_backward_hook)


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


ZOO["a hook's closure holds the model's list"] = Entry(_collector, saying("feats"))


@refused("a hook on a tensor between blocks", "hook on a tensor between its blocks", fix="move it into a block")
class TensorHook(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        if at == 2:
            x.register_hook(lambda gradient: 2 * gradient)  # type: ignore[no-untyped-call]
        return x


@refused("a hook on a node between blocks", "hook on a node", fix="move it into a block")
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
