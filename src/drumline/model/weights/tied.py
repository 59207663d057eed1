"""Tensors that several blocks hold, such as a weight shared by embedding and head: who holds and who owns them.

    block 0, Embedding   weight ─┐
    block 9, Linear      weight ─┴─ one tensor, of stages 0 and 3: "0.weight" is its name, "9.weight" another for it

They are found by identity, before anything is moved or copied. A tensor is known by its first name in the unsplit
model; its owner is the home rank of the first stage that holds it. Blocks of one rank share one object. Every other
rank has a copy, which is kept equal to the last bit.

A rank's blocks are copies if another rank of the same process owns tensors in them (`TiedCopies`). With several
processes, every rank has its own model. Ranks that take turns in one process share one model, so everything that
several of them hold is copied. This is all of a stage's second copy, and tied tensors; otherwise blocks keep the user's
own tensors. The copies do not belong to the user: before every step they follow the user's tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.core.placement import Placement
from drumline.model.block import Block
from drumline.model.blocks.pieces import Piece
from drumline.model.catalogue import Place, named_tensors, places_in
from drumline.model.hooks import is_hooked, with_holders
from drumline.model.quantised.packed import is_packed, parts_of, put_parts, settle
from drumline.model.weights.overlaps import aliases_in, trained_in
from drumline.model.weights.twin import Table, Twin, cannot_copy


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A parameter or buffer of the model: its names, the stages and ranks that hold it, and the rank that owns it."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    home: int
    is_parameter: bool
    num_places: int = 1

    @property
    def name(self) -> str:
        """Its first name in the unsplit model."""
        return self.names[0]

    @property
    def is_tied(self) -> bool:
        """Whether several stages hold it."""
        return len(self.stages) > 1

    @property
    def is_copied(self) -> bool:
        """Whether several ranks hold it."""
        return len(self.ranks) > 1


class _Use(NamedTuple):
    """A tensor and the numbers of the blocks that hold it, wherever the model is cut."""

    names: tuple[str, ...]
    blocks: tuple[int, ...]
    num_places: int
    is_parameter: bool
    is_statistic: bool


class Ties:
    """All tensors of a model that is cut into stages, and which of them are held more than once.

    A tensor's first name is that in `model` or, if the model is a list, that of the first block.

    >>> layer = nn.Linear(2, 2, bias=False)
    >>> ties = Ties([[Block("0", layer)], [Block("1", nn.ReLU()), Block("2", layer)]], Placement.linear(2))
    >>> ties.described, ties.edges
    (['0.weight = 2.weight'], [(0, 1), (1, 0)])
    """

    def __init__(self, cuts: Sequence[Sequence[Block]], placement: Placement, model: object = None) -> None:
        self.placement = placement
        self._known: dict[int, list[str]] = {}  # the model's own names; blocks may lack some of them
        self._unsaved: set[str] = set()  # names of buffers that no state has
        if isinstance(model, nn.Module):
            for name, tensor in named_tensors(model):
                self._known.setdefault(id(tensor), []).append(name)
            self._unsaved.update(place.name for place in places_in(Block("", model)) if not place.saved)
        places: dict[int, list[tuple[int, Place]]] = {}
        for number, block in enumerate(block for blocks in cuts for block in blocks):
            for place in places_in(block):
                places.setdefault(id(place.tensor), []).append((number, place))
                if not place.saved:
                    self._unsaved.add(place.name)
        self._uses = [self._use(where) for where in places.values()]
        self._lay_out([len(blocks) for blocks in cuts])

    def _use(self, where: Sequence[tuple[int, Place]]) -> _Use:
        known = self._known.get(id(where[0][1].tensor), [])
        return _Use(
            tuple(dict.fromkeys((*known, *(place.name for _, place in where)))),
            tuple(dict.fromkeys(number for number, _ in where)),
            len(where),
            where[0][1].is_parameter,
            any(isinstance(spot.module, nn.modules.batchnorm._NormBase) and not spot.is_parameter for _, spot in where),
        )

    def _lay_out(self, counts: Sequence[int]) -> None:
        """Find who holds what, with so many blocks in each stage."""
        stage_of = [stage for stage, count in enumerate(counts) for _ in range(count)]
        self.tensors = [self._held_tensor(use, stage_of) for use in self._uses]
        self._by_name = {name: tensor for tensor in self.tensors for name in tensor.names}
        self._refuse_statistics()

    def recut(self, counts: Sequence[int]) -> Ties:
        """Return the same tensors with other numbers of blocks in the stages.

        >>> layer = nn.Linear(2, 2, bias=False)
        >>> ties = Ties([[Block("0", layer)], [Block("1", layer), Block("2", nn.ReLU())]], Placement.linear(2))
        >>> ties.find("0.weight").ranks, ties.recut([2, 1]).find("0.weight").ranks
        ((0, 1), (0,))
        """
        ties = copy.copy(self)
        ties._lay_out(counts)
        return ties

    def _held_tensor(self, use: _Use, stage_of: Sequence[int]) -> HeldTensor:
        stages = tuple(dict.fromkeys(stage_of[number] for number in use.blocks))
        return HeldTensor(
            use.names,
            stages,
            tuple(sorted({rank for stage in stages for rank in self.placement.ranks_of(stage)})),
            self.placement.homes[stages[0]],
            use.is_parameter,
            use.num_places,
        )

    def _refuse_statistics(self) -> None:
        """Refuse running statistics that several stages change: each would see part of the batch, or another order."""
        for use, held_tensor in zip(self._uses, self.tensors, strict=True):
            if use.is_statistic and held_tensor.is_tied:
                raise ModelError(
                    f"stages {', '.join(map(str, held_tensor.stages))} share running statistics, {held_tensor.name}",
                    expected="a separate normalisation layer in each stage, or one without running statistics",
                )

    @property
    def described(self) -> list[str]:
        """The tensors that are held more than once, as text."""
        return [" = ".join(tensor.names) for tensor in self.tensors if tensor.num_places > 1 or len(tensor.names) > 1]

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Every directed pair of ranks that hold a tensor of several stages."""
        return sorted({edge for tensor in self.tensors if tensor.is_tied for edge in permutations(tensor.ranks, 2)})

    def find(self, name: str) -> HeldTensor | None:
        """Return the tensor with this name, or any of its names, if it existed when the model was cut."""
        return self._by_name.get(name)

    def first(self, name: str) -> str:
        """Return the first name of a tensor."""
        held_tensor = self._by_name.get(name)
        return name if held_tensor is None else held_tensor.name

    def stored_as(self, name: str) -> tuple[str, ...]:
        """Return the names under which the unsplit model's state has a tensor: all of a tied one's, as in torch.

        >>> layer = nn.Linear(2, 2, bias=False)
        >>> Ties([[Block("0", layer)], [Block("1", layer)]], Placement.linear(2)).stored_as("1.weight")
        ('0.weight', '1.weight')
        """
        tensor = self._by_name.get(name)
        return (name,) if tensor is None else tuple(text for text in tensor.names if text not in self._unsaved)

    def home(self, name: str, stage: int) -> int:
        """Return the owner of a tensor that a stage holds under this name."""
        held_tensor = self._by_name.get(name)
        return self.placement.homes[stage] if held_tensor is None else held_tensor.home

    def copied(self, rank: int) -> list[HeldTensor]:
        """Return the tensors of a rank that other ranks hold too, in the unsplit model's order."""
        return [tensor for tensor in self.tensors if tensor.is_copied and rank in tensor.ranks]

    def on(self, blocks: Iterable[tuple[int, Block]]) -> dict[str, tuple[int, Tensor]]:
        """Return the tensors of some blocks, given with their stages: each once, with its owner, by its first name.

        Refuse a tensor that was one and is now two.
        """
        tensors_by_name: dict[str, tuple[int, Tensor]] = {}
        names: dict[int, str] = {}
        for stage, block in blocks:
            for place in places_in(block):
                tensor, first = place.tensor, self.first(place.name)
                assert tensor is not None
                name = names.setdefault(id(tensor), first)
                _, value = tensors_by_name.setdefault(name, (self.home(place.name, stage), tensor))
                if value is not tensor or (first != name and place.name in self._by_name):
                    raise ModelError(
                        f"{name} and {place.name} were one tensor when the pipeline was created, and are two now",
                        fix="tie them again, or create a new pipeline",
                    )
        return tensors_by_name

    def join(self, blocks: Iterable[Block]) -> None:
        """Let blocks of one rank share one object again, if moving them has created two."""
        first: dict[str, Tensor] = {}
        for place in (spot for block in blocks for spot in places_in(block)):
            held_tensor, tensor = self._by_name.get(place.name), place.tensor
            if (
                held_tensor is not None
                and tensor is not None
                and first.setdefault(held_tensor.name, tensor) is not tensor
            ):
                setattr(place.module, place.key, first[held_tensor.name])


