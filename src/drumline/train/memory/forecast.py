"""How much memory every rank will need, found by running the model's blocks on one microbatch.

    rank 0 (1f1b)      0F0   0F1   0B0   0F2   0B1   0B2
    activations         1     2     2     2     2     1      microbatches of its stage, as weighed, or slices
    gradients           0     0     all   all   all   all    of a stage from its first backward on
    weights, state      all the time
    working             what each action needs while it runs

What a rank holds is bytes of tensors: parameters and buffers; gradients; what the optimizer keeps, float32 copies
included; activations that wait for their backward, each storage once, with slices' gradients of keys and values; and,
told apart, what was received from other ranks. Weights that autocast has cast are held once for all microbatches. On
top comes what an action needs only while it runs (`profile/working.py`). The fullest moment counts: an action's, or the
optimizer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.memory import holdings, stashes
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.engine.model.blocks import blocks_for, example_inputs
from drumline.engine.program.find import program_for
from drumline.engine.program.frozen import trainable
from drumline.engine.stages.assembly import checkpointed
from drumline.engine.stages.intake import Intake
from drumline.model.block import Block
from drumline.model.blocks.cut import cut
from drumline.model.precision import LOW, Precision
from drumline.model.values import moved
from drumline.pipeline.cutting import is_asked
from drumline.pipeline.options import Options
from drumline.plan.cut.peaks import held_by
from drumline.plan.cut.timed import TimedCuts, steps_of
from drumline.plan.device.blocks import Profile
from drumline.plan.device.stages import split_share
from drumline.profile.working import Working
from drumline.schedules import find
from drumline.train.memory.measuring import Tell, measured, silent

# Of parameters by name in the whole model, what is kept for each beside its gradient.
StateOf = Callable[[str, Tensor], int]


@dataclass(frozen=True, slots=True)
class RankMemory:
    """What a rank holds at its fullest moment, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    received: float = 0.0
    working: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return float(sum(getattr(self, field.name) for field in fields(self)))

    def to_json(self) -> dict[str, float]:
        """Return it by name."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Forecast:
    """The stages of a run with what they take, and what every rank will hold."""

    program: Program
    stages: tuple[tuple[Block, ...], ...]
    profile: Profile
    costs: Costs
    ranks: tuple[RankMemory, ...]
    weighed: WeighedBlocks

    def timeline(self) -> Simulation:
        """Return the simulated step, messages taking no time."""
        return simulate(self.program, replace(self.costs, message_bytes=0.0))

    def step(self) -> tuple[float, float]:
        """Return the seconds of a simulated step, and its bubble; without a flush the busiest rank never waits."""
        timeline = self.timeline()
        if not self.program.num_updates:
            return timeline.makespan, timeline.bubble
        busy = [sum(track.ends) - sum(track.starts) for track in timeline.tracks]
        return max(busy), 1.0 - sum(busy) / len(busy) / max(busy)


def forecast(
    options: Options, batch: Any, target: Any, *, device: torch.device, state_of: StateOf, accumulates: bool = False,
    by_kind: bool = True, tell: Tell = silent,
) -> Forecast:  # fmt: skip
    """Measure the blocks of a pipeline's model on the first microbatch of a batch, and add up what each rank will hold.

    `options` are what the pipeline will be made with. With several pipeline steps to an update (`accumulates`) the
    gradients of earlier ones are there from the beginning. Blocks of one kind are measured once, or each if not
    `by_kind`; `tell` is told what is being measured.
    """
    choices = options.decided()
    program = _program(choices)
    count = program.num_microbatches
    intake = Intake(
        choices.model, choices.loss_fn, device, num_microbatches=count, weigh=choices.loss_weight, split=choices.split
    )
    blocks = blocks_for(choices.model, batch, device, num_microbatches=count, cuts=choices.cuts, split=choices.split)
    precision = Precision(choices.precision, device)
    microbatch = _first(intake, example_inputs(choices.model, batch), "the batch", device)
    wanted = (
        microbatch if intake.has_own_loss else None if target is None else _first(intake, target, "the target", device)
    )
    blocks_measured = measured(
        blocks, microbatch, device=device, precision=precision, split=split_share(program) > 0,
        sliced=program.num_slices > 1, root=choices.model if isinstance(choices.model, nn.Module) else None,
        by_kind=by_kind, tell=tell, target=wanted, loss_fn=intake.loss if intake.has_loss else None,
    )  # fmt: skip
    return WeighedBlocks(
        tuple(blocks),
        blocks_measured.profile,
        blocks_measured.working,
        blocks_measured.cast,
        blocks_measured.keys,
        state_of,
        accumulates,
    ).forecast(options)


@dataclass(frozen=True)
class WeighedBlocks:
    """Blocks that were measured: what ranks will hold follows from them, for any program and cut."""

    blocks: tuple[Block, ...]
    profile: Profile
    working: tuple[Working, ...]
    cast: Mapping[str, int]
    keys: Mapping[str, int]
    state_of: StateOf
    accumulates: bool

    def forecast(self, options: Options) -> Forecast:
        """Add up what each rank will hold."""
        choices = options.decided()
        return _added_up(self, choices, _program(choices))


def _program(choices: Options) -> Program:
    assert choices.schedule is not None, "options that were decided"
    return program_for(
        choices.schedule,
        num_ranks=_num_ranks(choices),
        num_microbatches=choices.num_microbatches,
        stages_per_rank=choices.stages_per_rank,
        **choices.schedule_settings(),
    )


def _added_up(weighed: WeighedBlocks, choices: Options, program: Program) -> Forecast:
    found_profile = weighed.profile
    stages = _cut(choices, program, weighed.blocks, found_profile)
    program = prune(program, trainable(stages))
    again = [_is_recomputed(choices, stages, stage) for stage in range(program.num_stages)]
    counts = [len(stage) for stage in stages]
    costs = found_profile.costs(
        counts, optimizer_states=0, placement=program.placement, recompute=again, split=split_share(program)
    )
    costs = replace(costs, gradient_bytes=_gradients(costs, stages, choices))
    parts = _parts(choices)
    if len(parts) > 1:
        keys = [float(sum(weighed.keys.get(block.name, 0) for block in stage)) for stage in stages]
        costs = replace(costs, slice_lengths=parts, key_value_bytes=keys)
    needs = {where: need * max(parts) for where, need in _needs(weighed, counts, again).items()}
    ranks = tuple(_ranks(program, costs, stages, needs, weighed))
    if program.num_updates:
        ranks = tuple(
            replace(rank, weights=rank.weights * versions)
            for rank, versions in zip(ranks, _versions(choices, program), strict=True)
        )
    return Forecast(program, tuple(stages), found_profile, costs, ranks, weighed)


def _parts(choices: Options) -> list[float]:
    """Return what part of a sequence each of its slices is."""
    division = choices.division
    lengths = division.lengths or [1] * division.num_slices
    return [length / sum(lengths) for length in lengths]


def _versions(choices: Options, program: Program) -> list[int]:
    """Return how many weight versions every rank of a schedule without a flush holds at most."""
    assert isinstance(choices.schedule, str)
    schedule, steps = find(choices.schedule), 2 + program.num_ranks
    options: dict[str, Any] = {"vertical_sync": True} if choices.schedule_settings().get("vertical_sync") else {}
    if "num_steps" in schedule.options:
        long = schedule.build(program.num_ranks, program.num_microbatches, num_steps=steps, **options)
    else:
        long = schedule.build(program.num_ranks, program.num_microbatches * steps, **options)
    return [holding.peak_versions for holding in holdings(long, Costs())]


def _num_ranks(choices: Options) -> int:
    return choices.schedule.num_ranks if isinstance(choices.schedule, Program) else choices.num_ranks or 1


def _first(intake: Intake, value: Any, what: str, device: torch.device) -> Any:
    return moved(intake.cut_batch(value, what=what)[0], device)


def _cut(
    choices: Options, program: Program, blocks: Sequence[Block], found_profile: Profile
) -> list[tuple[Block, ...]]:
    """Return every stage's blocks as the pipeline will cut them."""
    balance = choices.balance
    if is_asked(balance, choices.cuts, choices.example):
        how: Any = {"split": split_share(program), "optimizer_states": 2}
        costs = partial(found_profile.costs, placement=program.placement, **how)
        balance = TimedCuts(found_profile.blocks(**how), program, steps_of(costs)).best(None).counts
    return cut(blocks, program.num_stages, balance, choices.cuts, held_pairs=held_by(program))


