"""A layout: how the devices of a cluster divide one training step; and checks that it is possible.

Every contradiction raises an error with the value, what was expected, and the fix.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from drumline.core.errors import PlanError, counted, nearest
from drumline.plan.cluster.hardware import Cluster, HashedOnce
from drumline.plan.cluster.practice import PRACTICE, Practice
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import find

RECOMPUTE = ("none", "selective", "full")
BY_OPERATION = "ops"  # torchtitan's selective recomputation per operation
EVERY_SECOND = "every second product"  # in a list of what is recomputed: so is all that these do not give
WHOLE = ("full",)  # what a layer recomputes of which only the input is kept
# Parts of what can be recomputed, and of what: a layer's first norm, those of latents, the one before experts.
PARTS = {
    "input-norms": "norms",
    "latent-norms": "norms",
    "expert-norms": "norms",
    "expert-activation": "activation",
}
# What can be recomputed by itself.
OPS = (
    *("norms", "activation", "attention", "experts", "projections"),
    *("input-norms", "expert-norms", "expert-activation"),
)
_NAMED = {
    "activation": "activation functions",
    "projections": "projections of latents",
    "input-norms": "norms before attention",
    "expert-norms": "norms before experts",
    "expert-activation": "activation functions of experts",
}


class Share(NamedTuple):
    """All that a layer's work on one device depends on in a layout; many layouts have the same.

    `hides_tensor` says whether tensor-parallel messages travel behind weight gradients, which a schedule that splits
    backwards computes later. `holds_fp8` says whether weights are cast to 8 bits once in a step and held: not where
    ZeRO 3 gathers them for every pass.

    >>> [Layout(batch=8, data=8, zero=zero, practice=Practice(fp8=True)).share.holds_fp8 for zero in (1, 3)]
    [True, False]
    """

    microbatch: int
    tensor: int
    context: int
    expert: int
    sequence_parallel: bool
    recompute: str
    hides_tensor: bool
    holds_fp8: bool
    practice: Practice

    @property
    def whatever_recomputed(self) -> Share:
        """Return the same for what does not depend on which layers are recomputed, and so is known once."""
        return self._replace(recompute="none")


class _Shared(HashedOnce):
    """A layout's share, which is asked for often, is made once."""

    __slots__ = ("_share",)
    _share: Share


