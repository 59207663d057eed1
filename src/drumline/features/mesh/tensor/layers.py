"""Give each line its part of the divided layers, and let these exchange what one process would have had.

    x ──► q_proj, k_proj, v_proj  by columns: one line, some heads    before them: the gradient of x is summed, once
          attention               each line's own heads
      ──► o_proj                  by rows                             after it: the outputs are summed

Modules keep their class and their names; a parameter is replaced by its part, which carries its `slice`. The exchanges
are hooks of the modules, outside of their forwards: a layer's weight gradient needs none of them, so that a split
backward works as before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from drumline.channel.lines.axes import Axes
from drumline.features.mesh.parts import HeldParts
from drumline.features.mesh.passing import AXIS
from drumline.features.mesh.tensor.divide import Divided, divided_by, head_counts
from drumline.features.mesh.tensor.exchanges import LayerExchanges, Lookup, rotary_width
from drumline.features.mesh.tensor.pairs import refuse_unpaired
from drumline.features.mesh.tensor.sequence import Sequenced, mark_partial
from drumline.model.block import Block
from drumline.model.catalogue import places_in
from drumline.model.layers.styles import Colwise, Latent, Once, Partial, Plan, Rowwise, Stacked


class TensorParallel(HeldParts):
    """The divided layers of a model; `divide` applies it to the blocks that this process holds."""

    def __init__(self, axes: Axes, plan: Plan, blocks: Sequence[Block], *, sequence: bool = False) -> None:
        super().__init__(axes)
        self.found = divided_by(plan, blocks, axes.size(AXIS))
        if not plan.is_own:  # those of models are known to pair, by whatever names
            refuse_unpaired(self.found)
        self.sequenced = Sequenced(axes, self.found, blocks) if sequence else None
        self.exchanges = LayerExchanges(axes, self.found, self.sequenced)
        self._entries.append((vars(self.exchanges), "is_on", False))
        if self.sequenced is not None:
            self._entries.append((vars(self.sequenced), "is_on", False))

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
                    self._parts += [(place.table, place.key, local) for place in elsewhere if place.tensor is whole]
                    for place in (place for place in places if place.tensor is whole):
                        place.table[place.key] = local
                        self._parts.append((place.table, place.key, local))
            self._attach(one)
            if isinstance(one.style, Partial):
                mark_partial(one.module.parameters())
        for parent in dict.fromkeys(one.parent for one in mine if isinstance(one.style, Colwise)):
            if any(one.parent is parent and one.makes_part for one in mine):
                for name, count in head_counts(parent):
                    self._set(parent, name, count // self.axes.size(AXIS))
        if self.sequenced is not None:
            self.sequenced.attach(held)

    def _set(self, module: nn.Module, name: str, value: Any) -> None:
        space = vars(module)
        self._entries.append((space, name, space[name]))
        space[name] = value

    def _attach(self, one: Divided) -> None:
        """Add the exchanges of a layer, and let its attributes tell the sizes that it has."""
        module, size = one.module, self.axes.size(AXIS)
        if isinstance(one.style, Stacked | Latent | Once):
            self._attach_inner(one)
        elif isinstance(one.style, Colwise):
            if isinstance(module, nn.Linear):
                self._set(module, "out_features", module.out_features // size)
                module.register_forward_pre_hook(self.exchanges.before_columns, with_kwargs=True)
            elif isinstance(module, nn.Embedding):
                self._set(module, "embedding_dim", module.embedding_dim // size)
            if one.style.gather:
                module.register_forward_hook(partial(self.exchanges.after_columns, one.style.parts), prepend=True)
        elif isinstance(one.style, Rowwise):
            assert isinstance(module, nn.Linear)
            self._set(module, "in_features", module.in_features // size)
            if one.style.split:
                module.register_forward_pre_hook(partial(self.exchanges.before_rows, one.style.parts), with_kwargs=True)
            else:
                self.exchanges.unseen.add(module)
            module.register_forward_hook(self.exchanges.after_rows, prepend=True)
        elif isinstance(module, nn.Embedding) and one.slices:
            looking = Lookup(self.exchanges, module)
            self._set(module, "num_embeddings", looking.length)
            if module.padding_idx is not None:
                self._set(module, "padding_idx", looking.local(module.padding_idx))
            module.register_forward_pre_hook(looking.before, with_kwargs=True)
            module.register_forward_hook(looking.after, prepend=True)

    def _attach_inner(self, one: Divided) -> None:
        """Add the exchanges of a module that is no plain layer."""
        if isinstance(one.style, Stacked):
            one.module.register_forward_pre_hook(self.exchanges.before_stack, with_kwargs=True)
            one.module.register_forward_hook(self.exchanges.after_stack, prepend=True)
        elif isinstance(one.style, Latent):
            after = partial(self.exchanges.after_latent, rotary_width(one))
            one.module.register_forward_hook(after, prepend=True)
        else:
            one.module.register_forward_pre_hook(self.exchanges.before_once)
