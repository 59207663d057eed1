"""What a report says about a run, as one object: page, text, plots and --json all take their numbers from it.

The default step is the typical one: the median by makespan, without the first step, which warms up. Costs are medians
over similar steps, so that a single disturbed step does not determine the advice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from drumline.core.errors import counted
from drumline.core.measured.costs import costs_of, replay
from drumline.core.measured.endless import is_part, num_begun
from drumline.core.measured.measured import Measured
from drumline.core.measured.run import Run
from drumline.core.measured.steadiness import Steadiness, spread_of
from drumline.core.timeline.timeline import Timeline
from drumline.plan.device.advice import Advice
from drumline.report.advise.adviser import advise
from drumline.report.advise.evidence import OPS, Evidence
from drumline.report.run.changes import changes_of
from drumline.report.summary import peak_queues, summarize

MAKESPAN = "pp/makespan_seconds"
_POOLED = 15  # number of steps to pool
# The figures of a step, by their name in the metrics.
CURVES = {
    "loss": "loss_metrics/global_avg_loss",
    "grad_norm": "grad_norm",
    "rows_per_second": "throughput(rows/s)",
    "tokens_per_second": "throughput(tps)",
    "seconds": "time_metrics/end_to_end(s)",
    "makespan": MAKESPAN,
    "bubble": "pp/bubble",
}


@dataclass(frozen=True, kw_only=True)
class ObservedStep(Evidence):
    """One step of our own run; its costs come from `pooled` similar steps."""

    measured: Measured
    run: Run
    pooled: tuple[int, ...]


def observe(run: Run, step: int | None = None) -> ObservedStep:
    """Collect what a report needs; RecordError says what is missing."""
    steps, metrics = run.steps, run.metrics()
    near = [step] if step is not None else _typical(_of_one_program(metrics), steps)
    chosen = near[len(near) // 2] if near else None
    measured = run.timeline(chosen)
    number = measured.records[0].step
    pooled = tuple(near or [number])
    timelines = [measured if index == number else run.timeline(index) for index in pooled]
    return ObservedStep(
        measured=measured,
        simulated=replay(measured),
        costs=costs_of(timelines),
        step=number,
        plan=run.plan,
        metrics=metrics,
        run=run,
        pooled=pooled,
    )


def _of_one_program(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the lines of the steps that ran by the program of most steps: others take other times.

    >>> [value["step"] for value in _of_one_program([{"step": 0}, {"step": 1, "program": 2}, {"step": 2}])]
    [0, 2]
    """
    counts = Counter(_program_in(line) for line in metrics)
    most = max(counts, key=lambda number: (counts[number], -number), default=0)
    return [line for line in metrics if _program_in(line) == most]


def _program_in(line: Mapping[str, Any]) -> int:
    return int(line.get("program") or 0)


