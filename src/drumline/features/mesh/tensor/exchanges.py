"""What divided layers exchange around their forwards, so that each computes what it would in one process.

Each exchange is a hook of a module. They share what is known while a forward runs: the last input of layers by columns;
whether random numbers were drawn for parts; and which layer has made parts that are on their way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.channel.lines.axes import Axes
from drumline.core.errors import DrumlineError, ModelError
from drumline.features.mesh import passing
from drumline.features.mesh.passing import AXIS
from drumline.features.mesh.tensor.divide import DividedModule
from drumline.features.mesh.tensor.sequence import SequenceLayers
from drumline.model.layers.routing import is_traced
from drumline.model.layers.styles import PlainStyle
from drumline.model.randomness import Randomness
from drumline.model.values import mapped


class LayerExchanges:
    """The exchanges of a model's divided layers, and what they share while a forward runs."""

    def __init__(
        self, axes: Axes, divided_modules: Sequence[DividedModule], sequenced: SequenceLayers | None = None
    ) -> None:
        self.axes, self.sequenced = axes, sequenced
        self.divided_modules: list[DividedModule] = []
        self.is_on = True  # while off, modules are as in one process
        self.unseen: set[nn.Module] = set()  # layers by rows before which it is not known that nothing is drawn
        self._last: tuple[Tensor, int, Tensor] | None = None  # the last input of layers by columns, and its copy
        self._states: list[Tensor] = []
        self._makers: dict[nn.Module, DividedModule] = {}
        self._behind: DividedModule | None = None  # the last of them that ran, while its part is on its way
        self.know(divided_modules)

    def know(self, layers: Iterable[DividedModule]) -> None:
        """Take note of layers that are divided."""
        for layer in layers:
            self.divided_modules.append(layer)
            if layer.makes_part or layer.style is PlainStyle.STACKED:
                self._makers[layer.module] = layer

    def before_columns(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let the gradient of a layer's input be summed: once if several layers, such as q, k and v, share it."""
        if not self.is_on:
            return None
        tensor = given_in(args, kwargs)
        if is_traced(tensor):
            return None
        self._behind = self._makers.get(module, self._behind)
        if self.unseen and not self._states:
            self._states = Randomness(0, tensor.device).states()
        if self._is_inside or not tensor.requires_grad or not torch.is_grad_enabled():
            return None
        last = self._last
        if last is None or last[0] is not tensor or last[1] != tensor._version:
            self._last = last = (tensor, tensor._version, passing.copied(tensor, self.axes))
        return replaced_in(args, kwargs, last[2])

    def before_stack(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let the gradients of all inputs be summed, those of a router's weights too."""
        if not self.is_on:
            return None
        self._behind = self._makers.get(module)
        return mapped((args, kwargs), self.copied)

    def copied(self, tensor: Tensor) -> Tensor:
        """Return a tensor whose gradient is summed, if it takes one."""
        needed = tensor.requires_grad and torch.is_grad_enabled() and not is_traced(tensor)
        return passing.copied(tensor, self.axes) if needed else tensor

    def after_stack(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        """Sum what the parts of experts have added."""
        self._behind = None
        return passing.summed(output, self.axes) if self.is_on else None

    def before_once(self, module: nn.Module, args: Any) -> Any:
        """Divide what all lines keep alike, since their outputs are added up."""
        return (args[0] / self.axes.size(AXIS), *args[1:]) if self.is_on else None

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Say what tp has to do with an error of a forward that sees a part of its features."""
        self._behind = None
        try:
            yield
        except (DrumlineError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            if self._behind is None:
                raise
            raise _refusal(self._behind, self._makers.values(), self.axes.size(AXIS), error) from error

    @property
    def _is_inside(self) -> bool:
        return self.sequenced is not None and self.sequenced.is_inside

    def after_rows(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        """Sum the outputs of all lines; each has added the bias, which must count once."""
        if not self.is_on:
            return None
        self._region_ended(module, output)
        bias = module._parameters.get("bias")
        if bias is not None and self.axes.place(AXIS):
            output = output - bias.detach().to(output.dtype)
        if self.sequenced is not None and self.sequenced.is_inside:
            self.sequenced.is_inside = False
            return passing.added(output, self.axes, 1)
        return passing.summed(output, self.axes)

    def after_columns(self, parts: int, module: nn.Module, args: Any, output: Tensor) -> Any:
        """Return the whole output of a layer by columns."""
        if not self.is_on:
            return None
        self._last, self._states = None, []
        whole = passing.gathered(output, self.axes, -1)
        return whole if parts == 1 else _sorted(whole, self.axes.size(AXIS), parts)

    def before_rows(self, parts: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a layer by rows whose input is whole, with the own part of it."""
        if not self.is_on:
            return None
        tensor = given_in(args, kwargs)
        arranged = tensor if parts == 1 else _sorted(tensor, parts, self.axes.size(AXIS))
        return replaced_in(args, kwargs, passing.split(arranged, self.axes, -1))

    def after_latent(self, width: int, module: nn.Module, args: Any, output: Tensor) -> Any:
        """Sum the gradient of a whole layer's last outputs, which go to this line's heads."""
        if not self.is_on or is_traced(output):
            return None
        latent, rotary = output[..., :-width], output[..., -width:]
        return torch.cat([latent, self.copied(rotary)], -1)

    def _region_ended(self, module: nn.Module, output: Tensor) -> None:
        """Forget the shared input, and refuse random numbers drawn for parts: each line would draw its own."""
        self._last = self._behind = None
        states, self._states = self._states, []
        if module in self.unseen and module.training and states:
            if Randomness(0, output.device).has_moved(states):
                name = next(
                    divided_module.name for divided_module in self.divided_modules if divided_module.module is module
                )
                raise ModelError(
                    f"random numbers are drawn before {name} for this line's part alone, as by a dropout of attention",
                    expected="draws for whole tensors only, which all lines repeat in the same way",
                    fix="set that dropout to 0, or divide the model over another axis",
                )
            self.unseen.discard(module)


def _sorted(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Return the features, in `outer` groups of `inner`, as `inner` groups of `outer`.

    >>> _sorted(torch.tensor([[0, 4, 1, 5]]), 2, 2)
    tensor([[0, 1, 4, 5]])
    """
    return tensor.reshape(*tensor.shape[:-1], outer, inner, -1).transpose(-3, -2).flatten(-3)


class Lookup:
    """Around an embedding of which this line has some rows: tokens of other rows give zeros."""

    __slots__ = ("_exchanges", "_outside", "first", "length")

    def __init__(self, exchanges: LayerExchanges, module: nn.Embedding) -> None:
        self._exchanges = exchanges
        self.length = module.num_embeddings // exchanges.axes.size(AXIS)
        self.first = self.length * exchanges.axes.place(AXIS)
        self._outside: Tensor | None = None

    def local(self, index: int) -> int | None:
        """Return the number here of a row of the whole, None if another line has it."""
        return index - self.first if self.first <= index < self.first + self.length else None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments with rows as they are numbered here, 0 for those of other lines."""
        if not self._exchanges.is_on:
            return None
        ids = given_in(args, kwargs)
        if ids.is_cpu and not is_traced(ids) and ids.numel():
            low, high = (int(tensor) for tensor in ids.aminmax())
            if low < 0 or high >= self.length * self._exchanges.axes.size(AXIS):
                raise IndexError("index out of range in self")  # as torch says
        self._outside = (ids < self.first) | (ids >= self.first + self.length)
        return replaced_in(args, kwargs, (ids - self.first).masked_fill(self._outside, 0))

    def after(self, module: nn.Module, args: Any, output: Tensor) -> Any:
        """Return the sum of what all lines have looked up."""
        if not self._exchanges.is_on:
            return None
        outside, self._outside = self._outside, None
        assert outside is not None
        return passing.summed(output.masked_fill(outside.unsqueeze(-1), 0.0), self._exchanges.axes)


def rotary_width(part: DividedModule) -> int:
    """Return how many of a latent attention's joint outputs are rotary keys, which all heads share."""
    for place in (part.parent, getattr(part.parent, "config", None)):
        width = getattr(place, "qk_rope_head_dim", None)
        if isinstance(width, int):
            return width
    raise ModelError(
        f"tensor_parallel gives {part.name} the style latent, and {type(part.parent).__name__} has no qk_rope_head_dim",
        expected="that number: how many of its last outputs go to the heads directly",
    )


def given_in(args: Any, kwargs: Any) -> Tensor:
    """Return the tensor that a layer is called with."""
    tensor: Tensor = args[0] if args else next(iter(kwargs.values()))
    return tensor


def replaced_in(args: Any, kwargs: Any, tensor: Tensor) -> Any:
    """Return a call's arguments with another first tensor."""
    if args:
        return (tensor, *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: tensor}


def _refusal(behind: DividedModule, makers: Iterable[DividedModule], size: int, error: Exception) -> ModelError:
    """Return what to raise for an error of a forward behind a layer that makes parts, one of several in its module.

    How a forward cuts features into heads cannot be seen beforehand: few modules tell their numbers.

    >>> from drumline.model.layers.styles import Colwise
    >>> key = DividedModule("attention.key", nn.Linear(8, 2), Colwise(), nn.Module())
    >>> print(_refusal(key, [key], 2, RuntimeError("no heads of 4 in 2")))
    the forward of attention (Module) fails with the features that tp = 2 leaves each line, attention.key 2 of 4: ...
    """
    reasons = []
    for module in (maker for maker in makers if maker.parent is behind.parent):
        key = min(module.slices, key="weight".__ne__)
        length = module.module.get_parameter(key).shape[module.slices[key].dim]
        reasons.append(f"{module.name} {length} of {length * size}")
    said = str(error).partition("\n")[0]
    return ModelError(
        f"the forward of {behind.name.rpartition('.')[0] or behind.name} ({type(behind.parent).__name__}) fails with "
        f"the features that tp = {size} leaves each line, {', '.join(reasons)}: {type(error).__name__}: {said}",
        expected="a forward that takes any number of whole heads, and numbers of heads, of keys and values too, "
        f"that are multiples of {size}",
        fix="choose a tp that divides them, or divide the model along another axis of the mesh",
    )
