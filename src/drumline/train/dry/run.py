"""`drumline train --dry-run`: everything that can be known of a run before its ranks start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drumline.core.prove.validate import validate
from drumline.pipeline.model.blocks import is_chain
from drumline.pipeline.options import Options
from drumline.runtime.blocks.cut import Block
from drumline.train.config.settings import OptimizerSettings, TrainSettings
from drumline.train.dry.forecast import Forecast, forecast
from drumline.train.dry.state import state_bytes


class Parts(NamedTuple):
    """What a run is made from: as the training loop makes it, or stand-ins."""

    model: Callable[[TrainSettings], Any]  # a Built
    example: Callable[[TrainSettings, Any], Any]  # a Batch
    arguments: Callable[..., dict[str, Any]]  # of its Pipeline
    optimizers: Callable[..., Sequence[Any]]  # which parameters each of them gets


def loop_parts() -> Parts:
    """Return the parts of the training loop itself."""
    from drumline.train.data.build import build_data
    from drumline.train.loop.making import build, pipeline_arguments
    from drumline.train.loop.optimizers import choose
    from drumline.train.loop.run import example_of
    from drumline.train.models.build import build_model

    return Parts(
        lambda settings: build(settings, build_model),
        lambda settings, built: example_of(build_data(settings, built, rank=0, size=1)),
        pipeline_arguments,
        choose,
    )


@dataclass(frozen=True)
class DryRun:
    """A run that was not run: its settings, model, stages and forecast."""

    settings: TrainSettings
    name: str
    forecast: Forecast
    violations: tuple[str, ...]
    device: str

    def summary(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        program, settings = self.forecast.program, self.settings
        timeline = self.forecast.timeline()
        return {
            "model": self.name,
            "parameters": count(block for stage in self.forecast.stages for block in stage),
            "ranks": program.num_ranks,
            "microbatches": program.num_microbatches,
            "microbatch": settings.batch.microbatch,
            "sequence": settings.batch.sequence,
            "tokens_per_step": settings.batch.sequences * settings.batch.sequence,
            "steps": settings.run.steps,
            "schedule": program.name,
            "proven": not self.violations,
            "violations": list(self.violations),
            "bubble": timeline.bubble,
            "step_seconds": timeline.makespan * settings.batch.accumulate,
            "device": self.device,
            "stages": [
                {
                    "stage": at,
                    "ranks": list(program.placement.ranks_of(at)),
                    "blocks": [block.name for block in stage],
                    "parameters": count(stage),
                }
                for at, stage in enumerate(self.forecast.stages)
            ],
            "rank_bytes": [one.to_json() for one in self.forecast.ranks],
            "folder": settings.folder,
        }


def count(blocks: Any) -> int:
    """Return how many parameters blocks have, a tied one counted once."""
    listed: Sequence[Block] = list(blocks)
    found = {id(one): one.numel() for block in listed for one in block.module.parameters()}
    return sum(found.values())


def dry_run(settings: TrainSettings, parts: Parts | None = None) -> DryRun:
    """Build the model, run its blocks on one microbatch, and return what a run of it will be."""
    parts = parts or loop_parts()
    device = torch.device(settings.pipeline.device or "cpu")
    torch.manual_seed(settings.run.seed)
    built = parts.model(settings)
    example = parts.example(settings, built)
    given = parts.arguments(settings, built, example, Path(settings.folder))
    options = Options(built.model, **{**given, "record": True, "device": str(device), "transport": "in-process"})
    inputs = next(iter(example.inputs.values())) if is_chain(built.model) else dict(example.inputs)
    target = None if built.loss_fn is None else example.target
    found = forecast(
        options,
        inputs,
        target,
        device=device,
        state_of=states(settings, parts, built.model),
        accumulates=settings.batch.accumulate > 1,
    )
    wrong = tuple(str(one) for one in validate(found.program))
    return DryRun(settings, type(built.model).__name__, found, wrong, str(device))


def states(settings: TrainSettings, parts: Parts, model: Any) -> Callable[[str, Tensor], int]:
    """Return what the optimizers keep for a parameter, by its name in the whole model."""
    optimizer: OptimizerSettings = settings.optimizer
    shapes = {name: one.shape for name, one in model.named_parameters() if one.requires_grad}
    masters = settings.precision.master_weights
    chosen: Mapping[str, Any] = {name: one for one in parts.optimizers(shapes, optimizer) for name in one.names}

    def state_of(name: str, parameter: Tensor) -> int:
        one = chosen.get(name)
        if one is None:  # a tied parameter under another of its names
            one = next(iter(chosen.values()))
        return state_bytes(one.kind, {"lr": one.lr, **one.group.settings}, parameter, masters=masters)

    return state_of
