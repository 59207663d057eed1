"""Give each line its part of the divided layers, and let these exchange what one process would have had.

    x ──► q_proj, k_proj, v_proj  by columns: one line, some heads    before them: the gradient of x is summed, once
          attention               each line's own heads
      ──► o_proj                  by rows                             after it: the outputs are summed

Modules keep their class and their names; a parameter is replaced by its part, which carries its `slice`. The exchanges
are hooks of the modules, outside of their forwards: a layer's weight gradient needs none of them, so that a split
backward works as before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.slices import slice_of
from drumline.features.mesh.parts import HeldParts, Hook, HookOf, as_it_is, hook_of
from drumline.features.mesh.passing import AXIS
from drumline.features.mesh.tensor.divide import DividedModule, divided_by, head_counts
from drumline.features.mesh.tensor.exchanges import LayerExchanges, Lookup, rotary_width
from drumline.features.mesh.tensor.pairs import refuse_unpaired
from drumline.features.mesh.tensor.sequence import SequenceLayers, mark_partial
from drumline.model.block import Block
from drumline.model.catalogue import places_in
from drumline.model.layers.styles import Colwise, PlainStyle, Rowwise, StylePlan


class TensorParallel(HeldParts):
    """The divided layers of a model; `divide` applies it to the blocks that this process holds."""

    def __init__(self, axes: Axes, plan: StylePlan, blocks: Sequence[Block], *, sequence: bool = False) -> None:
        super().__init__(axes)
        self.divided_modules = divided_by(plan, blocks, axes.size(AXIS))
        if not plan.is_own:  # those of models are known to pair, by whatever names
            refuse_unpaired(self.divided_modules)
        self.sequenced = SequenceLayers(axes, self.divided_modules, blocks) if sequence else None
        self.exchanges = LayerExchanges(axes, self.divided_modules, self.sequenced)
        self._entries.append((vars(self.exchanges), "is_on", False))
        if self.sequenced is not None:
            self._entries.append((vars(self.sequenced), "is_on", False))

    @property
    def is_partial(self) -> bool:
        """Whether some parameters' gradients have to be summed over tp."""
        return any(module.style is PlainStyle.PARTIAL for module in self.divided_modules) or bool(
            self.sequenced is not None and self.sequenced.modules
        )

    @property
    def described(self) -> list[str]:
        """What is divided, as text, for the ranks to compare."""
        return [f"{module.name}: {module.style}" for module in self.divided_modules]

    def divide(self, blocks: Sequence[Block], others: Sequence[Block], device: torch.device) -> None:
        """Replace the parameters of these blocks by this line's parts of them; all lines call it alike.

        `others` are the model's other blocks. They stay whole, and share what they shared while the model is whole.
        """
        held_modules = {module for block in blocks for module in block.module.modules()}
        mine = [module for module in self.divided_modules if module.module in held_modules]
        parameters: dict[int, nn.Parameter] = {}
        places, elsewhere = (
            [place for block in each for place in places_in(block) if place.is_parameter] for each in (blocks, others)
        )
        for module in mine:
            for key, part in module.slices.items():
                whole = module.module._parameters[key]
                assert whole is not None
                if id(whole) not in parameters:
                    local = parameters[id(whole)] = self._local(whole, part, device)
                    parameters[id(local)] = local
                    self._parts += [(place.table, place.key, local) for place in elsewhere if place.tensor is whole]
                    for place in (place for place in places if place.tensor is whole):
                        place.table[place.key] = local
                        self._parts.append((place.table, place.key, local))
        self._complete(mine)
        if self.sequenced is not None:
            self.sequenced.attach(held_modules)

    def divide_copies(self, copies: Mapping[nn.Module, nn.Module]) -> None:
        """Divide the copies of modules that other ranks hold, by the user's own, so that they can come here."""
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for table in (module._parameters for module in copies.values()):
            for key, param in table.items():
                places.setdefault(id(param), []).append((table, key))
        mine = [
            replace(layer, module=copies[layer.module], parent=copies.get(layer.parent, layer.parent))
            for layer in self.divided_modules
            if layer.module in copies
        ]
        for layer in mine:
            for key, part in layer.slices.items():
                whole = layer.module._parameters[key]
                assert whole is not None
                if slice_of(whole) is None:  # else it is tied to one that is here
                    local = self._absent(whole, part)
                    for table, name in places[id(whole)]:
                        table[name] = local
        self.exchanges.know(mine)
        self._complete(mine, hook_of)
        if self.sequenced is not None:
            self.sequenced.attach_copies(copies)

    def _complete(self, layers: Sequence[DividedModule], hook_of: HookOf = as_it_is) -> None:
        """Give layers whose parameters are parts what goes with these: exchanges, and attributes that tell sizes."""
        for layer in layers:
            self._attach(layer, partial(hook_of, layer.module))
            if layer.style is PlainStyle.PARTIAL:
                mark_partial(layer.module.parameters())
        for parent in dict.fromkeys(layer.parent for layer in layers if isinstance(layer.style, Colwise)):
            if any(layer.parent is parent and layer.makes_part for layer in layers):
                for name, count in head_counts(parent):
                    self._set(parent, name, count // self.axes.size(AXIS))

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        space = vars(module)
        self._entries.append((space, name, space[name]))
        space[name] = value

    def _attach(self, divided_module: DividedModule, only_here: Callable[[Hook], Hook]) -> None:
        """Add the exchanges of a layer, and let its attributes tell the sizes that it has."""
        module, size = divided_module.module, self.axes.size(AXIS)
        if divided_module.style in (PlainStyle.STACKED, PlainStyle.LATENT, PlainStyle.ONCE):
            self._attach_inner(divided_module, only_here)
        elif isinstance(divided_module.style, Colwise):
            if isinstance(module, nn.Linear):
                self._set(module, "out_features", module.out_features // size)
                module.register_forward_pre_hook(only_here(self.exchanges.before_columns), with_kwargs=True)
            elif isinstance(module, nn.Embedding):
                self._set(module, "embedding_dim", module.embedding_dim // size)
            if divided_module.style.gather:
                gather = only_here(partial(self.exchanges.after_columns, divided_module.style.parts))
                module.register_forward_hook(gather, prepend=True)
        elif isinstance(divided_module.style, Rowwise):
            assert isinstance(module, nn.Linear)
            self._set(module, "in_features", module.in_features // size)
            if divided_module.style.split:
                split = only_here(partial(self.exchanges.before_rows, divided_module.style.parts))
                module.register_forward_pre_hook(split, with_kwargs=True)
            else:
                self.exchanges.unseen.add(module)
            module.register_forward_hook(only_here(self.exchanges.after_rows), prepend=True)
        elif isinstance(module, nn.Embedding) and divided_module.slices:
            looking = Lookup(self.exchanges, module)
            self._set(module, "num_embeddings", looking.length)
            if module.padding_idx is not None:
                self._set(module, "padding_idx", looking.local(module.padding_idx))
            module.register_forward_pre_hook(only_here(looking.before), with_kwargs=True)
            module.register_forward_hook(only_here(looking.after), prepend=True)

    def _attach_inner(self, module: DividedModule, only_here: Callable[[Hook], Hook]) -> None:
        """Add the exchanges of a module that is no plain layer."""
        if module.style is PlainStyle.STACKED:
            module.module.register_forward_pre_hook(only_here(self.exchanges.before_stack), with_kwargs=True)
            module.module.register_forward_hook(only_here(self.exchanges.after_stack), prepend=True)
        elif module.style is PlainStyle.LATENT:
            after = partial(self.exchanges.after_latent, rotary_width(module))
            module.module.register_forward_hook(only_here(after), prepend=True)
        else:
            module.module.register_forward_pre_hook(only_here(self.exchanges.before_once))
