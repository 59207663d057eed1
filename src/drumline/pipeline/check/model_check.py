"""The check at the first step: whether the pieces compute what the model computes by itself.

    before the step   every rank with the whole model in memory runs one microbatch through it, forward and backward
    in the step       a witness notes the same microbatch's gradients, output and loss where the stages are
    after the step    each rank compares its own; what several ranks hold is compared by their sum: see verdict.py

It costs little more than one microbatch's forward and backward of the model, once: no gradient is kept, only sketches
of them, see sketched.py. Where ranks have only their own stages in memory (a model on the meta device),
each runs the model's own forward and hears of others' blocks what they make: see relay.py. Rank 0 says what cannot be
compared. A list of blocks, or an nn.Sequential without hooks of its own, runs as it is: there is nothing to check.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError, MismatchError
from drumline.pipeline.check.lines import LineParts
from drumline.pipeline.check.relay import GaveUp, Places, Relay
from drumline.pipeline.check.sample import Sample
from drumline.pipeline.check.sketched import Expected, Found, differences, found_by, unsettled
from drumline.pipeline.check.verdict import Checked, Outcome, allowed_off, verdict
from drumline.pipeline.crew import Crew
from drumline.pipeline.engine import Engine
from drumline.pipeline.intake import Intake
from drumline.pipeline.model.blocks import is_chain
from drumline.pipeline.state.tensors import Holdings
from drumline.pipeline.verify.agreement import Given, agree_on_batch, first_difference, samples_of
from drumline.pipeline.verify.comparing import few, off, outputs_off
from drumline.pipeline.verify.plain import Plain
from drumline.pipeline.verify.plain_step import Slice, Wanted, plain_step
from drumline.runtime.blocks.cut import Block, Model
from drumline.runtime.executor import Executor
from drumline.runtime.gradients.clip import Witness
from drumline.runtime.gradients.sketch import sketch
from drumline.runtime.step import Step


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank has to begin with."""

    has_batch: bool
    samples: dict[str, bytes]
    is_whole: bool
    here: Places
    given: Given


