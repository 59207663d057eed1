"""Seconds of single kernels: a product by its shape, a pass over memory by its bytes, a collective by its ring.

Rates are the device's data-sheet numbers times the share that kernels achieve, `Device.reach`. Seconds are grouped by
what they are spent on (`Spent`), and by the pass of a microbatch that they belong to (`Ops`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from drumline.plan.cluster.hardware import Device, Link

CONTENTION = 0.15  # of a hidden message's seconds: it runs on 16 of an A100's 108 processors
TILE = 128  # a processor computes 128 x 128 numbers of a product at a time


def product_seconds(
    device: Device, rows: float, columns: float, depth: float, count: float = 1.0, *, fp8: bool = False
) -> float:
    """Return the seconds of `count` parallel products of (rows x depth) by (depth x columns): 16-bit ones, or `fp8`.

    Processors compute the tiles in waves, and the last wave is half empty on average. Memory traffic limits a product
    that is too thin. With `fp8`, inputs are 8-bit numbers and results 16-bit ones; it takes as long to start and to
    write out a tile.

    >>> a100 = Device("A100", 312e12, 80e9, 2.039e12)
    >>> [round(2 * n**3 / product_seconds(a100, n, n, n) / 1e12) for n in (512, 2048, 8192)]
    [27, 181, 236]
    """
    reach = device.reach
    high, wide = max(rows, TILE), max(columns, TILE)
    waves = high * wide * count / (TILE * TILE * device.num_processors)
    step = 2.0 * high * wide * count / (device.flops_per_second * reach.product)  # one of the inner sum
    inner = 2.0 * high * wide * count / (device.fp8_flops_per_second * reach.product) if fp8 else step
    busy = (inner * depth + step * reach.depth) * (waves + 0.5) / waves
    size = ((1.0 if fp8 else 2.0) * (rows * depth + depth * columns) + 2.0 * rows * columns) * count
    return max(busy, memory_seconds(device, size)) + reach.launch_seconds


def memory_seconds(device: Device, size: float) -> float:
    """Return the seconds to read and write `size` bytes in total."""
    return size / (device.memory_bytes_per_second * device.reach.memory)


def attention_seconds(device: Device, flops: float) -> float:
    """Return the seconds of fused attention with this many operations."""
    return flops / (device.flops_per_second * device.reach.attention) + device.reach.launch_seconds


def gather_seconds(link: Link, num_devices: int, size: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter with `size` bytes in total, round a ring.

    >>> gather_seconds(Link(0.0, 1e9), 4, 4e9), gather_seconds(Link(0.0, 1e9, start_seconds=0.5), 4, 4e9)
    (3.0, 3.5)
    """
    if num_devices == 1:
        return 0.0
    return link.start_seconds + (num_devices - 1) * (link.latency_seconds + size / num_devices / link.bytes_per_second)


def reduce_seconds(link: Link, num_devices: int, size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes: round a ring, or up and down a tree if that is faster.

    A ring sends fewer bytes, a tree takes fewer hops.

    >>> reduce_seconds(Link(0.0, 1e9), 4, 4e9), reduce_seconds(Link(1.0, 1e9), 64, 1e9)
    (6.0, 14.0)
    """
    if num_devices == 1:
        return 0.0
    hops, carried = num_devices - 1, size / link.bytes_per_second
    ring = 2 * hops * (link.latency_seconds + carried / num_devices)
    tree = 2 * (math.ceil(math.log2(num_devices)) * link.latency_seconds + carried)
    return link.start_seconds + min(ring, tree)


def exposed(seconds: float, hidden: float) -> float:
    """Return what messages of so many seconds cost beside compute of `hidden` seconds.

    What compute does not hide is waited for. What it hides still takes processors and memory from it.

    >>> exposed(3.0, 1.0), exposed(1.0, 3.0)
    (2.15, 0.15)
    """
    return max(seconds - hidden, 0.0) + CONTENTION * min(seconds, hidden)


class Spent(NamedTuple):
    """Seconds of compute, and of messages that compute does not hide.

    >>> (Spent(1.0, tensor=0.5) + Spent(2.0)).total
    3.5
    """

    compute: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        """Return all seconds."""
        return self.compute + self.tensor + self.context + self.expert

    def __add__(self, other: Spent) -> Spent:  # type: ignore[override]
        return Spent(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def times(self, factor: float) -> Spent:
        """Return the seconds times a factor."""
        return Spent(self.compute * factor, self.tensor * factor, self.context * factor, self.expert * factor)


class Ops(NamedTuple):
    """Seconds of one microbatch in a layer or a stage: forward, recomputation, both halves of the backward."""

    forward: Spent = Spent()
    again: Spent = Spent()
    backward_input: Spent = Spent()
    backward_weight: Spent = Spent()

    @property
    def backward(self) -> Spent:
        """Return the whole backward, with its recomputation."""
        return self.again + self.backward_input + self.backward_weight

    @property
    def total(self) -> Spent:
        """Return the sum of all parts."""
        return self.forward + self.backward

    def __add__(self, other: Ops) -> Ops:  # type: ignore[override]
        return Ops(
            self.forward + other.forward,
            self.again + other.again,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def times(self, factor: float) -> Ops:
        """Return the seconds times a factor."""
        if factor == 1:
            return self
        return Ops(
            self.forward.times(factor),
            self.again.times(factor),
            self.backward_input.times(factor),
            self.backward_weight.times(factor),
        )
