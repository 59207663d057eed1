"""Seconds of single kernels: a product by its shape, a pass over memory by its bytes, a collective by its ring.

The rates are those of the device's data sheet times what kernels reach of them, `Device.reach`. Seconds are summed by
what they are spent on (`Spent`), and by the pass of a microbatch that they belong to (`Ops`).
"""

from __future__ import annotations

from dataclasses import dataclass

from drumline.plan.cluster.hardware import Device, Link

TILE = 128  # a processor makes 128 x 128 numbers of a product at a time


def product_seconds(device: Device, rows: float, columns: float, depth: float, count: float = 1.0) -> float:
    """Return what `count` products of (rows x depth) by (depth x columns) take, side by side, of 16-bit numbers.

    Tiles are dealt to the processors in waves, and the last wave is half empty on average. A product that is too thin
    is limited by reading and writing it.

    >>> a100 = Device("A100", 312e12, 80e9, 2.039e12)
    >>> [round(2 * n**3 / product_seconds(a100, n, n, n) / 1e12) for n in (512, 2048, 8192)]
    [27, 187, 244]
    """
    reach = device.reach
    high, wide = max(rows, TILE), max(columns, TILE)
    waves = high * wide * count / (TILE * TILE * device.num_processors)
    flops = 2.0 * high * wide * (depth + reach.depth) * count
    busy = flops / (device.flops_per_second * reach.product) * (waves + 0.5) / waves
    size = 2.0 * (rows * depth + depth * columns + rows * columns) * count
    return max(busy, memory_seconds(device, size)) + reach.launch_seconds


def memory_seconds(device: Device, size: float) -> float:
    """Return what it takes to read and write `size` bytes in all."""
    return size / (device.memory_bytes_per_second * device.reach.memory)


def attention_seconds(device: Device, flops: float) -> float:
    """Return what fused attention takes for so many operations."""
    return flops / (device.flops_per_second * device.reach.attention) + device.reach.launch_seconds


def gather_seconds(link: Link, num_devices: int, size: float) -> float:
    """Return what an all-gather takes, or a reduce-scatter, whose whole is `size` bytes.

    >>> gather_seconds(Link(0.0, 1e9), 4, 4e9)
    3.0
    """
    return (num_devices - 1) * (link.latency_seconds + size / num_devices / link.bytes_per_second)


def reduce_seconds(link: Link, num_devices: int, size: float) -> float:
    """Return what an all-reduce of `size` bytes takes: a reduce-scatter and an all-gather."""
    return 2 * gather_seconds(link, num_devices, size)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of computing, and of messages that computing does not hide.

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

    def __add__(self, other: Spent) -> Spent:
        return Spent(
            self.compute + other.compute,
            self.tensor + other.tensor,
            self.context + other.context,
            self.expert + other.expert,
        )

    def times(self, factor: float) -> Spent:
        """Return this much of it."""
        return Spent(self.compute * factor, self.tensor * factor, self.context * factor, self.expert * factor)


@dataclass(frozen=True, slots=True)
class Ops:
    """What one microbatch takes in a layer or a stage: forward, what is computed again, both halves of backward."""

    forward: Spent = Spent()
    again: Spent = Spent()
    backward_input: Spent = Spent()
    backward_weight: Spent = Spent()

    @property
    def backward(self) -> Spent:
        """Return a whole backward, with what it computes again."""
        return self.again + self.backward_input + self.backward_weight

    @property
    def total(self) -> Spent:
        """Return all of it."""
        return self.forward + self.backward

    def __add__(self, other: Ops) -> Ops:
        return Ops(
            self.forward + other.forward,
            self.again + other.again,
            self.backward_input + other.backward_input,
            self.backward_weight + other.backward_weight,
        )

    def times(self, factor: float) -> Ops:
        """Return this much of it."""
        return Ops(
            self.forward.times(factor),
            self.again.times(factor),
            self.backward_input.times(factor),
            self.backward_weight.times(factor),
        )