def _is_recomputed(choices: Options, stages: Sequence[Sequence[Block]], stage: int) -> bool:
    names = checkpointed(choices.checkpoint, stages)
    return all(block.name in names for block in stages[stage])


def _gradients(costs: Costs, stages: Sequence[Sequence[Block]], choices: Options) -> list[float]:
    """Return every stage's bytes of gradients; with master weights all are added up in float32."""
    gradients = list(costs.per_stage("gradient_bytes", len(stages)))
    if choices.settings().get("master_weights"):
        for stage, blocks in enumerate(stages):
            low = (param for block in blocks for param in block.module.parameters() if param.dtype in LOW)
            gradients[stage] += sum(param.nbytes for param in low if param.requires_grad)
    return gradients


def _ranks(
    program: Program,
    costs: Costs,
    stages: Sequence[Sequence[Block]],
    needs: Mapping[tuple[int, Op], float],
    weighed: WeighedBlocks,
) -> Iterator[RankMemory]:
    weights, gradients = (costs.per_stage(f"{name}_bytes", program.num_stages) for name in ("weight", "gradient"))
    sizes, bare = (stashes(program, each) for each in (costs, _without_received(costs, program.num_stages)))
    for rank, row in enumerate(program.timed_rows):
        held_stages = program.placement.stages_of(rank)
        own_blocks = [block for stage in held_stages for block in stages[stage]]
        stash, without = sizes[rank][:, 0].tolist(), bare[rank][:, 0].tolist()
        own_gradients = {stage: gradients[stage] for stage in held_stages}
        grown = list(moments_of(row, own_gradients, accumulates=weighed.accumulates))
        needed = [sum(needs.get((part.stage, part.op), 0.0) for part in action.work) for action in row]
        at = max(range(len(row)), key=lambda at: grown[at] + stash[at] + needed[at], default=0)
        action = RankMemory(
            weights=sum(weights[stage] for stage in held_stages),
            gradients=grown[at],
            optimizer=float(sum(weighed.state_of(name, tensor) for name, tensor in _trained(own_blocks))),
            activations=without[at] + sum(weighed.cast.get(block.name, 0) for block in own_blocks),
            received=stash[at] - without[at],
            working=needed[at],
        )
        update = replace(
            action, gradients=sum(own_gradients.values()), activations=0.0, received=0.0,
            working=_update_need(own_blocks, torch.device(weighed.profile.device)),
        )  # fmt: skip
        yield max(action, update, key=lambda moment: moment.total)


