"""Connections that are kept busy without a request: they end, and stop nobody else."""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from served import listening, open_live

from gpq_faiss.encoder import Encoder
from gpq_faiss.serve import run
from gpq_faiss.serve.guard import Settings, client_of
from gpq_faiss.serve.service import Service

TIMEOUT, MOST = 1.0, 8
Place = tuple[str, int]


@pytest.fixture
def place(encoder: Encoder, made: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A service that holds 20 connections, and 8 of a client."""
    monkeypatch.setattr(run, "_CONNECTIONS", 20)
    service = Service(encoder, open_live(made / "index.faiss"))
    settings = Settings(timeout=TIMEOUT, max_connections=MOST, rate=0)
    with listening(service, settings) as place:
        yield place


def connect(stack: ExitStack, place: Place, data: bytes = b"", source: str = "127.0.0.1") -> socket.socket:
    opened = stack.enter_context(socket.create_connection(place, timeout=20, source_address=(source, 0)))
    opened.sendall(data)
    return opened


def status(place: Place, source: str) -> int:
    client = http.client.HTTPConnection(*place, timeout=20, source_address=(source, 0))
    client.request("GET", "/healthz")
    found = client.getresponse().status
    client.close()
    return found


def rest(connection: socket.socket, *, drip: bytes = b"") -> bytes:
    """What comes until the connection ends, while ``drip`` is sent again and again."""
    connection.settimeout(0.05 if drip else 20)
    got = b""
    for _ in range(400):
        try:
            if drip:
                connection.sendall(drip)
            part = connection.recv(65536)
        except TimeoutError:
            if drip:
                continue
            raise
        except ConnectionError:
            return got
        if not part:
            return got
        got += part
    raise AssertionError("the connection does not end")


def test_unfinished_heads_of_a_client_stop_no_other_client_and_end(place: Place) -> None:
    with ExitStack() as stack:
        opened = [connect(stack, place, b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n") for _ in range(40)]
        assert status(place, "127.0.0.2") == 200
        ends = [rest(one) for one in opened]
    assert ends.count(b"") >= MOST
    said = set(ends) - {b""}  # a refusal is lost where the client's data came after the end
    assert all(
        b"503" in one and one.endswith(b'{"error": "too many connections from this address"}') for one in said
    )
    assert status(place, "127.0.0.1") == 200


def test_a_client_has_as_many_connections_as_allowed_again_and_again(place: Place) -> None:
    for _ in range(3):
        with ExitStack() as stack:
            opened = [connect(stack, place) for _ in range(MOST + 1)]
            assert b"too many connections" in rest(opened[-1])
            for one in opened[:-1]:
                one.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
                assert rest(one).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "before", [b"", b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"], ids=["new", "kept"]
)
def test_a_head_that_comes_byte_by_byte_is_not_waited_for(place: Place, before: bytes) -> None:
    with ExitStack() as stack:
        one = connect(stack, place, before + b"GET /healthz HTTP/1.1\r\nx-slow: ")
        assert rest(one, drip=b"a").startswith(b"HTTP/1.1 200" if before else b"")


def test_a_body_that_comes_byte_by_byte_is_not_waited_for(place: Place) -> None:
    head = b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"
    with ExitStack() as stack:
        answer = rest(connect(stack, place, head), drip=b" ")
    assert answer.startswith(b"HTTP/1.1 503")
    assert b"it took longer than 1 seconds" in answer


def test_a_client_that_does_not_read_is_cut_off(place: Place) -> None:
    ask = b"GET /page/page.js HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with ExitStack() as stack:
        deaf = [connect(stack, place, ask * 1000) for _ in range(MOST)]
        refused = connect(stack, place)
        assert b"too many" in rest(refused)
        for _ in range(400):  # until there is room again
            time.sleep(0.05)
            with suppress(ConnectionError):
                if status(place, "127.0.0.1") == 200:
                    break
        else:
            raise AssertionError("they are never cut off")
        del deaf


def test_a_client_is_an_ipv4_address_or_a_network_of_ipv6() -> None:
    assert client_of("192.0.2.7") == "192.0.2.7"
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1") != client_of("2001:db8:0:1::1")
    assert client_of("fe80::1%eth0") == client_of("fe80::2%eth0")
    assert client_of("::ffff:192.0.2.7") != client_of("::ffff:192.0.2.8")
    assert client_of("") == ""
