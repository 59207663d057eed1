"""What a trace records between blocks: every call into torch, one by one, and what cannot be recorded.

::

    mask = x[:, None] < lengths     a call of the graph
    if mask.any(): ...              refused, or decided for each batch
    active = logits[mask]           rows that a mask picks: see uneven.py
    torch.rand(2)                   a call of the graph; Python must not branch on what it gives
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from drumline.core.errors import ModelError
from drumline.model.follow.between_blocks import Kept, changed_by_name
from drumline.model.follow.decisions import Answer, DataDependentRead, Undecided, asked
from drumline.model.follow.inside_blocks import InsideBlocks
from drumline.model.follow.interception import node_like, version_of
from drumline.model.follow.notes import Changes
from drumline.model.follow.refusals import line_here, name_of, property_of, refuse_function, refuse_own_generator
from drumline.model.follow.skeleton import Skeleton
from drumline.model.follow.uneven import PACKS, counts_rows, is_of_values, picked
from drumline.model.graph.graph import may_draw
from drumline.model.kept_state.keeping import Beginning
from drumline.model.transforms import transformed
from drumline.model.values import MISSING, pack, plain_in, tensors_in
from drumline.model.watch.surroundings import Surroundings

DRAW_INSIDE = (
    'draw it inside a block: wrap each layer in a module that skips it (see "Layers that are skipped at random" in'
    " docs/models-rules.md), or switch it off (layerdrop=0)"
)
_READS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__array__")
_COMPARES = ("lt", "le", "gt", "ge")


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other memory, as code between blocks does."""
    tensor.data = value


