"""Machines as numbers: a device, the links inside a node, the links between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from drumline.core.errors import PlanError


@dataclass(frozen=True, slots=True)
class Link:
    """A link as one device sees it: latency of a message, and bytes a second that it really carries one way."""

    latency_seconds: float
    bytes_per_second: float

    def __post_init__(self) -> None:
        if not 0 <= self.latency_seconds < math.inf:
            raise PlanError(f"the latency of a link is {self.latency_seconds}", expected="0 or more seconds")
        if not self.bytes_per_second > 0:
            raise PlanError(f"a link carries {self.bytes_per_second} bytes per second", expected="more than 0")

    def seconds(self, size: float) -> float:
        """Return what a message of `size` bytes takes.

        >>> Link(1e-6, 1e9).seconds(1e6)
        0.001001
        """
        return self.latency_seconds + size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Reach:
    """What part of a data sheet's numbers kernels reach.

    `product` is for a product that is deep and large; `depth` is how many steps of the inner sum it takes to start and
    to write out a tile. `memory` is for kernels that pass over memory, `attention` for fused attention.
    `launch_seconds` is the gap between two kernels.
    """

    product: float
    depth: float
    memory: float
    attention: float
    launch_seconds: float

    def __post_init__(self) -> None:
        for name in ("product", "memory", "attention"):
            if not 0 < getattr(self, name) <= 1:
                raise PlanError(f"the reach of {name} is {getattr(self, name)}", expected="above 0 and up to 1")
        for name in ("depth", "launch_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} is {getattr(self, name)}", expected="0 or more")


# Taken from the ten rows of Table 1 of Megatron-LM's SC'21 paper (A100) and from nothing else: see docs/published.md.
REACH = Reach(product=0.805, depth=128.0, memory=0.63, attention=0.5, launch_seconds=4e-6)


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: what its data sheet says, and what kernels reach of that."""

    name: str
    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float
    num_processors: int = 108
    reach: Reach = REACH

    def __post_init__(self) -> None:
        for name in ("flops_per_second", "memory_bytes", "memory_bytes_per_second", "num_processors"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"{name} of {self.name} is {getattr(self, name)}", expected="a number above 0")


@dataclass(frozen=True, slots=True)
class Cluster:
    """`num_devices` equal devices, `devices_per_node` of them in a node."""

    device: Device
    num_devices: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link

    def __post_init__(self) -> None:
        for name in ("num_devices", "devices_per_node"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", expected="1 or more")

    def link(self, size: int, stride: int) -> Link:
        """Return the link that a ring of `size` devices, `stride` apart, sees.

        A ring that leaves its node shares the node's adapters among those of its members that are there.

        >>> fast, slow = Link(0.0, 200e9), Link(0.0, 20e9)
        >>> cluster = Cluster(Device("any", 1e15, 8e10, 2e12), 64, 8, fast, slow)
        >>> [cluster.link(size, stride).bytes_per_second / 1e9 for size, stride in ((8, 1), (8, 8), (16, 2))]
        [200.0, 20.0, 80.0]
        """
        if size * stride <= self.devices_per_node:
            return self.intra_node
        together = max(self.devices_per_node // stride, 1)
        if together == 1:
            return self.inter_node
        speed = min(self.intra_node.bytes_per_second, together * self.inter_node.bytes_per_second)
        return Link(self.inter_node.latency_seconds, speed)
