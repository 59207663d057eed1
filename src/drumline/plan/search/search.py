"""Find the best program within a limit, with a proof and its distance from the bound; on one placement, or on all.

With all placements, the costs are those of a stage when every rank holds one. A placement with v stages per rank cuts
each of these into v equal parts, so that every placement does the same work and holds the same bytes. A limit in pairs
counts v of them as one.

    one stage per rank    a        b        c        d
    two                   a/2 a/2  b/2 b/2  c/2 c/2  d/2 d/2     placed on the ranks by the placement
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from drumline.core.costs import Costs, cut_finer
from drumline.core.errors import PlanError, nearest
from drumline.core.memory import holdings
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.whole import LIGHT, join
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.idle import Limit
from drumline.core.units import number
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.bounds.lower_bounds import Bound
from drumline.plan.search.objective import Jitter, Objective
from drumline.plan.search.search_run import SAME, SECONDS, Budget, SearchRun
from drumline.plan.search.starts import Start


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search: a proven program, its timeline, its value under the objective, and its bound."""

    program: Program
    timeline: Simulation
    objective: str
    value: float
    bound: Bound
    starts: tuple[Start, ...]
    seconds: float
    num_tried: int
    jitter: Jitter | None = None
    is_interrupted: bool = False

    @property
    def gap(self) -> float:
        """The share of the value above the bound; 0 means that the program is proven optimal."""
        return max(0.0, 1.0 - self.bound.value / self.value) if self.value > 0 else 0.0

    @property
    def verdict(self) -> str:
        """How far from the optimum the program is, in words."""
        if self.gap <= SAME:
            return f"proven optimal: it equals the {self.bound.name} bound"
        least = f"none is below {number(self.bound.value)} (the {self.bound.name} bound)"
        return f"at most {self.gap:.2%} from optimal: {least}"

    @property
    def placement(self) -> str:
        """The name of the searched placement."""
        return self.program.placement.name


