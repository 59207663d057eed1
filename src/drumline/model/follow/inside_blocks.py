"""What a trace looks for inside of blocks: what ties two of them together, so that no cut is possible between them.

    'layers.3' reads a tensor that 'layers.1' created but did not return     it may depend on the microbatch
    a table that 'layers.3' would have made as well                          no tie: another process makes its own

Whether it would have is tried: the block runs once more, with all that the forward has left anywhere put back. See
recipes.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.model.follow.attributes import BETWEEN, Attributes
from drumline.model.follow.between_blocks import changed_by_name
from drumline.model.follow.interception import version_of
from drumline.model.follow.notes import Notes
from drumline.model.follow.recipes import Recipes
from drumline.model.follow.refusals import name_of, property_of
from drumline.model.follow.skeleton import Skeleton
from drumline.model.kept_state.keeping import Beginning
from drumline.model.values import tensors_in


class InsideBlocks(Notes):
    """Notes of what blocks do; `beginning` is what they and their code kept when the trace began.

    `clear` empties functions' caches that have become fuller since.
    """

    def __init__(self, skeleton: Skeleton, beginning: Beginning, clear: Callable[[], None]) -> None:
        super().__init__(skeleton)
        self.within: list[str] = []  # the current block
        self.taken: set[int] = set()  # tensors among the current block's arguments
        self.reads: set[str] = set()
        self.changed_inside: set[str] = set()  # parts of the state that the current block changes
        # By their memory: `weight.data.mul_(2)` changes no version.
        states = ((skeleton.states.get(id(tensor), ""), tensor) for tensor in skeleton.alive)
        self.state_memory = {id(tensor.untyped_storage()): name for name, tensor in states}
        self.recipes = Recipes(skeleton.states, self._fixed)
        self.attributes = Attributes(skeleton.names, self._who, skeleton.carried, self.recipes.knows)
        self._beginning, self._clear = beginning, clear
        self._versions = {id(tensor): version_of(tensor) for tensor in skeleton.alive if not tensor.requires_grad}
        self._borrowed: dict[int, tuple[int, Tensor]] = {}  # tables of other blocks, with the call that made each
        self._is_alone = False  # whether a block runs once more

    def _who(self) -> int:
        return len(self.graph.calls) if self.within else BETWEEN

    def _fixed(self, tensor: Tensor) -> int:
        """Return a number for a tensor that existed before and is as it was; 0 for others."""
        if id(tensor) in self._versions:
            return int(version_of(tensor) == self._versions[id(tensor)])
        return 0 if tensor.requires_grad else self._beginning.identity(tensor)

    def begin_inside(self, name: str, tensors: Sequence[Tensor]) -> None:
        """React to a block being called with tensors."""
        self.taken = {id(tensor) for tensor in tensors}
        self.reads, self.changed_inside, self._borrowed = set(), set(), {}
        self.recipes.begin(tensors)
        self.within.append(name)

    def inside_block(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function inside a block, looking for tensors that are not among its arguments."""
        tensors = tensors_in((args, kwargs))
        if not self._is_alone:
            for tensor in tensors:
                self._look(tensor)
            self._ask(func, tensors)
        note = self.recipes.call(func, args, kwargs)
        versions = [version_of(tensor) for tensor in tensors]
        result = func(*args, **kwargs)
        by_name = args[:1] if property_of(func, "__set__") == "data" else changed_by_name(name_of(func), args, kwargs)
        pairs = zip(tensors, versions, strict=True)
        note(result, [*by_name, *(tensor for tensor, before in pairs if version_of(tensor) != before)])
        if self._is_alone:
            return result
        self.changed_inside |= {self.state_memory.get(id(tensor.untyped_storage()), "") for tensor in by_name}
        known = {id(tensor) for tensor in tensors}
        for tensor in tensors_in(result):
            if id(tensor) not in known:
                self.where.setdefault(id(tensor), len(self.graph.calls))
                self.kept_objects.append(tensor)
        return result

    def _ask(self, func: Callable[..., Any], tensors: Sequence[Tensor]) -> None:
        """Forbid cuts before a block that asks how its input was computed: after a cut, the input has no history."""
        asked = property_of(func)
        if asked not in ("grad_fn", "is_leaf") or id(tensors[0]) not in self.taken:
            return
        with torch._C.DisableTorchFunction():
            has_past = tensors[0].grad_fn is not None
        number = self.numbers.get(id(tensors[0]))
        if has_past and number is not None:
            reason = f"{self.within[-1]!r} reads {asked} of its input, which a cut would change"
            self.bar(self.made_by.get(number, 0), reason)

    def _look(self, tensor: Tensor) -> None:
        at, block = len(self.graph.calls), self.within[-1]
        if id(tensor) in self.taken or self.where.get(id(tensor)) == at or id(tensor) in self._borrowed:
            return
        if name := self.skeleton.states.get(id(tensor)):
            self.reads.add(name)
        elif (number := self.numbers.get(id(tensor))) is not None:
            if self.graph.is_carried(number):
                reason = f"{block!r} uses a tensor that is not among its arguments{self.kept_in(tensor)}"
                self.bar(self.made_by.get(number, 0), reason)
                self.taken.add(id(tensor))
        elif (count := self.where.get(id(tensor))) is not None:
            if self.recipes.knows(tensor):
                self._borrowed[id(tensor)] = count, tensor
            else:
                self._bar_after(count, tensor)
                self.taken.add(id(tensor))

    def _bar_after(self, count: int, tensor: Tensor) -> None:
        """Forbid cuts between the current block and one whose tensor it reads."""
        other = self.graph.calls[count].block
        self.bar(
            count, f"{self.within[-1]!r} reads a tensor that {other!r} created but did not return{self.kept_in(tensor)}"
        )

    def end_inside(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> None:
        """Forbid cuts between a block and those whose tables it uses, unless it makes the same by itself."""
        borrows = self.attributes.borrows(len(self.graph.calls))
        if (self._borrowed or borrows) and self._is_same_alone(module, call, args, kwargs):
            self.attributes.alone.add(len(self.graph.calls))
        else:
            for count, tensor in self._borrowed.values():
                self._bar_after(count, tensor)

    def _is_same_alone(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a block computes the same if no other block has run before."""
        if self.skeleton.has_numbers or not self._beginning.can_be_put_in:
            return False  # data may have become plain values
        lines = self.recipes.lines
        with self._beginning.put_in(), self.recipes.anew(), self._running_alone():
            self._clear()
            try:
                self.skeleton.run(module, call, args, kwargs)
            except Exception:
                return False
            return not self.skeleton.has_numbers and self.recipes.lines == lines

    @contextmanager
    def _running_alone(self) -> Iterator[None]:
        self._is_alone = self.attributes.is_paused = True
        try:
            yield
        finally:
            self._is_alone = self.attributes.is_paused = False
