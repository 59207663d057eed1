"""`drumline profile`: measure a model on this device, on as many ranks at once as will train it.

Every rank is a fresh process. All ranks measure at the same time, because ranks of one machine share its caches and
memory. They measure four things, one after the other:

1. Blocks: seconds and bytes of every block, for each microbatch size.
2. Links: round trips of messages of some sizes between neighbours.
3. Handling: pipelines whose blocks compute almost nothing, with small and large messages. They show what sending,
   waking up and receiving cost a rank, and what the executor adds to an action.
4. The whole model, for a few steps. This gives the end of a step, which grows with its gradients. It also gives the
  paces: how much longer blocks take there than alone, between messages and other work of the step.
"""

from __future__ import annotations

import inspect
import platform
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.devices.visible import device_named, in_use
from drumline.channel.launch.launch import launch
from drumline.core.action import Op
from drumline.core.errors import BatchError, UsageError, counted
from drumline.core.measured.costs import Handling, ends_of
from drumline.core.measured.measured import Measured
from drumline.engine.model import sources
from drumline.engine.model.blocks import blocks_for, example_inputs
from drumline.engine.model.sources import Maker, Material
from drumline.engine.ranks import transports
from drumline.engine.ranks.crew import Crew
from drumline.engine.stages.intake import Intake
from drumline.model.block import Block
from drumline.model.follow.inputs import Inputs
from drumline.model.quantised.placing import to_device
from drumline.model.values import moved, pack, unpack
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.slice_timing import profile_slices
from drumline.plan.device.blocks import Profile
from drumline.plan.device.model_profile import Identity, ModelProfile, ProfiledLink, merged
from drumline.plan.device.overheads import Overheads
from drumline.plan.device.slice_profile import SliceProfile
from drumline.profile.blocks import profile
from drumline.profile.identity import identity_of
from drumline.profile.links import link, pairs
from drumline.runtime.batch import num_rows
from drumline.runtime.clocks import device_name
from drumline.schedules import DEFAULT

