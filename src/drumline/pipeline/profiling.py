"""`drumline profile`: a model measured on this device, by as many ranks at once as will run it.

Every rank is a fresh process. All measure at the same time, because ranks of one machine share its caches and its
memory. Four things are measured, one after the other:

1. Blocks: seconds and bytes of every block, at each size of microbatch.
2. Links: messages of some sizes there and back between neighbours.
3. Handling: pipelines whose blocks compute next to nothing, with small and large messages, show what sending, waking up
   and taking cost a rank, and what the executor adds to an action.
4. The model itself, for a few steps: what a step ends with, which grows with its gradients, and by how much blocks take
   longer there than one by one (`pace`), with another rank's messages and a step's other work between them.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.action import Op
from drumline.core.errors import BatchError, UsageError, counted
from drumline.core.handling import Handling, ends_of
from drumline.core.measured import Measured
from drumline.pipeline.arguments import device_named
from drumline.pipeline.config_file import check_config, is_config, material_from_config
from drumline.pipeline.crew import Crew
from drumline.pipeline.intake import Intake
from drumline.pipeline.launch import launch
from drumline.pipeline.model_file import Maker, Material, check_source, material_from
from drumline.pipeline.models import blocks_for, example_inputs
from drumline.pipeline.pipeline import Pipeline
from drumline.plan.layers import Profile
from drumline.plan.model_profile import Identity, Link, ModelProfile, merged
from drumline.plan.overheads import Overheads
from drumline.profile.identity import identity_of
from drumline.profile.layers import profile
from drumline.profile.links import link, pairs
from drumline.runtime.batch import num_rows
from drumline.runtime.cuda import device_name
from drumline.runtime.pieces import Inputs
from drumline.runtime.values import moved, pack, unpack

_HANDLED_STEPS, _WARM_UPS = 5, 2
_MICROBATCHES = 8  # of the pipelines whose handling is measured


@dataclass(frozen=True, slots=True)
class Settings:
    """What is to be measured."""

    source: str | Maker
    sizes: tuple[int, ...]
    device: str | None
    num_runs: int
    max_seconds: float
    length: int | None
    seed: int
    shows: bool

    def material(self) -> Material:
        """Make the model and its data, the same in every process."""
        torch.manual_seed(self.seed)
        if is_config(self.source):
            assert isinstance(self.source, str)
            return material_from_config(self.source, rows=max(self.sizes), length=self.length)
        return material_from(self.source)


@dataclass(frozen=True, slots=True)
class Seen:
    """What one rank measured."""

    identity: Identity
    profiles: list[Profile]
    links: list[Link]
    handling: list[tuple[float, Handling]]  # by the bytes of a message
    ends: list[tuple[float, float]]  # bytes of gradients, and seconds of a step's end
    pace: float
    device: str
    transport: str


def profile_model(
    source: str | Maker,
    *,
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    num_ranks: int = 2,
    device: str | None = None,
    num_threads: int = 1,
    num_runs: int = 10,
    max_seconds: float = 20.0,
    length: int | None = None,
    seed: int = 0,
    shows: bool = False,
) -> ModelProfile:
    """Return what a model takes on this device, measured by `num_ranks` fresh processes at once.

    `source` is `FILE.py:NAME` or a function that returns (model, loss_fn, batch, target), or the config.json of a
    Hugging Face model, which is measured on random text of `length` tokens a row. `max_seconds` bounds the measuring of
    the blocks at each size.
    """
    sizes = tuple(sorted(set(microbatch_sizes)))
    if not sizes or sizes[0] < 1:
        raise UsageError(f"microbatch sizes {list(microbatch_sizes)}", expected="one or more, each of 1 row or more")
    for name, value in (("ranks", num_ranks), ("runs", num_runs), ("threads", num_threads)):
        if value < 1:
            raise UsageError(f"{value} {name}", expected="a whole number of 1 or more")
    if isinstance(source, str):
        (check_config if is_config(source) else check_source)(source)
    device_named(device)
    settings = Settings(source, sizes, device, num_runs, max_seconds, length, seed, shows)
    told = launch(_measured, settings, num_ranks=num_ranks, threads=num_threads, prefix=False)
    first = told[0]
    by_size = zip(sizes, zip(*(one.profiles for one in told), strict=True), strict=True)
    handling = [point for one in told for point in one.handling]
    ends = [point for one in told for point in one.ends]
    return ModelProfile(
        first.identity,
        first.device,
        num_ranks,
        num_threads,
        tuple((rows, merged(each)) for rows, each in by_size),
        Overheads.fitted(handling, ends) if handling else Overheads(),
        tuple(sorted((one for seen in told for one in seen.links), key=lambda one: (one.source, one.target))),
        first.transport,
        median(one.pace for one in told),
    )


def _measured(settings: Settings) -> Seen:
    """Measure everything on this rank."""
    material = settings.material()
    device = device_named(settings.device) or torch.device("cpu")
    if isinstance(material.model, nn.Module):
        material.model.to(device)
    inputs = example_inputs(material.model, material.batch)
    _check_rows(inputs, settings.sizes[-1])
    blocks = blocks_for(material.model, material.batch, device, num_microbatches=1)
    for block in blocks:
        block.module.to(device)
    identity = identity_of(blocks, type(material.model).__name__)
    intake = Intake(material.loss_fn, None, device, num_microbatches=1)
    intake.follow(material.model)
    say = _say if settings.shows and dist.get_rank() == 0 else _nothing
    profiles = []
    for rows in settings.sizes:
        say(f"{counted(len(blocks), 'block')} at microbatches of {rows} rows")
        microbatch = moved(_rows(inputs, rows), device)
        target = microbatch if intake.own else moved(_rows(material.target, rows), device)
        dist.barrier()
        profiles.append(
            profile(
                blocks,
                microbatch,
                target=target,
                loss_fn=intake.loss if intake.has_loss else None,
                num_runs=settings.num_runs,
                max_seconds=settings.max_seconds,
            )
        )
    say("messages between ranks")
    links = _links(device)
    say("the executor's own work")
    sizes = {one.output_bytes for each in profiles for one in each.layers[:-1]} or {4}
    handling = [_handled(size, device) for size in sorted({min(sizes), max(sizes)})]
    say("the model itself")
    whole = _Whole(material, inputs, settings.sizes[-1], device, profiles[-1])
    ends, pace, transport = whole.measured()
    return Seen(
        identity,
        profiles,
        links,
        [(size, told) for size, told, _ in handling],
        [*((float(size), end) for size, _, end in handling), *ends],
        pace,
        device_name(device) or f"{device.type}, {platform.machine()}",
        transport,
    )


def _links(device: torch.device) -> list[Link]:
    """Return this rank's links, measured one pair of ranks after the other."""
    found: list[Link] = []
    size = dist.get_world_size()
    if size == 1:
        return found
    crew = Crew.gathered("auto", device, num_ranks=size, program=None, ahead=2, timeout=300.0)
    for pair in pairs(size):
        dist.barrier()
        if crew.rank in pair:
            other = pair[0] if crew.rank == pair[1] else pair[1]
            found.append(link(crew.channels[0], other, device))
    dist.barrier()
    crew.close()
    return found


