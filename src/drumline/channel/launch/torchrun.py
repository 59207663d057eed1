"""A rendezvous for torchrun that listens on one address alone: `torchrun --rdzv-backend drumline`.

torchrun's own backend, c10d, opens two ports on every interface: its rendezvous, and the ranks' store. This one is the
same but for three things:

    where it listens      at the endpoint's address on the host that has it, and at --local-addr for the ranks' store;
                          with --rdzv-conf interface=NAME on that interface
    which host listens    the one with an interface of the endpoint's address, whatever its host name resolves to
    --local-addr          if not given, the address by which this host reaches the endpoint

torchrun finds it by an entry point of the package (pyproject.toml), and imports this module whenever it starts: so
nothing heavy is imported here.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

NAME = "drumline"
DEFAULT_PORT = 29400  # c10d's


def handler() -> Callable[[Any], Any]:
    """Return what makes torchrun's rendezvous from its parameters."""
    return _rendezvous


def _rendezvous(params: Any) -> Any:
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from drumline.channel.interfaces import place_between_hosts
    from drumline.channel.rendezvous import hosted_store

    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    timeout, interface = float(params.get_as_int("read_timeout", 60)), params.get("interface", "") or ""
    addresses = _resolved(host, timeout)
    if params.local_addr is None and (interface or params.max_nodes > 1):
        params.local_addr = place_between_hosts(interface, host).address
    params.local_addr = params.local_addr or host
    is_host = params.get_as_bool("is_host")
    if is_here(addresses) if is_host is None else is_host:
        store = hosted_store(host, port, interface=interface, timeout=timeout)
    else:
        limit = timedelta(seconds=timeout)
        store = TCPStore(host, port, is_master=False, timeout=limit, wait_for_workers=False)
    backend = type("Backend", (C10dRendezvousBackend,), {"name": NAME})(store, params.run_id)
    rendezvous: Any = create_handler(store, backend, params)
    rendezvous._create_tcp_store_server = lambda address, port: hosted_store(address, port, timeout=timeout)
    return rendezvous


def is_here(addresses: Iterable[str]) -> bool:
    """Whether any of some addresses is one of this host.

    >>> is_here(["127.0.1.1"]), is_here(["203.0.113.7"])
    (True, False)
    """
    from drumline.channel.interfaces import ListenAddress, interfaces

    own_addresses = {name for interface in interfaces().values() for name in interface}
    return any(address in own_addresses or ListenAddress("", address).is_loopback for address in addresses)


def _resolved(host: str, timeout: float) -> list[str]:
    """Return the addresses of a host; its name may become known only after its node has started."""
    from drumline.core.errors import RunError

    deadline = time.monotonic() + timeout
    while True:
        try:
            return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise RunError(
                    f"--rdzv-endpoint: no address for {host} within {timeout:g} s: {error.strerror}",
                    expected="the name or an address of the first host",
                ) from error
            time.sleep(min(1.0, timeout / 10))
