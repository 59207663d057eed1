"""Where a pipeline is cut if nobody says so: by measurement, given an example of a batch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drumline.core.errors import DrumlineError, ModelError
from drumline.core.program import Program
from drumline.pipeline.balance import Balance, balanced
from drumline.pipeline.crew import Crew
from drumline.pipeline.intake import Intake
from drumline.pipeline.model.blocks import blocks_for, example_inputs
from drumline.plan.cut.peaks import held_by
from drumline.plan.device.model_profile import refuse_other
from drumline.plan.device.plan import Plan
from drumline.profile.identity import identity_of
from drumline.runtime.blocks.cut import Block, Model, cut
from drumline.runtime.precision import Precision
from drumline.runtime.values import moved

_SECONDS = 10.0  # how long measuring may take, beyond the first run of everything


def is_asked(balance: Sequence[int] | str | None, cuts: Sequence[str] | None, example: Any) -> bool:
    """Whether the cut is to be found by measurement.

    >>> is_asked(None, None, None), is_asked(None, None, [1.0]), is_asked([2, 2], None, [1.0])
    (False, True, False)
    """
    if balance == "auto" and example is None:
        raise ModelError(
            "balance is 'auto' and there is no example",
            expected="a batch to measure the blocks with",
            fix="pass example=, a batch as step will get it, and example_target= if there is a loss_fn",
        )
    return balance == "auto" or (balance is None and cuts is None and example is not None)


@dataclass(frozen=True, slots=True)
class ChosenCut:
    """Where the stages of a model are to begin, and what is known of it to decide that."""

    model: Model
    example: Any
    target: Any
    intake: Intake
    precision: Precision
    plan: Plan | None = None

    def stages(
        self, crew: Crew, program: Program, balance: Sequence[int] | str | None, cuts: Sequence[str] | None
    ) -> tuple[list[tuple[Block, ...]], Balance | None]:
        """Return every stage's blocks, and what they were measured to take where measuring was asked for."""
        device, microbatches = self.intake.device, program.num_microbatches
        split = self.intake.split
        blocks = blocks_for(self.model, self.example, device, num_microbatches=microbatches, cuts=cuts, split=split)
        measured = None
        if self.plan is not None:
            refuse_other(self.plan.model, identity_of(blocks, type(self.model).__name__), "the plan")
        elif is_asked(balance, cuts, self.example):
            with self.precision.autocast:
                measured = self._measured(crew, program, blocks)
            balance = None if measured is None else measured.counts
        return cut(blocks, program.num_stages, balance, cuts, held=held_by(program)), measured

    def _measured(self, crew: Crew, program: Program, blocks: Sequence[Block]) -> Balance | None:
        """Measure the blocks on all ranks at once and return rank 0's best cut, which it also prints; None on meta."""
        if any(one.is_meta for block in blocks for one in block.module.parameters()):
            return None
        device = self.intake.device
        for block in blocks:
            block.module.to(device)

        def first(value: Any, what: str) -> Any:
            return None if value is None else moved(self.intake.cut_batch(value, what=what)[0], device)

        inputs = example_inputs(self.model, self.example)
        target = inputs if self.intake.own else self.target
        mine: Balance | DrumlineError
        crew.all_told("ready to measure", [None] * len(crew.channels))
        try:
            mine = balanced(
                blocks,
                program,
                first(inputs, "the example"),
                target=first(target, "the example's target"),
                loss_fn=self.intake.loss if self.intake.has_loss and target is not None else None,
                seconds=_SECONDS,
            )
        except DrumlineError as error:
            mine = error
        told = crew.all_told("balance", [mine] * len(crew.channels))
        for one in told:
            if isinstance(one, DrumlineError):
                raise one
        found: Balance = told[0]
        if crew.rank == 0:
            print(f"{found.table()}\nbalance={list(found.counts)}, measured on {found.profile.device}", file=sys.stderr)
        return found
