"""A copy of a model without its memory: all of its code and structure, none of its numbers.

Parameters and buffers are stand-ins that know their shape, type and device. Running the copy costs no memory to speak
of and changes nothing in the model itself, so every rank can follow the whole model's forward while it holds only its
own part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from drumline.core.errors import ModelError
from drumline.runtime.follow.closures import copied
from drumline.runtime.values import pack, unpack


class Meta(NamedTuple):
    """What is known of a tensor without its numbers; without strides it is contiguous."""

    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    wants_gradient: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Return that of a tensor.

        >>> Meta.of(torch.ones(2, 3).t()).strides
        (1, 3)
        """
        strides = None if tensor.is_contiguous() else tensor.stride()
        return cls(tensor.shape, tensor.dtype, strides, tensor.requires_grad)


class Skeleton:
    """The copy, and what stands for what in it."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.states: dict[int, str] = {}  # the first name of each parameter and buffer, by its stand-in's id
        memo: dict[int, Any] = {}
        with self.mode:
            for name, tensor in _named_tensors(model):
                if id(tensor) not in memo:
                    memo[id(tensor)] = stand_in = self._like(tensor)
                    self.states[id(stand_in)] = name
        self._alive = list(memo.values())
        try:
            self.model: nn.Module = copied(model, memo)
        except Exception as error:
            raise ModelError(
                f"the model, a {type(model).__name__}, cannot be copied: {error}",
                expected="a model that copy.deepcopy takes, whose copy is followed to see how it can be cut",
                fix="pass an nn.Sequential or a list of blocks, which are not copied",
            ) from error
        _without_cache(self.model)
        self.names = {id(module): name for name, module in self.model.named_modules()}

    def _like(self, tensor: Tensor) -> Tensor:
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
        return nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made

    def fakes(self, metas: Iterable[Meta]) -> list[Tensor]:
        """Return new stand-ins for tensors like these; one that wants a gradient has a place in a graph."""
        with self.mode:
            return [self._fake(one) for one in metas]

    def _fake(self, meta: Meta) -> Tensor:
        shape, dtype, strides, wants_gradient = meta
        if strides is None:
            made = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            made = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        return made.requires_grad_().clone() if wants_gradient and torch.is_grad_enabled() else made

    def really(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one block on zeros, for what it returns can be seen in no other way; returns stand-ins again."""
        tensors, form = pack((args, kwargs))
        own: list[tuple[dict[str, Any], str, Tensor]] = [
            (places, name, one)
            for part in module.modules()
            for places in (part._parameters, part._buffers)
            for name, one in places.items()
            if one is not None
        ]
        with unset_fake_temporarily():
            # What is no stand-in has numbers of its own, by which the block may decide.
            zeros = {
                id(one): self._zeros(one) if isinstance(one, FakeTensor) else one
                for one in (*tensors, *(one for _, _, one in own))
            }
            for places, name, one in own:
                places[name] = zeros[id(one)]
            try:
                given, named = unpack([zeros[id(one)] for one in tensors], form)
                made, made_form = pack(module(*given, **named))
            finally:
                for places, name, one in own:
                    places[name] = one
        back = {id(zeros[id(one)]): one for one in tensors}
        fakes = self.fakes([Meta.of(one) for one in made])
        return unpack([back.get(id(one), fake) for one, fake in zip(made, fakes, strict=True)], made_form)

    def _zeros(self, like: Tensor) -> Any:
        made = torch.zeros(tuple(like.shape), dtype=like.dtype, device=self.device)
        if isinstance(like, nn.Parameter):
            return nn.Parameter(made, like.requires_grad)
        return made.requires_grad_().clone() if like.requires_grad else made


def _named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]


def _without_cache(model: nn.Module) -> None:
    """Switch off what Hugging Face models keep for generating text: it is of no use in training."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False
