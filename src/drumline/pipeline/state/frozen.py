"""Which stages are trained: read from the parameters once, held against them at every step.

The program that runs has no backward for what was frozen when the pipeline was made. So freezing more later only costs
time, and freeing what has no backward is refused: its gradient would be missing without a word.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from weakref import ref

from torch import nn

from drumline.core.errors import ModelError
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.rules import Backward
from drumline.runtime.blocks.cut import Block
from drumline.runtime.stage import Stage

Cuts = Sequence[Sequence[Block]]


def trainable(cuts: Cuts) -> list[bool]:
    """Return, per stage, whether any of its parameters is trained.

    >>> frozen = nn.Linear(2, 2).requires_grad_(False)
    >>> trainable([[Block("0", frozen)], [Block("1", nn.Linear(2, 2)), Block("2", nn.ReLU())]])
    [False, True]
    """
    return [any(block.trains for block in stage) for stage in cuts]


class Frozen:
    """A program without the backwards that a model does not need, and whether the model still does not."""

    def __init__(self, program: Program, cuts: Cuts) -> None:
        self._trained = trainable(cuts)
        self.program = prune(program, self._trained)
        self._is_whole = True
        self._cuts = cuts
        self._parameters = [[(name, ref(one)) for name, one in _parameters(stage)] for stage in cuts]

    def pruned(self, program: Program) -> Program:
        """Take another program for the same stages, and return it without the backwards that they do not need."""
        self.program = prune(program, self._trained)
        return self.program

    def forget_all_but(self, cuts: Cuts) -> None:
        """Keep only these blocks alive, where others are of other processes; others are looked at while they live."""
        self._is_whole = all(cuts)
        self._cuts = cuts

    def check_trains(self) -> None:
        """Refuse a training step where nothing trains; alike on all ranks that were given the same model."""
        if self.program.has_backward:
            if not self._is_whole:
                return  # the others may train
            if any(one.requires_grad for stage in self._parameters for _, seen in stage if (one := seen()) is not None):
                return
            if any(trainable(self._cuts)):  # parameters were exchanged
                return
        raise ModelError(
            "nothing trains: every parameter of the model is frozen",
            expected="a parameter with requires_grad",
            fix="free some before the pipeline is made, or use eval_step",
        )

    def check_still(self, stages: Iterable[Stage]) -> None:
        """Refuse parameters that are trained by now where the program has no gradients for them."""
        for kind, parameters in zip(self.program.backwards, self._parameters, strict=True):
            if kind is not Backward.WHOLE:
                for name, seen in parameters:
                    one = seen()
                    if one is not None and one.requires_grad:
                        self._refuse(name)
        for stage in stages:
            if stage.kind is not Backward.WHOLE and stage.parameters:
                self._refuse(next(name for name, one in _parameters(stage.blocks) if one.requires_grad))

    def _refuse(self, name: str) -> None:
        raise ModelError(
            f"{name} was frozen when the pipeline was made, and is trainable now",
            expected="what has no backward in the program to stay frozen",
            fix="free it before the pipeline is made: make a new one on all ranks",
        )


def _parameters(blocks: Sequence[Block]) -> Iterator[tuple[str, nn.Parameter]]:
    for block in blocks:
        yield from block.named_parameters()
