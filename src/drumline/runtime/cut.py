"""A model cut into stages: an ordered list of named blocks, every one of them in exactly one stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import nn

from drumline.core.errors import ModelError, counted

Model = nn.Sequential | nn.ModuleList | Sequence[nn.Module] | Mapping[str, nn.Module]


@dataclass(frozen=True, slots=True)
class Block:
    """One block under its name in the unsplit model."""

    name: str
    module: nn.Module


def blocks_of(model: Model) -> list[Block]:
    """Return the model's blocks in order.

    >>> [block.name for block in blocks_of(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))]
    ['0', '1']
    """
    if isinstance(model, nn.Sequential | nn.ModuleList):
        named = [(name, block) for name, block in model._modules.items() if block is not None]
    elif isinstance(model, Mapping):
        named = list(model.items())
    elif isinstance(model, Sequence) and not isinstance(model, str):
        named = [(str(index), block) for index, block in enumerate(model)]
    else:
        raise ModelError(
            f"the model is a {type(model).__name__}",
            expected="an nn.Sequential, or a list of blocks each of which takes what the one before returns",
        )
    for name, block in named:
        if not isinstance(block, nn.Module):
            raise ModelError(f"block {name!r} is a {type(block).__name__}", expected="an nn.Module")
    if not named:
        raise ModelError("the model has no blocks", expected="at least one per stage")
    _once(named)
    return [Block(name, module) for name, module in named]


def _once(named: list[tuple[str, nn.Module]]) -> None:
    """Refuse parameters that two blocks share: on two stages they would drift apart."""
    owner: dict[int, str] = {}
    for name, block in named:
        for path, parameter in block.named_parameters(remove_duplicate=False):
            first = owner.setdefault(id(parameter), name)
            if first != name:
                raise ModelError(
                    f"blocks {first!r} and {name!r} share the parameter {name}.{path}",
                    expected="every parameter in one block",
                    fix="give each block its own",
                )


def cut(blocks: Sequence[Block], num_stages: int, balance: Sequence[int] | None = None) -> list[tuple[Block, ...]]:
    """Return the blocks of every stage; without a `balance` they are dealt as evenly as they go.

    >>> blocks = blocks_of([nn.Linear(2, 2) for _ in range(5)])
    >>> [len(stage) for stage in cut(blocks, 2)], [len(stage) for stage in cut(blocks, 2, balance=[1, 4])]
    ([3, 2], [1, 4])
    """
    if len(blocks) < num_stages:
        raise ModelError(
            f"the model has {counted(len(blocks), 'block')} for {counted(num_stages, 'stage')}",
            expected="at least one block per stage",
            fix="use fewer ranks or stages per rank, or cut the model into smaller blocks",
        )
    if balance is None:
        base, more = divmod(len(blocks), num_stages)
        balance = [base + (stage < more) for stage in range(num_stages)]
    balance = list(balance)
    fits = len(balance) == num_stages and sum(balance) == len(blocks)
    if not fits or any(not isinstance(one, int) or one < 1 for one in balance):
        raise ModelError(
            f"balance is {balance}",
            expected=f"{counted(num_stages, 'count')} of 1 or more that sum to the model's {len(blocks)} blocks",
        )
    ends = list(accumulate(balance, initial=0))
    stages = [tuple(blocks[start:end]) for start, end in pairwise(ends)]
    assert [block for stage in stages for block in stage] == list(blocks), "a block was lost or doubled"
    return stages
