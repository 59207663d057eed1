"""The chosen pipeline as a timeline: what one pipeline's ranks do in a step, or in the first part of a long one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drumline.core.costs import Costs
from drumline.core.errors import counted
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.loads import hop_seconds, stage_ops
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import generate

MOST = 6000  # (stage, microbatch) pairs that are drawn


@dataclass(frozen=True, slots=True)
class Drawing:
    """A timeline, and what of the step it shows."""

    timeline: Simulation
    shows: str

    def to_json(self) -> dict[str, Any]:
        """Return its numbers."""
        return {
            "shows": self.shows,
            "makespan": self.timeline.makespan,
            "bubble": self.timeline.bubble,
            "span_bubble": self.timeline.span_bubble,
            "idle": list(self.timeline.idle),
            "peak_activations": list(self.timeline.peak_activations),
        }


def drawing(transformer: Transformer, cluster: Cluster, layout: Layout) -> Drawing | None:
    """Return the timeline of a pipeline; None for a single rank.

    Where all microbatches would be too many, a step of fewer is drawn: its middle repeats itself.
    """
    if layout.pipeline == 1:
        return None
    whole = layout.num_microbatches
    shown = whole if whole * layout.num_stages <= MOST else max(2 * layout.pipeline, 1)
    program = generate(
        layout.schedule,
        num_ranks=layout.pipeline,
        num_microbatches=min(shown, whole),
        stages_per_rank=layout.stages_per_rank,
    )
    hop, _ = hop_seconds(transformer, cluster, layout)
    stages = stage_ops(transformer, cluster, layout)
    costs = Costs(
        forward=[one.forward.total for one in stages],
        backward_input=[one.again.total + one.backward_input.total for one in stages],
        backward_weight=[one.backward_weight.total for one in stages],
        comm=hop,
    )
    name = f"{layout.schedule}: {counted(layout.pipeline, 'rank')}, {counted(layout.num_stages, 'stage')}"
    words = f"{name}, {counted(program.num_microbatches, 'microbatch')}"
    if program.num_microbatches < whole:
        words += f" instead of {whole}, the middle of which repeats itself"
    return Drawing(simulate(program, costs), words)
