"""For which sizes a traced graph is the model: what PyTorch's exporter assumed of rows and length while it traced.

A trace follows one branch of `if tokens.shape[1] % 8 == 0`. The exporter notes the assumption as an assertion in the
program or as a range, and the ONNX graph has neither. So the program's are evaluated here, size by size:

    assumptions    rows <= 8, length % 8 == 0
    admitted       rows 1 to 8, lengths 8, 16, 24, ...        a range with a step; anything else is refused

A trace takes every size that may change as 2 or more. Traces with one row and with length 1 add what holds there. Some
assumptions only tell 1 from larger sizes, and the graph is right without them. So sizes up to 16 for which nothing else
speaks are run, and admitted if the graph computes there what PyTorch does.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from drumline.core.errors import ModelError
from drumline.serve.wire.manifest import BATCH, Sizes

LENGTH = "length"
MOST_ROWS = 64  # rows for which an assumption of rows and length together is looked at
_MOST_LENGTHS = 1024  # evaluated for each of these rows
_FEW_ROWS = 8  # a condition of rows and length that fails at so few is no range of rows
_SMALL = 16  # sizes up to which an assumption may only tell 1 from more
# The exporter's functions of sizes, as Python's.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("Mod", "PythonMod"), operator.mod),
    **dict.fromkeys(("FloorDiv", "CleanDiv"), operator.floordiv),
    **dict.fromkeys(("FloatTrueDiv", "IntTrueDiv"), operator.truediv),
    **dict.fromkeys(("FloatPow", "PowByNatural", "Pow"), operator.pow),
    **dict.fromkeys(("TruncToInt", "TruncToFloat"), math.trunc),
    "Add": lambda *parts: sum(parts),
    "Mul": lambda *parts: math.prod(parts),
    "And": lambda *parts: all(parts),
    "Or": lambda *parts: any(parts),
    "Not": operator.not_,
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
    "Min": min,
    "Max": max,
    "ToFloat": float,
    "CeilToInt": math.ceil,
    "FloorToInt": math.floor,
    "RoundToInt": round,
    "OpaqueUnaryFn_sqrt": math.sqrt,
}
_COUNTS = re.compile(r"u\d+ >= 0|0 <= u\d+|u\d+ <= \d+")  # what is true of any count of values
Tries = Callable[[int, int], bool]
Evaluated = Callable[[Mapping[str, int]], Any]


@dataclass(frozen=True, slots=True)
class Assumption:
    """Something that a trace took for true: as the exporter writes it, and a function of the sizes by name."""

    text: str
    names: frozenset[str]
    holds: Callable[[Mapping[str, int]], bool]


def assumptions_of(program: Any, changing: Mapping[str, Mapping[int, str]]) -> list[Assumption]:
    """Return what an exported program assumes; `changing` names the dimensions of its inputs that may change."""
    sizes = _sizes(program, changing)
    symbols = {size.node.expr: name for size, name in sizes}
    ranges = program.range_constraints
    bounds = [_range(name, ranges[symbol]) for symbol, name in symbols.items() if symbol in ranges]
    return bounds + [_assumption(expression, symbols) for expression in _conditions(program, sizes)]


def _conditions(program: Any, sizes: Sequence[tuple[Any, str]]) -> list[Any]:
    """Return the conditions that a program asserts, and those that its trace noted without an assertion."""
    asserted = [node for node in program.graph.nodes if node.target is torch.ops.aten._assert_scalar.default]
    values = [node.args[0].meta["val"] for node in asserted if isinstance(node.args[0], torch.fx.Node)]
    conditions = [value.node.expr for value in values if not isinstance(value, bool)]
    if sizes:
        environment = sizes[0][0].node.shape_env
        conditions += [guard.expr for guard in environment.guards]
        conditions += [noted.expr for several in environment.deferred_runtime_asserts.values() for noted in several]
        # Inputs with the same rows have one symbol for them; the front holds requests to that.
        conditions = [environment.replace(condition) for condition in conditions]
    return [condition for condition in dict.fromkeys(conditions) if condition != sympy.true]


def _sizes(program: Any, changing: Mapping[str, Mapping[int, str]]) -> list[tuple[Any, str]]:
    """Return the size of every dimension that may change, as the exporter traced it, and its name."""
    sizes: list[tuple[Any, str]] = []
    values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
    for (name, dimensions), place in zip(changing.items(), program.graph_signature.user_inputs, strict=True):
        for at, dimension in dimensions.items():
            size = values[place].shape[at]
            if isinstance(size, int) or not size.node.expr.is_Symbol:
                raise ModelError(
                    f"the exporter fixed dimension {at} of input {name!r} to {size}",
                    expected=f"a model that takes any {'number of rows' if dimension == BATCH else dimension}",
                    fix="leave out operations that need the size as a number, such as int(x.shape[0])",
                )
            sizes.append((size, dimension))
    return sizes


def _range(name: str, bounds: Any) -> Assumption:
    least, most = (int(bound) if bound.is_Integer else None for bound in (bounds.lower, bounds.upper))
    text = " <= ".join(str(part) for part in (least, name, most) if part is not None)
    return Assumption(text, frozenset({name}), lambda sizes: (least or 0) <= sizes[name] <= (most or sizes[name]))


def _assumption(expression: Any, symbols: Mapping[Any, str]) -> Assumption:
    text = str(expression)
    for symbol, name in symbols.items():
        text = text.replace(str(symbol), name)
    used = [symbol for symbol in symbols if symbol in expression.free_symbols]
    if len(used) < len(expression.free_symbols) and not _COUNTS.fullmatch(text):
        raise ModelError(
            f"the exported graph is right only if {text}, which depends on the values of inputs",
            expected="a graph that depends on the sizes of its inputs alone",
            fix="leave out branches and sizes that depend on values, such as int(lengths.max())",
        )
    if len(used) < len(expression.free_symbols):
        return Assumption(text, frozenset(), lambda sizes: True)  # a count that is not negative
    names = {symbol: symbols[symbol] for symbol in used}
    evaluated = _evaluated(expression, names) or _substituted(expression, names)

    def holds(sizes: Mapping[str, int]) -> bool:
        try:
            return bool(evaluated(sizes))
        except ZeroDivisionError:
            return False

    return Assumption(text, frozenset(names.values()), holds)


def _evaluated(expression: Any, names: Mapping[Any, str]) -> Evaluated | None:
    """Return an expression of sizes as a function of them; None if it has an operation that the table lacks."""
    if expression in names:
        return operator.itemgetter(names[expression])
    if not expression.args:
        number = int(expression) if expression.is_Integer else float(expression) if expression.is_number else None
        return None if number is None else lambda sizes: number
    function = _FUNCTIONS.get(type(expression).__name__)
    parts = [_evaluated(part, names) for part in expression.args]
    if function is None or None in parts:
        return None
    known = [part for part in parts if part is not None]
    return lambda sizes: function(*[part(sizes) for part in known])


def _substituted(expression: Any, names: Mapping[Any, str]) -> Evaluated:
    """Return the same by substitution, which is slow."""
    return lambda sizes: expression.xreplace({symbol: sympy.Integer(sizes[name]) for symbol, name in names.items()})


class Admission:
    """Which sizes are admitted: by what all traces assume, and where that says nothing, by trying them."""

    def __init__(
        self, general: Sequence[Assumption], *, most: Mapping[str, int], has_length: bool, tries: Tries
    ) -> None:
        self._general, self._tries = general, tries
        self._lengths = range(1, most.get(LENGTH, 1) + 1) if has_length else range(1, 2)
        self._has_length = has_length
        self.with_one_row: Sequence[Assumption] = ()
        self.with_length_one: Sequence[Assumption] = ()
        self._tried: dict[tuple[int, int], bool] = {}

    def broken(self, rows: int, length: int) -> str:
        """Return the assumption that does not hold for a size, or an empty text."""
        sizes = {BATCH: rows, LENGTH: length}
        return next((item.text for item in self._assumptions(rows, length) if not item.holds(sizes)), "")

    def _assumptions(self, rows: int, length: int) -> Iterator[Assumption]:
        yield from self._general
        if rows == 1:
            yield from self.with_one_row
        if length == 1 and self._has_length:
            yield from self.with_length_one

    def dimensions(self, length: int) -> dict[str, Sizes]:
        """Return the rows and lengths that are admitted, `length` among them; ModelError if no range has them."""
        lengths = self._admitted_lengths(length)
        dimensions = {BATCH: Sizes(1, self._most_rows(lengths))}
        if self._has_length:
            dimensions[LENGTH] = Sizes(lengths[0], lengths[-1], lengths.step)
        return dimensions

    def _admitted_lengths(self, length: int) -> range:
        """Return the lengths that any number of rows may have."""
        # Of length 1 the exporter notes nothing, as it takes every size for 2 or more: that is tried.
        noted = [size for size in self._lengths if size > 1 or not self._has_length]
        sure = [size for size in noted if not self.broken(1, size) and not self.broken(2, size)]
        small = [size for size in range(1, min(_SMALL, self._lengths[-1]) + 1) if size not in sure]
        for more in ([size for size in small if self._right(size)] if sure or small else [], []):
            both = sorted({*sure, *more})
            step = both[1] - both[0] if len(both) > 1 else 1
            if both and both == list(range(both[0], both[-1] + 1, step)) and (not self._has_length or length in both):
                return range(both[0], both[-1] + 1, step)
        gaps = (size for size in self._lengths if size not in sure)
        texts = (self.broken(rows, gap) for gap in gaps for rows in (2, 1))
        raise self._refused(next(filter(None, texts), f"length is not {length}"))

    def _right(self, length: int) -> bool:
        """Whether the graph computes what PyTorch does for a length, with one row and with several."""
        for rows in (1, 2, 5):
            if (rows, length) not in self._tried:
                self._tried[rows, length] = self._tries(rows, length)
            if not self._tried[rows, length]:
                return False
        return True

    def _most_rows(self, lengths: range) -> int | None:
        together = [item for item in self._general if BATCH in item.names]
        if not together:
            return None
        stride = max(1, len(lengths) // _MOST_LENGTHS)
        looked = [*lengths[::stride], lengths[-1]]
        for rows in range(1, MOST_ROWS + 1):
            for size in looked:
                if (1, size) in self._tried:
                    continue
                sizes = {BATCH: rows, LENGTH: size}
                broken = next((item for item in together if not item.holds(sizes)), None)
                if broken is not None:
                    if rows <= 2 or (rows <= _FEW_ROWS and LENGTH in broken.names):
                        raise self._refused(broken.text)
                    return rows - 1
        unbounded = {BATCH: 2**40, LENGTH: lengths[0]}
        is_any = all(item.names == {BATCH} and item.holds(unbounded) for item in together if item.names)
        return None if is_any else MOST_ROWS

    def _refused(self, text: str) -> ModelError:
        return ModelError(
            f"the exported graph is right only if {text}",
            expected="a condition that ranges of rows and lengths express, such as length <= 64 or length % 8 == 0",
            fix="leave out the branch of forward that depends on sizes, or choose another --length or --max-length",
        )
