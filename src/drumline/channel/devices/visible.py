"""Ask PyTorch which accelerators this process can use, let a rank compute on its own, and say where ranks compute."""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from drumline.channel.devices.choice import AskedDevice, VisibleDevices, device_of_rank, refusal
from drumline.channel.devices.rank_devices import NCCL_HOST, DeviceCard, RankDevices, nccl_host
from drumline.channel.rendezvous import host_id
from drumline.core.errors import UsageError

_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")


def visible() -> VisibleDevices:
    """Return the accelerators that this process can use, without starting them."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    if kind is None:
        hiding = next((name for name in _LISTS if os.environ.get(name, "all").strip() in ("", "-1")), "")
        return VisibleDevices(hidden_by=hiding)
    return VisibleDevices(kind.type, torch.accelerator.device_count())


def with_nccl() -> VisibleDevices:
    """Return the accelerators that this process can use, if PyTorch has NCCL for them; else none."""
    there = visible()
    has_nccl = dist.is_nccl_available() and dist.Backend.default_device_backend_map.get(there.kind) == "nccl"
    return there if has_nccl else VisibleDevices()


def group_backend() -> str:
    """Return the backends of a process group for ranks of this machine: NCCL beside gloo where it can be used."""
    there = with_nccl()
    return f"cpu:gloo,{there.kind}:nccl" if there.count else "gloo"


def take_own() -> None:
    """Make the accelerator of this rank's number the current one; for NCCL, a rank that shares one is another host."""
    there, number = visible(), local_rank() or 0
    if not there.count:
        return
    in_use(own_device(AskedDevice()))
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > there.count:
        tell_nccl(nccl_host(0, number // there.count), is_one_host=True)


def tell_nccl(host: str, *, is_one_host: bool) -> None:
    """Let NCCL take this process to be on a host of this name, unless a user has named one.

    NCCL reads it at its first connection.
    """
    if os.environ.get("NCCL_HOSTID", host).startswith(NCCL_HOST):
        os.environ["NCCL_HOSTID"] = host
    if is_one_host:
        os.environ.setdefault("NCCL_IB_DISABLE", "1")


def device_named(device: Any) -> torch.device | None:
    """Return the device that a user names, if this machine has it; None for None.

    >>> device_named("gpu")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: device is 'gpu'; expected a PyTorch device, such as cpu or cuda:0
    """
    if device is None:
        return None
    try:
        known = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:
        known = None
    if known is None:
        AskedDevice.read(device if isinstance(device, str) else "", visible())  # it may know which one is meant
        raise UsageError(f"device is {device!r}", expected="a PyTorch device, such as cpu or cuda:0")
    wrong = None if known.type == "meta" else refusal(AskedDevice(known.type, known.index), visible())
    if wrong is not None:
        raise wrong
    return known


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


def tell_of(devices: RankDevices, *, is_named: bool) -> None:
    """Say where all ranks compute: warn of ranks that share a device, and of accelerators that nobody uses.

    `is_named` says that somebody has named the device.
    """
    logging.getLogger("drumline").info("%s", devices)
    if devices.warning:
        _warn(devices.warning)
    elif not is_named and devices.cards[0].kind == "cpu" and (there := visible()).count:
        _warn(
            f"the ranks compute on the CPU, where the model is, and this process sees {there}. "
            f"Pass device={there.kind!r} to compute there, or device='cpu' to silence this warning."
        )


@cache
def _warn(text: str) -> None:
    """Warn of the same thing once."""
    logging.getLogger("drumline").warning("%s", text)
