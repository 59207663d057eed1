"""Compare all schedules for one model on given ranks: what to run, in a sentence or two, plus a table and a page.

The costs are those of a stage when every rank holds one. A schedule with v stages per rank cuts the same model finer,
so each of its stages costs 1/v. So every row does the same work, and times and bytes are comparable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from drumline.core.cost_fields import FieldShape
from drumline.core.costs import SHAPES, Costs, cut_finer
from drumline.core.errors import CostsError, ScheduleError, counted
from drumline.core.kernel.library import kernel
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.idle import Limit
from drumline.core.units import number, size_text
from drumline.plan.device.advice import Advice, Remedy
from drumline.report.draw.table import table
from drumline.report.summary import refused, summarize
from drumline.schedules import DEFAULT, find, schedules
from drumline.schedules.equal_slices import equal_slices_seconds
from drumline.schedules.registry import too_large
from drumline.schedules.slices import number_of

_ONE = FieldShape()
# Of each program; all schedules together then take some 2 GiB and 15 seconds.
MOST_PAIRS = 1_000_000


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule of a comparison; `stages_per_rank` says how finely it cuts the model."""

    name: str
    stages_per_rank: int
    timeline: Simulation
    fits: bool

    @property
    def seconds_per_microbatch(self) -> float:
        """The makespan divided by all microbatches: comparable even if a program spans several steps."""
        return self.timeline.makespan / self.timeline.program.num_microbatches

    @property
    def peak_share(self) -> float:
        """The fullest rank's peak in whole microbatches: v pairs, each of a v-th of what the rank computes, are one.

        So are all slices of a microbatch.
        """
        return max(self.timeline.peak_activations) / self.stages_per_rank / self.timeline.program.num_slices

    @property
    def formula(self) -> float | None:
        """The makespan by the schedule's formula, for slices that take the same time; None if there is none."""
        return equal_slices_seconds(self.timeline.program, self.timeline.costs)

    def summary(self) -> dict[str, Any]:
        """Return the figures of `simulate`, plus those of the comparison."""
        return {
            **summarize(self.timeline),
            "stages_per_rank": self.stages_per_rank,
            "seconds_per_microbatch": self.seconds_per_microbatch,
            "peak_share": self.peak_share,
            "fits": self.fits,
            **({} if self.formula is None else {"formula_makespan": self.formula}),
        }


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A schedule that the comparison leaves out, its stages per rank, and why."""

    name: str
    stages_per_rank: int
    reason: ScheduleError

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"schedule": self.name, "stages_per_rank": self.stages_per_rank, **refused(self.reason)}


class Comparison(list[Row]):
    """The rows of a comparison, best first, and the training schedules that do not support its counts."""

    def __init__(self, rows: Iterable[Row] = (), left_out: Iterable[LeftOut] = ()) -> None:
        super().__init__(rows)
        self.left_out = tuple(left_out)


def compare(
    num_ranks: int,
    *,
    num_microbatches: int,
    costs: Costs | None = None,
    stages_per_rank: int | None = None,
    slices: int | Sequence[int] = 1,
    frozen: Collection[int] = (),
    limit: Limit | None = None,
    only: Sequence[str | Program] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Return every training schedule that supports these counts, best first; those over the limit come last.

    `left_out` lists the others, each with the reason: also those of `only` that have no backward. `frozen` are stages
    without trainable parameters, numbered as if every rank held one stage. With `slices`, every microbatch runs in so
    many. `only` names the schedules to compare, or
    gives programs with these counts.

    >>> [row.name for row in compare(4, num_microbatches=8)[:3]]
    ['zb-v', 'interleaved-zb', 'dualpipe']
    >>> [value.name for value in compare(3, num_microbatches=4).left_out]
    ['dualpipe', 'chimera']
    >>> [row.name for row in compare(4, num_microbatches=8, only=["1f1b", "zb-h1"])]
    ['zb-h1', '1f1b']
    """
    costs = _for_all(costs or Costs())
    costs.factors(num_microbatches)
    if limit is not None:
        limit.check(costs)
    rows, left_out = [], []
    for schedule in schedules() if only is None else only:
        name = schedule.name if isinstance(schedule, Program) else schedule
        v = _stages_per_rank(schedule, stages_per_rank)
        if progress is not None:
            progress(f"simulating {name}")
        try:
            program = _with_counts(schedule, num_ranks, num_microbatches, v, slices)
        except ScheduleError as error:
            left_out.append(LeftOut(name, v, error))
            continue
        if not program.has_backward:
            if only is not None:
                left_out.append(LeftOut(name, v, _no_backward(name)))
            continue
        program = prune(program, [stage // v not in frozen for stage in range(program.num_stages)])
        timeline = simulate(program, _over_all_steps(cut_finer(costs, v), program.num_microbatches))
        rows.append(Row(name, v, timeline, _fits(timeline, v, limit)))
    rows.sort(key=lambda row: (not row.fits, round(row.seconds_per_microbatch, 9), row.peak_share))
    return Comparison(rows, left_out)


def _stages_per_rank(name: str | Program, wanted: int | None) -> int:
    """Return how many stages a rank gets: as many as wanted, where the schedule has a choice."""
    if isinstance(name, Program):
        return max(1, name.num_stages // name.num_ranks)
    schedule = find(name)
    has_choice = schedule.stage_counts != "fixed" and schedule.stages_per_rank > 1
    return wanted if has_choice and wanted is not None else schedule.stages_per_rank


def _with_counts(
    name: str | Program, num_ranks: int, num_microbatches: int, stages_per_rank: int, slices: int | Sequence[int]
) -> Program:
    """Return the schedule's program; refuse a given one that has other counts."""
    if not isinstance(name, Program):
        # Checked first, as a program that is too large for all of them takes seconds for each.
        most = None if kernel() is None else MOST_PAIRS
        units = num_microbatches * number_of(slices)
        if (refused := too_large(num_ranks, units, stages_per_rank, most)) is not None:
            raise find(name).refusal(num_ranks, units, stages_per_rank) or refused
        return find(name).build(num_ranks, num_microbatches, stages_per_rank, slices=slices)
    if name.num_slices != number_of(slices):
        raise ScheduleError(
            f"{name.name} runs microbatches in {counted(name.num_slices, 'slice')}",
            expected=f"{number_of(slices)}, like the others",
        )
    if (name.num_ranks, name.num_microbatches) != (num_ranks, num_microbatches):
        raise ScheduleError(
            f"{name.name} has {counted(name.num_ranks, 'rank')} and {counted(name.num_microbatches, 'microbatch')}",
            expected=f"{counted(num_ranks, 'rank')} and {counted(num_microbatches, 'microbatch')}, like the others",
        )
    return name


def _no_backward(name: str) -> ScheduleError:
    fix = f"`drumline simulate {name}` prints its times"
    return ScheduleError(f"{name} has no backward", expected="schedules that train", fix=fix)


def _fits(timeline: Simulation, stages_per_rank: int, limit: Limit | None) -> bool:
    if limit is None:
        return True
    if limit.max_activations is not None:
        finer = stages_per_rank * timeline.program.num_slices
        limit = replace(limit, max_activations=limit.max_activations * finer)
    return limit.admits_pairs(max(timeline.peak_activations)) and limit.admits_bytes(max(timeline.peak_bytes or (0.0,)))


def _over_all_steps(costs: Costs, num_microbatches: int) -> Costs:
    """Return the costs with one step's microbatch factors repeated for every step of the program."""
    factor = costs.microbatch_factor
    if isinstance(factor, Sequence):
        return replace(costs, microbatch_factor=[*factor] * (num_microbatches // len(factor)))
    return costs


def _for_all(costs: Costs) -> Costs:
    """Return costs that hold for any cut; reject costs per stage, because schedules cut different stages."""
    for field in fields(costs):
        if SHAPES.get(field.name, _ONE).each == "stage" and isinstance(getattr(costs, field.name), Sequence):
            raise CostsError(
                f"{field.name} has one value per stage", expected="one value, because schedules cut different stages"
            )
    return costs


def left_out_text(left_out: Sequence[LeftOut]) -> str:
    """List the schedules that were left out, grouped by reason; empty if there are none.

    >>> print(left_out_text(compare(3, num_microbatches=4).left_out))
    left out: dualpipe cannot use 3 ranks: its two directions meet in the middle; expected an even number of ranks
    left out: chimera cannot use 3 ranks: its two directions meet in the middle; expected an even number of ranks
    """
    reasons: dict[str, list[str]] = {}
    for schedule in left_out:
        expected = f"; expected {schedule.reason.expected}" if schedule.reason.expected else ""
        reasons.setdefault(schedule.reason.error + expected, []).append(schedule.name)
    return "\n".join(
        f"left out: {reason}" if reason.startswith(names[0]) else f"left out: {', '.join(names)}: {reason}"
        for reason, names in reasons.items()
    )


def compare_table(rows: Sequence[Row], *, width: int = 120) -> str:
    """Return the comparison as an aligned table.

    Peak activations are the pairs of the fullest rank, as `simulate` counts them. If schedules have several stages per
    rank, whose pairs are smaller, another column has what they hold in whole microbatches. In slices, the last has what
    formulas say for slices that take the same time.

    >>> print(compare_table(compare(4, num_microbatches=8, only=["zb-v", "1f1b"])))
    schedule  stages/rank  time/microbatch  bubble  span bubble  peak activations  microbatches held
    zb-v                2            3.188   5.88%        0.00%                 8                  4
    1f1b                1            4.125  27.27%       27.27%                 4                  4
    """
    is_finer = any(row.stages_per_rank > 1 or row.timeline.program.num_slices > 1 for row in rows)
    bytes_known = any(row.timeline.peak_bytes is not None for row in rows)
    header = ["schedule", "stages/rank", "time/microbatch", "bubble", "span bubble", "peak activations"]
    has_formula = any(row.formula is not None for row in rows)
    header += ["microbatches held"] * is_finer + ["peak bytes"] * bytes_known + ["time by formula"] * has_formula
    lines = []
    for row in rows:
        timeline, seconds = row.timeline, number(row.seconds_per_microbatch, 4)
        cells = [row.name + ("" if row.fits else " (over the limit)"), str(row.stages_per_rank), seconds]
        cells += [f"{timeline.bubble:.2%}", f"{timeline.span_bubble:.2%}", str(max(timeline.peak_activations))]
        cells += [number(row.peak_share, 3)] * is_finer
        cells += [size_text(max(timeline.peak_bytes or (0.0,)))] if bytes_known else []
        each = row.timeline.program.num_microbatches
        cells += ["" if row.formula is None else number(row.formula / each, 4)] if has_formula else []
        lines.append(cells)
    heading = "microbatches held" if is_finer else "peak activations"
    return table(header, lines, width=width, keep=("time/microbatch", "bubble", heading))


def recommend(rows: Sequence[Row]) -> Advice:
    """Return the conclusion of a comparison; schedules with stale weights are not recommended over exact ones.

    It names what the comparison left out, because that may be better than the recommendation.

    >>> print(recommend(compare(4, num_microbatches=8)))
    Run zb-v: 5.9% bubble, at most 4 microbatches held on a rank; 1f1b takes 29% longer. If memory is short, ...
    """
    left_out = rows.left_out if isinstance(rows, Comparison) else ()
    named = ", ".join(schedule.name for schedule in left_out)
    unknown = (Remedy("left out", f"Not compared: {named}"),) if named else ()
    exact = [row for row in rows if row.timeline.program.num_updates == 0 and row.fits]
    if exact:
        return Advice((*_remedies(rows, exact), *unknown), least=0.0)
    if not rows:
        return Advice(unknown, nothing="No schedule supports these counts.")
    least = min(rows, key=lambda row: row.peak_share)
    nothing = f"Nothing fits the limit: {least.name} holds the least, {_peak(least)}."
    return Advice(unknown, nothing=nothing)


def _remedies(rows: Sequence[Row], exact: Sequence[Row]) -> Iterator[Remedy]:
    """Yield what to run, and what to run if that holds too much."""
    best = _best(exact)
    said = f"Run {best.name}: {best.timeline.bubble:.1%} bubble, at most {_peak(best)} held on a rank"
    if best.timeline.program.placement.mirrored:
        said += ", and two copies of the weights"
    more = next((_slower(row, best) for row in rows if row.name == DEFAULT), 0.0)
    if more >= 0.005:
        said += f"; {DEFAULT} takes {more:.0%} longer"
    yield Remedy("schedule", said, max(more / (1 + more), 0.0), {"schedule": best.name})
    smaller = [row for row in exact if row.peak_share <= 0.8 * best.peak_share and _slower(row, best) <= 0.25]
    if smaller:
        frugal = min(smaller, key=lambda row: (_slower(row, best), row.peak_share))
        more = _slower(frugal, best)
        longer = f"for {more:.0%} more time" if more >= 0.005 else "in about the same time"
        holds = f"holds {number(frugal.peak_share, 3)} {longer}"
        yield Remedy("memory", f"If memory is short, {frugal.name} {holds}", 0.0, {"schedule": frugal.name})


def _best(exact: Sequence[Row]) -> Row:
    """Return the fastest; within a thousandth, the one with the smaller span bubble, then the smaller peak."""
    fastest = exact[0].seconds_per_microbatch
    near = [row for row in exact if row.seconds_per_microbatch <= fastest * 1.001]
    return min(near, key=lambda row: (round(row.timeline.span_bubble, 4), row.peak_share))


def _slower(row: Row, best: Row) -> float:
    return row.seconds_per_microbatch / best.seconds_per_microbatch - 1


def _peak(row: Row) -> str:
    return f"{number(row.peak_share, 3)} microbatch{'' if row.peak_share == 1 else 'es'}"


def compare_page(rows: Sequence[Row], *, num_ranks: int, num_microbatches: int) -> str:
    """Return a comparison as a page: all schedules on one time axis, bubble against peak memory, and what to run.

    >>> text = compare_page(compare(2, num_microbatches=2), num_ranks=2, num_microbatches=2)
    >>> "<title>Comparison of 17 schedules: 2 ranks, 2 microbatches</title>" in text
    True
    """
    from drumline.report.draw.html import page

    title = f"Comparison of {len(rows)} schedules: {num_ranks} ranks, {num_microbatches} microbatches"
    left_out = left_out_text(rows.left_out) if isinstance(rows, Comparison) else ""
    advice = "\n".join(text for text in (str(recommend(rows)), left_out) if text)
    points = [{"name": row.name, **row.summary()} for row in rows]
    return page([row.timeline for row in rows], title=title, rows=points, advice=advice)
