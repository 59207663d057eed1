"""Ask PyTorch which accelerators this process can use, and let a rank compute on its own."""

from __future__ import annotations

import os

import torch

from drumline.channel.devices.choice import AskedDevice, VisibleDevices, device_of_rank
from drumline.channel.devices.rank_devices import DeviceCard
from drumline.channel.rendezvous import host_id

_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def visible() -> VisibleDevices:
    """Return the accelerators that this process can use, without starting them."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        hiding = next((name for name in _LISTS if os.environ.get(name, "all").strip() in ("", "-1")), "")
        return VisibleDevices(hidden_by=hiding)
    return VisibleDevices(kind.type, torch.accelerator.device_count())


def local_rank() -> int | None:
    """Return the number of this rank on its host; None if no launcher has said it."""
    number = os.environ.get("LOCAL_RANK", "")
    return int(number) if number.isdecimal() else None


def own_device(asked: AskedDevice) -> torch.device:
    """Return the device of this rank: its own accelerator by its number on the host, else the one that is in use."""
    there, number = visible(), local_rank()
    if number is None:
        number = torch.accelerator.current_device_index() if there.count else 0
    return torch.device(str(device_of_rank(number, there, asked)))


def in_use(device: torch.device) -> torch.device:
    """Make a rank's device the current one, where streams, events and NCCL look for it; return it with its number.

    A device without a number is, under a launcher, the one of the rank's number on its host.
    """
    if device.type in ("cpu", "meta"):
        return device
    if device.index is None:
        device = own_device(AskedDevice(device.type))
    if device.index != torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(device.index)
    return device


def card_of(device: torch.device) -> DeviceCard:
    """Return what this rank tells the others of its device."""
    if device.type == "cpu":
        return DeviceCard(host_id(), "cpu")
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    identity = "" if properties is None else str(getattr(properties(device), "uuid", ""))
    listed = next((f"{name}={os.environ[name]}" for name in _LISTS if name in os.environ), "")
    return DeviceCard(host_id(), str(device), identity, listed)
