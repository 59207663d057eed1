"""Give each line its part of the divided layers, and let these exchange what one process would have had.

    x ──► q_proj, k_proj, v_proj  by columns: one line, some heads    before them: the gradient of x is summed, once
          attention               each line's own heads
      ──► o_proj                  by rows                             after it: the outputs are summed

Modules keep their class and their names; a parameter is replaced by its part, which carries its `slice`. The exchanges
are hooks of the modules, outside of their forwards: a layer's weight gradient needs none of them, so that a split
backward works as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError, ModelError
from drumline.model.block import Block
from drumline.model.catalogue import places_in
from drumline.model.patches import put_in
from drumline.model.randomness import generator_states
from drumline.model.values import mapped
from drumline.runtime.axes.axes import Axes
from drumline.runtime.axes.reduce import share_values
from drumline.runtime.axes.slices import Slice, slice_of
from drumline.runtime.axes.tensor import passing
from drumline.runtime.axes.tensor.divide import Divided, divided_by, head_counts
from drumline.runtime.axes.tensor.explained import refusal
from drumline.runtime.axes.tensor.pairs import refuse_unpaired
from drumline.runtime.axes.tensor.passing import AXIS, is_traced
from drumline.runtime.axes.tensor.sequence import Sequenced, mark_partial
from drumline.runtime.axes.tensor.styles import Colwise, Latent, Once, Partial, Plan, Rowwise, Stacked


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """A place of a divided parameter, of which this line holds `local`."""

    table: dict[str, Any]
    key: str
    local: nn.Parameter


class TensorParallel:
    """The divided layers of a model; `divide` applies it to the blocks that this process holds."""

    def __init__(self, axes: Axes, plan: Plan, blocks: Sequence[Block], *, sequence: bool = False) -> None:
        self.axes = axes
        self.found = divided_by(plan, blocks, axes.size(AXIS))
        if not plan.is_own:  # those of models are known to pair, by whatever names
            refuse_unpaired(self.found)
        self.sequenced = Sequenced(axes, self.found, blocks) if sequence else None
        self.is_on = True  # while off, modules are as in one process
        self._parts: list[_Part] = []
        self._attributes: list[tuple[dict[str, Any], str, Any]] = []  # of modules, with the values of one process
        self._last: tuple[Tensor, int, Tensor] | None = None  # the last input of layers by columns, and its copy
        self._unseen: set[nn.Module] = set()  # layers by rows before which it is not known that nothing is drawn
        self._states: list[Tensor] = []
        self._makers = {one.module: one for one in self.found if _makes_part(one) or isinstance(one.style, Stacked)}
        self._behind: Divided | None = None  # the last of them that ran, while its part is on its way

    @property
    def is_partial(self) -> bool:
        """Whether some parameters' gradients have to be summed over tp."""
        return any(isinstance(one.style, Partial) for one in self.found) or bool(
            self.sequenced is not None and self.sequenced.modules
        )

    @property
    def described(self) -> list[str]:
        """What is divided, as text, for the ranks to compare."""
        return [f"{one.name}: {one.style}" for one in self.found]

    # ---- dividing ----------------------------------------------------------------------------------------------------

    def divide(self, blocks: Sequence[Block], others: Sequence[Block], device: torch.device) -> None:
        """Replace the parameters of these blocks by this line's parts of them; all lines call it alike.

        `others` are the model's other blocks. They stay whole, and share what they shared while the model is whole.
        """
        held = {module for block in blocks for module in block.module.modules()}
        mine = [one for one in self.found if one.module in held]
        made: dict[int, nn.Parameter] = {}
        places, elsewhere = (
            [place for block in each for place in places_in(block) if place.is_parameter] for each in (blocks, others)
        )
        for one in mine:
            for key, part in one.slices.items():
                whole = one.module._parameters[key]
                assert whole is not None
                if id(whole) not in made:
                    local = made[id(whole)] = self._local(whole, part, device)
                    made[id(local)] = local
                    self._parts += [
                        _Part(place.table, place.key, local) for place in elsewhere if place.tensor is whole
                    ]
                    for place in (place for place in places if place.tensor is whole):
                        place.table[place.key] = local
                        self._parts.append(_Part(place.table, place.key, local))
            self._attach(one)
            if isinstance(one.style, Partial):
                mark_partial(one.module.parameters())
        for parent in dict.fromkeys(one.parent for one in mine if isinstance(one.style, Colwise)):
            if any(one.parent is parent and _makes_part(one) for one in mine):
                for name, count in head_counts(parent):
                    self._set(parent, name, count // self.axes.size(AXIS))
        if self.sequenced is not None:
            self.sequenced.attach(held)

    @torch.no_grad()
    def _local(self, whole: nn.Parameter, part: Slice, device: torch.device) -> nn.Parameter:
        there = whole.detach().to(device)
        share_values(self.axes, [there])  # so that the lines' parts are those of one model
        local = part.local(there, self.axes.place(AXIS), self.axes.size(AXIS))
        # A part that is a view would keep the whole in memory.
        made = nn.Parameter(local if local._base is None else local.clone(), whole.requires_grad)
        made.__dict__.update(vars(whole))
        made._backward_hooks = whole._backward_hooks
        made.slice = part  # type: ignore[attr-defined]
        return made

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        space = vars(module)
        self._attributes.append((space, name, space[name]))
        space[name] = value

    def _attach(self, one: Divided) -> None:
        """Add the exchanges of a layer, and let its attributes tell the sizes that it has."""
        module, size = one.module, self.axes.size(AXIS)
        if isinstance(one.style, Stacked | Latent | Once):
            self._attach_inner(one)
        elif isinstance(one.style, Colwise):
            if isinstance(module, nn.Linear):
                self._set(module, "out_features", module.out_features // size)
                module.register_forward_pre_hook(self._before_columns, with_kwargs=True)
            elif isinstance(module, nn.Embedding):
                self._set(module, "embedding_dim", module.embedding_dim // size)
            if one.style.gather:
                module.register_forward_hook(_Gathering(self, one.style.parts).after, prepend=True)
        elif isinstance(one.style, Rowwise):
            assert isinstance(module, nn.Linear)
            self._set(module, "in_features", module.in_features // size)
            if one.style.split:
                module.register_forward_pre_hook(_Splitting(self, one.style.parts).before, with_kwargs=True)
            else:
                self._unseen.add(module)
            module.register_forward_hook(self._after_rows, prepend=True)
        elif isinstance(module, nn.Embedding) and one.slices:
            looking = _Lookup(self, module)
            self._set(module, "num_embeddings", looking.length)
            if module.padding_idx is not None:
                self._set(module, "padding_idx", looking.local(module.padding_idx))
            module.register_forward_pre_hook(looking.before, with_kwargs=True)
            module.register_forward_hook(looking.after, prepend=True)

    def _attach_inner(self, one: Divided) -> None:
        """Add the exchanges of a module that is no plain layer."""
        if isinstance(one.style, Stacked):
            one.module.register_forward_pre_hook(self._before_stack, with_kwargs=True)
            one.module.register_forward_hook(self._after_stack, prepend=True)
        elif isinstance(one.style, Latent):
            one.module.register_forward_hook(_Latent(self, rotary_width(one)).after, prepend=True)
        else:
            one.module.register_forward_pre_hook(self._before_once)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have the modules as in one process inside, with whole parameters; all lines call it alike."""
        wholes: dict[int, nn.Parameter] = {}
        entries: list[tuple[dict[str, Any], str, Any]] = list(self._attributes)
        for one in self._parts:
            local, part = one.local, slice_of(one.local)
            if id(local) not in wholes and part is not None:
                whole = part.whole(self.axes.gathered(local.detach(), AXIS))
                wholes[id(local)] = nn.Parameter(whole, local.requires_grad)
                wholes[id(local)]._backward_hooks = local._backward_hooks
            entries.append((one.table, one.key, wholes[id(local)]))
        entries.append((vars(self), "is_on", False))
        if self.sequenced is not None:
            entries.append((vars(self.sequenced), "is_on", False))
        with put_in(entries):
            yield

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return of a whole tensor the part that a parameter is of its whole."""
        part = slice_of(parameter)
        return whole if part is None else part.local(whole, self.axes.place(AXIS), self.axes.size(AXIS))

    def sum_of(self, gradient: Tensor, parameter: Tensor) -> Tensor:
        """Return the sum of a gradient over tp, on the gradient's own device."""
        return passing.sum_of(self.axes, gradient.to(parameter.device)).to(gradient.device)

    # ---- exchanges ---------------------------------------------------------------------------------------------------

    def _before_columns(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let the gradient of a layer's input be summed: once if several layers, such as q, k and v, share it."""
        if not self.is_on:
            return None
        given = given_in(args, kwargs)
        if is_traced(given):
            return None
        self._behind = self._makers.get(module, self._behind)
        if self._unseen and not self._states:
            self._states = generator_states(given.device)
        if self._is_inside or not given.requires_grad or not torch.is_grad_enabled():
            return None
        last = self._last
        if last is None or last[0] is not given or last[1] != given._version:
            self._last = last = (given, given._version, passing.copied(given, self.axes))
        return replaced_in(args, kwargs, last[2])

    def _before_stack(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Let the gradients of all inputs be summed, those of a router's weights too."""
        if not self.is_on:
            return None
        self._behind = self._makers.get(module)
        return mapped((args, kwargs), self._copied)

    def _copied(self, given: Tensor) -> Tensor:
        needed = given.requires_grad and torch.is_grad_enabled() and not is_traced(given)
        return passing.copied(given, self.axes) if needed else given

    def _after_stack(self, module: nn.Module, args: Any, made: Tensor) -> Any:
        self._behind = None
        return passing.summed(made, self.axes) if self.is_on else None

    def _before_once(self, module: nn.Module, args: Any) -> Any:
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
            raise refusal(self._behind, self._makers.values(), self.axes.size(AXIS), error) from error

    @property
    def _is_inside(self) -> bool:
        return self.sequenced is not None and self.sequenced.is_inside

    def _after_rows(self, module: nn.Module, args: Any, made: Tensor) -> Any:
        """Sum the outputs of all lines; each has added the bias, which must count once."""
        if not self.is_on:
            return None
        self._region_ended(module, made)
        bias = module._parameters.get("bias")
        if bias is not None and self.axes.place(AXIS):
            made = made - bias.detach().to(made.dtype)
        if self.sequenced is not None and self.sequenced.is_inside:
            self.sequenced.is_inside = False
            return passing.added(made, self.axes, 1)
        return passing.summed(made, self.axes)

    def _region_ended(self, module: nn.Module, made: Tensor) -> None:
        """Forget the shared input, and refuse random numbers drawn for parts: each line would draw its own."""
        self._last = self._behind = None
        states, self._states = self._states, []
        if module in self._unseen and module.training and states:
            drew = any(not torch.equal(*pair) for pair in zip(states, generator_states(made.device), strict=True))
            if drew:
                name = next(one.name for one in self.found if one.module is module)
                raise ModelError(
                    f"random numbers are drawn before {name} for this line's part alone, as by a dropout of attention",
                    expected="draws for whole tensors only, which all lines repeat alike",
                    fix="set that dropout to 0, or divide the model over another axis",
                )
            self._unseen.discard(module)


class _Gathering:
    """After a layer by columns: the whole output."""

    __slots__ = ("_tensors", "parts")

    def __init__(self, tensors: TensorParallel, parts: int) -> None:
        self._tensors, self.parts = tensors, parts

    def after(self, module: nn.Module, args: Any, made: Tensor) -> Any:
        if not self._tensors.is_on:
            return None
        axes = self._tensors.axes
        self._tensors._last, self._tensors._states = None, []
        whole = passing.gathered(made, axes, -1)
        return whole if self.parts == 1 else _sorted(whole, axes.size(AXIS), self.parts)


class _Latent:
    """After a whole layer: of its last outputs, which go to this line's heads, the gradients of all lines."""

    __slots__ = ("_tensors", "width")

    def __init__(self, tensors: TensorParallel, width: int) -> None:
        self._tensors, self.width = tensors, width

    def after(self, module: nn.Module, args: Any, made: Tensor) -> Any:
        if not self._tensors.is_on or is_traced(made):
            return None
        latent, rotary = made[..., : -self.width], made[..., -self.width :]
        return torch.cat([latent, self._tensors._copied(rotary)], -1)


class _Splitting:
    """Before a layer by rows whose input is whole: the own part of it."""

    __slots__ = ("_tensors", "parts")

    def __init__(self, tensors: TensorParallel, parts: int) -> None:
        self._tensors, self.parts = tensors, parts

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._tensors.is_on:
            return None
        axes, given = self._tensors.axes, given_in(args, kwargs)
        arranged = given if self.parts == 1 else _sorted(given, self.parts, axes.size(AXIS))
        return replaced_in(args, kwargs, passing.split(arranged, axes, -1))


def _sorted(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Return the features, in `outer` groups of `inner`, as `inner` groups of `outer`.

    >>> _sorted(torch.tensor([[0, 4, 1, 5]]), 2, 2)
    tensor([[0, 1, 4, 5]])
    """
    return tensor.reshape(*tensor.shape[:-1], outer, inner, -1).transpose(-3, -2).flatten(-3)


class _Lookup:
    """Around an embedding of which this line has some rows: tokens of other rows give zeros."""

    __slots__ = ("_apart", "_tensors", "first", "length")

    def __init__(self, tensors: TensorParallel, module: nn.Embedding) -> None:
        self._tensors = tensors
        self.length = module.num_embeddings // tensors.axes.size(AXIS)
        self.first = self.length * tensors.axes.place(AXIS)
        self._apart: Tensor | None = None

    def local(self, index: int) -> int | None:
        """Return the number here of a row of the whole, None if another line has it."""
        return index - self.first if self.first <= index < self.first + self.length else None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._tensors.is_on:
            return None
        ids = given_in(args, kwargs)
        if ids.is_cpu and not is_traced(ids) and ids.numel():
            low, high = (int(one) for one in ids.aminmax())
            if low < 0 or high >= self.length * self._tensors.axes.size(AXIS):
                raise IndexError("index out of range in self")  # as torch says
        self._apart = (ids < self.first) | (ids >= self.first + self.length)
        return replaced_in(args, kwargs, (ids - self.first).masked_fill(self._apart, 0))

    def after(self, module: nn.Module, args: Any, made: Tensor) -> Any:
        if not self._tensors.is_on:
            return None
        apart, self._apart = self._apart, None
        assert apart is not None
        return passing.summed(made.masked_fill(apart.unsqueeze(-1), 0.0), self._tensors.axes)


def rotary_width(one: Divided) -> int:
    """Return how many of a latent attention's joint outputs are rotary keys, which all heads share."""
    for place in (one.parent, getattr(one.parent, "config", None)):
        width = getattr(place, "qk_rope_head_dim", None)
        if isinstance(width, int):
            return width
    raise ModelError(
        f"tensor_parallel gives {one.name} the style latent, and {type(one.parent).__name__} has no qk_rope_head_dim",
        expected="that number: how many of its last outputs go to the heads directly",
    )


def given_in(args: Any, kwargs: Any) -> Tensor:
    """Return the tensor that a layer is called with."""
    given: Tensor = args[0] if args else next(iter(kwargs.values()))
    return given


def replaced_in(args: Any, kwargs: Any, given: Tensor) -> Any:
    """Return a call's arguments with another first tensor."""
    if args:
        return (given, *args[1:]), kwargs
    name = next(iter(kwargs))
    return args, {**kwargs, name: given}


def is_partial(parameter: Tensor) -> bool:
    """Whether a parameter's gradient is the sum of all lines'."""
    return AXIS in getattr(parameter, "partial_over", ())


def _makes_part(one: Divided) -> bool:
    return isinstance(one.style, Colwise) and not one.style.gather
