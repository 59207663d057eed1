"""Search programs for the layouts that are nearly the fastest: for the times of their stages, within their memory.

A searched program keeps everything of a layout but the order in which ranks run: mesh, stages, recomputation. So only
its wait and what it stashes change. It is preferred where it is more than a percent faster than every schedule.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.memory import holdings
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.cluster.device_memory import Bytes, device_bytes, stage_activations
from drumline.plan.cluster.estimate import Estimate
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.loads import hop_seconds, stage_ops
from drumline.plan.cluster.stages import alike, counts_of, simulated, slices_of
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.choice import Choice
from drumline.schedules import find

MOST_PAIRS = 2048  # (stage, microbatch) pairs of the largest pipeline that a search makes something of
MOST_LAYOUTS = 3  # that share the seconds


@dataclass(frozen=True, slots=True)
class LayoutProgram:
    """A program for a layout: the layout with it, the same with its schedule, and the most that a better one gains."""

    choice: Choice
    start: Choice
    gap: float

    @property
    def gain(self) -> float:
        """Return the share of the step that the program saves."""
        return 1 - self.choice.seconds / self.start.seconds


def searched(
    transformer: Transformer,
    cluster: Cluster,
    near: Sequence[Choice],
    limit: float,
    seconds: float,
    say: Callable[[str], None] = lambda _: None,
) -> list[LayoutProgram]:
    """Return the programs found for the first of these layouts that are small enough, within so many seconds."""
    kinds: dict[object, Choice] = {}
    for pick in near:
        schedule, layout = find(pick.layout.schedule), pick.layout
        small = layout.pipeline > 1 == layout.slices and layout.num_stages * layout.num_microbatches <= MOST_PAIRS
        if small and not schedule.two_directions:
            homes = _placement(layout).homes
            kinds.setdefault((pick.mesh, layout.microbatch, layout.zero, layout.recompute, layout.counts, homes), pick)
    wanted, began, programs = list(kinds.values())[:MOST_LAYOUTS], time.monotonic(), []
    for number, choice in enumerate(wanted):
        say(f"searching programs for {choice.mesh} ({number + 1} of {len(wanted)}) ...")
        left = (seconds - (time.monotonic() - began)) / (len(wanted) - number)
        if left > 0 and (better := _searched(transformer, cluster, choice, limit, left)) is not None:
            programs.append(better)
    return programs


def _searched(
    transformer: Transformer, cluster: Cluster, start: Choice, limit: float, seconds: float
) -> LayoutProgram | None:
    """Return the best program found for a layout, if there is one within the limit."""
    from drumline.plan.search.search import search  # only who searches waits for it

    layout, costs = start.layout, costs_of(transformer, cluster, start.layout)
    placement = _placement(layout)
    try:
        result = search(
            costs,
            placement,
            num_microbatches=layout.num_microbatches,
            limit=Limit(max_bytes=limit),
            seconds=seconds,
        )
    except PlanError:  # not even one microbatch after another fits
        return None
    program = Program(result.program.rows, f"searched, {placement.name}")
    estimate = estimate_of(transformer, cluster, start, program, costs)
    return LayoutProgram(replace(start, estimate=estimate, is_exact=True, program=program), start, result.gap)


def costs_of(transformer: Transformer, cluster: Cluster, layout: Layout) -> Costs:
    """Return the seconds and bytes of a layout's stages; a rank's state and buffers count with its first stage.

    Where the schedule has whole backwards, messages may hide behind the weights' gradients in those, but not in split
    ones, which run later.
    """
    hop, _ = hop_seconds(transformer, cluster, layout)
    separate_layout = replace(layout, practice=replace(layout.practice, overlap_tensor=False))
    whole, split = (stage_ops(transformer, cluster, other_layout) for other_layout in (layout, separate_layout))
    slices = slices_of(transformer, counts_of(transformer, layout))
    state = [0.0] * layout.num_stages
    for rank, held_memory in _device_bytes(transformer, layout).items():
        state[_placement(layout).stages_of(rank)[0]] = held_memory.total - held_memory.activations
    return Costs(
        forward=[ops.forward.total for ops in split],
        backward_input=[(ops.again + ops.backward_input).total for ops in split],
        backward_weight=[ops.backward_weight.total for ops in split],
        backward=[ops.backward.total for ops in whole],
        comm=hop,
        activation_bytes=[stage_activations(transformer, layout, part) for part in slices],
        weight_bytes=state,
    )


def estimate_of(transformer: Transformer, cluster: Cluster, start: Choice, program: Program, costs: Costs) -> Estimate:
    """Return the estimate of a layout that runs another program: it waits otherwise, and stashes otherwise."""
    layout, known = start.layout, start.estimate
    hop, _ = hop_seconds(transformer, cluster, layout)
    stages = stage_ops(transformer, cluster, layout)
    before = simulated(layout.schedule, stages, layout.pipeline, layout.num_microbatches, hop_seconds=hop).makespan
    now = simulate(program, costs).makespan
    peaks = [holding.peak_bytes or 0.0 for holding in holdings(program, costs)]
    fullest = max(range(layout.pipeline), key=peaks.__getitem__)
    held_memory = _device_bytes(transformer, layout)[fullest]
    return replace(
        known,
        seconds=replace(known.seconds, bubble=max(known.seconds.bubble + now - before, 0.0)),
        bytes=replace(held_memory, activations=peaks[fullest] - (held_memory.total - held_memory.activations)),
        bubble=1 - (1 - known.bubble) * before / now,
    )


def _device_bytes(transformer: Transformer, layout: Layout) -> dict[int, Bytes]:
    """Return what the device of each rank holds with the layout's own schedule."""
    counts = counts_of(transformer, layout)
    kinds = alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    return {rank: device_bytes(transformer, layout, kind) for kind in kinds for rank in kind.ranks}


def _placement(layout: Layout) -> Placement:
    return find(layout.schedule).layout(layout.pipeline, layout.stages_per_rank)


def check_search(seconds: float, framework: str) -> None:
    """Refuse to search for nothing, or for software that runs no searched programs.

    >>> check_search(5, "megatron")
    Traceback (most recent call last):
    drumline.core.errors.PlanError: megatron does not run searched programs; expected drumline, ...
    """
    if not 0 <= seconds < float("inf"):
        raise PlanError(f"{seconds:g} seconds to search for programs", expected="0 or more seconds")
    if seconds and framework not in ("", "drumline"):
        raise PlanError(
            f"{framework} does not run searched programs",
            expected="drumline, which takes one from a file",
            fix="or plan without a search",
        )
