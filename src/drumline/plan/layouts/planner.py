"""Choose the layout to run: the shortest step that fits.

The complete objective: **the seconds of one step of the given batch, on the busiest rank** (compute, recomputation,
exposed communication, bubble, optimizer). It considers **all layouts whose fullest device fits in its memory minus the
headroom**. No forecast tells layouts apart that differ by less than two percent, so among those the plainest wins.
`preference` states the order: links between nodes less busy, fewer axes, less recomputation, more headroom. Bubble and
communication count as the seconds they cost, the stash as bytes of the limit; there are no weights to tune.

Formulas evaluate every layout (`survey`). They are within 2% of the simulator, or the simulator takes their place. So
every layout that may be the best is known: it is simulated action by action, and those seconds decide. How many layouts
are shown plays no part in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from drumline.core.errors import PlanError, counted
from drumline.plan.cluster.estimate import device_flops
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout, check_precision
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.pins import Degrees, Pins
from drumline.plan.layouts.preference import BAND, band
from drumline.plan.layouts.program_search import LayoutProgram, check_search, searched
from drumline.plan.layouts.slice_survey import in_slices
from drumline.plan.layouts.survey import Survey
from drumline.plan.layouts.why import nothing_fits

OBJECTIVE = (
    "the fewest seconds of a step on the busiest rank, over all layouts whose fullest device fits in its memory "
    "minus the headroom. Of those within 2% of the fastest, the plainest"
)
HEADROOM = 0.1
MISS = 0.02  # how far formulas may be from the simulator
_WIDEST = 1e6  # a margin that no layout exceeds
_PAIRS = 60_000  # (stage, microbatch) pairs to simulate at most for an answer


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """The best layouts, one per mesh, best first; the first is the choice.

    `band` has all that are as fast, within what an estimate can tell, the choice first. `searched` has the programs
    that a search found, whether one of them is the choice or not.
    """

    transformer: Transformer
    cluster: Cluster
    batch: int
    pins: Pins
    headroom: float
    best: tuple[Choice, ...]
    survey: Survey = field(repr=False)
    seconds: float
    band: tuple[Choice, ...] = ()
    searched: tuple[LayoutProgram, ...] = ()

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

    def mfu(self, choice: Choice) -> float:
        """Return the share of a device's peak at which a layout runs what the model needs."""
        return choice.estimate.flops_per_second / self._peak

    def hfu(self, choice: Choice) -> float:
        """Return the share of a device's peak at which a layout runs all that it runs, recomputation included."""
        return device_flops(self.transformer, choice.layout) / choice.seconds / self._peak

    @property
    def _peak(self) -> float:
        device = self.cluster.device
        return device.fp8_flops_per_second if self.pins.is_fp8 else device.flops_per_second

    def utilisation_words(self, choice: Choice) -> str:
        """Return both shares of the peak in words."""
        peak = " of its FP8 peak" if self.pins.is_fp8 else ""
        return f"MFU {self.mfu(choice):.1%}, HFU {self.hfu(choice):.1%}{peak}"

    def fits(self, choice: Choice) -> bool:
        """Return whether a layout fits on a device."""
        return choice.bytes <= self.limit_bytes


