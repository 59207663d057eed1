"""A transformer cut into the stages of a layout: the layers of each stage, the ranks that hold them, and their times.

Layers are equal, so they are assigned one by one (`dealt`); the embedding and the head count too:

    126 layers on 16 stages, a head worth two thirds of a layer:   7 8 8 8 8 8 8 8 8 8 8 8 8 8 8 7

Ties go to the middle: the first stage holds the embedding, the last one the head. Where ranks have several stages in
turn, a rank's later stages get more: the others wait only for the first one. The schedule determines which stages
a rank has, how many pairs it holds, and how long they take. If it has no formula, its program is built and counted or
simulated, for as few microbatches as show everything: the middle of a step repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.errors import PlanError, counted
from drumline.core.graph import CODE
from drumline.core.memory import holdings
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.plan.cluster.layout import Layout, StageLayers
from drumline.plan.cluster.spent import Ops
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.cut.cuts import dealt
from drumline.schedules import find, generate

# A lookup costs no operations, but its weights are in the first stage, so it loses every tie.
_EMBEDDING = 1e-3


@lru_cache(maxsize=4096)
def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage as even as possible; the ends, with the head and the embedding, get fewer.

    >>> even_counts(70, 12), even_counts(126, 16)[::15]
    ((5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5), (7, 7))
    """
    return dealt(num_layers, range(num_stages), [0.0] * num_stages)


@lru_cache(maxsize=4096)
def layer_counts(transformer: Transformer, pipeline: int, schedule: str = "1f1b", per_rank: int = 1) -> tuple[int, ...]:
    """Return the layers of every stage, each at least one, so that the largest rank is as small as possible.

    With two stages more than layers, the embedding and the head are stages by themselves.

    >>> llama = Transformer("405b", 126, 16384, 128, 128256, 8192, 8, 53248, gated=True, tied=False)
    >>> layer_counts(llama, 16)
    (7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7)
    >>> layer_counts(llama, 4, "zb-v", 2)
    (16, 16, 16, 16, 16, 16, 15, 15)
    >>> layer_counts(llama, 16, "interleaved-1f1b", 8) == (0, *(1,) * 126, 0)
    True
    """
    num_stages = pipeline * per_rank
    if num_stages == transformer.num_layers + 2:
        return (0, *(1,) * transformer.num_layers, 0)
    if not 1 <= num_stages <= transformer.num_layers:
        raise PlanError(
            f"{transformer.name} has {counted(transformer.num_layers, 'layer')} for {counted(num_stages, 'stage')}",
            expected="at least one layer per stage, and at least one stage; or two stages more than layers",
        )
    placement = find(schedule).layout(pipeline, per_rank)
    extra = stage_weights(transformer, [0] * num_stages)
    return dealt(transformer.num_layers, placement.homes, extra, late=placement.name == "loop" and per_rank > 1)


def stage_weights(transformer: Transformer, counts: Sequence[int]) -> list[float]:
    """Return the work of every stage, in layers."""
    weights = [float(count) for count in counts]
    weights[0] += _EMBEDDING
    weights[-1] += head_weight(transformer)
    return weights


def head_weight(transformer: Transformer) -> float:
    """Return the operations of the head as a multiple of a layer's.

    >>> round(head_weight(Transformer("405b", 126, 16384, 128, 128256, 8192, 8, 53248, gated=True)), 2)
    0.61
    """
    hidden, shared = transformer.hidden, transformer.num_key_value_heads * transformer.head_width
    attention = 2 * hidden * hidden + 2 * hidden * shared + 2 * transformer.sequence * hidden
    if transformer.latent is not None:
        wide = transformer.num_heads * (transformer.head_width + transformer.value_width)
        attention = transformer.attention_weights + transformer.sequence * wide
    width = transformer.feedforward
    if transformer.experts is not None:
        width = transformer.experts.feedforward * (transformer.experts.per_token + transformer.experts.num_shared)
    return transformer.vocabulary * hidden / (attention + (3 if transformer.gated else 2) * hidden * width)


@dataclass(frozen=True, slots=True)
class Alike:
    """Ranks with equal stages: `slices`, each with the share of its microbatches that runs there.

    `sides` counts the neighbours of these stages on other ranks, by the same shares.
    """

    ranks: tuple[int, ...]
    slices: tuple[tuple[StageLayers, float], ...]
    sides: float

    @property
    def first(self) -> int:
        """Return the first of these ranks, which holds no less than the others."""
        return self.ranks[0]


