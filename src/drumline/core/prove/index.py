"""Where everything is in a program: the lookups that the validator's checks share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from drumline.core import rules
from drumline.core.action import COMPUTE_OPS, TRANSFER_OPS, Action, Op, in_units
from drumline.core.placement import Placement
from drumline.core.program import Program


class RowPosition(NamedTuple):
    """A position in a row."""

    rank: int
    at: int


@dataclass(frozen=True)
class Index:
    """A program with an index of its plain actions."""

    program: Program
    placement: Placement

    @cached_property
    def places(self) -> dict[Action, list[RowPosition]]:
        """All positions of every plain compute action; more than one means a duplicate."""
        return self._places(COMPUTE_OPS)

    @cached_property
    def transfers(self) -> dict[Action, list[RowPosition]]:
        """All positions of every send and receive."""
        return self._places(TRANSFER_OPS)

    def _places(self, ops: frozenset[Op]) -> dict[Action, list[RowPosition]]:
        positions: dict[Action, list[RowPosition]] = defaultdict(list)
        for rank, row in enumerate(self.program.rows):
            for at, action in enumerate(row):
                for part in action.parts or (action,):
                    if part.op in ops:
                        positions[part].append(RowPosition(rank, at))
        return dict(positions)

    @cached_property
    def inputs(self) -> dict[Action, list[tuple[Action, RowPosition]]]:
        """The inputs that every plain compute action needs and the program has, each with its first position."""
        num_stages = self.program.num_stages
        # Actions are tuples, so a plain tuple finds them without building an action first.
        first: dict[tuple[object, ...], tuple[Action, RowPosition]] = {
            action: (action, places[0]) for action, places in self.places.items()
        }
        inputs: dict[Action, list[tuple[Action, RowPosition]]] = {}
        for action in self.places:
            stage, op, microbatch, _ = action
            listed = inputs[action] = []
            for need in rules.NEEDS[op]:
                neighbour = stage + need.stage_offset
                if 0 <= neighbour < num_stages:
                    keys = ((neighbour, kind, microbatch, ()) for kind in need.ops)
                    listed += [first[key] for key in keys if key in first][:1]
        return inputs

    def messages(self) -> Iterator[tuple[rules.Message, RowPosition, RowPosition]]:
        """Yield every message between two ranks, with where it is made and where it is used."""
        for action, inputs in self.inputs.items():
            taken = self.places[action][0]
            for producer, position in inputs:
                if position.rank != taken.rank:
                    message = rules.message(producer, self.program.num_stages)
                    assert message is not None
                    yield message, position, taken

    @cached_property
    def numbers(self) -> Sequence[int]:
        """The numbers of all microbatches, or of all their slices, as they are written."""
        return in_units(range(self.program.num_units), self.program.num_slices)

    @cached_property
    def ops(self) -> set[Op]:
        """The ops that appear, including those of the halves of pairs."""
        return self.program.columns.ops

    @cached_property
    def stages(self) -> list[int]:
        """The stage numbers that appear, lowest first."""
        return sorted({action.stage for action in self.places})

    @cached_property
    def microbatches(self) -> list[int]:
        """The microbatch numbers that appear, lowest first."""
        return sorted({action.microbatch for action in self.places if action.microbatch is not None})

    def first(self, alternatives: tuple[Action, ...]) -> tuple[Action, RowPosition] | None:
        """Return the first of the alternatives that the program contains, with its first position."""
        return next(((action, self.places[action][0]) for action in alternatives if action in self.places), None)

    def home(self, action: Action) -> int | None:
        """Return the rank on which the placement puts an action of a stage and microbatch."""
        if action.microbatch is None or not 0 <= action.stage < self.placement.num_stages:
            return None
        return self.placement.rank_of(action.stage, action.microbatch)
