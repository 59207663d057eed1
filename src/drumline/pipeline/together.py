"""One table of what does not go together, made of what the core and each attached feature declare.

`Pipeline` refuses by it, `drumline train` does so before anything starts, and the documentation shows it. It is made
without PyTorch, so features are not imported by `attached.py` here: the declarations of a folder come and go with it.
"""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from drumline import features
from drumline.core.settings.clash import Clash
from drumline.engine import together


def table() -> tuple[Clash, ...]:
    """Return everything that does not go together.

    >>> [clash.first.shown for clash in table() if clash.other.shown == "`plan`"][:2]
    ['`schedule`', '`num_microbatches`']
    """
    return tuple(clash for module in (together, *_declaring()) for clash in module.CLASHES)


@cache
def _declaring() -> list[ModuleType]:
    """Return the module of each feature that declares what it does not go with."""
    names = [f"{features.__name__}.{module.name}.together" for module in pkgutil.iter_modules(features.__path__)]
    return [import_module(name) for name in names if find_spec(name) is not None]