_TURNS = 3  # rounds in which the microbatch sizes are measured
_HANDLED_STEPS, _WARM_UPS = 5, 2
_LEAST_PACE = 0.5  # limits the effect of a disturbance
_MICROBATCHES = 8  # of the pipelines that measure handling


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What to measure."""

    source: str | Maker
    sizes: tuple[int, ...]
    device: str | None
    num_runs: int
    max_seconds: float
    length: int | None
    seed: int
    shows: bool

    def material(self) -> Material:
        """Build the model and its data, the same in every process."""
        torch.manual_seed(self.seed)
        if sources.is_config(self.source):
            return sources.material_from_config(self.source, rows=max(self.sizes), length=self.length)
        return sources.material_from(self.source)


@dataclass(frozen=True, slots=True)
class RankMeasurements:
    """The measurements of one rank."""

    identity: Identity
    profiles: list[Profile]
    links: list[ProfiledLink]
    handling: list[tuple[float, Handling]]  # by message size in bytes
    ends: list[tuple[float, float]]  # bytes of gradients, and seconds at the end of a step
    paces: list[float]
    device: str
    transport: str
    sequence: int = 0  # tokens of a row, of a config.json


def profile_model(
    source: str | Maker,
    *,
    microbatch_sizes: Sequence[int] = (1, 2, 4, 8),
    num_ranks: int = 2,
    device: str | None = None,
    num_threads: int = 1,
    num_runs: int = 12,
    max_seconds: float = 20.0,
    length: int | None = None,
    seed: int = 0,
    shows: bool = False,
    slices: Sequence[int] = (),
) -> ModelProfile:
    """Measure a model on this device, with `num_ranks` fresh processes at once, and return its profile.

    `source` is `FILE.py:NAME` or a function that returns (model, loss_fn, batch, target), or the config.json of a
    Hugging Face model. The latter is measured on random text with `length` tokens per row. `max_seconds` limits the
    time spent on blocks, for each microbatch size. With `slices`, like (2, 4, 8), sequences of the smallest microbatch
    are also measured whole and in so many slices, on one rank: a plan may then divide sequences.

    >>> profile_model("model.py:make", microbatch_sizes=[0, 1])
    Traceback (most recent call last):
    drumline.core.errors.UsageError: microbatch sizes are [0, 1]; expected one or more, of at least 1 row
    """
    sizes = tuple(sorted(set(microbatch_sizes)))
    if not sizes or sizes[0] < 1:
        raise UsageError(f"microbatch sizes are {list(microbatch_sizes)}", expected="one or more, of at least 1 row")
    for name, value in (("ranks", num_ranks), ("runs", num_runs), ("threads", num_threads)):
        if value < 1:
            raise UsageError(f"{value} {name}", expected="an integer of at least 1")
    if isinstance(source, str):
        sources.check(source)
    device_named(device)
    settings = ProfileSettings(source, sizes, device, num_runs, max_seconds, length, seed, shows)
    sliced = None
    if slices:
        counts = tuple(slices)
        (sliced,) = launch(_sliced, settings, counts, num_ranks=1, threads=num_threads, backend="gloo", prefix=False)
    measurements = launch(_measured, settings, num_ranks=num_ranks, threads=num_threads, backend="gloo", prefix=False)
    first = measurements[0]
    by_size = zip(sizes, zip(*(measurements.profiles for measurements in measurements), strict=True), strict=True)
    handling = [point for measurements in measurements for point in measurements.handling]
    ends = [point for measurements in measurements for point in measurements.ends]
    return ModelProfile(
        first.identity,
        first.device,
        num_ranks,
        num_threads,
        tuple((rows, merged(each)) for rows, each in by_size),
        Overheads.fitted(handling, ends) if handling else Overheads(),
        tuple(
            sorted((p for measurements in measurements for p in measurements.links), key=lambda p: (p.source, p.target))
        ),
        first.transport,
        tuple(median(each) for each in zip(*(measurements.paces for measurements in measurements), strict=True)),
        source if isinstance(source, str) else "",
        first.sequence,
        sliced,
    )


def _sliced(settings: ProfileSettings, slices: tuple[int, ...]) -> SliceProfile:
    """Measure a microbatch of the smallest size in slices."""
    material = settings.material()
    device = in_use(device_named(settings.device) or torch.device("cpu"))
    if not isinstance(material.model, nn.Module):
        raise UsageError("the model is a list of blocks", expected="a module that takes positions, with slices")
    to_device(material.model, device)
    inputs = example_inputs(material.model, material.batch)
    names = list(inspect.signature(material.model.forward).parameters)
    batch = dict(zip(names, inputs.args, strict=False)) | inputs.kwargs
    labels = batch.pop("labels", None)
    target, loss_fn = material.target, material.loss_fn
    if loss_fn is None:
        target, loss_fn = torch.roll(labels, -1, dims=1), _next_tokens
    rows = settings.sizes[0]
    return profile_slices(
        material.model,
        moved(rows_of(batch, rows), device),
        moved(rows_of(target, rows), device),
        loss_fn=loss_fn,
        slices=slices,
        device=device,
    )


def _next_tokens(output: Any, target: Tensor) -> Tensor:
    """Return the loss of a model of transformers whose labels were shifted before."""
    return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def _measured(settings: ProfileSettings) -> RankMeasurements:
    """Measure everything on this rank."""
    material = settings.material()
    device = in_use(device_named(settings.device) or torch.device("cpu"))
    if isinstance(material.model, nn.Module):
        to_device(material.model, device)
    inputs = example_inputs(material.model, material.batch)
    _check_rows(inputs, settings.sizes[-1])
    blocks = blocks_for(material.model, material.batch, device, num_microbatches=1)
    for block in blocks:
        to_device(block.module, device)
    identity = identity_of(blocks, type(material.model).__name__)
    intake = Intake(material.model, material.loss_fn, device, num_microbatches=1)
    say = _say if settings.shows and dist.get_rank() == 0 else lambda what: None
    profiles = _blocks(blocks, inputs, material, intake, settings, say)
    say("messages between ranks")
    links = _links(device)
    say("executor overhead")
    sizes = {layer.output_bytes for each in profiles for layer in each.layers[:-1]} or {4}
    handling = [_handled(size, device) for size in sorted({min(sizes), max(sizes)})]
    say("the whole model")
    ends, paces, transport = _whole(material, inputs, device, dict(zip(settings.sizes, profiles, strict=True)))
    return RankMeasurements(
        identity,
        profiles,
        links,
        handling,
        [*((size, reported_handling.end) for size, reported_handling in handling), *ends],
        paces,
        device_name(device) or f"{device.type}, {platform.machine()}",
        transport,
        material.batch["input_ids"].shape[1] if sources.is_config(settings.source) else 0,
    )


def _blocks(
    blocks: Sequence[Block],
    inputs: Any,
    material: Material,
    intake: Intake,
    settings: ProfileSettings,
    say: Callable[[str], None],
) -> list[Profile]:
    """Return the blocks for every size; sizes take turns, so that a disturbance of the machine affects all of them."""
    seen_profiles: list[list[Profile]] = [[] for _ in settings.sizes]
    for turn in range(_TURNS):
        for rows, each in zip(settings.sizes, seen_profiles, strict=True):
            say(f"{counted(len(blocks), 'block')} with microbatches of {rows} rows, round {turn + 1} of {_TURNS}")
            microbatch = moved(rows_of(inputs, rows), intake.device)
            target = microbatch if intake.has_own_loss else moved(rows_of(material.target, rows), intake.device)
            dist.barrier()
            each.append(
                profile(
                    blocks,
                    microbatch,
                    target=target,
                    loss_fn=intake.loss if intake.has_loss else None,
                    num_runs=-(-settings.num_runs // _TURNS),
                    max_seconds=settings.max_seconds / _TURNS,
                )
            )
    return [replace(merged(each), num_runs=sum(sizes.num_runs for sizes in each)) for each in seen_profiles]


def _links(device: torch.device) -> list[ProfiledLink]:
    """Return this rank's links, measuring one pair of ranks after the other."""
    links: list[ProfiledLink] = []
    size = dist.get_world_size()
    if size == 1:
        return links
    scope = transports.new_scope()
    axes = transports.axes_for(None, "auto", size, scope=scope, timeout=300.0)
    crew = Crew.gathered("auto", device, num_ranks=size, program=None, ahead=2, timeout=300.0, axes=axes, scope=scope)
    for pair in pairs(size):
        dist.barrier()
        if crew.rank in pair:
            other = pair[0] if crew.rank == pair[1] else pair[1]
            links.append(link(crew.channels[0], other, device))
    dist.barrier()
    crew.close()
    return links


