"""What features do not go with each other while training, and why."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.errors import UsageError
from drumline.pipeline.steps.step import StepRun


def refuse_move(run: StepRun, counts: Sequence[int]) -> None:
    """Refuse to move layers beside what cannot follow them."""
    if run.stream is not None:
        raise UsageError(
            f"repartition: {run.stream.name} has no flush",
            expected="a flushed schedule: between its steps no microbatch is in flight",
        )
    if run.validation.is_on:
        raise UsageError(
            'repartition: an optimizer has validated="after"',
            expected='validated="before": copies of updates that may be taken back do not move',
        )
    for name, why in {"tp": "divides layers", "ep": "divides experts"}.items():
        if run.crew.axes.size(name) > 1:
            raise UsageError(
                f"repartition: the mesh's axis {name} {why}", expected="a mesh of pp, dp and cp: parts cannot move"
            )
    if run.updates.divided is not None or run.holdings.shards is not None:
        raise UsageError("repartition: lines of the mesh divide state", expected="zero=0: pieces cannot move")
    if run.check.is_pending and not run.check.is_chain and not run.crew.alone:
        raise UsageError(
            "repartition: the first step has not run",
            expected="a step before it, which is checked against the whole model",
            fix="pass the cut to Pipeline: cuts= or balance=",
        )
    if run.recording.folder is not None and run.frozen.would_change(counts):
        raise UsageError(
            "repartition: stages would have other backwards, because of frozen parameters",
            expected="the same program in a recorded run",
            fix="keep a trainable block in each stage that has one now, or pass record=True",
        )