@lru_cache(maxsize=4096)
def slices_of(transformer: Transformer, counts: tuple[int, ...]) -> tuple[StageLayers, ...]:
    """Return the stages with these numbers of layers."""
    method, first = [], 0
    for stage, count in enumerate(counts):
        dense = min(max(transformer.num_dense_layers - first, 0), count)
        method.append(StageLayers(dense, count - dense, stage == 0, stage == len(counts) - 1))
        first += count
    return tuple(method)


def counts_of(transformer: Transformer, layout: Layout) -> tuple[int, ...]:
    """Return the layers of every stage of a layout."""
    return layout.counts or even_counts(transformer.num_layers, layout.num_stages)


@lru_cache(maxsize=4096)
def alike(
    transformer: Transformer, counts: tuple[int, ...], schedule: str, num_ranks: int, stages_per_rank: int
) -> tuple[Alike, ...]:
    """Return the ranks of a pipeline, grouped by equal stages."""
    slices = slices_of(transformer, counts)
    ranks_by_load: dict[tuple[tuple[StageLayers, float], ...], list[int]] = {}
    for rank in range(num_ranks):
        key = tuple((slices[stage], part) for stage, part in stages_of(schedule, rank, num_ranks, stages_per_rank))
        ranks_by_load.setdefault(key, []).append(rank)
    sides = [num_sides(schedule, stage, num_ranks, len(counts)) for stage in range(len(counts))]
    return tuple(
        Alike(
            tuple(ranks),
            key,
            sum(part * sides[stage] for stage, part in stages_of(schedule, ranks[0], num_ranks, stages_per_rank)),
        )
        for key, ranks in ranks_by_load.items()
    )


class Shape(NamedTuple):
    """Where the stages of ranks that are alike lie, kind by kind as `alike` lists them.

    `stages` are the numbers of the stages that each of their slices is; `ends` the first and the last stage of every
    rank. `crosses` says of every stage whether the next one is on another rank.
    """

    stages: list[list[list[int]]]
    ends: list[list[tuple[int, int]]]
    crosses: list[bool]


@lru_cache(maxsize=4096)
def shape_of(
    transformer: Transformer, counts: tuple[int, ...], schedule: str, num_ranks: int, stages_per_rank: int
) -> Shape:
    """Return where the stages of a pipeline's ranks lie."""
    stages, ends = [], []
    for kind in alike(transformer, counts, schedule, num_ranks, stages_per_rank):
        by_rank = [[stage for stage, _ in stages_of(schedule, rank, num_ranks, stages_per_rank)] for rank in kind.ranks]
        stages.append([list(each) for each in zip(*by_rank, strict=True)])
        ends.append([(min(each), max(each)) for each in by_rank])
    homes = find(schedule).layout(num_ranks, stages_per_rank).homes
    return Shape(stages, ends, [home != before for before, home in pairwise(homes)] + [False])


@lru_cache(maxsize=4096)
def stages_of(schedule: str, rank: int, num_ranks: int, stages_per_rank: int) -> tuple[tuple[int, float], ...]:
    """Return a rank's stages, each with the share of its microbatches that runs there.

    >>> stages_of("interleaved-1f1b", 1, 4, 2), stages_of("zb-v", 1, 4, 2), stages_of("dualpipe", 1, 4, 1)
    (((1, 1.0), (5, 1.0)), ((1, 1.0), (6, 1.0)), ((1, 0.5), (2, 0.5)))
    """
    layout = find(schedule).layout(num_ranks, stages_per_rank)
    part = 0.5 if layout.mirrored else 1.0
    own_first = sorted(layout.stages_of(rank), key=lambda stage: layout.homes[stage] != rank)
    return tuple((stage, part) for stage in own_first)


