"""Lengths and orders of slices against as many equal slices: what is found, and what no search can pass.

    python benchmarks/slices_search.py [--ranks 8] [--tokens 4096] [--multiple 16] [--more 0.1] [--overhead 0]
                                       [--tries 300] [--microbatches 1 2 4] [--slices 4 8 16] [--attention 0.3 0.5]

Every figure is the time of a step over the work of one microbatch on one rank, F + B: M is a step without idle time.
`equal` is 1f1b in as many equal slices, and the reference of what others save. `lengths` keeps the order of 1f1b and
changes lengths alone. `whole` also changes the order, and `split` splits backwards into I and W (I and W take as long
as F). Neither holds more than a share `--more` above what 1f1b in equal slices holds. `order` is the best order of
equal slices, split. Behind each is its floor: the bound for all lengths and all orders, with any memory. A star says
that the result equals it.
"""

from __future__ import annotations

import argparse
import time

from drumline.core.costs import Costs
from drumline.core.placement import Placement
from drumline.core.timeline.idle import Limit
from drumline.plan.slices.results import SliceResult
from drumline.plan.slices.search import search_slices

UNIT = 3.0  # F + I + W
HEADER = ("M", "S", "attention", "equal", "lengths", "saved", "whole", "saved", "floor", "order", "split")
MORE = ("saved", "floor", "memory")


def main() -> None:
    """Print the table."""
    args = _parsed()
    print(f"{args.ranks} ranks, {args.tokens} tokens, multiples of {args.multiple}, overhead {args.overhead:g} tokens")
    print("  ".join(f"{name:>9}" for name in (*HEADER, *MORE)))
    began, reached, count = time.process_time(), 0, 0
    for num_microbatches in args.microbatches:
        for num_slices in args.slices:
            for attention in args.attention:
                whole, split = (_found(args, num_microbatches, num_slices, attention, split=s) for s in (False, True))
                print("  ".join(f"{cell:>9}" for cell in _row(num_microbatches, num_slices, attention, whole, split)))
                reached += (whole.gain or 0.0) >= 0.1
                count += 1
    print(
        f"whole backwards save a tenth or more in {reached} of {count}; {time.process_time() - began:.0f} CPU-seconds"
    )


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--multiple", type=int, default=16)
    parser.add_argument("--overhead", type=float, default=0.0)
    parser.add_argument("--more", type=float, default=0.1)
    parser.add_argument("--tries", type=int, default=300)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--slices", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--attention", type=float, nargs="+", default=[0.3, 0.4, 0.5, 0.7])
    return parser.parse_args()


def held(num_ranks: int, num_microbatches: int, num_slices: int) -> float:
    """Return the microbatches that rank 0 holds under 1f1b in equal slices."""
    return min(num_microbatches, 1 + (num_ranks - 1) / num_slices)


def _found(
    args: argparse.Namespace, num_microbatches: int, num_slices: int, attention: float, *, split: bool
) -> SliceResult:
    return search_slices(
        Costs(activation_bytes=1.0),
        Placement.linear(args.ranks),
        num_microbatches=num_microbatches,
        slices=num_slices,
        tokens=args.tokens,
        attention=attention,
        overhead=args.overhead,
        multiple=args.multiple,
        split=split,
        limit=Limit(max_bytes=held(args.ranks, num_microbatches, num_slices) * (1 + args.more)),
        tries=args.tries,
    )


def _row(num_microbatches: int, num_slices: int, attention: float, whole: SliceResult, split: SliceResult) -> list[str]:
    assert whole.reference is not None, "1f1b in equal slices is within its own memory"
    assert whole.same is not None, "so it is for lengths"
    assert split.equal is not None, "so it is for orders"
    reference = whole.reference.value
    most = held(whole.program.num_ranks, num_microbatches, num_slices)
    return [
        *map(str, (num_microbatches, num_slices, attention)),
        f"{reference / UNIT:.3f}",
        f"{whole.same.value / UNIT:.3f}",
        f"{1 - whole.same.value / reference:.1%}",
        _with_star(whole),
        f"{whole.gain:.1%}",
        f"{whole.bound / UNIT:.3f}",
        f"{split.equal.value / UNIT:.3f}",
        _with_star(split),
        f"{split.gain:.1%}",
        f"{split.bound / UNIT:.3f}",
        f"{max(*(whole.timeline.peak_bytes or ()), *(split.timeline.peak_bytes or ())) / most - 1:+.0%}",
    ]


def _with_star(result: SliceResult) -> str:
    return f"{result.value / UNIT:.3f}{'*' if result.gap <= 1e-9 else ''}"


if __name__ == "__main__":
    main()
