"""A plan with its reasons, as one value: every number in the page, the text and the JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from drumline.core.errors import counted
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.loads import hop_seconds, stage_ops
from drumline.plan.cluster.stages import simulated
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.device.advice import Remedy
from drumline.plan.launch.launch import AXES, Launch, first_places, launch, links
from drumline.plan.layouts.assumed import Assumed, assumed
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.planner import OBJECTIVE, ClusterPlan
from drumline.plan.layouts.program_search import LayoutProgram, costs_of
from drumline.plan.layouts.slice_survey import in_slices
from drumline.plan.layouts.what_if import ScalePoint, against_fsdp, changes, margins, pareto, scaling
from drumline.plan.layouts.why import Alternative, why_not
from drumline.plan.slices.layout_estimate import SlicedLayout

FORMAT = "drumline-cluster-plan"
VERSION = 1
MOST = 6000  # the most (stage, microbatch) pairs to draw


@dataclass(frozen=True, slots=True)
class Drawing:
    """A timeline, and which part of the step it shows."""

    timeline: Simulation
    shows: str

    def to_json(self) -> dict[str, Any]:
        """Return its numbers."""
        names = ("makespan", "bubble", "span_bubble", "idle", "peak_activations")
        return {"shows": self.shows, **{name: getattr(self.timeline, name) for name in names}}


def drawing(
    transformer: Transformer, cluster: Cluster, layout: Layout, program: Program | None = None
) -> Drawing | None:
    """Return the timeline of a pipeline; None for a single rank.

    If there are too many microbatches, it shows a step with fewer: the middle of a step repeats itself.
    """
    if layout.pipeline == 1:
        return None
    if program is not None:
        return Drawing(simulate(program, costs_of(transformer, cluster, layout)), program.name)
    whole, slices = layout.num_microbatches, layout.slices
    shown = whole if whole * layout.num_stages <= MOST else 2 * layout.pipeline
    if slices > 1 and shown * slices * layout.num_stages > MOST:
        shown = min(shown, layout.pipeline)
    if slices > 1:
        timeline = SlicedLayout(transformer, cluster, layout).of_microbatches(min(shown, whole))
    else:
        hop, _ = hop_seconds(transformer, cluster, layout)
        stages = stage_ops(transformer, cluster, layout)
        timeline = simulated(layout.schedule, stages, layout.pipeline, min(shown, whole), hop_seconds=hop)
    name = f"{layout.schedule}: {counted(layout.pipeline, 'rank')}, {counted(layout.num_stages, 'stage')}"
    words = f"{name}, {counted(min(shown, whole), 'microbatch')}{f' in {slices} slices' if slices > 1 else ''}"
    if shown < whole:
        words += f" instead of {whole}; the middle repeats itself"
    return Drawing(timeline, words)


@dataclass(frozen=True, slots=True)
class Reasons:
    """What further plans say about the choice."""

    changes: list[Alternative]
    margins: list[Remedy]
    pareto: list[Choice]
    scaling: dict[str, list[ScalePoint]]  # keys: strong and weak
    traffic: list[tuple[str, Choice]]
    drawing: Drawing | None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A plan: the best layout of each mesh and why it loses, how to start it, and what further plans say about it.

    If it runs slices of sequences, `whole` is the same layout without, and why that loses.
    """

    plan: ClusterPlan
    best: list[Alternative]
    launch: Launch
    software: Assumed
    objective: str = OBJECTIVE
    reasons: Reasons | None = None
    whole: Alternative | None = None

    def to_json(self) -> dict[str, Any]:
        """Return everything as one object."""
        plan, layout = self.plan, self.plan.chosen.layout
        places = first_places(layout, plan.cluster)
        return {
            "format": FORMAT,
            "version": VERSION,
            "objective": self.objective,
            "model": asdict(plan.transformer),
            "cluster": asdict(plan.cluster),
            "batch": plan.batch,
            "headroom": plan.headroom,
            "limit_bytes": plan.limit_bytes,
            "num_layouts": plan.survey.num_layouts,
            "num_evaluated": plan.survey.num_evaluated,
            "plan_seconds": plan.seconds,
            "chosen": _layout_json(plan, plan.chosen),
            "band": [_layout_json(plan, choice) for choice in plan.band],
            "searched": [_searched_json(plan, program) for program in plan.searched],
            "software": self.software.to_json(),
            "best": [{**_layout_json(plan, rival.choice), "why": rival.sentence} for rival in self.best],
            "ranks": {
                "order": list(AXES),
                "sizes": {axis: getattr(layout, axis) for axis in AXES},
                "links": links(layout, plan.cluster),
                "nodes": plan.cluster.num_nodes,
                "shown": [{"rank": rank, **place._asdict()} for rank, place in places.items()],
            },
            "launch": self.launch.to_json(),
            **({} if self.whole is None else _whole_json(plan, self.whole)),
            **({} if self.reasons is None else _reasons_json(plan, self.reasons)),
        }


