"""The same training on another number of ranks: schedule, stages and cut for the ranks that are there.

Batches and everything that is learned stay the same. A pipeline alone keeps its microbatches. The default schedule
replaces one that does not admit the new number. A balanced cut replaces one that was given by hand, by layers or by a
plan. A mesh keeps its pipelines as they are, and leaves out data-parallel ones: each that is left runs more
microbatches.

    pp2 x dp4, 8 ranks       7 or 6 ranks: no      4 ranks: pp2 x dp2      2 ranks: pp2

Three data-parallel pipelines of two ranks would not divide a batch of eight, so of 7 or 6 ranks, 4 are used.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from drumline.core.errors import DrumlineError, UsageError, counted
from drumline.plan.device.plan import Plan
from drumline.schedules import DEFAULT, schedules
from drumline.schedules.slices import order_of
from drumline.train.config.relations import AROUND, program_of
from drumline.train.config.settings import MeshSettings, TrainSettings


def planned_for(settings: TrainSettings, num_ranks: int, *, quiet: bool = False) -> TrainSettings:
    """Return the settings of the same run on so many ranks, and say what changes unless `quiet`.

    >>> from drumline.train.config.settings import MeshSettings, PipelineSettings
    >>> four = TrainSettings(mesh=MeshSettings(pipeline=4), pipeline=PipelineSettings(schedule="dualpipe"))
    >>> three = planned_for(four, 3, quiet=True)
    >>> three.num_ranks, three.pipeline.schedule, three.num_microbatches
    (3, '1f1b', 8)
    >>> two = planned_for(TrainSettings(mesh=MeshSettings(pipeline=2, data=2)), 2, quiet=True)
    >>> two.mesh.pipeline, two.mesh.data, two.num_microbatches
    (2, 1, 8)
    """
    if num_ranks == settings.num_ranks:
        return settings
    least = settings.failures.min_ranks
    if num_ranks < least:
        left = f"{counted(num_ranks, 'rank')} {'is' if num_ranks == 1 else 'are'} left"
        raise UsageError(left, expected=f"{least} or more, as failures.min_ranks says")
    mesh = _mesh_for(settings, num_ranks)
    base = replace(_without_plan(settings), mesh=mesh)
    if mesh.axes["dp"] == 1:  # nobody is left to divide state with
        base = replace(base, memory=replace(base.memory, zero=0))
    pipeline = base.pipeline
    named = pipeline.schedule in schedules()
    tried = [(pipeline.schedule, pipeline.stages_per_rank), (pipeline.schedule, None)] if named else []
    for schedule, stages in dict.fromkeys([*tried, (DEFAULT, None)]):
        cut = replace(pipeline, schedule=schedule, stages_per_rank=stages)
        if mesh.pipeline != settings.mesh.pipeline or cut != pipeline:
            cut = replace(cut, layers=(), cuts=())
        train_settings = replace(base, pipeline=cut)
        if _fits(train_settings):
            if not quiet:
                _say(settings, train_settings)
            return train_settings
    raise UsageError(
        f"{counted(num_ranks, 'rank')} are there",
        expected=f"at most as many as the model has blocks: {settings.model.num_layers} layers, and what is around",
        fix="start fewer ranks",
    )


def most_within(settings: TrainSettings, num_ranks: int) -> int:
    """Return how many of so many ranks the same run can use; 0 if it can use none.

    >>> from drumline.train.config.settings import MeshSettings
    >>> most_within(TrainSettings(mesh=MeshSettings(pipeline=2, data=2)), 3)
    2
    """
    return next((rank for rank in range(num_ranks, 0, -1) if _can_use(settings, rank)), 0)


def fewest_of(settings: TrainSettings) -> int:
    """Return the fewest ranks that the same run can use and failures.min_ranks allows."""
    every = range(settings.failures.min_ranks, settings.num_ranks)
    return next((number for number in every if _can_use(settings, number)), settings.num_ranks)


def _can_use(settings: TrainSettings, num_ranks: int) -> bool:
    try:
        _mesh_for(settings, num_ranks)
    except UsageError:
        return False
    return True


def _mesh_for(settings: TrainSettings, num_ranks: int) -> MeshSettings:
    """Return the mesh on so many ranks: a pipeline of another size, or more or fewer data-parallel pipelines."""
    mesh, batch = settings.mesh, settings.batch
    if mesh.num_lines == 1:
        return replace(mesh, pipeline=num_ranks)
    each = settings.num_ranks // mesh.axes["dp"]
    lines, left = divmod(num_ranks, each)
    if left or not lines:
        raise UsageError(
            f"{counted(num_ranks, 'rank')} are there for data-parallel parts of {counted(each, 'rank')}",
            expected=f"a multiple of {each}: only data-parallel parts can be left out",
        )
    data = lines * mesh.expert
    if batch.sequences % (unit := batch.microbatch * data * batch.accumulate):
        raise UsageError(
            f"{counted(num_ranks, 'rank')} are there, and {counted(data, 'data-parallel part')} do not divide a batch"
            f" of {batch.sequences}",
            expected=f"a multiple of {unit} sequences",
        )
    return replace(mesh, data=data)


def _without_plan(settings: TrainSettings) -> TrainSettings:
    """Return the settings with a plan's decisions instead of the plan."""
    if not settings.pipeline.plan:
        return settings
    plan = Plan.load(settings.pipeline.plan)
    pipeline = replace(
        settings.pipeline, plan="", schedule=order_of(plan.program), stages_per_rank=plan.stages_per_rank,
        slices=plan.slices or 1,
    )  # fmt: skip
    recompute = "full" if any(plan.checkpoint) else "none"  # what fits with some recomputed may need all of it
    return replace(settings, pipeline=pipeline, memory=replace(settings.memory, recompute=recompute))


def _fits(settings: TrainSettings) -> bool:
    try:
        program = program_of(settings)
    except DrumlineError:
        return False
    around = AROUND.get(settings.model.kind)
    return around is None or program.num_stages <= settings.model.num_layers + around


def _say(before: TrainSettings, after: TrainSettings) -> None:
    was, now = before.pipeline, after.pipeline
    changes = [f"planned for {counted(after.num_ranks, 'rank')} instead of {before.num_ranks}"]
    if after.mesh.data != before.mesh.data:
        changes.append(f"mesh.data = {after.mesh.data}, with {counted(after.num_microbatches, 'microbatch')} each")
    if after.memory.zero != before.memory.zero:
        changes.append("memory.zero = 0, because no other rank can hold a part")
    if now.schedule != was.schedule:
        name = was.plan or was.schedule
        changes.append(f"schedule {now.schedule}, because {name} does not admit that number")
    if (was.layers, was.cuts, was.plan) != (now.layers, now.cuts, now.plan):
        changes.append("stages cut again by numbers of parameters")
    logging.getLogger("drumline").warning("%s", "; ".join(changes))
