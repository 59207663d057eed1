"""`drumline train --dry-run`: everything that can be known of a run before its ranks start."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.engine.model.blocks import is_chain
from drumline.engine.program.find import program_for
from drumline.model.block import Block
from drumline.model.quantised.packed import num_bytes, unpacked_shape
from drumline.pipeline.options import Options
from drumline.train.config.settings import OptimizerSettings, TrainSettings
from drumline.train.data.build import build_data
from drumline.train.data.example import example_of, fullest, sized
from drumline.train.data.items.batch import Batch, Bucket
from drumline.train.dry.drawn_rows import data_or_drawn
from drumline.train.loop.making import build, pipeline_arguments, rows_of
from drumline.train.loop.optimizers import ParameterGroup, choose
from drumline.train.memory.forecast import Forecast, forecast
from drumline.train.memory.measuring import Tell, silent
from drumline.train.memory.optimizer_bytes import state_bytes
from drumline.train.tune.build_tuned import build_tuned
from drumline.train.tune.card_fit import CardFit, card_fit


@dataclass(frozen=True)
class DryRun:
    """A run that was not run: its settings, model, stages and forecast."""

    settings: TrainSettings
    name: str
    forecast: Forecast
    violations: tuple[str, ...]
    device: str
    buckets: tuple[Bucket, ...] = ()
    programs: tuple[Program, ...] = ()  # of buckets
    whole: bool = False  # whether the whole model was built, and not its blocks one by one
    fit: CardFit | None = None  # whether it fits on the cards, if there are any
    drawn: str = ""  # why its rows are drawn, if they are: training would refuse the data

    def summary(self) -> dict[str, Any]:
        """Return all of it as plain values."""
        program, settings = self.forecast.program, self.settings
        seconds, bubble = self.forecast.step()
        return {
            "model": self.name,
            "parameters": count(block for stage in self.forecast.stages for block in stage),
            "trained_parameters": count((block for stage in self.forecast.stages for block in stage), trained=True),
            "ranks": program.num_ranks,
            "microbatches": program.num_microbatches,
            "slices": program.num_slices,
            "microbatch": settings.batch.microbatch,
            "sequence": settings.batch.sequence,
            "tokens_per_step": self._tokens(),
            "steps": settings.run.steps,
            "schedule": program.name,
            "proven": not self.violations,
            "violations": list(self.violations),
            "bubble": bubble,
            "step_seconds": seconds * settings.batch.accumulate,
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
            "rank_bytes": [
                {**rank.to_json(), "frozen_weights": frozen}
                for rank, frozen in zip(self.forecast.ranks, self._frozen(), strict=True)
            ],
            "folder": settings.folder,
            "built_whole": self.whole,
            "buckets": [asdict(bucket) for bucket in self.buckets],
            "programs": [self._program_figures(candidate) for candidate in self.programs],
            "fit": None if self.fit is None else self.fit.to_json(),
            "drawn": self.drawn,
        }

    def _frozen(self) -> Iterator[int]:
        """Yield the bytes of each rank's weights that do not train, a tied one once."""
        program = self.forecast.program
        for rank in range(program.num_ranks):
            blocks = [block for stage in program.placement.stages_of(rank) for block in self.forecast.stages[stage]]
            params = {id(param): param for block in blocks for param in block.module.parameters()}
            yield sum(num_bytes(param) for param in params.values() if not param.requires_grad)

    def _program_figures(self, program: Program) -> dict[str, Any]:
        """Return how many microbatches a program has, for how many buckets, and its simulated bubble."""
        mine = [bucket.length for bucket in self.buckets if bucket.num_microbatches == program.num_microbatches]
        costs = replace(self.forecast.costs, message_bytes=0.0)
        bubble = simulate(program, costs).bubble
        return {"microbatches": program.num_microbatches, "lengths": mine, "bubble": bubble}

    def _tokens(self) -> int:
        """Return the places of an optimizer step; those of the largest, if steps differ."""
        batch = self.settings.batch
        if not self.buckets:
            return batch.sequences * batch.sequence
        return max(bucket.places * bucket.num_microbatches for bucket in self.buckets) * batch.accumulate


