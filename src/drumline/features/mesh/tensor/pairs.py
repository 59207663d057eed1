"""Which divided layers belong together: what layers by columns make is a part, and layers by rows take it.

    attention.query  by columns ─┐                     mlp.up  by columns ─► ?  nothing in mlp takes parts, and
    attention.out    by rows    ◄┘                     attention.out has its own: mlp.up is refused

A pair is found in the innermost module around both. Only names count: the order of calls is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.core.errors import ModelError
from drumline.features.mesh.tensor.divide import DividedModule


def refuse_unpaired(modules: Sequence[DividedModule]) -> None:
    """Refuse a layer by columns without one by rows behind it, and one by rows without one by columns before it.

    >>> from torch import nn
    >>> from drumline.model.layers.styles import Colwise, Rowwise
    >>> up = DividedModule("mlp.up", nn.Linear(2, 4), Colwise(), nn.Module())
    >>> refuse_unpaired([up, DividedModule("mlp.down", nn.Linear(4, 2), Rowwise(), nn.Module())])
    >>> refuse_unpaired([up])
    Traceback (most recent call last):
    drumline.core.errors.ModelError: tensor_parallel divides mlp.up by columns, and no layer by rows takes its part; ...
    """
    every = [module for module in modules if module.makes_part or module.takes_part]
    # Layers directly in a module go with any inside of it; others only with those that have no partner further inside.
    open_ones = [module for module in every if not _has_pair(_inside(module.name.rpartition(".")[0], every), module)]
    for scope in sorted({scope for layer in open_ones for scope in _scopes(layer.name)}, key=_depth, reverse=True):
        inside = _inside(scope, open_ones)
        open_ones = [layer for layer in open_ones if layer not in inside or not _has_pair(inside, layer)]
    for layer in open_ones:
        if layer.makes_part:
            raise ModelError(
                f"tensor_parallel divides {layer.name} by columns, and no layer by rows takes its part",
                expected='a "rowwise" layer after it, which adds the parts up',
                fix=f'name that layer too, or let all lines get the whole output: {{{layer.name!r}: "colwise_gather"}}',
            )
        raise ModelError(
            f"tensor_parallel divides {layer.name} by rows, and no layer by columns makes its input in parts",
            expected='a "colwise" layer before it',
            fix=f'name that layer too, or let it take its part of a whole input: {{{layer.name!r}: "rowwise_split"}}',
        )


def _inside(scope: str, every: Sequence[DividedModule]) -> list[DividedModule]:
    return [module for module in every if scope in _scopes(module.name)]


def _has_pair(there: Sequence[DividedModule], module: DividedModule) -> bool:
    return any(other.makes_part != module.makes_part for other in there)


def _scopes(name: str) -> set[str]:
    """Return the names of all modules around one.

    >>> sorted(_scopes("a.b.c"))
    ['', 'a', 'a.b']
    """
    parts = name.split(".")
    return {".".join(parts[:at]) for at in range(len(parts))}


def _depth(scope: str) -> int:
    return len(scope.split(".")) if scope else 0