class ModelCheck:
    """The check of one pipeline; it holds the whole model until the first step has ended."""

    def __init__(
        self,
        model: Model,
        blocks: Sequence[Block],
        crew: Crew,
        intake: Intake,
        is_on: bool,
        different: tuple[int, int, str] | None,
        parts: LineParts,
    ) -> None:
        self.is_pending = is_on and (parts.divides_layers or not is_chain(model))  # else nothing was traced
        self._parts = parts
        self.checked: Checked | None = None
        self.refusal: DrumlineError | None = None
        self._crew, self._intake = crew, intake
        self._plain = Plain(model, [block.name for block in blocks]) if self.is_pending else None
        self._reason = ""  # why it is not checked
        self._places = Places.of(blocks)
        self._relay: Relay | None = None
        # Of what several ranks hold: what each sees its own uses of, and what each sees more uses of than its own.
        self._in_parts: set[str] = set()
        self._unsure: set[str] = set()
        self._homes = {name: block.name for block in blocks for name, _ in block.named_parameters()}
        self._different = different  # two ranks and the parameter for which they were given different values
        self._given: Slice | None = None
        self._wanted: Wanted | None = None
        self._expected: Expected | None = None  # of its gradients
        self._again: Wanted | None = None  # what the model made when it was run once more
        self._named: dict[str, nn.Parameter] = {}  # the model's own
        self._held: list[tuple[Executor, dict[str, nn.Parameter]]] = []  # what the stages here train
        self._totals: dict[nn.Parameter, Tensor] = {}  # gradients of experts that tokens of all lines go through
        self._ratio = 1.0  # what it counts more in the step than was known before
        self._seconds = 0.0

    def attach(self, engine: Engine, holdings: Holdings) -> None:
        """Take note of what runs the steps."""
        self._engine, self._holdings = engine, holdings

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Follow weights that were loaded after the pipeline was made, those of other ranks' stages too."""
        self._different = None
        shards = self._holdings.shards
        divided = {} if shards is None else shards.pieces  # they have their values, and may have no memory
        if self._plain is not None:
            named = self._plain.named_parameters().items()
            with torch.no_grad():
                for name, one in ((name, one) for name, one in named if one not in divided):
                    value = state.get(name)
                    if isinstance(value, Tensor) and not one.is_meta and value.shape == one.shape:
                        one.copy_(value)

    def refuse(self) -> None:
        """Raise again what was found wrong: nothing may be built on it."""
        if self.refusal is not None:
            raise self.refusal

    def agree_on_weights(self) -> None:
        """Raise, alike on all ranks, if the ranks were given models with different values."""
        if self._different is not None:
            one, other, name = self._different
            raise MismatchError(
                f"{self._crew.called.several(one, other)} were given models with different values of {name}",
                expected="the same model on every rank",
                fix="seed before it is made, torch.manual_seed(0), or load the same state into the pipeline",
            )

    # ---- before the step ---------------------------------------------------------------------------------------------

    def before(self, step: Step, called: Any, target: Any, factor: float, whole: tuple[Any, Any] | None = None) -> None:
        """Run one microbatch through the model by itself, and have the step watched; all ranks call it.

        `factor` is what the step will multiply the loss's gradient by. `whole` are batch and target with whole
        sequences, if lines of a mesh have parts of them.
        """
        if not self.is_pending:
            return
        assert self._plain is not None
        started = time.perf_counter()
        self._held = [(one, dict(self._holdings.named_on(one, pieces=False))) for one in self._engine.executors]
        with self._whole() as parts:
            given = self._asked(step, called, target, factor, whole)
        self._wanted = parts(self._wanted)
        if self._parts.is_on:
            self._named = self._own()
        if self._wanted is not None:
            self._expected = Expected.of(self._wanted.sketches, self._allowed)
        for executor, held in self._held:
            executor.witness = Witness(given.microbatch)
            if self._expected is None:
                continue
            limits = self._expected.limits()
            uses = Counter(one for stage in executor.stages.values() for one in stage.parameters)
            for name, one in held.items():
                own = self._named.get(name)
                # Else it sees parts of a sum.
                is_whole = uses[one] == 1 and not self._parts.is_settled_later(one)
                if own is not None and own in limits and is_whole:
                    executor.witness.expected[one] = self._expected.sketches[own], limits[own]
        self._seconds = time.perf_counter() - started

    @contextmanager
    def _whole(self) -> Iterator[Callable[[Wanted | None], Wanted | None]]:
        """Have the model as one process has it inside; what is given turns what was wanted of it into that of parts."""
        if not self._parts.is_on or self._plain is None:
            yield lambda wanted: wanted
            return
        wholes: dict[str, nn.Parameter] = {}
        lines = self._parts

        def parts(wanted: Wanted | None) -> Wanted | None:
            if wanted is None:
                return None
            own, gradients = self._own(), wanted.gradients
            each = {own[name]: gradients[one] for name, one in wholes.items() if one in gradients}
            # Those of experts stay whole until all lines have added up theirs.
            each = {one: whole if lines.is_summed(one) else lines.part_of(one, whole) for one, whole in each.items()}
            compared = {one: sketch(part) for one, part in each.items() if not lines.is_summed(one)}
            return replace(wanted, gradients=each, sketches=compared)

        with lines.whole():
            yield parts
            wholes.update(self._plain.named_parameters())

    def _own(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by name; of those that are held here, what is held."""
        assert self._plain is not None
        return self._plain.named_parameters() | {name: one for _, held in self._held for name, one in held.items()}

    def _asked(self, step: Step, called: Any, target: Any, factor: float, sequences: tuple[Any, Any] | None) -> Slice:
        """Run one microbatch through the model by itself, and return it."""
        assert self._plain is not None
        number = step.number
        named = self._named = self._plain.named_parameters()
        sample = Sample(self._crew, self._intake, self._parts, number, called, target, sequences)
        local = sample.cut()
        here = Places.of(block for stage in self._engine.stages() for block in stage.blocks)
        mine = {
            name: one for executor, _ in self._held for name, one in self._holdings.named_on(executor, pieces=False)
        }
        if self._crew.alone:  # what is the model's own parameter cannot be another than that
            mine = {name: one for name, one in mine.items() if named.get(name) is not one}
        card = _Card(local is not None, samples_of(mine), _is_whole(self._plain), here, Given.of(called, target))
        told = self._crew.collect("check", card)
        # Before differences are put down to the model.
        agree_on_batch([one.given for one in told], number, self._crew.called)
        given = local if local is not None and all(one.has_batch for one in told) else None
        self._given = given = given or sample.passed_on(self._engine.ends)
        if all(one.is_whole for one in told):
            self._reason = _stale(named, [one.samples for one in told])
        elif is_chain(self._plain.model):
            self._reason = "each rank has only its own stages in memory"
        else:
            self._relay = self._relayed(here, told)
        if not self._reason:
            self._wanted = self._run(given, step.draw, factor)
        return given

    def _relayed(self, here: Places, told: Sequence[_Card]) -> Relay:
        """Return how the model is run where ranks have only their own blocks of it."""
        assert self._plain is not None
        assert isinstance(self._plain.model, nn.Module)
        assembly = self._engine.assembly
        homes = Counter(name for one in told for name in one.here.blocks)
        for tensor in assembly.ties.tensors:
            used = {one for one in homes for name in tensor.names if name.startswith(f"{one}.")}
            is_between = any(name in self._places.between for name in tensor.names)
            holders = [one.here.blocks for one in told if used & set(one.here.blocks)]
            if all(used <= set(one) for one in holders):
                continue  # who has it sees all of its uses
            if is_between or any(homes[one] > 1 for one in used):
                self._unsure.update(tensor.names)
            else:
                self._in_parts.update(tensor.names)
        return Relay(self._crew, self._plain.model, self._places, here, assembly.device, assembly.randomness)

    def _run(self, given: Slice, draw: int, factor: float, *, in_full: Collection[nn.Parameter] = ()) -> Wanted | None:
        assert self._plain is not None
        assembly = self._engine.assembly
        assembly.randomness.step = draw
        self._engine.seed_lines()
        mine = dict.fromkeys(self._named[name] for _, held in self._held for name in held if name in self._named)
        if self._parts.is_on:  # parts are cut out of whole gradients
            in_full = [one for one in mine if one.requires_grad]
        try:
            with nullcontext() if self._relay is None else self._relay.running():
                wanted = plain_step(
                    self._plain,
                    given,
                    self._intake.loss,
                    wanted=in_full,
                    sketched=[one for one in mine if one.requires_grad],
                    device=assembly.device,
                    randomness=assembly.randomness,
                    precision=assembly.precision,
                    scale=factor,
                    multiplying=self._intake.multiplying(given.inputs, given.factors),
                    listens=assembly.compiler is not None or self._parts.divides_sequences,
                )
        except GaveUp as error:
            self._reason = f"each rank has only its own stages in memory, and they could not run it together: {error}"
            return None
        except torch.OutOfMemoryError:
            self._reason = "there is no memory for the whole model"
            return None
        if wanted.drew_elsewhere:
            self._reason = "the model draws random numbers of Python's or numpy's, which no rank seeds"
        elif wanted.drew and self._parts.divides_sequences:
            self._reason = "the model draws random numbers, which are others for each part of a sequence"
        elif wanted.drew:
            self._reason = "the model draws random numbers, which are others once it is compiled"
        return None if self._reason else wanted

    # ---- after the step ----------------------------------------------------------------------------------------------

    def after(self, step: Step) -> None:
        """Compare, tell all ranks, and raise alike on all of them if the pieces compute something else."""
        if not self.is_pending:
            return
        started = time.perf_counter()
        self.is_pending = False
        self._rescale(step)
        self._add_up()
        outcome = self._outcome(step)
        runs_again = self._wanted is not None and self._can_run_again and not self._parts.is_on
        if outcome.is_wrong(self._allowed) and runs_again:
            outcome.has_moods = self._has_moods(step)
        outcome.seconds = self._seconds + time.perf_counter() - started
        told = self._crew.all_told("checked", [outcome] + [Outcome()] * (len(self._crew.channels) - 1))
        order = self._engine.assembly.order
        self.checked, self.refusal = verdict(
            told, self._allowed, order, self._homes, self._crew.called, divides_layers=self._parts.axes.size("tp") > 1
        )
        self._plain = self._wanted = self._again = self._expected = self._given = self._relay = None
        self._named, self._held, self._totals = {}, [], {}
        for executor in self._engine.executors:
            executor.witness = None
        self.refuse()
        if self.checked.unchecked and self._crew.rank == self._crew.axes.number == 0:
            compared = "only in part checked" if self.checked.num_parameters else "not checked"
            print(
                f"drumline: the first step was {compared} against the model by itself: {self.checked.unchecked}; "
                "`drumline verify` compares the two on a smaller one",
                file=sys.stderr,
            )

    def _rescale(self, step: Step) -> None:
        """Give the wanted gradients the share that the step took: some losses must be seen before it is known."""
        assert self._given is not None
        own = None
        if self._given.microbatch in step.losses:
            own = self._parts.total(step.shares[self._given.microbatch], self._intake.device)
        share = next(one for one in self._crew.collect("check share", own) if one is not None)
        if self._wanted is not None and self._expected is not None and share != self._wanted.share:
            self._ratio = share / self._wanted.share
            self._expected = self._expected.rescaled(self._ratio)
        self._given = replace(self._given, share=share, seen_share=None)

    def _add_up(self) -> None:
        """Complete what is wanted of experts: tokens of all lines went through them, and each line has run its own."""
        known: dict[nn.Parameter, Tensor] = {} if self._expected is None else dict(self._expected.sketches)
        for one in (one for _, held in self._held for one in held.values() if one.requires_grad):
            if self._parts.is_summed(one):
                own = None if self._wanted is None else self._wanted.gradients.get(one)
                if self._wanted is not None and own is None:  # no token of this line chose any of them
                    own = self._parts.nothing(one)
                total, all_ran = self._parts.wanted(None if own is None else own * self._ratio, one)
                if self._wanted is not None and all_ran:
                    self._totals[one], known[one] = total, sketch(total)
                elif self._wanted is not None:
                    self._reason = "another line of the mesh could not run the model by itself"
        if self._expected is not None:
            self._expected = Expected.of(known, self._allowed)

    def _outcome(self, step: Step) -> Outcome:
        outcome = Outcome(unchecked=self._reason, in_parts=frozenset(self._in_parts))
        outcome.changed = "" if self._relay is None else self._relay.changed
        found = self._found()
        if self._ratio != 1.0:
            found = unsettled(found)
        ties, alone = self._engine.assembly.ties, self._crew.alone
        shared = {one.name for one in ties.tensors if one.is_copied and not alone}
        outcome.shared = {name: few(one.sketched) for name, one in found.items() if name in shared}
        if self._wanted is None or self._given is None or self._expected is None:
            return outcome
        named, expected = self._named, self._expected
        compared: dict[nn.Parameter, str] = {}
        for name in (name for _, held in self._held for name in held if name in named):
            if named[name]._post_accumulate_grad_hooks:
                continue  # what it does to the gradient once that has been added is done in the step alone
            if name not in shared:
                compared[named[name]] = name
            elif name in self._unsure:  # every rank has all of it here, and in the step its own part
                outcome.unchecked = (
                    f"not the gradient of {name}, which several ranks use, and not each in blocks of its own"
                )
            else:
                numbers = few(expected.sketches.get(named[name], torch.zeros(1)))
                outcome.wanted[name] = [*numbers, expected.sizes.get(named[name], 0.0), expected.whole]
        outcome.num_parameters = len(compared)
        made = {one: found.get(name) for one, name in compared.items()}
        apart = differences(made, expected, partial(self._in_full, step))
        outcome.differences = {compared[one]: each for one, each in apart.items()}
        if self._given.microbatch in step.losses:
            outcome.others["loss"] = off(self._loss(step), self._wanted.loss)
            made = self._output()
            outcome.others["output"] = outputs_off(made, self._parts.part_of_output(self._wanted.output, made))
        return outcome

    def _in_full(self, step: Step, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Run the model once more, and return gradients in full, of those that come out as they did before."""
        if self._parts.is_on:  # all were kept; another line may have no doubt, and would not run again
            assert self._wanted is not None
            whole = {one: each * self._ratio for one, each in self._wanted.gradients.items()} | self._totals
            return {one: whole[one] for one in parameters if one in whole}
        again = self._once_more(step, list(parameters)) if self._can_run_again else None
        if again is None or self._expected is None:
            return {}
        same = self._expected.near(again.sketches)
        return {one: each for one, each in again.gradients.items() if one in same}

    @property
    def _can_run_again(self) -> bool:
        """Whether the whole model is still here after the step."""
        return self._relay is None and self._holdings.shards is None

    def _once_more(self, step: Step, in_full: Collection[nn.Parameter] = ()) -> Wanted | None:
        assert self._given is not None
        if self._again is None:
            self._again = self._run(self._given, step.draw, step.factor, in_full=in_full)
        return self._again

    def _found(self) -> dict[str, Found]:
        """Return what the witnesses saw, by name, with the parts of other lines where each sees a part."""
        found = found_by(self._held)
        for name, one in ((name, one) for _, held in self._held for name, one in held.items()):
            if self._parts.seen_over(one) and one.requires_grad:
                seen = found.get(name)
                total = self._parts.seen(None if seen is None else seen.full, one)
                found[name] = Found(sketch(total), total)
        return found

    def _loss(self, step: Step) -> Tensor:
        """Return the microbatch's loss in the step, over whole sequences."""
        assert self._given is not None
        loss, share = (each[self._given.microbatch] for each in (step.losses, step.shares))
        if not self._parts.divides_sequences or not self._given.share:
            return loss.detach().cpu()
        total = self._parts.total(loss.detach().double() * share, self._intake.device)
        return torch.tensor(total / self._given.share, dtype=loss.dtype)

    def _output(self) -> Any:
        outputs = [one.witness.output for one in self._engine.executors if one.witness is not None]
        return next((one for one in outputs if one is not None), None)

    @cached_property
    def _allowed(self) -> float:
        return allowed_off(self._engine.assembly, {one.dtype for one in self._engine.parameters()})

    def _has_moods(self, step: Step) -> bool:
        """Whether the model by itself returns something else when it is run again."""
        assert self._wanted is not None
        again = self._once_more(step)
        return again is None or outputs_off(again.output, self._wanted.output) > self._allowed


def _stale(named: Mapping[str, nn.Parameter], told: Sequence[Mapping[str, bytes]]) -> str:
    """Return why the model here is not what the ranks have between them, if it is not."""
    everything = {name: value for one in told for name, value in one.items() if name in named}
    if first_difference([everything, samples_of({name: named[name] for name in everything})]) is not None:
        return "other ranks' parameters were changed since the pipeline was made"
    return ""


def _is_whole(plain: Plain) -> bool:
    """Whether all of a model is in memory."""
    tensors = (one for part in plain.modules for one in (*part._parameters.values(), *part._buffers.values()))
    return not any(one is not None and one.is_meta for one in tensors)
