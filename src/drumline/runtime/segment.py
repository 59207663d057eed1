"""Consecutive blocks of a stage that are run, kept and backpropagated together.

    value ──► Pass: its leaves, detached ──► Segment.run: the blocks ──► Segment.ended: roots ──► value, detached

Roots are kept as places in the graph, not as tensors: an output that was sent is not kept for its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.hooks import is_hooked
from drumline.model.kept_state.keeping import StateBefore
from drumline.model.loss.factors import Sheet
from drumline.model.precision import cast_apart
from drumline.model.randomness import HostChance, Randomness, draws, may_draw
from drumline.model.values import mapped, pack, unpack
from drumline.runtime.backward.compiled import Named
from drumline.runtime.backward.guards import (
    Checkpoints,
    Lookout,
    TakesGradients,
    begun,
    looked_after,
    refuse_foreign,
)
from drumline.runtime.backward.owners import Splitter
from drumline.runtime.backward.tape import Tape
from drumline.runtime.frozen_weights import FrozenWeights
from drumline.runtime.ledger import Ledger
from drumline.runtime.recomputing import Buffers


class Pass:
    """One microbatch's pass through one segment: what its backward needs."""

    __slots__ = ("again", "buffers", "chance", "form", "frozen", "leaves", "plain", "roots", "state", "tape", "wanted")

    def __init__(self, value: Any, wants_gradient: bool, plain: Collection[int] = ()) -> None:
        """Begin with a value, detached from its graph; the tensors at positions `plain` need no gradient."""
        tensors: Sequence[Tensor]
        self.form: Any
        tensors, self.form = ((value,), None) if isinstance(value, Tensor) else pack(value)
        self.leaves: Sequence[Tensor] = [tensor.detach() for tensor in tensors]
        if wants_gradient:
            for at, leaf in enumerate(self.leaves):
                if at not in plain and _has_gradient(leaf):
                    begun(leaf).requires_grad_()
        self.roots: list[GradientEdge] = []
        self.wanted: list[int] = []  # the outputs for which a gradient can come back
        self.plain: tuple[int, ...] = ()  # those that could have a gradient but have none
        self.tape: Tape | None = None
        self.again = False  # whether the segment must first run again
        self.buffers: dict[int, Tensor] = {}
        self.frozen: dict[int, Tensor] = {}  # frozen weights that its blocks change
        self.chance: HostChance | None = None  # Python's random state at its start, if it drew any
        self.state: StateBefore | None = None  # what else its blocks kept then, if they changed it

    def value(self) -> Any:
        """Return the input of the blocks."""
        return unpack(self.leaves, self.form)

    def paired(self, gradients: Sequence[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Return the roots for which a gradient came back, each with its gradient."""
        roots, tensors = [], []
        for root, index in zip(self.roots, self.wanted, strict=True):
            gradient = gradients[index]
            if gradient is not None:
                roots.append(root)
                tensors.append(gradient)
        return roots, tensors


class Segment:
    """Consecutive blocks that are run, kept and backpropagated together."""

    def __init__(
        self,
        blocks: Sequence[Block],
        *,
        checkpointed: bool,
        compiled: Callable[[Named], Callable[[Any], Any]] | None = None,
    ) -> None:
        self.blocks = [(block.name, block.module) for block in blocks]
        self.compiled = compiled
        self.whole: list[Callable[[Any], Any]] = [block.module for block in blocks]
        self.pieces: list[tuple[str, Callable[[Any], Any]]] = list(self.blocks)
        if compiled is not None and blocks:
            self.whole = [compiled(self.blocks)]
            self.pieces = [(name, compiled([(name, module)])) for name, module in self.blocks]
        self.sheet: Sheet | None = getattr(blocks[-1].module, "sheet", None) if blocks else None
        self.seal: Callable[[Any], Any] | None = None  # drops what need not travel from the stage
        self.checkpointed = checkpointed
        self.lends: Callable[[], Collection[nn.Parameter]] | None = None  # what its loss uses of other stages here
        self.has_loss = False  # whether a loss function is run after its blocks
        self.receives = True  # whether its input comes from earlier blocks, not from the batch
        self.modules = [module for block in blocks for module in block.module.modules()]
        self.buffers = Buffers([block.module for block in blocks])
        self.frozen = FrozenWeights(blocks if checkpointed else ())
        self.suspects = {block.name for block in blocks if may_draw(block.module)}  # they may draw random numbers
        self.ledger = Ledger([block for block in blocks if block.name in self.suspects], refuses=checkpointed)
        # Assumed to draw nothing until it does. With buffers a run could not be repeated, so this is not tried.
        self.quiet = not self.suspects or not self.buffers.places
        if compiled is not None and any(draws(module) for _, module in self.blocks):
            self.quiet = False  # compiled once, in pieces, rather than twice
        self.on_copies = False  # whether the blocks change their input in place
        self.keeps_input = False  # whether they were seen not to do so
        self.needs_graph = False  # whether a first run that saves no tensors failed
        self.takes_gradients: bool | None = None  # whether they take gradients inside their forward; None: not known
        self.is_reentrant = False  # whether they have reentrant checkpoints inside

    def renew(self) -> None:
        """Follow parameters that were frozen, unfrozen or replaced; its stage calls it at first too."""
        owned = [param for module in self.modules for param in module._parameters.values() if param is not None]
        self.looked_at = False  # whether it was checked that its graph has only its own parameters
        self.since = 0  # the number of autograd's next node when its last forward began, until it was looked at
        self.is_hooked: bool | None = None  # whether a hook is where autograd adds up a gradient; None: not known
        self.lent: list[nn.Parameter] = []  # parameters of other stages that its loss uses, a penalty on all weights
        self.parameters = [param for param in dict.fromkeys(owned) if param.requires_grad]
        # Compiled code splits its backward by itself.
        self.splitter = Splitter([module for _, module in self.blocks] if self.compiled is None else [])

    @property
    def runs_whole(self) -> bool:
        """Whether its backward cannot be split: I runs all of it, and nothing is left for W."""
        return self.is_reentrant or bool(self.is_hooked)

    def look_for_hooks(self, holders: Sequence[nn.Parameter]) -> None:
        """Look for hooks that only run where autograd adds up a gradient; after the first time, for nodes that live.

        `holders` are the stage's parameters whose nodes live.
        """
        own_ids = {id(param) for param in self.parameters} if holders else set()
        looked_at = self.parameters if self.is_hooked is None else [p for p in holders if id(p) in own_ids]
        self.is_hooked = any(map(is_hooked, looked_at))

    def run(self, value: Any, microbatch: int, randomness: Randomness, tape: Tape | None = None) -> Any:
        """Run the blocks, seeding those that may draw random numbers unless none has drawn so far.

        If they change their input in place, they get a copy of it, because a leaf must not change.
        """
        self.since = self.since if self.looked_at else torch._C._autograd._get_sequence_nr()
        value_given = mapped(value, Tensor.clone) if self.on_copies else value
        value_given = cast_apart(value_given) if torch._C._is_any_autocast_enabled() else value_given
        if self.sheet is not None:
            self.sheet.now = microbatch
        try:
            if self.quiet and not self.ledger.changes:
                versions = versions_of(value_given) if self.suspects else []
                if self.suspects:
                    randomness.watch()
                output = value_given
                for run in self.whole:
                    output = run(output)
                if not self.suspects or not randomness.drew():
                    return output if self.seal is None else self.seal(output)
                self.quiet = False  # it drew without being seeded: run all of it again
                self.unchanged(value_given, versions)
                self._undo(tape)
            for name, run in self.pieces:
                if name in self.suspects:
                    randomness.apply(microbatch, name)
                value_given = run(value_given)
            return value_given if self.seal is None else self.seal(value_given)
        except RuntimeError as error:
            if self.on_copies or "a leaf Variable that requires grad" not in str(error) or not pack(value)[0]:
                raise
            self.on_copies = True
            self._undo(tape)
        return self.run(value, microbatch, randomness, tape)

    def _undo(self, tape: Tape | None) -> None:
        """Undo what a run has recorded and changed, because it starts again."""
        self.ledger.rewind()
        if tape is not None:
            tape.records.clear()

    def recorded(
        self, this: Pass, tape: Tape, microbatch: int, randomness: Randomness, loss: Callable[[Any], Any] | None
    ) -> Any:
        """Run the blocks, and a loss, with weight gradients left to W unless the forward takes gradients itself."""
        if self.takes_gradients is None and self.ledger.is_needed and not self.ledger.is_open:
            with self.ledger:
                return self.recorded(this, tape, microbatch, randomness, loss)
        if not self.takes_gradients:
            before = self.buffers.copies() if self.takes_gradients is None else None
            versions = [leaf._version for leaf in this.leaves]
            lookout = Lookout(tape)
            new_loss = None
            try:
                with lookout:
                    self.splitter.start(tape)
                    try:
                        new_loss = self.run(this.value(), microbatch, randomness, tape)
                    finally:
                        self.splitter.stop()
                    new_loss = new_loss if loss is None else loss(new_loss)
            except TakesGradients:
                pass
            if not lookout.must_restart:
                self.takes_gradients = False
                return new_loss
            self.unchanged(this.leaves, versions)
            self._undo(tape)
            if before is not None:
                self.buffers.put_back(before)
            elif self.buffers.places:
                raise ModelError(
                    "a block with buffers begins to take gradients inside its forward, and took none in earlier steps",
                    fix="choose a schedule without split backwards, such as 1f1b",
                )
            self.takes_gradients, self.is_reentrant = True, lookout.is_reentrant
        with looked_after(this.leaves if self.receives else ()), Checkpoints() as checkpoints:
            new_loss = self.run(this.value(), microbatch, randomness)
            new_loss = new_loss if loss is None else loss(new_loss)
        self.is_reentrant = self.is_reentrant or checkpoints.is_reentrant
        if any(leaf.grad is not None for leaf in this.leaves):
            raise ModelError(
                "a block calls backward() inside its forward, and this reaches tensors from the previous stage",
                fix="use torch.autograd.grad, or a schedule without split backwards, such as 1f1b",
            )
        return new_loss

    def ended(self, this: Pass, value: Any) -> Any:
        """Store the outputs' places in the graph, and return the outputs detached."""
        if self.looked_at and type(value) is Tensor and value.requires_grad:
            this.wanted, this.roots = [0], [get_gradient_edge(value)]
            return value.detach()
        outputs, form = pack(value)
        if any(isinstance(output, FakeTensor) for output in outputs):
            self._refuse_stand_in()
        this.wanted = [index for index, output in enumerate(outputs) if output.requires_grad]
        this.roots = [get_gradient_edge(outputs[index]) for index in this.wanted]
        if len(this.wanted) < len(outputs):
            indices = set(this.wanted)
            this.plain = tuple(at for at, output in enumerate(outputs) if _has_gradient(output) and at not in indices)
        if not self.looked_at:
            self.looked_at = True
            begins = [*this.leaves, *self.splitter.begins]
            self.lent = [] if self.lends is None else [p for p in self.lends() if p not in set(self.parameters)]
            own_parameters = [*self.parameters, *self.lent]
            names = [name for name, _ in self.blocks]
            with_loss = self.has_loss and self.lends is None
            refuse_foreign(this.roots, own_parameters, names, begins, has_loss=with_loss, since=self.since)
        return unpack([output.detach() for output in outputs], form)

    def unchanged(self, value: Any, versions: list[int]) -> None:
        """Refuse to run again on an input that the first run has changed."""
        if versions_of(value) != versions:
            names = ", ".join(name for name, _ in self.blocks)
            raise ModelError(
                f"one of the blocks {names} changes its input in place but has to run twice",
                expected="blocks that leave their input unchanged if they are recomputed or draw random numbers",
                fix="let the block work on a copy: x = x.clone()",
            )

    def _refuse_stand_in(self) -> None:
        """Refuse a tensor without data, left over from tracing, before it reaches another rank."""
        raise ModelError(
            f"one of the blocks {', '.join(name for name, _ in self.blocks)} returns a tensor without data, which "
            "it kept or found from when Drumline traced the model",
            expected="blocks that use only their arguments and attributes",
            fix="move what is kept outside the model (a global list, a closure) into the block, or return it",
        )


def versions_of(value: Any) -> list[int]:
    """Return how often each tensor inside was changed in place."""
    return [tensor._version for tensor in pack(value)[0]]


def _has_gradient(tensor: Tensor) -> bool:
    """Whether a tensor's dtype allows a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()
