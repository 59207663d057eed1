"""The parts of a loss, each multiplied by what it counts in the microbatch that runs.

Where a model adds up means over different things (words and sentences), one share for a whole microbatch cannot be
right for all of them. The calls that make the parts are written as `Scaled`, which looks its factor up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from drumline.runtime.loss.terms import Walk
from drumline.runtime.values import pack

Factors = Sequence[float | Tensor]


class Sheet:
    """Every microbatch's factors for the parts of its loss, while a step runs that needs some."""

    def __init__(self) -> None:
        self.factors: Mapping[int, Factors] = {}
        self.now: int | None = None  # the microbatch that runs

    def fill(self, factors: Mapping[int, Factors]) -> None:
        """Take a step's factors; none where one share is right for all parts."""
        self.factors, self.now = factors, None

    def factor(self, part: int) -> float | Tensor | None:
        """Return what a part is multiplied by now; None for nothing."""
        found = self.factors.get(-1 if self.now is None else self.now)
        return None if found is None else found[part]


class Scaled:
    """A call that makes a part of a loss, multiplied by what that counts."""

    def __init__(self, function: Callable[..., Any], part: int, sheet: Sheet) -> None:
        self.function = function
        self.part = part
        self.sheet = sheet
        self.__name__ = getattr(function, "__name__", "loss")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make the call, and multiply what it makes."""
        return _multiplied(self.function, args, kwargs, self.sheet.factor(self.part))


def stay_out_of_compiled_code() -> None:
    """Keep torch.compile from following a `Scaled`: asked by who compiles, as it imports all of torch's compiler."""
    if not hasattr(Scaled.__call__, "_torchdynamo_disable"):
        disable: Any = torch.compiler.disable  # untyped
        setattr(Scaled, "__call__", disable(Scaled.__call__))  # noqa: B010 - mypy wants no assignment


def _multiplied(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], factor: float | Tensor | None
) -> Any:
    """Make a call and multiply its value; where the part counts nothing, zero stands for a mean over nothing, NaN."""
    if isinstance(factor, float) and factor == 0.0:
        given = [one for one in pack((args, dict(kwargs)))[0] if one.requires_grad]
        return sum(((one.float() * 0.0).nan_to_num().sum() for one in given), torch.zeros(()))
    made = function(*args, **kwargs)
    return made if factor is None else made * factor


class Multiplying(TorchFunctionMode):
    """Multiplies the parts of a loss where a model computes it by itself, in one microbatch.

    A part is told by its function, and by how many calls of that function come before it in the graph. What blocks call
    inside of themselves, and what their hooks call, is not in the graph and does not count.
    """

    def __init__(self, walk: Walk, factors: Factors, model: nn.Module) -> None:
        super().__init__()
        calls = walk.graph.calls
        self._blocks = [model.get_submodule(name) for name in dict.fromkeys(one.block for one in calls) if name]
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        self._calls: dict[Any, int] = {}
        self._parts: dict[tuple[Any, int], float | Tensor] = {}
        by_call = dict(zip((term.call for term in walk.terms), factors, strict=True))
        before: dict[Any, int] = {}
        for at, call in enumerate(calls):
            function = call.function.function if isinstance(call.function, Scaled) else call.function
            number = before[function] = before.get(function, -1) + 1
            if at in by_call and function is not None:
                self._parts[function, number] = by_call[at]

    def __enter__(self) -> Multiplying:
        """Watch when blocks begin and end, their own hooks included."""
        for block in self._blocks:
            self._handles.append(block.register_forward_pre_hook(self._begins, prepend=True))
            self._handles.append(block.register_forward_hook(self._ends, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Watch no more."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _begins(self, *_: Any) -> None:
        self._depth += 1

    def _ends(self, *_: Any) -> None:
        self._depth -= 1

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Count the call, and multiply what it makes if it is a part."""
        if self._depth:
            return func(*args, **(kwargs or {}))
        number = self._calls[func] = self._calls.get(func, -1) + 1
        return _multiplied(func, args, kwargs or {}, self._parts.get((func, number)))


def scale(walk: Walk, sheet: Sheet) -> None:
    """Let the calls that make the parts of a loss look up what these count."""
    for part, term in enumerate(walk.terms):
        call = walk.graph.calls[term.call]
        if call.function is not None:
            walk.graph.calls[term.call] = replace(call, function=Scaled(call.function, part, sheet))
