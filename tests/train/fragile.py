"""A small model whose ranks die on order: `orders/RANK-STEP-NAME` kills that rank once the checkpoint of STEP is there.

STEP 0 kills it in its first forward. `orders/slow` makes every forward take a moment, so that a test can look on.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn


class Fragile(nn.Linear):
    """A linear layer that looks for orders before it computes."""

    orders, folder = Path(), Path()

    def forward(self, given: Tensor) -> Tensor:
        """Compute, unless an order is there."""
        if self.training and self.orders.is_dir():
            self._obey()
        return super().forward(given)

    def _obey(self) -> None:
        for path in self.orders.iterdir():
            if path.name == "slow":
                time.sleep(0.02)
                continue
            rank, step, _ = path.name.split("-")
            there = (self.folder / "checkpoints" / f"step-{int(step):08d}").exists()
            if os.environ.get("RANK", "0") == rank and (step == "0" or there):
                path.unlink()
                os.kill(os.getpid(), signal.SIGKILL)


def model(settings: Any, orders: str, blocks: int = 6) -> tuple[nn.Module, Any]:
    """Return a chain of blocks and its loss."""
    layers: list[nn.Module] = []
    for at in range(blocks):
        layer = Fragile(16, 16 if at < blocks - 1 else 4)
        layer.orders, layer.folder = Path(orders), Path(settings.folder)
        layers.append(nn.Sequential(layer, nn.Tanh(), nn.Dropout(0.1)) if at < blocks - 1 else layer)
    return nn.Sequential(*layers), nn.CrossEntropyLoss(ignore_index=-100)
