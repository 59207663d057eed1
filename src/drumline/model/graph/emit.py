"""Write part of a graph as a Python function and compile it: replaying it costs no more than its calls.

def run(piece, v0, v3):
v4 = f0(v3, 2.0)
o = piece.callees[0](v4, mask=v0)
v5 = o[0]
v4 = None
return (v5, v0)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch

from drumline.model.graph.graph import Call, CallGraph
from drumline.model.values import Path, rebuilt, refuse_fake

_LITERALS = (type(None), bool, int, str)
_CONTAINERS = {"tuple": "({})", "list": "[{}]"}


class Emitter:
    """Writes the calls of a graph; the piece that runs them has its blocks in `callees` and parameters in `homes`."""

    def __init__(self, graph: CallGraph) -> None:
        self.graph = graph
        self.names: dict[str, Any] = {"gradients": torch.set_grad_enabled, "autocast": torch.autocast}
        self.lines: list[str] = []

    def function(
        self, takes: Sequence[int], calls: Iterable[int], returns: str, kept_values: Iterable[int] = ()
    ) -> Any:
        """Return a function of a piece and the values `takes` that runs `calls` and returns an expression."""
        order = [at for at in calls if at not in self.graph.idle]
        self.lines = [f"def run({', '.join(['piece', *(f'v{value}' for value in takes)])}):"]
        last: dict[int, int] = {}
        for at in order:
            last.update(
                dict.fromkeys((*self.graph.calls[at].takes, *(number for _, number in self.graph.calls[at].makes)), at)
            )
        for value in kept_values:
            last.pop(value, None)
        for at in order:
            self._call(self.graph.calls[at])
            done = [value for value, end in last.items() if end == at and self.graph.is_carried(value)]
            if done:
                self.lines.append(f"    {' = '.join(f'v{value}' for value in done)} = None")
        self.lines.append(f"    return {returns}")
        source = "\n".join(self.lines)
        space = dict(self.names)
        exec(compile(source, "<a piece of the model>", "exec"), space)
        function = space["run"]
        function.source = source
        return function

    def expression(self, form: Any, values: Sequence[int]) -> str:
        """Return code that rebuilds a value from its form."""
        if form is None:
            return self._value(values[0])
        if isinstance(form, int):
            return self._value(values[form])
        kind, *parts = form
        if kind == "plain":
            return self._plain(parts[0])
        if kind in ("fields", "mapping"):
            named = ", ".join(
                f"{self._plain(name)}: {self.expression(part, values)}"
                for name, part in zip(parts[1], parts[2:], strict=True)
            )
            if kind == "fields" and not all(field.init for field in fields(parts[0])):
                return f"{self._constant(rebuilt)}({self._constant(parts[0])}, {{{named}}})"
            stars = "**" if kind == "fields" else ""
            return f"{self._constant(parts[0])}({stars}{{{named}}})"
        if kind == "dict":
            pairs = zip(parts[0], parts[1:], strict=True)
            return f"{{{', '.join(f'{self._plain(name)}: {self.expression(part, values)}' for name, part in pairs)}}}"
        if kind == "named":
            return f"{self._constant(parts[0])}({', '.join(self.expression(part, values) for part in parts[1:])})"
        inside = "".join(f"{self.expression(part, values)}, " for part in parts)
        return f"slice({inside})" if kind == "slice" else _CONTAINERS[kind].format(inside)

    def _call(self, call: Call) -> None:
        _, args, kwargs = call.form
        expressions = [self.expression(part, call.takes) for part in args[1:]]
        for name, part in zip(kwargs[1], kwargs[2:], strict=True):
            expression = self.expression(part, call.takes)
            expressions.append(f"{name}={expression}" if name.isidentifier() else f"**{{{name!r}: {expression}}}")
        target = f"piece.callees[{call.block!r}]" if call.block else self._constant(call.function)
        text = f"{target}({', '.join(expressions)})"
        indent = "    "
        for context in self._contexts(call):
            self.lines.append(f"{indent}with {context}:")
            indent += "    "
        if len(call.makes) == 1 and not call.makes[0][0]:
            self.lines.append(f"{indent}v{call.makes[0][1]} = {text}")
            return
        self.lines.append(f"{indent}{'o = ' if call.makes else ''}{text}")
        self.lines += [f"    v{value} = o{self._path(path)}" for path, value in call.makes]
        if call.makes:
            self.lines.append("    o = None")

    def _contexts(self, call: Call) -> list[str]:
        contexts = [] if call.has_grad is None else [f"gradients({call.has_grad})"]
        if call.autocast is not None:
            device, enabled, dtype = call.autocast
            contexts.append(f"autocast({device!r}, enabled={enabled}, dtype={self._constant(dtype)})")
        return contexts

    def _path(self, path: Path) -> str:
        return "".join(f".{key}" if kind == "field" else f"[{self._plain(key)}]" for kind, key in path)

    def _value(self, value: int) -> str:
        known = self.graph.values[value]
        if known.state:
            return f"getattr(piece.homes[{known.state!r}], {known.state.rpartition('.')[2]!r})"
        return f"v{value}" if known.constant is None else self._constant(known.constant)

    def _plain(self, value: Any) -> str:
        return repr(value) if type(value) in _LITERALS else self._constant(value)

    def _constant(self, value: Any) -> str:
        refuse_fake(value)
        for name, key in self.names.items():
            if key is value:
                return name
        self.names[name := f"c{len(self.names)}"] = value
        return name
