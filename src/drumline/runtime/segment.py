"""Consecutive blocks of a stage that are run, kept and gone back through together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge

from drumline.core.errors import ModelError
from drumline.runtime.backward.compiled import Named
from drumline.runtime.backward.owners import Splitter
from drumline.runtime.backward.tape import Tape
from drumline.runtime.blocks.cut import Block
from drumline.runtime.buffers import Buffers
from drumline.runtime.loss.sheet import Sheet
from drumline.runtime.randomness import HostChance, Randomness, draws, may_draw
from drumline.runtime.values import pack


class Pass:
    """One microbatch's way through one segment: what its backward needs."""

    __slots__ = ("again", "buffers", "chance", "form", "leaves", "plain", "roots", "tape", "wanted")

    def __init__(self, leaves: Sequence[Tensor], form: Any) -> None:
        self.leaves = leaves
        self.form = form
        self.roots: list[GradientEdge] = []
        self.wanted: list[int] = []  # which of the outputs a gradient can come back for
        self.plain: tuple[int, ...] = ()  # which of those that could have one do not
        self.tape: Tape | None = None
        self.again = False  # whether the segment has to be run again first
        self.buffers: dict[int, Tensor] = {}
        self.chance: HostChance | None = None  # where its random numbers of Python's began, if it drew any


class Segment:
    """Consecutive blocks that are run, kept and gone back through together."""

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
        self.seal: Callable[[Any], Any] | None = None  # leaves out what need not travel from the stage
        self.checkpointed = checkpointed
        self.modules = [module for block in blocks for module in block.module.modules()]
        self.buffers = Buffers([block.module for block in blocks])
        self._signature: list[tuple[int, bool]] | None = None
        self.renew()
        self._suspects = {block.name for block in blocks if may_draw(block.module)}
        # Taken to draw nothing until it does; a run that changes buffers could not be run again, so it is never tried.
        self.quiet = not self._suspects or not self.buffers.places
        if compiled is not None and any(draws(module) for _, module in self.blocks):
            self.quiet = False  # compiled once, in pieces, rather than twice
        self.on_copies = False  # whether the blocks change their input in place
        self.keeps_input = False  # whether they were seen not to
        self.needs_graph = False  # whether a first run that saves no tensors was seen to fail for the lack of them
        self.takes_gradients: bool | None = None  # whether they take gradients inside their forward; None: not known

    def renew(self) -> bool:
        """Follow parameters that were frozen, freed or exchanged; returns whether any was."""
        owned = [one for module in self.modules for one in module._parameters.values() if one is not None]
        signature = [(id(one), one.requires_grad) for one in owned]
        if signature == self._signature:
            return False
        self._signature = signature
        self.looked_at = False  # whether all parameters in its graph are its own
        self.parameters = [one for one in dict.fromkeys(owned) if one.requires_grad]
        # What is compiled splits its backward by itself.
        self.splitter = Splitter([module for _, module in self.blocks] if self.compiled is None else [])
        return True

    def run(self, value: Any, microbatch: int, randomness: Randomness, tape: Tape | None = None) -> Any:
        """Run the blocks, seeding those that may draw random numbers unless none has drawn so far."""
        if self.sheet is not None:
            self.sheet.now = microbatch
        if self.quiet:
            versions = versions_of(value) if self._suspects else []
            if self._suspects:
                randomness.watch()
            made = value
            for run in self.whole:
                made = run(made)
            if not self._suspects or not randomness.drew():
                return made if self.seal is None else self.seal(made)
            self.quiet = False  # what was drawn was not seeded: all is run again
            self.unchanged(value, versions)
            if tape is not None:
                tape.records.clear()
        for name, run in self.pieces:
            if name in self._suspects:
                randomness.apply(microbatch, name)
            value = run(value)
        return value if self.seal is None else self.seal(value)

    def unchanged(self, value: Any, versions: list[int]) -> None:
        """Refuse to run again on an input that the first run has changed."""
        if versions_of(value) != versions:
            names = ", ".join(name for name, _ in self.blocks)
            raise ModelError(
                f"one of the blocks {names} changes its input in place and has to run twice",
                expected="blocks that leave their input as it is, where they are recomputed or draw random numbers",
                fix="let the block work on a copy: x = x.clone()",
            )

    @property
    def may_draw(self) -> bool:
        """Whether any of the blocks may draw random numbers."""
        return bool(self._suspects)

    @property
    def changes_buffers(self) -> bool:
        """Whether a forward changes a buffer of these blocks, as far as is known from forwards so far."""
        return self.buffers.changed_lately()


def versions_of(value: Any) -> list[int]:
    """Return how often each tensor inside has been changed in place."""
    return [one._version for one in pack(value)[0]]
