"""Garbage for ports: bytes of any kind, torn HTTP/2, damaged messages, calls that do not exist."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from typing import Any

import grpc

from drumline.serve.wire.protocol import path_of
from served.services import channel_to, request_of, rows_of

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CALLS = ("ModelInfer", "ModelMetadata", "ModelReady", "ServerLive", "NoSuchCall")


def garbage_at(port: int, *, cases: int, seed: int) -> int:
    """Send so many pieces of garbage to a port; returns how many it took without going away."""
    chance = random.Random(seed)
    taken = 0
    with channel_to(f"127.0.0.1:{port}") as channel:
        for number in range(cases):
            if number % 2:
                _send_message(channel, chance)
            else:
                _send_bytes(port, chance)
            taken += 1
    return taken


def _send_bytes(port: int, chance: random.Random) -> None:
    kind = chance.randrange(4)
    body = chance.randbytes(chance.choice((0, 1, 9, 100, 5000, 70000)))
    if kind == 1:
        body = _PREFACE + body
    elif kind == 2:
        body = _PREFACE[: chance.randrange(len(_PREFACE))]
    elif kind == 3:
        length = chance.randrange(2**24)
        body = _PREFACE + length.to_bytes(3, "big") + bytes([chance.randrange(12), chance.randrange(256)]) + body
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.settimeout(0.02)
        connection.sendall(body)
        connection.recv(1000)


def _send_message(channel: Any, chance: random.Random) -> None:
    """Call with a message that is garbage, or a right one with some bytes changed."""
    body = bytearray(request_of({"x": rows_of(chance.randrange(1, 4))}).SerializeToString())
    if chance.random() < 0.4:
        body = bytearray(chance.randbytes(chance.choice((0, 1, 10, 1000))))
    else:
        for _ in range(chance.randrange(1, 8)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        if chance.random() < 0.3:
            del body[chance.randrange(len(body)) :]
    with suppress(grpc.RpcError):
        channel.unary_unary(path_of(chance.choice(_CALLS)))(bytes(body), timeout=10)
