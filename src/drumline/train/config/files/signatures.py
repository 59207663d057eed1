"""What a user's function takes, read from its source: importing it may take long, and would run the user's code.

Only what is certain is refused. A function behind a decorator, or one that is assigned, is left to whoever calls it.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from drumline.core.errors import nearest
from drumline.train.config.functions import parts_of
from drumline.train.config.problems import Problem

# What each function is offered by name; it gets those that it takes.
OFFERED = {
    "model": ("settings", "tokenizer"),
    "data": ("settings", "built", "tokenizer", "rank", "size", "seed"),
}
_LARGEST = 2**22  # bytes of source
Function = ast.FunctionDef | ast.AsyncFunctionDef


def refusals(name: str, table: str, arguments: Mapping[str, object]) -> Iterator[Problem]:
    """Yield why the function of a config's table cannot be called with the arguments that the config gives it."""
    home, function = parts_of(name)
    refusal = partial(Problem, "", f"{table}.function")
    path = Path(home) if home.endswith(".py") else _module(home)
    if path is None or path.stat().st_size > _LARGEST:
        return
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except SyntaxError as error:
        yield refusal(f"{path}, line {error.lineno}: {error.msg}", "a Python file that can be imported")
        return
    except (ValueError, OSError, RecursionError) as error:
        yield refusal(f"{path}: {error}"[:200], "a Python file that can be imported")
        return
    bound = _bound(tree.body)
    if function not in bound:
        if "*" not in bound and "__getattr__" not in bound:
            own_names = [text for text in bound if not text.startswith("_")]
            yield refusal(f"{path} has no function {function!r}", fix=nearest(function, own_names) if own_names else "")
        return
    node = bound[function]
    if isinstance(node, Function) and not node.decorator_list:
        yield from _unlike(f"{path}, line {node.lineno}: {function}", node.args, table, arguments)


def _module(name: str) -> Path | None:
    """Return the source of a module, found as an import would find it, but without importing its packages."""
    inside = name.replace(".", "/")
    for folder in (Path.cwd(), *map(Path, sys.path)):
        for path in (folder / f"{inside}.py", folder / inside / "__init__.py"):
            if path.is_file():
                return path
    return None


def _bound(body: list[ast.stmt]) -> dict[str, ast.AST | None]:
    """Return the names that a module binds, each with its function if it is one; "*" if it may bind others."""
    nodes: dict[str, ast.AST | None] = {}
    for node in body:
        if isinstance(node, Function | ast.ClassDef):
            nodes[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            nodes |= {(name.asname or name.name).partition(".")[0]: None for name in node.names}
        else:
            named = (s for s in ast.walk(node) if isinstance(s, ast.Name) and isinstance(s.ctx, ast.Store))
            nodes |= {name.id: None for name in named}
            for part in ("body", "orelse", "finalbody", "handlers"):
                inner = getattr(node, part, [])
                for handler in inner if isinstance(inner, list) else []:
                    within = _bound(handler.body if isinstance(handler, ast.ExceptHandler) else [handler])
                    nodes |= dict.fromkeys(within)  # which of several is bound is not known
    return nodes


def _unlike(what: str, takes: ast.arguments, table: str, arguments: Mapping[str, object]) -> Iterator[Problem]:
    refusal = partial(Problem, "", f"{table}.function")
    names = [argument.arg for argument in (*takes.args, *takes.kwonlyargs)]
    if takes.posonlyargs:
        first = takes.posonlyargs[0].arg
        yield refusal(f"{what} takes {first} by its place alone", "arguments that can be given by name")
    if takes.kwarg is None:
        for argument in arguments:
            if argument not in names:
                fix = nearest(argument, names) if names else "leave it out"
                yield Problem("", f"{table}.arguments.{argument}", f"{what} does not take {argument}", fix=fix)
    needed = [argument.arg for argument in takes.args[: len(takes.args) - len(takes.defaults)]]
    needed += [k.arg for k, expression in zip(takes.kwonlyargs, takes.kw_defaults, strict=True) if expression is None]
    offered = OFFERED[table]
    for name in needed:
        if name not in offered and name not in arguments:
            fix = f"add it to the table [{table}.arguments]"
            yield refusal(f"{what} needs {name}", f"one of {', '.join(offered)}", fix)
