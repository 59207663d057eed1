"""The port where Prometheus fetches metrics: a small HTTP server in the front's own event loop, which has no threads.

It reads one request a connection, whatever its path, answers, and closes. A connection that has not sent its head, or
not taken its answer, within some seconds is closed. So is one beyond the most that may be open.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from drumline.core.errors import UsageError

SECONDS = 5.0  # for a head, and for an answer
MOST_OPEN = 16
_LONGEST_HEAD = 2**14  # bytes
_REASONS = {200: "OK", 400: "Bad Request", 405: "Method Not Allowed", 408: "Request Timeout"}


class MetricsPort:
    """Answers on a port with what a registry holds."""

    def __init__(self, registry: CollectorRegistry, *, seconds: float = SECONDS, most_open: int = MOST_OPEN) -> None:
        self._registry, self._seconds, self._most_open = registry, seconds, most_open
        self.open = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> tuple[int, Callable[[], None]]:
        """Listen; returns the port, and what ends it."""
        try:
            server = await asyncio.start_server(self._connected, host, port, limit=_LONGEST_HEAD)
        except (OSError, OverflowError) as error:
            what = f"cannot serve metrics on {host}:{port}: {getattr(error, 'strerror', None) or error}"
            raise UsageError(what, fix="choose another --metrics, or none") from None

        def end() -> None:
            server.close()
            for task in self._tasks:
                task.cancel()

        number: int = server.sockets[0].getsockname()[1]
        return number, end

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.open += 1
        try:
            if self.open <= self._most_open:
                await self._answer(reader, writer)
        except (OSError, TimeoutError):
            pass  # whoever asked has gone, or does not read
        finally:
            self.open -= 1
            self._tasks.discard(task)
            writer.transport.abort()  # nothing is left to send: `drain` has waited for it

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        code = await self._code(reader)
        body = generate_latest(self._registry) if code == 200 else f"{_REASONS[code]}\n".encode()
        kind = CONTENT_TYPE_LATEST if code == 200 else "text/plain"
        head = f"HTTP/1.1 {code} {_REASONS[code]}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
        writer.transport.set_write_buffer_limits(0)  # `drain` then waits until all is sent
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        async with asyncio.timeout(self._seconds):
            await writer.drain()
            writer.write_eof()
            while await reader.read(_LONGEST_HEAD):  # an abort before the other side closes could overtake the answer
                pass

    async def _code(self, reader: asyncio.StreamReader) -> int:
        """Read a head, and return with which status to answer."""
        try:
            async with asyncio.timeout(self._seconds):
                head = await reader.readuntil(b"\r\n\r\n")
        except TimeoutError:
            return 408
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            return 400
        return 200 if head.split(b" ", 1)[0] == b"GET" else 405
