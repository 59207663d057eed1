"""What the frameworks run that a plan can be written for."""

from __future__ import annotations

from typing import NamedTuple

from drumline.plan.cluster.layout import RECOMPUTE
from drumline.schedules import find

ZERO = (0, 1, 2, 3)


class Runs(NamedTuple):
    """What a framework runs: kinds of recomputation, of some layers too, and ZeRO stages without and with a pipeline.

    With `any_schedule` it takes the order of a schedule from a file; otherwise a schedule says whether it is there. If
    it `shares_along_data` alone, context-parallel ranks share neither state nor experts. `fp8` says whether it has FP8
    products, `keeps_fp8` whether it keeps what they cast (inputs until their backward, weights for a step).
    """

    recompute: tuple[str, ...]
    some_layers: bool
    zero: tuple[int, ...]
    zero_staged: tuple[int, ...]
    any_schedule: bool = True
    shares_along_data: bool = False
    fp8: bool = True
    keeps_fp8: bool = True

    def pinned_zero(self, *, staged: bool) -> tuple[int, ...]:
        """Return the ZeRO stages that may be pinned, without and with a pipeline.

        >>> FRAMEWORKS["megatron"].pinned_zero(staged=True), FRAMEWORKS["drumline"].pinned_zero(staged=True)
        ((0, 1), (0, 1, 3))
        """
        if self == FRAMEWORKS[""]:
            return ZERO
        found = {0, *(self.zero_staged if staged else self.zero)}
        return tuple(sorted(found | {3} if self.shares_along_data else found))

    def schedule(self, name: str) -> bool:
        """Whether it runs a schedule."""
        return self.any_schedule or find(name).in_megatron


# `drumline train` recomputes nothing or everything. It runs ZeRO 3 too, but gathers whole stages: only if it is pinned.
# Megatron-LM recomputes norms by themselves, but no activation function, and `block` recomputes some layers; in a
# pipeline its distributed optimizer is ZeRO 1. torchtitan shards by FSDP, whose optimizer state is always sharded. Its
# FP8 (torchao) keeps inputs in 16 bits and casts weights in every pass; Megatron-LM's (Transformer Engine) keeps both.
FRAMEWORKS = {
    "": Runs(RECOMPUTE, True, ZERO[1:], (1, 3)),
    "drumline": Runs(("none", "full"), False, (1,), (1,), shares_along_data=True, fp8=False),
    "megatron": Runs(("none", "norms", "full"), True, ZERO[1:], (1,), any_schedule=False),
    "torchtitan": Runs(("none", "full"), False, (2, 3), (2, 3), keeps_fp8=False),
}