def plan(
    transformer: Transformer,
    cluster: Cluster,
    *,
    batch: int,
    surveyed: Callable[..., Survey] = Survey,
    pins: Pins | None = None,
    headroom: float = HEADROOM,
    top: int = 10,
    search_seconds: float = 0.0,
    clock: Callable[[], float] = time.perf_counter,
    say: Callable[[str], None] = lambda _: None,
) -> ClusterPlan:
    """Return the plan, or raise PlanError with what would work if nothing fits or the pins contradict each other.

    `surveyed` makes the survey of the layouts, which says what each takes. `search_seconds` is how long to search
    programs for the best layouts; then the answer depends on the machine that searches.
    """
    began = clock()
    check(cluster, batch, headroom, top)
    pins = pins or Pins()
    check_precision(cluster, pins.practice)
    check_search(search_seconds, pins.framework)
    survey = surveyed(transformer, cluster, batch, pins)
    limit = limit_of(cluster, headroom)
    best, near = _answer(survey, limit, top, _PAIRS)
    if not best:
        in_whole = (pins.slices or 1) == 1
        raise nothing_fits(survey, limit, headroom) if in_whole else in_slices(survey).nothing_fits(limit, headroom)
    programs = searched(transformer, cluster, near, limit, search_seconds, say) if search_seconds else []
    if programs:
        near = band([*near, *(program.choice for program in programs)], limit)
        best = [near[0], *(choice for choice in best if choice.mesh != near[0].mesh)][:top]
    took = clock() - began
    return ClusterPlan(
        transformer, cluster, batch, survey.pins, headroom, tuple(best), survey, took, tuple(near), tuple(programs)
    )


def fastest(survey: Survey, limit: float) -> Choice | None:
    """Return the choice within the limit, if anything fits; it simulates fewer pairs than a plan does."""
    if limit not in survey.fastest:
        survey.fastest[limit] = next(iter(_answer(survey, limit, 1, _PAIRS // 8)[0]), None)
    return survey.fastest[limit]


def _answer(survey: Survey, limit: float, top: int, pairs: int) -> tuple[list[Choice], list[Choice]]:
    """Return the best layouts, one per mesh, and the band."""
    in_pieces, choices, exact = in_slices(survey), list[Choice](), list[Choice]()
    if (survey.pins.slices or 1) == 1:
        choices, exact = _near_best(survey, limit, top, pairs)
    exact += in_pieces.best(limit, exact)
    if not exact:
        return [], []
    first: dict[Degrees, Choice] = {}
    for choice in sorted(exact, key=lambda choice: choice.rank):
        first.setdefault(choice.mesh, choice)
    near = band(exact, limit)
    chosen = near[0]
    for choice in choices:
        if choice.mesh not in first and len(first) < top:
            known = survey.cut(choice.layout, limit)
            if known.bytes <= limit:
                first.setdefault(choice.mesh, known)
    others = (choice for mesh, choice in first.items() if mesh != chosen.mesh)
    return [chosen, *sorted(others, key=lambda choice: choice.rank)][:top], near


def _near_best(survey: Survey, limit: float, top: int, pairs: int) -> tuple[list[Choice], list[Choice]]:
    """Return the best by formula, and all that may be within the band of the fastest, as exactly as known.

    If simulating finds the best of them slower than its formula, more of the others may be as fast: the margin grows.
    """
    margin, exact, spent = (1 + BAND) / (1 - MISS) - 1, dict[Layout, Choice](), 0
    while True:
        choices = survey.best(limit, top=top, margin=margin)
        for choice in choices:
            if choice.layout in exact or choice.seconds > choices[0].seconds * (1 + margin):
                continue
            if spent > pairs and any(other.bytes <= limit for other in exact.values()):
                break
            known = exact[choice.layout] = survey.cut(choice.layout, limit)
            if known.is_exact and choice.layout.pipeline > 1:
                spent += choice.layout.num_stages * choice.layout.num_microbatches
        within = [other for other in exact.values() if other.bytes <= limit]
        if not choices or (not within and margin > _WIDEST):
            return choices, []
        needed = _WIDEST * 2 if not within else min(choice.seconds for choice in within) / choices[0].seconds
        needed = needed * (1 + BAND) / (1 - MISS) - 1
        if within and (needed <= margin or spent > pairs):
            return choices, within
        margin = max(needed, margin)


def limit_of(cluster: Cluster, headroom: float) -> float:
    """Return the bytes that a device may hold.

    >>> from drumline.plan.cluster.hardware import Device, DeviceLink
    >>> link = DeviceLink(1e-5, 1e11)
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
