"""Two hosts on one machine, joined by a relay of ours that holds every packet for a while, as a long line would.

    host 0  10.77.0.1  wire0 ── TUN ──► relay: so many seconds later ──► TUN ── wire0  10.77.0.2  host 1

    with held_link() as link:
        link.hold(0.02)      # every packet from now on; any process may call it

Network namespaces and TUN devices need root, on Linux; `why_not` of tests/hosts says whether they can be made.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import signal
import struct
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hosts.namespaces import INTERFACE, TwoHosts, two_hosts

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MTU = 60000  # a message of a benchmark is one packet
_LARGEST = 65536
_SECONDS_TO_START = 30.0


@dataclass
class HeldLink:
    """The two hosts, and the file that says how long packets are held."""

    hosts: TwoHosts
    file: Path

    def hold(self, seconds: float) -> None:
        """Hold every packet for so long from now on."""
        with self.file.open("r+b") as file:
            file.write(struct.pack("<d", seconds))


@contextlib.contextmanager
def held_link() -> Iterator[HeldLink]:
    """Play two hosts with a relay between them, which ends with the block."""
    with two_hosts() as hosts, tempfile.TemporaryDirectory() as folder:
        link = HeldLink(hosts, Path(folder) / "seconds")
        link.file.write_bytes(struct.pack("<d", 0.0) + bytes(mmap.PAGESIZE - 8))
        for name in hosts.names:
            subprocess.run(["ip", "-n", name, "link", "del", INTERFACE], check=False, capture_output=True)
        relay = os.fork()
        if not relay:
            try:
                _relay(link)
            finally:
                os._exit(1)
        try:
            _configure(hosts)
            yield link
        finally:
            os.kill(relay, signal.SIGKILL)
            os.waitpid(relay, 0)


def _configure(hosts: TwoHosts) -> None:
    """Give both devices their addresses, once the relay has made them."""
    for name, address in zip(hosts.names, hosts.addresses, strict=True):
        until = time.monotonic() + _SECONDS_TO_START
        while subprocess.run(["ip", "-n", name, "link", "show", INTERFACE], capture_output=True).returncode:
            assert time.monotonic() < until, "the relay made no device"
            time.sleep(0.05)
        for words in (
            ["addr", "add", f"{address}/24", "dev", INTERFACE],
            ["link", "set", INTERFACE, "mtu", str(_MTU), "up"],
        ):
            subprocess.run(["ip", "-n", name, *words], check=True, capture_output=True)


def _opened(hosts: TwoHosts, host: int) -> int:
    hosts.enter(host)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _relay(link: HeldLink) -> None:
    """Carry packets between the hosts until somebody ends this process."""
    devices = [_opened(link.hosts, host) for host in (0, 1)]
    to = {devices[0]: devices[1], devices[1]: devices[0]}
    held: deque[tuple[float, int, bytes]] = deque()
    with link.file.open("rb") as file, mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ) as told:
        while True:
            wait = max(held[0][0] - time.monotonic(), 0.0) if held else 1.0
            ready, _, _ = select.select(devices, [], [], wait)
            for device in ready:
                with contextlib.suppress(BlockingIOError):
                    packet = os.read(device, _LARGEST)
                    held.append((time.monotonic() + struct.unpack("<d", told[:8])[0], to[device], packet))
            while held and held[0][0] <= time.monotonic():
                _, target, packet = held.popleft()
                with contextlib.suppress(OSError):  # a full queue drops packets, as links do
                    os.write(target, packet)
