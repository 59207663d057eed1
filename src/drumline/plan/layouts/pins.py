"""What a user fixes of a layout in advance, and the degrees of parallelism; the rest is the planner's choice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.layout import (
    BY_OPERATION,
    OPS,
    RECOMPUTE,
    Layout,
    check_recomputation,
    is_recomputation,
)
from drumline.plan.cluster.practice import OPTIMIZERS, OVERLAPS, Practice
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.frameworks import FRAMEWORKS, ZERO, Runs, runs_of
from drumline.plan.layouts.software import DEFAULT, NEWEST, Software, software
from drumline.schedules import schedules

MICROBATCHES = (1, 2, 4, 8, 16)
PRECISIONS = ("bf16", "fp8")  # the default first


class Degrees(NamedTuple):
    """The degrees of parallelism.

    >>> print(Degrees(tensor=8, pipeline=16, data=16))
    TP8 PP16 DP16
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1

    @classmethod
    def of(cls, layout: Layout) -> Degrees:
        """Return the degrees of a layout."""
        return cls(layout.tensor, layout.pipeline, layout.data, layout.context, layout.expert)

    def __str__(self) -> str:
        context = f" CP{self.context}" if self.context > 1 else ""
        expert = f" EP{self.expert}" if self.expert > 1 else ""
        return f"TP{self.tensor} PP{self.pipeline} DP{self.data}{context}{expert}"


def tried_schedules() -> dict[str, tuple[int, ...]]:
    """Return, by name, the numbers of stages per rank with which to try each schedule.

    >>> tried_schedules()["zb-v"]
    (2,)
    """
    return {name: schedule.planned_with for name, schedule in schedules().items() if schedule.planned_with}


