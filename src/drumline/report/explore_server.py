"""The explore page's server: loopback only, for one person on this machine.

A page elsewhere that tricks the browser into asking (DNS rebinding) is refused by its Host; nothing is written.
"""

from __future__ import annotations

import gc
import json
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

from drumline.core.errors import DrumlineError, UsageError
from drumline.report.explore import Settings, answer, explain, explore_page, export

MAX_BODY_BYTES = 8 * 2**20
IDLE_SECONDS = 2.0


class ExploreServer(ThreadingHTTPServer):
    """Serves the page on a loopback port; 0 takes a free one.

    >>> with ExploreServer(0) as server:
    ...     server.address.startswith("http://127.0.0.1:")
    True
    """

    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.asked_at = 0.0

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serve until shut down, garbage being collected between answers and not in the midst of one.

        A large program is some ten thousand objects, which the collector would look through again and again, to find
        nothing: it takes a fifth of an answer's time.
        """
        gc.disable()
        try:
            super().serve_forever(poll_interval)
        finally:
            gc.enable()

    def service_actions(self) -> None:
        """Collect garbage once nobody has asked for a while."""
        if self.asked_at and time.monotonic() - self.asked_at > IDLE_SECONDS:
            self.asked_at = 0.0
            gc.collect()

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ExploreServer
    protocol_version = "HTTP/1.1"
    timeout = 30

    def do_GET(self) -> None:
        self.respond(None)

    def do_POST(self) -> None:
        length = self.headers.get("Content-Length", "")
        if not length.isdigit() or int(length) > MAX_BODY_BYTES:
            self.close_connection = True
            self.send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "text/plain", f"at most {MAX_BODY_BYTES >> 20} MiB".encode())
            return
        try:
            text = self.rfile.read(int(length)).decode("utf-8-sig")
        except UnicodeDecodeError:
            self.send_json(_refused(UsageError("the file is not UTF-8 text", fix="save it as UTF-8")))
            return
        self.respond(text)

    def respond(self, csv: str | None) -> None:
        port = self.server.server_address[1]
        if self.headers.get("Host") not in (f"127.0.0.1:{port}", f"localhost:{port}"):
            self.send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is for this machine only")
            return
        self.server.asked_at = time.monotonic()
        address = urlsplit(self.path)
        query = dict(parse_qsl(address.query))
        try:
            if address.path == "/" and csv is None:
                self.send(HTTPStatus.OK, "text/html; charset=utf-8", explore_page(Settings.of(query)).encode())
            elif address.path == "/answer":
                self.send_json(answer(Settings.of(query), csv))
            elif address.path == "/explanations":
                self.send_json(explain(Settings.of(query), csv))
            elif address.path == "/export":
                kind = query.pop("kind", "")
                name, media_type, contents = export(Settings.of(query), kind, csv)
                self.send(HTTPStatus.OK, media_type, contents, download=name)
            else:
                self.send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page")
        except DrumlineError as error:
            self.send_json(_refused(error), status=HTTPStatus.UNPROCESSABLE_ENTITY)

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
            safe = "".join(one if one.isalnum() or one in "-." else "-" for one in download)
            self.send_header("Content-Disposition", f'attachment; filename="{safe}"')
        self.end_headers()
        self.wfile.write(contents)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing: the terminal shows the address and no more."""


def _refused(error: DrumlineError) -> dict[str, dict[str, str]]:
    return {"error": {"error": error.error, "expected": error.expected, "fix": error.fix}}
