"""Choose and open the channel between the ranks of a pipeline, and check that all ranks got the same settings."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from drumline.channel.channel import TIMEOUT, Channel, too_late
from drumline.channel.devices.choice import AskedDevice
from drumline.channel.devices.rank_devices import RankDevices, chosen_transport
from drumline.channel.devices.visible import card_of, own_device, tell_nccl
from drumline.channel.distributed import DistributedChannel
from drumline.channel.interfaces import endpoint, loopback, place_named
from drumline.channel.lines.axes import Axes
from drumline.channel.lines.grid import described
from drumline.channel.rank_names import BY_NUMBER, RankNames, mesh_shown
from drumline.channel.rendezvous import agreed_place, exchange, host_id, hosted_store
from drumline.channel.shared_memory import SharedMemoryChannel
from drumline.channel.start_name import this_start
from drumline.core.errors import MismatchError, RunError, UsageError, nearest

TRANSPORTS = ("auto", "in-process", "shared-memory", "gloo", "nccl")
_INTERFACE = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


_scopes = itertools.count()


def new_scope() -> str:
    """Return a name for one pipeline's part of the store; all ranks create pipelines in one order."""
    return f"drumline/{next(_scopes)}"


def started_by_launcher() -> bool:
    """Whether this process is one of several ranks, from torchrun's variables or an existing process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def default_device() -> torch.device:
    """Return this rank's default device: its accelerator, or the host if there is none or the backend is gloo."""
    hosts_only = dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo"
    return torch.device("cpu") if hosts_only else own_device(AskedDevice())


def check(transport: str) -> None:
    """Refuse a transport that does not exist."""
    if transport not in TRANSPORTS:
        raise UsageError(f"transport is {transport!r}", fix=nearest(str(transport), TRANSPORTS))


def alone(transport: str) -> bool:
    """Whether all ranks are in this process."""
    return transport == "in-process" or (transport == "auto" and not started_by_launcher())


def num_ranks(transport: str, asked: int | None, *, timeout: float = TIMEOUT, interface: str = "") -> int:
    """Return the number of ranks; start the process group within `timeout` if the transport needs one.

    Ranks of one host then talk by loopback alone, and ranks of several hosts by one interface: see `interfaces`.
    """
    if alone(transport):
        return asked or 1
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise UsageError(
                f"transport is {transport!r}, but no launcher started this process",
                fix="start ranks with torchrun or dl.launch, or use transport='in-process'",
            )
        _join(timeout, interface)
    elif interface:
        place_named(interface)  # nothing listens anew; a wrong name is refused all the same
    return dist.get_world_size()


def _join(timeout: float, interface: str) -> None:
    """Start the process group when all ranks have arrived; otherwise raise WaitTimeout and name the missing rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store = _store(rank, size, timeout, interface)
    except (dist.DistError, TimeoutError) as error:
        host = endpoint(os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))
        raise too_late(f"rank {rank} waits for the store of rank 0 at {host}", timeout) from error
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = PrefixStore(this_start(store, rank, size, timeout=timeout), store)
    joining = PrefixStore("drumline/join", store)
    hosts = exchange(joining, rank, size, "arrival", host_id(), timeout=timeout)
    place = loopback()
    if len(set(hosts)) > 1:
        place = agreed_place(joining, rank, size, interface or named_before(), timeout=timeout)
    elif interface:
        place_named(interface)
    for name in _INTERFACE:
        if place.interface and (interface or name not in os.environ):
            os.environ[name] = place.interface  # read by torch when it connects
    everybody, limit = dist.distributed_c10d.default_pg_timeout, timedelta(seconds=timeout)
    store.set_timeout(limit)
    try:
        dist.init_process_group(store=store, rank=rank, world_size=size, timeout=limit)
    except RuntimeError as error:
        raise RunError(
            f"rank {rank} cannot connect to the other ranks by {place.interface} ({place.address}) within "
            f"{timeout:g} s: {str(error).splitlines()[0]}",
            fix="check that the hosts can reach each other's ports, or name another interface: --interface NAME",
        ) from error
    store.set_timeout(everybody)  # torch uses the store from here on
    dist.distributed_c10d._set_pg_timeout(everybody)


def named_before() -> str:
    """Return the interface that the environment names for gloo, if it names one."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    return "" if "," in named else named