@dataclass(frozen=True, slots=True)
class Layout(_Shared):
    """Degrees of parallelism and all other settings that determine what a device does and holds.

    `tensor * pipeline * data * context` is the number of devices; `expert` divides `data * context`. `batch` and
    `microbatch` count sequences; a data-parallel rank runs `batch / (data * microbatch)` microbatches. `counts` sets
    the layers of every stage (default: as even as possible). A microbatch runs in `slices` of its sequences, which
    `plan.slices` estimates. Ranks are numbered with tensor parallelism innermost,
    then context, then data, then the pipeline.
    """

    batch: int
    microbatch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    counts: tuple[int, ...] = ()
    practice: Practice = PRACTICE
    slices: int = 1

    __hash__ = HashedOnce.__hash__

    @property
    def num_devices(self) -> int:
        """Return the number of devices."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def num_stages(self) -> int:
        """Return the number of stages."""
        return self.pipeline * self.stages_per_rank

    @property
    def num_microbatches(self) -> int:
        """Return how many microbatches go through a pipeline in a step.

        >>> Layout(batch=2304, tensor=8, pipeline=8, data=24).num_microbatches
        96
        """
        return self.batch // (self.data * self.microbatch)

    @property
    def share(self) -> Share:
        """Return what a layer's work depends on."""
        try:
            return self._share
        except AttributeError:
            object.__setattr__(self, "_share", self._made_share())
            return self._share

    def _made_share(self) -> Share:
        practice, gathers = self.practice, self.zero == 3 and self.data * self.context > 1
        return Share(
            self.microbatch,
            self.tensor,
            self.context,
            self.expert,
            self.sequence_parallel,
            self.recompute,
            practice.overlap_tensor and not find(self.schedule).splits_backward,
            practice.fp8 and practice.keeps_fp8_weights and not gathers,
            practice,
        )

    @property
    def recomputation(self) -> str:
        """Return the kind of recomputation, in words.

        >>> Layout(batch=8).recomputation, Layout(batch=8, recompute="full").recomputation
        ('no recomputation', 'full recomputation')
        >>> Layout(batch=8, recompute="full:3").recomputation, Layout(batch=8, recompute="norms+experts").recomputation
        ('full recomputation of 3 layers per stage', 'recomputation of norms and experts')
        >>> Layout(batch=8, recompute="norms+activation+projections").recomputation
        'recomputation of norms, activation functions and projections of latents'
        """
        if self.recompute == BY_OPERATION:
            return "recomputation by operation"
        if self.recompute in RECOMPUTE:
            return f"{'no' if self.recompute == 'none' else self.recompute} recomputation"
        if self.recompute.startswith("full:"):
            return f"full recomputation of {counted(int(self.recompute[5:]), 'layer')} per stage"
        *others, last = (_NAMED.get(name, name) for name in self.recompute.split("+"))
        return f"recomputation of {', '.join(others)}{' and ' if others else ''}{last}"

    @property
    def settings(self) -> dict[str, str]:
        """Return all settings except the degrees of parallelism, in words.

        >>> ", ".join(Layout(batch=8, pipeline=2, schedule="zb-v", stages_per_rank=2, zero=1).settings.values())
        'zb-v with 2 stages per rank, microbatches of 1, ZeRO 1, no recomputation'
        """
        stages = f" with {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        settings = {
            "schedule": self.schedule + stages,
            "microbatch": f"microbatches of {self.microbatch}",
            "zero": f"ZeRO {self.zero}",
            "recompute": self.recomputation,
        }
        if self.slices > 1:
            settings["slices"] = f"{self.slices} slices of every sequence"
        if self.practice.fp8:
            settings["precision"] = "FP8 products"
        if self.practice.optimizer != PRACTICE.optimizer:
            settings["optimizer"] = self.practice.optimizer
        return settings


def recomputed_ops(layout: Layout | Share) -> tuple[str, ...]:
    """Return the operations of every layer that a layout recomputes, each by itself; full recomputation is not here.

    "selective" means what is cheap to compute and large to keep: the scores of attention if it is not fused, otherwise
    the norms and the activation function. "ops" is torchtitan's, by operation: outputs of every second product, of
    attention and of messages are kept, all else is computed again. Other sets are written with a plus: "norms+experts".
    "projections" are those of latent attention up to queries, keys and values.

    >>> recomputed_ops(Layout(batch=8, recompute="selective")), recomputed_ops(Layout(batch=8, recompute="experts"))
    (('norms', 'activation'), ('experts',))
    >>> recomputed_ops(Layout(batch=8, recompute="ops"))
    ('norms', 'activation', 'every second product')
    """
    how = layout.recompute
    if how == "none" or how.startswith("full"):
        return ()
    if how == "selective":
        return ("norms", "activation") if layout.practice.flash_attention else ("attention",)
    if how == BY_OPERATION:
        return ("norms", "activation", EVERY_SECOND)
    return tuple(how.split("+"))


@lru_cache(maxsize=1024)
def includes(more: str, less: str) -> bool:
    """Whether one recomputation of fused layers repeats all that another does.

    >>> includes("selective", "norms"), includes("norms", "activation"), includes("full", "experts")
    (True, False, True)
    >>> includes("selective", "expert-norms"), includes("expert-norms", "norms")
    (True, False)
    """
    if "full" in (more, less):
        return more == "full"
    few, many = (recomputed_ops(Layout(batch=1, recompute=how)) for how in (less, more))
    return all(op in many or PARTS.get(op) in many for op in few)


