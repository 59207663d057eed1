"""Machines: a device, the links inside a node and between nodes, by their data sheets; some have names.

A link carries the one-way bandwidth of the data sheet times the achievable share. Peaks are for dense matrix products,
16-bit ones and 8-bit ones (FP8); the latter is 0 for a device that has none.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from drumline.core.errors import PlanError, nearest
from drumline.core.files import FileKind, named, read_object
from drumline.core.parsed import shown


class HashedOnce:
    """A frozen dataclass that is part of many keys: its hash is computed when somebody first asks for it."""

    __slots__ = ("_hash",)
    _hash: int

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            values = (getattr(self, each.name) for each in fields(self))  # type: ignore[arg-type]
            object.__setattr__(self, "_hash", hash(tuple(values)))
            return self._hash


@dataclass(frozen=True, slots=True)
class DeviceLink(HashedOnce):
    """A link as one device sees it: the latency of a message, and the bytes per second it really carries one way.

    `start_seconds` is what a collective takes before its first byte travels: its kernel starts, and its ranks meet.
    """

    latency_seconds: float
    bytes_per_second: float
    start_seconds: float = 0.0

    __hash__ = HashedOnce.__hash__

    def __post_init__(self) -> None:
        for name, value in (("latency", self.latency_seconds), ("start", self.start_seconds)):
            if not 0 <= value < math.inf:
                raise PlanError(f"the {name} of a link is {value}", expected="0 or more seconds")
        if not self.bytes_per_second > 0:
            raise PlanError(f"a link carries {self.bytes_per_second} bytes per second", expected="more than 0")

    def seconds(self, size: float) -> float:
        """Return the seconds for a message of `size` bytes.

        >>> DeviceLink(1e-6, 1e9).seconds(1e6)
        0.001001
        """
        return self.latency_seconds + size / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Reach:
    """The share of the data-sheet numbers that kernels achieve.

    `product` is for a deep and large product; `depth` is how many steps of the inner sum it takes to start and write
    out a tile. `memory` is for kernels that pass over memory, `attention` for fused attention. `launch_seconds` is the
    gap between two kernels. Products of 8-bit numbers reach the same share of their own peak.
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


# Fitted to the ten rows of Table 1 of Megatron-LM's SC'21 paper and to small models on one node: see docs/published.md.
REACH = Reach(product=0.803, depth=128.0, memory=0.637, attention=0.5, launch_seconds=4e-6)


@dataclass(frozen=True, slots=True)
class Device(HashedOnce):
    """One accelerator: its data-sheet numbers, and the share that kernels achieve."""

    name: str
    flops_per_second: float
    memory_bytes: float
    memory_bytes_per_second: float
    num_processors: int = 108
    reach: Reach = REACH
    fp8_flops_per_second: float = 0.0

    __hash__ = HashedOnce.__hash__

    def __post_init__(self) -> None:
        if not 0 <= self.fp8_flops_per_second < math.inf:
            raise PlanError(
                f"fp8_flops_per_second of {self.name} is {self.fp8_flops_per_second}",
                expected="a number above 0, or 0 for a device without FP8",
            )
        for name in ("flops_per_second", "memory_bytes", "memory_bytes_per_second", "num_processors"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"{name} of {self.name} is {getattr(self, name)}", expected="a number above 0")


