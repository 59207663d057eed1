"""A plan with its reasons, as one object: every number that the page, the text and the JSON show."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from drumline.plan.launch.launch import launch
from drumline.plan.launch.ranks import AXES, links, place
from drumline.plan.layouts.changes import Change, against_fsdp, changes
from drumline.plan.layouts.margins import Margin, margins, pareto
from drumline.plan.layouts.planner import OBJECTIVE, ClusterPlan
from drumline.plan.layouts.scaling import Point, efficiency, strong, weak
from drumline.plan.layouts.survey import Candidate
from drumline.plan.layouts.why import why

FORMAT = "drumline-cluster-plan"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why the choice is the choice."""

    plan: ClusterPlan
    changes: list[Change]
    margins: list[Margin]
    pareto: list[Candidate]
    strong: list[Point]
    weak: list[Point]
    traffic: list[tuple[str, Candidate]]

    def to_json(self) -> dict[str, Any]:
        """Return all of it as one object."""
        return {
            **plan_json(self.plan),
            "changes": [
                {"what": one.what, "why": one.why, **candidate_json(self.plan, one.candidate)} for one in self.changes
            ],
            "more": [self._margin(one) for one in self.margins],
            "pareto": [candidate_json(self.plan, one) for one in self.pareto],
            "scaling": {"strong": self._curve(self.strong), "weak": self._curve(self.weak)},
            "traffic": [{"name": name, **candidate_json(self.plan, one)} for name, one in self.traffic],
        }

    def _margin(self, one: Margin) -> dict[str, Any]:
        best = None if one.best is None else candidate_json(self.plan, one.best)
        return {
            "what": one.what,
            "sentence": str(one),
            "devices": one.devices,
            "limit_bytes": one.limit_bytes,
            "gain": one.gain,
            "best": best,
        }

    def _curve(self, points: list[Point]) -> list[dict[str, Any]]:
        sequence = self.plan.transformer.sequence
        return [
            {
                "devices": one.devices,
                "batch": one.batch,
                "tokens_per_second": one.tokens_per_second(sequence),
                "efficiency": share,
                "best": None if one.best is None else candidate_json(self.plan, one.best),
            }
            for one, share in zip(points, efficiency(points), strict=True)
        ]


def explain(plan: ClusterPlan) -> Explanation:
    """Return the plan with its reasons; most of them are further plans."""
    return Explanation(
        plan,
        changes(plan),
        margins(plan),
        pareto(plan),
        strong(plan),
        weak(plan),
        against_fsdp(plan),
    )


def plan_json(plan: ClusterPlan) -> dict[str, Any]:
    """Return the plan alone as an object."""
    layout = plan.chosen.layout
    crossed = links(layout, plan.cluster)
    return {
        "format": FORMAT,
        "version": VERSION,
        "objective": OBJECTIVE,
        "model": asdict(plan.transformer),
        "cluster": asdict(plan.cluster),
        "batch": plan.batch,
        "headroom": plan.headroom,
        "limit_bytes": plan.limit_bytes,
        "num_layouts": plan.survey.num_layouts,
        "num_evaluated": plan.survey.num_evaluated,
        "plan_seconds": plan.seconds,
        "chosen": candidate_json(plan, plan.chosen),
        "best": [
            {**candidate_json(plan, one), "why": "" if one is plan.chosen else why(plan.chosen, one, plan.limit_bytes)}
            for one in plan.best
        ],
        "ranks": {
            "order": list(AXES),
            "sizes": {axis: getattr(layout, axis) for axis in AXES},
            "links": crossed,
            "nodes": -(-plan.cluster.num_devices // plan.cluster.devices_per_node),
            "shown": _shown(plan),
        },
        "launch": launch(plan.transformer, plan.cluster, layout).to_json(),
    }


def _shown(plan: ClusterPlan) -> list[dict[str, Any]]:
    """Return the ranks of the first nodes of the first two stages, enough to see the order."""
    layout, per_node = plan.chosen.layout, plan.cluster.devices_per_node
    stride = layout.tensor * layout.context * layout.data
    firsts = sorted({start // per_node + more for start in (0, stride) for more in (0, 1)})
    ranks = [rank for node in firsts for rank in range(node * per_node, (node + 1) * per_node)]
    return [
        {"rank": rank, **place(layout, plan.cluster, rank)._asdict()} for rank in ranks if rank < layout.num_devices
    ]


def candidate_json(plan: ClusterPlan, one: Candidate) -> dict[str, Any]:
    """Return a layout and what it takes; times in seconds, sizes in bytes."""
    layout, estimate = one.layout, one.estimate
    return {
        "mesh": str(one.mesh),
        "layout": {field.name: _plain(getattr(layout, field.name)) for field in fields(layout)},
        "microbatches": layout.num_microbatches,
        "step_seconds": one.seconds,
        "seconds": asdict(estimate.seconds),
        "peak_bytes": one.bytes,
        "bytes": asdict(estimate.bytes),
        "volumes": asdict(estimate.volumes),
        "bubble": estimate.bubble,
        "tokens_per_second": layout.batch * plan.transformer.sequence / one.seconds,
        "flops_per_second_per_device": estimate.flops_per_second,
        "utilisation": estimate.flops_per_second / plan.cluster.device.flops_per_second,
        "fits": one.bytes <= plan.limit_bytes,
        "exact": one.is_exact,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value
