"""Where to cut: every block is measured on this device, and the best cut for a schedule is chosen."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.errors import DrumlineError
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.timeline import Timeline
from drumline.pipeline import transports
from drumline.pipeline.assembly import device_of
from drumline.pipeline.intake import Intake
from drumline.pipeline.model.blocks import blocks_for, example_inputs
from drumline.pipeline.programs import program_for
from drumline.plan.cut.chain import Partition
from drumline.plan.cut.timed import TimedCuts
from drumline.plan.device.blocks import Profile
from drumline.profile.blocks import profile
from drumline.report.table import table
from drumline.runtime.blocks.cut import Block, Model
from drumline.runtime.stage import Loss
from drumline.runtime.values import moved

_SECONDS = {
    Op.FORWARD: "forward",
    Op.BACKWARD: "backward",
    Op.BACKWARD_INPUT: "backward_input",
    Op.BACKWARD_WEIGHT: "backward_weight",
}


@dataclass(frozen=True)
class Balance:
    """A cut and what it was chosen by.

    `counts` is for `Pipeline(balance=...)`. `rank_bytes` are each rank's predicted peak: weights, gradients, optimizer
    state, activations and what is received. `is_exact` is False where several stages share each rank and the search
    gave up: then a better cut may exist.
    """

    program: Program
    profile: Profile
    partition: Partition
    optimizer_states: int

    @property
    def counts(self) -> tuple[int, ...]:
        """How many blocks each stage gets."""
        return self.partition.counts

    @property
    def cuts(self) -> tuple[str, ...]:
        """The names of the blocks with which stages 1, 2, ... begin."""
        starts = [sum(self.counts[:stage]) for stage in range(1, len(self.counts))]
        return tuple(self.profile.layers[start].name for start in starts)

    @property
    def is_exact(self) -> bool:
        """Whether the cut that timing began with is proven: none within the limit has a shorter largest rank."""
        return self.partition.is_exact

    @cached_property
    def costs(self) -> Costs:
        """What the stages of the cut take, ready for `simulate`."""
        return self.profile.costs(
            self.counts,
            optimizer_states=self.optimizer_states,
            placement=self.program.placement,
            split=_splits(self.program),
        )

    @property
    def seconds(self) -> tuple[float, ...]:
        """Predicted seconds of one microbatch in every stage, forward and backward."""
        of = {op: self.costs.per_stage(name, len(self.counts)) for op, name in _SECONDS.items()}
        found = Counter((part.stage, part.op) for part in self.program.work())
        num_microbatches = self.program.num_microbatches
        return tuple(
            sum(found[stage, op] / num_microbatches * of[op][stage] for op in of) for stage in range(len(self.counts))
        )

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Predicted peak of every rank."""
        assert self.partition.rank_bytes is not None
        return self.partition.rank_bytes

    @cached_property
    def timeline(self) -> Timeline:
        """The step as the simulator predicts it, messages taking no time."""
        return simulate(self.program, self.costs)

    def table(self, *, width: int = 120) -> str:
        """Return a table: what every stage takes."""
        header = ["stage", "rank", "blocks", "from", "milliseconds", "share of largest", "rank's peak MiB"]
        starts = [self.profile.layers[0].name, *self.cuts]
        homes = self.program.placement.homes
        rows = [
            [
                str(stage),
                str(homes[stage]),
                str(self.counts[stage]),
                starts[stage],
                f"{seconds * 1e3:.3f}",
                f"{seconds / (max(self.seconds) or 1.0):.0%}",
                f"{self.rank_bytes[homes[stage]] / 2**20:.1f}",
            ]
            for stage, seconds in enumerate(self.seconds)
        ]
        return table(header, rows, width=width)

    def to_json(self) -> str:
        """Return counts, cuts, predictions and the profile as a JSON object."""
        return json.dumps(
            {
                "schedule": self.program.name,
                "counts": self.counts,
                "cuts": self.cuts,
                "exact": self.is_exact,
                "seconds": self.seconds,
                "rank_bytes": self.rank_bytes,
                "makespan": self.timeline.makespan,
                "profile": json.loads(self.profile.to_json()),
            }
        )


def balance(
    model: Model,
    batch: Any,
    *,
    target: Any = None,
    loss_fn: Callable[..., Tensor] | None = None,
    schedule: str | Path | Program = "1f1b",
    num_microbatches: int | None = None,
    num_ranks: int | None = None,
    stages_per_rank: int | None = None,
    max_bytes: float | None = None,
    optimizer_states: int = 2,
    num_runs: int = 10,
) -> Balance:
    """Measure the model's blocks with the first microbatch of `batch`, and return the best cut for the schedule.

    The largest rank is as short as it can be, and its boundaries are moved from there as long as the simulated step
    gets shorter, with every rank's peak within `max_bytes`; where nothing fits, PlanError names the smallest limit that
    would do. The optimizer is taken to keep `optimizer_states` tensors of the weights' size (2 for Adam).

    Under torchrun or `dl.launch` call it on all ranks: all measure at once, as all will compute at once, and rank 0's
    figures decide for all. The model is measured where it is, and left as it was.
    """
    program = program_for(
        schedule,
        num_ranks=transports.num_ranks("auto", num_ranks),
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    device = device_of(model)

    def measured() -> Balance:
        def first(value: Any, what: str) -> Any:
            return moved(intake.cut_batch(value, what=what)[0], device)

        blocks = blocks_for(model, batch, device, num_microbatches=program.num_microbatches)
        intake = Intake(loss_fn, None, device, num_microbatches=program.num_microbatches)
        intake.follow(model)
        microbatch = first(example_inputs(model, batch), "the batch")
        wanted = microbatch if intake.own else None if target is None else first(target, "the target")
        return balanced(
            blocks,
            program,
            microbatch,
            target=wanted,
            loss_fn=intake.loss if intake.has_loss else None,
            max_bytes=max_bytes,
            optimizer_states=optimizer_states,
            num_runs=num_runs,
        )

    return _of_rank_0(measured) if transports.started_by_launcher() else measured()


def balanced(
    blocks: Sequence[Block],
    program: Program,
    microbatch: Any,
    *,
    target: Any,
    loss_fn: Loss | None,
    max_bytes: float | None = None,
    optimizer_states: int = 2,
    num_runs: int = 10,
    seconds: float | None = None,
) -> Balance:
    """Measure blocks with one microbatch, and return the best cut for a program."""
    found = profile(blocks, microbatch, target=target, loss_fn=loss_fn, num_runs=num_runs, max_seconds=seconds)
    cuts = TimedCuts(
        found.blocks(split=_splits(program), optimizer_states=optimizer_states),
        program,
        [block.trains for block in blocks],
        partial(found.costs, optimizer_states=optimizer_states, placement=program.placement, split=_splits(program)),
        max_bytes,
    )
    chosen = cuts.best()
    return Balance(cuts.pruned(chosen.counts), found, chosen, optimizer_states)


def _of_rank_0(measured: Callable[[], Balance]) -> Balance:
    """Measure on all ranks at once and return what rank 0 found, or raise what any of them raised."""
    mine: Balance | DrumlineError
    dist.barrier()
    try:
        mine = measured()
    except DrumlineError as error:
        mine = error
    told: list[Balance | DrumlineError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    for one in told:
        if isinstance(one, DrumlineError):
            raise one
    assert isinstance(told[0], Balance)
    return told[0]


def _splits(program: Program) -> bool:
    """Whether most backwards of the program are split into I and W."""
    ops = [part.op for part in program.work()]
    return ops.count(Op.BACKWARD_INPUT) > ops.count(Op.BACKWARD)