@dataclass(frozen=True, slots=True)
class Pins:
    """What the user has fixed; None leaves the choice to the planner.

    `framework` restricts the choice to what `drumline train` ("drumline"), Megatron-LM ("megatron") or torchtitan runs,
    and `release` to what that release of it does (default: the newest whose facts are known). `overlaps` names messages
    that the software hides beyond what its preset says (`OVERLAPS`). `software` names the preset (default: the
    framework's own, or `software.DEFAULT`), `optimizer` what the optimizer holds (`OPTIMIZERS`). `precision` is "bf16",
    or "fp8" for products with a layer's weights that take 8-bit inputs. `slices` is the number of slices of every
    sequence; 1 plans without.
    """

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    expert: int | None = None
    microbatch: int | None = None
    stages_per_rank: int | None = None
    zero: int | None = None
    sequence_parallel: bool | None = None
    recompute: str | None = None
    schedules: tuple[str, ...] = ()
    framework: str = ""
    release: str = ""
    overlaps: tuple[str, ...] = ()
    precision: str = PRECISIONS[0]
    software: str = ""
    optimizer: str = "adamw"
    slices: int | None = None

    def __post_init__(self) -> None:
        counts = ("tensor", "pipeline", "data", "context", "expert", "microbatch", "stages_per_rank", "slices")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} is pinned to {value}", expected="a whole number of 1 or more")
        if self.zero is not None and self.zero not in ZERO:
            raise PlanError(f"zero is pinned to {self.zero}", expected="0, 1, 2 or 3")
        if self.recompute is not None and not is_recomputation(self.recompute):
            fix = nearest(self.recompute, (*RECOMPUTE, BY_OPERATION, *OPS))
            raise PlanError(f"recompute is pinned to {self.recompute!r}", fix=fix)
        for name in self.schedules:
            if name not in tried_schedules():
                raise PlanError(f"schedule is pinned to {name!r}", fix=nearest(name, tried_schedules()))
        for name in self.overlaps:
            if name not in OVERLAPS:
                raise PlanError(f"overlap is set to {name!r}", fix=nearest(name, OVERLAPS))
        if self.precision not in PRECISIONS:
            raise PlanError(f"precision is {self.precision!r}", fix=nearest(self.precision, PRECISIONS))
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(f"optimizer is {self.optimizer!r}", fix=nearest(self.optimizer, OPTIMIZERS))
        if self.framework not in FRAMEWORKS:
            raise PlanError(f"framework is pinned to {self.framework!r}", fix=nearest(self.framework, FRAMEWORKS))
        self._check_framework()
        self._check_software()

    def _check_software(self) -> None:
        """Refuse a preset that is unknown, or another framework's than the one that is to run the plan."""
        family = software(self.software).name.partition("@")[0] if self.software else self.framework
        if self.framework and family != self.framework:
            raise PlanError(
                f"software is {self.software}, but {self.framework} is to run the plan",
                expected=f"no software, which assumes {NEWEST[self.framework]}",
            )

    @property
    def assumed(self) -> Software:
        """Return the preset of the software that the plan is for.

        >>> Pins().assumed.name, Pins(framework="torchtitan").assumed.name, Pins(software="megatron@2021").assumed.name
        ('megatron@0.14', 'torchtitan@0.2', 'megatron@2021')
        """
        own_release = f"{self.framework}@{self.release}" if self.release else NEWEST.get(self.framework, DEFAULT)
        return software(self.software or own_release)

    def _check_framework(self) -> None:
        """Refuse pins that the framework does not run."""
        runs, name = runs_of(self.framework, self.release), self.framework
        if not name:
            return
        if self.is_fp8 and not runs.fp8:
            others = (text for text, other in FRAMEWORKS.items() if text and other.fp8)
            raise PlanError(f"{name} has no FP8 products", expected=" or ".join(others), fix="or plan in bf16")
        own_schedules = [schedule for schedule in tried_schedules() if runs.schedule(schedule)]
        if self.schedules and not any(runs.schedule(schedule) for schedule in self.schedules):
            raise PlanError(
                f"{name} does not run the schedule {' or '.join(self.schedules)}", expected=" or ".join(own_schedules)
            )
        whole = self.recompute or "none"
        every = runs.known_recomputations
        if whole not in every and not (runs.some_layers and whole.startswith("full:")):
            raise PlanError(f"{name} does not recompute as {whole!r} says", expected=_listed(every))
        if self.is_fp8 and set(whole.split("+")) & set(runs.not_in_fp8):
            fix = "plan in bf16, or for a newer release" if self.release else "plan in bf16"
            raise PlanError(f"{name} {self.release} does not recompute as {whole!r} says in FP8", fix=fix)
        staged = self.pipeline is not None and self.pipeline > 1
        if self.zero is not None and self.zero not in runs.pinned_zero(staged=staged):
            where = " with a pipeline" if self.zero in runs.pinned_zero(staged=False) else ""
            allowed = runs.pinned_zero(staged=staged)
            raise PlanError(f"{name} does not run ZeRO {self.zero}{where}", expected=" or ".join(map(str, allowed)))

    @property
    def runs(self) -> Runs:
        """What may be chosen."""
        return runs_of(self.framework, self.release)

    @property
    def practice(self) -> Practice:
        """What the software does: what its preset says, with the named `overlaps`, the precision and the optimizer.

        >>> Pins(overlaps=("experts",)).practice.overlap_experts, Pins().practice.overlap_experts
        (True, False)
        >>> Pins(precision="fp8", framework="torchtitan").practice.keeps_fp8_inputs
        False
        """
        return self.practice_of(self.assumed)

    def practice_of(self, preset: Software) -> Practice:
        """Return what the software of a preset does, with the named `overlaps`, the precision and the optimizer."""
        changes: dict[str, Any] = {f"overlap_{name}": True for name in self.overlaps}
        if self.is_fp8 and self.framework:
            changes |= {"keeps_fp8_inputs": self.runs.keeps_fp8, "keeps_fp8_weights": self.runs.keeps_fp8}
        return replace(preset.practice, fp8=self.is_fp8, optimizer=self.optimizer, **changes)

    @property
    def is_fp8(self) -> bool:
        """Whether products with weights take 8-bit inputs."""
        return self.precision == "fp8"

    def recomputations(self, transformer: Transformer) -> tuple[str, ...]:
        """Return the allowed kinds of recomputation; none of them includes a later one.

        What is pinned must be what the framework recomputes of this kind of model.
        """
        latent, experts = transformer.latent is not None, transformer.experts is not None
        every = self.runs.recomputations(latent=latent, experts=experts, fp8=self.is_fp8)
        if (pinned := self.recompute) is None:
            return every
        check_recomputation(transformer, pinned)
        whole = "full" if pinned.startswith("full:") else pinned
        if self.framework and whole not in every:
            raise PlanError(
                f"{self.framework} does not recompute {pinned} of {transformer.name}", expected=_listed(every)
            )
        return (pinned,)

    def zero_stages(self, mesh: Degrees) -> tuple[int, ...]:
        """Return the ZeRO stages to try: only stage 0 if there is no rank to share with; in a pipeline, 2 is like 1.

        There are none if the framework does not run the pinned one there.

        >>> Pins().zero_stages(Degrees(data=8)), Pins().zero_stages(Degrees(pipeline=2, data=4))
        ((1, 2, 3), (1, 3))
        """
        if self.zero is not None:
            return (self.zero,) if self.zero in self.runs.pinned_zero(staged=mesh.pipeline > 1) else ()
        sharing = mesh.data // mesh.expert if self.runs.shares_along_data else mesh.data * mesh.context
        if sharing <= 1:
            return (0,)
        return self.runs.zero if mesh.pipeline == 1 else self.runs.zero_staged

    def microbatch_sizes(self, batch: int, mesh: Degrees) -> list[int]:
        """Return the microbatch sizes that divide the share of a data-parallel rank.

        >>> Pins().microbatch_sizes(24, Degrees(data=2))
        [1, 2, 4]
        """
        local = batch // mesh.data
        sizes = MICROBATCHES if self.microbatch is None else (self.microbatch,)
        return [size for size in sizes if local % size == 0]


def _listed(kinds: Sequence[str]) -> str:
    """Return kinds of recomputation in words, sums by what they are made of.

    >>> _listed(("none", "norms", "projections", "norms+projections", "full"))
    'none, full, or norms, projections, joined by +'
    """
    alone = [kind for kind in kinds if kind in ("none", "full")]
    ops = list(dict.fromkeys(op for kind in kinds if kind not in alone for op in kind.split("+")))
    return f"{', '.join(alone)}, or {', '.join(ops)}, joined by +" if len(ops) > 1 else " or ".join([*alone, *ops])
