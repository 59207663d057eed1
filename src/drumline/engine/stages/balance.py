"""The best cut of a model: time every block on this device with a batch, then search."""

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

from drumline.core.action import COMPUTE_OPS
from drumline.core.costs import Costs
from drumline.core.errors import DrumlineError
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.timeline import Timeline
from drumline.engine.model.blocks import blocks_for, example_inputs
from drumline.engine.program.find import program_for
from drumline.engine.program.frozen import is_named, with_whole_backwards
from drumline.engine.ranks import transports
from drumline.engine.stages.assembly import device_of
from drumline.engine.stages.intake import Intake
from drumline.model.block import Block, Model
from drumline.model.blocks.cut import check_enough
from drumline.model.values import moved
from drumline.plan.cut.partition import Partition
from drumline.plan.cut.timed import TimedCuts, steps_of
from drumline.plan.device.blocks import Profile
from drumline.plan.device.stages import split_share
from drumline.profile.blocks import profile
from drumline.report.draw.table import table
from drumline.runtime.stage import Loss


@dataclass(frozen=True)
class Balance:
    """A cut and the measurements behind it.

    Pass `counts` to `Pipeline(balance=...)`. `rank_bytes` is each rank's predicted peak: weights, gradients, optimizer
    state, activations and received messages. `is_exact` is False if ranks hold several stages and the search stopped
    early; then a better cut may exist.
    """

    program: Program
    profile: Profile
    partition: Partition
    optimizer_states: int

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of blocks in each stage."""
        return self.partition.counts

    @property
    def cuts(self) -> tuple[str, ...]:
        """The names of the first blocks of stages 1, 2, ..."""
        starts = [sum(self.counts[:stage]) for stage in range(1, len(self.counts))]
        return tuple(self.profile.layers[start].name for start in starts)

    @property
    def is_exact(self) -> bool:
        """Whether the starting cut is proven optimal: no cut within the limit has a shorter slowest rank."""
        return self.partition.is_exact

    @cached_property
    def costs(self) -> Costs:
        """The costs of the cut's stages, ready for `simulate`."""
        return self.profile.costs(
            self.counts,
            optimizer_states=self.optimizer_states,
            placement=self.program.placement,
            split=_splits(self.program),
        )

    @property
    def seconds(self) -> tuple[float, ...]:
        """Predicted seconds per microbatch in every stage, forward plus backward."""
        seconds = [0.0] * len(self.counts)
        work = Counter((part.stage, part.op) for part in self.program.work() if part.op in COMPUTE_OPS)
        for (stage, op), count in work.items():
            each = self.costs.per_stage(op.name.lower(), len(seconds))[stage]
            seconds[stage] += count / self.program.num_units * each
        return tuple(seconds)

    @property
    def rank_bytes(self) -> tuple[float, ...]:
        """Predicted peak memory of every rank, in bytes."""
        assert self.partition.rank_bytes is not None
        return self.partition.rank_bytes

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step, with messages that take no time."""
        return simulate(self.program, self.costs)

    def table(self, *, width: int = 120) -> str:
        """Return a table with the predictions for each stage."""
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
    """Time the model's blocks on the first microbatch of `batch`, and return the best cut for the schedule.

    The search minimises the slowest rank, then moves its boundaries as long as the simulated step gets shorter. Every
    rank's peak stays within `max_bytes`; if nothing fits, PlanError names the smallest limit that works. The optimizer
    is assumed to keep `optimizer_states` tensors per parameter (2 for Adam).

    Under torchrun or `dl.launch`, call it on all ranks; on a mesh, `num_ranks` is its pp. All ranks measure at the same
    time, as in training, and use the figures of rank 0. Blocks run on the model's device, and the model is unchanged
    afterwards.
    """
    started = transports.num_ranks("auto", num_ranks)
    program = program_for(
        schedule,
        num_ranks=num_ranks or started,
        num_microbatches=num_microbatches,
        stages_per_rank=stages_per_rank,
    )
    intake = Intake(model, loss_fn, device_of(model), num_microbatches=program.num_microbatches)

    def measured() -> Balance:
        blocks = blocks_for(model, batch, intake.device, num_microbatches=program.num_microbatches)
        whole = with_whole_backwards(program, blocks) if is_named(schedule) else program
        named_values = (example_inputs(model, batch), "the batch"), (target, "the target")
        loss_fn = intake.loss if intake.has_loss else None
        how: Any = {"max_bytes": max_bytes, "optimizer_states": optimizer_states, "num_runs": num_runs}
        return balanced(blocks, whole, intake, *named_values, loss_fn, **how)

    return of_rank_0(measured, _gathered) if transports.started_by_launcher() else measured()


def balanced(
    blocks: Sequence[Block],
    program: Program,
    intake: Intake,
    batch: tuple[Any, str],
    target: tuple[Any, str],
    loss_fn: Loss | None,
    *,
    max_bytes: float | None = None,
    optimizer_states: int = 2,
    **how_long: Any,
) -> Balance:
    """Time blocks on the first microbatch of the given arguments, and return the best cut for a program.

    `max_bytes` limits each rank, whose optimizer keeps `optimizer_states` states; `how_long` is passed to `profile`.
    """

    def first(value: Any, what: str) -> Any:
        return moved(intake.cut_batch(value, what=what)[0], intake.device)

    check_enough(blocks, program.num_stages)
    microbatch = first(*batch)
    wanted = microbatch if intake.has_own_loss else None if target[0] is None else first(*target)
    sizes = profile(blocks, microbatch, target=wanted, loss_fn=loss_fn, **how_long)
    how: Any = {"split": _splits(program), "optimizer_states": optimizer_states}
    cuts = TimedCuts(sizes.blocks(**how), program, steps_of(partial(sizes.costs, placement=program.placement, **how)))
    chosen = cuts.best(max_bytes)
    return Balance(cuts.pruned(chosen.counts), sizes, chosen, optimizer_states)


def _gathered(value: object) -> list[Any]:
    answers: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value)
    return answers


def of_rank_0(measured: Callable[[], Balance], gathered: Callable[[object], list[Any]]) -> Balance:
    """Measure on all ranks at once; return the result of rank 0, or raise the error of any rank."""
    mine: Balance | DrumlineError
    gathered(None)
    try:
        mine = measured()
    except DrumlineError as error:
        mine = error
    answers = gathered(mine)
    for drumline_error in answers:
        if isinstance(drumline_error, DrumlineError):
            raise drumline_error
    found_balance: Balance = answers[0]
    return found_balance


def _splits(program: Program) -> bool:
    """Whether most backwards of the program are split into I and W."""
    return split_share(program) > 0.5
