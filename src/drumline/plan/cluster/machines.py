"""Named machines: devices by their data sheets, in nodes of eight with the links that such nodes have.

A link carries the data sheet's bytes one way times what is reached of them (`kernels.REACH`). Peaks are those of dense products of
16-bit numbers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.hardware import Cluster, Device, Link
from drumline.plan.cluster.kernels import REACH

_GIB = 2.0**30
_NODE_LATENCY = 3e-6
_NETWORK_LATENCY = 8e-6


@dataclass(frozen=True, slots=True)
class Machine:
    """A device and the links that its nodes have: bytes a second of one device, one way, by the data sheet."""

    device: Device
    node_bytes_per_second: float
    network_bytes_per_second: float
    devices_per_node: int = 8

    def cluster(self, num_devices: int) -> Cluster:
        """Return a cluster of so many of them."""
        return Cluster(
            self.device,
            num_devices,
            self.devices_per_node,
            Link(_NODE_LATENCY, self.node_bytes_per_second * REACH.node),
            Link(_NETWORK_LATENCY, self.network_bytes_per_second * REACH.network),
        )


MACHINES = {
    "a100-40": Machine(Device("A100 40 GB", 312e12, 40 * _GIB, 1.555e12, 108), 300e9, 25e9),
    "a100-80": Machine(Device("A100 80 GB", 312e12, 80 * _GIB, 2.039e12, 108), 300e9, 25e9),
    "h100": Machine(Device("H100", 989e12, 80 * _GIB, 3.35e12, 132), 450e9, 50e9),
    "h200": Machine(Device("H200", 989e12, 140 * _GIB, 4.8e12, 132), 450e9, 50e9),
    "h800": Machine(Device("H800", 989e12, 80 * _GIB, 3.35e12, 132), 200e9, 50e9),
    "b200": Machine(Device("B200", 2250e12, 178 * _GIB, 8e12, 148), 900e9, 50e9),
    # The machine that BLOOM was trained on: four Omni-Path links of 100 Gb/s for the eight devices of a node.
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
    found = MACHINES.get(name.lower())
    if found is not None:
        return found.cluster(num_devices)
    if name.endswith(".json"):
        return load(name).cluster(num_devices)
    raise PlanError(f"unknown hardware {name[:60]!r}", fix=nearest(name[:60], MACHINES))


_KEYS = {
    "name": str,
    "flops_per_second": float,
    "memory_bytes": float,
    "memory_bytes_per_second": float,
    "num_processors": int,
    "node_bytes_per_second": float,
    "network_bytes_per_second": float,
    "devices_per_node": int,
}


def load(path: str | Path) -> Machine:
    """Read a machine from a JSON file: an object with the numbers of its data sheet."""
    try:
        table = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"{path}: {error}", expected="a JSON file that describes a machine") from None
    return machine(table)


def machine(table: Any) -> Machine:
    """Return the machine that an object describes.

    >>> machine({"name": "mine", "flops_per_second": 1e14, "memory_bytes": 2e10}).device.name
    Traceback (most recent call last):
    drumline.core.errors.PlanError: memory_bytes_per_second is missing; expected a number
    """
    if not isinstance(table, dict):
        raise PlanError(f"the machine is a {type(table).__name__}", expected="an object with its numbers")
    for key in table:
        if key not in _KEYS:
            raise PlanError(f"unknown key {key!r} of a machine", fix=nearest(str(key), _KEYS))
    values: dict[str, Any] = {"name": "unnamed", "num_processors": 108, "devices_per_node": 8, **table}
    for key, kind in _KEYS.items():
        if key not in values:
            raise PlanError(f"{key} is missing", expected="a number")
        value = values[key]
        if isinstance(value, bool) or not isinstance(value, (str,) if kind is str else (int, float)):
            raise PlanError(f"{key} is {value!r}", expected="text" if kind is str else "a number")
    device = Device(*(values[key] for key in list(_KEYS)[:5]))
    return Machine(
        device, values["node_bytes_per_second"], values["network_bytes_per_second"], values["devices_per_node"]
    )
