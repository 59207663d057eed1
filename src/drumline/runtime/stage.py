"""One stage on one rank: F, B, I and W of any microbatch, and what is kept between them.

The stage's blocks run in segments. A checkpointed segment keeps only its input and runs again before its backward.
Every segment begins with inputs detached from the graph before it, so that a backward goes segment by segment:

    F   x ──[ segment 0 ]──► h ──[ segment 1 ]──► y          each keeps its leaves (x, h) and its roots (h, y)
    B   gradient of x ◄── gradient of h ◄── gradient of y

Roots are kept as places in the graph, not as tensors: an output that was sent is not kept for its backward.

Gradients flow back only as far as something trains. A stage without a backward keeps nothing. A stage with only I keeps
no tape, and frees a microbatch after I. Blocks below the lowest trained one record no graph.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.core.rules import Backward
from drumline.model.block import Block
from drumline.model.catalogue import places_in
from drumline.model.hooks import with_holders
from drumline.model.precision import Precision
from drumline.model.randomness import HostChance, Randomness
from drumline.model.values import mapped, pack, unpack
from drumline.runtime.backward.compiled import Compiler
from drumline.runtime.backward.guards import NOTHING, looked_after
from drumline.runtime.backward.hooked import refusing_changed_sums, refusing_updates, with_hooks
from drumline.runtime.backward.tape import Gradients, Tape, accumulate, add_gradients, merged
from drumline.runtime.recomputing import GraphNeeded, discarding, uses_kept
from drumline.runtime.segment import Pass, Segment, versions_of

Loss = Callable[[Any, Any], Tensor | None]


class Partly(NamedTuple):
    """What a stage passes on if some of its floating-point tensors have no gradient: which ones these are."""

    plain: tuple[int, ...]
    value: Any


class Stage:
    """The blocks of one stage, with what its microbatches have left there.

    `loss` is given to the last stage: it takes the output and the target, and F returns its value. `kind` is how much
    of a backward the program has for this stage, `trained_below` whether an earlier stage needs the gradient of its
    input.
    """

    def __init__(
        self,
        index: int,
        blocks: Sequence[Block],
        randomness: Randomness,
        *,
        checkpointed: Collection[str] = (),
        loss: Loss | None = None,
        split: Collection[int] = (),
        compiler: Compiler | None = None,
        precision: Precision | None = None,
        kind: Backward = Backward.WHOLE,
        trained_below: bool | None = None,
    ) -> None:
        self.index = index
        self.blocks = tuple(blocks)
        self.loss = loss
        self.split = frozenset(split if kind is Backward.WHOLE else ())
        self.kind = kind
        self.trained_below = index > 0 if trained_below is None else trained_below
        self.randomness = randomness
        self.precision = Precision() if precision is None else precision
        compiled = None if compiler is None else partial(compiler.function, stage=index, split=bool(self.split))
        grouped = groupby(blocks, key=lambda block: block.name in checkpointed)
        self.segments = [Segment(list(run), checkpointed=checkpoint, compiled=compiled) for checkpoint, run in grouped]
        self.segments[0].receives = index > 0
        self.segments[-1].seal = getattr(blocks[-1].module, "seal", None)
        if loss is not None and self.segments[-1].checkpointed:
            self.segments.append(Segment([], checkpointed=False))  # the loss itself is cheap, so it runs only once
        self.passes: dict[int, list[Pass]] = {}
        self.outputs: dict[int, Any] | None = None  # outputs of a training step, if wanted
        self.beside: Callable[[], Iterable[Tensor]] = tuple  # returns what is kept for its backwards beside its passes
        self.at_peak: Callable[[], object] | None = None  # called when everything recomputed is held at once
        self.is_doubled = False  # whether there is another copy, which runs other microbatches
        self.keeps_latest = False  # whether somebody may want to run it again on an input
        self.latest: tuple[int, Any] | None = None  # the latest microbatch of this step, and its input
        self._signature: list[tuple[int, bool]] | None = None
        self.hooked: list[nn.Parameter] = []  # parameters with hooks, in this step
        self._hooks_are_known = False
        self._chance: HostChance | None = None  # the latest in this step
        self.renew()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trainable parameters, each once."""
        return self._parameters[:]

    @property
    def all_parameters(self) -> list[nn.Parameter]:
        """Its parameters, each once, frozen ones too."""
        return list(dict.fromkeys(param for block in self.blocks for param in block.module.parameters()))

    @property
    def lent(self) -> list[nn.Parameter]:
        """The parameters of other stages of this process to whose gradients its loss adds."""
        return [param for segment in self.segments for param in segment.lent]

    def renew(self) -> bool:
        """Follow parameters that were frozen, unfrozen or replaced since the last step; return whether any was."""
        modules = (module for segment in self.segments for module in segment.modules)
        owned = [param for module in modules for param in module._parameters.values() if param is not None]
        signature = [(id(param), param.requires_grad) for param in owned]
        if signature == self._signature:
            return False
        self._signature = signature
        for segment in self.segments:
            segment.renew()
        self._parameters = list(dict.fromkeys(param for segment in self.segments for param in segment.parameters))
        return True

    def split_only(self, microbatches: Collection[int]) -> None:
        """From the next step on, split the backward of these microbatches, and run others whole."""
        self.split = frozenset(microbatches if self.kind is Backward.WHOLE else ())

    def begin(self) -> None:
        """Start a step: nothing is held, and the stand-ins follow parameters that moved."""
        self.passes.clear()
        self._chance = None
        hooked = with_hooks(self._parameters)
        holders = with_holders(self._parameters) if self.is_doubled or self.split else []
        if self.is_doubled and holders:
            hooked = list(dict.fromkeys([*hooked, *holders]))
        self._hooks_are_known &= len(hooked) == len(self.hooked)
        self.hooked = hooked
        for segment in self.segments:
            if segment.checkpointed:
                segment.frozen.begin()
        if self.split:
            self.refresh()
            for segment in self.segments:
                segment.look_for_hooks(holders)

    def refresh(self) -> None:
        """Let the stand-ins of a split backward follow parameters that moved to other memory."""
        if self.split:
            for segment in self.segments:
                segment.splitter.refresh()

    def forward(self, microbatch: int, value: Any, target: Any = None, keep: bool = True) -> Any:
        """Run F and return the output, or on the last stage the loss; both are detached.

        Without `keep`, keep nothing for a backward; the last stage returns the output and, given a target, the loss.
        """
        with self.precision.autocast:
            plain, value = value if isinstance(value, Partly) else ((), value)
            if self.keeps_latest:
                self.latest = microbatch, value
            if not keep:
                return self._evaluated(microbatch, value, target)
            passes: list[Pass] = []
            wants_gradient = self.trained_below
            for segment in self.segments:
                this = Pass(value, wants_gradient, plain)
                # If nothing trains so far, there is no graph to save by running again.
                this.again = segment.checkpointed and (wants_gradient or bool(segment.parameters))
                if this.again:
                    value = self._first_run(segment, this, microbatch)
                    wants_gradient = True
                else:
                    ends = self.loss is not None and segment is self.segments[-1]
                    loss = partial(self._loss, microbatch, target) if ends else None
                    if microbatch in self.split:
                        value = self._with_graph(segment, this, microbatch, loss)
                    else:  # the same without a call, for most forwards of a schedule
                        guarded = segment.receives and len(this.leaves) > 1
                        look = segment.ledger if segment.ledger.is_new else NOTHING
                        with torch.enable_grad(), look, looked_after(this.leaves) if guarded else NOTHING:
                            tensor = this.leaves[0] if this.form is None else unpack(this.leaves, this.form)
                            output = segment.run(tensor, microbatch, self.randomness)
                            value = segment.ended(this, output if loss is None else loss(output))
                    wants_gradient = bool(this.wanted)
                plain = this.plain
                passes.append(this)
            if self.kind is Backward.NONE:
                self._refuse_hidden(wants_gradient)
                return value
            self.passes[microbatch] = passes
            return Partly(plain, value) if plain and self.loss is None else value

    @torch.no_grad()
    def repeated(self, microbatch: int, value: Any) -> Any:
        """Run the blocks on an input once more, and return what the last one does."""
        with self.precision.autocast:
            for segment in self.segments:
                value = segment.run(value, microbatch, self.randomness)
        return value

    @torch.no_grad()
    def _evaluated(self, microbatch: int, value: Any, target: Any) -> Any:
        for segment in self.segments:
            with looked_after(pack(value)[0] if segment.receives else ()):
                value = segment.run(value, microbatch, self.randomness)
        if self.loss is None:
            return value
        output = None if target is None else self.loss(value, target)
        return value, None if output is None else self.precision.full(output)

    def _with_graph(
        self, segment: Segment, this: Pass, microbatch: int, loss: Callable[[Any], Tensor] | None = None
    ) -> Any:
        """Run a segment with its graph; split weight gradients are left to W, by compiled code itself."""
        this.tape = Tape() if microbatch in self.split and not segment.runs_whole else None
        with torch.enable_grad():
            if this.tape is not None and segment.compiled is None:
                output = segment.recorded(this, this.tape, microbatch, self.randomness, loss)
                if segment.runs_whole:  # as its first forward showed
                    this.tape = None
                return segment.ended(this, output)
            with looked_after(this.leaves if segment.receives else ()):
                output = segment.run(this.value(), microbatch, self.randomness)
                return segment.ended(this, output if loss is None else loss(output))

    def _first_run(self, segment: Segment, this: Pass, microbatch: int) -> Any:
        """Run a segment that will run again, as in training, and keep only its value."""
        this.buffers, this.frozen = segment.buffers.save(), segment.frozen.save()
        chance = HostChance(since=self._chance) if segment.suspects else None
        with segment.ledger if segment.ledger.is_needed else NOTHING:
            try:
                with torch.enable_grad() if segment.needs_graph else discarding():
                    value = self._on_input(segment, this, microbatch)
            except GraphNeeded:
                segment.needs_graph = True
                segment.buffers.undo(this.buffers)
                segment.frozen.undo(this.frozen)
                segment.ledger.rewind()
                drawn = nullcontext() if chance is None else chance.again()
                with torch.enable_grad(), drawn:
                    value = self._on_input(segment, this, microbatch)
        if chance is not None:
            self._chance = HostChance(since=chance)
            this.chance = chance if chance.differs_from(self._chance) else None
        this.state = segment.ledger.before
        segment.buffers.learn()
        segment.frozen.learn(this.frozen)
        return mapped(value, Tensor.detach)

    def _on_input(self, segment: Segment, this: Pass, microbatch: int) -> Any:
        """Run a segment on its input, or on a copy if it changes or may change the input."""
        tensors = this.leaves if segment.keeps_input else [leaf.clone() for leaf in this.leaves]
        versions = versions_of(tensors)
        value = segment.run(unpack(tensors, this.form), microbatch, self.randomness)
        if segment.keeps_input:
            segment.unchanged(tensors, versions)
        elif versions_of(tensors) == versions:
            segment.keeps_input = not segment.on_copies
        else:
            segment.on_copies = True
        return value

    def _refuse_hidden(self, trains: bool) -> None:
        """Refuse a stage that trains something although all its parameters are frozen."""
        if trains:
            raise ModelError(
                f"nothing up to stage {self.index} has trainable parameters, but its output requires grad",
                expected="every trained tensor to be a parameter of a block",
                fix="register the tensor: self.scale = nn.Parameter(scale)",
            )

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run B: add to the parameters' gradients, and return those of the stage's inputs."""
        for segment, this in zip(reversed(self.segments), reversed(self.passes[microbatch]), strict=True):
            self._again(segment, this, microbatch)
            gradients = self._added(this, gradients)
        del self.passes[microbatch]
        return tuple(gradients)

    def _refusing_updates(self) -> AbstractContextManager[None]:
        """Refuse hooks that update parameters in the middle of a step; the first time, compare values too."""
        by_value, self._hooks_are_known = not self._hooks_are_known, True
        updates = refusing_updates(self.hooked, by_value=by_value)
        return self._refusing_changes(updates) if self.is_doubled else updates

    @contextmanager
    def _refusing_changes(self, updates: AbstractContextManager[None]) -> Iterator[None]:
        hooked = {id(param) for param in self.hooked}
        named = {
            place.name: place.tensor
            for block in self.blocks
            for place in places_in(block)
            if isinstance(place.tensor, nn.Parameter) and id(place.tensor) in hooked
        }
        with updates, refusing_changed_sums(named):
            yield

    def _uses_kept(self) -> ModelError:
        return uses_kept(block.name for block in self.blocks)

    def _added(self, this: Pass, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Add to the parameters' gradients of a pass, and return those of its inputs."""
        roots, tensors = this.paired(gradients)
        try:
            if roots and self.hooked:
                with self._refusing_updates():
                    add_gradients(roots, tensors)
            elif roots:
                add_gradients(roots, tensors)
        except GraphNeeded as error:
            raise self._uses_kept() from error
        return tuple([leaf.grad for leaf in this.leaves])

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Run I: return the gradients of the stage's inputs, and keep what W needs, if there is a W."""
        if self.kind is Backward.INPUT:
            return self.backward(microbatch, gradients)
        passes = self.passes[microbatch]
        for segment, this in zip(reversed(self.segments), reversed(passes), strict=True):
            self._again(segment, this, microbatch)
            if this.tape is None:
                gradients = self._added(this, gradients)
                this.leaves, this.roots = (), []
                continue
            roots, given_tensors = this.paired(gradients)
            wanted = [leaf for leaf in this.leaves if leaf.requires_grad]
            tensors: tuple[Tensor | None, ...] = (None,) * len(wanted)
            if roots:
                trained = [*segment.parameters, *segment.lent]
                try:
                    tensors = this.tape.backward_input(roots, given_tensors, wanted, trained)
                except GraphNeeded as error:
                    raise self._uses_kept() from error
            each = iter(tensors)
            gradients = tuple(next(each) if leaf.requires_grad else None for leaf in this.leaves)
            this.leaves, this.roots = (), []
        return tuple(gradients)

    def backward_weight(self, microbatch: int) -> None:
        """Run W: add to the parameters' gradients, and free the microbatch."""
        self.add(self.weight_gradients(microbatch))

    def add(self, gradients: Gradients) -> None:
        """Add to the parameters' gradients what W has computed."""
        with self._refusing_updates() if self.hooked else NOTHING:
            accumulate(gradients)

    def backward_weight_merged(self, microbatches: Sequence[int]) -> None:
        """Run W of several microbatches as one larger product each; this sums in a different order than one by one.

        Hooks see the gradient of each microbatch, so parameters that have any keep a stage from merging.
        """
        if self.hooked:
            for microbatch in microbatches:
                self.backward_weight(microbatch)
            return
        passes = [self.passes.pop(microbatch) for microbatch in microbatches]
        for each in reversed(list(zip(*passes, strict=True))):
            if tapes := [this.tape for this in each if this.tape is not None]:
                accumulate(merged(tapes))

    def weight_gradients(self, microbatch: int) -> Gradients:
        """Return what W of a microbatch adds to each parameter, and free what was kept for it."""
        passes = self.passes.pop(microbatch)
        return [pair for this in reversed(passes) if this.tape for pair in this.tape.weight_gradients()]

    def _loss(self, microbatch: int, target: Any, output: Any) -> Tensor:
        """Compute the loss of an output."""
        if self.outputs is not None:
            self.outputs[microbatch] = mapped(output, Tensor.detach)
        tensor = None if self.loss is None else self.loss(output, target)
        assert tensor is not None, "a step that trains has a loss"
        return self.precision.full(tensor)

    def _again(self, segment: Segment, this: Pass, microbatch: int) -> None:
        """Recompute a checkpointed segment, on the buffers and the state that its first run saw."""
        if this.again:
            drawn = nullcontext() if this.chance is None else this.chance.again()
            state = NOTHING if this.state is None or not segment.ledger.changes else this.state.put_in()
            frozen = segment.frozen.as_they_were(this.frozen) if this.frozen else NOTHING
            with segment.buffers.as_they_were(this.buffers), self.precision.autocast, drawn, state, frozen:
                self._with_graph(segment, this, microbatch)
            this.buffers, this.frozen, this.chance, this.state = {}, {}, None, None
            this.again = False
            if self.at_peak is not None:
                self.at_peak()
