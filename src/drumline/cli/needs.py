"""Verbs that run a model need PyTorch; the others do without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from drumline.core.errors import UsageError


@contextmanager
def pytorch(verb: str) -> Iterator[None]:
    """Say what to install where importing what a verb runs finds no PyTorch.

    >>> with pytorch("demo trains a model"):
    ...     raise ModuleNotFoundError(name="torch")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: demo trains a model, and PyTorch is not installed; pip install "drumline[train]"
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "torch":
            raise
        raise UsageError(f"{verb}, and PyTorch is not installed", fix='pip install "drumline[train]"') from None
