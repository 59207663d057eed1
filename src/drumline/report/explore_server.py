"""The explore page's server: loopback only, for one person on this machine.

It rejects requests from pages elsewhere (DNS rebinding) by their Host header. It writes nothing.
"""

from __future__ import annotations

import io
import json
import re
import sys
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import cast
from urllib.parse import parse_qsl, urlsplit

from drumline.core.errors import DrumlineError, UsageError
from drumline.report.explore import Sliders, answer, explain, explore_page, export
from drumline.report.summary import refused

MAX_BODY_BYTES = 8 * 2**20
BODY_SECONDS = 30.0
_LENGTH = re.compile("[0-9]+")


class ExploreServer(ThreadingHTTPServer):
    """Serves the page on a loopback port; 0 picks a free one.

    >>> with ExploreServer(0) as server:
    ...     server.address.startswith("http://127.0.0.1:")
    True
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.body_seconds = BODY_SECONDS

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore a browser that went away; anything else that fails is our bug, and is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def address(self) -> str:
        """The address of the page."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _BadRequest(Exception):
    """A malformed request: the answer is one line, and the connection ends."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(BaseHTTPRequestHandler):
    server: ExploreServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        self.respond(lambda: None)

    def do_POST(self) -> None:
        self.respond(lambda: self.body().decode("utf-8-sig"))

    def respond(self, posted: Callable[[], str | None]) -> None:
        try:
            self.check_host()
            csv = posted()
            self.answer(*self.question(), csv)
        except _BadRequest as error:
            self.close_connection = True  # the rest of the request is not read
            self.send(error.status, "text/plain", str(error).encode())
        except UnicodeDecodeError:
            self.send_json({"error": refused(UsageError("the file is not UTF-8 text", fix="save the file as UTF-8"))})
        except DrumlineError as error:
            self.send_json({"error": refused(error)}, status=HTTPStatus.UNPROCESSABLE_ENTITY)

    def check_host(self) -> None:
        """Reject requests that do not come from the page itself, before reading a body."""
        port = self.server.server_address[1]
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or hosts[0] not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            raise _BadRequest(HTTPStatus.FORBIDDEN, "this page only works on the machine that serves it")

    def body(self) -> bytes:
        """Return the posted body: its length must come first, and all of it soon."""
        lengths = self.headers.get_all("Content-Length") or []
        if not lengths or "Transfer-Encoding" in self.headers:
            raise _BadRequest(HTTPStatus.LENGTH_REQUIRED, "Content-Length is missing")
        if len(lengths) > 1 or _LENGTH.fullmatch(lengths[0]) is None:
            raise _BadRequest(HTTPStatus.BAD_REQUEST, "Content-Length is not a whole number")
        length = int(lengths[0][-20:])
        if len(lengths[0]) > 20 or length > MAX_BODY_BYTES:
            raise _BadRequest(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the limit is {MAX_BODY_BYTES >> 20} MiB")
        return self.read_body(length)

    def read_body(self, length: int) -> bytes:
        """Read this many bytes, for at most BODY_SECONDS in total, however slowly they arrive."""
        deadline = time.monotonic() + self.server.body_seconds
        pieces: list[bytes] = []
        reader = cast(io.BufferedReader, self.rfile)
        try:
            while length:
                self.connection.settimeout(max(deadline - time.monotonic(), 0.001))
                piece = reader.read1(length)
                if not piece:
                    raise _BadRequest(HTTPStatus.BAD_REQUEST, "the body ends before its Content-Length")
                pieces.append(piece)
                length -= len(piece)
        except TimeoutError:
            raise _BadRequest(HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive in time") from None
        finally:
            self.connection.settimeout(self.timeout)
        return b"".join(pieces)

    def question(self) -> tuple[str, dict[str, str]]:
        """Return the requested page, and the settings in its address."""
        try:
            address = urlsplit(self.path)
            return address.path, dict(parse_qsl(address.query, max_num_fields=100))
        except ValueError:
            raise _BadRequest(HTTPStatus.BAD_REQUEST, "no such address") from None

    def answer(self, page: str, query: dict[str, str], csv: str | None) -> None:
        if page == "/" and csv is None:
            self.send(HTTPStatus.OK, "text/html; charset=utf-8", explore_page(Sliders.of(query)).encode())
        elif page == "/answer":
            self.send_json(answer(Sliders.of(query), csv))
        elif page == "/explanations":
            self.send_json(explain(Sliders.of(query), csv))
        elif page == "/export":
            kind = query.pop("kind", "")
            name, media_type, contents = export(Sliders.of(query), kind, csv)
            self.send(HTTPStatus.OK, media_type, contents, download=name)
        else:
            self.send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page")

    def send_json(self, value: object, *, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send(status, "application/json", json.dumps(value, allow_nan=False, separators=(",", ":")).encode())

    def send(self, status: HTTPStatus, media_type: str, contents: bytes, *, download: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(len(contents)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        if download:
            safe = "".join(name if name.isalnum() or name in "-." else "-" for name in download)
            self.send_header("Content-Disposition", f'attachment; filename="{safe}"')
        self.end_headers()
        self.wfile.write(contents)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Print nothing: the terminal shows only the address."""
