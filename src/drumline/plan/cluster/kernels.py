"""Seconds of single kernels: a product by its shape, a pass over memory by its bytes, a collective by its ring.

The rates are those of a data sheet times what kernels reach of them. What they reach is one set of numbers, `REACH`. It was
taken from the ten rows of Table 1 of Megatron-LM's SC'21 paper (A100) and from nothing else; `docs/published.md` tells how.
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.plan.cluster.hardware import Device, Link

TILE = 128  # a processor makes 128 x 128 numbers of a product at a time


@dataclass(frozen=True, slots=True)
class Reach:
    """What part of a data sheet's numbers is reached.

    `product` is for a product that is deep and large; `depth` is how many steps of the inner sum it takes to start and
    to write out a tile. `memory` is for kernels that pass over memory, `attention` for fused attention. `node` and `network`
    are for the links inside a node and between nodes. `launch_seconds` is the gap between two kernels.
    """

    product: float
    depth: float
    memory: float
    attention: float
    node: float
    network: float
    launch_seconds: float


REACH = Reach(product=0.76, depth=128.0, memory=0.8, attention=0.5, node=0.75, network=0.75, launch_seconds=4e-6)


def product_seconds(device: Device, rows: float, columns: float, depth: float, count: float = 1.0) -> float:
    """Return what `count` products of (rows x depth) by (depth x columns) take, side by side, of 16-bit numbers.

    Tiles are dealt to the processors in waves, and the last wave is half empty on average. A product that is too thin is
    limited by reading and writing it.

    >>> a100 = Device("A100", 312e12, 80e9, 2.039e12)
    >>> round(2 * 8192**3 / product_seconds(a100, 8192, 8192, 8192) / 1e12)
    230
    >>> round(2 * 512**3 / product_seconds(a100, 512, 512, 512) / 1e12)
    26
    """
    waves = max(rows, TILE) * max(columns, TILE) * count / (TILE * TILE * device.num_processors)
    flops = 2.0 * rows * columns * (depth + REACH.depth) * count
    busy = flops / (device.flops_per_second * REACH.product) * (waves + 0.5) / waves
    size = 2.0 * (rows * depth + depth * columns + rows * columns) * count
    return max(busy, size / (device.memory_bytes_per_second * REACH.memory)) + REACH.launch_seconds


def memory_seconds(device: Device, size: float) -> float:
    """Return what it takes to read and write `size` bytes in all."""
    return size / (device.memory_bytes_per_second * REACH.memory)


def attention_seconds(device: Device, flops: float) -> float:
    """Return what fused attention takes for so many operations."""
    return flops / (device.flops_per_second * REACH.attention) + REACH.launch_seconds


def gather_seconds(link: Link, num_devices: int, size: float) -> float:
    """Return what an all-gather takes, or a reduce-scatter, whose whole is `size` bytes.

    >>> gather_seconds(Link(0.0, 1e9), 4, 4e9)
    3.0
    """
    if num_devices == 1:
        return 0.0
    return (num_devices - 1) * (link.latency_seconds + size / num_devices / link.bytes_per_second)


def reduce_seconds(link: Link, num_devices: int, size: float) -> float:
    """Return what an all-reduce of `size` bytes takes: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(link, num_devices, size)
