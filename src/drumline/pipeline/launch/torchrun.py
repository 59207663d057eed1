"""A rendezvous for torchrun that listens on one address alone: `torchrun --rdzv-backend drumline`.

torchrun's own backend, c10d, opens two ports on every interface: its rendezvous, and the ranks' store. This one is the
same but for three things:

    where it listens      at the endpoint's address on the host that has it, and at --local-addr for the ranks' store
    which host listens    the one with an interface of the endpoint's address, whatever its host name resolves to
    --local-addr          if not given, the address by which this host reaches the endpoint

torchrun finds it by an entry point of the package (pyproject.toml), and imports this module whenever it starts: so
nothing else is imported here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NAME = "drumline"
DEFAULT_PORT = 29400  # c10d's


def handler() -> Callable[[Any], Any]:
    """Return what makes torchrun's rendezvous from its parameters."""
    return _rendezvous


def _rendezvous(params: Any) -> Any:
    from torch.distributed import TCPStore
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    from drumline.runtime.channel.interfaces import place_between_hosts
    from drumline.runtime.channel.rendezvous import hosted_store

    host, port = parse_rendezvous_endpoint(params.endpoint, default_port=DEFAULT_PORT)
    timeout = float(params.get_as_int("read_timeout", 60))
    if params.local_addr is None:
        params.local_addr = host if params.max_nodes == 1 else place_between_hosts("", host).address
    is_host = params.get_as_bool("is_host")
    store: TCPStore
    if is_here(host) if is_host is None else is_host:
        store = hosted_store(host, port, timeout=timeout)
    else:
        store = TCPStore(host, port, is_master=False, timeout=_seconds(timeout), wait_for_workers=False)
    backend = type("Backend", (C10dRendezvousBackend,), {"name": NAME})(store, params.run_id)
    made = create_handler(store, backend, params)
    made._create_tcp_store_server = lambda address, port: hosted_store(address, port, timeout=timeout)
    return made


def is_here(host: str) -> bool:
    """Whether a name or an address is one of this host.

    >>> is_here("localhost"), is_here("203.0.113.7")
    (True, False)
    """
    import socket

    from drumline.runtime.channel.interfaces import interfaces

    own = {one for addresses in interfaces().values() for one in addresses}
    found = {str(one[4][0]) for one in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    return bool(found & own) or host == "localhost"


def _seconds(number: float) -> Any:
    from datetime import timedelta

    return timedelta(seconds=number)
