"""The model tensors that this process's ranks hold, each once: named, kept equal, stored and loaded.

A tensor that several blocks hold has several names in the unsplit model. One rank owns it. Files store it once, by its
first name. The state that a user gets has it under all of its names, like torch's. So the merged states of all ranks
are the model's. Loading accepts any of its names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from drumline.channel.lines.slices import FlatSlice, Slice, cut_out, put_together, sharded_over, slice_of
from drumline.core.errors import DrumlineError, ModelError, nearest
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.observer import Observer
from drumline.engine.stages.chain import Chain
from drumline.model.block import Block
from drumline.model.catalogue import places_in
from drumline.model.quantised.state import file_names, is_same, is_text, joined, load_state
from drumline.model.weights.tied import TiedCopies, Ties
from drumline.runtime.execute.executor import Executor
from drumline.runtime.gradients import clip
from drumline.runtime.gradients.exchange import share
from drumline.runtime.gradients.lines import Shards
from drumline.runtime.step import Step

Named = list[tuple[str, nn.Parameter]]
_TensorT = TypeVar("_TensorT", bound=Tensor)


class Holdings(Observer):
    """The tensors of this process's ranks; `copies` are those of ranks that take turns here."""

    def __init__(
        self, ties: Ties, crew: Crew, executors: Sequence[Executor], copies: Sequence[TiedCopies], chain: Chain
    ) -> None:
        self.crew = crew
        self.executors = executors
        self.chain = chain
        self.recut(ties, copies)
        self.shards: Shards | None = None  # if the lines of a mesh divide parameters
        self._named: Named | None = None
        self._earlier: list[tuple[nn.Parameter, Tensor | None]] = []  # gradients of earlier steps

    def recut(self, ties: Ties, copies: Sequence[TiedCopies]) -> None:
        """Take note of who holds what, at first and whenever layers have moved."""
        self.ties = ties
        self.copies = copies
        self.renew()

    def share(self) -> None:
        """Give all copies of tensors that several ranks hold the values of the rank that owns them."""
        self.follow()
        if not self.crew.alone and any(tensor.is_copied for tensor in self.ties.tensors):
            self.crew.drive([share(executor.exchange) for executor in self.executors])

    def follow(self) -> None:
        """Update the copies in this process from their originals."""
        for copies in self.copies:
            if copies.modules:
                copies.follow()
        if self.chain.absent.copies:
            self.chain.follow()

    def renew(self) -> None:
        """Read the parameters again, because some were replaced."""
        self._named = None

    def named_parameters(self) -> Named:
        """Return the user's parameters, without copies in this process, which follow others."""
        if self._named is None:
            each = [self.named_on(executor, at_home=self.crew.alone) for executor in self.executors]
            self._named = [pair for named in each for pair in named]
        return self._named

    def parameters(self) -> list[nn.Parameter]:
        """Return the same without names."""
        return [param for _, param in self.named_parameters()]

    def tensors(self) -> list[Tensor]:
        """Return every parameter and buffer of this process's ranks once, in the same order on every line."""
        blocks = [block for executor in self.executors for _, block in _blocks(executor)]
        listed = (param for block in blocks for param in (*block.module.parameters(), *block.module.buffers()))
        return list({id(tensor): tensor for tensor in listed}.values())

    def has_gradients(self) -> bool:
        """Return whether any of them has a gradient."""
        return any(param.grad is not None for _, param in self.named_parameters())

    def norms(self, norm_type: float) -> list[dict[str, float]]:
        """Return, for each rank, the gradient norms of the parameters that it owns."""
        whole_norms = []
        for named in (self.named_on(executor, at_home=True) for executor in self.executors):
            norms = clip.norms_of([param for _, param in named], norm_type)
            own_norms = {name: norm for (name, _), norm in zip(named, norms, strict=True) if norm is not None}
            whole_norms.append(self._whole_norms(dict(named), own_norms, norm_type))
        return whole_norms

    def _whole_norms(
        self, named: dict[str, nn.Parameter], own_norms: dict[str, float], norm_type: float
    ) -> dict[str, float]:
        """Return the norms of whole parameters, of which other lines may hold parts; these call it alike."""
        axes, whole = self.crew.axes, dict(own_norms)
        for axis in dict.fromkeys(axis for param in named.values() for axis in sharded_over(param)):
            names = [name for name, param in named.items() if axis in sharded_over(param)]
            norms = torch.tensor([whole.get(name, 0.0) for name in names], dtype=torch.float64)
            every = torch.stack(axes.gathered(norms.to(next(iter(named.values())).device), axis))
            total = torch.linalg.vector_norm(every, norm_type, dim=0)
            whole |= {name: norm for name, norm in zip(names, total.tolist(), strict=True) if norm or name in own_norms}
        return whole

    def named_on(self, executor: Executor, *, at_home: bool = False, pieces: bool = True) -> Named:
        """Return one rank's parameters, each once by its first name; with `at_home`, only those that it owns.

        Of those that lines of a mesh divide, return this line's pieces, or without `pieces` what the modules hold.
        """
        return [
            (name, self.shown(tensor) if pieces else tensor)
            for name, (home, tensor) in self.ties.on(_blocks(executor)).items()
            if isinstance(tensor, nn.Parameter) and (home == executor.rank or not at_home)
        ]

    def shown(self, tensor: _TensorT) -> _TensorT | nn.Parameter:
        """Return what is kept of a tensor here: this line's piece if lines of a mesh divide it, or the tensor."""
        if self.shards is None or not isinstance(tensor, nn.Parameter):
            return tensor
        return self.shards.shown(tensor)

    @contextmanager
    def whole(self, *, changed: bool = False) -> Iterator[None]:
        """Gather divided parameters inside; all lines call it alike. `changed` says that it gives them new values."""
        shards = self.shards
        held_stages = [] if shards is None else [at for executor in self.executors for at in executor.stages]
        # All of them are whole before the first step, and stay so.
        stages = [] if shards is None else [at for at in held_stages if not shards.is_whole(at)]
        for stage in stages:
            assert shards is not None
            shards.unshard(stage)
            shards.gathered(stage)
        yield
        if shards is not None:
            if changed:
                shards.renew()
            for stage in stages:
                shards.reshard(stage)

    def begin(self, step: Step) -> None:
        """Set aside earlier steps' gradients of tensors that several ranks hold: only this step's are exchanged."""
        exchanges = [executor.exchange for executor in self.executors if executor.exchange.has_any]
        exchanged = [param for exchange in exchanges for param in exchange.parameters]
        kept_parameters = set(self.parameters()) if exchanged else set()
        self._earlier = [(param, param.grad) for param in exchanged if param in kept_parameters]
        for param in exchanged:
            param.grad = None

    def end(self, step: Step) -> None:
        """Add this step's gradients to the earlier ones."""
        for parameter, earlier in self._earlier:
            if earlier is not None:
                parameter.grad = earlier if parameter.grad is None else earlier.add_(parameter.grad)
        self._earlier = []

    def stored_names(self) -> set[str]:
        """Return the names under which a state has what this process holds."""
        blocks = [block for executor in self.executors for _, block in _blocks(executor)]
        entries = [(self.ties.first(name), tensor) for block in blocks for name, tensor in _entries(block)]
        return {text for name, value in entries for text in file_names(name, value)}

    def slices(self) -> dict[str, Slice | FlatSlice]:
        """Return which parts of whole tensors this process's modules hold, by name."""
        blocks = [block for executor in self.executors for _, block in _blocks(executor)]
        each = {self.ties.first(name): slice_of(tensor) for block in blocks for name, tensor in _entries(block)}
        return {name: part for name, part in each.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Return what this process stores: the parameters and persistent buffers that its ranks own, each once."""
        stored: dict[str, Any] = {}
        with self.whole():
            for executor in self.executors:
                for index, block in _blocks(executor):
                    for name, value in _entries(block):
                        if self.ties.home(name, index) == executor.rank:
                            stored.setdefault(self.ties.first(name), self._plain(value))
        return stored

    def whole_state_dict(self) -> dict[str, Any]:
        """Return the same under all names, and whole where lines hold parts of a tensor; all lines call it alike."""
        stored, slices, state = self.state_dict(), self.slices(), {}
        for name, entry in stored.items():
            whole = put_together(entry, slices.get(name), self.crew.axes)
            state.update(dict.fromkeys(self.ties.stored_as(name), whole))
        return state

    def _plain(self, value: Any) -> Any:
        """Return what a state has of a tensor: the tensor itself, or a copy of one that lasts only for a moment."""
        if not isinstance(value, Tensor):
            return value
        divided = self.shards is not None and value in self.shards.pieces
        plain = value.detach().clone() if divided else value.detach()
        if (part := slice_of(value)) is not None:
            setattr(plain, "slice", part)  # noqa: B010 - an attribute that torch's class does not declare
        return plain

    def some_state(self, only: Collection[str]) -> dict[str, Any]:
        """Return of what this process stores the tensors with these names."""
        stored: dict[str, Any] = {}
        with self.whole():
            for executor in self.executors:
                for index, block in _blocks(executor):
                    for place in places_in(block):
                        first = self.ties.first(place.name)
                        if place.saved and first in only and self.ties.home(place.name, index) == executor.rank:
                            stored.setdefault(first, self._plain(place.tensor))
        return stored

    def load_state_dict(self, state: Mapping[str, Any], *, partly: bool = False) -> None:
        """Load a state on all ranks, or raise on all of them before anything changes; `partly` allows that some lack.

        What a part of a state does not have stays as it is.
        """
        problems = [self._problem_with(state, executor, partly=partly) for executor in self.executors]
        for problem in self.crew.all_told("state", problems):
            if problem is not None:
                raise problem
        with self.crew.together("load_state_dict"), self.whole(changed=True):
            blocks = [block for executor in self.executors for _, block in _blocks(executor)]
            if partly:
                self._copy(blocks, state)
            for block in () if partly else blocks:
                values = {
                    name: (_entry_of(state, self.ties, name, own_value), own_value)
                    for name, own_value in _entries(block)
                }
                load_state(
                    block.module,
                    {
                        name.removeprefix(_prefix(block)): own_value if value is None else self._part(value, own_value)
                        for name, (value, own_value) in values.items()
                    },
                )
            self.share()

    def _copy(self, blocks: Iterable[Block], entries: Mapping[str, Any]) -> None:
        """Give some tensors new values."""
        with torch.no_grad():
            for place in (place for block in blocks for place in places_in(block)):
                value = None if place.tensor is None else _entry_of(entries, self.ties, place.name, place.tensor)
                if value is not None and place.tensor is not None:
                    place.tensor.copy_(self._part(value, place.tensor))

    def _whole_shape(self, own_tensor: Tensor) -> torch.Size:
        """Return the shape of the tensor of which this process may hold a part."""
        part, shape = slice_of(own_tensor), list(own_tensor.shape)
        if isinstance(part, Slice):
            shape[part.dim] *= self.crew.axes.size(part.axis)
        return torch.Size(shape)

    def _part(self, value: Any, own_value: Any) -> Any:
        """Return of a whole tensor the part that this process holds; a part stays as it is."""
        part = slice_of(own_value) if isinstance(own_value, Tensor) else None
        return (
            cut_out(value, part, self.crew.axes)
            if isinstance(part, Slice) and value.shape != own_value.shape
            else value
        )

    def _problem_with(
        self, state: Mapping[str, Any], executor: Executor, *, partly: bool = False
    ) -> DrumlineError | None:
        """Return why a rank cannot load a state, or None if it can."""
        try:
            if not isinstance(state, Mapping):
                raise ModelError(f"the state is a {type(state).__name__}", expected="a dict from names to tensors")
            for index, block in _blocks(executor):
                for name, own_tensor in _entries(block):
                    value = _entry_of(state, self.ties, name, own_tensor)
                    is_needed = not partly or (isinstance(own_tensor, nn.Parameter) and own_tensor.requires_grad)
                    if value is None and is_needed and self.ties.home(name, index) == executor.rank:
                        raise ModelError(
                            f"the state has no {name!r}",
                            expected="every parameter and buffer of this rank's stages",
                            fix=nearest(name, state),
                        )
                    if isinstance(own_tensor, Tensor) and value is not None:
                        _check_tensor(name, value, own_tensor, self._whole_shape(own_tensor))
        except DrumlineError as error:
            return error
        return None


def _check_tensor(name: str, value: Any, own_tensor: Tensor, whole: torch.Size) -> None:
    if not isinstance(value, Tensor):
        raise ModelError(f"{name!r} is a {type(value).__name__} in the state", expected="a tensor")
    if value.is_meta:
        raise ModelError(f"{name!r} is on the meta device in the state", expected="a tensor with data")
    if value.shape not in (own_tensor.shape, whole) and not is_text(name):
        raise ModelError(f"{name!r} has shape {tuple(value.shape)} in the state", expected=str(tuple(whole)))


def _entry_of(state: Mapping[str, Any], ties: Ties, name: str, own_value: Any) -> Any:
    """Return the state's entry under any of a tensor's names; the state may hold the parts of a packed one."""
    held_tensor = ties.find(name)
    every = (name,) if held_tensor is None else held_tensor.names
    names = [text for text in every if text in state]
    values = [state[text] for text in names]
    if not names and isinstance(own_value, Tensor):
        return next((value for text in every if (value := joined(state, text, own_value)) is not None), None)
    for other, value in zip(names[1:], values[1:], strict=True):
        if value is not values[0] and not is_same(value, values[0]):
            raise ModelError(
                f"{names[0]!r} and {other!r} differ in the state", expected="equal values: the model ties them"
            )
    return values[0] if values else None


def _blocks(executor: Executor) -> Iterable[tuple[int, Block]]:
    return [(index, block) for index, stage in executor.stages.items() for block in stage.blocks]


def _prefix(block: Block) -> str:
    prefix = block.name if block.prefix is None else block.prefix
    return f"{prefix}." if prefix else ""


def _entries(block: Block) -> Iterator[tuple[str, Any]]:
    """Yield what a block stores, by the names of the unsplit model."""
    yield from block.module.state_dict(prefix=_prefix(block), keep_vars=True).items()
