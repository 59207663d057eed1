"""Choose the layout to run: the shortest step that fits.

The complete objective: **the seconds of one step of the given batch, on the busiest rank** (compute, recomputation,
exposed communication, bubble, optimizer), **over all layouts whose fullest device fits in its memory minus the
headroom**. Among equally fast layouts, the one that holds less wins, then the simpler one. Bubble and communication
count as the seconds they cost, the stash as bytes of the limit; there are no weights to tune.

Formulas evaluate every layout (`survey`). Then the pipelines of the best are simulated action by action, and those
seconds decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from drumline.core.errors import PlanError, counted
from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.memory import peak_bytes
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.space import Degrees, Pins
from drumline.plan.layouts.survey import Choice, Evaluator, Survey
from drumline.plan.layouts.why import nothing_fits

OBJECTIVE = (
    "the fewest seconds of a step on the busiest rank, over all layouts whose fullest device fits in its memory "
    "minus the headroom"
)
HEADROOM = 0.1
_EACH = 4  # layouts to simulate per mesh
_MORE = 4  # extra meshes to simulate beyond those requested: one of them may turn out faster


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The best layouts, one per mesh, best first; the first is the choice."""

    transformer: Transformer
    cluster: Cluster
    batch: int
    pins: Pins
    headroom: float
    best: tuple[Choice, ...]
    survey: Survey = field(repr=False)
    seconds: float

    @property
    def chosen(self) -> Choice:
        """Return the layout to run."""
        return self.best[0]

    @property
    def limit_bytes(self) -> float:
        """Return the bytes that a device may hold."""
        return limit_of(self.cluster, self.headroom)

    def tokens_per_second(self, choice: Choice) -> float:
        """Return the tokens per second of the whole cluster with a layout."""
        return choice.layout.batch * self.transformer.sequence / choice.seconds

    def utilisation(self, choice: Choice) -> float:
        """Return the share of a device's peak that a layout achieves."""
        return choice.estimate.flops_per_second / self.cluster.device.flops_per_second

    def fits(self, choice: Choice) -> bool:
        """Return whether a layout fits on a device."""
        return choice.bytes <= self.limit_bytes


def plan(
    transformer: Transformer,
    cluster: Cluster,
    *,
    batch: int,
    evaluate: Evaluator | None = None,
    refine: Evaluator | None = None,
    pins: Pins | None = None,
    headroom: float = HEADROOM,
    top: int = 10,
    clock: Callable[[], float] = time.perf_counter,
) -> ClusterPlan:
    """Return the plan, or raise PlanError with what would work if nothing fits or the pins contradict each other.

    `evaluate` is fast and sees every layout that may matter; `refine` is exact and sees the best of them. The defaults
    are `estimate` by formula and by simulation.
    """
    began, weigh = clock(), None
    if evaluate is None:
        evaluate, refine, weigh = estimate, partial(estimate, exact=True), peak_bytes
    check(cluster, batch, headroom, top)
    survey = Survey(transformer, cluster, batch, pins or Pins(), evaluate, refine, weigh)
    limit = limit_of(cluster, headroom)
    best = chosen_of(survey, limit, top=top, more=_MORE, each=_EACH)
    if not best:
        raise nothing_fits(survey, limit, headroom)
    return ClusterPlan(transformer, cluster, batch, survey.pins, headroom, tuple(best), survey, clock() - began)


def chosen_of(survey: Survey, limit: float, *, top: int = 1, more: int = 1, each: int = 2) -> list[Choice]:
    """Return the best layout of each of the `top` best meshes within the limit.

    It simulates `each` layouts of `top` + `more` meshes: one that ranked lower may turn out faster.
    """
    if survey.refine is None:
        return survey.best(limit, top=top)
    exact = [survey.cut(one.layout, limit) for one in survey.best(limit, top=top + more, each=each)]
    first: dict[Degrees, Choice] = {}
    for one in sorted((one for one in exact if one.bytes <= limit), key=lambda one: one.rank):
        first.setdefault(one.mesh, one)
    return list(first.values())[:top]


def limit_of(cluster: Cluster, headroom: float) -> float:
    """Return the bytes that a device may hold.

    >>> from drumline.plan.cluster.hardware import Device, Link
    >>> link = Link(1e-5, 1e11)
    >>> limit_of(Cluster(Device("fast", 1e15, 100, 1e12), 4, 4, link, link), 0.1)
    90.0
    """
    return cluster.device.memory_bytes * (1 - headroom)


def check(cluster: Cluster, batch: int, headroom: float, top: int) -> None:
    """Reject nonsensical values before planning anything."""
    for name, value in (("batch", batch), ("num_devices", cluster.num_devices), ("top", top)):
        if value < 1:
            raise PlanError(f"{name} is {value}", expected="a whole number of 1 or more")
    if not 0 <= headroom < 1:
        raise PlanError(f"headroom is {headroom:g}", expected="a share of the memory, from 0 to less than 1")
    if cluster.num_devices > cluster.devices_per_node and cluster.num_devices % cluster.devices_per_node:
        nodes = -(-cluster.num_devices // cluster.devices_per_node)
        raise PlanError(
            f"{counted(cluster.num_devices, 'device')} do not fill nodes of {cluster.devices_per_node}",
            expected="whole nodes",
            fix=f"use {nodes * cluster.devices_per_node} or {(nodes - 1) * cluster.devices_per_node}",
        )
