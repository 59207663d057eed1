"""Cut a model into stages: an ordered list of named blocks, each in exactly one stage."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from torch import nn

from drumline.core.errors import ModelError, counted, nearest
from drumline.core.prove.frozen import needed
from drumline.core.rules import Backward
from drumline.model.block import Block
from drumline.model.quantised.packed import unpacked_shape
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.partition import partition
from drumline.plan.cut.peaks import HeldPairs

PARAMETERS = "parameters"  # a balance: the number of parameters decides


def counts_of(blocks: Sequence[Block], num_stages: int, cuts: Sequence[str]) -> list[int]:
    """Return the number of blocks per stage, if `cuts` names the first block of every stage but the first.

    >>> from drumline.model.block import blocks_of
    >>> counts_of(blocks_of([nn.ReLU() for _ in range(7)]), 3, ["2", "6"])
    [2, 4, 1]
    """
    if not isinstance(cuts, str | Iterable):
        raise ModelError(f"cuts is {cuts!r}", expected="a list of block names")
    named = [cuts] if isinstance(cuts, str) else [str(name) for name in cuts]
    if len(named) != num_stages - 1:
        raise ModelError(
            f"cuts is {named}",
            expected=f"{counted(num_stages - 1, 'name')}, one for each of {counted(num_stages, 'stage')} but the first",
        )
    ends = [0, *(_place(blocks, name) for name in named), len(blocks)]
    for first, (start, end) in zip(["", *named], pairwise(ends), strict=True):
        if start >= end:
            second = blocks[end].name
            wrong = (
                f"cuts names block {second!r} twice"
                if first == second
                else f"cuts names block {second!r} after {first!r}"
                if first
                else f"cuts names block {second!r}, which already begins the first stage"
            )
            raise ModelError(wrong, expected="the first block of each of stages 1, 2, ..., in the model's order")
    return [end - start for start, end in pairwise(ends)]


def _place(blocks: Sequence[Block], name: str) -> int:
    """Return the block that a cut names: by its own name, or by that of a module whose first block it is."""
    for at, block in enumerate(blocks):
        if block.name == name or block.name.startswith(f"{name}."):
            return at
        if reason := getattr(block.module, "merged", {}).get(name):
            other = [layer.name for layer in blocks[at : at + 2] if layer is not blocks[0]]
            raise ModelError(
                f"the model cannot be cut before {name!r}: {reason}",
                fix=f"the nearest cut that works is before {' or before '.join(map(repr, other))}" if other else "",
            )
    names = [block.name for block in blocks]
    raise ModelError(f"cuts names block {name!r}, which the model does not have", fix=nearest(str(name), names))


def guessed_costs(blocks: Sequence[Block]) -> list[float]:
    """Return the estimated costs of blocks: one product per parameter in each of F, I and W, except for lookups.

    A frozen block has no W, and no I if nothing up to it trains.
    """
    kinds = needed([block.trains for block in blocks])
    counts = [
        sum(unpacked_shape(param).numel() * (1 + (kind is not Backward.NONE) + param.requires_grad)
            for part in block.module.modules() if not isinstance(part, nn.Embedding)
            for param in part._parameters.values() if param is not None)
        for block, kind in zip(blocks, kinds, strict=True)
    ]  # fmt: skip
    least = max(sum(counts) / len(counts) / 50, 1.0)  # nothing is free
    return [count + least for count in counts]


def check_enough(blocks: Sequence[Block], num_stages: int) -> None:
    """Refuse a model that has fewer blocks than stages.

    >>> from drumline.model.block import blocks_of
    >>> check_enough(blocks_of([nn.ReLU(), nn.ReLU()]), 2)
    """
    if len(blocks) < num_stages:
        raise ModelError(
            f"the model has {counted(len(blocks), 'block')} for {counted(num_stages, 'stage')}{_why_so_few(blocks)}",
            expected="at least one block per stage",
            fix="use fewer ranks or fewer stages per rank, or split the model into smaller blocks",
        )


def cut(
    blocks: Sequence[Block],
    num_stages: int,
    balance: Sequence[int] | str | None = None,
    cuts: Sequence[str] | None = None,
    *,
    held_pairs: Sequence[HeldPairs] = (),
) -> list[tuple[Block, ...]]:
    """Return the blocks of every stage, by the counts in `balance` or by the names in `cuts`.

    "even" distributes the blocks as evenly as possible. With "parameters", or without any, stages get similar numbers
    of parameters, a first estimate of their costs. `held_pairs`, from `held_by`, says which stages share a rank.

    >>> from drumline.model.block import blocks_of
    >>> blocks = blocks_of([nn.Linear(2, 2) for _ in range(5)])
    >>> [len(stage) for stage in cut(blocks, 2)], [len(stage) for stage in cut(blocks, 2, balance=[1, 4])]
    ([2, 3], [1, 4])
    """
    check_enough(blocks, num_stages)
    if cuts is not None:
        if balance is not None:
            raise ModelError(f"balance is {balance!r} and cuts is {cuts!r}", expected="only one of them")
        balance = counts_of(blocks, num_stages, cuts)
    if balance is None or (isinstance(balance, str) and balance == PARAMETERS):
        balance = partition(
            [BlockCosts(cost) for cost in guessed_costs(blocks)], num_stages, held_pairs=held_pairs
        ).counts
    elif isinstance(balance, str) and balance == "even":
        base, more = divmod(len(blocks), num_stages)
        balance = [base + (stage < more) for stage in range(num_stages)]
    if isinstance(balance, str) or not isinstance(balance, Iterable):
        raise ModelError(
            f"balance is {balance!r}",
            expected='"auto", "even", "parameters", or a list with the number of blocks per stage',
        )
    balance = list(balance.tolist() if hasattr(balance, "tolist") else balance)  # an array's are no ints of Python
    fits = len(balance) == num_stages and sum(balance) == len(blocks)
    if not fits or any(not isinstance(number, int) or number < 1 for number in balance):
        raise ModelError(
            f"balance is {balance}",
            expected=f"{counted(num_stages, 'count')} of at least 1 that sum to the model's {len(blocks)} blocks",
        )
    ends = list(accumulate(balance, initial=0))
    stages = [tuple(blocks[start:end]) for start, end in pairwise(ends)]
    assert [block for stage in stages for block in stage] == list(blocks), "a block was lost or doubled"
    return stages


def _why_so_few(blocks: Sequence[Block]) -> str:
    """Return the first reason why a module is no block of its own, and how many more there are."""
    merged = [pair for block in blocks for pair in getattr(block.module, "merged", {}).items()]
    if not merged:
        return ""
    (name, reason), more = merged[0], len(merged) - 1
    others = f" (and {counted(more, 'module')} more)" if more else ""
    return f": no cut is possible before {name}{others}, because {reason}"
