"""One check: microbatches of a step through the model by itself, against what the pipeline made of them.

    before the step   the model by itself runs them one after another, forward and backward each
    in the step       witnesses note the same microbatches' gradients, outputs and losses where the stages are
    after the step    each rank compares its own; what several ranks hold is compared by their sum: see verdict.py

No gradient is kept, only sketches of them: see gradients/.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.engine.unsplit.comparing import norm_of, off, outputs_off
from drumline.features.check.asking import Asking, Take
from drumline.features.check.by_itself.rounding import DRAWS
from drumline.features.check.by_itself.wanted import PlainResult
from drumline.features.check.gradients.expected import (
    TIMES,
    ExpectedSketches,
    PieceGradient,
    differences,
    found_by,
    unsettled,
)
from drumline.features.check.gradients.sketch import few, sketch
from drumline.features.check.verdict import RankOutcome
from drumline.model.values import pack
from drumline.runtime.step import Step


class Trial(Asking):
    """The check of one step."""

    def after(self, step: Step) -> list[RankOutcome]:
        """Compare, and return what this process has found for each microbatch; all ranks call it."""
        started = time.perf_counter()
        outcomes = []
        for at, take in enumerate(self.takes):
            self._rescale(step, take)
            self._add_up(take)
            found_outcome = self._outcome(step, at, take)
            # What counts nothing is found only by its loss, which a mean over nothing makes NaN.
            outcomes.append(found_outcome if take.counts else RankOutcome(unchecked=self.reason, raised=self.raised))
        if any(outcome.is_wrong(self.allowed) for outcome in outcomes) and self.is_disturbed:
            why = "another thread seeded random generators meanwhile, from which this model draws"
            outcomes = [RankOutcome(unchecked=why) for _ in outcomes]
        runs_again = self._can_run_again and not self.parts.is_on
        if any(outcome.is_wrong(self.allowed) for outcome in outcomes) and runs_again:
            has_moods = self._has_moods(step)
            for outcome in outcomes:
                outcome.has_moods = has_moods
        outcomes[0].seconds = self.seconds + time.perf_counter() - started
        return outcomes

    @property
    def raised(self) -> str:
        """What the model by itself raised, and the step did not."""
        return "" if self.error is None else self.reason

    def _rescale(self, step: Step, take: Take) -> None:
        """Give the wanted gradients the share that the step took: some losses must be seen before it is known."""
        own_share = None
        if take.microbatch.number in step.losses:
            share = self.parts.share(take.units.share(step), self.intake.device)
            numbers = take.units.numbers if take.units.are_several else ()
            own_share = share, any(self.intake.has_factors(number) for number in numbers)
        shares = self.crew.collect("check share", own_share)
        share, take.is_weighed_by_parts = next(value for value in shares if value is not None)
        take.counts = bool(share)
        if take.counts and take.wanted is not None and take.expected is not None and share != take.wanted.outcome.share:
            take.ratio = share / take.wanted.outcome.share
            take.expected = take.expected.rescaled(take.ratio)
        take.microbatch = replace(take.microbatch, share=share, seen_share=None)

    def _add_up(self, take: Take) -> None:
        """Complete what is wanted of experts: tokens of all lines went through them, and each line has run its own."""
        known: dict[nn.Parameter, Tensor] = {} if take.expected is None else dict(take.expected.sketches)
        rounding = {} if take.expected is None else dict(take.expected.rounding)
        for param in (param for _, param in self.held_parameters if param.requires_grad):
            if self.parts.is_summed(param):
                tensor = None if take.wanted is None else take.wanted.gradients.get(param)
                if take.wanted is not None and (tensor is None or not take.counts):  # no token here chose any of them
                    tensor = self.parts.nothing(param)
                total, all_ran = self.parts.wanted(None if tensor is None else tensor * take.ratio, param)
                if self.measures:
                    rounding[param] = max(
                        norm_of(other.double() - total.double()) for other in self._nudged_totals(take, param)
                    )
                if take.wanted is not None and all_ran:
                    take.totals[param], known[param] = total, sketch(total)
                elif take.wanted is not None:
                    self.reason = "another line of the mesh could not run the model by itself"
        if take.expected is not None and self.parts.is_on:
            take.expected = ExpectedSketches.of(known, self.allowed, rounding)

    def _nudged_totals(self, take: Take, parameter: nn.Parameter) -> Iterator[Tensor]:
        """Yield what is wanted of experts by each nudged run; lines on which one failed add nothing."""
        for run in [*take.nudged, *[None] * (DRAWS - len(take.nudged))]:
            own_gradient = None if run is None or not take.counts else run.gradients.get(parameter)
            yield self.parts.wanted(None if own_gradient is None else own_gradient * take.ratio, parameter)[0]

    def _outcome(self, step: Step, at: int, take: Take) -> RankOutcome:
        outcome = RankOutcome(unchecked=self.reason, raised=self.raised)
        unsure: Collection[str] = ()
        if self.runner is not None and self.runner.relay is not None:
            unsure, outcome.in_parts = self.runner.unsure, self.runner.in_parts
            outcome.changed = self.runner.relay.changed
        gradients = self._witnessed_gradients(at)
        if take.ratio != 1.0:
            gradients = unsettled(gradients)
        ties, alone = self.engine.assembly.ties, self.crew.alone
        shared = {tensor.name for tensor in ties.tensors if tensor.is_copied and not alone}
        outcome.shared = {name: few(gradient.sketched) for name, gradient in gradients.items() if name in shared}
        if take.opening is not None:
            outcome.num_tokens = take.opening.num_tokens
            outcome.others = {"output": outputs_off(*take.units.outputs(self._outputs(at), take.opening.output))}
            outcome.differing = self._differing(at, take)
        if take.wanted is None or take.expected is None:
            return outcome
        if take.is_weighed_by_parts:
            whole = take.wanted.outcome.output
            outcome.unchecked = "parts of loss_fn have shares of their own in each slice"
            outcome.num_tokens = next((tensor.shape[1] for tensor in pack(whole)[0] if tensor.dim() > 1), 0)
            outcome.others = {"output": outputs_off(*take.units.outputs(self._outputs(at), whole))}
            outcome.differing = self._differing(at, take)
            return outcome
        named, expected = self.named, take.expected
        compared: dict[nn.Parameter, str] = {}
        for name in (name for name, _ in self.held_parameters if name in named):
            if named[name]._post_accumulate_grad_hooks:
                continue  # what it does to the gradient once that has been added is done in the step alone
            if any(named[name] in rank.witnesses[at].unclear for rank in self.ranks):
                outcome.unchecked = f"not the gradient of {name}, to which a hook adds once autograd has"
                continue
            if name not in shared:
                compared[named[name]] = name
            elif name in unsure:  # every rank has all of it here, and in the step its own part
                outcome.unchecked = (
                    f"not the gradient of {name}, which several ranks use, and not each in blocks of its own"
                )
            else:
                numbers = few(expected.sketches.get(named[name], torch.zeros(1)))
                # Where it is more, what is rounding counts as its size.
                size = max(
                    expected.sizes.get(named[name], 0.0), TIMES * expected.rounding.get(named[name], 0.0) / self.allowed
                )
                outcome.wanted[name] = [*numbers, size, expected.whole]
        outcome.num_parameters = len(compared)
        gradients_by_parameter = {param: gradients.get(name) for param, name in compared.items()}
        distances = differences(gradients_by_parameter, expected, partial(self._in_full, step, take))
        outcome.differences = {compared[param]: each for param, each in distances.items()}
        outcome.differing = self._differing(at, take)
        if take.microbatch.number in step.losses:
            others = {
                "loss": off(self._loss(step, take), take.wanted.outcome.loss),
                "output": outputs_off(
                    *self.parts.outputs(*take.units.outputs(self._outputs(at), take.wanted.outcome.output))
                ),
            }
            outcome.others = {what: take.rounding.left(what, distance) for what, distance in others.items()}
        return outcome

    def _in_full(self, step: Step, take: Take, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Run the model once more, and return gradients in full, of those that come out as they did before."""
        if self.parts.is_on:  # all were kept; another line may have no doubt, and would not run again
            assert take.wanted is not None
            whole = {param: each * take.ratio for param, each in take.wanted.gradients.items()} | take.totals
            return {param: whole[param] for param in parameters if param in whole}
        if self._can_run_again:
            self._once_more(step)
        if take.again is None or take.expected is None:
            return {}
        same = take.expected.near(take.again.sketches)
        return {p: take.again.gradients[p] for p in parameters if p in same and p in take.again.gradients}

    @property
    def _can_run_again(self) -> bool:
        """Whether the whole model is still here after the step."""
        return self._is_here and self.takes[0].wanted is not None and self.holdings.shards is None

    def _once_more(self, step: Step) -> None:
        if any(take.again is None for take in self.takes):
            results = self.run(step.draw, step.factor, in_full=True)
            for take, again in zip(self.takes, results, strict=True):
                take.again = again

    def _witnessed_gradients(self, at: int) -> dict[str, PieceGradient]:
        """Return what the witnesses saw, by name, with the parts of other lines where each sees a part."""
        gradients = found_by(self.ranks, at)
        for name, param in self.held_parameters:
            if self.parts.seen_over(param) and param.requires_grad:
                gradient = gradients.get(name)
                total = self.parts.whole_gradient(None if gradient is None else gradient.full, param)
                gradients[name] = PieceGradient(sketch(total), total)
        return gradients

    def _loss(self, step: Step, take: Take) -> Tensor:
        """Return the microbatch's loss in the step, over whole sequences."""
        loss = take.units.loss(step)
        if not self.parts.divides_sequences or not take.microbatch.share:
            return loss
        total = self.parts.total(loss.double() * take.units.share(step), self.intake.device)
        return torch.tensor(total / take.microbatch.share, dtype=loss.dtype)

    def _outputs(self, at: int) -> dict[int, Any]:
        """Return the outputs of the last stage by unit."""
        return next((rank.witnesses[at].outputs for rank in self.ranks if rank.witnesses[at].outputs), {})

    def _differing(self, at: int, take: Take) -> list[str]:
        """Return the blocks here that return something else for units than for whole sequences."""
        trails = [trail for rank in self.ranks if (trail := rank.witnesses[at].trail) is not None]
        names = self.reference.names
        return [name for trail in trails for name in trail.differing(self.trail, take.units, names, self.allowed)]

    def _has_moods(self, step: Step) -> bool:
        """Whether the model by itself returns something else when it is run again.

        What blocks keep is another after the step, so that one run there may differ from before; two must not.
        """
        self._once_more(step)
        again = [take.again for take in self.takes]
        if not self._differ(again, [take.wanted for take in self.takes]):
            return False
        return self._differ(again, self.run(step.draw, step.factor))

    def _differ(self, ones: Sequence[PlainResult | None], others: Sequence[PlainResult | None]) -> bool:
        return any(
            result is None or other is None or outputs_off(result.outcome.output, other.outcome.output) > self.allowed
            for result, other in zip(ones, others, strict=True)
        )
