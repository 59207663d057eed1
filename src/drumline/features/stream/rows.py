"""The endless rows of a schedule without a flush, cut where a step's forwards begin.

    pipedream-2bw on 2 ranks, 2 microbatches a step; F2, B2 belong to step 1

    rank 0   | F0 F1 B0 | F2 B1 F3 B2 U1 | F4 B3 F5 B4 U3 | ...
    rank 1   | F0 B0 F1 B1 | F2 B2 F3 B3 U1 | F4 B4 F5 B5 U3 | ...
               step 0        step 1           step 2, and so on forever

In the call of step t a rank runs slice t. It has all forwards of step t, and the backwards and updates before the next
step's first forward in its row. So no rank empties between two calls. After a few steps all slices are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from drumline.core.action import Action, Op
from drumline.core.errors import ProgramError
from drumline.core.program import Program

BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)  # I alone is the whole backward of a frozen stage


class Cell(NamedTuple):
    """An action of a slice: `microbatch` is that of its own step, which is `back` steps before that of the slice."""

    op: Op
    stage: int
    back: int
    microbatch: int


Slice = tuple[tuple[Cell, ...], ...]  # a row for each rank


@dataclass(frozen=True)
class StreamRows:
    """The slices of all steps; the last one repeats forever."""

    name: str
    num_microbatches: int  # of a step
    slices: tuple[Slice, ...]
    _programs: dict[tuple[int, int], Program] = field(default_factory=dict, compare=False, repr=False)

    @staticmethod
    def of(build: Callable[[int], Program], num_microbatches: int) -> StreamRows:
        """Cut a schedule into steps of so many microbatches; `build` returns its program over a number of steps.

        >>> from drumline.schedules import generate
        >>> rows = StreamRows.of(lambda steps: generate("pipedream-2bw", num_ranks=2, num_microbatches=2,
        ...                                             num_steps=steps), 2)
        >>> rows.num_back, len(rows.slices)
        (1, 2)
        >>> print(rows.program(5))
        0F2,0B1,0F3,0B2,0UPDATE1
        1F2,1B2,1F3,1B3,1UPDATE1
        """
        steps = 4
        while True:
            program = build(steps)
            cells = [_slice(program, step, num_microbatches) for step in range(steps - 1)]
            if cells[-1] == cells[-2]:
                break
            if steps > 4 * program.num_ranks + 8:
                raise ProgramError(f"the rows of {program.name!r} do not repeat", expected="a step like the one before")
            steps *= 2
        while len(cells) > 1 and cells[-1] == cells[-2]:
            cells.pop()
        return StreamRows(program.name, num_microbatches, tuple(cells))

    def slice(self, position: int) -> Slice:
        """Return the rows of the step at a position, counted from where the stream began."""
        return self.slices[min(position, len(self.slices) - 1)]

    @cached_property
    def num_back(self) -> int:
        """How many steps back a slice reaches at most."""
        return max(cell.back for each in self.slices for row in each for cell in row)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The microbatches of a step after which its gradients so far go into an update."""
        return frozenset(
            cell.microbatch for each in self.slices for row in each for cell in row if cell.op is Op.UPDATE
        )

    def action(self, cell: Cell) -> Action:
        """Return a cell as an action of its slice's program, in which the earliest steps come first."""
        return Action(cell.stage, cell.op, self.shown(cell))

    def shown(self, cell: Cell) -> int:
        """Return the number of a cell's microbatch in its slice's program."""
        return (self.num_back - cell.back) * self.num_microbatches + cell.microbatch

    def kind(self, position: int, since: int) -> tuple[int, int]:
        """Return what tells apart the programs of slices: which slice, and how far back its backwards reach.

        `since` says how many of the steps before it have begun after the stream was last empty.
        """
        return min(position, len(self.slices) - 1), min(since, self.num_back)

    def program(self, position: int, since: int | None = None) -> Program:
        """Return what all ranks do in a step, without the backwards that ran when the stream was emptied."""
        number, since = kind = self.kind(position, self.num_back if since is None else since)
        if kind not in self._programs:
            rows = ([self.action(cell) for cell in row if runs(cell, since)] for row in self.slices[number])
            self._programs[kind] = Program.of(rows, f"{self.name} step")
        return self._programs[kind]


def runs(cell: Cell, since: int) -> bool:
    """Whether a cell is still to run: backwards of steps before the stream was emptied are not."""
    return cell.op not in BACKWARDS or cell.back <= since


def _slice(program: Program, step: int, num_microbatches: int) -> Slice:
    return tuple(_row(row, rank, step, num_microbatches, program.name) for rank, row in enumerate(program.rows))


def _row(row: Sequence[Action], rank: int, step: int, num_microbatches: int, name: str) -> tuple[Cell, ...]:
    begins = [at for at, action in enumerate(row) if action.op is Op.FORWARD and action.microbatch in
              (step * num_microbatches, (step + 1) * num_microbatches)]  # fmt: skip
    if len(begins) != 2:
        raise ProgramError(f"rank {rank}'s row of {name!r} has several stages", expected="one stage per rank")
    cells = []
    for stage, op, microbatch, _ in row[begins[0] if step else 0 : begins[1]]:
        if op not in (Op.FORWARD, *BACKWARDS, Op.UPDATE) or microbatch is None:
            raise ProgramError(
                f"rank {rank}'s row of {name!r} has {Action(stage, op, microbatch)}", expected="F, B and UPDATE alone"
            )
        its_step, index = divmod(microbatch, num_microbatches)
        cells.append(Cell(op, stage, step - its_step, index))
    return tuple(cells)
