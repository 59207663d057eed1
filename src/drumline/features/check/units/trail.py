"""Where a microbatch in units goes another way than in one piece: a number for each token of what each block returns.

    the model by itself   layers.0 ──► (rows, 12)                          (rows, 12) numbers of layers.1 ...
    the step, 3 slices    layers.0 ──► (rows, 4) (rows, 4) (rows, 4)       put together, they must be the same

The number is a product of the token's features with random weights, so one block takes little room. What a block gives
for a token is compared only to name the block where something is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.engine.stages.assembly import LossHolder
from drumline.engine.unsplit.comparing import off
from drumline.features.check.units.units import Units
from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.values import pack


class BlockTrail:
    """The numbers of the blocks' outputs, by block and unit.

    >>> layer, trail = nn.Linear(4, 4), BlockTrail()
    >>> with trail.following({"a": layer}, 0):
    ...     _ = layer(torch.ones(2, 3, 4))
    >>> trail.of("a", [0])[0].shape
    torch.Size([2, 3])
    """

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], list[Tensor]] = {}

    @contextmanager
    def following(self, modules: Mapping[str, nn.Module], unit: int) -> Iterator[None]:
        """Note what these modules return inside, in their forward alone."""
        with ExitStack() as stack:
            for name, module in modules.items():
                self._numbers[name, unit] = []
                hook = partial(self._note, self._numbers[name, unit])
                stack.callback(module.register_forward_hook(hook).remove)
            yield

    @staticmethod
    def _note(numbers: list[Tensor], module: nn.Module, args: Any, output: Any) -> None:
        if torch._C._current_graph_task_id() >= 0:  # it runs again for a backward
            return
        tensor = next((value for value in pack(output)[0] if value.dim() > 2 and value.is_floating_point()), None)
        if tensor is not None:
            flat = tensor.detach().flatten(2).to(torch.promote_types(tensor.dtype, torch.float32))
            numbers.append((flat @ _weights(flat.shape[-1], flat.dtype, flat.device)).cpu())

    def of(self, block: str, units: Sequence[int]) -> list[Tensor]:
        """Return a block's numbers for all tokens of some units, one tensor for each call of the block."""
        each = [self._numbers.get((block, unit), []) for unit in units]
        return [torch.cat(parts, 1) for parts in zip(*each, strict=False)]

    def differing(self, other: BlockTrail, units: Units, names: Iterable[str], allowed: float) -> list[str]:
        """Return the blocks whose numbers for the units are not those of the microbatch, which another trail has."""
        wrong = []
        for name in names:
            pairs = zip(self.of(name, units.numbers), other.of(name, [units.first]), strict=False)
            if any(off(numbers[:, : wanted.shape[1]], wanted) > allowed for numbers, wanted in pairs):
                wrong.append(name)
        return wrong


def modules_of(blocks: Iterable[Block]) -> dict[str, nn.Module]:
    """Return the modules of the model that blocks run, by name."""
    modules: dict[str, nn.Module] = {}
    for block in blocks:
        if isinstance(block.module, Piece):
            modules |= {name: block.module.get_submodule(name) for name in block.module.callees}
        elif not isinstance(block.module, LossHolder):
            modules[block.name] = block.module
    return modules


@cache
def _weights(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype)
