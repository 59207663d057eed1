"""This host's network interfaces and their addresses: where a rank listens for ranks of other hosts.

::

    all ranks on one host   loopback: nothing outside can connect
    several hosts           the interface that was asked for, else the one that leads to the ranks' store
"""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from drumline.core.errors import RunError


class ListenAddress(NamedTuple):
    """Where a rank listens: an interface's name ("" if unknown) and one of its addresses."""

    interface: str
    address: str

    @property
    def family(self) -> socket.AddressFamily:
        """Whether the address is of IPv6 or IPv4."""
        return socket.AF_INET6 if ":" in self.address else socket.AF_INET

    @property
    def is_loopback(self) -> bool:
        """Whether nothing outside this host can connect to it."""
        return ipaddress.ip_address(self.address).is_loopback


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of every interface of this host, by name; those that only one link knows are left out.

    >>> "127.0.0.1" in [value for addresses in interfaces().values() for value in addresses]
    True
    """
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)):
        raise RunError(f"the system does not tell its network interfaces: errno {ctypes.get_errno()}")
    addresses: dict[str, list[str]] = {}
    try:
        entry = first
        while entry:
            here = entry.contents
            address = _address(here.address)
            if address and not ipaddress.ip_address(address).is_link_local:
                addresses.setdefault(here.name.decode(), []).append(address)
            entry = here.next
    finally:
        library.freeifaddrs(first)
    return addresses


class _Entry(ctypes.Structure):
    """The first fields of C's struct ifaddrs."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _address(at: int | None) -> str:
    """Return the text of C's struct sockaddr; empty unless it is an IP address."""
    if at is None:
        return ""
    head = ctypes.string_at(at, 2)
    family = head[1] if head[0] in (16, 28) else int.from_bytes(head, "little")  # BSD's begins with its length
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(at + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(socket.AF_INET6, ctypes.string_at(at + 8, 16))
    return ""


def loopback(texts: Mapping[str, Sequence[str]] | None = None) -> ListenAddress:
    """Return where ranks of this host alone listen.

    >>> loopback({"eth0": ["10.0.0.5"], "lo": ["127.0.0.1", "::1"]})
    ListenAddress(interface='lo', address='127.0.0.1')
    """
    for name, addresses in (interfaces() if texts is None else texts).items():
        for address in addresses:
            if ipaddress.ip_address(address).is_loopback:
                return ListenAddress(name, address)
    return ListenAddress("", "127.0.0.1")


def place_named(named: str, texts: Mapping[str, Sequence[str]] | None = None, *, like: str = "") -> ListenAddress:
    """Return the interface with a name or an address; of several addresses, the first of the kind that `like` has.

    >>> place_named("eth0", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5", "fd00::5"]}, like="fd00::1").address
    'fd00::5'
    >>> place_named("eth1", {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]})
    Traceback (most recent call last):
    drumline.core.errors.RunError: interface is 'eth1'; expected an interface of this host, or its address: lo ...
    """
    texts = interfaces() if texts is None else texts
    for name, addresses in texts.items():
        if named == name:
            same = [address for address in addresses if (":" in address) == (":" in like)] if like else []
            return ListenAddress(name, (same or list(addresses))[0])
        if named.strip("[]") in addresses:
            return ListenAddress(name, named.strip("[]"))
    raise RunError(f"interface is {named!r}", expected=f"an interface of this host, or its address: {_known(texts)}")


def place_towards(host: str) -> ListenAddress:
    """Return the interface by which this host reaches another, or itself under that name.

    >>> place_towards("127.0.0.1").address
    '127.0.0.1'
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)  # sends nothing: it only picks the interface
        address = str(probe.getsockname()[0])
    name = next((name for name, addresses in interfaces().items() if address in addresses), "")
    return ListenAddress(name, address)


def place_between_hosts(named: str, store_host: str) -> ListenAddress:
    """Return where to listen for ranks of other hosts: as asked for, else towards the store.

    A name of this host that leads to loopback is refused: other hosts would connect to themselves. If the store itself
    is at loopback, all ranks reach it there.

    >>> place_between_hosts("", "localhost").is_loopback
    True
    """
    if named:
        return place_named(named, like=store_host if _is_address(store_host) else "")
    try:
        place = place_towards(store_host or socket.gethostname())
        why = f"{store_host or socket.gethostname()} is {place.address} here"
    except OSError as error:
        place, why = None, f"{store_host}: {error}"
    if place is not None and (not place.is_loopback or store_host == "localhost" or _is_address(store_host)):
        return place
    raise RunError(
        f"ranks run on several hosts, and nothing says by which interface they reach each other ({why})",
        expected=f"an interface of this host: {_known(interfaces())}",
        fix="name it: drumline train --interface NAME, or Pipeline(interface=NAME)",
    )


def _known(addresses: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(addresses)})" for name, addresses in addresses.items())


def endpoint(address: str, port: int | str) -> str:
    """Return an address and a port as one text.

    >>> endpoint("fd00::1", 29500), endpoint("node0", 29500)
    ('[fd00::1]:29500', 'node0:29500')
    """
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
