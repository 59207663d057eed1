"""The check at the first step: whether the pieces compute what the model computes by itself.

    before the step   every rank with the whole model in memory runs one microbatch through it, forward and backward
    in the step       a witness notes the same microbatch's gradients, output and loss where the stages are
    after the step    each rank compares its own; what several ranks hold is compared by their sum. All ranks hear of it

It costs one microbatch's forward and backward of the model, once. Where ranks have only their own stages in memory (a
model on the meta device), each runs the model's own forward and hears of others' blocks what they make: see relay.py.
Rank 0 says what cannot be compared. A list of blocks, or an nn.Sequential without hooks of its own, runs as it is:
there is nothing to check.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError, MismatchError, ModelError
from drumline.pipeline.crew import Crew
from drumline.pipeline.engine import Engine
from drumline.pipeline.intake import Intake
from drumline.pipeline.model.blocks import is_chain
from drumline.pipeline.state.tensors import Holdings
from drumline.pipeline.verify.agreement import Given, agree_on_batch, first_difference, samples_of
from drumline.pipeline.verify.comparing import norm_of, off, outputs_off, sketch
from drumline.pipeline.verify.plain import Plain
from drumline.pipeline.verify.plain_step import Slice, Wanted, plain_step
from drumline.pipeline.verify.relay import GaveUp, Places, Relay
from drumline.runtime.blocks.cut import Block, Model
from drumline.runtime.executor import Step
from drumline.runtime.gradients.clip import Witness
from drumline.runtime.values import moved

_FLOOR = 1e-6  # of all gradients' norm: what is smaller is rounding
_HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Checked:
    """What the check at the first step looked at, what it cost, what it found wrong, and what it had to leave out."""

    seconds: float
    num_parameters: int
    wrong: tuple[str, ...] = ()
    unchecked: str = ""


@dataclass(slots=True)
class _Outcome:
    """What one rank tells of its comparison."""

    differences: dict[str, float] = field(default_factory=dict)  # of gradients, those that are too large
    num_parameters: int = 0
    others: dict[str, float] = field(default_factory=dict)  # "loss", "output": their differences
    shared: dict[str, list[float]] = field(default_factory=dict)  # sketches of what several ranks hold, as found here
    wanted: dict[str, list[float]] = field(default_factory=dict)  # and as the model by itself has it
    seconds: float = 0.0
    in_parts: frozenset[str] = frozenset()  # of `wanted`, what is of this rank's blocks alone
    changed: str = ""  # what blocks may have changed unseen by other ranks
    unchecked: str = ""
    has_moods: bool = False


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank has to begin with."""

    has_batch: bool
    samples: dict[str, bytes]
    is_whole: bool
    here: Places
    given: Given


def needs_check(model: Model) -> bool:
    """Whether anything of a model is followed, so that it could be followed wrongly.

    >>> needs_check(nn.Sequential(nn.ReLU())), needs_check(nn.Linear(2, 2))
    (False, True)
    """
    if not is_chain(model):
        return True
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return isinstance(model, nn.Sequential) and any(getattr(model, one) for one in hooks)


