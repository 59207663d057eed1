"""Sequence parallelism: between divided layers, each line has a part of every row instead of all of it.

    whole ─split─► norm ─spread─► q, k, v, attention, o ─added─► + ─► norm ─spread─► mlp ─added─► + ─gathered─► whole
                   a part of      whole rows, some heads         a part of
                   the tokens                                    the tokens

The norms, dropouts and sums between the divided layers work only on their part of the tokens, so their activations take
1/tp of the memory. An all-gather and a reduce-scatter replace the sum of whole rows, and move as much. A layer, here,
is a block with divided modules inside; rows are whole before and after it, so that cuts see plain whole tensors.

Parameters of a layer outside its divided modules see some of the tokens only, so their gradients are summed over tp. A
dropout there draws for whole rows and takes its part, so that it drops what one process drops.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.lines.axes import Axes
from drumline.core.errors import ModelError
from drumline.features.mesh import passing
from drumline.features.mesh.parts import HookOf, as_it_is, hook_of
from drumline.features.mesh.passing import AXIS
from drumline.features.mesh.tensor.divide import DividedModule
from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.layers.styles import PlainStyle

_TOKENS = 1  # the dimension of a row's tokens
_FIX = "use sequence_parallel=False"


class SequenceLayers:
    """The layers whose rows are in parts, and the divided modules in them."""

    def __init__(self, axes: Axes, divided_modules: Sequence[DividedModule], blocks: Sequence[Block]) -> None:
        self.axes = axes
        self.is_on = True
        self.is_inside = False  # in a divided module, where rows are whole
        self._in_layer = False
        rows = {module.parent for module in divided_modules if module.takes_part}
        columns = {module.parent for module in divided_modules if module.makes_part}
        self.regions = [
            layer for layer in dict.fromkeys(module.parent for module in divided_modules) if layer in rows & columns
        ]
        tops = [top for block in blocks for top in _tops(block)]
        self.modules = [top for top in tops if self._inside(top)]
        self._check(divided_modules)

    def _inside(self, layer: nn.Module) -> list[nn.Module]:
        within = set(layer.modules()) - {layer}
        return [region for region in self.regions if region in within]

    def _check(self, modules: Sequence[DividedModule]) -> None:
        stacked = next((module.name for module in modules if module.style is PlainStyle.STACKED), None)
        if stacked is not None:
            raise ModelError(
                f"sequence_parallel is True, and tp divides the experts {stacked}, which would see a part of the rows",
                expected="whole experts, or whole rows",
                fix=f'give {stacked} the style "whole", or {_FIX}',
            )
        if not self.modules:
            raise ModelError(
                "sequence_parallel is True, and no block has its colwise and rowwise layers in a separate module",
                expected="blocks such as norm, attention, norm, feed-forward, each part a module",
                fix=_FIX,
            )
        known = {id(param) for each in modules for param in each.module.parameters()}
        for region in self.regions:
            for name, param in region.named_parameters():
                if id(param) not in known:
                    raise ModelError(
                        f"sequence_parallel is True, and {type(region).__name__} has {name} besides its divided layers",
                        expected="only divided layers and those of style partial in it",
                        fix=f'divide it, give it the style "partial", or {_FIX}',
                    )

    def attach(self, held_modules: Collection[nn.Module]) -> None:
        """Add the exchanges of the layers that this process holds."""
        for layer in (module for module in self.modules if module in held_modules):
            self._attach(layer, self._inside(layer), as_it_is)

    def attach_copies(self, copies: Mapping[nn.Module, nn.Module]) -> None:
        """Add those of the copies of layers that other ranks hold, by the user's own."""
        for layer in (module for module in self.modules if module in copies):
            self._attach(copies[layer], [copies[region] for region in self._inside(layer)], hook_of)

    def _attach(self, layer: nn.Module, regions: Sequence[nn.Module], hook_of: HookOf) -> None:
        inner_modules = {part for region in regions for part in region.modules()}
        mark_partial(
            param for part in layer.modules() if part not in inner_modules for param in part._parameters.values()
        )
        layer.register_forward_pre_hook(hook_of(layer, self._enter), with_kwargs=True)
        layer.register_forward_hook(hook_of(layer, self._leave))
        for region in regions:
            region.register_forward_pre_hook(hook_of(region, self._enter_region), with_kwargs=True)
            region.register_forward_hook(hook_of(region, self._leave_region))
        for part in layer.modules():
            if type(part) is nn.Dropout and "forward" not in vars(part):
                vars(part)["forward"] = _Dropping(self, part).forward

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.is_inside = self._in_layer = False
        if not self.is_on:
            return None
        self._in_layer = True
        return _changed(args, kwargs, lambda tensor: passing.split(tensor, self.axes, _TOKENS))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self.is_on:
            return None
        self._in_layer = False
        if isinstance(output, Tensor):
            return passing.gathered(output, self.axes, _TOKENS)
        return type(output)((passing.gathered(output[0], self.axes, _TOKENS), *output[1:]))

    def _enter_region(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self.is_on or not self._in_layer:
            return None
        self.is_inside = True
        return _changed(args, kwargs, lambda tensor: passing.spread(tensor, self.axes, _TOKENS))

    def _leave_region(self, module: nn.Module, args: Any, output: Any) -> None:
        self.is_inside = False

    @property
    def is_in_parts(self) -> bool:
        """Whether rows are in parts where the forward is now."""
        return self.is_on and self._in_layer and not self.is_inside


class _Dropping:
    """A dropout that draws for whole rows and applies its part."""

    __slots__ = ("_sequenced", "module")

    def __init__(self, sequenced: SequenceLayers, module: nn.Dropout) -> None:
        self._sequenced, self.module = sequenced, module

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - as torch names it
        module, axes = self.module, self._sequenced.axes
        if not self._sequenced.is_in_parts or not module.training or not module.p:
            return functional.dropout(input, module.p, module.training, module.inplace)
        shape = list(input.shape)
        shape[_TOKENS] *= axes.size(AXIS)
        noise = functional.dropout(torch.ones(shape, dtype=input.dtype, device=input.device), module.p)
        return input * passing.own_part(axes, noise, _TOKENS)


def _tops(block: Block) -> Iterator[nn.Module]:
    """Yield the modules that a block calls."""
    if not isinstance(block.module, Piece):
        yield block.module
        return
    there = dict(block.module.named_modules())
    yield from (there[name] for name in block.module.callees if name in there)


def _changed(args: Any, kwargs: Any, change: Any) -> Any:
    """Return a call's arguments with the first tensor, which is what flows through the layers, changed."""
    for at, argument in enumerate(args):
        if isinstance(argument, Tensor):
            return (*args[:at], change(_rows(argument)), *args[at + 1 :]), kwargs
    for name in dict.fromkeys(("hidden_states", *kwargs)):
        if isinstance(kwargs.get(name), Tensor):
            return args, {**kwargs, name: change(_rows(kwargs[name]))}
    raise ModelError("a layer takes no tensor", expected="its rows as the first argument", fix=_FIX)


def _rows(tensor: Tensor) -> Tensor:
    if tensor.dim() < 3 or not tensor.is_floating_point():
        raise ModelError(
            f"sequence_parallel is True, and a layer takes a tensor of shape {tuple(tensor.shape)}",
            expected="(rows, tokens, features) as its first argument",
            fix=_FIX,
        )
    return tensor


def mark_partial(parameters: Iterable[nn.Parameter | None]) -> None:
    """Let the gradients of parameters be summed over tp.

    >>> norm = nn.LayerNorm(2)
    >>> mark_partial(norm.parameters())
    >>> norm.weight.partial_over
    ('tp',)
    """
    for param in parameters:
        if param is not None:
            param.partial_over = (AXIS,)  # type: ignore[attr-defined]