class _Scaled(nn.Module):
    """Computes next to nothing, and hands on as much as it is given."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


def _handled(size: int, device: torch.device) -> tuple[int, Handling, float]:
    """Return the handling of messages of so many bytes, and the end of a step with hardly any gradients."""
    width = max(size // 4, 1)
    light = nn.Sequential(*(_Scaled(width) for _ in range(dist.get_world_size()))).to(device)
    batch = torch.ones(_MICROBATCHES, width, device=device)
    with Pipeline(light, loss_fn=functional.mse_loss, schedule="1f1b", num_microbatches=_MICROBATCHES) as pipe:
        seen = _timelines(pipe, lambda: pipe.step(batch, target=batch), _HANDLED_STEPS)
    told = Handling.measured(seen)
    return 4 * width, told, told.end


@dataclass(frozen=True, slots=True)
class _Whole:
    """The model itself as a pipeline with even stages, at one size of microbatch."""

    material: Material
    inputs: Any
    rows: int
    device: torch.device
    profile: Profile

    def measured(self) -> tuple[list[tuple[float, float]], float, str]:
        """Return this rank's bytes of gradients with the seconds of a step's end, its pace, and the transport."""
        size = dist.get_world_size()
        if _count(self.material.model) < size:
            return [], 1.0, ""
        batch, target = (_rows(one, 2 * size * self.rows) for one in (self.inputs, self.material.target))
        with Pipeline(
            self.material.model,
            loss_fn=self.material.loss_fn,
            schedule="1f1b",
            num_microbatches=2 * size,
            example=self.material.batch,
            balance="even",
            device=self.device,
        ) as pipe:

            def step() -> None:
                if isinstance(batch, Inputs):
                    pipe.step(*batch.args, target=target, **batch.kwargs)
                else:
                    pipe.step(batch, target=target)

            seen = _timelines(pipe, step, _HANDLED_STEPS)
            held = float(sum(one.nbytes for one in pipe.parameters() if one.requires_grad))
            end = median(ends_of(one)[pipe.rank] for one in seen)
            paces = [self._pace(one, pipe.rank, size) for one in seen]
            return [(held, end)], min(max(median(paces), 0.5), 2.0), pipe.transport

    def _pace(self, timeline: Measured, rank: int, size: int) -> float:
        """Return what a rank's actions took, over what its blocks would take by themselves."""
        base, more = divmod(len(self.profile.layers), size)
        costs = self.profile.costs([base + (stage < more) for stage in range(size)])
        each = {Op.FORWARD: costs.per_stage("forward", size), Op.BACKWARD: costs.per_stage("backward", size)}
        track = timeline.tracks[rank]
        told = sum(each[action.op][action.stage] for action in track.actions if action.op in each)
        taken = sum(track.ends) - sum(track.starts)
        return taken / told if told > 0 else 1.0


def _count(model: Any) -> int:
    """Return a lower bound for how many blocks a model has."""
    return len(model) if not isinstance(model, nn.Module) or isinstance(model, nn.Sequential | nn.ModuleList) else 10**6


def _timelines(pipe: Pipeline, step: Callable[[], object], count: int) -> list[Measured]:
    found = []
    for turn in range(_WARM_UPS + count):
        dist.barrier()
        step()
        if turn >= _WARM_UPS:
            found.append(pipe.timeline())
        pipe.settle()
        pipe.zero_grad()
    return found


def _check_rows(inputs: Any, most: int) -> None:
    """Refuse a batch that is smaller than the largest microbatch."""
    found = num_rows(inputs)
    if found < most:
        raise BatchError(
            f"the batch has {counted(found, 'row')} for microbatches of {most}",
            expected=f"{most} rows or more",
            fix="let the function return a larger batch, or give smaller --microbatch-sizes",
        )


def _rows(value: Any, count: int) -> Any:
    """Return so many rows of a value, from the first on and again if there are fewer."""
    if value is None:
        return None
    tensors, form = pack(value)
    taken = [one[torch.arange(count, device=one.device) % len(one)] for one in tensors]
    return taken[0] if form is None else unpack(taken, form)


def _say(what: str) -> None:
    print(f"profile: {what} ...", file=sys.stderr, flush=True)


def _nothing(what: str) -> None:
    """Say nothing."""
