"""Garbage for ports: bytes of any kind, torn HTTP/2, damaged messages and frames, tensors that are too large."""

from __future__ import annotations

import math
import random
import socket
from contextlib import suppress
from typing import Any

import grpc

from drumline.serve.wire.frames import EXPORT, Frame, FrameKind
from drumline.serve.wire.frames import SERVICE as FLOW
from drumline.serve.wire.protocol import path_of
from served.services import channel_to, request_of, rows_of

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_CALLS = ("ModelInfer", "ModelMetadata", "ModelReady", "ServerLive", "NoSuchCall")


def garbage_at(address: str, *, cases: int, seed: int, limit: int = 2**20, export: str = "") -> int:
    """Send so many pieces of garbage to an address, some over its limit of bytes; returns how many were sent.

    Some of them name the export, as whoever calls a stage does.
    """
    chance = random.Random(seed)
    with channel_to(address) as channel:
        for number in range(cases):
            if number % 4 == 1:
                _send_message(channel, chance, export)
            elif number % 4 == 3:
                chance.choice((_send_oversized, _send_frames))(channel, chance, limit, export)
            else:
                _send_bytes(address, chance)
    return cases


def _send_bytes(address: str, chance: random.Random) -> None:
    kind = chance.randrange(5)
    body = chance.randbytes(chance.choice((0, 1, 9, 100, 5000, 70000)))
    if kind == 1:
        body = _PREFACE + body
    elif kind == 2:
        body = _PREFACE[: chance.randrange(len(_PREFACE))]
    elif kind == 3:
        length = chance.randrange(2**24)
        body = _PREFACE + length.to_bytes(3, "big") + bytes([chance.randrange(12), chance.randrange(256)]) + body
    elif kind == 4:
        head = chance.choice((b"GET /metrics?", b"POST /metrics HTTP/1.1\r\nContent-Length: -1\r\nX: "))
        body = head + b"a" * chance.choice((10, 9000, 70000)) + b" HTTP/1.1\r\n\r\n"
    with suppress(OSError), _connected(address) as connection:
        connection.settimeout(0.02)
        connection.sendall(body)
        connection.recv(1000)


def _connected(address: str) -> socket.socket:
    kind, _, place = address.partition(":")
    if kind != "unix":
        return socket.create_connection((kind, int(place)), timeout=10)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(10)
    connection.connect(place)
    return connection


def _metadata(chance: random.Random, export: str) -> tuple[tuple[str, str], ...]:
    """Return the right export, mostly."""
    kind = chance.randrange(10)
    return () if kind == 0 or not export else ((EXPORT, export[:-1] if kind == 1 else export),)


def _send_message(channel: Any, chance: random.Random, export: str) -> None:
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
        channel.unary_unary(path_of(chance.choice(_CALLS)))(bytes(body), timeout=10, metadata=_metadata(chance, export))


def _send_oversized(channel: Any, chance: random.Random, limit: int, export: str) -> None:
    """Call with more than anybody should: rows, bytes, inputs, dimensions, names, metadata."""
    request = request_of({"x": rows_of(1)})
    value = request.inputs[0]
    more = _metadata(chance, export)
    kind = chance.randrange(7)
    if kind == 0:
        value.shape[chance.randrange(2)] = chance.choice((2**62, 2**40, 2**31, -(2**62)))
    elif kind == 1:
        request.raw_input_contents[0] = b"\0" * (limit + chance.choice((-200, 0, 1, limit)))
    elif kind == 2:
        for at in range(3000):
            request.inputs.add(name=f"x{at}", datatype="FP32", shape=[1])
    elif kind == 3:
        value.shape.extend([1] * 10_000)
    elif kind == 4:
        del request.raw_input_contents[:]
        value.contents.fp32_contents.extend([0.0] * (limit // 8))
    elif kind == 5:
        value.name = request.id = request.model_version = "x" * (limit // 4)
    else:
        more += (("x-large", "y" * 20_000),)
    with suppress(grpc.RpcError):
        channel.unary_unary(path_of("ModelInfer"))(request.SerializeToString(), timeout=10, metadata=more)


def _send_frames(channel: Any, chance: random.Random, limit: int, export: str) -> None:
    """Open a stream as the stage before does, with frames that are damaged, doubled, too large or out of turn."""
    body = request_of({"x": rows_of(1)}).SerializeToString()
    frames = []
    for _ in range(chance.randrange(1, 5)):
        kind, number = chance.choice(list(FrameKind)), chance.choice((0, 1, 2**64 - 1))
        seconds = chance.choice((1.0, 0.0, -1.0, 1e300, math.nan))
        made = bytearray(bytes(Frame(kind, number, seconds, "why", chance.choice((body, b"", b"\xff" * 99)))))
        if chance.random() < 0.3:
            made[chance.randrange(len(made))] = chance.randrange(256)
        if chance.random() < 0.2:
            del made[chance.randrange(len(made)) :]
        frames.append(bytes(made))
    if chance.random() < 0.1:
        frames.append(b"\1" * (limit + 1))
    with suppress(grpc.RpcError):
        stream = channel.stream_stream(f"/{FLOW}/Flow")
        for _ in stream(iter(frames), timeout=5, metadata=_metadata(chance, export)):
            pass
