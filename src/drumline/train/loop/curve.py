"""The losses and gradient norms of a run: they stay on the device until they are read, many at once.

Reading a number waits for the device. So a step that nobody looks at is not waited for by this.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

_MOST_KEPT = 256  # updates whose numbers are not read yet


class Curve:
    """Numbers of every update, in order; `losses` and `norms` hold those that were read, eight bytes each.

    >>> curve = Curve()
    >>> curve.add([(0.25, torch.tensor(2.0)), (0.75, torch.tensor(4.0))], torch.tensor(0.5))
    >>> list(curve.losses), curve.latest.item()
    ([], 3.5)
    >>> curve.read()
    >>> list(curve.losses), list(curve.norms)
    ([3.5], [0.5])
    """

    def __init__(self) -> None:
        self.losses = array("d")
        self.norms = array("d")
        self._shares: list[list[float]] = []  # of updates that were not read
        self._parts: list[Tensor] = []  # losses of their steps
        self._norms: list[Tensor] = []

    def add(self, parts: Sequence[tuple[float, Tensor]], norm: Tensor | None) -> None:
        """Add an update: the loss of each of its steps with its share, and the norm where gradients were clipped."""
        if len(self._shares) >= _MOST_KEPT:
            self.read()
        self._shares.append([share for share, _ in parts])
        self._parts += [loss.detach() for _, loss in parts]
        if norm is not None:
            self._norms.append(norm.detach())

    @property
    def latest(self) -> Tensor:
        """The loss of the last update that was added and not read, as a tensor where it is."""
        shares = self._shares[-1]
        parts = self._parts[-len(shares) :]
        if len(shares) == 1:
            return parts[0]
        wide = parts[0].dtype if parts[0].device.type == "mps" else torch.float64
        return torch.stack([share * loss.to(wide) for share, loss in zip(shares, parts, strict=True)]).sum()

    def read(self) -> None:
        """Read all numbers that were added."""
        losses = iter(torch.stack(self._parts).tolist() if self._parts else ())
        self.losses.extend(sum(share * next(losses) for share in shares) for shares in self._shares)
        self.norms.extend(torch.stack(self._norms).tolist() if self._norms else ())
        self._shares, self._parts, self._norms = [], [], []
