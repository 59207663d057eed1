"""What the explore page's server answers to requests that no browser makes."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from socketserver import BaseServer

import pytest

from drumline.report.explore_server import MAX_BODY_BYTES, ExploreServer

CSV = b"0F0,0B0\n1F0,1B0\n"


@pytest.fixture(scope="module")
def server() -> Iterator[ExploreServer]:
    with ExploreServer(0) as explore_server:
        thread = threading.Thread(target=explore_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield explore_server
        explore_server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Collect what the server could not handle: every test ends without any."""
    found: list[object] = []
    monkeypatch.setattr(BaseServer, "handle_error", lambda self, request, address: found.append(address))
    yield found
    assert not found


def asked(server: ExploreServer, data: bytes) -> tuple[int, bytes]:
    """Send raw bytes, and return the status and the body of the first answer."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
        connection.sendall(data)
        return answered(connection)


def answered(connection: socket.socket) -> tuple[int, bytes]:
    with connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        length = 0
        while (line := file.readline().strip()) != b"":
            if line.lower().startswith(b"content-length:"):
                length = int(line.split(b":")[1])
        return status, file.read(length)


def request(
    server: ExploreServer, line: str = "POST /answer", *headers: str, host: str = "", body: bytes = b""
) -> bytes:
    host = host or f"127.0.0.1:{server.server_address[1]}"
    head = "\r\n".join([f"{line} HTTP/1.1", f"Host: {host}", "Connection: close", *headers])
    return head.encode("latin-1") + b"\r\n\r\n" + body


def test_a_program_that_is_posted_is_answered(server: ExploreServer) -> None:
    status, body = asked(server, request(server, "POST /answer", f"Content-Length: {len(CSV)}", body=CSV))
    assert (status, json.loads(body)["summary"]["ranks"]) == (200, 2)


@pytest.mark.parametrize(
    ("length", "status"),
    [
        ("²", 400),
        ("١٦", 400),
        ("-1", 400),
        ("+16", 400),
        ("1_6", 400),
        ("0x10", 400),
        ("16, 16", 400),
        ("16.0", 400),
        ("", 400),
        ("9" * 5000, 413),
        (str(MAX_BODY_BYTES + 1), 413),
        ("9" * 12, 413),
    ],
)
def test_a_length_that_is_no_plain_number_or_too_large_is_refused(
    server: ExploreServer, length: str, status: int
) -> None:
    head = request(server, "POST /answer").replace(b"\r\n\r\n", f"\r\nContent-Length: {length}\r\n\r\n".encode())
    assert asked(server, head + CSV)[0] == status


def test_a_length_that_is_missing_or_given_twice_is_refused(server: ExploreServer) -> None:
    assert asked(server, request(server) + CSV)[0] == 411
    assert asked(server, request(server, "POST /answer", "Transfer-Encoding: chunked") + b"0\r\n\r\n")[0] == 411
    both = (f"Content-Length: {len(CSV)}", "Content-Length: 3")
    assert asked(server, request(server, "POST /answer", *both, body=CSV))[0] == 400


def test_the_host_is_checked_before_the_body_is_read(server: ExploreServer) -> None:
    # Not a byte of the body is sent: who waits for it never answers.
    for headers in ((f"Content-Length: {MAX_BODY_BYTES}",), ("Content-Length: x",), ()):
        status, body = asked(server, request(server, "POST /answer", *headers, host="evil.example"))
        assert (status, body) == (403, b"this page only works on the machine that serves it")
    assert asked(server, request(server, "GET /", host="evil.example"))[0] == 403
    again = f"Host: 127.0.0.1:{server.server_address[1]}"
    assert asked(server, request(server, "GET /", again, host="evil.example"))[0] == 403


def test_a_body_that_never_comes_is_not_waited_for(server: ExploreServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "body_seconds", 0.05)
    assert asked(server, request(server, "POST /answer", "Content-Length: 100", body=b"0F0"))[0] == 408


def test_a_body_that_ends_early_is_refused(server: ExploreServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
        connection.sendall(request(server, "POST /answer", "Content-Length: 100", body=b"0F0"))
        connection.shutdown(socket.SHUT_WR)
        assert answered(connection)[0] == 400


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("GET /../../etc/passwd", 404),
        ("GET /..%2f..%2fetc/passwd", 404),
        ("GET http://[", 400),
        ("GET /answer?" + "&".join(f"a{at}=1" for at in range(200)), 400),
        ("GET /answer?ranks=" + "9" * 5000, 422),
        ("GET /answer?ranks=%EF%BC%92&forward=nan", 200),
        ("GET /export?kind=exe", 422),
        ("GET /export?kind=csv&ranks=0", 422),
        ("POST /", 404),
        ("PUT /answer", 501),
        ("DELETE /", 501),
        ("GET / extra", 400),
    ],
)
def test_odd_addresses_and_methods_are_refused(server: ExploreServer, line: str, status: int) -> None:
    assert asked(server, request(server, line, "Content-Length: 0"))[0] == status


def test_a_body_that_is_no_text_or_no_program_is_refused(server: ExploreServer) -> None:
    for body, says in ((b"\xff\xfe\x00", "the file is not UTF-8 text"), (b"0F0junk", "row 1, column 1")):
        status, found = asked(server, request(server, "POST /answer", f"Content-Length: {len(body)}", body=body))
        assert status == 200
        assert says in json.loads(found)["error"]["error"]


def test_whoever_hangs_up_leaves_no_trace(server: ExploreServer, faults: list[object]) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
        connection.sendall(b"POST /answer HTTP/1.1\r\nHost: ")
    assert asked(server, request(server, "GET /answer?ranks=2", "Content-Length: 0"))[0] == 200
    assert not faults


def test_a_program_that_no_page_can_show_is_refused(server: ExploreServer) -> None:
    many = "".join(f"{rank}F0,{rank}B0\n" for rank in range(1025)).encode()
    _, found = asked(server, request(server, "POST /answer", f"Content-Length: {len(many)}", body=many))
    assert "1025 ranks and 2050 actions" in json.loads(found)["error"]["error"]


def test_answers_stay_with_the_page_that_asked(server: ExploreServer) -> None:
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
        connection.sendall(request(server, "GET /"))
        with connection.makefile("rb") as file:
            head = file.read().split(b"\r\n\r\n")[0].decode().lower().split("\r\n")
    assert {"x-content-type-options: nosniff", "cross-origin-resource-policy: same-origin"} <= set(head)
    assert "cache-control: no-store" in head
