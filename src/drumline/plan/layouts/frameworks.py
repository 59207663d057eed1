"""What the frameworks run that a plan can be written for."""

from __future__ import annotations

from typing import NamedTuple

from drumline.plan.cluster.layout import RECOMPUTE
from drumline.schedules import find

ZERO = (0, 1, 2, 3)


class Runs(NamedTuple):
    """What a framework runs: kinds of recomputation, of some layers too, and ZeRO stages without and with a pipeline.

    With `any_schedule` it takes the order of a schedule from a file; otherwise a schedule says whether it is there.
    """

    recompute: tuple[str, ...]
    some_layers: bool
    zero: tuple[int, ...]
    zero_staged: tuple[int, ...]
    any_schedule: bool = True

    def schedule(self, name: str) -> bool:
        """Whether it runs a schedule."""
        return self.any_schedule or find(name).in_megatron


# Megatron-LM recomputes norms by themselves, but no activation function, and `block` recomputes some layers; in a
# pipeline its distributed optimizer is ZeRO 1. torchtitan shards by FSDP, whose optimizer state is always sharded.
FRAMEWORKS = {
    "": Runs(RECOMPUTE, True, ZERO[1:], (1, 3)),
    "megatron": Runs(("none", "norms", "full"), True, ZERO[1:], (1,), any_schedule=False),
    "torchtitan": Runs(("none", "full"), False, (2, 3), (2, 3)),
}
