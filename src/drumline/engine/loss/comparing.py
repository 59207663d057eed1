"""Find how microbatches count in a loss function, by comparing losses of parts with the loss of the same rows together.

Before the first backward, the first microbatch's output is at hand, and so are all microbatches' targets. So the
output's rows are compared with their own targets, and where that leaves several rules, with other targets.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.engine.loss.rules.compare import LossComparison, compare
from drumline.engine.loss.rules.linked_rows import LinkedRows
from drumline.engine.loss.rules.loss_draws import LossDraws
from drumline.engine.loss.rules.rows import TooLarge, num_attempts, stirred
from drumline.engine.loss.rules.rules import FittingRules, found_in
from drumline.engine.loss.rules.watching import LossCall, watched
from drumline.model.values import mapped, pack
from drumline.model.watch.keeping import undisturbed

LossFunction = Callable[..., Tensor]
_FEW = 8  # rows that are enough where calls show all that a loss does
_TURNS = 5  # comparisons of a loss whose draws are other ones in each
Joint = tuple[Any, Any, int]  # an output, a target, and how many rows they have
_EXPECTED = "a mean or sum over rows; a loss that compares rows with each other needs the whole batch"
_FIX = (
    "write it as a mean or sum over rows, or as a sum divided by a count of the target; or pass loss_weight=, a"
    " function from a target to its weight (len, to weight by rows); or use num_microbatches=1"
)


@dataclass(frozen=True, slots=True)
class MicrobatchEvidence:
    """What comparisons of one microbatch say; `rules` is None if they say nothing."""

    rules: FittingRules | None
    comparison: LossComparison | None = None
    why: str = ""  # why nothing, unless there are no numbers to compare


@dataclass(frozen=True, slots=True)
class Comparing:
    """Compares one loss function; `device` is where its outputs are."""

    loss_fn: LossFunction
    device: torch.device

    def dry(self, output: Any, target: Any) -> LossCall | None:
        """Watch a call that leaves no trace; None if it fails, as the real call then will."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the real call tells them
            with contextlib.suppress(Exception), torch.no_grad():
                return self._watched(mapped(output, lambda tensor: tensor.detach().clone()), target)
            with contextlib.suppress(Exception), torch.enable_grad():  # it takes gradients
                linked = LinkedRows(output, (None,) * len(pack(output)[0]), 0, 1)
                with linked:
                    return self._watched(linked.output, target)
        return None

    def _watched(self, output: Any, target: Any) -> LossCall:
        draws = LossDraws(self.device)
        with undisturbed(loss=self.loss_fn), draws.of(0, 1, 1) as mode:
            return watched(self.loss_fn, output, mapped(target, Tensor.clone), drawing=mode)

    def rules(
        self, output: Any, target: Any, rows: int, joint: Callable[[], Joint | None] | None = None
    ) -> MicrobatchEvidence:
        """Return the rules that fit a microbatch, and `joint` if it has few rows or its own target says too little.

        It raises if there are none.
        """
        why, best = "", None
        for each, trial, number, shrinks in self._trials(output, target, rows, joint):
            try:
                comparison, rules = self._compared(each, trial, number, shrinks=shrinks)
            except TooLarge as error:
                return MicrobatchEvidence(None, why=str(error))
            except Exception as error:
                why = why or f"with other numbers of rows it raises {type(error).__name__}: {error}"
                continue
            if comparison is None or rules is None:
                continue
            if not rules.fits:
                raise refusal(comparison)
            best = MicrobatchEvidence(
                rules if best is None or best.rules is None else best.rules.within(rules), comparison
            )
            is_enough = number > rows or rows > 2 or joint is None
            if comparison.tells and is_enough:
                return self._of_more(best, output, target, rows, joint)
        return best or (self._linked(output, target, rows, why) if why else MicrobatchEvidence(None))

    def _of_more(
        self, best: MicrobatchEvidence, output: Any, target: Any, rows: int, joint: Callable[[], Joint | None] | None
    ) -> MicrobatchEvidence:
        """Compare as many rows as a batch has, that differ more, where calls do not show all that a loss does.

        The hardest five of five rows are all of them, and the largest of each may be the same in all.
        """
        if best.comparison is None or best.rules is None or best.comparison.whole.is_clear:
            return best
        trial, wanted, number = (None if joint is None else joint()) or (output, target, rows)
        try:
            comparison, rules = self._compared(stirred(trial, number), wanted, number)
        except Exception:  # which rows like these may raise
            return best
        if comparison is None or rules is None:
            return best
        left = best.rules.within(rules)
        if not left.fits:
            raise refusal(comparison)
        return MicrobatchEvidence(left, best.comparison)

    def _linked(self, output: Any, target: Any, rows: int, why: str) -> MicrobatchEvidence:
        """Compare rows that keep their graph, for a function that takes gradients of its outputs."""
        if rows < 2:  # which no copies can make more
            return MicrobatchEvidence(None, why=why)
        try:
            comparison = compare(self.loss_fn, output, target, rows, self.device, linked=True)
        except Exception:
            return MicrobatchEvidence(None, why=why)
        if comparison is None or not comparison.is_finite:
            return MicrobatchEvidence(None, why=why)
        rules = found_in(comparison)
        if not rules.fits:
            raise refusal(comparison)
        return MicrobatchEvidence(rules, comparison)

    def rules_of(self, joint: Joint) -> MicrobatchEvidence:
        """Return the rules that fit an output with several microbatches' targets."""
        try:
            comparison, rules = self._compared(*joint)
        except Exception as error:
            return MicrobatchEvidence(None, why=str(error))
        return MicrobatchEvidence(rules, comparison)

    def _trials(
        self, output: Any, target: Any, rows: int, joint: Callable[[], Joint | None] | None
    ) -> Iterator[tuple[Any, Any, int, bool]]:
        """Yield outputs and targets to compare, the likeliest first."""
        yield output, target, rows, True
        joint_call = None if joint is None else joint()
        if joint_call is not None:
            yield *joint_call, True
        if rows < 3:  # rows that are shrunk may be nothing that the function takes
            yield output, target, rows, False
        # Where a loss is zero for all rows, a hinge perhaps, it may not be for others.
        flipped = mapped(output, lambda tensor: tensor.detach().neg() if tensor.is_floating_point() else tensor)
        yield flipped, target, rows, True

    def _compared(
        self, output: Any, target: Any, rows: int, *, shrinks: bool = True
    ) -> tuple[LossComparison | None, FittingRules | None]:
        first: tuple[LossComparison | None, FittingRules | None] = None, None
        failed: Exception | None = None
        for attempt in range(num_attempts(output, rows)):
            compared = partial(compare, self.loss_fn, output, target, rows, self.device, attempt, shrinks=shrinks)
            try:
                comparison, rules = self._of_few(compared) if rows > _FEW else (None, None)
                if rules is None:
                    comparison, rules = self._every_turn(compared)
            except TooLarge:
                raise
            except Exception as error:
                failed = failed or error
                continue
            if rules is not None and rules.fits:
                return comparison, rules
            first = first if first[0] is not None or rules is None else (comparison, rules)
        if first[0] is None and failed is not None:
            raise failed
        return first

    def _of_few(
        self, compared: Callable[..., LossComparison | None]
    ) -> tuple[LossComparison | None, FittingRules | None]:
        """Compare few rows, if they tell as much as many: where calls show all that it does, and it counts nothing."""
        try:
            comparison = compared(most=_FEW)
        except TooLarge:
            raise
        except Exception:  # more rows may do
            return None, None
        if (
            comparison is None
            or not comparison.is_finite
            or not comparison.tells
            or not comparison.whole.is_clear
            or comparison.draws.unequal
        ):
            return None, None
        rules = found_in(comparison)
        is_enough = rules.fits and not comparison.draws.host and (rules.trusted or not rules.num_tallies)
        return (comparison, rules) if is_enough else (None, None)

    def _every_turn(
        self, compared: Callable[..., LossComparison | None]
    ) -> tuple[LossComparison | None, FittingRules | None]:
        """Compare, several times if it draws what cannot be made equal: rows may be mixed by chance as they were."""
        comparison = compared()
        if comparison is None or not comparison.is_finite:
            return None, None
        rules = found_in(comparison)
        for turn in range(1, _TURNS if comparison.draws.unequal or comparison.draws.host else 0):
            again = compared(turn=turn)
            if again is not None and again.is_finite and rules.fits:
                comparison, rules = again, rules.within(found_in(again))
        if rules.fits and comparison.whole.picks:  # what it picks may by chance be as much of each part
            again = compared(order=comparison.order())
            if again is not None and again.is_finite:
                comparison, rules = again, rules.within(found_in(again))
        if rules.fits and comparison.draws.host:
            _warn_of_host(self.loss_fn)
        return comparison, rules