def whole_layers(recompute: str, num_layers: int) -> int:
    """Return how many of a stage's layers are recomputed as a whole: all, or the first N with "full:N".

    >>> whole_layers("full", 8), whole_layers("full:3", 8), whole_layers("full:3", 2), whole_layers("selective", 8)
    (8, 3, 2, 0)
    """
    if not recompute.startswith("full"):
        return 0
    return min(int(recompute[5:]), num_layers) if recompute.startswith("full:") else num_layers


@dataclass(frozen=True, slots=True)
class StageLayers:
    """A stage: the number of dense layers and of layers with experts, and whether it is the first or the last."""

    dense: int
    experts: int
    is_first: bool = False
    is_last: bool = False

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return self.dense + self.experts

    def parts(self, layout: Layout | Share) -> list[tuple[int, bool, tuple[str, ...]]]:
        """Return how many layers, whether with experts, recompute what: "full:N" takes the first N as a whole.

        >>> StageLayers(2, 6).parts(Layout(batch=1, recompute="full:3"))
        [(2, False, ('full',)), (1, True, ('full',)), (5, True, ())]
        """
        whole, rest = whole_layers(layout.recompute, self.num_layers), recomputed_ops(layout)
        first = min(whole, self.dense)
        every = (
            (first, False, WHOLE),
            (self.dense - first, False, rest),
            (whole - first, True, WHOLE),
            (self.experts - whole + first, True, rest),
        )
        return [entry for entry in every if entry[0]]


def is_recomputation(name: str) -> bool:
    """Whether a name says what is recomputed.

    >>> [is_recomputation(name) for name in ("selective", "norms+experts", "full:3", "norms+norms", "full:0")]
    [True, True, True, False, False]
    """
    if name.startswith("full:"):
        return name[5:].isdecimal() and name[5:].isascii() and 0 < int(name[5:]) <= _MOST_LAYERS
    ops = name.split("+")
    return name in (*RECOMPUTE, BY_OPERATION) or (set(ops) <= set(OPS) and len(set(ops)) == len(ops))


_MOST_LAYERS = 10_000
_COUNTS = ("batch", "microbatch", "tensor", "pipeline", "data", "context", "expert", "stages_per_rank")


def check(transformer: Transformer, cluster: Cluster, layout: Layout) -> None:
    """Raise PlanError if the layout contradicts itself, the model or the cluster."""
    assert layout.slices == 1, "plan.slices estimates layouts in slices"
    _check_values(layout)
    check_precision(cluster, layout.practice)
    _check_devices(cluster, layout)
    _check_model(transformer, layout)
    _check_batch(layout)
    schedule = find(layout.schedule)
    if (refused := schedule.refusal(layout.pipeline, layout.num_microbatches, layout.stages_per_rank)) is not None:
        raise PlanError(refused.error, expected=refused.expected, fix=refused.fix)


def check_precision(cluster: Cluster, practice: Practice) -> None:
    """Raise PlanError if devices cannot compute in the numbers that are asked for."""
    if practice.fp8 and not cluster.device.fp8_flops_per_second:
        raise PlanError(
            f"{cluster.device.name} has no FP8 products",
            expected="a device with fp8_flops_per_second, like H100",
            fix="plan in bf16",
        )


