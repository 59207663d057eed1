"""All schedules side by side, for one model on given ranks.

The costs are those of a stage when every rank holds one. A schedule with v stages per rank cuts the same model
finer, so each of its stages costs a v-th: every row does the same work, and times and bytes can be held against
each other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from drumline.core.costs import Costs, cut_finer
from drumline.core.errors import CostsError, ScheduleError
from drumline.core.prove.frozen import prune
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.idle import Limit
from drumline.report.summary import refused, summarize
from drumline.report.table import table
from drumline.schedules import schedules


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule of a comparison; `stages_per_rank` says how fine it cuts the model."""

    name: str
    stages_per_rank: int
    timeline: Simulation
    fits: bool

    @property
    def seconds_per_microbatch(self) -> float:
        """The makespan over all microbatches: comparable also where a program spans several steps."""
        return self.timeline.makespan / self.timeline.program.num_microbatches

    @property
    def peak_share(self) -> float:
        """The largest rank's peak of pairs, in whole-rank activations: v pairs of a v-th each count as one."""
        return max(self.timeline.peak_activations) / self.stages_per_rank

    def summary(self) -> dict[str, Any]:
        """Return the figures as `simulate` reports them, and what only a comparison knows."""
        return {
            **summarize(self.timeline),
            "stages_per_rank": self.stages_per_rank,
            "seconds_per_microbatch": self.seconds_per_microbatch,
            "peak_share": self.peak_share,
            "fits": self.fits,
        }


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A schedule that a comparison leaves out, cut so fine, and why."""

    name: str
    stages_per_rank: int
    reason: ScheduleError

    def summary(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {"schedule": self.name, "stages_per_rank": self.stages_per_rank, **refused(self.reason)}


class Comparison(list[Row]):
    """The rows of a comparison, best first, and the training schedules that do not admit its counts."""

    def __init__(self, rows: Iterable[Row] = (), left_out: Iterable[LeftOut] = ()) -> None:
        super().__init__(rows)
        self.left_out = tuple(left_out)


def compare(
    num_ranks: int,
    *,
    num_microbatches: int,
    costs: Costs | None = None,
    stages_per_rank: int | None = None,
    frozen: Collection[int] = (),
    limit: Limit | None = None,
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Return every training schedule that admits these counts, best first; those over the limit come last.

    The others are its `left_out`, each with the reason. `frozen` are stages without trainable parameters, counted as if
    every rank held one.

    >>> [row.name for row in compare(4, num_microbatches=8)[:3]]
    ['zb-v', 'interleaved-zb', 'dualpipe']
    >>> [one.name for one in compare(3, num_microbatches=4).left_out]
    ['dualpipe', 'chimera']
    """
    costs = _for_all(costs or Costs())
    costs.factors(num_microbatches)
    if limit is not None:
        limit.check(costs)
    rows, left_out = [], []
    for name, schedule in schedules().items():
        v = schedule.stages_per_rank
        if schedule.stage_counts != "fixed" and stages_per_rank is not None and v > 1:
            v = stages_per_rank
        if progress is not None:
            progress(f"simulating {name}")
        try:
            program = schedule.build(num_ranks, num_microbatches, v)
        except ScheduleError as error:
            left_out.append(LeftOut(name, v, error))
            continue
        if not program.has_backward:
            continue
        program = prune(program, [stage // v not in frozen for stage in range(program.num_stages)])
        timeline = simulate(program, _over_all_steps(cut_finer(costs, v), program.num_microbatches))
        rows.append(Row(name, v, timeline, _fits(timeline, v, limit)))
    rows.sort(key=lambda row: (not row.fits, round(row.seconds_per_microbatch, 9), row.peak_share))
    return Comparison(rows, left_out)


def _fits(timeline: Simulation, stages_per_rank: int, limit: Limit | None) -> bool:
    if limit is None:
        return True
    if limit.max_activations is not None:
        limit = replace(limit, max_activations=limit.max_activations * stages_per_rank)
    return limit.admits_pairs(max(timeline.peak_activations)) and limit.admits_bytes(max(timeline.peak_bytes or (0.0,)))


def _over_all_steps(costs: Costs, num_microbatches: int) -> Costs:
    """Return the costs with one step's microbatch factors repeated for every step of the program."""
    factor = costs.microbatch_factor
    if isinstance(factor, Sequence):
        return replace(costs, microbatch_factor=[*factor] * (num_microbatches // len(factor)))
    return costs


def _for_all(costs: Costs) -> Costs:
    """Return costs that hold for any cut; refuse those given per stage, of which schedules make different ones."""
    for field in fields(costs):
        if field.name != "microbatch_factor" and isinstance(getattr(costs, field.name), Sequence):
            raise CostsError(
                f"{field.name} is given per stage", expected="one value: schedules cut the model into different stages"
            )
    return costs


def left_out_text(left_out: Sequence[LeftOut]) -> str:
    """Return which schedules were left out, those with the same reason on one line; nothing where none was.

    >>> print(left_out_text(compare(3, num_microbatches=4).left_out))
    left out: dualpipe with 3 ranks: its two directions meet in the middle; expected an even number of ranks
    left out: chimera with 3 ranks: its two directions meet in the middle; expected an even number of ranks
    """
    reasons: dict[str, list[str]] = {}
    for one in left_out:
        expected = f"; expected {one.reason.expected}" if one.reason.expected else ""
        reasons.setdefault(one.reason.error + expected, []).append(one.name)
    return "\n".join(
        f"left out: {reason}" if reason.startswith(names[0]) else f"left out: {', '.join(names)}: {reason}"
        for reason, names in reasons.items()
    )


def compare_table(rows: Sequence[Row], *, width: int = 120) -> str:
    """Return the comparison as an aligned table."""
    bytes_known = any(row.timeline.peak_bytes is not None for row in rows)
    header = ["schedule", "stages/rank", "time/microbatch", "bubble", "span bubble", "peak activations"]
    header += ["peak bytes"] if bytes_known else []
    lines = []
    for row in rows:
        timeline = row.timeline
        cells = [
            row.name + ("" if row.fits else " (over the limit)"),
            str(row.stages_per_rank),
            f"{row.seconds_per_microbatch:.4g}",
            f"{timeline.bubble:.2%}",
            f"{timeline.span_bubble:.2%}",
            f"{row.peak_share:.3g}",
        ]
        if bytes_known:
            cells.append(f"{max(timeline.peak_bytes or (0.0,)):.4g}")
        lines.append(cells)
    return table(header, lines, width=width, keep=("time/microbatch", "bubble"))