def brief(plan: ClusterPlan, *, source: str = "", program_file: str = "plan.csv") -> Explanation:
    """Return the plan without further plans; `source` is the folder or config.json of the model.

    `program_file` is where a searched program is written.
    """
    best = [why_not(plan.chosen, choice, plan.limit_bytes) for choice in plan.best]
    file = program_file if plan.chosen.program is not None else ""
    pins = plan.pins
    chosen = {pins.framework: pins.release} if pins.release else {}
    how = launch(plan.transformer, plan.cluster, plan.chosen.layout, source=source, program_file=file, releases=chosen)
    return Explanation(plan, best, how, assumed(plan), whole=_whole(plan))


def explain(plan: ClusterPlan, *, source: str = "", program_file: str = "plan.csv") -> Explanation:
    """Return the plan with its reasons, most of which are further plans."""
    reasons = Reasons(
        changes(plan),
        margins(plan),
        pareto(plan),
        scaling(plan),
        against_fsdp(plan),
        drawing(plan.transformer, plan.cluster, plan.chosen.layout, plan.chosen.program),
    )
    return replace(brief(plan, source=source, program_file=program_file), reasons=reasons)


def _whole(plan: ClusterPlan) -> Alternative | None:
    """Return the chosen layout without slices, if it has some."""
    layout, limit = plan.chosen.layout, plan.limit_bytes
    if layout.slices == 1:
        return None
    whole = in_slices(plan.survey).cost(replace(layout, slices=1), limit)
    return why_not(plan.chosen, whole, limit, "whole sequences")


def _whole_json(plan: ClusterPlan, whole: Alternative) -> dict[str, Any]:
    number = plan.chosen.layout.slices
    tokens = plan.transformer.sequence // number
    return {
        "slices": {
            "number": number,
            "tokens": tokens,
            "whole": {**_layout_json(plan, whole.choice), "why": whole.sentence},
        }
    }


def _reasons_json(plan: ClusterPlan, reasons: Reasons) -> dict[str, Any]:
    return {
        "changes": [
            {"what": edit.kind, "why": edit.sentence, **_layout_json(plan, edit.choice)} for edit in reasons.changes
        ],
        "more": [
            {
                "what": margin.kind,
                "sentence": margin.sentence,
                **margin.settings,
                "gain": margin.gain,
                "best": _layout_json(plan, margin.choice) if isinstance(margin, Alternative) else None,
            }
            for margin in reasons.margins
        ],
        "pareto": [_layout_json(plan, choice) for choice in reasons.pareto],
        "scaling": {name: _curve_json(plan, points) for name, points in reasons.scaling.items()},
        "traffic": [{"name": name, **_layout_json(plan, choice)} for name, choice in reasons.traffic],
        "timeline": None if reasons.drawing is None else reasons.drawing.to_json(),
    }


def _searched_json(plan: ClusterPlan, program: LayoutProgram) -> dict[str, Any]:
    assert program.choice.program is not None, "a search finds a program"
    lines = program.choice.program.format().split("\n")
    more = {"start": program.start.layout.schedule, "gain": program.gain, "gap": program.gap, "program": lines}
    return {**_layout_json(plan, program.choice), **more}


def _curve_json(plan: ClusterPlan, points: Sequence[ScalePoint]) -> list[dict[str, Any]]:
    return [
        {
            "devices": point.devices,
            "batch": point.batch,
            "tokens_per_second": None if point.best is None else plan.tokens_per_second(point.best),
            "efficiency": point.efficiency,
            "best": None if point.best is None else _layout_json(plan, point.best),
        }
        for point in points
    ]


def _layout_json(plan: ClusterPlan, choice: Choice) -> dict[str, Any]:
    """Return a layout and its costs; times in seconds, sizes in bytes."""
    layout, estimate = choice.layout, choice.estimate
    return {
        "mesh": str(choice.mesh),
        "schedule": choice.schedule,
        "layout": {name: value for name, value in asdict(layout).items() if name != "slices" or value > 1},
        "microbatches": layout.num_microbatches,
        "step_seconds": choice.seconds,
        "seconds": asdict(estimate.seconds),
        "peak_bytes": choice.bytes,
        "bytes": asdict(estimate.bytes),
        "volumes": asdict(estimate.volumes),
        "bubble": estimate.bubble,
        "busiest_rank_waits": estimate.seconds.bubble / choice.seconds,
        "tokens_per_second": plan.tokens_per_second(choice),
        "flops_per_second_per_device": estimate.flops_per_second,
        "mfu": plan.mfu(choice),
        "hfu": plan.hfu(choice),
        "fits": plan.fits(choice),
        "exact": choice.is_exact,
    }
