"""Two hosts on one machine: network namespaces joined by a veth pair, with a link that can be slowed and cut.

    host 0  10.77.0.1 (or fd77::1)  wire0 ═══════ wire0  (or fd77::2) 10.77.0.2  host 1

    with two_hosts(rate="2mbit") as hosts:
        done = hosts.run(0, ["python", "-c", "..."])         # waits for its end
        ranks = [hosts.start(host, command) for host in (0, 1)]
        hosts.cut()                                          # no packet passes, no connection ends
        hosts.restore()

Each host has its own loopback, ports and abstract Unix sockets. Files, processes and the machine's name are shared. The
name resolves to loopback, as on many real machines; `host0` and `host1` resolve to the link's addresses. Only root may
do this, on Linux; elsewhere tests skip, and in CI they fail.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "wire0"
_ADDRESSES = {False: ("10.77.0.1", "10.77.0.2"), True: ("fd77::1", "fd77::2")}
_BITS = {False: 24, True: 64}
_SECONDS_TO_END = 20.0
_NETWORK = 0x40000000  # CLONE_NEWNET
_SETTINGS = Path("/etc/netns")


def why_not() -> str:
    """Return why two hosts cannot be played here; empty if they can."""
    if sys.platform != "linux":
        return "network namespaces exist only on Linux"
    missing = [tool for tool in ("ip", "tc", "ss") if shutil.which(tool) is None]
    if missing:
        return f"no {', '.join(missing)} on the PATH: install iproute2"
    name = f"drumline-{os.getpid()}-{secrets.token_hex(3)}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"network namespaces are not permitted here: {made.stderr.strip()}"
    _ip("netns", "del", name)
    return ""


def needs_two_hosts() -> None:
    """Skip the test where two hosts cannot be played; in CI that is a failure."""
    if reason := why_not():
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)


@dataclass
class TwoHosts:
    """What `two_hosts` gives: run commands on either host, and cut, slow or restore the link between them."""

    names: tuple[str, str]
    addresses: tuple[str, str]
    ipv6: bool
    interface: str = INTERFACE
    _started: list[subprocess.Popen[str]] = field(default_factory=list, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Let ranks have it, without the processes that were started here."""
        return TwoHosts, (self.names, self.addresses, self.ipv6, self.interface)

    def endpoint(self, port: int, *, host: int = 0) -> str:
        """Return HOST:PORT as torchrun takes it, with brackets around an IPv6 address."""
        address = self.addresses[host]
        return f"[{address}]:{port}" if self.ipv6 else f"{address}:{port}"

    def start(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        """Start a command on a host; options are Popen's. Whatever still runs at the end is killed."""
        inside = ["ip", "netns", "exec", self.names[host], *map(str, command)]
        process = subprocess.Popen(inside, **{"text": True, "start_new_session": True, **options})
        self._started.append(process)
        return process

    def run(
        self, host: int, command: Sequence[str], *, timeout: float = 60.0, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a host to its end, and return its exit code and output; TimeoutExpired after `timeout`."""
        process = self.start(host, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        out, err = process.communicate(timeout=timeout)
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def enter(self, host: int) -> None:
        """Move this thread to a host: sockets that it opens from here on, and processes and threads that it starts."""
        with open(f"/run/netns/{self.names[host]}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {self.names[host]}")

    def cut(self) -> None:
        """Let no packet pass. Connections stay open: nobody is told, as when a cable is pulled between switches."""
        # `ip link set down` fails connections at once on its own host (see `unplug`); this one, nobody notices.
        for name in self.names:
            _tc(name, "replace", "blackhole")

    def unplug(self, host: int) -> None:
        """Take the interface of a host down, as when its own cable is pulled."""
        _ip("-n", self.names[host], "link", "set", INTERFACE, "down")

    def restore(self, rate: str | None = None) -> None:
        """Let packets pass again, at a rate like "2mbit" if one is given."""
        for name, address in zip(self.names, self.addresses, strict=True):
            _ip("-n", name, "link", "set", INTERFACE, "up")
            if self.ipv6:  # an interface that goes down loses its IPv6 addresses
                _ip("-n", name, "addr", "replace", f"{address}/{_BITS[True]}", "dev", INTERFACE, "nodad")
            if rate is None:
                subprocess.run(
                    ["tc", "-n", name, "qdisc", "del", "dev", INTERFACE, "root"], capture_output=True, check=False
                )
            else:
                _tc(name, "replace", "tbf", "rate", rate, "burst", "16kb", "latency", "10s")

    def pids(self, host: int) -> list[int]:
        """Return the processes that run on a host now."""
        return [int(name) for name in _ip("netns", "pids", self.names[host]).split()]

    def listening(self, host: int) -> list[tuple[str, int]]:
        """Return address and port of every TCP socket that listens on a host now."""
        return listening(["ip", "netns", "exec", self.names[host]])

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in (index for host in (0, 1) for index in self.pids(host)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            deadline = time.monotonic() + _SECONDS_TO_END / 10
            while any(self.pids(host) for host in (0, 1)) and time.monotonic() < deadline:
                for process in self._started:
                    process.poll()
                time.sleep(0.02)
        for process in self._started:
            process.wait(_SECONDS_TO_END)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


@contextlib.contextmanager
def two_hosts(*, ipv6: bool = False, rate: str | None = None) -> Iterator[TwoHosts]:
    """Play two hosts; at the end all that runs on them is killed, and they are gone.

    With `ipv6` the link has IPv6 addresses alone. `rate` limits both directions, like "2mbit".
    """
    needs_two_hosts()
    stem = f"drumline-{os.getpid()}-{secrets.token_hex(3)}"
    hosts = TwoHosts((f"{stem}-0", f"{stem}-1"), _ADDRESSES[ipv6], ipv6)
    made: list[str] = []
    try:
        for name in hosts.names:
            _ip("netns", "add", name)
            made.append(name)
        first, second = hosts.names
        _ip("link", "add", INTERFACE, "netns", first, "type", "veth", "peer", "name", INTERFACE, "netns", second)
        for name, address in zip(hosts.names, hosts.addresses, strict=True):
            options = ("nodad",) if ipv6 else ()
            _ip("-n", name, "addr", "add", f"{address}/{_BITS[ipv6]}", "dev", INTERFACE, *options)
            _ip("-n", name, "link", "set", "lo", "up")
            _write_names(name, hosts.addresses)
        hosts.restore(rate)
        yield hosts
    finally:
        if len(made) == len(hosts.names):
            hosts._end()
        for name in made:
            _ip("netns", "del", name)
            shutil.rmtree(_SETTINGS / name, ignore_errors=True)


def _write_names(name: str, addresses: Sequence[str]) -> None:
    """Give a host its own /etc/hosts, and no name server: it would answer nobody, after long waits."""
    folder = _SETTINGS / name  # `ip netns exec` mounts what is there over /etc
    folder.mkdir(parents=True)
    names = [f"127.0.0.1 localhost {socket.gethostname()}", *(f"{text} host{at}" for at, text in enumerate(addresses))]
    (folder / "hosts").write_text("\n".join(names) + "\n")
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")


def listening(prefix: Sequence[str] = ()) -> list[tuple[str, int]]:
    """Return address and port of every TCP socket that listens here, or where the commands of a prefix run."""
    told = subprocess.run([*prefix, "ss", "-ltnH"], capture_output=True, text=True, check=True).stdout
    ends = [line.split()[3].rsplit(":", 1) for line in told.splitlines()]
    return [(address.strip("[]"), int(port)) for address, port in ends]


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


def _tc(name: str, verb: str, *words: str) -> None:
    subprocess.run(["tc", "-n", name, "qdisc", verb, "dev", INTERFACE, "root", *words], check=True, capture_output=True)
