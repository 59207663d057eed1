"""The check of a pipeline: whether its pieces compute the same as the unsplit model.

The first step is checked on two microbatches, which a pipeline interleaves and plain training does not: see trial.py.
Later steps are checked on one, now and then: see sentinels.py. It costs little more than these microbatches' forward
and backward. Rank 0 says what cannot be compared.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from drumline.core.action import Op
from drumline.core.errors import DrumlineError, MismatchError, ModelError, UsageError
from drumline.core.program import Program
from drumline.engine.ground import Ground
from drumline.engine.no_check import NoCheck
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.state.keeper import Keeper
from drumline.engine.unsplit.parts import Parts
from drumline.features.check.by_itself.reference import Reference
from drumline.features.check.sentinels import Sentinels, When
from drumline.features.check.trial import Trial
from drumline.features.check.verdict import CheckReport, RankOutcome, merged, verdict
from drumline.model.quantised.packed import is_packed, settle
from drumline.model.quantised.state import file_names, load_value
from drumline.runtime.step import CalledWith, Step

NUM_MICROBATCHES = 2  # of the first step: one for each copy where a stage has two


class ModelCheck(NoCheck, Keeper):
    """The checks of one pipeline.

    With several processes it holds the whole model until the first step has ended, and this rank's blocks afterwards.
    """

    order: ClassVar[int] = 1  # it watches what all others have prepared

    def __init__(
        self, setting: PipelineSetup, cut: ModelCut, parts: Parts, different: tuple[int, int, str] | None, *, when: When
    ) -> None:
        model, crew = setting.options.model, setting.crew
        self.is_pending = when is not False  # whether the first step is still to be checked
        self.checked: CheckReport | None = None
        self.refusal: DrumlineError | None = None
        self._parts, self._crew = parts, crew
        self._reference = Reference(model, cut.blocks, alone=crew.alone) if self.is_pending else None
        self._sentinels = Sentinels(when)
        self._different = different  # two ranks and the parameter for which they were given different values
        self._trial: Trial | None = None  # of the step that runs
        self._said: set[str] = set()  # what could not be checked, as rank 0 has said

    def attach(self, ground: Ground) -> None:
        """Take note of what runs the steps."""
        self._ground = ground

    @property
    def is_chain(self) -> bool:
        """Whether a list of blocks is checked."""
        return self._reference is not None and self._reference.is_chain

    def loaded(self, model: Mapping[str, Any], whole: Mapping[str, Any]) -> None:
        """Follow weights that were loaded after the pipeline was made, those of other ranks' stages too."""
        state = {**whole, **model} if self.is_pending else model
        self._different = None
        self._sentinels.ask()
        shards = self._ground.holdings.shards
        divided = {} if shards is None else shards.pieces  # they have their values, and may have no memory
        if self.is_pending and self._reference is not None and self._reference.whole is not None:
            settle(self._reference.whole.modules)
            named = self._reference.whole.named_parameters().items()
            with torch.no_grad():
                for name, param in ((name, param) for name, param in named if param not in divided):
                    if is_packed(param):
                        if not param.is_meta and any(text in state for text in file_names(name, param)):
                            load_value(param, name, state)
                        continue
                    value = state.get(name)
                    if isinstance(value, Tensor) and not param.is_meta and value.shape == param.shape:
                        param.copy_(value)

    def refuse_move(self, *, changes_program: bool) -> None:
        """Refuse to move layers before the first step, if ranks will need the whole model for its check."""
        if self.is_pending and not self.is_chain and not self._crew.alone:
            raise UsageError(
                "repartition: the first step has not run",
                expected="a step before it, which is checked against the whole model",
                fix="pass the cut to Pipeline: cuts= or balance=",
            )

    def moved(self) -> None:
        """Check the step after layers have moved; what left has no memory here."""
        self._sentinels.ask()
        if self._reference is not None:
            self._reference.let_go(self._ground.engine.blocks())

    def took(self, program: Program, number: int) -> None:
        """Check the next step if it divides sequences: what ran before had them in one piece."""
        if program.num_slices > 1:
            self._sentinels.ask()

    def followed(self) -> None:
        """Check the next step: the model was traced again, or for other inputs. All ranks of a line call it alike.

        Where there are other lines, none is checked while others are not; they do not know of each other's inputs.
        """
        if self._is_only_line:
            self._sentinels.ask()

    def renewed(self) -> None:
        """Follow a change of the model, which this process has seen, and others will tell of."""
        if self._crew.alone and self._is_only_line:
            self._sentinels.ask()
        elif self._reference is not None and not self._reference.is_current:
            self._reference.renew(self._ground.engine.blocks())

    def remember(self, refusal: ModelError) -> None:
        """Refuse all that follows for a reason that was found elsewhere."""
        self.refusal = refusal

    def refuse(self) -> None:
        """Raise again what was found wrong: nothing may be built on it."""
        if self.refusal is not None:
            raise self.refusal

    def refuse_step(self, step: Step) -> None:
        """Refuse any step after one that was wrong."""
        if self.refusal is not None:
            raise self.refusal

    def ahead(self, step: Step, call: CalledWith, user_call: CalledWith) -> None:
        """If a step is checked, run microbatches of it through the unsplit model, to compare the step with it."""
        if step.number and step.draw < self._sentinels.quiet_until and not self.is_pending and self._trial is None:
            return
        if not step.number:
            with self._crew.together("the check of the model"):
                self._agree_on_weights()
        if not self._takes(step):
            return
        ground = self._ground
        if ground.updates.validation.is_on:
            ground.recording.settle()  # else an update may be undone in the middle of the step
        with ground.recording.between.during("check"), self._crew.together("the check of the model"):
            self._agree_on_weights()
            factor = ground.updates.scaler.scale * step.share
            arguments = ground.intake.first_value(call.batch, call.named)
            placed = ground.lines.placed(user_call)
            whole = None if placed is None else (ground.intake.first_value(placed.batch, placed.named), placed.target)
            assert self._reference is not None
            count = NUM_MICROBATCHES if self.is_pending else 1
            self._trial = Trial(self._reference, ground, self._parts, count)
            self._trial.before(step, arguments, call.target, factor, whole)

    def after(self, step: Step) -> None:
        """Compare a checked step with that run."""
        if self._trial is None:
            return
        before = self.checked
        try:
            self._compare(step, self._trial)
        finally:
            if (checked := self.checked) is not None and checked is not before:
                self._ground.recording.note(
                    **{
                        "check_metrics/seconds": checked.seconds,
                        "check_metrics/parameters": checked.num_parameters,
                        "check_metrics/wrong": len(checked.wrong),
                    }
                )

    def _agree_on_weights(self) -> None:
        """Raise, alike on all ranks, if the ranks were given models with different values."""
        if self._different is not None:
            number, other, name = self._different
            raise MismatchError(
                f"{self._crew.naming.several(number, other)} were given models with different values of {name}",
                expected="the same model on every rank",
                fix="seed before it is made, torch.manual_seed(0), or load the same state into the pipeline",
            )

    def _takes(self, step: Step) -> bool:
        """Whether a step is checked; all ranks ask alike, once for each step."""
        if self._trial is not None:  # of a step that failed on its way
            self._trial.leave()
            self._trial = None
            if self._is_only_line:  # others may have compared theirs
                self._sentinels.ask()
        is_due = self._sentinels.takes(step.draw)
        return self.is_pending or (is_due and self._has_sentinels)

    @property
    def _has_sentinels(self) -> bool:
        """Whether later steps can be checked: not where steps are replayed, or lines have parts of parameters."""
        engine = self._ground.engine
        divides_stages = Op.UNSHARD in engine.assembly.program.columns.ops  # those of other ranks, too
        if self._reference is None or self._parts.is_on or divides_stages:
            return False
        # A line in which nothing was compared, because nothing counted, checks on as others do.
        is_worth_it = self.checked is None or self.checked.num_parameters > 0 or not self._is_only_line
        return not engine.runs_one_program and is_worth_it

    @property
    def _is_only_line(self) -> bool:
        """Whether there are no other lines of a mesh, which take part in a checked step: all check the same steps."""
        return not self._parts.axes.is_mesh

    def _compare(self, step: Step, trial: Trial) -> None:
        """Compare, tell all ranks, and raise alike on all of them if the pieces compute something else."""
        self._trial = None
        trial.leave()
        is_first, self.is_pending = self.is_pending, False
        outcomes = trial.after(step)
        others = [[RankOutcome() for _ in outcomes]] * (len(self._crew.channels) - 1)
        answers = self._crew.all_told("checked", [outcomes, *others])
        reference, order = self._reference, self._ground.engine.assembly.order
        assert reference is not None
        slices = reference.names if self._ground.intake.num_slices > 1 else ()
        settings: dict[str, Any] = {"divides_layers": self._parts.axes.size("tp") > 1, "is_chain": reference.is_chain}
        verdicts = [
            verdict(
                each,
                trial.allowed,
                order,
                reference.homes,
                self._crew.naming,
                step=step.number,
                slices=slices,
                **settings,
            )
            for each in zip(*answers, strict=True)
        ]
        self.checked, self.refusal = merged(verdicts, step.number)
        self._hear_other_lines(step.number)
        if is_first:
            reference.let_go(self._ground.engine.blocks())
        if not self._sentinels.is_on:
            self._reference = None
        self.refuse()
        self._say(self.checked.unchecked, "first" if is_first else f"{step.number + 1}th")

    def _hear_other_lines(self, step: int) -> None:
        """Refuse what any line of a mesh refuses, so that no line waits for another that has raised."""
        axes, device = self._parts.axes, self._ground.engine.assembly.device
        if not axes.is_mesh:
            return
        refuses = torch.tensor([float(self.refusal is not None)], device=device)
        if not float(axes.summed(refuses, *(name for name in axes.names if name != "pp"))):
            return
        refusals = axes.exchanged(f"drumline/refused/{step}", "" if self.refusal is None else str(self.refusal))
        if self.refusal is None:
            rank, text = next((rank, text) for rank, text in enumerate(refusals) if text)
            self.refusal = ModelError(f"{axes.named(rank)} refuses the step: {text}")

    def _say(self, unchecked: str, which: str) -> None:
        """Say once what cannot be compared."""
        assert self.checked is not None
        if unchecked and unchecked not in self._said and self._crew.rank == self._crew.axes.number == 0:
            self._said.add(unchecked)
            compared = "only in part checked" if self.checked.num_parameters else "not checked"
            if self.checked.num_tokens:
                compared = f"checked by the outputs of each sequence's first {self.checked.num_tokens} tokens alone"
            print(
                f"drumline: the {which} step was {compared} against the model by itself: {unchecked}; "
                "`drumline verify` compares the two on a smaller one",
                file=sys.stderr,
            )