def _update_need(blocks: Sequence[Block], device: torch.device) -> float:
    """Return what an update needs: torch's optimizers go parameter by parameter on a host, elsewhere through all."""
    sizes = [float(tensor.nbytes) for _, tensor in _trained(blocks)]
    return max(sizes, default=0.0) if device.type == "cpu" else sum(sizes)


def _needs(weighed: WeighedBlocks, counts: Sequence[int], again: Sequence[bool]) -> dict[tuple[int, Op], float]:
    """Return what every stage's op needs above what is held while it runs.

        F    block 0, then 1 above what 0 keeps, ...
        B    the last block, then the one before above what the last has freed, ...

    A recomputed stage runs F inside of B (or I), and F itself keeps nothing on its way.
    """
    needs: dict[tuple[int, Op], float] = {}
    first = 0
    for stage, (count, recomputed) in enumerate(zip(counts, again, strict=True)):
        layers, blocks = weighed.profile.layers[first : first + count], weighed.working[first : first + count]
        stashes = [float(layer.activation_bytes) for layer in layers]
        releases = [layer.activation_bytes - layer.held_until_weight_bytes for layer in layers]
        forward = max(sum(stashes[:at]) + block.forward for at, block in enumerate(blocks)) - sum(stashes)
        back = max(block.backward - sum(stashes[at + 1 :]) for at, block in enumerate(blocks))
        grown = max(0.0, -sum(releases))  # what I keeps for W counts as held
        by_input = max(block.backward_input - sum(releases[at + 1 :]) for at, block in enumerate(blocks)) - grown
        again_forward = forward if recomputed else 0.0
        alone = float(max(block.forward for block in blocks))
        needs[stage, Op.FORWARD] = alone if recomputed else max(0.0, forward)
        needs[stage, Op.BACKWARD] = max(0.0, again_forward, back)
        needs[stage, Op.BACKWARD_INPUT] = max(0.0, again_forward, by_input)
        needs[stage, Op.BACKWARD_WEIGHT] = float(max(block.backward_weight for block in blocks))
        first += count
    return needs


def _without_received(costs: Costs, num_stages: int) -> Costs:
    """Return the costs as if what comes from the stage before took no memory."""
    sent = costs.per_stage("message_bytes", num_stages)
    received = [0.0, *sent[:-1]]

    def less(name: str) -> list[float]:
        return [max(value - more, 0.0) for value, more in zip(costs.per_stage(name, num_stages), received, strict=True)]

    return replace(
        costs,
        activation_bytes=less("activation_bytes"),
        held_until_weight_bytes=less("held_until_weight_bytes"),
        checkpoint_bytes=less("checkpoint_bytes"),
    )


def moments_of(row: Sequence[Action], gradients: Mapping[int, float], *, accumulates: bool = False) -> Iterator[float]:
    """Yield the bytes of gradients that are there while each action of a rank runs.

    >>> from drumline.schedules import generate
    >>> list(moments_of(generate("1f1b", num_ranks=2, num_microbatches=2).rows[0], {0: 3.0}))
    [0, 0, 3.0, 3.0]
    """
    there = dict(gradients) if accumulates else {}
    for action in row:
        for part in action.work:
            if part.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT):
                there[part.stage] = gradients[part.stage]
        yield sum(there.values())


def _trained(blocks: Sequence[Block]) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained parameters of blocks, a tied one once."""
    seen_ids: set[int] = set()
    for block in blocks:
        for name, param in block.named_parameters():
            if param.requires_grad and id(param) not in seen_ids:
                seen_ids.add(id(param))
                yield name, param
