"""Which parameters train, and the program without backwards for those that do not.

A pipeline reads once which stages train, and compares this with the parameters at every step. Its program has no
backward for parameters that were frozen when it was created. So freezing more of them later only costs time, but
unfreezing one without a backward is refused: its gradient would be missing silently.

Stages that train few of their weights run their backwards whole, whatever the schedule splits (`core/prove/whole.py`).
This is for schedules that are named: a program that the user wrote runs as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

from torch import nn

from drumline.core.errors import ModelError
from drumline.core.program import Program
from drumline.core.prove.frozen import prune
from drumline.core.prove.whole import is_light, join
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


def weight_counts(block: Block) -> tuple[int, int]:
    """Return how many weights of a block train, and how many it has.

    >>> weight_counts(Block("0", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).requires_grad_(False))))
    (6, 9)
    """
    sizes = [(param.numel(), param.requires_grad) for param in block.module.parameters()]
    return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)


def is_named(schedule: Any) -> bool:
    """Whether a schedule is a name, not a program that the user wrote.

    >>> is_named("zb-v"), is_named("mine.csv"), is_named(Program.parse("0F0,0B0"))
    (True, False, False)
    """
    return isinstance(schedule, str) and not schedule.endswith(".csv")


def with_whole_backwards(program: Program, blocks: Iterable[Block]) -> Program:
    """Return a named schedule's program as stages of these blocks will run it, while their cut is open.

    >>> frozen, trained = nn.Linear(9, 99).requires_grad_(False), nn.Linear(1, 2)
    >>> print(with_whole_backwards(Program.parse("0F0,0I0,0W0"), [Block("0", frozen), Block("1", trained)]))
    0F0,0B0
    """
    counts = [weight_counts(block) for block in blocks]
    light = is_light(sum(trained for trained, _ in counts), sum(weights for _, weights in counts))
    return join(program, [light] * program.num_stages)


class Frozen:
    """A program without backwards that the model does not need, and the check that it still does not need them.

    `completed` adds the actions on parameters and gradients that a mesh needs. With `joins`, stages that train few of
    their weights have whole backwards.
    """

    def __init__(
        self,
        program: Program,
        cuts: Cuts,
        completed: Callable[[Program], Program] = lambda p: p,
        *,
        joins: bool = False,
    ) -> None:
        blocks = [block for stage in cuts for block in stage]
        self._joins = joins
        self._block_trains = [block.trains for block in blocks]  # when the pipeline was created
        self._block_counts = [weight_counts(block) for block in blocks]
        self._block_parameters = [[(name, ref(param)) for name, param in block.named_parameters()] for block in blocks]
        self._completed = completed
        self._lay_out([len(stage) for stage in cuts])
        self.pruned(program)
        self._is_whole = True
        self._cuts = cuts

    def _lay_out(self, counts: Sequence[int]) -> None:
        self._trained, self._light = self._trained_by(counts), self._light_by(counts)
        each = self._block_parameters
        spans = pairwise(accumulate(counts, initial=0))
        self._parameters = [[pair for row in each[first:last] for pair in row] for first, last in spans]

    def _trained_by(self, counts: Sequence[int]) -> list[bool]:
        """Return, for each stage with so many blocks, whether it trained when the pipeline was created."""
        return [any(self._block_trains[first:last]) for first, last in pairwise(accumulate(counts, initial=0))]

    def _light_by(self, counts: Sequence[int]) -> list[bool]:
        """Return, for each stage with so many blocks, whether its backwards run whole because so little trains."""
        if not self._joins:
            return [False] * len(counts)
        stages = (self._block_counts[first:last] for first, last in pairwise(accumulate(counts, initial=0)))
        return [is_light(*map(sum, zip(*stage, strict=True))) if stage else False for stage in stages]

    def would_change(self, counts: Sequence[int]) -> bool:
        """Whether stages with so many blocks need other backwards than now."""
        return (self._trained_by(counts), self._light_by(counts)) != (self._trained, self._light)

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
        return self._completed(prune(join(program, self._light), self._trained))

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
                for name, reference in parameters:
                    param = reference()
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
