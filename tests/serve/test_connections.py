"""The service on a socket: an index that is replaced under load; connections without a right request end, and stop nobody else."""

import asyncio
import http.client
import json
import socket
import threading
import time
from contextlib import ExitStack, suppress

import pytest
from served import listening, open_live

from gpq_faiss import MemoryIndex
from gpq_faiss.indexes.opening import open_in_memory
from gpq_faiss.serve import run
from gpq_faiss.serve.guard import Settings, client_of
from gpq_faiss.serve.service import Service

TIMEOUT, MOST = 1.0, 8


@pytest.fixture
def place(encoder, made, monkeypatch):
    """A service that holds 20 connections, and 8 of a client."""
    monkeypatch.setattr(run, "_CONNECTIONS", 20)
    service = Service(encoder, open_live(made / "index.faiss"))
    settings = Settings(timeout=TIMEOUT, max_connections=MOST, rate=0)
    with listening(service, settings) as place:
        yield place


@pytest.fixture
def unlimited(encoder, index_file):
    """The service of an index that may be replaced."""
    with listening(Service(encoder, open_live(index_file)), Settings(rate=0)) as place:
        yield place


def test_an_answer_does_not_wait_for_the_client():
    """As it would for 40 ms on a kept connection, unless the socket sends at once."""

    async def at_once() -> int:
        told = asyncio.get_running_loop().create_future()

        def connected(_, writer):
            told.set_result(
                writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            )
            writer.close()

        with run._bound("127.0.0.1", 0) as bound:
            async with await asyncio.start_server(connected, sock=bound):
                with socket.create_connection(bound.getsockname()):
                    return await told

    assert asyncio.run(at_once())


def test_a_replaced_index_is_opened_without_a_dropped_request(unlimited, index_file):
    stop, wrong, counts = threading.Event(), [], []

    def asking():
        while not stop.is_set():
            code, answer = ask(unlimited, "/search", {"id": 1000, "k": 5, "deny_ids": []})
            if code != 200 or len(answer["results"]) != 5:
                wrong.append((code, answer))
            if answer.get("ntotal") not in counts:
                counts.append(answer.get("ntotal"))

    threads = [threading.Thread(target=asking) for _ in range(4)]
    for thread in threads:
        thread.start()
    plain, end = open_in_memory(index_file), time.monotonic() + 30
    for served, first in ((2, 50), (3, 70)):
        codes, ids = plain.codes[first:], plain.ids[first:]
        less = MemoryIndex.build(codes, plain.codebooks, ids, model_fingerprint=plain.model_fingerprint)
        less.save(index_file, overwrite=True)  # the service looks every second
        while len(counts) < served and time.monotonic() < end:
            time.sleep(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert counts == [plain.ntotal, plain.ntotal - 50, plain.ntotal - 70]


def test_requests_that_are_no_http_or_end_early_do_no_harm(unlimited):
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{",
        b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: x\r\n\r\n",
        b"GET /items/1 HTTP/1.1\r\n" + b"a: b\r\n" * 20_000,
    ):
        with ExitStack() as stack:
            connect(stack, unlimited, data)
        assert status(unlimited) == 200


def connect(stack, place, data=b"", buffer=1 << 16):
    opened = stack.enter_context(socket.socket())
    opened.settimeout(20)
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    opened.connect(place)
    opened.sendall(data)
    return opened


def ask(place, path, body=None, source="127.0.0.1"):
    client = http.client.HTTPConnection(*place, timeout=20, source_address=(source, 0))
    headers = {"content-type": "application/json"}
    client.request("GET" if body is None else "POST", path, body and json.dumps(body), headers)
    answer = client.getresponse()
    found = answer.status, json.loads(answer.read())
    client.close()
    return found


def status(place, source="127.0.0.1"):
    return ask(place, "/healthz", source=source)[0]


def rest(connection, *, drip=b""):
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


def test_unfinished_heads_of_a_client_stop_no_other_client_and_end(place):
    with ExitStack() as stack:
        opened = [connect(stack, place, b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n") for _ in range(40)]
        assert status(place, "127.0.0.2") == 200
        ends = [rest(one) for one in opened]
    assert ends.count(b"") >= MOST
    said = set(ends) - {b""}  # a refusal is lost where the client's data came after the end
    assert all(
        b"503" in one and one.endswith(b'{"error": "too many connections from this address"}') for one in said
    )
    assert status(place) == 200


def test_a_client_has_as_many_connections_as_allowed_again_and_again(place):
    for _ in range(3):
        with ExitStack() as stack:
            opened = [connect(stack, place) for _ in range(MOST + 1)]
            assert b"too many connections" in rest(opened[-1])
            for one in opened[:-1]:
                one.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
                assert rest(one).startswith(b"HTTP/1.1 200")


HEAD, SLOW = b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n", b"GET /healthz HTTP/1.1\r\nx-slow: "
BODY = b"POST /search HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 5000\r\n\r\n"


@pytest.mark.parametrize(
    ("data", "drip", "answer"),
    [(SLOW, b"a", b""), (HEAD + SLOW, b"a", b"HTTP/1.1 200"), (BODY, b" ", b"HTTP/1.1 503")],
    ids=["new", "kept", "body"],
)
def test_a_head_or_a_body_that_comes_byte_by_byte_is_not_waited_for(place, data, drip, answer):
    with ExitStack() as stack:
        found = rest(connect(stack, place, data), drip=drip)
    assert found.startswith(answer)
    assert data != BODY or b"it took longer than 1 seconds" in found


def test_a_client_that_does_not_read_is_cut_off(place):
    request = b"GET /page/page.js HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
    with ExitStack() as stack:
        deaf = [connect(stack, place, request * 100, buffer=2048) for _ in range(MOST)]
        refused = connect(stack, place)
        assert b"too many" in rest(refused)
        for _ in range(400):  # until there is room again
            time.sleep(0.05)
            with suppress(ConnectionError):
                if status(place) == 200:
                    break
        else:
            raise AssertionError("they are never cut off")
        assert rest(deaf[0]).count(b"HTTP/1.1 200") < 100


def test_a_client_is_an_ipv4_address_or_a_network_of_ipv6():
    assert client_of("192.0.2.7") == "192.0.2.7"
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1") != client_of("2001:db8:0:1::1")
    assert client_of("fe80::1%eth0") == client_of("fe80::2%eth0")
    assert client_of("::ffff:192.0.2.7") != client_of("::ffff:192.0.2.8")
    assert client_of("") == ""
