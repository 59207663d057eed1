"""Which works to measure, most telling first, so that a measurement may stop at any time.

Sizes form grids. Of each grid a few far-apart points come first, and then the rest in an even mixture: whatever the
time allows covers the whole range.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product, zip_longest

from drumline.plan.calibrated.prices import demand
from drumline.plan.calibrated.step_tape import UNALIGNED, Work

_MIXES = ("add", "mul", "scale", "neg", "cat", "silu", "silu-backward", "times")
_MOVES = ("copy", "fill", "repeat", "repeat-backward")
_CASTS = ("cast-up", "cast-down")
_TURNS = {"product": 4, "attention": 2}  # works that take most of a step have several at a time
_ALSO = ("tf32", "fp8")  # formats that products alone have
_RATES = {"fp32": 0.1, "tf32": 0.5}  # of operations, against bf16: about, so that no work takes long


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of grids: tokens, widths, vocabularies, lengths, heads' widths, single numbers, parameters.

    `odd` are vocabularies that nobody padded: products with them need other kernels.
    """

    tokens: tuple[int, ...]
    widths: tuple[int, ...]
    vocabularies: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    singles: tuple[int, ...]
    parameters: tuple[int, ...]
    most_flops: float  # of a single work in bf16
    most_bytes: float
    odd: tuple[int, ...] = ()


ACCELERATOR = Sizes(
    tokens=(512, 2048, 8192, 32768),
    widths=(512, 1024, 2048, 4096, 8192),
    vocabularies=(32768, 131072, 262144),
    lengths=(512, 2048, 8192, 32768),
    heads=(64, 128),
    singles=tuple(2**power for power in range(14, 31, 2)),
    parameters=tuple(2**power for power in range(20, 31, 2)),
    most_flops=2e13,
    most_bytes=1.2e10,
    odd=(32767, 131071),
)
HOST = Sizes(
    tokens=(16, 64, 256, 1024),
    widths=(64, 128, 256, 512),
    vocabularies=(128, 1024, 8192, 32768),
    lengths=(16, 64, 256, 1024),
    heads=(32, 64),
    singles=tuple(2**power for power in range(10, 25, 2)),
    parameters=tuple(2**power for power in range(12, 25, 2)),
    most_flops=2e10,
    most_bytes=4e8,
)


def works(sizes: Sizes, dtypes: Sequence[str], *, seed: int = 0) -> list[Work]:
    """Return every work to measure, in order.

    >>> some = works(HOST, ["fp32"])
    >>> len(some) == len(set(some)), {"product", "attention-backward", "adamw", "muon"} <= {w.kind for w in some[:60]}
    (True, True)
    """
    shuffler = random.Random(seed)
    both: list[Work] = []
    for few in ([name for name in dtypes if name not in _ALSO], [name for name in dtypes if name in _ALSO]):
        both += _mixed([grid for dtype in few for grid in _grids(sizes, dtype)], sizes, shuffler)
    return list(dict.fromkeys(both))


def _mixed(grids: Sequence[list[Work]], sizes: Sizes, shuffler: random.Random) -> Iterator[Work]:
    """Yield the works of all grids in turn, of products and attention several: of each a few far-apart ones first."""
    ordered = []
    for grid in grids:
        fitting = [work for work in grid if _fits(work, sizes)]
        corners = sorted(fitting, key=lambda work: demand(work))
        first = list(dict.fromkeys([corners[at * (len(corners) - 1) // 3] for at in range(4)])) if corners else []
        rest = [work for work in fitting if work not in set(first)]
        shuffler.shuffle(rest)
        ordered.append(list(_by(_TURNS.get(grid[0].kind.partition("-")[0], 1), first + rest)))
    for turns in zip_longest(*ordered, fillvalue=()):
        yield from chain.from_iterable(turns)


def _by(count: int, listed: Sequence[Work]) -> Iterator[Sequence[Work]]:
    """Yield so many works at a time."""
    return (listed[at : at + count] for at in range(0, len(listed), count))


def _fits(work: Work, sizes: Sizes) -> bool:
    need = demand(work)
    return need.flops <= sizes.most_flops * _RATES.get(work.dtype, 1.0) and need.bytes <= sizes.most_bytes


def _grids(sizes: Sizes, dtype: str) -> Iterator[list[Work]]:
    """Yield the grids of one number format; products of tf32 and fp8 differ from others, and nothing else does."""
    yield from _products(sizes, dtype)
    if dtype in _ALSO:
        return
    shared = (1,) if dtype != "bf16" else (1, 4)
    for kind in ("attention", "attention-backward"):
        yield [
            Work(kind, dtype, (max(tokens // length, 1), length, heads, max(heads // group, 1), width))
            for tokens, length, width, group in product(sizes.tokens, sizes.lengths, sizes.heads, shared)
            for heads in (sizes.widths[1] // width, sizes.widths[-1] // width)
            if heads >= group and length <= tokens
        ]
    for kind in ("norm", "norm-backward"):
        yield [Work(kind, dtype, pair) for pair in product(sizes.tokens, sizes.widths)]
    tables = list(product(sizes.tokens, sizes.widths, sizes.vocabularies))
    for kind in ("embedding", "embedding-backward"):
        yield [Work(kind, dtype, triple) for triple in tables[:: 1 if len(tables) < 20 else 3]]
    for kind in (*_MIXES, *_MOVES, *(_CASTS if dtype == "bf16" else ())):
        yield [Work(kind, dtype, (count,)) for count in sizes.singles]
    for kind in ("softmax", "softmax-backward", "nll", "nll-backward"):
        yield [Work(kind, "fp32", pair) for pair in product(sizes.tokens, sizes.vocabularies)]
    for kind in ("exp", "times"):
        yield [Work(kind, "fp32", (count,)) for count in sizes.singles]
    for kind in ("adamw", "adamw-foreach", "adamw-loop"):
        yield [Work(kind, dtype, (count,)) for count in sizes.parameters]
    squares = [(long, short) for long, short in product(sizes.widths, repeat=2) if short <= long]
    yield [Work("muon", dtype, pair) for pair in (*squares, *((7 * width // 2, width) for width in sizes.widths))]


def _products(sizes: Sizes, dtype: str) -> Iterator[list[Work]]:
    """Yield products of layers and of heads, forward and towards both gradients."""
    pairs = []
    for width in sizes.widths:
        wide = 7 * width // 2  # between the widths that feed-forward blocks have
        pairs += [(width, width), (width // 4, width), (wide, width), (width, wide)]
    heads = list(product(sizes.vocabularies, sizes.widths))
    odd = list(product(sizes.odd, sizes.widths[1::2]))
    for of, ending in ((pairs, ""), (heads, ""), (odd, UNALIGNED)):
        each = list(product(sizes.tokens, of))
        if not each or (ending and dtype == "fp8"):
            continue
        yield [Work(f"product{ending}", dtype, (tokens, *pair)) for tokens, pair in each]
        if dtype != "fp8":
            yield [Work(f"product-input{ending}", dtype, (tokens, *pair[::-1])) for tokens, pair in each]
            yield [Work(f"product-weight{ending}", dtype, (*pair, tokens)) for tokens, pair in each]
