"""Drumline: pipeline parallelism for PyTorch.

Drumline generates, proves, simulates, searches, runs and measures schedules, all as the same `Program` in the same text
form. It imports each name at its first use, so `import drumline` costs almost nothing.

>>> import drumline as dl
>>> program = dl.generate("zb-h1", num_ranks=4, num_microbatches=8)
>>> dl.simulate(program).makespan
27.0
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from drumline.core.version import __version__ as __version__

if TYPE_CHECKING:
    from drumline.channel.launch.launch import launch
    from drumline.channel.launch.stop import stop_on_signals
    from drumline.core.action import Action, B, F, I, Op, W, overlap
    from drumline.core.costs import Costs, Edge
    from drumline.core.errors import DrumlineError
    from drumline.core.lower.lower import lower
    from drumline.core.lower.torch_text import for_torch, titan_schedule
    from drumline.core.measured.run import Run, read_run
    from drumline.core.placement import Placement
    from drumline.core.program import Program
    from drumline.core.prove.frozen import prune
    from drumline.core.prove.validate import validate
    from drumline.core.prove.violation import Violation
    from drumline.core.simulate.simulate import makespans, simulate
    from drumline.core.timeline.attribute import attribute
    from drumline.core.timeline.idle import Limit
    from drumline.core.timeline.timeline import Timeline
    from drumline.engine.stages.balance import balance
    from drumline.engine.state.materialise import Weights, materialise
    from drumline.model.layers.moe import MoE, PassAux
    from drumline.model.layers.styles import Colwise, Rowwise
    from drumline.model.microbatches import Microbatches
    from drumline.model.quantised.bases import quantise
    from drumline.pipeline.pipeline import Pipeline
    from drumline.pipeline.profiling import profile_model
    from drumline.plan.device.plan import Plan
    from drumline.plan.device.planner import plan
    from drumline.plan.search.objective import Jitter
    from drumline.plan.search.search import search
    from drumline.plan.slices.search import search_slices
    from drumline.report.compare import compare
    from drumline.report.draw.grid import grid
    from drumline.report.kineto.analysis import analyze
    from drumline.report.replicas.step import replicas
    from drumline.schedules import generate, schedule
    from drumline.verification.verify import verify

_HOME = {
    "Action": "core.action",
    "B": "core.action",
    "Colwise": "model.layers.styles",
    "Costs": "core.costs",
    "DrumlineError": "core.errors",
    "Edge": "core.costs",
    "F": "core.action",
    "I": "core.action",
    "Jitter": "plan.search.objective",
    "Limit": "core.timeline.idle",
    "Microbatches": "model.microbatches",
    "MoE": "model.layers.moe",
    "Op": "core.action",
    "PassAux": "model.layers.moe",
    "Pipeline": "pipeline.pipeline",
    "Placement": "core.placement",
    "Plan": "plan.device.plan",
    "Program": "core.program",
    "Rowwise": "model.layers.styles",
    "Run": "core.measured.run",
    "Timeline": "core.timeline.timeline",
    "Violation": "core.prove.violation",
    "W": "core.action",
    "Weights": "engine.state.materialise",
    "analyze": "report.kineto.analysis",
    "attribute": "core.timeline.attribute",
    "balance": "engine.stages.balance",
    "compare": "report.compare",
    "for_torch": "core.lower.torch_text",
    "generate": "schedules",
    "grid": "report.draw.grid",
    "launch": "channel.launch.launch",
    "lower": "core.lower.lower",
    "makespans": "core.simulate.simulate",
    "materialise": "engine.state.materialise",
    "overlap": "core.action",
    "plan": "plan",
    "profile_model": "pipeline.profiling",
    "prune": "core.prove.frozen",
    "quantise": "model.quantised.bases",
    "read_run": "core.measured.run",
    "replicas": "report.replicas.step",
    "schedule": "schedules",
    "search": "plan.search.search",
    "search_slices": "plan.slices.search",
    "simulate": "core.simulate.simulate",
    "stop_on_signals": "channel.launch.stop",
    "titan_schedule": "core.lower.torch_text",
    "validate": "core.prove.validate",
    "verify": "verification.verify",
}

__all__ = [
    "Action",
    "B",
    "Colwise",
    "Costs",
    "DrumlineError",
    "Edge",
    "F",
    "I",
    "Jitter",
    "Limit",
    "Microbatches",
    "MoE",
    "Op",
    "PassAux",
    "Pipeline",
    "Placement",
    "Plan",
    "Program",
    "Rowwise",
    "Run",
    "Timeline",
    "Violation",
    "W",
    "Weights",
    "analyze",
    "attribute",
    "balance",
    "compare",
    "for_torch",
    "generate",
    "grid",
    "launch",
    "lower",
    "makespans",
    "materialise",
    "overlap",
    "plan",
    "profile_model",
    "prune",
    "quantise",
    "read_run",
    "replicas",
    "schedule",
    "search",
    "search_slices",
    "simulate",
    "stop_on_signals",
    "titan_schedule",
    "validate",
    "verify",
]


def _show_in_notebooks() -> None:
    """Let notebooks draw programs and timelines; the core itself does not depend on drawing."""
    from drumline.core.program import Program
    from drumline.core.timeline.timeline import Timeline

    def of_program(program: Program) -> str:
        from drumline.report.draw.html import program_html

        return program_html(program)

    def of_timeline(timeline: Timeline) -> str:
        from drumline.report.draw.html import timeline_html

        return timeline_html(timeline)

    globals().update(Program=Program, Timeline=Timeline)
    setattr(Program, "_repr_html_", of_program)  # noqa: B010 - mypy forbids adding a method by plain assignment
    setattr(Timeline, "_repr_html_", of_timeline)  # noqa: B010


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module 'drumline' has no attribute {name!r}")
    if "Program" not in globals():
        _show_in_notebooks()
    try:
        value = getattr(importlib.import_module(f"drumline.{home}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        from drumline.core.errors import NotInstalled

        raise NotInstalled.torch(f"drumline.{name} needs PyTorch") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