@dataclass(frozen=True, slots=True)
class Cluster(HashedOnce):
    """`num_devices` equal devices, with `devices_per_node` in each node."""

    device: Device
    num_devices: int
    devices_per_node: int
    intra_node: DeviceLink
    inter_node: DeviceLink

    __hash__ = HashedOnce.__hash__

    def __post_init__(self) -> None:
        for name in ("num_devices", "devices_per_node"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} is {getattr(self, name)}", expected="1 or more")

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return -(-self.num_devices // self.devices_per_node)

    @property
    def nodes(self) -> Cluster:
        """Return one node of it, with its links: all that kernels and messages depend on."""
        return _one_node(self.device, self.devices_per_node, self.intra_node, self.inter_node)

    def link(self, size: int, stride: int) -> DeviceLink:
        """Return the link that a ring of `size` devices, `stride` apart, sees.

        A ring that leaves its node shares the node's adapters among its members there.

        >>> fast, slow = DeviceLink(0.0, 200e9), DeviceLink(0.0, 20e9)
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
        return _of_speed(self.inter_node, speed)


@lru_cache(maxsize=64)
def _one_node(device: Device, devices_per_node: int, intra_node: DeviceLink, inter_node: DeviceLink) -> Cluster:
    return Cluster(device, devices_per_node, devices_per_node, intra_node, inter_node)


@lru_cache(maxsize=1024)
def _of_speed(link: DeviceLink, bytes_per_second: float) -> DeviceLink:
    return replace(link, bytes_per_second=bytes_per_second)


_GIB = 2.0**30
# The first is fitted like REACH. The second is from the SC'21 paper's largest run, which
# reports 892 GB/s between the two halves of a pipeline over 8 x 6 adapters of 25 GB/s each.
NODE_REACH = 0.645
NETWORK_REACH = 0.74
# A Hopper's tensor cores exceed its power limit. From one row of Llama 3's table, 430 TFLOP/s on 8192 H100. No row has
# been published for a B200, so it is assumed to behave the same.
HOPPER = replace(REACH, product=0.581)
# The same held at 500 W. From one row of torchtitan's tables of 2024: Llama 3.1 8B on 8, compiled, 16 bits.
HELD = 0.87
HELD_HOPPER = replace(HOPPER, product=HELD * HOPPER.product, attention=HELD * HOPPER.attention)
_KIND = FileKind("machine", PlanError, "a JSON file that describes a machine")
# What a collective of a current library takes at least, by its own benchmarks; not fitted.
NODE_START = 15e-6
NETWORK_START = 20e-6
_NODE_LATENCY = 3e-6
_NETWORK_LATENCY = 8e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and the links of its nodes: bytes per second of one device, one way, by the data sheet."""

    device: Device
    node_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_node: int = 8
    node_reach: float = NODE_REACH
    network_reach: float = NETWORK_REACH
    node_start_seconds: float = NODE_START
    network_start_seconds: float = NETWORK_START

    def cluster(self, num_devices: int) -> Cluster:
        """Return a cluster of `num_devices` of them."""
        return Cluster(
            self.device,
            num_devices,
            self.devices_per_node,
            DeviceLink(_NODE_LATENCY, self.node_bytes_per_second * self.node_reach, self.node_start_seconds),
            DeviceLink(
                _NETWORK_LATENCY, self.network_bytes_per_second * self.network_reach, self.network_start_seconds
            ),
        )


MACHINES = {
    "a100-40": Machine(Device("A100 40 GB", 312e12, 40 * _GIB, 1.555e12, 108), 300e9, 25e9),
    "a100-80": Machine(Device("A100 80 GB", 312e12, 80 * _GIB, 2.039e12, 108), 300e9, 25e9),
    "h100": Machine(Device("H100", 989e12, 80 * _GIB, 3.35e12, 132, HOPPER, 1979e12), 450e9, 50e9),
    "h200": Machine(Device("H200", 989e12, 140 * _GIB, 4.8e12, 132, HOPPER, 1979e12), 450e9, 50e9),
    "h800": Machine(Device("H800", 989e12, 80 * _GIB, 3.35e12, 132, HOPPER, 1979e12), 200e9, 50e9),
    "b200": Machine(Device("B200", 2250e12, 178 * _GIB, 8e12, 148, HOPPER, 4500e12), 900e9, 50e9),
    # Cards of workstations, on PCI Express (x16, one way) and 10 Gb/s Ethernet. Dense bfloat16 with sums in float32:
    # GeForce cards do 64 multiply-adds a tensor core and clock, half of what they do with sums in float16. So it is
    # SMs x 4 x 64 x 2 x 1.695, 2.52 and 2.407 GHz: https://gist.github.com/getianao/33fb5306ba896193c7ae59ec64794283,
    # https://waredb.com/processor/nvidia-geforce-rtx-4090 (165.15). L40S: 362.05 and 864 GB/s by its data sheet, as in
    # https://www.mullet.se/product.html?product_id=355414. Memory is what drivers report, in MiB 24,576, 24,564, 32,607
    # and with ECC 46,068: https://github.com/noonghunna/club-3090/issues/390, https://github.com/RLinf/RLinf/issues/255,
    # https://github.com/noonghunna/club-3090/issues/1229, https://github.com/akash-network/provider-configs/pull/99.
    "rtx-3090": Machine(Device("RTX 3090", 71.2e12, 24 * _GIB, 0.936e12, 82), 32e9, 1.25e9),
    "rtx-4090": Machine(Device("RTX 4090", 165.2e12, 24 * _GIB, 1.008e12, 128), 32e9, 1.25e9),
    "rtx-5090": Machine(Device("RTX 5090", 209.5e12, 31.8 * _GIB, 1.792e12, 170), 64e9, 1.25e9),
    "l40s": Machine(Device("L40S", 362e12, 45 * _GIB, 0.864e12, 142), 32e9, 25e9),
    # The machine that trained BLOOM: four Omni-Path links of 100 Gb/s for the eight devices of a node.
    # H100 of 96 GB, held at 500 W: https://github.com/pytorch/torchtitan/blob/main/benchmarks (2.4 TB/s, 400 Gb/s).
    "h100-96": Machine(Device("H100 96 GB", 989e12, 94 * _GIB, 2.4e12, 132, HELD_HOPPER, 1979e12), 450e9, 50e9),
    "jean-zay": Machine(Device("A100 80 GB", 312e12, 80 * _GIB, 2.039e12, 108), 300e9, 6.25e9),
}


def cluster(name: str, num_devices: int) -> Cluster:
    """Return a cluster of a named machine, or of one that a JSON file describes.

    >>> cluster("h100", 2048).devices_per_node
    8
    >>> cluster("h1000", 8)
    Traceback (most recent call last):
    drumline.core.errors.PlanError: unknown hardware 'h1000'; did you mean h100?
    """
    found_machine = MACHINES.get(name.lower())
    if found_machine is None and name.endswith(".json"):
        found_machine = load(name)
    if found_machine is None:
        raise PlanError(f"unknown hardware {name[:60]!r}", fix=nearest(name[:60], MACHINES))
    return found_machine.cluster(num_devices)


def load(path: str | Path) -> Machine:
    """Read a machine from a JSON file: an object with its data-sheet numbers, as `machine` expects."""
    table = read_object(path, _KIND)
    with named(path, _KIND):
        return machine(table)


def machine(table: Any) -> Machine:
    """Build a machine from the object that describes it.

    >>> mine = {"name": "mine", "flops_per_second": 1e14, "memory_bytes": 2e10, "memory_bytes_per_second": 1e12}
    >>> mine |= {"node_bytes_per_second": 5e10, "network_bytes_per_second": 1e10, "reach": {"product": 0.7}}
    >>> machine(mine).device.reach.product, machine(mine).devices_per_node
    (0.7, 8)
    >>> machine({"name": "mine", "flops_per_second": 1e14, "memory_bytes": 2e10})
    Traceback (most recent call last):
    drumline.core.errors.PlanError: the machine has no memory_bytes_per_second, node_bytes_per_second, ...
    """
    values = _checked(table, {**_DEVICE, **_LINKS, "reach": dict}, "machine")
    reach = _checked(values.pop("reach", {}), dict.fromkeys(asdict(REACH), float), "machine's reach")
    needed = [field.name for of in (Device, Machine) for field in fields(of) if field.default is MISSING]
    missing = [name for name in needed if name != "device" and name not in values]
    if missing:
        kinds = {_WORDS[{**_DEVICE, **_LINKS}[name]] for name in missing}
        raise PlanError(
            f"the machine has no {', '.join(missing)}",
            expected=" and ".join(sorted(kinds)) + (" for each" if len(missing) > 1 else ""),
        )
    device = Device(**{key: value for key, value in values.items() if key in _DEVICE}, reach=replace(REACH, **reach))
    found_machine = Machine(device, **{key: value for key, value in values.items() if key in _LINKS})
    for key, value in [*values.items(), *reach.items()]:
        least, most = _BOUNDS.get(key, (1.0, 1e30))
        if key != "name" and value > 0 and not least <= value <= most:
            raise PlanError(f"{key} of the machine is {value:g}", expected=f"a number from {least:g} to {most:g}")
    return found_machine


_SHARE = (1e-6, 1.0)
# Limits for numbers that are neither bytes nor operations; values outside lead to times that are not finite.
_BOUNDS: dict[str, tuple[float, float]] = {
    **dict.fromkeys(("product", "memory", "attention", "node_reach", "network_reach"), _SHARE),
    "depth": (0.0, 1e9),
    **dict.fromkeys(("launch_seconds", "node_start_seconds", "network_start_seconds"), (0.0, 1.0)),
    "num_processors": (1, 1e9),
    "devices_per_node": (1, 1e6),
}
_KINDS: dict[object, type] = {"str": str, "int": int, "float": float}
_DEVICE, _LINKS = ({f.name: _KINDS[f.type] for f in fields(of) if f.type in _KINDS} for of in (Device, Machine))
_WORDS = {str: "text", int: "a whole number", float: "a number", dict: "an object"}


def _checked(table: Any, known: dict[str, type], what: str) -> dict[str, Any]:
    """Return a copy of an object, after rejecting unknown keys and wrong types."""
    if not isinstance(table, dict):
        raise PlanError(f"the {what} is a {type(table).__name__}", expected="an object")
    for key, value in table.items():
        if key not in known:
            raise PlanError(f"unknown key {shown(key)} in the {what}", fix=nearest(str(key)[:60], known))
        accepted = (int, float) if known[key] is float else known[key]
        if not isinstance(value, accepted) or isinstance(value, bool):
            raise PlanError(f"{key} of the {what} is {shown(value)}", expected=_WORDS[known[key]])
    return dict(table)
