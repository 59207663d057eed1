"""Addresses, channels and certificates: loopback and plain unless told otherwise.

Certificates make a port TLS. With an authority for clients it is mutual: a client without a certificate of that
authority gets no connection.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from drumline.core.errors import UsageError
from drumline.core.files import MIB, FileKind, read_bytes

_PEM = FileKind("certificate", UsageError, "a file in PEM format", MIB)
LOOPBACK = "127.0.0.1"
_SECURED = "add --tls-cert and --tls-key, or --plain if the network is yours"
_MANY = 2**31 - 1
_LONGEST_SOCKET = 100  # bytes of a socket's path; systems allow 103 or a few more


@dataclass(frozen=True, slots=True)
class Tls:
    """Files in PEM format: this side's certificate and key, and the authority that the other side's must be of."""

    certificate: str = ""
    key: str = ""
    authority: str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            missing = "--tls-key" if self.certificate else "--tls-cert"
            raise UsageError(f"{missing} is missing", expected="a certificate together with its key")

    def __bool__(self) -> bool:
        return bool(self.certificate or self.authority)

    def server(self) -> Any:
        """Return what a server needs, or None for a plain port; an authority makes clients show a certificate."""
        if not self.certificate:
            if self.authority:
                raise UsageError("--tls-ca without --tls-cert", fix="add --tls-cert and --tls-key")
            return None
        roots = _pem(self.authority) if self.authority else None
        pair = (_pem(self.key), _pem(self.certificate))
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                f"--tls-cert {self.certificate} and --tls-key {self.key} cannot be used: {error}",
                expected="a certificate and its own key, in PEM format and without a password",
            ) from None
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)

    def channel(self) -> Any:
        """Return what a client needs, or None for a plain connection."""
        if not self:
            return None
        return grpc.ssl_channel_credentials(
            _pem(self.authority) if self.authority else None,
            _pem(self.key) if self.key else None,
            _pem(self.certificate) if self.certificate else None,
        )


PLAIN = Tls()


def _no_password() -> str:
    raise ValueError("the key has a password")


def _pem(path: str) -> bytes:
    pem = read_bytes(Path(path), _PEM)
    if b"-----BEGIN " not in pem:
        raise UsageError(f"{path} holds no certificate or key", expected=_PEM.expected)
    return pem


def options(max_bytes: int, *, client: bool = False) -> list[tuple[str, int]]:
    """Return what gRPC is told: the largest message, and, for clients, to look soon for a stage that comes back."""
    settings = [("grpc.max_receive_message_length", max_bytes), ("grpc.max_send_message_length", max_bytes)]
    if client:
        again = ("initial", 50), ("min", 50), ("max", 500)
        settings += [(f"grpc.{name}_reconnect_backoff_ms", value) for name, value in again]
        return settings
    # gRPC would cancel calls that wait to be taken; the server itself refuses them, and says why.
    pending = [(f"grpc.server.max_pending_requests{end}", _MANY) for end in ("", "_hard_limit")]
    return [*settings, *pending, ("grpc.so_reuseport", 0), ("grpc.max_metadata_size", 16384)]


def connect(address: str, tls: Tls, max_bytes: int) -> Any:
    """Return an asynchronous channel to an address."""
    credentials = tls.channel()
    how = options(max_bytes, client=True)
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=how)
    return grpc.aio.secure_channel(address, credentials, options=how)


def listen(server: Any, address: str, tls: Tls) -> int:
    """Let a server listen; returns the port."""
    credentials = tls.server()
    try:
        if credentials is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"cannot listen on {address}", fix="choose another --listen") from error
    if not port:
        raise UsageError(f"cannot listen on {address}", fix="choose another --listen")
    return int(port)


def parts_of(address: str, *, flag: str) -> tuple[str, int]:
    """Return host and port of an address.

    >>> parts_of("[::1]:8001", flag="--listen"), parts_of("node7:8001", flag="--hosts")
    (('::1', 8001), ('node7', 8001))
    >>> parts_of("node7", flag="--hosts")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: --hosts is 'node7'; expected HOST:PORT, with a port up to 65535
    """
    host, colon, port = address.rpartition(":")
    if not colon or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"{flag} is {address[:80]!r}", expected="HOST:PORT, with a port up to 65535")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address.

    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_exposed(address: str, tls: Tls, *, plain: bool, flag: str) -> None:
    """Refuse a port that other machines can reach without TLS, unless the user says so."""
    host, _ = parts_of(address, flag=flag)
    if not is_loopback(host) and not tls.certificate and not plain:
        raise UsageError(
            f"{flag} is {address}, which other machines can reach without TLS",
            expected="an address of this machine alone, like 127.0.0.1:8001",
            fix="add --plain if the network is yours" if flag == "--metrics" else _SECURED,
        )


def free_port() -> int:
    """Return a port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def local_links(folder: Path, count: int) -> list[str]:
    """Return addresses of sockets in a folder: a message takes about 0.6 of its time over the loopback interface.

    None where the system has no such sockets, or the folder's name is too long for them.

    >>> local_links(Path("/tmp/drumline-7"), 2)
    ['unix:/tmp/drumline-7/0', 'unix:/tmp/drumline-7/1']
    >>> local_links(Path("/tmp") / ("long" * 30), 2)
    []
    """
    paths = [str(folder.absolute() / str(number)) for number in range(count)]
    fits = hasattr(socket, "AF_UNIX") and all(len(os.fsencode(path)) <= _LONGEST_SOCKET for path in paths)
    return [f"unix:{path}" for path in paths] if fits else []