class TiedCopies:
    """The copies of one rank.

    >>> from drumline.core.placement import Placement
    >>> first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> last.weight = first.weight
    >>> cuts = [[Block("0", first)], [Block("1", last)]]
    >>> (ties,) = TiedCopies(1, Ties(cuts, Placement.linear(2)), cuts).of(1, cuts[1])
    >>> ties.module.weight is last.weight, ties.module.bias is last.bias
    (False, True)
    """

    def __init__(self, rank: int, ties: Ties, cuts: Sequence[Sequence[Block]]) -> None:
        self.rank = rank
        self.ties = ties
        own_tensors = (
            place.tensor
            for stage, blocks in enumerate(cuts)
            for block in blocks
            for place in places_in(block)
            if ties.home(place.name, stage) == rank
        )
        self._memo: dict[int, Any] = {id(tensor): tensor for tensor in own_tensors}
        self._trained = trained_in(block for blocks in cuts for block in blocks)
        self._tables: list[tuple[str, Table, Table, frozenset[str]]] = []  # the user's, ours, and what they share
        self.modules: list[tuple[nn.Module, nn.Module]] = []  # the user's, and ours
        self._twins: list[tuple[str, Twin]] = []  # the same without pieces, by the names of blocks

    def of(self, stage: int, blocks: Sequence[Block]) -> tuple[Block, ...]:
        """Return the blocks of a stage, with copies of those that cannot be the user's own."""
        second = self.ties.placement.homes[stage] != self.rank
        return tuple(self._copied(block) if second or self._holds_others(stage, block) else block for block in blocks)

    def _holds_others(self, stage: int, block: Block) -> bool:
        return any(self.ties.home(place.name, stage) != self.rank for place in places_in(block))

    def _copied(self, block: Block) -> Block:
        settle(block.module.modules())
        for alias in aliases_in(block, self._trained):
            raise ModelError(
                f"{alias.named}, and this process runs a copy of the block, too",
                expected="attributes with memory of their own: updates do not reach the copy's",
                fix="use the parameter itself, or choose a schedule with one copy of each stage, such as zb-v",
            )
        computed = dict(_computed_in(block.module))
        self._memo.update(computed)
        try:
            ties = copy.deepcopy(block.module, self._memo)
        except (TypeError, NotImplementedError) as error:  # of what pickle cannot take: a generator, a lock
            raise cannot_copy(block, error) from error
        for known in computed:  # the next forward replaces these tensors, and their ids may be used again
            del self._memo[known]
        settle(ties.modules())
        for original, ours in zip(block.module.modules(), ties.modules(), strict=True):
            self.modules.append((original, ours))
            if not isinstance(original, Piece):  # which is not the user's
                self._twins.append((block.name, Twin(original, ours)))
            for theirs, own_tensors in ((original._parameters, ours._parameters), (original._buffers, ours._buffers)):
                common = frozenset(key for key, tensor in theirs.items() if tensor is own_tensors[key])
                self._tables.append((block.name, theirs, own_tensors, common))
        return replace(block, module=ties)

    def lacks(self, error: AttributeError) -> ModelError | None:
        """Return what to raise for an attribute that a copy lacks and the user's module has; None if it is another."""
        for block, twin in self._twins:
            if twin.ours is error.obj and isinstance(error.name, str) and hasattr(twin.theirs(), error.name):
                return ModelError(
                    f"block {block!r} reads its attribute {error.name!r}, and the copy of the block that this process "
                    "runs too does not have it",
                    expected="attributes that copy.deepcopy copies, set before the pipeline is created",
                    fix="set it in __init__, or choose a schedule with one copy of each stage, such as zb-v",
                )
        return None

    def settle(self) -> None:
        """Take what a step has left in lists, dicts and sets of the user's modules as theirs."""
        for _, twin in self._twins:
            twin.settle()

    @torch.no_grad()
    def follow(self) -> None:
        """Update the copies from the user's modules: values, what is frozen, mode, hooks."""
        for original, ours in self.modules:
            ours.training = original.training
        for block, twin in self._twins:
            twin.follow(block, since="the pipeline was created")
        self._follow_tensors()

    def _follow_tensors(self) -> None:
        done: set[int] = set()
        params = [p for _, theirs, _, common in self._tables for key, p in theirs.items() if key not in common]
        holders = {id(param) for param in with_holders(p for p in params if isinstance(p, nn.Parameter))}
        for block, theirs, own_tensors, common in self._tables:
            if theirs.keys() != own_tensors.keys():
                raise ModelError(
                    f"block {block!r} no longer has the parameters or buffers it had when the pipeline was created",
                    expected="the same tensors, because ranks in this process hold copies of the block",
                    fix="create a new pipeline",
                )
            for key, tensor in theirs.items():
                if key in common:
                    own_tensors[key] = tensor
                    continue
                if id(tensor) in holders:
                    _refuse_hooked(tensor, key, block)
                if tensor is not None and id(own_tensors[key]) not in done:
                    done.add(id(own_tensors[key]))
                    _follow(own_tensors[key], tensor)


