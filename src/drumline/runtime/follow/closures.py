"""A deep copy of a model whose functions go along: hooks and other functions that hold on to parts of the model.

`copy.deepcopy` leaves functions as they are. A hook that appends to `model.features` through a variable of its own
would append to the model's list, while the copy reads its own. So functions are copied too, where they have captured
something that the model has as an attribute; all else that they captured stays what it is.
"""

from __future__ import annotations

import copy
from types import CellType, FunctionType, MethodType
from typing import Any, TypeVar

from torch import Tensor, nn

from drumline.runtime.patches import Patch, Replaced
from drumline.runtime.watch.fingerprint import can_change

M = TypeVar("M", bound=nn.Module)
_dispatch: dict[Any, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]


def copied(model: M, memo: dict[int, Any]) -> M:
    """Return a deep copy of a model, with the functions that hold on to parts of it.

    >>> class Keeps(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.kept = kept = []
    ...         self.keep = lambda x: kept.append(x)
    >>> made = copied(Keeps(), {})
    >>> made.keep(1)
    >>> made.kept
    [1]
    """
    held = (one for module in model.modules() for one in (module, *vars(module).values()))
    own = {id(one) for one in held if isinstance(one, nn.Module | Tensor) or can_change(one)}
    own |= memo.keys()
    with _FUNCTIONS.by(own), _METHODS.by(own):
        return copy.deepcopy(model, memo)


def _of_function(replaced: Replaced) -> Any:
    def copy_function(fn: FunctionType, memo: dict[int, Any]) -> Any:
        own, cells = replaced.watcher or (), fn.__closure__ or ()
        if not any(id(_content(cell)) in own for cell in cells):
            return replaced.found(fn, memo)
        made = FunctionType(fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(CellType() for _ in cells))
        made.__kwdefaults__, made.__module__, made.__qualname__ = fn.__kwdefaults__, fn.__module__, fn.__qualname__
        made.__dict__.update(fn.__dict__)
        memo[id(fn)] = made
        for cell, before in zip(made.__closure__ or (), cells, strict=True):
            content = _content(before)
            if content is not _EMPTY:
                cell.cell_contents = copy.deepcopy(content, memo) if id(content) in own else content
        return made

    return copy_function


def _of_method(replaced: Replaced) -> Any:
    def copy_method(method: MethodType, memo: dict[int, Any]) -> Any:
        own = replaced.watcher
        if own is None:
            return replaced.found(method, memo)
        if id(method.__self__) not in own:
            return method
        return MethodType(method.__func__, copy.deepcopy(method.__self__, memo))

    return copy_method


_FUNCTIONS, _METHODS = Patch(_dispatch, FunctionType, _of_function), Patch(_dispatch, MethodType, _of_method)
_EMPTY: Any = object()


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
