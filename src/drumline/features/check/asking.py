"""Ask the model by itself: microbatches of a step run through it before the step, and witnesses watch the step.

::

    a card of every rank     whether it has the batch, and the whole model with the values that ranks train
    all of them have         each runs the whole model
    else                     they run it together, each its own blocks: see runner.py
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import RankFailed, WaitTimeout
from drumline.engine.ground import Ground
from drumline.engine.ranks.agreement import ArgumentPrint, agree_on_batch, first_difference, samples_of
from drumline.engine.unsplit.parts import Parts
from drumline.engine.unsplit.unsplit_step import UnsplitMicrobatch
from drumline.features.check.by_itself.places import Places
from drumline.features.check.by_itself.reference import Reference
from drumline.features.check.by_itself.remote_model import GaveUp
from drumline.features.check.by_itself.rounding import DRAWS, Nudge, Rounding
from drumline.features.check.by_itself.runner import Runner, together
from drumline.features.check.by_itself.wanted import PlainResult, wanted_of
from drumline.features.check.gradients.expected import ExpectedSketches
from drumline.features.check.gradients.sketch import sketch
from drumline.features.check.gradients.witness import WatchedRank, Witness
from drumline.features.check.heap import giving_back
from drumline.features.check.sample import StepSample
from drumline.features.check.units.openings import Opening, openings
from drumline.features.check.units.trail import BlockTrail
from drumline.features.check.units.units import Units
from drumline.features.check.verdict import allowed_off
from drumline.model.randomness import seedings_elsewhere
from drumline.runtime.step import Step

_NO_MEMORY = "there is no memory for the whole model"
_FINE = 1e-3  # what is allowed in float32 is less


@dataclass(frozen=True, slots=True)
class _Card:
    """What a rank has to begin with."""

    has_batch: bool
    samples: dict[str, bytes]
    is_whole: bool
    here: Places
    arguments: ArgumentPrint
    factor: float
    is_coarse: bool  # whether what it trains is of low precision


@dataclass(slots=True)
class Take:
    """One microbatch, and what the model by itself made of it."""

    microbatch: UnsplitMicrobatch
    units: Units  # of the step that it is
    wanted: PlainResult | None = None
    opening: Opening | None = None  # of its sequences, if there is no memory for more
    expected: ExpectedSketches | None = None  # of its gradients
    # Made while all that it computed was nudged a little.
    nudged: list[PlainResult | None] = field(default_factory=list)
    rounding: Rounding = field(default_factory=Rounding)
    again: PlainResult | None = None  # what the model made when it was run once more
    totals: dict[nn.Parameter, Tensor] = field(default_factory=dict)  # of experts that tokens of all lines go through
    ratio: float = 1.0  # what it counts more in the step than was known before
    counts: bool = True  # whether it is a part of the loss: some losses must be seen before this is known
    is_weighed_by_parts: bool = False  # whether parts of loss_fn have shares of their own in its units


class Asking:
    """What the model by itself makes of `num_microbatches` of a step."""

    def __init__(self, reference: Reference, ground: Ground, parts: Parts, num_microbatches: int) -> None:
        self.reference, self.parts, self.num_microbatches = reference, parts, num_microbatches
        self.crew, self.intake = ground.crew, ground.intake
        self.engine, self.holdings = ground.engine, ground.holdings
        self.ranks = [WatchedRank(e, dict(self.holdings.named_on(e, pieces=False))) for e in self.engine.executors]
        self.takes: list[Take] = []
        self.runner: Runner | None = None
        self.named: Mapping[str, nn.Parameter] = {}  # the model's own
        self.reason = ""  # why it is not checked
        self.error: Exception | None = None  # what the model by itself raised
        self.measures = False  # whether rounding is measured
        self.trail = BlockTrail()  # of the model by itself
        self.seconds = 0.0
        self._seedings = seedings_elsewhere()
        self._room = ExitStack()  # open until the step ends

    @property
    def held_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """What the ranks here train, by name."""
        return [pair for rank in self.ranks for pair in rank.named.items()]

    # ---- before the step ---------------------------------------------------------------------------------------------

    def before(self, step: Step, arguments: Any, target: Any, factor: float, whole: tuple[Any, Any] | None) -> None:
        """Run microbatches through the model by itself, and have the step watched; all ranks call it.

        `factor` is what the step will multiply the loss's gradient by. `whole` are batch and target with whole
        sequences, if lines of a mesh have parts of them.
        """
        started = time.perf_counter()
        if not self.crew.alone:  # this process may have no room for more than its part
            self._room.enter_context(giving_back())
        with self._whole() as parts:
            self._ask(step, arguments, target, factor, whole)
        for take in self.takes:
            take.wanted, take.nudged = parts(take.wanted), [parts(result) for result in take.nudged]
            take.rounding = Rounding.between(take.wanted, take.nudged)
        if self.parts.is_on:
            self.named = self._own_parameters()
        for take in self.takes:
            if take.wanted is not None:
                take.expected = ExpectedSketches.of(take.wanted.sketches, self.allowed, take.rounding.gradients)
        for rank in self.ranks:
            rank.watch([self._witness(rank, take) for take in self.takes])
        self.seconds = time.perf_counter() - started

    def leave(self) -> None:
        """Watch no longer: the step has ended, or failed on its way."""
        self._room.close()
        for rank in self.ranks:
            rank.leave()

    def _witness(self, rank: WatchedRank, take: Take) -> Witness:
        if take.expected is None:  # nothing is compared here, and other ranks compare what they share with this one
            shared = {tensor.name for tensor in self.engine.assembly.ties.tensors if tensor.is_copied}
            only = {param for name, param in rank.named.items() if name in shared or self.parts.is_settled_later(param)}
            return Witness(take.units, only)
        witness = Witness(take.units, trail=BlockTrail() if take.units.are_several else None)
        limits = take.expected.limits()
        uses = Counter(param for stage in rank.executor.stages.values() for param in stage.parameters)
        for name, param in rank.named.items():
            own_parameter = self.named.get(name)
            # Else it sees parts of a sum.
            is_whole = uses[param] == 1 and not self.parts.is_settled_later(param)
            if own_parameter is not None and own_parameter in limits and is_whole:
                witness.expected[param] = take.expected.sketches[own_parameter], limits[own_parameter]
        return witness

    @contextmanager
    def _whole(self) -> Iterator[Callable[[PlainResult | None], PlainResult | None]]:
        """Have the model as one process has it inside; what is given turns what was wanted of it into that of parts."""
        if not self.parts.is_on or self.reference.whole is None:
            yield lambda wanted: wanted
            return
        wholes: dict[str, nn.Parameter] = {}
        lines = self.parts

        def parts(wanted: PlainResult | None) -> PlainResult | None:
            if wanted is None:
                return None
            own_parameters, gradients = self._own_parameters(), wanted.gradients
            each = {own_parameters[name]: gradients[whole] for name, whole in wholes.items() if whole in gradients}
            # Those of experts stay whole until all lines have added up theirs.
            each = {p: whole if lines.is_summed(p) else lines.part_of(p, whole) for p, whole in each.items()}
            compared = {param: sketch(part) for param, part in each.items() if not lines.is_summed(param)}
            return replace(wanted, gradients=each, sketches=compared)

        with lines.whole():
            yield parts
            wholes.update(self.reference.whole.named_parameters())

    def _own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the model's parameters by name; of those that are held here, what is held."""
        plain = self.reference.whole
        named = {} if plain is None else plain.named_parameters()
        return named | dict(self.held_parameters)

    def _ask(self, step: Step, arguments: Any, target: Any, factor: float, sequences: tuple[Any, Any] | None) -> None:
        """Choose microbatches, and run them through the model by itself."""
        number, reference = step.number, self.reference
        program = self.engine.assembly.program
        copies = [program.placement.rank_of(0, at) for at in range(program.num_units)]
        sample = StepSample(
            self.crew, self.intake, self.parts, number, arguments, target, sequences, copies, self.num_microbatches
        )
        local = sample.cut()
        named = {} if reference.whole is None else reference.whole.named_parameters()
        here, mine = Places.of(self.engine.blocks()), self._samples(named)
        is_whole = reference.is_current and reference.fits(self.engine.assembly.device)
        # Ranks here share one batch.
        own_print = ArgumentPrint.of(None, None) if self.crew.alone else ArgumentPrint.of(arguments, target)
        is_coarse = self.allowed > _FINE
        cards = self.crew.collect("check", _Card(local is not None, mine, is_whole, here, own_print, factor, is_coarse))
        # Parts are added up in another order than the whole, and rounded in between: in low precision that shows.
        self.measures = self._rounds_elsewhere and any(answer.is_coarse for answer in cards)
        # Before differences are put down to the model.
        agree_on_batch([answer.arguments for answer in cards], number, self.crew.naming)
        microbatches = local if local is not None and all(answer.has_batch for answer in cards) else None
        microbatches = microbatches or sample.passed_on(self.engine.ends)
        self.takes = [Take(each, Units(each.number, self.intake.num_slices)) for each in microbatches]
        if len({answer.factor for answer in cards}) > 1:
            self.reason = "ranks scale the loss differently"  # which they tell each other after the step
        elif all(answer.is_whole for answer in cards) and not _are_stale(named, [answer.samples for answer in cards]):
            assert reference.whole is not None
            self.runner = Runner(reference.whole, named)
        elif self.parts.is_on and reference.is_chain:
            self.reason = "each rank has only its own stages in memory"
        else:
            places = [answer.here for answer in cards]
            self.runner = together(reference, self.crew, self.engine, dict(self.held_parameters), places)
            self.reason = "the model was freed, and could not be copied" if self.runner is None else ""
        self.named = {**({} if self.runner is None else self.runner.named), **self._of_loss()}
        if not self.reason:
            results = self.run(step.draw, factor)
            for take, wanted in zip(self.takes, results, strict=True):
                take.wanted = wanted
            if self.reason == _NO_MEMORY and self._is_here and self.intake.num_slices > 1:
                self._open(step.draw)
        for seed in range(DRAWS) if self.measures else ():
            if all(self.crew.collect("check rounding", not self.reason)):
                with Nudge(seed):
                    nudged = self.run(step.draw, factor)
                for take, wanted in zip(self.takes, nudged, strict=True):
                    take.nudged.append(wanted)
                    take.wanted = None if self.reason else take.wanted

    @property
    def is_disturbed(self) -> bool:
        """Whether other threads have seeded generators meanwhile, from which this model draws, or its loss."""
        draws = any(
            take.wanted is not None and (take.wanted.outcome.drew or take.wanted.outcome.loss_drew)
            for take in self.takes
        )
        return draws and seedings_elsewhere() != self._seedings

    def _samples(self, named: Mapping[str, nn.Parameter]) -> dict[str, bytes]:
        """Return some numbers of what is trained here and may be another in the model as this process has it."""
        if not self.reference.is_current:
            return {}
        ranks = [rank.executor for rank in self.ranks]  # which hold the whole of what lines divide meanwhile
        mine = {name: param for each in ranks for name, param in self.holdings.named_on(each, pieces=False)}
        if self.crew.alone:  # what is the model's own parameter cannot be another than that
            mine = {name: param for name, param in mine.items() if named.get(name) is not param}
        return samples_of(mine)

    def _of_loss(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the loss, by the names that the last stage has for them."""
        loss = self.intake.loss_fn
        named = loss.named_parameters(prefix="loss_fn") if isinstance(loss, nn.Module) else ()
        return dict(named)

    def _open(self, draw: int) -> None:
        """Run as much of the sequences' first tokens as there is memory for, forward alone."""
        for take in self.takes:
            for number, inputs in openings(take.microbatch.inputs, take.units.count):
                self.reason = ""
                result = self.run(draw, 0.0, [replace(take.microbatch, inputs=inputs, target=None)], goes_back=False)[0]
                if result is not None and not result.outcome.drew:  # what is drawn depends on the length
                    take.opening = Opening(number, result.outcome.output)
                if result is not None:
                    break
        self.reason = _NO_MEMORY

    def run(
        self,
        draw: int,
        factor: float,
        microbatches: Sequence[UnsplitMicrobatch] = (),
        *,
        in_full: bool = False,
        goes_back: bool = True,
    ) -> Sequence[PlainResult | None]:
        """Run all microbatches, or other ones, through the model by itself; None if they cannot be compared.

        All gradients are sketched; if they are wanted `in_full`, they are copied too. Without a backward it
        has no loss.
        """
        assert self.runner is not None
        nothing, assembly = [None] * len(self.takes), self.engine.assembly
        assembly.randomness.step = draw
        self.engine.seed_lines()
        mine = dict.fromkeys(self.named[name] for name, _ in self.held_parameters if name in self.named)
        try:
            with nullcontext() if self.runner.relay is None else self.runner.relay.running():
                results = wanted_of(
                    self.runner.model,
                    microbatches or [take.microbatch for take in self.takes],
                    self.intake.loss if goes_back else _no_loss,
                    trained=[param for param in mine if param.requires_grad],
                    in_full=in_full or self.parts.is_on,  # parts are cut out of whole gradients
                    device=assembly.device,
                    randomness=assembly.randomness,
                    precision=assembly.precision,
                    scale=factor,
                    multiplying=self._around,
                    others=[*mine, *self._of_loss().values()],
                    keeping=self.intake.loss_fn,
                    goes_back=goes_back,
                )
        except GaveUp as error:
            self.reason = f"each rank has only its own stages in memory, and they could not run it together: {error}"
            return nothing
        except (RankFailed, WaitTimeout):
            raise
        except Exception as error:  # the user's own: the step will meet it, and says where
            # Hosts raise no type of their own.
            if isinstance(error, torch.OutOfMemoryError) or "allocate memory" in str(error):
                self.reason = _NO_MEMORY
                return nothing
            self.error = error
            self.reason = f"it raises {type(error).__name__}: {str(error).partition(chr(10))[0]:.200}"
            return nothing
        if any(result.drew_elsewhere for result in results):
            self.reason = "the model draws random numbers of Python's or numpy's, which no rank seeds"
        elif any(result.outcome.drew for result in results) and self.parts.divides_sequences:
            self.reason = "the model draws random numbers, which are others for each part of a sequence"
        elif any(result.outcome.drew for result in results) and assembly.compiler is not None:
            self.reason = "the model draws random numbers, which are others once it is compiled"
        elif any(result.outcome.loss_drew for result in results):
            self.reason = "the loss function draws random numbers, which differ in the unsplit model"
            if seedings_elsewhere() != self._seedings:
                self.reason = "random numbers were drawn meanwhile, by the loss function or by another thread"
        return nothing if self.reason else results

    @contextmanager
    def _around(self, microbatch: UnsplitMicrobatch) -> Iterator[None]:
        """Multiply parts of the model's own loss inside, and note what blocks return where units will be compared."""
        assert self.runner is not None
        modules: dict[str, nn.Module] = {}
        model = self.runner.model.model
        if self.intake.num_slices > 1 and self._is_here and isinstance(model, nn.Module):
            there = dict(model.named_modules())
            modules = {name: there[name] for name in self.reference.names if name in there}
        with (
            self.trail.following(modules, microbatch.number),
            self.intake.multiplying(microbatch.inputs, microbatch.factors),
        ):
            yield

    @property
    def _is_here(self) -> bool:
        """Whether this process runs all of the model."""
        return self.runner is not None and self.runner.relay is None

    @property
    def _rounds_elsewhere(self) -> bool:
        """Whether the step adds up parts, so that it rounds at other places than one process."""
        return self.parts.is_on or self.intake.num_slices > 1

    @cached_property
    def allowed(self) -> float:
        """How far the two may be apart."""
        return allowed_off(self.engine.assembly, {param.dtype for param in self.engine.parameters()})


def _no_loss(output: Any, target: Any) -> Tensor:
    return torch.zeros(())


def _are_stale(named: Mapping[str, nn.Parameter], samples: Sequence[Mapping[str, bytes]]) -> bool:
    """Whether the model here is not what the ranks have between them."""
    everything = {name: value for entry in samples for name, value in entry.items() if name in named}
    return first_difference([everything, samples_of({name: named[name] for name in everything})]) is not None