def search(
    costs: Costs,
    placement: Placement,
    *,
    num_microbatches: int,
    limit: Limit | None = None,
    objective: str = "makespan",
    jitter: Jitter | None = None,
    seconds: float | None = None,
    tries: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> SearchResult:
    """Return the best program found for these costs on this placement within the limit.

    `seconds` is the budget, 10 unless given. The search ends earlier if it reaches the bound or has tried `tries`
    programs. With `tries` alone no clock counts, so every machine finds the same program. Ctrl-C ends the search with
    the best program so far. A program of tens of thousands of actions takes seconds to set up and to prove, whatever
    the budget.

    >>> result = search(Costs(), Placement.linear(4), num_microbatches=8, limit=Limit(max_activations=4))
    >>> result.value, result.bound.value, result.gap
    (27.0, 27.0, 0.0)
    """
    began = time.monotonic()
    instance = Instance(costs, placement, num_microbatches, limit or Limit())
    _check_limit(instance)
    budget = Budget.of(3 * len(instance.rank), began, seconds, math.inf if tries is None else tries)
    run = SearchRun(instance, Objective(instance, objective, jitter), budget, seed, progress)
    interrupted = False
    try:
        run.say()
        run.run()
    except KeyboardInterrupt:
        interrupted = True
    program = _unsplit(run, run.program or instance.program(run.rows or []))
    violations = validate(program, limit=instance.limit, costs=costs)
    assert not violations, f"the search made a program that breaks a rule: {violations[0]}"
    return SearchResult(
        program,
        simulate(program, costs, limit=instance.limit or None),
        objective,
        run.value,
        run.bound,
        tuple(run.starts),
        time.monotonic() - began,
        run.num_tried,
        jitter,
        interrupted,
    )


def _unsplit(run: SearchRun, program: Program) -> Program:
    """Return the program with whole backwards in stages whose W fills nothing: it is short, and no step gets longer."""
    costs, stages = run.instance.costs, run.instance.num_stages
    pairs = zip(costs.per_stage("backward_weight", stages), costs.per_stage("forward", stages), strict=True)
    whole = join(program, [weight <= LIGHT * forward for weight, forward in pairs])
    rows = None if whole is program else run.instance.rows_of(whole)
    measured = None if rows is None else run.objective.measure(rows)
    return program if measured is None or measured.value > run.value * (1 + SAME) else whole


def _check_limit(instance: Instance) -> None:
    """Reject a limit that not even one microbatch after another fits in, and name the smallest that works."""
    programs = (instance.plain, instance.joined)
    if any(instance.rows_fit(program) for program in programs):  # they break no other rule
        return
    limit, holding = instance.limit, [holdings(program, instance.costs) for program in programs]
    pairs = min(max(rank.peak_pairs for rank in ranks) for ranks in holding)
    size = min(max(rank.peak_bytes or 0.0 for rank in ranks) for ranks in holding)
    if limit.max_activations is not None and not limit.admits_pairs(pairs):
        most = limit.max_activations
        limit_text, least = f"{number(most)} pair{'' if most == 1 else 's'}", f"max_activations={pairs}"
    else:
        limit_text, least = f"{limit.max_bytes:,.0f} bytes", f"max_bytes={math.ceil(size)}"
    error = PlanError(
        f"no program keeps every rank within {limit_text}: one microbatch alone holds more",
        expected=f"{least} or more",
        fix="use more ranks or smaller microbatches",
    )
    error.smallest_bytes = math.ceil(size) if instance.costs.knows_bytes else None
    raise error


PLACEMENTS = ("linear", "loop", "v", "bidirectional")


def placement_named(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Placement:
    """Return a placement by name; in a bidirectional one the second half of the microbatches goes up.

    >>> placement_named("v", 2, 4).homes
    (0, 1, 1, 0)
    """
    if name not in PLACEMENTS:
        raise PlanError(f"unknown placement {name!r}", fix=nearest(name, (*PLACEMENTS, "all")))
    if name in ("linear", "bidirectional"):
        if stages_per_rank not in (None, 1):
            raise PlanError(
                f"{name} cannot use {stages_per_rank} stages per rank",
                expected="one stage per rank",
                fix="leave out the number of stages per rank, or choose loop or v",
            )
        if name == "linear":
            return Placement.linear(num_ranks)
        if num_ranks % 2 or num_microbatches < 2:
            raise PlanError(
                f"bidirectional cannot use {num_ranks} ranks and {num_microbatches} microbatches",
                expected="an even number of ranks, and two microbatches or more",
            )
        return Placement.bidirectional(num_ranks, mirrored=range((num_microbatches + 1) // 2, num_microbatches))
    maker = Placement.v if name == "v" else Placement.loop
    return maker(num_ranks, stages_per_rank=stages_per_rank or 2)


def admitted(
    names: Iterable[str], num_ranks: int, num_microbatches: int, stages_per_rank: int | None
) -> tuple[dict[str, Placement], dict[str, PlanError]]:
    """Return the placements that support the counts, by name, and why the others are left out."""
    placements, left_out = {}, {}
    for name in names:
        try:
            per_rank = None if name in ("linear", "bidirectional") else stages_per_rank
            placements[name] = placement_named(name, num_ranks, num_microbatches, per_rank)
        except PlanError as error:
            left_out[name] = error
    return placements, left_out


class Everywhere(list[SearchResult]):
    """The results on every placement, the best first, and why placements were left out, by name."""

    def __init__(self, results: Iterable[SearchResult], left_out: Mapping[str, PlanError] | None = None) -> None:
        super().__init__(results)
        self.left_out = dict(left_out or {})


def shared(seconds: float | None, tries: int | None, count: int) -> float | None:
    """Return the seconds of each of so many searches; None if only `tries` end them."""
    if seconds is None and tries is not None:
        return None
    return (SECONDS if seconds is None else seconds) / count


def search_all(
    costs: Costs,
    num_ranks: int,
    *,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    limit: Limit | None = None,
    seconds: float | None = None,
    **options: Any,
) -> Everywhere:
    """Search on every placement that the counts and the limit allow, and return the results, the best first.

    The placements share the seconds evenly, 10 unless given; `options` are those of `search`. `left_out` holds the
    placements that do not support the counts or the limit, each with the reason.

    >>> [result.placement for result in search_all(Costs(), 2, num_microbatches=4, seconds=2)]
    ['bidirectional', 'loop', 'v', 'linear']
    """
    share = shared(seconds, options.get("tries"), len(PLACEMENTS))
    results, options = [], {"num_microbatches": num_microbatches, "seconds": share, **options}
    placements, left_out = admitted(PLACEMENTS, num_ranks, num_microbatches, stages_per_rank)
    limit = limit or Limit()
    for name, placement in placements.items():
        v = placement.num_stages // num_ranks
        pairs = None if limit.max_activations is None else limit.max_activations * v
        try:
            results.append(search(cut_finer(costs, v), placement, limit=Limit(pairs, limit.max_bytes), **options))
        except PlanError as error:
            left_out[name] = error
    in_order = {name: left_out[name] for name in PLACEMENTS if name in left_out}
    if not results:
        raise next(iter(in_order.values()))
    return Everywhere(sorted(results, key=lambda result: result.value), in_order)