def refusal(trial: LossComparison) -> ModelError:
    """Return the error of a loss for which there are no weights."""
    values = [part.whole.value for part in trial.parts]
    drawn = [*trial.draws.unequal, *(["Python's or numpy's random numbers"] if trial.draws.host else [])]
    by = f"; it draws from {', '.join(drawn)}, which other rows get in a microbatch" if drawn else ""
    return ModelError(
        f"the losses of {trial.sizes[0]} and {trial.sizes[1]} rows are {values[0]:.6g} and {values[1]:.6g}, but loss_fn"
        f" of the full batch is {trial.whole.whole.value:.6g}, and no weights make values and gradients add up{by}",
        expected=_EXPECTED,
        fix=_FIX,
    )


def not_compared(why: str) -> ModelError:
    """Return the error of a loss that cannot be compared and whose calls do not say what it is."""
    return ModelError(f"loss_fn could not be compared with itself on fewer rows: {why}", expected=_EXPECTED, fix=_FIX)


def warn_of_no_comparison(why: str) -> None:
    """Say that a loss goes by its calls alone."""
    warnings.warn(
        f"loss_fn was not compared with itself on fewer rows ({why}). Drumline weights microbatches by what its calls"
        " average over. Pass loss_weight= to set them yourself",
        stacklevel=2,
    )


def _warn_of_host(loss_fn: Any) -> None:
    warnings.warn(
        f"loss_fn {getattr(loss_fn, '__name__', type(loss_fn).__name__)} draws from Python's or numpy's random"
        " generators, which Drumline does not seed: each microbatch draws its own, in the order of the schedule. Draw"
        " from torch's",
        stacklevel=2,
    )
