"""What the frameworks run that a plan can be written for."""

from __future__ import annotations

from typing import NamedTuple

from drumline.schedules import find

ZERO = (0, 1, 2, 3)


class Runs(NamedTuple):
    """What a framework runs: kinds of recomputation, of some layers too, and ZeRO stages without and with a pipeline.

    With `any_schedule` it takes the order of a schedule from a file; otherwise a schedule says whether it is there.
    `two_copies` says whether two ranks may hold a stage, for two directions. If it `shares_along_data` alone,
    context-parallel ranks share neither state nor experts. `fp8` says whether it has FP8 products, `keeps_fp8` whether
    it keeps what they cast (inputs until their backward, weights for a step). `latent` has the kinds of recomputation
    that models with latent attention have besides. If `experts_span_context`, experts are spread over all
    context-parallel ranks or over none.
    """

    recompute: tuple[str, ...]
    some_layers: bool
    zero: tuple[int, ...]
    zero_staged: tuple[int, ...]
    any_schedule: bool = True
    two_copies: bool = True
    shares_along_data: bool = False
    fp8: bool = True
    keeps_fp8: bool = True
    latent: tuple[str, ...] = ()
    experts_span_context: bool = False

    def recomputations(self, *, latent: bool) -> tuple[str, ...]:
        """Return the kinds of recomputation for models without and with latent attention; none includes a later one.

        >>> FRAMEWORKS["megatron"].recomputations(latent=True)
        ('none', 'norms', 'projections', 'norms+projections', 'full')
        """
        return (*self.recompute[:-1], *self.latent, self.recompute[-1]) if latent else self.recompute

    def pinned_zero(self, *, staged: bool) -> tuple[int, ...]:
        """Return the ZeRO stages that may be pinned, without and with a pipeline.

        >>> FRAMEWORKS["megatron"].pinned_zero(staged=True), FRAMEWORKS["drumline"].pinned_zero(staged=True)
        ((0, 1), (0, 1, 3))
        """
        if self == FRAMEWORKS[""]:
            return ZERO
        pinned_zero = {0, *(self.zero_staged if staged else self.zero)}
        return tuple(sorted(pinned_zero | {3} if self.shares_along_data else pinned_zero))

    def schedule(self, name: str) -> bool:
        """Whether it runs a schedule.

        >>> FRAMEWORKS["torchtitan"].schedule("dualpipe-v"), FRAMEWORKS["torchtitan"].schedule("dualpipe")
        (True, False)
        """
        schedule = find(name)
        return (self.two_copies or not schedule.two_directions) if self.any_schedule else schedule.in_megatron


# `drumline train` recomputes nothing or everything. It runs ZeRO 3 too, but gathers whole stages: only if it is pinned.
# Megatron-LM recomputes norms and projections of latents by themselves, but no activation function, and `block`
# recomputes some layers; in a pipeline its distributed optimizer is ZeRO 1. torchtitan shards by FSDP, whose optimizer
# state is always sharded; its expert parallelism takes all context-parallel ranks first. Its FP8 (torchao) keeps inputs
# in 16 bits and casts weights in every pass; Megatron-LM's (Transformer Engine) keeps both.
FRAMEWORKS = {
    "": Runs(
        ("none", "norms", "activation", "selective", "full"),
        True,
        ZERO[1:],
        (1, 3),
        latent=("projections", "norms+activation+projections"),
    ),
    "drumline": Runs(("none", "full"), False, (1,), (1,), shares_along_data=True, fp8=False),
    "megatron": Runs(
        ("none", "norms", "full"),
        True,
        ZERO[1:],
        (1,),
        any_schedule=False,
        latent=("projections", "norms+projections"),
    ),
    "torchtitan": Runs(
        ("none", "full"), False, (2, 3), (2, 3), two_copies=False, keeps_fp8=False, experts_span_context=True
    ),
}
