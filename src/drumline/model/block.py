"""A model as an ordered list of named blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import nn

from drumline.core.errors import ModelError

Model = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class Block:
    """A block and its name in the unsplit model.

    The names of its parameters begin with `prefix`, by default the block's name.

    >>> [name for name, _ in Block("head", nn.Linear(2, 2)).named_parameters()]
    ['head.weight', 'head.bias']
    """

    name: str
    module: nn.Module
    prefix: str | None = None

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by their names in the unsplit model."""
        prefix = self.name if self.prefix is None else self.prefix
        return self.module.named_parameters(prefix=prefix)

    @property
    def trains(self) -> bool:
        """Whether any parameter trains."""
        return any(param.requires_grad for param in self.module.parameters())


def blocks_of(model: Model | Sequence[Block]) -> list[Block]:
    """Return the model's blocks in order.

    >>> [block.name for block in blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
    ['0', '1']
    """
    named: list[tuple[str, Any]]
    if isinstance(model, nn.Sequential | nn.ModuleList):
        named = [(name, block) for name, block in model._modules.items() if block is not None]
    elif isinstance(model, Mapping):
        named = list(model.items())
    elif isinstance(model, Sequence) and model and all(isinstance(module, Block) for module in model):
        return list(cast(Sequence[Block], model))
    elif isinstance(model, Sequence) and not isinstance(model, str):
        named = [(str(index), block) for index, block in enumerate(model)]
    else:
        raise ModelError(
            f"the model is a {type(model).__name__}",
            expected="an nn.Sequential, or a list of blocks that each take the output of the previous one",
        )
    for name, block in named:
        if not isinstance(block, nn.Module):
            raise ModelError(f"block {name!r} is a {type(block).__name__}", expected="an nn.Module")
    if not named:
        raise ModelError("the model has no blocks", expected="at least one per stage")
    return [Block(name, module) for name, module in named]
