"""Tensors that several blocks hold, such as an embedding's weight that is also the head's: who has them, and whose.

    block 0, Embedding   weight ─┐
    block 9, Linear      weight ─┴─ one tensor, of stages 0 and 3: "0.weight" is its name, "9.weight" another for it

They are found by identity, before anything is moved or copied. A tensor goes by its first name in the unsplit model;
its home is the home rank of the first stage that holds it. Blocks of one rank that hold it have one object between
them. Every other rank has a copy, which is kept equal to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.core.placement import Placement
from drumline.runtime.blocks.cut import Block
from drumline.runtime.weights.catalogue import Place, named_tensors, places_in


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or buffer of the model: its names, the stages and ranks that hold it, and the rank whose it is."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    home: int
    is_parameter: bool
    num_places: int = 1

    @property
    def name(self) -> str:
        """The name it goes by: the first in the unsplit model."""
        return self.names[0]

    @property
    def is_tied(self) -> bool:
        """Whether several stages hold it."""
        return len(self.stages) > 1

    @property
    def is_copied(self) -> bool:
        """Whether several ranks hold it."""
        return len(self.ranks) > 1


class Ties:
    """All tensors of a model that is cut into stages, and which of them are held more than once.

    The first of a tensor's names is the one that `model` has for it, or where that is a list, that of the first block.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> ties = Ties([[Block("0", layer)], [Block("1", nn.ReLU()), Block("2", layer)]], Placement.linear(2))
    >>> ties.described, ties.edges
    (['0.weight = 2.weight'], [(0, 1), (1, 0)])
    """

    def __init__(self, cuts: Sequence[Sequence[Block]], placement: Placement, model: object = None) -> None:
        self.placement = placement
        self._known: dict[int, list[str]] = {}  # the model's own names, which blocks need not have all of
        if isinstance(model, nn.Module):
            for name, one in named_tensors(model):
                self._known.setdefault(id(one), []).append(name)
        found: dict[int, list[tuple[int, Place]]] = {}
        for stage, blocks in enumerate(cuts):
            for place in (one for block in blocks for one in places_in(block)):
                found.setdefault(id(place.tensor), []).append((stage, place))
        self.tensors = [self._held(where) for where in found.values()]
        self._by_name = {name: one for one in self.tensors for name in one.names}
        self._refuse_statistics(cuts)

    def _held(self, where: Sequence[tuple[int, Place]]) -> HeldTensor:
        stages = tuple(dict.fromkeys(stage for stage, _ in where))
        known = self._known.get(id(where[0][1].tensor), [])
        return HeldTensor(
            tuple(dict.fromkeys((*known, *(place.name for _, place in where)))),
            stages,
            tuple(sorted({rank for stage in stages for rank in self.placement.ranks_of(stage)})),
            self.placement.homes[stages[0]],
            where[0][1].is_parameter,
            len(where),
        )

    def _refuse_statistics(self, cuts: Sequence[Sequence[Block]]) -> None:
        """Refuse running statistics that several stages change: each would see part of it, or another order."""
        for place in (one for blocks in cuts for block in blocks for one in places_in(block)):
            if isinstance(place.module, nn.modules.batchnorm._NormBase) and not place.is_parameter:
                held = self._by_name[place.name]
                if held.is_tied:
                    raise ModelError(
                        f"stages {', '.join(map(str, held.stages))} share running statistics, {held.name}",
                        expected="a normalisation of its own in every stage, or one without running statistics",
                    )

    @property
    def described(self) -> list[str]:
        """What is held more than once, as text."""
        return [" = ".join(one.names) for one in self.tensors if one.num_places > 1 or len(one.names) > 1]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Every directed pair of ranks that hold a tensor of several stages."""
        return sorted({edge for one in self.tensors if one.is_tied for edge in permutations(one.ranks, 2)})

    def find(self, name: str) -> HeldTensor | None:
        """Return the tensor of this name, by whichever of its names, if it was there when the model was cut."""
        return self._by_name.get(name)

    def first(self, name: str) -> str:
        """Return the name that a tensor goes by."""
        held = self._by_name.get(name)
        return name if held is None else held.name

    def home(self, name: str, stage: int) -> int:
        """Return the home of a tensor that a stage holds under this name."""
        held = self._by_name.get(name)
        return self.placement.homes[stage] if held is None else held.home

    def copied(self, rank: int) -> list[HeldTensor]:
        """Return the tensors of a rank that other ranks hold too, in the unsplit model's order."""
        return [one for one in self.tensors if one.is_copied and rank in one.ranks]

    def on(self, blocks: Iterable[tuple[int, Block]]) -> dict[str, tuple[int, Tensor]]:
        """Return the tensors of some blocks, which come with their stages: each once, with its home, by its first name.

        Refuses a tensor that was one and has become two.
        """
        found: dict[str, tuple[int, Tensor]] = {}
        names: dict[int, str] = {}
        for stage, block in blocks:
            for place in places_in(block):
                tensor, first = place.tensor, self.first(place.name)
                assert tensor is not None
                name = names.setdefault(id(tensor), first)
                _, one = found.setdefault(name, (self.home(place.name, stage), tensor))
                if one is not tensor or (first != name and place.name in self._by_name):
                    raise ModelError(
                        f"{name} and {place.name} were one tensor when the pipeline was made, and are two now",
                        fix="tie them again, or make a new pipeline",
                    )
        return found

    def join(self, blocks: Iterable[Block]) -> None:
        """Let blocks of one rank hold one object between them again, where moving them has made two of it."""
        first: dict[str, Tensor] = {}
        for place in (one for block in blocks for one in places_in(block)):
            held, tensor = self._by_name.get(place.name), place.tensor
            if held is not None and tensor is not None and first.setdefault(held.name, tensor) is not tensor:
                setattr(place.module, place.key, first[held.name])
