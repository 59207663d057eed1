"""The model by itself, as this process can run it: whole, or block by block together with other ranks.

    all ranks in this process           the user's model, which has what the ranks train
    the first step, several processes   the user's model, if all ranks still have the same values of all of it
    later, or without memory for it     each rank its own blocks: a list by `Row`, other models by `Relay`

With several processes the user may let go of the model. Then a copy takes its place that shares this rank's blocks and
has no memory for others'.
"""

from __future__ import annotations

from weakref import ref

import torch
from torch import nn

from drumline.engine.model.blocks import is_chain
from drumline.engine.unsplit.plain import Plain
from drumline.features.check.by_itself.places import Home, Places
from drumline.model.block import Block, Model
from drumline.model.catalogue import named_tensors
from drumline.model.follow.skeleton import copied
from drumline.model.quantised.packed import copied_states, is_packed, num_bytes
from drumline.model.weights.remote_blocks import stand_in

_ROOM = 0.5  # of the memory that is free: what bringing a whole model to a device may take


class Reference:
    """A model, its blocks' names, and what of it is current in this process."""

    def __init__(self, model: Model, blocks: list[Block], *, alone: bool) -> None:
        self._users = ref(model) if isinstance(model, nn.Module) else lambda: None  # who may let go of it
        self.is_chain = is_chain(model)
        self.names = [block.name for block in blocks]
        self.places = Places.of(blocks)
        self.homes = {name: block.name for block in blocks for name, _ in block.named_parameters()}
        self.whole: Plain | None = Plain(model, self.names)
        self.is_current = True  # whether all of it has the values that the ranks train
        self._alone = alone
        self._husk: nn.Module | None = None

    def let_go(self, here: list[Block]) -> None:
        """Keep no memory of other processes' blocks: this process's values of them are old from now on."""
        if self._alone:
            return
        self.is_current = False
        if self.whole is not None:
            self.renew(here)
        self.whole = None

    def renew(self, here: list[Block]) -> None:
        """Copy the user's model again, which has changed, while it lives."""
        model = self._users()
        if not self.is_chain and model is not None:
            self._husk = _husk(model, Home.of(here))

    def relayed(self) -> Plain | None:
        """Return what runs the model's own forward, with the user's model while it lives; None if there is none."""
        if self.whole is not None and isinstance(self.whole.model, nn.Module):
            return self.whole
        model = self._users()
        module = self._husk if model is None else model
        return None if module is None else Plain(module, self.names)

    def fits(self, device: torch.device) -> bool:
        """Whether all of the model has values here, and a device has room for what is not there yet."""
        if self.whole is None:
            return False
        tensors = [
            param
            for part in self.whole.modules
            for param in (*part._parameters.values(), *part._buffers.values())
            if param is not None
        ]
        if any(tensor.is_meta for tensor in tensors):
            return False
        if device.type == "cpu":
            return True
        away = sum(num_bytes(tensor) for tensor in dict.fromkeys(tensors) if tensor.device.type != device.type)
        return away <= _ROOM * torch.get_device_module(device).mem_get_info(device)[0] if away else True


def _husk(model: nn.Module, home: Home) -> nn.Module | None:
    """Return a copy of a model with this process's own blocks and tensors in it, and no memory for others."""
    memo: dict[int, object] = {}
    for _, tensor in named_tensors(model):
        if id(tensor) in memo:
            continue
        memo[id(tensor)] = new_tensor = (
            tensor if id(tensor) in home.tensor_ids else stand_in(tensor, torch.device("cpu"))
        )
        if new_tensor is not tensor and is_packed(tensor):
            memo |= copied_states(tensor, new_tensor)
    for module in home.modules.values():
        memo[id(module)] = module
    try:
        return copied(model, memo)
    except Exception:  # of the user's own classes: then the model is checked only while it lives
        return None
