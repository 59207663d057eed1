"""Ask the model by itself: microbatches of a step run through it before the step, and witnesses watch the step.

::

    a card of every rank     whether it has the batch, and the whole model with the values that ranks train
    all of them have         each runs the whole model
    else                     they run it together, each its own blocks: see reference.py
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from drumline.channel.lines.slices import slice_of
from drumline.core.errors import RankFailed, WaitTimeout
from drumline.engine.ranks.agreement import Given, agree_on_batch, first_difference, samples_of
from drumline.engine.ranks.crew import Crew
from drumline.engine.stages.engine import Engine
from drumline.engine.stages.intake import Intake
from drumline.engine.state.tensors import Holdings
from drumline.engine.unsplit.parts import Parts
from drumline.engine.unsplit.plain import ByItself
from drumline.engine.unsplit.plain_step import Slice, Wanted, plain_steps
from drumline.features.check.places import Home, Places
from drumline.features.check.reference import Reference
from drumline.features.check.relay import GaveUp, Relay
from drumline.features.check.rounding import DRAWS, Nudged, Rounding
from drumline.features.check.row import Row
from drumline.features.check.sample import Sample
from drumline.features.check.sketched import Expected
from drumline.features.check.verdict import allowed_off
from drumline.model.block import Block
from drumline.model.randomness import seedings_elsewhere
from drumline.runtime.execute.executor import Executor
from drumline.runtime.gradients.sketch import sketch
from drumline.runtime.gradients.witness import Witness
from drumline.runtime.step import Step

_FINE = 1e-3  # what is allowed in float32 is less


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank has to begin with."""

    has_batch: bool
    samples: dict[str, bytes]
    is_whole: bool
    here: Places
    given: Given
    factor: float
    is_coarse: bool  # whether what it trains is of low precision


@dataclass(slots=True)
class Take:
    """One microbatch, and what the model by itself made of it."""

    given: Slice
    wanted: Wanted | None = None
    expected: Expected | None = None  # of its gradients
    nudged: list[Wanted | None] = field(default_factory=list)  # made while all that it computed was nudged a little
    rounding: Rounding = field(default_factory=Rounding)
    again: Wanted | None = None  # what the model made when it was run once more
    totals: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # of experts that tokens of all lines go through
    ratio: float = 1.0  # what it counts more in the step than was known before
    counts: bool = True  # whether it is a part of the loss: some losses must be seen before this is known