@lru_cache(maxsize=8192)
def num_sides(schedule: str, stage: int, num_ranks: int, num_stages: int) -> int:
    """Return on how many sides a stage has a neighbour on another rank.

    >>> [num_sides("1f1b", stage, 4, 4) for stage in range(4)], [num_sides("zb-v", stage, 2, 4) for stage in range(4)]
    ([1, 2, 2, 1], [1, 1, 1, 1])
    """
    homes = find(schedule).layout(num_ranks, num_stages // num_ranks).homes
    return sum(homes[other] != homes[stage] for other in (stage - 1, stage + 1) if 0 <= other < num_stages)


def pairs_held(schedule: str, rank: int, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> int:
    """Return the most (stage, microbatch) pairs that a rank holds.

    >>> [pairs_held("1f1b", rank, 4, 8, 1) for rank in range(4)], pairs_held("interleaved-1f1b", 0, 4, 8, 2)
    ([4, 3, 2, 1], 11)
    """
    formula = find(schedule).peak_pairs
    if formula is not None:
        num_pairs = formula(rank, num_ranks, num_microbatches, stages_per_rank)
    else:
        num_pairs = _counted(schedule, num_ranks, _few(num_ranks, num_microbatches), stages_per_rank)[rank]
    return min(num_pairs, num_microbatches * stages_per_rank)


def simulated(
    schedule: str, stages: Sequence[Ops], num_ranks: int, num_microbatches: int, *, hop_seconds: float = 0.0
) -> Simulation:
    """Simulate the step of the ranks with every microbatch; recomputation counts with I.

    >>> from drumline.plan.cluster.spent import Spent
    >>> simulated("zb-h1", [Ops(Spent(1.0), Spent(), Spent(1.0), Spent(1.0))] * 4, 4, 8).makespan
    27.0
    """
    per_rank = max(len(stages) // num_ranks, 1)
    program = _program(schedule, num_ranks, num_microbatches, per_rank)
    costs = Costs(
        forward=[stage.forward.total for stage in stages],
        backward_input=[stage.again.total + stage.backward_input.total for stage in stages],
        backward_weight=[stage.backward_weight.total for stage in stages],
        comm=hop_seconds,
    )
    return simulate(program, costs)


def simulated_few(
    schedule: str, stages: Sequence[Ops], num_ranks: int, num_microbatches: int, *, hop_seconds: float = 0.0
) -> float:
    """Simulate as many microbatches as show everything, and add the rest at the final pace.

    >>> from drumline.plan.cluster.spent import Spent
    >>> stages = [Ops(Spent(1.0), Spent(), Spent(1.0), Spent(1.0))] * 4
    >>> [method("1f1b", stages, 4, 100) for method in (simulated_few, lambda *all: simulated(*all).makespan)]
    [309.0, 309.0]
    """
    few = _few(num_ranks, num_microbatches)
    simulation = simulated(schedule, stages, num_ranks, few, hop_seconds=hop_seconds)
    if few == num_microbatches:
        return simulation.makespan
    return simulation.makespan + (num_microbatches - few) * _final_pace(simulation, schedule, stages, hop_seconds)


EVEN = 0.02  # share by which stages may differ for a formula that takes them as equal


def formula_holds(layout: Layout, stages: Sequence[Ops]) -> bool:
    """Whether the formula of the layout's schedule is within 2% of the simulator: the counts suit, stages are equal."""
    holds = find(layout.schedule).makespan_holds
    if holds is not None and not holds(layout.pipeline, layout.num_microbatches, layout.stages_per_rank):
        return False
    totals = _totals(stages)
    return max(totals) <= (1 + EVEN) * min(totals)


def _totals(stages: Sequence[Ops]) -> list[float]:
    """Return the seconds of a microbatch in each stage, all passes together."""
    return [sum(op.total for op in ops) for ops in stages]


def _final_pace(simulation: Simulation, schedule: str, stages: Sequence[Ops], hop_seconds: float) -> float:
    """Return the seconds of a further microbatch: those between microbatches in the middle, or on the busiest rank.

    With two directions, microbatches do not start in order, so fewer of them are simulated too.
    """
    num_ranks, few = simulation.program.num_ranks, simulation.program.num_microbatches
    if find(schedule).two_directions:
        fewer = few - max(num_ranks // 2 * 2, 2)
        before = simulated(schedule, stages, num_ranks, fewer, hop_seconds=hop_seconds).makespan
        return (simulation.makespan - before) / (few - fewer)
    each = _totals(stages)
    every = (stages_of(schedule, rank, num_ranks, len(stages) // num_ranks) for rank in range(num_ranks))
    busiest = max(sum(each[stage] for stage, _ in own_parts) for own_parts in every)
    middle = _first_forward(simulation, few // 2 + num_ranks) - _first_forward(simulation, few // 2)
    return max(middle / num_ranks, busiest)


def _first_forward(simulation: Simulation, microbatch: int) -> float:
    """Return when a microbatch leaves the first stage."""
    work = simulation.program.timed_columns
    flags = (work.stage == 0) & (work.microbatch == microbatch) & (work.code == CODE[Op.FORWARD])
    return float(simulation.ended[simulation.graph.node[flags.argmax()]])


def _few(num_ranks: int, num_microbatches: int) -> int:
    """Return a smaller count that shows the same; with two directions, even if the whole count is even."""
    return num_microbatches if num_microbatches <= 4 * num_ranks else 4 * num_ranks + num_microbatches % 2


@lru_cache(maxsize=128)
def _program(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> Program:
    return generate(schedule, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)


@lru_cache(maxsize=256)
def _counted(schedule: str, num_ranks: int, num_microbatches: int, stages_per_rank: int) -> tuple[int, ...]:
    program = find(schedule).build(num_ranks, num_microbatches, stages_per_rank)
    return tuple(holding.peak_pairs for holding in holdings(program, Costs()))
