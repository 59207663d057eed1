"""Optimizers that step as soon as their own rank's gradients are done; all ranks agree afterwards that they may have.

Clipping and the check for NaN need the gradients of all ranks. A rank that waits for them before it updates waits for
the slowest rank in every step. Here it does not wait:

    rank 0   step t ─┤ tell norms │ update │ F0 F1 F2 ┊ verdict │ B0 ...      step t + 1
    rank 1      step t ─┤ tell norms │ update │ F0 F1 ┊ verdict │ B0 ...
    rank 2         step t ─┤ tell norms │ update │ F0 ┊ verdict │ B0 ...

When a rank reaches the end of its next step's opening (see core/prove/opening.py), all ranks have told their norms, so
the verdict costs no wait. If the norm is too large, or a gradient was not finite, every rank undoes its update with
copies. It repeats the update with clipped gradients or skips it, and begins the step again. This follows Qi et al.,
"Zero bubble pipeline parallelism" (arXiv 2401.10241), section 4, with words to all ranks instead of a relay.

Whether a step begins again follows from the verdict alone, which is the same on all ranks. A rank that has asked for it
earlier, to save a state, runs the opening in vain like the others. After a verdict that changed an update, all ranks
wait for the next verdict before they update: gradients that need clipping rarely come alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar
from weakref import WeakSet

from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.core.errors import DrumlineError, RunError, UsageError
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport, Tally
from drumline.engine.site import Site
from drumline.engine.updates.validation_time import Validates
from drumline.features.validated.undo import KeptBuffers, KeptOptimizer
from drumline.model.patches import having_gradients
from drumline.runtime.gradients import clip
from drumline.runtime.step import CalledWith, Step

_TWO = 2.0  # the norm that clipping takes, as torch does


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks decided about one update; `step` is the number of its last pipeline step.

    `norm` is that of all gradients before clipping, None without `max_norm`. `ranks` names those with a NaN or an
    infinity.
    """

    step: int
    norm: Tensor | None = None
    factor: Tensor | None = None
    ranks: str = ""

    @property
    def skips(self) -> bool:
        """Whether the update was left out, because of a NaN or an infinity on some rank."""
        return bool(self.ranks)

    @property
    def clips(self) -> bool:
        """Whether its gradients were scaled down."""
        return not self.skips and self.factor is not None and not bool(self.factor == 1.0)

    @property
    def amends(self) -> bool:
        """Whether an update that did not wait for the verdict was wrong."""
        return self.skips or self.clips


@dataclass(slots=True)
class _OptimizerStep:
    """One optimizer's part of an update."""

    parameters: Sequence[nn.Parameter]
    apply: Callable[[], None]
    follow: Callable[[], None]  # lets parameters follow what the optimizer updates, such as float32 copies
    optimizer: KeptOptimizer

    def take_back(self, gradients: dict[nn.Parameter, Tensor] | None) -> None:
        """Undo the step, and make it with these gradients if there are any."""
        with self.optimizer.given_back():
            if gradients is None:
                self.follow()
                return
            with having_gradients(self.parameters, gradients):
                self.apply()


@dataclass(slots=True)
class _Update:
    """An update on this process's ranks, from the first optimizer's step to the verdict."""

    number: int
    steps: range  # the pipeline steps whose gradients it uses, evaluations counted
    trained: int  # the last of them, evaluations not counted
    is_ahead: bool  # whether ranks update before the verdict
    gradients: dict[nn.Parameter, Tensor]
    versions: list[int] = field(default_factory=list)  # of the gradients, to see whether they were changed
    stepped: list[_OptimizerStep] = field(default_factory=list)
    verdict: Verdict | None = None
    is_settled: bool = False

    @property
    def topic(self) -> str:
        return f"norms/{self.number}"

    def has(self, kept_optimizer: KeptOptimizer) -> bool:
        return any(step.optimizer is kept_optimizer for step in self.stepped)

    def release(self) -> None:
        """Keep nothing alive that the next step needs room for."""
        self.gradients, self.stepped, self.is_settled = {}, [], True


