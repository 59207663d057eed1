"""Imports of quantising libraries without notes on optional kernels that a machine lacks: no result needs them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOGGERS = ("bitsandbytes", "torchao", "torch.utils._pytree")


@contextmanager
def hushed() -> Iterator[None]:
    """Let these libraries log errors alone inside.

    >>> with hushed():
    ...     logging.getLogger("torchao.kernel").isEnabledFor(logging.WARNING)
    False
    >>> logging.getLogger("torchao.kernel").isEnabledFor(logging.WARNING)
    True
    """
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in levels:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
