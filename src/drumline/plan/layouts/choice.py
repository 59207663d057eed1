"""A layout with what it costs, and how two of them compare."""

from __future__ import annotations

import math
from bisect import insort
from dataclasses import dataclass

from drumline.core.program import Program
from drumline.plan.cluster.estimate import Estimate
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout, recomputed_ops
from drumline.plan.layouts.pins import Degrees
from drumline.schedules import schedules

SEARCHED = "searched"  # in the place of a schedule's name


@dataclass(frozen=True, slots=True)
class Choice:
    """A layout and its costs; `is_exact` if its pipeline was simulated action by action.

    With a `program`, which was searched, its ranks run that instead of the layout's schedule. `outside` is for how much
    of a step messages keep the links between nodes busy, hidden or not.
    """

    layout: Layout
    estimate: Estimate
    is_exact: bool = False
    program: Program | None = None
    outside: float = 0.0

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout, estimate: Estimate, *, is_exact: bool = False) -> Choice:
        """Return a layout with its costs on a cluster."""
        return cls(layout, estimate, is_exact, outside=_outside(cluster, layout, estimate) / estimate.seconds.total)

    @property
    def mesh(self) -> Degrees:
        """Return its degrees of parallelism."""
        return Degrees.of(self.layout)

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.estimate.seconds.total

    @property
    def bytes(self) -> float:
        """Return the bytes of the fullest device."""
        return self.estimate.bytes.total

    @property
    def rank(self) -> tuple[object, ...]:
        """Return the sort key: seconds, then bytes, then simplicity."""
        return (self.seconds, self.bytes, *self.plainness)

    @property
    def plainness(self) -> tuple[object, ...]:
        """Return the sort key from the plainest layout to the most involved, the faster first of equally plain ones."""
        plan = self.layout
        plain = (plan.stages_per_rank, list(schedules()).index(plan.schedule), plan.zero, self.recomputed)
        return (
            self.program is not None,
            *plain,
            plan.slices,
            plan.microbatch,
            self.mesh,
            self.seconds,
            plan.recompute,
            plan.counts,
        )

    @property
    def axes(self) -> tuple[str, ...]:
        """Return what divides the work, beside data parallelism."""
        mesh = self.mesh
        sizes = {"TP": mesh.tensor, "PP": mesh.pipeline, "CP": mesh.context, "EP": mesh.expert}
        return tuple(name for name, size in sizes.items() if size > 1)

    @property
    def recomputed(self) -> tuple[bool, int]:
        """Return how much is recomputed: whether whole layers are, and how many operations by themselves."""
        return self.layout.recompute.startswith("full"), len(recomputed_ops(self.layout))

    @property
    def schedule(self) -> str:
        """Return the name of what its ranks run."""
        return self.layout.schedule if self.program is None else SEARCHED

    @property
    def settings(self) -> dict[str, str]:
        """Return all settings except the degrees of parallelism, in words."""
        settings = self.layout.settings
        if self.program is not None:
            settings["schedule"] = f"a searched program on the stages of {settings['schedule']}"
        return settings


def _outside(cluster: Cluster, layout: Layout, estimate: Estimate) -> float:
    """Return how many seconds the messages of a step keep the links between nodes busy."""
    sent, inner = estimate.volumes, layout.tensor * layout.context
    groups = [
        (sent.tensor, layout.tensor, 1),
        (sent.context, layout.context, layout.tensor),
        (sent.expert, layout.expert, layout.tensor),
        (sent.data, layout.data * layout.context, layout.tensor),
        (sent.pipeline, layout.pipeline, inner * layout.data),
    ]
    return sum(
        size / cluster.link(ranks, stride).bytes_per_second
        for size, ranks, stride in groups
        if ranks > 1 and ranks * stride > cluster.devices_per_node
    )


class BestChoices:
    """The best candidates so far: the first of each mesh, and all that take at most `margin` longer than the best."""

    def __init__(self, top: int, margin: float) -> None:
        self.top, self.margin = top, margin
        self._least = self._last = math.inf
        self._choices: dict[Degrees, list[Choice]] = {}

    @property
    def threshold(self) -> float:
        """Return the seconds above which no layout counts, of whatever mesh."""
        return max(self._last, self._near)

    @property
    def _near(self) -> float:
        return self._least * (1 + self.margin)

    def bound(self, mesh: Degrees) -> float:
        """Return the seconds above which no layout of this mesh counts."""
        held_choices = self._choices.get(mesh)
        return max(min(self._last, held_choices[0].seconds), self._near) if held_choices else self.threshold

    def add(self, choice: Choice) -> None:
        """Keep a layout if it is the best of its mesh or near the best of all."""
        held_choices = self._choices.setdefault(choice.mesh, [])
        insort(held_choices, choice, key=lambda option: option.rank)
        self._least = min(self._least, choice.seconds)
        held_choices[1:] = [option for option in held_choices[1:] if self.margin and option.seconds <= self._near]
        firsts = sorted(held_choices[0].seconds for held_choices in self._choices.values())
        if len(firsts) >= self.top:
            self._last = firsts[self.top - 1]

    def candidates(self) -> list[Choice]:
        """Return the first of each of the best meshes, and all that are near the best, in order."""
        chosen = sorted(self._choices.values(), key=lambda held_choices: held_choices[0].rank)
        near = [choice for choices in chosen for choice in choices if self.margin and choice.seconds <= self._near]
        firsts = [held_choices[0] for held_choices in chosen[: self.top]]
        return sorted({choice.layout: choice for choice in [*firsts, *near]}.values(), key=lambda choice: choice.rank)