class Validation(Observer, Validates):
    """The updates of this process's ranks that wait for their verdict; does nothing until an optimizer asks for it."""

    order: ClassVar[int] = -1  # it gates the step that all others observe

    def __init__(self, site: Site, buffers: KeptBuffers) -> None:
        self._site, self._buffers = site, buffers
        self._holdings, self._ledger, self._recording = site.holdings, site.ledger, site.recording
        self._crew = site.crew
        self.is_on = False
        self.max_norm: float | None = None
        self.verdict: Verdict | None = None  # the last one
        self.num_amended = 0
        self.num_taken_back = 0
        self._kept_optimizers: WeakSet[KeptOptimizer] = WeakSet()
        self._bad: dict[int, str] = {}  # steps with a NaN, and the ranks that had it, by name
        self._first = 0  # the first step of the next update
        self._update: _Update | None = None
        self._number = 0
        self._trusts = True  # whether updates run ahead of their verdict
        self._is_finite = True  # whether this process's part of the last step was
        self._again = False  # whether the next step begins again, whatever else is decided

    def turn_on(self, max_norm: float | None) -> None:
        """Validate the updates of all optimizers afterwards."""
        if max_norm is not None:
            clip.check(max_norm, _TWO)
        if self.is_on and max_norm != self.max_norm:
            raise UsageError(
                f"max_norm is {max_norm}, and another optimizer of this pipeline has {self.max_norm}",
                expected="the same on all: gradients are clipped by the norm of all of them",
            )
        if not self.is_on:
            self.is_on, self.max_norm, self._first = True, max_norm, self._ledger.number
            self._recording.notes_late = 1
            self._ledger.awaits = self.settle
            self._site.run_rows = self._run
            self._site.attend()

    def turn_off(self) -> None:
        """Validate the updates of the next optimizers before they are made; all ranks call it alike."""
        if self.is_on:
            self._recording.settle()
            self.is_on, self._recording.notes_late, self._ledger.awaits = False, 0, None
            self._update, self._again, self._trusts = None, False, True
            self._site.run_rows = self._site.engine.run
            self._site.attend()

    @property
    def is_idle(self) -> bool:
        """Whether no optimizer asks for it."""
        return not self.is_on

    def keeping(self, optimizer: Optimizer) -> KeptOptimizer:
        """Return what keeps the state of an optimizer; the optimizer's own step holds it."""
        kept_optimizer = KeptOptimizer(optimizer)
        self._kept_optimizers.add(kept_optimizer)
        return kept_optimizer

    @property
    def num_bytes(self) -> int:
        """The memory that copies take in this process."""
        return sum(optimizer.num_bytes for optimizer in self._kept_optimizers)

    # ---- what an optimizer does --------------------------------------------------------------------------------------

    def step(
        self,
        kept_optimizer: KeptOptimizer,
        parameters: Sequence[nn.Parameter],
        apply: Callable[[], None],
        follow: Callable[[], None],
    ) -> None:
        """Update now if nothing on this rank speaks against it, else once all ranks have told."""
        update = self._update
        if update is None or update.has(kept_optimizer):  # again without a step of the pipeline: one after the other
            self._recording.settle()
            update = self._update = self._begun()
        update.stepped.append(_OptimizerStep(parameters, apply, follow, kept_optimizer))
        if update.is_settled:
            if not self._judged(update).skips:
                apply()
            return
        kept_optimizer.take()
        apply()
        kept_optimizer.stepped()
        changed = [gradient._version for gradient in update.gradients.values()] != update.versions
        if changed:
            raise RunError(
                f"{kept_optimizer.name} changes gradients while it steps, so the step cannot be made again",
                expected='an optimizer that leaves gradients as they are, or validated="before"',
            )

    def _begun(self) -> _Update:
        """Begin an update: tell all ranks this process's norms, and wait for theirs only if these are wrong."""
        gradients = {param: param.grad for param in self._holdings.parameters() if param.grad is not None}
        last, trained = self._ledger.number - 1, self._ledger.num_trained - 1
        update = _Update(self._number, range(self._first, last + 1), trained, self._trusts, gradients)
        self._number, self._first = self._number + 1, last + 1
        own_norms: list[dict[str, float]] = []
        if self.max_norm is not None:
            with self._recording.between.during("clip"), self._crew.together("the norm of gradients"):
                own_norms = self._holdings.norms(_TWO)
                self._crew.tell(update.topic, own_norms)
        if not (update.is_ahead and self._may_stand(own_norms)):
            with self._recording.between.during("hear"):
                verdict = self._judged(update)
            if verdict.clips and verdict.factor is not None:
                clip.multiply(list(gradients.values()), verdict.factor)
            update.is_settled = True
        update.versions = [gradient._version for gradient in gradients.values()]
        return update

    def _may_stand(self, own_norms: Sequence[dict[str, float]]) -> bool:
        """Whether nothing that this process knows speaks against the update."""
        norm = self._site.engine.assembly.total_norm(own_norms, _TWO)
        return self._is_finite and (self.max_norm is None or bool(norm <= self.max_norm))

    def forget(self) -> None:
        """Record that all gradients were set to zero; what an update holds already still counts."""
        self._first = self._ledger.number

    def handles(self, number: int, ranks: str) -> bool:
        """Record on which ranks a step was not finite; whether that is dealt with here."""
        if self.is_on:
            self._bad[number] = ranks
        return self.is_on

    # ---- the verdict -------------------------------------------------------------------------------------------------

    def _judged(self, update: _Update) -> Verdict:
        """Wait until all ranks have told, and return what follows from it; the same on all of them."""
        if update.verdict is None:
            last = update.steps.stop - 1
            self._ledger.settle(until=last, gradients_left=lambda: False)
            norm = factor = None
            if self.max_norm is not None:
                norm = self._site.engine.assembly.total_norm(self._crew.heard(update.topic), _TWO)
                factor = clip.factor(norm, self.max_norm)
                self._recording.note(update.trained, grad_norm=norm)
            bad = next((self._bad[step] for step in update.steps if step in self._bad), "")
            update.verdict = self.verdict = Verdict(update.trained, norm, factor, bad)
            self._bad = {number: ranks for number, ranks in self._bad.items() if number > last}
            self._trusts = not update.verdict.amends
            self._again |= update.verdict.amends and update.is_ahead
            self.num_amended += update.verdict.amends
        return update.verdict

    def settle(self) -> None:
        """Wait for the verdict on the update under way, and fix the update if it was wrong."""
        update = self._update
        if update is not None:
            with self._mending(update):
                if self._judged(update).amends and not update.is_settled:
                    self._mend(update)
            update.release()

    @contextmanager
    def _mending(self, update: _Update) -> Iterator[None]:
        """Take an update back if ranks find that they did not do the same before it."""
        try:
            yield
        except DrumlineError:
            if update.verdict is None and not update.is_settled:
                for step in update.stepped:
                    step.take_back(None)
                update.release()
            raise

    def _mend(self, update: _Update) -> None:
        """Take the update back, and make it as it should have been."""
        verdict, gradients = self._judged(update), update.gradients
        if [gradient._version for gradient in gradients.values()] != update.versions:
            raise RunError(
                "gradients of the last update were changed in place before it was validated",
                expected="gradients that stay as they are until the next step, or pipe.settle()",
                fix="use optimizer.zero_grad() or pipe.zero_grad()",
            )
        if verdict.clips and verdict.factor is not None:
            clip.multiply(list(gradients.values()), verdict.factor)
        for step in update.stepped:
            step.take_back(None if verdict.skips else gradients)
        self._holdings.follow()
        self.num_taken_back += 1

    # ---- what a step does --------------------------------------------------------------------------------------------

    def take_call(self, step: Step, call: CalledWith) -> CalledWith:
        """Let evaluations see parameters that all ranks agree on."""
        if not step.train:
            self._recording.settle()
        return call

    def _run(self, step: Step) -> None:
        """Run a step's rows; at the end of their openings, ask whether the update before the step stands."""
        engine, update = self._site.engine, self._update
        waits = step.train and (self._again or (update is not None and update.is_ahead))
        if step.train:
            self._buffers.take(copies=waits)
        if not waits:
            engine.run(step)
            return
        engine.run(step, lambda executor: executor.gated(self._accepts))
        if self._again:
            for again in self._site.observers.again:
                again(step)
            engine.run(step)

    def _accepts(self) -> bool:
        update = self._update
        if update is not None:
            with self._mending(update):
                self._judged(update)
            if not self._again:
                self._update = None  # it stands; its gradients make room for those of the step
        return not self._again

    def again(self, step: Step) -> None:
        """Fix the update, before the step begins again."""
        self._buffers.give_back()
        self.settle()
        self._update, self._again = None, False
        self._buffers.take(copies=False)

    def end(self, step: Step) -> None:
        """Note what the step has changed, and forget an update that had its verdict before the step."""
        self._update = None
        if self.is_on:
            self._buffers.learn()

    def after_telling(self, step: Step, tally: Tally, each: Sequence[RankReport]) -> None:
        """Remember whether this process's part of the step was finite."""
        if self.is_on and step.train:
            self._is_finite = all(bool(report.finite) for report in each)