@dataclass
class Asking:
    """What the model by itself makes of `num_microbatches` of a step. `model` is the user's, while it lives."""

    reference: Reference
    crew: Crew
    intake: Intake
    engine: Engine
    holdings: Holdings
    parts: Parts
    num_microbatches: int
    model: nn.Module | None

    def __post_init__(self) -> None:
        self.reason = ""  # why it is not checked
        self._seedings = 0
        self.error: Exception | None = None  # what the model by itself raised
        self.seconds = 0.0
        self.takes: list[Take] = []
        self.measures = False  # whether rounding is measured
        self.by_itself: ByItself | None = None
        self.relay: Relay | None = None
        # Of what several ranks hold: what each sees its own uses of, and what each sees more uses of than its own.
        self.in_parts: set[str] = set()
        self.unsure: set[str] = set()
        self.named: dict[str, nn.Parameter] = {}  # the model's own
        self.held: list[tuple[Executor, dict[str, nn.Parameter]]] = []  # what the stages here train

    # ---- before the step ---------------------------------------------------------------------------------------------

    def before(self, step: Step, called: Any, target: Any, factor: float, whole: tuple[Any, Any] | None) -> None:
        """Run microbatches through the model by itself, and have the step watched; all ranks call it.

        `factor` is what the step will multiply the loss's gradient by. `whole` are batch and target with whole
        sequences, if lines of a mesh have parts of them.
        """
        started = time.perf_counter()
        self._seedings = seedings_elsewhere()
        self.held = [(one, dict(self.holdings.named_on(one, pieces=False))) for one in self.engine.executors]
        with self._whole() as parts:
            self._ask(step, called, target, factor, whole)
        for take in self.takes:
            take.wanted, take.nudged = parts(take.wanted), [parts(one) for one in take.nudged]
            take.rounding = Rounding.between(take.wanted, take.nudged)
        if self.parts.is_on:
            self.named = self._own()
        for take in self.takes:
            if take.wanted is not None:
                take.expected = Expected.of(take.wanted.sketches, self.allowed, take.rounding.gradients)
        for executor, held in self.held:
            executor.witnesses = [self._witness(executor, held, take) for take in self.takes]
        self.seconds = time.perf_counter() - started

    def _witness(self, executor: Executor, held: Mapping[str, nn.Parameter], take: Take) -> Witness:
        if take.expected is None:  # nothing is compared here, and other ranks compare what they share with this one
            shared = {one.name for one in self.engine.assembly.ties.tensors if one.is_copied}
            only = {one for name, one in held.items() if name in shared or self.parts.is_settled_later(one)}
            return Witness(take.given.microbatch, only)
        witness = Witness(take.given.microbatch)
        limits = take.expected.limits()
        uses = Counter(one for stage in executor.stages.values() for one in stage.parameters)
        for name, one in held.items():
            own = self.named.get(name)
            # Else it sees parts of a sum.
            is_whole = uses[one] == 1 and not self.parts.is_settled_later(one)
            if own is not None and own in limits and is_whole:
                witness.expected[one] = take.expected.sketches[own], limits[own]
        return witness

    @contextmanager
    def _whole(self) -> Iterator[Callable[[Wanted | None], Wanted | None]]:
        """Have the model as one process has it inside; what is given turns what was wanted of it into that of parts."""
        if not self.parts.is_on or self.reference.whole is None:
            yield lambda wanted: wanted
            return
        wholes: dict[str, nn.Parameter] = {}
        lines = self.parts

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
            wholes.update(self.reference.whole.named_parameters())

    def _own(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by name; of those that are held here, what is held."""
        plain = self.reference.whole
        named = {} if plain is None else plain.named_parameters()
        return named | {name: one for _, held in self.held for name, one in held.items()}

    @property
    def _blocks(self) -> list[Block]:
        """The blocks of this process."""
        return [block for stage in self.engine.stages() for block in stage.blocks]

    def _ask(self, step: Step, called: Any, target: Any, factor: float, sequences: tuple[Any, Any] | None) -> None:
        """Choose microbatches, and run them through the model by itself."""
        number, reference = step.number, self.reference
        program = self.engine.assembly.program
        copies = [program.placement.rank_of(0, at) for at in range(program.num_microbatches)]
        sample = Sample(
            self.crew, self.intake, self.parts, number, called, target, sequences, copies, self.num_microbatches
        )
        local = sample.cut()
        named = {} if reference.whole is None else reference.whole.named_parameters()
        here, mine = Places.of(self._blocks), self._samples(named)
        is_whole = reference.is_current and reference.fits(self.engine.assembly.device)
        own = Given.of(None, None) if self.crew.alone else Given.of(called, target)  # ranks here share one batch
        is_coarse = self.allowed > _FINE
        told = self.crew.collect("check", _Card(local is not None, mine, is_whole, here, own, factor, is_coarse))
        # Parts are added up in another order than the whole, and rounded in between: in low precision that shows.
        self.measures = self.parts.is_on and any(one.is_coarse for one in told)
        # Before differences are put down to the model.
        agree_on_batch([one.given for one in told], number, self.crew.called)
        given = local if local is not None and all(one.has_batch for one in told) else None
        given = given or sample.passed_on(self.engine.ends)
        self.takes = [Take(one) for one in given]
        if len({one.factor for one in told}) > 1:
            self.reason = "ranks scale the loss differently"  # which they tell each other after the step
        elif all(one.is_whole for one in told) and not _are_stale(named, [one.samples for one in told]):
            self.by_itself, self.named = reference.whole, named
        elif self.parts.is_on and reference.is_chain:
            self.reason = "each rank has only its own stages in memory"
        else:
            self._prepare_relay(told)
        self.named = self.named | self._of_loss()
        if not self.reason:
            made = self.run(step.draw, factor)
            for take, wanted in zip(self.takes, made, strict=True):
                take.wanted = wanted
        for seed in range(DRAWS) if self.measures else ():
            if all(self.crew.collect("check rounding", not self.reason)):
                with Nudged(seed):
                    nudged = self.run(step.draw, factor)
                for take, wanted in zip(self.takes, nudged, strict=True):
                    take.nudged.append(wanted)
                    take.wanted = None if self.reason else take.wanted

    @property
    def is_disturbed(self) -> bool:
        """Whether other threads have seeded generators meanwhile, from which this model draws, or its loss."""
        draws = any(one.wanted is not None and (one.wanted.drew or one.wanted.loss_drew) for one in self.takes)
        return draws and seedings_elsewhere() != self._seedings

    def _samples(self, named: Mapping[str, nn.Parameter]) -> dict[str, bytes]:
        """Return some numbers of what is trained here and may be another in the model as this process has it."""
        if not self.reference.is_current:
            return {}
        mine = {name: one for executor, _ in self.held for name, one in self.holdings.named_on(executor, pieces=False)}
        if self.crew.alone:  # what is the model's own parameter cannot be another than that
            mine = {name: one for name, one in mine.items() if named.get(name) is not one}
        return samples_of(mine)

    def _of_loss(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the loss, by the names that the last stage has for them."""
        loss = self.intake.loss_fn
        named = loss.named_parameters(prefix="loss_fn") if isinstance(loss, nn.Module) else ()
        return dict(named)

    def _prepare_relay(self, told: Sequence[_Card]) -> None:
        """Have the model run by ranks that have only their own blocks of it."""
        reference, assembly = self.reference, self.engine.assembly
        order = [(name, frozenset(at for at, one in enumerate(told) if name in one.here.blocks))
                 for name in reference.places.blocks]  # fmt: skip
        homes = Counter({name: len(ranks) for name, ranks in order})
        for tensor in assembly.ties.tensors:
            used = {one for one in homes for name in tensor.names if name.startswith(f"{one}.")}
            is_between = any(name in reference.places.between for name in tensor.names)
            holders = [one.here.blocks for one in told if used & set(one.here.blocks)]
            if all(used <= set(one) for one in holders):
                continue  # who has it sees all of its uses
            if is_between or any(homes[one] > 1 for one in used):
                self.unsure.update(tensor.names)
            else:
                self.in_parts.update(tensor.names)
        here, device, randomness = Places.of(self._blocks), assembly.device, assembly.randomness
        held = {name: one for _, held in self.held for name, one in held.items()}
        if reference.is_chain:
            self.relay = Relay(self.crew, None, reference.places, here, device, randomness)
            modules = {block.name: block.module for block in self._blocks if block.name in here.blocks}
            self.by_itself, self.named = Row(self.relay, order, modules), held
            return
        plain = reference.relayed(self.model)
        missing = any(self.crew.collect("check model", plain is None))
        if plain is None or missing:
            self.reason = "the model was let go, and could not be copied"
            return
        assert isinstance(plain.model, nn.Module)
        home = None if reference.is_current and not _has_values(plain) else Home.of(self._blocks)
        self.relay = Relay(self.crew, plain.model, reference.places, here, device, randomness, home)
        # Of what lines have parts of, the model has the whole meanwhile.
        undivided = {name: one for name, one in held.items() if slice_of(one) is None}
        self.by_itself, self.named = plain, plain.named_parameters() | undivided

    def run(self, draw: int, factor: float, *, in_full: Collection[nn.Parameter] = ()) -> Sequence[Wanted | None]:
        """Run all microbatches through the model by itself; None if they cannot be compared."""
        assert self.by_itself is not None
        nothing, assembly = [None] * len(self.takes), self.engine.assembly
        assembly.randomness.step = draw
        self.engine.seed_lines()
        mine = dict.fromkeys(self.named[name] for _, held in self.held for name in held if name in self.named)
        if self.parts.is_on:  # parts are cut out of whole gradients
            in_full = [one for one in mine if one.requires_grad]
        try:
            with nullcontext() if self.relay is None else self.relay.running():
                made = plain_steps(
                    self.by_itself,
                    [take.given for take in self.takes],
                    self.intake.loss,
                    wanted=in_full,
                    sketched=[one for one in mine if one.requires_grad],
                    device=assembly.device,
                    randomness=assembly.randomness,
                    precision=assembly.precision,
                    scale=factor,
                    multiplying=lambda given: self.intake.multiplying(given.inputs, given.factors),
                    others=[*mine, *self._of_loss().values()],
                    keeping=self.intake.loss_fn,
                )
        except GaveUp as error:
            self.reason = f"each rank has only its own stages in memory, and they could not run it together: {error}"
            return nothing
        except torch.OutOfMemoryError:
            self.reason = "there is no memory for the whole model"
            return nothing
        except (RankFailed, WaitTimeout):
            raise
        except Exception as error:  # the user's own: the step will meet it, and says where
            if "allocate memory" in str(error):  # of the host, which raises no type of its own
                self.reason = "there is no memory for the whole model"
                return nothing
            self.error = error
            self.reason = f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            return nothing
        if any(one.drew_elsewhere for one in made):
            self.reason = "the model draws random numbers of Python's or numpy's, which no rank seeds"
        elif any(one.drew for one in made) and self.parts.divides_sequences:
            self.reason = "the model draws random numbers, which are others for each part of a sequence"
        elif any(one.drew for one in made) and assembly.compiler is not None:
            self.reason = "the model draws random numbers, which are others once it is compiled"
        elif any(one.loss_drew for one in made):
            self.reason = "the loss function draws random numbers, which are others in the model by itself"
            if seedings_elsewhere() != self._seedings:
                self.reason = "random numbers were drawn meanwhile, by the loss function or by another thread"
        return nothing if self.reason else made

    @cached_property
    def allowed(self) -> float:
        """How far the two may be apart."""
        return allowed_off(self.engine.assembly, {one.dtype for one in self.engine.parameters()})


def _are_stale(named: Mapping[str, nn.Parameter], told: Sequence[Mapping[str, bytes]]) -> bool:
    """Whether the model here is not what the ranks have between them."""
    everything = {name: value for one in told for name, value in one.items() if name in named}
    return first_difference([everything, samples_of({name: named[name] for name in everything})]) is not None


def _has_values(plain: ByItself) -> bool:
    """Whether all of a model is in memory, of whatever age."""
    return not any(one.is_meta for one in plain.named_parameters().values())