def _check_values(layout: Layout) -> None:
    for name in _COUNTS:
        value = getattr(layout, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{name} is {value!r}", expected="a whole number of 1 or more")
    if layout.zero not in (0, 1, 2, 3):
        raise PlanError(f"zero is {layout.zero!r}", expected="0, 1, 2 or 3")
    if not is_recomputation(str(layout.recompute)):
        raise PlanError(
            f"recompute is {layout.recompute!r}", fix=nearest(str(layout.recompute), (*RECOMPUTE, BY_OPERATION, *OPS))
        )


def check_recomputation(transformer: Transformer, recompute: str) -> None:
    """Raise PlanError if the model has nothing of what is to be recomputed: latent attention, or experts.

    >>> check_recomputation(Transformer("tiny", 1, 64, 4, vocabulary=10, sequence=8), "norms+projections")
    Traceback (most recent call last):
    drumline.core.errors.PlanError: recompute is 'norms+projections', but tiny has no latent attention...
    """
    ops, narrow = recompute.split("+"), "a model whose queries, keys and values are projected up from latents"
    lacking = [
        ("latent attention", ("projections",), transformer.latent is None, narrow),
        ("experts", ("expert-norms", "expert-activation"), transformer.experts is None, "a model with experts"),
    ]
    for what, names, lacks, model in lacking:
        asked = [name for name in ops if name in names]
        if lacks and asked:
            raise PlanError(
                f"recompute is {recompute!r}, but {transformer.name} has no {what}",
                expected=f"{' and '.join(asked)} only for {model}",
                fix=f"use {'+'.join(name for name in ops if name not in names) or 'none'}",
            )


def _check_devices(cluster: Cluster, layout: Layout) -> None:
    if layout.num_devices != cluster.num_devices:
        copy = layout.tensor * layout.pipeline * layout.context
        fix = f"use data {cluster.num_devices // copy}"
        if cluster.num_devices % copy:
            fix = f"use other degrees: {copy} does not divide {cluster.num_devices}"
        raise PlanError(
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data} x context {layout.context}"
            f" need {layout.num_devices} devices",
            expected=f"{cluster.num_devices}, the size of the cluster",
            fix=fix,
        )
    if (layout.data * layout.context) % layout.expert:
        raise PlanError(
            f"{layout.expert} expert-parallel ranks do not divide data {layout.data} x context {layout.context}",
            expected="a divisor of their product, because experts are spread over those ranks",
        )


def _check_model(transformer: Transformer, layout: Layout) -> None:
    widths = [("number of heads", transformer.num_heads), ("feed-forward width", transformer.feedforward)]
    if transformer.experts is not None:
        widths.append(("expert width", transformer.experts.feedforward))
    for name, count in widths:
        if count % layout.tensor:
            raise PlanError(
                f"the {name} of {transformer.name}, {count}, is not divisible by {layout.tensor} tensor-parallel ranks",
                expected=f"a tensor parallelism that divides {count}",
            )
    check_recomputation(transformer, layout.recompute)
    parts = layout.tensor * layout.context if layout.sequence_parallel else layout.context
    if transformer.sequence % parts:
        raise PlanError(
            f"{parts} ranks cannot share sequences of {transformer.sequence} tokens",
            expected="a number of ranks that divides the sequence length",
        )
    if layout.expert > 1 and (transformer.experts is None or transformer.experts.num_experts % layout.expert):
        num_experts = transformer.experts.num_experts if transformer.experts else 0
        raise PlanError(
            f"{layout.expert} expert-parallel ranks cannot share the {num_experts} experts of {transformer.name}",
            expected="a divisor of the number of experts" if num_experts else "expert=1 for a model without experts",
        )
    if transformer.num_layers < layout.num_stages and not layout.counts:
        raise PlanError(
            f"{transformer.name} has {transformer.num_layers} layers for {layout.num_stages} stages",
            expected="at least one layer per stage",
            fix="use fewer pipeline ranks or fewer stages per rank",
        )
    if layout.counts and (
        len(layout.counts) != layout.num_stages
        or sum(layout.counts) != transformer.num_layers
        or min(layout.counts) < 0
    ):
        raise PlanError(
            f"counts {layout.counts} place {sum(layout.counts)} layers in {len(layout.counts)} stages",
            expected=f"{transformer.num_layers} layers in {layout.num_stages} stages",
        )


def _check_batch(layout: Layout) -> None:
    each = layout.data * layout.microbatch
    if layout.batch % each:
        raise PlanError(
            f"a batch of {layout.batch} does not split into data {layout.data} x microbatch {layout.microbatch}",
            expected=f"a multiple of {each}",
            fix=f"use {layout.batch - layout.batch % each or each}",
        )