def _store(rank: int, size: int, timeout: float, interface: str) -> Store:
    """Return the ranks' shared store: torchrun's, or one hosted by rank 0, which does not wait for the others."""
    limit = timedelta(seconds=timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: Store = next(iter(rendezvous("env://", timeout=limit)))[0]
        return store
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if rank == 0:
        return hosted_store(address, port, interface=interface, timeout=timeout)
    return TCPStore(address, port, size, is_master=False, timeout=limit, wait_for_workers=False)


def told_by_first(topic: str, value: Any, *, timeout: float) -> Any:
    """Return the value of rank 0, for ranks that have joined."""
    store = PrefixStore("drumline/first", dist.distributed_c10d._get_default_store())
    return exchange(store, dist.get_rank(), dist.get_world_size(), topic, value, timeout=timeout)[0]


def axes_for(mesh: Any, transport: str, num_ranks: int, *, scope: str, timeout: float) -> Axes:
    """Return the axes of a mesh, or of one line if there is none; all processes call it alike."""
    if alone(transport):
        sizes, _ = ({}, None) if mesh is None else described(mesh)
        more = {name: size for name, size in sizes.items() if name != "pp" and size > 1}
        if more:
            raise UsageError(
                f"the mesh {mesh_shown(sizes)} has {mesh_shown(more)}, and all ranks are in this process",
                expected="one process per rank of the mesh",
                fix="start ranks with dl.launch or torchrun",
            )
        return Axes.single(sizes.get("pp", num_ranks))
    rank = dist.get_rank()
    if mesh is None:
        return Axes.single(num_ranks, rank)
    return Axes.of(mesh, timeout=timeout, store=_store_of(scope), rank=rank, num_ranks=num_ranks)


def _store_of(scope: str) -> Store:
    """Return the part of the ranks' store that belongs to one pipeline."""
    return PrefixStore(scope, dist.distributed_c10d._get_default_store())


def open_channel(
    transport: str,
    device: torch.device,
    *,
    timeout: float,
    num_slots: int,
    scope: str,
    axes: Axes,
    interface: str = "",
    edges: Sequence[tuple[int, int]] | None,
    now: Callable[[], int],
) -> tuple[Channel, RankDevices]:
    """Return this rank's end of a new channel between the ranks of its line, and the devices of the ranks of all lines.

    Ranks that share a device are hosts of their own for NCCL, which refuses them otherwise.
    """
    rank, size = axes.place("pp"), axes.size("pp")
    store = _store_of(f"{scope}/line {axes.number}")
    card, naming = (transport, card_of(device)), axes.naming
    entries = exchange(store, rank, size, "drumline/transport", card, timeout=timeout, naming=naming)
    agree([{"transport": asked, "device": value.kind} for asked, value in entries], naming)
    cards = axes.exchanged("drumline/devices", card[1]) if axes.is_mesh else [value for _, value in entries]
    transport = chosen_transport(transport, cards, axes.lines, by_device=backend_for(device))
    devices = RankDevices(tuple(cards), transport)
    if host := devices.nccl_host(axes.rank):
        tell_nccl(host, is_one_host=devices.num_hosts == 1)
    connecting: dict[str, Any] = {"store": store, "timeout": timeout, "naming": naming}
    connecting["interface"] = interface or named_before()
    if transport == "shared-memory":
        return SharedMemoryChannel(rank, size, device=device, num_slots=num_slots, now=now, **connecting), devices
    connecting |= {"line": axes.line, "lines": axes.lines}
    channel = DistributedChannel(rank, size, backend=transport, device=device, edges=edges, now=now, **connecting)
    return channel, devices


def backend_for(device: torch.device) -> str:
    """Return what ranks with such a device each talk by: NCCL where PyTorch prefers it, else gloo through the host.

    >>> backend_for(torch.device("cpu")), backend_for(torch.device("mps"))
    ('gloo', 'gloo')
    """
    return "nccl" if dist.Backend.default_device_backend_map.get(device.type) == "nccl" else "gloo"


def agree(settings: Sequence[dict[str, Any]], naming: RankNames = BY_NUMBER) -> None:
    """Raise if the ranks have different settings, with the same text on all of them.

    >>> agree([{"seed": 0}, {"seed": 1}])
    Traceback (most recent call last):
    drumline.core.errors.MismatchError: ranks 0 and 1 disagree on seed: 0 and 1; expected the same ...
    """
    first = settings[0]
    for rank, other in enumerate(settings):
        for what, value in first.items():
            if other[what] != value:
                raise MismatchError(
                    f"{naming.several(0, rank)} disagree on {what}: {_difference(value, other[what])}",
                    expected="the same Pipeline(...) call on every rank",
                )


def _difference(first: Any, second: Any) -> str:
    if isinstance(first, str) and isinstance(second, str) and "\n" in first + second:
        first, second = first.splitlines(), second.splitlines()
    if isinstance(first, list) and isinstance(second, list):
        if len(first) != len(second):
            return f"{len(first)} and {len(second)} entries"
        first, second = next(pair for pair in zip(first, second, strict=True) if pair[0] != pair[1])
    return f"{first!s:.80} and {second!s:.80}"
