"""The same training on another number of ranks: schedule, stages and cut for the ranks that are there.

Batches, microbatches and everything that is learned stay the same. A schedule that does not admit the new number gives
way to the default one; a cut that was given by hand, by layers or by a plan gives way to a balanced one.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from drumline.core.errors import DrumlineError, UsageError, counted
from drumline.plan.device.plan import Plan
from drumline.schedules import DEFAULT, schedules
from drumline.train.config.relations import program_of
from drumline.train.config.settings import TrainSettings

_AROUND = {"gpt": 2, "mlp": 0}  # blocks beside the layers, of models whose number is known


def planned_for(settings: TrainSettings, num_ranks: int, *, quiet: bool = False) -> TrainSettings:
    """Return the settings of the same run on so many ranks, and say what changes unless `quiet`.

    >>> from drumline.train.config.settings import MeshSettings, PipelineSettings
    >>> four = TrainSettings(mesh=MeshSettings(pipeline=4), pipeline=PipelineSettings(schedule="dualpipe"))
    >>> three = planned_for(four, 3, quiet=True)
    >>> three.num_ranks, three.pipeline.schedule, three.num_microbatches
    (3, '1f1b', 8)
    """
    if num_ranks == settings.num_ranks:
        return settings
    least = settings.failures.min_ranks
    if num_ranks < least:
        left = f"{counted(num_ranks, 'rank')} {'is' if num_ranks == 1 else 'are'} left"
        raise UsageError(left, expected=f"{least} or more, as failures.min_ranks says")
    base = _without_plan(settings)
    given = base.pipeline
    named = given.schedule in schedules()
    tried = [(given.schedule, given.stages_per_rank), (given.schedule, None)] if named else []
    for schedule, stages in dict.fromkeys([*tried, (DEFAULT, None)]):
        cut = replace(given, schedule=schedule, stages_per_rank=stages, layers=(), cuts=())
        found = replace(base, pipeline=cut, mesh=replace(base.mesh, pipeline=num_ranks))
        if _fits(found):
            if not quiet:
                _say(settings, found)
            return found
    raise UsageError(
        f"{counted(num_ranks, 'rank')} are there",
        expected=f"at most as many as the model has blocks: {settings.model.num_layers} layers, and what is around",
        fix="start fewer ranks",
    )


def _without_plan(settings: TrainSettings) -> TrainSettings:
    """Return the settings with a plan's decisions in place of the plan."""
    if not settings.pipeline.plan:
        return settings
    plan = Plan.load(settings.pipeline.plan)
    pipeline = replace(settings.pipeline, plan="", schedule=plan.schedule, stages_per_rank=plan.stages_per_rank)
    recompute = "full" if any(plan.checkpoint) else "none"  # what fits with some recomputed may need all of it
    return replace(settings, pipeline=pipeline, memory=replace(settings.memory, recompute=recompute))


def _fits(settings: TrainSettings) -> bool:
    try:
        program = program_of(settings)
    except DrumlineError:
        return False
    around = _AROUND.get(settings.model.kind)
    return around is None or program.num_stages <= settings.model.num_layers + around


def _say(before: TrainSettings, after: TrainSettings) -> None:
    was, now = before.pipeline, after.pipeline
    changes = [f"planned for {counted(after.num_ranks, 'rank')} instead of {before.num_ranks}"]
    if now.schedule != was.schedule:
        name = was.plan or was.schedule
        changes.append(f"schedule {now.schedule}, because {name} does not admit that number")
    if was.layers or was.cuts or was.plan:
        changes.append("stages cut again by numbers of parameters")
    logging.getLogger("drumline").warning("%s", "; ".join(changes))
