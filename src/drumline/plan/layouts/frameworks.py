"""What the frameworks run that a plan can be written for."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import NamedTuple

from drumline.core.errors import PlanError
from drumline.plan.cluster.layout import BY_OPERATION
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.launch.releases import RELEASES, Release, release
from drumline.schedules import find

ZERO = (0, 1, 2, 3)


class Runs(NamedTuple):
    """What a framework runs: kinds of recomputation, of some layers too, and ZeRO stages without and with a pipeline.

    With `any_schedule` it takes the order of a schedule from a file; otherwise a schedule says whether it is there.
    `two_copies` says whether two ranks may hold a stage, for two directions. If it `shares_along_data` alone,
    context-parallel ranks share neither state nor experts. `fp8` says whether it has FP8 products, `keeps_fp8` whether
    it keeps what they cast (inputs until their backward, weights for a step). `latent`, `experts` and `latent_experts`
    have the kinds of recomputation that models with latent attention, with experts and with both have besides; those
    with an operation of `not_in_fp8` are left out in FP8. If `experts_span_context`, experts are spread over all
    context-parallel ranks or over none. If `divided_sequences`, tensor-parallel ranks always divide sequences, so that
    two pieces per context-parallel rank must be divisible; if `divided_by_experts`, only experts want that. With
    `fp8_experts_staged`, experts in FP8 run in a pipeline and with context parallelism. `slices` says whether it runs
    slices of sequences.
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
    experts: tuple[str, ...] = ()
    latent_experts: tuple[str, ...] = ()
    not_in_fp8: tuple[str, ...] = ()
    experts_span_context: bool = False
    divided_sequences: bool = False
    divided_by_experts: bool = False
    fp8_experts_staged: bool = True
    slices: bool = False

    def recomputations(self, *, latent: bool, experts: bool, fp8: bool = False) -> tuple[str, ...]:
        """Return the kinds of recomputation for a kind of model; none includes a later one.

        >>> FRAMEWORKS["megatron"].recomputations(latent=False, experts=True)
        ('none', 'expert-norms', 'expert-activation', 'expert-norms+expert-activation', 'full')
        >>> FRAMEWORKS["megatron"].recomputations(latent=False, experts=False)
        ('none', 'full')
        """
        more = self.latent_experts if latent and experts else self.latent if latent else self.experts if experts else ()
        every = (*self.recompute[:-1], *more, self.recompute[-1])
        return tuple(how for how in every if not (fp8 and set(how.split("+")) & set(self.not_in_fp8)))

    @property
    def known_recomputations(self) -> tuple[str, ...]:
        """Return all kinds of recomputation, of whatever model."""
        return tuple(dict.fromkeys((*self.recompute, *self.latent, *self.experts, *self.latent_experts)))

    def divides(self, transformer: Transformer, *, tensor: int, context: int) -> bool:
        """Whether sequences are as long as it wants them.

        >>> odd = Transformer("odd", 1, 64, 4, vocabulary=9, sequence=100)
        >>> FRAMEWORKS["torchtitan"].divides(odd, tensor=8, context=1)
        False
        """
        if self.divided_sequences:
            return transformer.sequence % (2 * tensor * context) == 0
        wants = self.divided_by_experts and transformer.experts is not None
        return not wants or transformer.sequence // context % tensor == 0

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


def _sums(*names: str) -> tuple[str, ...]:
    """Return every set of some operations, the smaller ones first.

    >>> _sums("norms", "projections")
    ('norms', 'projections', 'norms+projections')
    """
    sets = (chosen for size in range(1, len(names) + 1) for chosen in combinations(names, size))
    return tuple("+".join(chosen) for chosen in sets)


def _megatron(facts: Release) -> Runs:
    """Return what a release of Megatron-LM runs.

    Of norms, it recomputes those that Transformer Engine does not fuse with a product: before latent attention and
    before experts. It takes both or none, and of activation functions those of experts. `block` recomputes some layers;
    in a pipeline its distributed optimizer is ZeRO 1.
    """
    excluded = {"layernorm": ("input-norms", "expert-norms"), "moe_act": ("expert-activation",)}
    return Runs(
        ("none", "full"),
        True,
        ZERO[1:],
        (1,),
        any_schedule=False,
        latent=_sums("input-norms", "projections"),
        experts=_sums("expert-norms", "expert-activation"),
        latent_experts=_sums("input-norms+expert-norms", "expert-activation", "projections"),
        not_in_fp8=tuple(op for module in facts.not_in_fp8 for op in excluded[module]),
        divided_by_experts=True,
    )


# `drumline train` recomputes nothing or everything. It runs ZeRO 3 too, but gathers whole stages: only if it is pinned.
# torchtitan recomputes every second product too, with all that is cheap. It shards by FSDP, whose optimizer state is
# always sharded; its expert parallelism takes all context-parallel ranks first. Its FP8 (torchao) keeps inputs in 16
# bits and casts weights in every pass; Megatron-LM's (Transformer Engine) keeps both.
FRAMEWORKS = {
    "": Runs(
        ("none", "norms", "activation", "selective", "full"),
        True,
        ZERO[1:],
        (1, 3),
        latent=("projections", "norms+activation+projections"),
        latent_experts=("projections", "norms+activation+projections"),
        slices=True,
    ),
    "drumline": Runs(("none", "full"), False, (1,), (1,), shares_along_data=True, fp8=False, slices=True),
    "megatron": _megatron(release("megatron")),
    "torchtitan": Runs(
        ("none", BY_OPERATION, "full"),
        False,
        (2, 3),
        (2, 3),
        two_copies=False,
        keeps_fp8=False,
        experts_span_context=True,
        divided_sequences=True,
        fp8_experts_staged=False,
    ),
}


@cache
def runs_of(framework: str, named: str = "") -> Runs:
    """Return what a release of a framework runs, by default the newest that is known.

    >>> runs_of("megatron", "0.13").recomputations(latent=False, experts=True, fp8=True)
    ('none', 'full')
    """
    if not named:
        return FRAMEWORKS[framework]
    if framework not in RELEASES:
        whose = framework or "no framework"
        raise PlanError(f"release {named} of {whose}", expected=f"a release of {' or '.join(RELEASES)}")
    facts = release(framework, named)
    return _megatron(facts) if framework == "megatron" else FRAMEWORKS[framework]