class FunctionsBetween(InsideBlocks):
    """Notes of what the code between blocks does; `inside` are the modules to which it belongs."""

    def __init__(
        self,
        skeleton: Skeleton,
        beginning: Beginning,
        clear: Callable[[], None],
        inside: frozenset[str],
        inputs: Sequence[Tensor],
        decided: Sequence[Answer],
    ) -> None:
        super().__init__(skeleton, beginning, clear)
        self.inside = inside
        self.inputs = inputs
        self.decided = decided  # what the forward reads of integer inputs, in order
        self.num_decided = 0
        self.undecided: Undecided | None = None  # raised, whatever the forward makes of it
        self.drawn: dict[int, bool] = {}  # random tensors created between blocks: whether uniform from 0 to 1
        self.read: tuple[Tensor, ...] = ()  # tensors whose values were read last, between blocks
        self.nodes: dict[int, Any] = {}  # replacements for nodes of autograd's graph, one each
        self.surroundings = Surroundings(module for name, module in skeleton.model.named_modules() if name in inside)
        places = {name: tensor for name, tensor in skeleton.places.items() if name.rpartition(".")[0] in inside}
        self.kept_state = Kept(skeleton.model, self.surroundings, places)

    def between_blocks(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function between blocks, and record its call."""
        if transformed():
            return func(*args, **kwargs)
        if property_of(func, "__set__") == "data" and self._is_frozen_state(*args):
            func = set_data
        refuse_function(func)
        refuse_own_generator((*args, *kwargs.values()))
        tensors = tensors_in((args, kwargs))
        if self.drawn and name_of(func) in _READS and any(id(tensor) in self.drawn for tensor in tensors):
            raise ModelError(
                f"the model's forward branches on a random number between its blocks{line_here()}",
                expected="the same branches in every step, between blocks",
                fix=DRAW_INSIDE,
            )
        for tensor in tensors:
            if id(tensor) in self.where and not isinstance(tensor, FakeTensor):
                self.number(tensor, f"the model, in {name_of(func)}")  # raises unless the block returned it
        if name_of(func) in _READS:
            self.read = tuple(tensors)
            if tensors and isinstance(tensors[0], FakeTensor):
                answer = self._answer(name_of(func), tensors[0])
                if answer is not MISSING:
                    return answer
        by_name = [args[0]] if func is set_data else changed_by_name(name_of(func), args, kwargs)
        self._find_place(tensors[:1] if property_of(func) == "data" else by_name)
        versions = [version_of(tensor) for tensor in tensors]
        result = args[0].copy_(args[1]) if func is set_data else self._result(func, args, kwargs, tensors)
        if property_of(func) == "grad_fn":
            return None if result is None else self.nodes.setdefault(id(result), node_like(result))
        changed = [tensor for tensor, before in zip(tensors, versions, strict=True) if version_of(tensor) != before]
        changed += [tensor for tensor in by_name if not any(tensor is other for other in changed)]
        if func is Tensor.requires_grad_ or property_of(func, "__set__") == "requires_grad":
            func, changed = Tensor.requires_grad_, [tensors[0]]
        if changed or any(id(tensor) not in self.numbers for tensor in tensors_in(result)):
            self.note(func, args, kwargs, result, changed)
        self._follow_chance(func, args, result)
        return result

    def _is_frozen_state(self, tensor: Tensor, value: Tensor) -> bool:
        """Whether a tensor is a frozen parameter or a buffer, and another one fits its memory."""
        is_state = id(tensor) in self.skeleton.states and not tensor.requires_grad
        return is_state and (tensor.shape, tensor.dtype) == (value.shape, value.dtype)

    def _find_place(self, changed: Iterable[Tensor]) -> None:
        """Have tensors that the model keeps, and that its forward will change, held by a stage; refuse others."""
        for tensor in changed:
            if place := self.kept_state.place_of(tensor):
                raise Changes(place)
            self.kept_state.refuse(tensor)

    def _answer(self, name: str, tensor: Tensor) -> Any:
        """Return what the forward reads of its integer inputs; MISSING if it depends on anything else."""
        number = self.numbers.get(id(tensor))
        ask = None if number is None else asked(name, self.graph, number, self.inputs, self.num_decided)
        if ask is None:
            if name in ("numpy", "__array__"):
                raise DataDependentRead(f"{name}() of a tensor that has no values here")
            return MISSING
        if self.num_decided == len(self.decided):
            error = f"the model's forward reads its inputs' values between its blocks{line_here()}"
            self.undecided = Undecided(error, ask)
            raise self.undecided
        self.num_decided += 1
        return self.decided[self.num_decided - 1]

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Return what a function returns between blocks, and remember what is as long as values make it."""
        is_uneven = any(id(tensor) in self.uneven for tensor in tensors)
        try:
            if name_of(func) in PACKS and any(isinstance(tensor, FakeTensor) for tensor in tensors):
                raise DataDependentRead("lengths of sequences")  # torch would mix stand-ins with others
            result = func(*args, **kwargs)
        except Exception as error:
            if not is_of_values(error):
                raise
            self.read = tuple(tensor for tensor in tensors if not tensor.is_floating_point()) or tuple(tensors)
            result, is_assumed = picked(func, name_of(func), args, kwargs)
            if result is MISSING:
                raise
            is_uneven |= is_assumed
        if is_uneven:
            name = property_of(func) or name_of(func)
            if counts_rows(name, result):
                self.read = tuple(tensors)
                raise DataDependentRead(f"{name} of rows that a mask picks")
            for tensor in tensors_in(result):
                if tensor.dim() and id(tensor) not in self.numbers:
                    self.uneven.add(id(tensor))
                    self.kept_objects.append(tensor)
        return result

    def _follow_chance(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Remember random tensors on which Python could branch, and what is computed from them."""
        tensors = [tensor for tensor in tensors_in(args) if id(tensor) in self.drawn]
        if name_of(func).strip("_") in _COMPARES and tensors and self.drawn[id(tensors[0])] and len(args) == 2:
            bound = args[1] if args[0] is tensors[0] else args[0]
            if isinstance(bound, int | float) and not 0 < bound < 1:
                return  # the result is the same whatever is drawn
        if tensors or may_draw(func):
            evenly = func is torch.rand
            self.drawn.update(
                (id(tensor), evenly) for tensor in tensors_in(result) if not isinstance(tensor, FakeTensor)
            )

    def follow_uneven(self, name: str, tensors: Sequence[Tensor], result: Any) -> None:
        """Remember what a block makes of rows that a mask picked."""
        if not any(id(tensor) in self.uneven for tensor in tensors):
            return
        outputs, form = pack(result)
        if any(isinstance(value, int | float) and not isinstance(value, bool) for value in plain_in(form)):
            raise ModelError(
                f"{name!r} gets rows that a mask picks, and returns a number",
                expected="blocks that return tensors: a number may depend on how many rows there are",
                fix="return a tensor, or put what picks the rows into the block",
            )
        self.uneven.update(id(tensor) for tensor in outputs if tensor.dim())
        self.kept_objects += outputs

    def keep_uneven_together(self) -> None:
        """Forbid cuts between rows that a mask picks and their uses: no other stage knows how many they are."""
        uneven = [number for number, value in enumerate(self.graph.values) if value.is_uneven]
        for number in uneven:
            uses = [at for at, call in enumerate(self.graph.calls) if number in call.takes]
            if uses:
                self.bar(self.made_by.get(number, 0), "rows that a mask picks are used there", uses[-1])
        if any(number in self.graph.outputs for number in uneven):
            raise ModelError(
                "the model returns rows that a mask picks",
                expected="outputs whose shapes depend on the shapes of inputs",
                fix="return the mask and all rows, or pick the rows in the loss_fn",
            )
