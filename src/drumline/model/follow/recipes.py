"""What a block computes, call by call, and how it makes tables: tensors that depend on none of its arguments.

    table = torch.linspace(0, 1, x.shape[-1])      a table: made of plain values, which in a trace are no data
    return self.layer(x) * table                   linear(argument 0, state ...), mul(result 0, table 1)

Two runs of a block compute the same if these lines are the same. Equal tables are made by equal calls of equal values,
so each process may make its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from drumline.model.follow.between_blocks import storage_of
from drumline.model.follow.refusals import name_of
from drumline.model.graph.graph import may_draw
from drumline.model.values import tensors_in
from drumline.model.watch.fingerprint import PLAIN

# Functions that ask their first tensor, or their second, for its shape and kind alone.
_LIKE_FIRST = frozenset(
    {
        "zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty",
        "new_tensor",
    }
)  # fmt: skip
_LIKE_SECOND = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})


class Recipes:
    """How the blocks of a trace make tables, and what the block that runs computes with them.

    `states` are parameters and buffers by the ids of their stand-ins. `fixed` gives a tensor that existed before the
    same number in every run, and 0 to one that has changed.
    """

    def __init__(self, states: Mapping[int, str], fixed: Callable[[Tensor], int]) -> None:
        self._states, self._fixed = states, fixed
        self._numbers: dict[Any, int] = {}  # of all recipes
        self._alive: list[Any] = []  # so that no id is used again
        self._tables: dict[int, int] = {}  # recipes, by the tensor's id
        self._memory: dict[int, list[int]] = {}  # tables by their storage
        self._arguments: dict[int, int] = {}
        self._results: dict[int, int] = {}  # tensors that are no tables
        self.lines: list[Any] = []  # what the block has computed

    def begin(self, arguments: Sequence[Tensor]) -> None:
        """React to a block being called."""
        self._arguments = {id(tensor): at for at, tensor in enumerate(arguments)}
        self._results, self.lines = {}, []

    @contextmanager
    def anew(self) -> Iterator[None]:
        """Follow the same block once more inside, without the tables of before."""
        before = self._tables, self._memory, self._results, self.lines
        self._tables, self._memory, self._results, self.lines = {}, {}, {}, []
        try:
            yield
        finally:
            self._tables, self._memory, self._results, self.lines = before

    def knows(self, value: Any) -> bool:
        """Whether a value is a table, or holds nothing but tables."""
        if isinstance(value, Tensor):
            return id(value) in self._tables
        items = list(value.values()) if isinstance(value, dict) else value
        return isinstance(items, tuple | list) and bool(items) and all(map(self.knows, items))

    def call(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        """Take a call's arguments as they are; what is returned takes its result and the tensors that it changes."""
        name = name_of(func)
        likes = args[:1] if name in _LIKE_FIRST else args[1:2] if name in _LIKE_SECOND else ()
        like_ids = {id(tensor) for tensor in likes if isinstance(tensor, Tensor)}
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if id(tensor) not in like_ids]
        line = (func, self._form(args, like_ids), self._form(kwargs, like_ids))
        is_table = not may_draw(func) and all(self._is_fixed(tensor) for tensor in tensors)
        self._alive.append((func, args, kwargs))

        def note(result: Any, changed: Sequence[Tensor]) -> None:
            results = tensors_in(result)
            fits = is_table and not any(tensor.requires_grad for tensor in results)
            if fits and all(self.knows(tensor) for tensor in changed):
                self._make(line, changed, results)
            elif results or changed or not _is_plain(result):  # what is asked of stand-ins in plain values is no data
                self._compute(line, changed, results)

        return note

    def _make(self, line: Any, changed: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Take note of tables that are new, or others than before."""
        for at in {at for tensor in changed for at in self._memory.get(storage_of(tensor), ())}:
            self._tables[at] = self._number(("changed", line, self._tables[at]))
        for place, tensor in enumerate(results):
            if id(tensor) not in self._tables:
                self._tables[id(tensor)] = self._number((line, place))
                self._memory.setdefault(storage_of(tensor), []).append(id(tensor))
                self._alive.append(tensor)

    def _compute(self, line: Any, changed: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Take note of what is no table, or no longer one."""
        self.lines.append(line)
        for at in {at for tensor in changed for at in self._memory.pop(storage_of(tensor), ())}:
            del self._tables[at]
        for tensor in (*changed, *results):
            self._results.setdefault(id(tensor), len(self._results))
            self._alive.append(tensor)

    def _number(self, recipe: Any) -> int:
        return self._numbers.setdefault(recipe, len(self._numbers))

    def _is_fixed(self, tensor: Tensor) -> bool:
        return self._of(tensor)[0] in ("table", "fixed")

    def _of(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return what a tensor is to the block."""
        for kind, known in (("argument", self._arguments), ("table", self._tables), ("result", self._results)):
            if id(tensor) in known:
                return kind, known[id(tensor)]
        number = self._fixed(tensor)
        name = self._states.get(id(tensor), "")
        return ("fixed" if number else "state", name) if name else ("fixed", number) if number else ("", id(tensor))

    def _form(self, value: Any, likes: set[int]) -> Any:
        """Return what can be compared of a call's arguments."""
        if isinstance(value, Tensor):
            if id(value) in likes:
                return "like", value.shape, value.dtype, value.device
            return self._of(value)
        if type(value) in PLAIN:
            return type(value), repr(value)
        if isinstance(value, tuple | list):
            return type(value), tuple(self._form(item, likes) for item in value)
        if isinstance(value, Mapping):
            return tuple((key, self._form(item, likes)) for key, item in value.items())
        if isinstance(value, slice):
            return slice, self._form((value.start, value.stop, value.step), likes)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return value.shape, value.dtype.str, value.tobytes()
        return id(value)


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if isinstance(value, tuple | list) else type(value) in PLAIN
