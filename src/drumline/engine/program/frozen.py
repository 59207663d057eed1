"""Which parameters train, and the program without backwards for those that do not.

A pipeline reads once which stages train, and compares this with the parameters at every step. Its program has no
backward for parameters that were frozen when it was created. So freezing more of them later only costs time, but
unfreezing one without a backward is refused: its gradient would be missing silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from weakref import ref

from torch import nn

from drumline.core.errors import ModelError
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.rules import Backward
from drumline.model.block import Block
from drumline.runtime.stage import Stage

Cuts = Sequence[Sequence[Block]]


def trainable(cuts: Cuts) -> list[bool]:
    """Return, for each stage, whether any of its parameters trains.

    >>> frozen = nn.Linear(2, 2).requires_grad_(False)
    >>> trainable([[Block("0", frozen)], [Block("1", nn.Linear(2, 2)), Block("2", nn.ReLU())]])
    [False, True]
    """
    return [any(block.trains for block in stage) for stage in cuts]


class Frozen:
    """A program without backwards that the model does not need, and the check that it still does not need them.

    `completed` adds the actions on parameters and gradients that a mesh needs.
    """

    def __init__(self, program: Program, cuts: Cuts, completed: Callable[[Program], Program] = lambda p: p) -> None:
        blocks = [block for stage in cuts for block in stage]
        self._block_trains = [block.trains for block in blocks]  # when the pipeline was created
        self._block_parameters = [[(name, ref(param)) for name, param in block.named_parameters()] for block in blocks]
        self._completed = completed
        self._lay_out([len(stage) for stage in cuts])
        self.pruned(program)
        self._is_whole = True
        self._cuts = cuts

    def _lay_out(self, counts: Sequence[int]) -> None:
        self._trained = self._trained_by(counts)
        each = self._block_parameters
        spans = pairwise(accumulate(counts, initial=0))
        self._parameters = [[pair for row in each[first:last] for pair in row] for first, last in spans]

    def _trained_by(self, counts: Sequence[int]) -> list[bool]:
        """Return, for each stage with so many blocks, whether it trained when the pipeline was created."""
        return [any(self._block_trains[first:last]) for first, last in pairwise(accumulate(counts, initial=0))]

    def would_change(self, counts: Sequence[int]) -> bool:
        """Whether stages with so many blocks need other backwards than now."""
        return self._trained_by(counts) != self._trained

    def pruned(self, program: Program) -> Program:
        """Switch to another program for the same stages, and return it without the backwards that they do not need."""
        self._whole = program
        self.program = self.pruned_too(program)
        return self.program

    def recut(self, counts: Sequence[int]) -> Program:
        """Have so many blocks in each stage from now on, and return the same program without backwards they lack."""
        self._lay_out(counts)
        return self.pruned(self._whole)

    def pruned_too(self, program: Program) -> Program:
        """Return another program for the same stages, to be run beside the first, without those backwards."""
        return self._completed(prune(program, self._trained))

    def forget_all_but(self, cuts: Cuts) -> None:
        """Keep only these blocks alive, because other processes hold the rest; check the rest while they live."""
        self._is_whole = all(cuts)
        self._cuts = cuts

    def check_trains(self) -> None:
        """Refuse a training step if nothing trains; the same on all ranks with the same model."""
        blocks = (block for stage in self._cuts for block in stage)
        trained = (param for block in blocks for param in block.module.parameters() if param.requires_grad)
        if self.program.has_backward and (not self._is_whole or any(True for _ in trained)):
            return  # other processes may hold trainable parameters
        raise ModelError(
            "nothing to train: every parameter of the model is frozen",
            expected="at least one parameter with requires_grad",
            fix="unfreeze some before you create the pipeline, or use eval_step",
        )

    def check_still(self, stages: Iterable[Stage]) -> None:
        """Refuse parameters that are trainable now if the program has no gradients for them."""
        for kind, parameters in zip(self.program.backwards, self._parameters, strict=True):
            if kind is not Backward.WHOLE:
                for name, seen in parameters:
                    param = seen()
                    if param is not None and param.requires_grad:
                        self._refuse(name)
        for stage in stages:
            if stage.kind is not Backward.WHOLE and stage.parameters:
                self._refuse(next(name for name, param in _parameters(stage.blocks) if param.requires_grad))

    def _refuse(self, name: str) -> None:
        raise ModelError(
            f"{name} was frozen when the pipeline was created, and is trainable now",
            expected="it to stay frozen, because the program has no backward for it",
            fix="unfreeze it, then create a new pipeline on all ranks",
        )


def _parameters(blocks: Sequence[Block]) -> Iterator[tuple[str, nn.Parameter]]:
    for block in blocks:
        yield from block.named_parameters()
