"""Methods of other libraries that we override or call: whether a version still has them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping


def missing_method(owner: type, wanted: Mapping[str, str]) -> str:
    """Return the first method that a class lacks, or that lacks one of the parameters wanted; else nothing.

    >>> class Trainer:
    ...     def log(self, logs): ...
    >>> missing_method(Trainer, {"log": "logs"})
    ''
    >>> missing_method(Trainer, {"log": "logs start_time"})
    'Trainer.log(logs, start_time)'
    """
    for name, parameters in wanted.items():
        function = getattr(owner, name, None)
        known = inspect.signature(function).parameters if callable(function) else {}
        if function is None or not known.keys() >= set(parameters.split()):
            return f"{owner.__name__}.{name}({', '.join(parameters.split())})"
    return ""
