"""Machines as numbers: a device, the links inside a node, the links between nodes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Link:
    """A link as one device sees it: latency of a message, and bytes a second that it really carries one way."""

    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator: what its data sheet says. How much of it kernels reach is `kernels`' business."""

    name: str
    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Cluster:
    """`num_devices` equal devices, `devices_per_node` of them in a node."""

    device: Device
    num_devices: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
