"""Multiply the parts of a loss by their factors in the current microbatch.

If a model adds means over different counts (words and sentences), one share per microbatch cannot be right for all of
them. The calls that compute the parts are written as `ScaledCall`, which looks up its factor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from drumline.model.loss.guard import guard
from drumline.model.loss.terms import Walk
from drumline.model.values import pack

Factors = Sequence[float | Tensor]


class Sheet:
    """Every microbatch's factors for the parts of its loss, during a step that needs them."""

    def __init__(self) -> None:
        self.factors: Mapping[int, Factors] = {}
        self.now: int | None = None  # the current microbatch

    def fill(self, factors: Mapping[int, Factors]) -> None:
        """Store a step's factors; none if one share is right for all parts."""
        self.factors, self.now = factors, None

    def factor(self, part: int) -> float | Tensor | None:
        """Return the current factor of a part; None for no factor."""
        tensors = self.factors.get(-1 if self.now is None else self.now)
        return None if tensors is None else tensors[part]


class ScaledCall:
    """A call that computes a part of a loss, multiplied by its factor."""

    def __init__(self, function: Callable[..., Any], part: int, sheet: Sheet) -> None:
        self.function = function
        self.part = part
        self.sheet = sheet
        self.__name__ = getattr(function, "__name__", "loss")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the call, and multiply its result."""
        factor = self.sheet.factor(self.part)
        tensor = _multiplied(self.function, args, kwargs, factor)
        # The only part, of which nobody on the host may know whether it counts anything.
        if factor is None and isinstance(tensor, Tensor) and not tensor.dim() and not tensor.is_cpu:
            guard(pack((args, kwargs))[0], tensor)
        return tensor


def stay_out_of_compiled_code() -> None:
    """Keep torch.compile from tracing a `ScaledCall`; only code that compiles calls this: it imports the compiler."""
    if not hasattr(ScaledCall.__call__, "_torchdynamo_disable"):
        disable: Any = torch.compiler.disable  # untyped
        setattr(ScaledCall, "__call__", disable(ScaledCall.__call__))  # noqa: B010 - mypy wants no assignment


def _multiplied(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], factor: float | Tensor | None
) -> Any:
    """Run a call and multiply its value; if the part counts nothing, return zero instead of an empty mean's NaN."""
    if isinstance(factor, float) and factor == 0.0:
        tensors = [tensor for tensor in pack((args, dict(kwargs)))[0] if tensor.requires_grad]
        return sum(((tensor.float() * 0.0).nan_to_num().sum() for tensor in tensors), torch.zeros(()))
    new_function = function(*args, **kwargs)
    return new_function if factor is None else new_function * factor


class Multiplying(TorchFunctionMode):
    """Multiplies the parts of a loss if a model computes it itself, in one microbatch.

    A part is identified by its function, and by how many calls of that function precede it in the graph. Calls inside
    blocks and in their hooks are not in the graph and do not count.
    """

    def __init__(self, walk: Walk, factors: Factors, model: nn.Module | None = None) -> None:
        super().__init__()
        calls = walk.graph.calls
        named = [] if model is None else [name for name in dict.fromkeys(new_call.block for new_call in calls) if name]
        self._blocks = [model.get_submodule(name) for name in named if model is not None]
        self._depth = 0
        self._handles: list[RemovableHandle] = []
        self._calls: dict[Any, int] = {}
        self._parts: dict[tuple[Any, int], float | Tensor] = {}
        terms = [term.call for term in walk.terms]
        by_call = dict(zip(terms if len(terms) == len(factors) else dict.fromkeys(terms), factors, strict=True))
        before: dict[Any, int] = {}
        for at, call in enumerate(calls):
            function = call.function.function if isinstance(call.function, ScaledCall) else call.function
            number = before[function] = before.get(function, -1) + 1
            if at in by_call and function is not None:
                self._parts[function, number] = by_call[at]

    def __enter__(self) -> Multiplying:
        """Start watching when blocks begin and end, including their hooks."""
        for block in self._blocks:
            self._handles.append(block.register_forward_pre_hook(self._begins, prepend=True))
            self._handles.append(block.register_forward_hook(self._ends, always_call=True))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Stop watching."""
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
        """Count the call, and multiply its result if it is a part."""
        if self._depth:
            return func(*args, **(kwargs or {}))
        number = self._calls[func] = self._calls.get(func, -1) + 1
        return _multiplied(func, args, kwargs or {}, self._parts.get((func, number)))


def scale(walk: Walk, sheet: Sheet) -> None:
    """Let the calls that compute the parts of a loss look up their factors."""
    for part, term in enumerate(walk.terms):
        call = walk.graph.calls[term.call]
        if call.function is not None:
            walk.graph.calls[term.call] = replace(call, function=ScaledCall(call.function, part, sheet))
