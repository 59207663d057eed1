"""Random numbers that depend on what is computed and not on where.

Before a block runs, the generators are seeded from (seed, step, microbatch, data-parallel rank, block name). So a block
draws the same numbers on whichever rank and in whatever order it runs, and again when it is recomputed. Blocks made
only of layers that are known to draw nothing are left alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import torch
from torch import Tensor, nn

# Layers of torch.nn that may draw random numbers; all others of torch.nn draw none.
_DRAWING = (
    nn.modules.dropout._DropoutNd,
    nn.RReLU,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
)


def may_draw(block: nn.Module) -> bool:
    """Whether the block may draw random numbers; what is not a plain layer of torch.nn may.

    >>> may_draw(nn.Sequential(nn.Linear(2, 2), nn.GELU())), may_draw(nn.Dropout())
    (False, True)
    """
    return any(
        isinstance(module, _DRAWING) or not type(module).__module__.startswith("torch.nn.modules")
        for module in block.modules()
    )


class Randomness:
    """Seeds a device's generators for one block of one microbatch."""

    def __init__(self, seed: int, device: torch.device, *, data_rank: int = 0) -> None:
        self.seed = seed
        self.data_rank = data_rank
        self.step = 0
        self._device = device
        self._silent = False
        self._before: tuple[Tensor, ...] | None = None
        self._drawn: set[str] | None = None

    def seed_for(self, microbatch: int, block: str) -> int:
        """Return the seed of a block for a microbatch of this step.

        >>> one = Randomness(0, torch.device("cpu"))
        >>> one.seed_for(0, "layers.3") == one.seed_for(0, "layers.3"), one.seed_for(0, "a") == one.seed_for(1, "a")
        (True, False)
        """
        key = f"{self.seed}/{self.step}/{microbatch}/{self.data_rank}/{block}".encode()
        return int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 1

    def apply(self, microbatch: int, block: str) -> None:
        """Seed the generators for what `block` is about to draw."""
        if self._silent:
            return
        seed = self.seed_for(microbatch, block)
        torch.default_generator.manual_seed(seed)
        if self._device.type != "cpu":
            torch.get_device_module(self._device).manual_seed(seed)
        if self._drawn is not None:
            self._before = self._states()

    def applied(self, block: str) -> None:
        """After a block ran: note whether it drew anything, if somebody watches."""
        if self._drawn is not None and any(
            not torch.equal(one, other) for one, other in zip(self._before or (), self._states(), strict=False)
        ):
            self._drawn.add(block)

    def _states(self) -> tuple[Tensor, ...]:
        if self._device.type == "cpu":
            return (torch.default_generator.get_state(),)
        return torch.default_generator.get_state(), torch.get_device_module(self._device).get_rng_state()

    @contextmanager
    def watched(self) -> Iterator[set[str]]:
        """Collect the names of the blocks that draw."""
        self._drawn = set()
        try:
            yield self._drawn
        finally:
            self._drawn = None

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Seed nothing, for blocks that are known to draw nothing."""
        self._silent = True
        try:
            yield
        finally:
            self._silent = False

    @contextmanager
    def kept_aside(self) -> Iterator[None]:
        """Give the user's own random numbers back afterwards, as if nothing had been drawn."""
        state = torch.default_generator.get_state()
        device = torch.get_device_module(self._device) if self._device.type != "cpu" else None
        device_state = None if device is None else device.get_rng_state()
        try:
            yield
        finally:
            torch.default_generator.set_state(state)
            if device is not None:
                device.set_rng_state(device_state)