class ModelCheck:
    """The check of one pipeline; it holds the whole model until the first step has ended."""

    def __init__(
        self,
        model: Model,
        blocks: Sequence[Block],
        crew: Crew,
        intake: Intake,
        *,
        is_on: bool,
        different: tuple[int, int, str] | None,
    ) -> None:
        self.is_pending = is_on and needs_check(model)
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
        self._seconds = 0.0

    def attach(self, engine: Engine, holdings: Holdings) -> None:
        """Take note of what runs the steps."""
        self._engine, self._holdings = engine, holdings

    def loaded(self, state: Mapping[str, Any]) -> None:
        """Follow weights that were loaded after the pipeline was made, those of other ranks' stages too."""
        self._different = None
        if self._plain is not None:
            with torch.no_grad():
                for name, one in self._plain.named_parameters().items():
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
                f"ranks {one} and {other} were given models with different values of {name}",
                expected="the same model on every rank",
                fix="seed before it is made, torch.manual_seed(0), or load the same state into the pipeline",
            )

    # ---- before the step ---------------------------------------------------------------------------------------------

    def before(self, number: int, called: Any, target: Any, scale: float) -> None:
        """Run one microbatch through the model by itself, and have the step watched; all ranks call it."""
        if not self.is_pending:
            return
        assert self._plain is not None
        started = time.perf_counter()
        local = self._cut(number, called, target)
        here = Places.of(block for stage in self._engine.stages() for block in stage.blocks)
        card = _Card(
            local is not None, samples_of(self._named()), _is_whole(self._plain), here, Given.of(called, target)
        )
        told = self._crew.all_told("check", [card] * len(self._crew.channels))
        agree_on_batch([one.given for one in told], number)  # before differences are put down to the model
        given = local if local is not None and all(one.has_batch for one in told) else None
        self._given = given = given or self._passed_on(number, called, target)
        if all(one.is_whole for one in told):
            self._reason = self._stale([one.samples for one in told])
        else:
            self._relay = self._relayed(here, told)
        if not self._reason:
            self._wanted = self._run(given, number, scale)
        for executor in self._engine.executors:
            executor.witness = Witness(given.microbatch)
        self._seconds = time.perf_counter() - started

    def _cut(self, number: int, called: Any, target: Any) -> Slice | None:
        """Return a microbatch that counts, where this rank was given all of it."""
        step = Step(number)
        if called is None or (target is None and not self._intake.own):
            return None
        self._intake.take(step, called, target, {"first", "last"}, self._crew.rank)
        self._intake.cut(step)
        at = next((at for at, one in enumerate(step.shares) if float(one)), 0)
        return Slice(at, step.inputs[at], step.targets[at], float(step.shares[at]), self._intake.factors_of(at))

    def _passed_on(self, number: int, called: Any, target: Any) -> Slice:
        """Return a microbatch of which ranks have only parts: the last stage's rank chooses it, the first's has it."""
        ends, rank = self._engine.ends, self._crew.rank
        step = Step(number)
        self._intake.take(step, called, target, ends, rank)
        self._intake.cut(step)
        chosen = None
        if "last" in ends:
            at = next((at for at, one in enumerate(step.shares) if float(one)), 0)
            chosen = at, moved(step.targets[at], _HOST), float(step.shares[at]), self._intake.factors_of(at)
        number_of = len(self._crew.channels)
        microbatch, wanted, share, factors = next(
            one for one in self._crew.all_told("check target", [chosen] * number_of) if one is not None
        )
        first = moved(step.inputs[microbatch], _HOST) if "first" in ends else None
        inputs = next(one for one in self._crew.all_told("check input", [first] * number_of) if one is not None)
        return Slice(microbatch, inputs, wanted, share, factors)

    def _stale(self, told: Sequence[Mapping[str, bytes]]) -> str:
        """Return why the model here is not what the ranks have between them, if it is not."""
        assert self._plain is not None
        named = self._plain.named_parameters()
        everything = {name: value for one in told for name, value in one.items() if name in named}
        if first_difference([everything, samples_of({name: named[name] for name in everything})]) is not None:
            return "other ranks' parameters were changed since the pipeline was made"
        return ""

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

    def _run(self, given: Slice, number: int, scale: float) -> Wanted | None:
        assert self._plain is not None
        assembly = self._engine.assembly
        assembly.randomness.step = number
        mine = self._named()
        named = self._plain.named_parameters()
        try:
            with nullcontext() if self._relay is None else self._relay.running():
                wanted = plain_step(
                    self._plain,
                    given,
                    self._intake.loss,
                    wanted=[named[name] for name in mine if name in named and named[name].requires_grad],
                    device=assembly.device,
                    randomness=assembly.randomness,
                    precision=assembly.precision,
                    scale=scale,
                    multiplying=self._intake.multiplying(given.inputs, given.factors),
                )
        except GaveUp as error:
            self._reason = f"each rank has only its own stages in memory, and they could not run it together: {error}"
            return None
        except torch.OutOfMemoryError:
            self._reason = "there is no memory for the whole model"
            return None
        if wanted.drew_elsewhere:
            self._reason = "the model draws random numbers of Python's or numpy's, which no rank seeds"
        elif wanted.drew and assembly.compiler is not None:
            self._reason = "the model draws random numbers, which are others once it is compiled"
        return None if self._reason else wanted

    def _named(self) -> dict[str, nn.Parameter]:
        return dict(pair for executor in self._engine.executors for pair in self._holdings.named_on(executor))

    # ---- after the step ----------------------------------------------------------------------------------------------

    def after(self, step: Step) -> None:
        """Compare, tell all ranks, and raise alike on all of them if the pieces compute something else."""
        if not self.is_pending:
            return
        started = time.perf_counter()
        self.is_pending = False
        self._rescale(step)
        outcome = self._outcome(step)
        if (outcome.differences or any(one > self._allowed for one in outcome.others.values())) and self._is_alone:
            outcome.has_moods = self._has_moods(step)
        outcome.seconds = self._seconds + time.perf_counter() - started
        told: list[_Outcome] = self._crew.all_told("checked", [outcome] + [_Outcome()] * (len(self._crew.channels) - 1))
        self._plain = self._wanted = self._given = self._relay = None
        for executor in self._engine.executors:
            executor.witness = None
        self._judge(told)

    @property
    def _is_alone(self) -> bool:
        """Whether this rank can run the model by itself once more."""
        return self._wanted is not None and self._relay is None

    def _rescale(self, step: Step) -> None:
        """Give the wanted gradients the share that the step took: some losses must be seen before it is known."""
        assert self._given is not None
        own = float(step.shares[self._given.microbatch]) if self._given.microbatch in step.losses else None
        told = self._crew.all_told("check share", [own] * len(self._crew.channels))
        share = next(one for one in told if one is not None)
        if self._wanted is not None and share != self._given.share:
            for one in self._wanted.gradients.values():
                one.mul_(share / self._given.share)

    def _outcome(self, step: Step) -> _Outcome:
        outcome = _Outcome(unchecked=self._reason, in_parts=frozenset(self._in_parts))
        outcome.changed = "" if self._relay is None else self._relay.changed
        found = self._found()
        ties, alone = self._engine.assembly.ties, self._crew.alone
        shared = {one.name for one in ties.tensors if one.is_copied and not alone}
        outcome.shared = {name: sketch(one) for name, one in found.items() if name in shared}
        if self._wanted is None or self._given is None or self._plain is None:
            return outcome
        named = self._plain.named_parameters()
        wanted = {name: self._wanted.gradients.get(named[name]) for name in self._named() if name in named}
        whole = sum(norm_of(one) ** 2 for one in wanted.values()) ** 0.5
        for name, one in wanted.items():
            if named[name]._post_accumulate_grad_hooks:
                continue  # what it does to the gradient once that has been added is done in the step alone
            if name in shared and name in self._unsure:
                outcome.unchecked = (
                    f"not the gradient of {name}, which several ranks use, and not each in blocks of its own"
                )
                continue  # every rank has all of it here, and in the step its own part
            if name in shared:
                outcome.wanted[name] = [*([0.0] * 4 if one is None else sketch(one)), norm_of(one), whole]
                continue
            outcome.num_parameters += 1
            apart = off(found.get(name), one, floor=_FLOOR * whole)
            if apart > self._allowed:
                outcome.differences[name] = apart
        if self._given.microbatch in step.losses:
            loss = step.losses[self._given.microbatch].detach().cpu()
            outcome.others["loss"] = off(loss, self._wanted.loss)
            outcome.others["output"] = outputs_off(self._output(), self._wanted.output)
        return outcome

    def _found(self) -> dict[str, Tensor]:
        """Return what the witnesses saw, by name; what several ranks of this process hold is added up."""
        found: dict[str, Tensor] = {}
        for executor in self._engine.executors:
            assert executor.witness is not None
            for name, one in self._holdings.named_on(executor):
                gradient = executor.witness.gradients.get(one)
                if gradient is not None:
                    found[name] = found[name] + gradient.cpu() if name in found else gradient.cpu()
        return found

    def _output(self) -> Any:
        outputs = [one.witness.output for one in self._engine.executors if one.witness is not None]
        return next((one for one in outputs if one is not None), None)

    @property
    def _allowed(self) -> float:
        """How far the two may be apart: they run the same kernels, unless the pieces are compiled."""
        assembly = self._engine.assembly
        kinds = {one.dtype for one in self._engine.parameters()} | {assembly.precision.dtype or torch.float32}
        coarsest = max(torch.finfo(kind).eps for kind in kinds if kind.is_floating_point)
        allowed = max(1e-4, 4 * coarsest)
        return allowed if assembly.compiler is None else 100 * allowed if coarsest < 1e-6 else 4 * allowed

    def _has_moods(self, step: Step) -> bool:
        """Whether the model by itself returns something else when it is run again."""
        assert self._given is not None
        assert self._wanted is not None
        again = self._run(self._given, step.number, step.scale)
        return again is None or outputs_off(again.output, self._wanted.output) > self._allowed

    def _judge(self, told: Sequence[_Outcome]) -> None:
        """Say what came of it, on all ranks alike."""
        wrong = {name: apart for one in told for name, apart in one.differences.items()}
        wrong |= self._shared_wrong(told)
        order = {name: at for at, name in enumerate(self._engine.assembly.order)}
        names = sorted(wrong, key=lambda name: order.get(name, len(order)))
        others = {what: apart for one in told for what, apart in one.others.items() if apart > self._allowed}
        unchecked = {one.unchecked: rank for rank, one in reversed(list(enumerate(told))) if one.unchecked}
        self.checked = Checked(
            max(one.seconds for one in told),
            sum(one.num_parameters for one in told) + len({name for one in told for name in one.wanted}),
            (*others, *names),
            "; ".join(f"rank {rank}: {reason}" for reason, rank in unchecked.items()),
        )
        if names or others:
            has_moods = any(one.has_moods for one in told)
            changed = next((one.changed for one in told if one.changed), "")
            self.refusal = _moody() if has_moods else self._wrong(names, wrong, others, changed)
            raise self.refusal
        if unchecked and self._crew.rank == 0:
            compared = "only in part checked" if self.checked.num_parameters else "not checked"
            print(
                f"drumline: the first step was {compared} against the model by itself: {self.checked.unchecked}; "
                "`drumline verify` compares the two on a smaller one",
                file=sys.stderr,
            )

    def _shared_wrong(self, told: Sequence[_Outcome]) -> dict[str, float]:
        """Return what several ranks hold and whose sum over them is wrong."""
        found = {}
        for name, (*wanted, norm, whole) in _wanted_of(told).items():
            each = [one.shared[name] for one in told if name in one.shared]
            made = [sum(column) for column in zip(*each, strict=True)] or [0.0] * len(wanted)
            apart = max(abs(one - other) for one, other in zip(made, wanted, strict=True))
            if apart > 4 * max(self._allowed * norm, _FLOOR * whole):
                found[name] = apart / norm if norm else apart
        return found

    def _wrong(
        self, names: Sequence[str], wrong: Mapping[str, float], others: Mapping[str, float], changed: str
    ) -> ModelError:
        what = [f"its {one} is {apart:.2g} of its size off" for one, apart in others.items()]
        if names:
            home = self._homes.get(names[0], "")
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            what.append(
                f"the gradient of {names[0]}{more}, in block {home!r}, is {wrong[names[0]]:.2g} of its size off"
            )
        return ModelError(
            "the model, followed block by block, returns something else than by itself: " + ", ".join(what),
            expected="the same numbers as model(...) and backward() give; no optimizer has stepped",
            fix="move what hooks, modes or attributes change between blocks into a block, or pass a list of blocks"
            + (f"; or, since {changed}, which other ranks cannot see it change: check_model=False" if changed else ""),
        )


def _wanted_of(told: Sequence[_Outcome]) -> dict[str, list[float]]:
    """Return the sketches of what several ranks hold, as the model has it: of all of it, or the sum of the parts."""
    found: dict[str, list[float]] = {}
    for each in told:
        for name, one in each.wanted.items():
            if name in each.in_parts and name in found:
                found[name] = [first + second for first, second in zip(found[name], one, strict=True)]
            else:
                found[name] = one
    return found


def _is_whole(plain: Plain) -> bool:
    """Whether all of a model is in memory."""
    tensors = (one for part in plain.modules for one in (*part._parameters.values(), *part._buffers.values()))
    return not any(one is not None and one.is_meta for one in tensors)


def _moody() -> ModelError:
    return ModelError(
        "the model returns something else each time it is called, so that its pieces cannot be checked",
        expected="a forward that does the same every time, for inputs of the same kind",
        fix="look for what it does once only, or only sometimes; check_model=False trains it unchecked",
    )
