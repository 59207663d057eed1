"""The seam between captured rows and whatever records work and launches it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor


class Recorder(ABC):
    """Records what is computed, to be launched again as one.

    Recordings of one pool share its memory: what a tensor leaves free is used by recordings that come later. So they
    must be launched in the order in which they were made, one round after the other.
    """

    device_type: str

    @abstractmethod
    def aside(self) -> AbstractContextManager[None]:
        """Run as ever, but where recordings are made, so that all that is set up on first use is there for them."""

    @abstractmethod
    def new_pool(self) -> Any:
        """Return a pool for recordings that belong together, with nothing in it."""

    @abstractmethod
    def capture(self, pool: Any, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` computes, without computing it, and return what does."""

    @abstractmethod
    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same memory that neither keeps it from being used again nor shares its version."""
