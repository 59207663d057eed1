"""What a layout takes: seconds of a step and bytes of a device, item by item."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Seconds:
    """A step's seconds on the busiest rank, each second in one item; `exposed` is what computing does not hide."""

    compute: float
    recompute: float
    tensor: float
    context: float
    expert: float
    pipeline: float
    data_exposed: float
    bubble: float
    optimizer: float

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        computing = self.compute + self.recompute + self.bubble + self.optimizer
        return computing + self.tensor + self.context + self.expert + self.pipeline + self.data_exposed


@dataclass(frozen=True, slots=True)
class Bytes:
    """A device's bytes at the peak, on the rank that holds most."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        """Return the peak."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


@dataclass(frozen=True, slots=True)
class Volumes:
    """Bytes that a device sends in a step, by what they are for."""

    tensor: float
    context: float
    expert: float
    pipeline: float
    data: float


@dataclass(frozen=True, slots=True)
class Estimate:
    """All that is known of a layout before it runs. `flops_per_device` are the model's own, recomputation excluded."""

    seconds: Seconds
    bytes: Bytes
    volumes: Volumes
    flops_per_device: float
    bubble: float

    def to_json(self) -> dict[str, Any]:
        """Return an object for JSON, with sums.

        >>> zeros = Estimate(Seconds(*[1.0] * 9), Bytes(*[2.0] * 5), Volumes(*[0.0] * 5), 18.0, 0.1)
        >>> zeros.to_json()["seconds"]["total"], zeros.to_json()["flops_per_second"]
        (9.0, 2.0)
        """
        return {
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "bytes": {**asdict(self.bytes), "total": self.bytes.total},
            "volumes": asdict(self.volumes),
            "bubble": self.bubble,
            "flops_per_device": self.flops_per_device,
            "flops_per_second": self.flops_per_second,
        }

    @property
    def flops_per_second(self) -> float:
        """Return what a device achieves of the model's own operations."""
        return self.flops_per_device / self.seconds.total
