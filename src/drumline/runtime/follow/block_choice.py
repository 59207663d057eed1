"""Which modules are followed inside, and which are blocks.

A model is opened down to its lists: the elements of the outermost `nn.ModuleList`s, `nn.Sequential`s and
`nn.ModuleDict`s are blocks, and so is every other module beside them. A model without lists is opened once: its
children are its blocks. A cut that names a module deeper inside opens what is around it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def opened(model: nn.Module, cuts: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of the modules that are followed inside; the model's own is "".

    >>> body = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.ReLU()))
    >>> sorted(opened(nn.ModuleDict({"body": body, "head": nn.Linear(2, 2)})))
    ['', 'body']
    >>> sorted(opened(nn.ModuleDict({"body": body, "head": nn.Linear(2, 2)}), ["body.1.0"]))
    ['', 'body', 'body.1']
    """
    found = {""}
    for name in (*_outermost(model, ""), *cuts):
        parts = name.split(".")
        found |= {".".join(parts[:length]) for length in range(len(parts))}
    return frozenset(found | set(_outermost(model, "")))


def _outermost(module: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of the lists that are in no other list's element."""
    for child_name, child in module.named_children():
        path = f"{name}.{child_name}" if name else child_name
        if isinstance(child, _LISTS):
            if len(child) > 0:
                yield path
        else:
            yield from _outermost(child, path)


def is_list(module: nn.Module) -> bool:
    """Whether a module is a mere list of others."""
    return isinstance(module, _LISTS)