def _typical(metrics: Sequence[dict[str, Any]], steps: Sequence[int]) -> list[int]:
    """Return the steps around the median, by makespan.

    >>> _typical([{"step": at, MAKESPAN: seconds} for at, seconds in enumerate((90, 5, 3, 4))], range(4))
    [2, 3, 1]
    """
    known = set(steps)
    timed = [(m[MAKESPAN], m["step"]) for m in metrics if m.get(MAKESPAN) is not None and m["step"] in known]
    ordered = [step for _, step in sorted(timed[1:] or timed)]
    first = max(0, (len(ordered) - _POOLED) // 2)
    return ordered[first : first + _POOLED]


@dataclass(frozen=True)
class RunReport:
    """One run: what was observed, and what to change."""

    step: ObservedStep
    advice: Advice
    name: str

    @property
    def run(self) -> Run:
        """The run itself."""
        return self.step.run

    @cached_property
    def steadiness(self) -> Steadiness:
        """Whether the machine was quiet during the run, judged by its steps after the first and its load before."""
        if self.run.is_served:
            return Steadiness()  # steps are not equal work: rows and arrivals are the clients'
        mine = self.step.measured.records[0].program
        lengths = [
            step["makespan"]
            for step in self.steps[1:]
            if step["makespan"] is not None and step.get("program", mine) == mine
        ]
        return Steadiness(spread_of(lengths), *machine_load(self.run.environment))

    @cached_property
    def stages(self) -> list[dict[str, Any]]:
        """Every stage: where it runs, its blocks, and its seconds per microbatch."""
        step, program, blocks = self.step, self.step.program, self.run.plan.get("blocks")
        each = [step.costs.per_stage(op, program.num_stages) for op in OPS]
        slowest = max(step.stage_seconds)
        return [
            {
                "stage": stage,
                "ranks": list(program.placement.ranks_of(stage)),
                "blocks": blocks[stage] if blocks else None,
                "forward": each[0][stage],
                "backward": each[1][stage] + each[2][stage],
                "seconds": seconds,
                "share_of_slowest": seconds / slowest if slowest > 0 else 0.0,
            }
            for stage, seconds in enumerate(step.stage_seconds)
        ]

    @property
    def slowest_stage(self) -> int:
        """The stage that takes the longest per microbatch."""
        seconds = self.step.stage_seconds
        return max(range(len(seconds)), key=seconds.__getitem__)

    @cached_property
    def ranks(self) -> list[dict[str, Any]]:
        """Every rank: its step by what it did, its idle share of the makespan (also simulated), its peak."""
        measured = self.step.measured
        return [
            {
                "rank": rank,
                **asdict(parts),
                "step_seconds": parts.total,
                "idle_share": measured.idle[rank] / measured.makespan,
                "simulated_idle_share": self.step.simulated.idle[rank] / measured.makespan,
                "peak_pairs": max(measured.held[rank], default=0),
                "peak_stash_bytes": measured.memory[rank].peak_stash_bytes,
            }
            for rank, parts in enumerate(measured.parts)
        ]

    @cached_property
    def steps(self) -> list[dict[str, Any]]:
        """Every step in the metrics: loss, throughput, times, and the share of time that ranks computed."""
        steps = []
        for line in self.step.metrics:
            entry = {name: line.get(metric) for name, metric in CURVES.items()}
            bubble = entry["bubble"]
            if (number := _program_in(line)) or self._runs_several:
                entry["program"] = number
            steps.append({"step": line["step"], **entry, "utilisation": None if bubble is None else 1.0 - bubble})
        return steps

    @cached_property
    def changes(self) -> list[dict[str, Any]]:
        """What was changed during the run: the first step after it, why, predicted and real seconds."""
        return changes_of(self.run.decisions())

    @property
    def _runs_several(self) -> bool:
        return any(_program_in(line) for line in self.step.metrics)

    def _middle(self, name: str) -> float | None:
        """Return the median of a metric over steps, if any has it."""
        values = [step[name] for step in self.steps if step[name] is not None]
        return median(values) if values else None

    @property
    def overhead_seconds(self) -> float:
        """How much longer the step took than in the simulator, with the same seconds of every action."""
        return self.step.measured.makespan - self.step.simulated.makespan

    @property
    def overhead_share(self) -> float:
        """The overhead as a share of the step."""
        makespan = self.step.measured.makespan
        return self.overhead_seconds / makespan if makespan > 0 else 0.0

    def figures(self) -> dict[str, Any]:
        """Return all figures, without the timelines' actions."""
        step, program = self.step, self.step.program
        return {
            "name": self.name,
            "run": self.run.id,
            "schedule": program.name,
            "ranks": program.num_ranks,
            "stages": program.num_stages,
            "microbatches": num_begun(program),
            "num_steps": self.run.num_steps,
            "step": step.step,
            "which_step": which_step(step.step, self.run.steps),
            "pooled_steps": list(step.pooled),
            "makespan": step.measured.makespan,
            "simulated_makespan": step.simulated.makespan,
            "overhead_seconds": self.overhead_seconds,
            "overhead_share": self.overhead_share,
            "bubble": step.measured.bubble,
            "median_bubble": self._middle("bubble"),
            "utilisation": 1.0 - step.measured.bubble,
            **{name: self._middle(name) for name in ("rows_per_second", "tokens_per_second")},
            "slowest_stage": self.slowest_stage,
            "busy_machine": self.steadiness.sentence,
            "advice": self.advice.to_json(),
            "per_rank": self.ranks,
            "per_stage": self.stages,
            "per_step": self.steps,
            "changes": self.changes,
            "measured": _timeline_figures(step.measured),
            "simulated": _timeline_figures(step.simulated),
        }

    def to_json(self) -> dict[str, Any]:
        """Return all figures, and both timelines action by action."""
        figures = self.figures()
        for name, timeline in (("measured", self.step.measured), ("simulated", self.step.simulated)):
            figures[name]["tracks"] = tracks(timeline)
        return figures


def report_of(run: Run, *, step: int | None = None, name: str | None = None) -> RunReport:
    """Return the report of a run, of its typical step by default; RecordError says what is missing."""
    observed_step = observe(run, step)
    report = RunReport(observed_step, Advice(()), name or short_names([run.path])[0])
    nothing = report.steadiness.withheld if report.steadiness.busy else ""
    if is_part(observed_step.measured.program):
        nothing = "no advice: the schedule has no flush, and its rows never end"
    elif run.is_served:
        nothing = "no advice: the load of a service is what its clients ask for"
    return replace(report, advice=Advice((), nothing=nothing) if nothing else advise(observed_step))


def which_step(step: int, steps: Sequence[int]) -> str:
    """Return which of a run's steps is shown; those of a run that continues another do not begin at 0.

    >>> which_step(7, range(12)), which_step(405, range(400, 412))
    ('step 7 of 12 steps', 'step 405 of 12 steps, 400 to 411')
    """
    text = f"step {step} of {counted(len(steps), 'step')}"
    return text if not steps or steps[-1] == len(steps) - 1 else f"{text}, {steps[0]} to {steps[-1]}"


def machine_load(environment: Mapping[str, Any]) -> tuple[float | None, int | None]:
    """Return the load before a run and the cores of the busiest machine; None if no rank recorded them.

    >>> machine_load({"ranks": [{"cores": 2, "load": 0.5}, {"cores": 4, "load": 3.0}]}), machine_load({})
    ((3.0, 4), (None, None))
    """
    ranks = environment.get("ranks")
    known = []
    for rank in ranks if isinstance(ranks, list) else ():
        load, cores = (rank.get("load"), rank.get("cores")) if isinstance(rank, dict) else (None, None)
        if isinstance(load, int | float) and isinstance(cores, int) and cores:
            known.append((float(load), cores))
    return max(known, key=lambda pair: pair[0] / pair[1], default=(None, None))


def reports_of(runs: Sequence[Run], *, step: int | None = None) -> list[RunReport]:
    """Return the reports of several runs, with distinct names."""
    names = short_names([run.path for run in runs])
    return [report_of(run, step=step, name=name) for run, name in zip(runs, names, strict=True)]


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the ends of paths, as long as needed to distinguish them.

    >>> short_names([Path("runs/a/first"), Path("runs/b/first"), Path("runs/b/second")])
    ['a/first', 'b/first', 'b/second']
    """
    parts = [path.resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=0)):
        names = ["/".join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in paths]


def _timeline_figures(timeline: Timeline) -> dict[str, Any]:
    return {**summarize(timeline), "peak_queue": peak_queues(timeline)}


def tracks(timeline: Timeline) -> list[dict[str, Any]]:
    r"""Return every rank's actions with their starts and ends, from the timeline's start.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> tracks(simulate(Program.parse("0F0,0B0")))
    [{'actions': ['0F0', '0B0'], 'starts': [0.0, 1.0], 'ends': [1.0, 3.0]}]
    """
    return [
        {
            "actions": [str(action) for action in track.actions],
            "starts": [start - timeline.start for start in track.starts],
            "ends": [end - timeline.start for end in track.ends],
        }
        for track in timeline.tracks
    ]
