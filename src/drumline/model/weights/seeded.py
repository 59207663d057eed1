"""Random numbers that depend on a name and on how many were drawn, and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Seeded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Seeds the generators before every operation that draws from them."""

    def __init__(self, key: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key = key
        self.num_draws = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; telling the compiler would import it: seconds, 40 MB

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, seeded."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            digest = blake2b(f"{self.key}/{self.num_draws}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "little") >> 1)
            self.num_draws += 1
        return func(*args, **(kwargs or {}))