class _Scaled(nn.Module):
    """Computes almost nothing, and returns as much as it gets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, value: Tensor) -> Tensor:
        return value * self.weight


def _handled(size: int, device: torch.device) -> tuple[float, Handling]:
    """Return the bytes of messages of this size, and their handling in steps with almost no gradients."""
    width = max(size // 4, 1)
    light = nn.Sequential(*(_Scaled(width) for _ in range(dist.get_world_size()))).to(device)
    batch = torch.ones(_MICROBATCHES, width, device=device)
    with Pipeline(light, loss_fn=functional.mse_loss, schedule=DEFAULT, num_microbatches=_MICROBATCHES) as pipe:
        seen_timelines = _timelines(pipe, batch, batch)
    return 4.0 * width, Handling.measured(seen_timelines)


def _whole(
    material: Material, inputs: Any, device: torch.device, profiles: Mapping[int, Profile]
) -> tuple[list[tuple[float, float]], list[float], str]:
    """Run the whole model as a pipeline with even stages, with microbatches of all sizes.

    Return this rank's bytes of gradients with the seconds at the end of a step, its paces, and the transport.
    """
    num_ranks = dist.get_world_size()
    if any(len(sizes.layers) < num_ranks for sizes in profiles.values()):
        return [], [], ""
    with Pipeline(
        material.model,
        loss_fn=material.loss_fn,
        schedule=DEFAULT,
        num_microbatches=2 * num_ranks,
        example=rows_of(material.batch, max(num_rows(inputs), 2 * num_ranks)),
        balance="even",
        device=device,
    ) as pipe:
        gradient_bytes = float(sum(param.nbytes for param in pipe.parameters() if param.requires_grad))
        ends, paces = [], []
        for rows, profile in profiles.items():
            timelines = _timelines(pipe, *(rows_of(value, 2 * num_ranks * rows) for value in (inputs, material.target)))
            ends.append((gradient_bytes, median(ends_of(step)[pipe.rank] for step in timelines)))
            each = [_pace(profile, step, pipe.rank) for step in timelines]
            paces.append(min(max(median(each), _LEAST_PACE), 1 / _LEAST_PACE))
        return ends, paces, pipe.transport


def _pace(profile: Profile, timeline: Measured, rank: int) -> float:
    """Return the time of a rank's actions, divided by the time of its blocks measured alone."""
    num_stages = timeline.program.num_stages
    base, more = divmod(len(profile.layers), num_stages)
    costs = profile.costs([base + (stage < more) for stage in range(num_stages)])
    each = {op: costs.per_stage(op.name.lower(), num_stages) for op in (Op.FORWARD, Op.BACKWARD)}
    track = timeline.tracks[rank]
    total = sum(each[action.op][action.stage] for action in track.actions if action.op in each)
    return (sum(track.ends) - sum(track.starts)) / total if total > 0 else 1.0


def _timelines(pipe: Pipeline, batch: Any, target: Any) -> list[Measured]:
    """Return the timelines of some steps on a batch, after warm-up steps."""
    inputs = batch if isinstance(batch, Inputs) else Inputs((batch,), {})
    timelines = []
    for turn in range(_WARM_UPS + _HANDLED_STEPS):
        dist.barrier()
        pipe.step(*inputs.args, target=target, **inputs.kwargs)
        if turn >= _WARM_UPS:
            timelines.append(pipe.timeline())
        pipe.settle()
        pipe.zero_grad()
    return timelines


def _check_rows(inputs: Any, most: int) -> None:
    """Refuse a batch that is smaller than the largest microbatch."""
    num_found = num_rows(inputs)
    if num_found < most:
        raise BatchError(
            f"the batch has {counted(num_found, 'row')} for microbatches of {most}",
            expected=f"at least {most} rows",
            fix="return a larger batch from the function, or pass smaller --microbatch-sizes",
        )


def rows_of(value: Any, count: int) -> Any:
    """Return the first `count` rows of a value, repeating them if there are fewer.

    >>> rows_of(torch.arange(3), 5).tolist()
    [0, 1, 2, 0, 1]
    """
    if value is None:
        return None
    tensors, form = pack(value)
    taken = [tensor[torch.arange(count, device=tensor.device) % len(tensor)] for tensor in tensors]
    return taken[0] if form is None else unpack(taken, form)


def _say(what: str) -> None:
    print(f"profile: {what} ...", file=sys.stderr, flush=True)