def count(blocks: Any, *, trained: bool = False) -> int:
    """Return how many parameters blocks have, or how many of them are trained; a tied one is counted once."""
    listed: Sequence[Block] = list(blocks)
    params = {id(param): param for block in listed for param in block.module.parameters()}
    return sum(unpacked_shape(param).numel() for param in params.values() if param.requires_grad or not trained)


def dry_run(settings: TrainSettings, *, tell: Tell = silent) -> DryRun:
    """Build the model, run blocks of each kind on one microbatch, and return what a run of it will be.

    `tell` is told what is being measured.
    """
    device = torch.device(settings.pipeline.device or "cpu")
    torch.manual_seed(settings.run.seed)
    built = build(settings, build_tuned, whole=False)
    number, size = rows_of(settings)
    data, unready = data_or_drawn(build_data, settings, built, rank=number, size=size)
    example = example_of(data, settings.num_microbatches)
    data.close()
    arguments = pipeline_arguments(settings, built, example, Path(settings.folder))
    arguments |= {"record": True, "device": str(device), "transport": "auto"}  # nothing is sent
    state_of = states(settings, built.model)

    def forecast_of(example: Batch, count: int = 0) -> Forecast:
        inputs = next(iter(example.inputs.values())) if is_chain(built.model) else dict(example.inputs)
        target = None if built.loss_fn is None else example.target
        others = {"num_microbatches": count} if count and not arguments.get("plan") else {}
        options, accumulates = Options(built.model, **{**arguments, **others}), settings.batch.accumulate > 1
        return forecast(options, inputs, target, device=device, state_of=state_of, accumulates=accumulates, tell=tell)

    fuller = [forecast_of(sized(example, bucket), count=bucket.num_microbatches) for bucket in fullest(data.buckets)]
    estimate = max(fuller, key=lambda e: max(rank.total for rank in e.ranks)) if fuller else forecast_of(example)
    programs = tuple(_programs(arguments, data.counts))
    wrong = tuple(dict.fromkeys(str(fault) for program in (estimate.program, *programs) for fault in validate(program)))
    name, whole = type(built.model).__name__, not any(param.is_meta for param in built.model.parameters())
    again = partial(_again, estimate, built.model, arguments)
    fit = card_fit(settings, estimate, again, torch.device(device)) if not settings.pipeline.plan else None
    drawn = "" if unready is None else "; ".join(filter(None, (unready.error, unready.fix)))
    return DryRun(settings, name, estimate, wrong, str(device), data.buckets, programs, whole, fit, drawn)


def _again(found_forecast: Forecast, model: Any, entries: Mapping[str, Any], **others: Any) -> Forecast:
    """Return what the same blocks take with other options."""
    return found_forecast.weighed.forecast(Options(model, **{**entries, **others}))


def _programs(options: Mapping[str, Any], counts: Sequence[int]) -> Iterator[Program]:
    """Yield the programs of steps with numbers of microbatches, the run's own among them."""
    for count in sorted({*counts, options["num_microbatches"]}) if counts else ():
        yield program_for(
            options["schedule"],
            num_ranks=options["num_ranks"],
            num_microbatches=count,
            stages_per_rank=options["stages_per_rank"],
        )


def states(settings: TrainSettings, model: Any) -> Callable[[str, Tensor], int]:
    """Return what the optimizers keep for a parameter, by its name in the whole model."""
    optimizer: OptimizerSettings = settings.optimizer
    shapes = {name: param.shape for name, param in model.named_parameters() if param.requires_grad}
    masters = settings.precision.master_weights
    lines = settings.mesh.axes["dp"] if settings.memory.zero else 1  # that divide it
    chosen: dict[str, ParameterGroup] = {name: group for group in choose(shapes, optimizer) for name in group.names}

    def state_of(name: str, parameter: Tensor) -> int:
        group = chosen.get(name)
        if group is None:  # a tied parameter under another of its names
            group = next(iter(chosen.values()))
        whole = state_bytes(group.kind, {"lr": group.lr, **group.group.settings}, parameter, masters=masters)
        if optimizer.validated == "after":  # copies of all that an update changes
            low = masters and parameter.dtype != torch.float32
            whole = 2 * whole + (0 if low else parameter.nbytes)
        return -(-whole // lines)

    return state_of