def _computed_in(block: nn.Module) -> Iterator[tuple[int, Tensor]]:
    """Yield by their ids copies of tensors with a graph, which deepcopy refuses.

    Hooks compute these before every forward: the `weight` of torch.nn.utils.weight_norm and of pruning.
    """
    for module in block.modules():
        for value in vars(module).values():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                yield id(value), value.detach().clone()


def _refuse_hooked(tensor: Tensor | None, key: str, block: str) -> None:
    """Refuse a hook that no copy of a parameter can have: it may refer to the parameter itself."""
    if isinstance(tensor, nn.Parameter) and is_hooked(tensor):
        raise ModelError(
            f"a hook is where autograd adds up the gradient of {key!r} in block {block!r} (its AccumulateGrad node), "
            "and this process runs a copy of the block, too",
            expected="hooks that copies can have",
            fix="use parameter.register_hook(...), or a schedule with one copy of each stage, such as zb-v",
        )


def _follow(copied: Tensor, original: Tensor) -> None:
    """Give a copy the original's values, requires_grad and hooks."""
    if is_packed(original):
        put_parts(copied, {name: part.clone() for name, part in parts_of(original).items()})
    elif (copied.shape, copied.dtype, copied.device) == (original.shape, original.dtype, original.device):
        copied.copy_(original)
    else:
        copied.data = original.detach().clone()
    if copied.requires_grad is not original.requires_grad:
        copied.requires_grad_(original.requires_grad)
    if copied._backward_hooks is not original._backward_hooks:
        copied._backward_hooks = original._backward_hooks
    if getattr(original, "_post_accumulate_grad_hooks", None) is not None:
        copied._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
