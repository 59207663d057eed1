"""A clock that counts work in place of seconds: every operation that torch runs takes a microsecond.

What is measured by it is the same on every machine, however busy it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.runtime.draft import Clock

MICROSECOND = 1000


class _Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.number += 1
        return func(*args, **(kwargs or {}))


class CountedClock(Clock):
    """Shows how many operations have run by now, as microseconds."""

    def __init__(self, counting: _Counting) -> None:
        self.counting = counting

    def now(self) -> int:
        return self.counting.number * MICROSECOND


@contextmanager
def counted_time() -> Iterator[None]:
    """Profile by counted operations inside; on this thread, where autograd runs on a CPU, too."""
    with _Counting() as counting, pytest.MonkeyPatch.context() as patch:
        patch.setattr("drumline.profile.blocks.clock_for", lambda device: CountedClock(counting))
        assert torch.get_default_device().type == "cpu"
        yield
