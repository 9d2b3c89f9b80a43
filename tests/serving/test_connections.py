"""What a connection may do: every answer has the same headers, a body is never the next request, time
is absolute, and what is too much is refused at once."""

from __future__ import annotations

import io
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from napkinmath.serving import connections, workers
from napkinmath.serving.connections import HEADERS, Timed
from napkinmath.serving.requests import MAX_BODY_BYTES
from napkinmath.serving.server import Server
from napkinmath.serving.workers import Busy, Lane, Workers

PATIENCE = 7  # seconds: less than a search waits for its turn, far more than a refusal takes


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server(0)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def said(server: Server, request: bytes) -> bytes:
    """All that the server answers to these bytes, the last request of which ends the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(request.replace(b"HERE", f"127.0.0.1:{server.server_port}".encode()))
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def answers_in(content: bytes) -> list[tuple[int, dict[str, str], bytes]]:
    """(status, headers, body) of each answer, by their lengths; fails on bytes that are none."""
    found: list[tuple[int, dict[str, str], bytes]] = []
    while content:
        head, _, content = content.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        assert first.startswith("HTTP/1.1 "), first
        if first.split()[1] == "100":
            continue
        headers = {n.lower(): v for n, _, v in (line.partition(": ") for line in lines)}
        length = int(headers["content-length"])
        found.append((int(first.split()[1]), headers, content[:length]))
        content = content[length:]
    return found


def only(server: Server, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """The one answer to a request."""
    (answer,) = answers_in(said(server, request))
    return answer


POST = b"POST /api/command HTTP/1.1\r\nHost: HERE\r\nContent-Type: application/json\r\n"
GET = b"GET /page.css HTTP/1.1\r\nHost: HERE\r\n"
LAST = GET + b"Connection: close\r\n\r\n"
ODD = {
    "no method of ours": (b"BREW / HTTP/1.1\r\nHost: HERE\r\n\r\n", 501),
    "a method in the attributes": (b"GET__ / HTTP/1.1\r\nHost: HERE\r\n\r\n", 501),
    "options before a request of another page": (
        b"OPTIONS /api/plan HTTP/1.1\r\nHost: HERE\r\n\r\n",
        501,
    ),
    "no version": (b"GET /\r\n\r\n", 421),
    "another version": (b"GET / HTTP/2.0\r\nHost: HERE\r\n\r\n", 505),
    "version 0.9 by name": (b"GET / HTTP/0.9\r\nHost: HERE\r\n\r\n", 505),
    "version 0.9 and a body": (POST.replace(b"1.1", b"0.9") + b"Content-Length: 2\r\n\r\n{}", 505),
    "version 0.9 and many headers": (
        b"GET / HTTP/0.9\r\n" + b"".join(b"X-%d: 1\r\n" % i for i in range(120)) + b"\r\n",
        431,
    ),
    "no such version": (b"GET / HTTP/x\r\nHost: HERE\r\n\r\n", 400),
    "not four words": (b"GET / x HTTP/1.1\r\nHost: HERE\r\n\r\n", 400),
    "one word": (b"<script>alert(1)</script>\r\n\r\n", 400),
    "a long line": (b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", 414),
    "a long header": (GET + b"X: " + b"x" * 70_000 + b"\r\n\r\n", 431),
    "headers that are long together": (
        GET + b"".join(b"X-%d: %s\r\n" % (i, b"x" * 60_000) for i in range(3)) + b"\r\n",
        431,
    ),
    "a NUL in a header": (GET + b"X: a\0b\r\n\r\n", 400),
    "an escape in a header": (GET + b"X: \x1b[2J\r\n\r\n", 400),
    "many headers": (GET + b"".join(b"X-%d: 1\r\n" % i for i in range(120)) + b"\r\n", 431),
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 421),
    "two hosts": (GET + b"Host: evil.example\r\n\r\n", 400),
    "no page": (b"GET /nothing HTTP/1.1\r\nHost: HERE\r\n\r\n", 404),
    "no answer": (b"POST /nothing HTTP/1.1\r\nHost: HERE\r\nContent-Length: 2\r\n\r\n{}", 404),
    "no type": (b"POST /api/plan HTTP/1.1\r\nHost: HERE\r\nContent-Length: 2\r\n\r\n{}", 415),
    "no length": (POST + b"\r\n", 411),
    "too long": (POST + b"Content-Length: 99999\r\n\r\n" + b"x" * 99_999, 413),
    "chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 400),
    "chunks and a length": (
        POST + b"Content-Length: 2\r\nTransfer-Encoding: identity\r\n\r\n{}",
        400,
    ),
    "two lengths": (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400),
    "one length twice": (POST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
    "lengths in a list": (POST + b"Content-Length: 2, 2\r\n\r\n{}", 400),
    "a signed length": (POST + b"Content-Length: +2\r\n\r\n{}", 400),
    "a grouped length": (POST + b"Content-Length: 1_0\r\n\r\n{}", 400),
    "a length in Arabic digits": (POST + "Content-Length: ٢\r\n\r\n{}".encode(), 400),
    "a length in superscript": (POST + b"Content-Length: \xb2\r\n\r\n{}", 400),
    "a negative length": (POST + b"Content-Length: -1\r\n\r\n{}", 400),
    "a huge length": (POST + b"Content-Length: " + b"9" * 5000 + b"\r\n\r\n{}", 400),
    "no number": (POST + b"Content-Length: \r\n\r\n{}", 400),
    "a space before the colon": (GET + b"Content-Length : 5\r\n\r\nGET /", 400),
    "a line that is no header": (GET + b"nonsense\r\nContent-Length: 5\r\n\r\nGET /", 400),
    "a header over two lines": (GET + b"X: 1\r\n Content-Length: 5\r\n\r\nGET /", 400),
    "no options": (POST + b"Content-Length: 2\r\n\r\n[]", 422),
}  # each with the status it is answered with


@pytest.mark.parametrize("name", ODD)
def test_every_answer_has_the_headers_and_what_is_unclear_ends_the_connection(
    server: Server, name: str
) -> None:
    request, status = ODD[name]
    (found, headers, body), *more = answers_in(said(server, request + LAST))
    assert found == status and bool(more) == (status == 422), "nothing after it is answered"
    assert HEADERS.items() <= {n: headers.get(n.lower()) for n in HEADERS}.items()
    assert (
        headers["content-type"] == "application/json" and "python" not in headers["server"].lower()
    )
    line = json.loads(body)["error"]
    assert line and "\n" not in line and "<script" not in line
    assert status == 422 or headers["connection"] == "close"


def test_a_body_is_never_the_next_request(server: Server) -> None:
    hidden = b"GET /page.js HTTP/1.1\r\nHost: HERE\r\n\r\n"
    length = b"Content-Length: %d\r\n\r\n" % len(
        hidden.replace(b"HERE", b"127.0.0.1:%d" % server.server_port)
    )
    for first in (GET, GET.replace(b"GET", b"HEAD"), GET.replace(b"page.css", b"nothing"), POST):
        _, _, content = said(server, first + length + hidden + LAST).partition(b"HTTP/1.1 ")
        assert b"text/javascript" not in content, first
        after = content.count(b"HTTP/1.1 ")
        assert after == (b"nothing" not in first), "what comes after the body, if anything"


def test_a_connection_stays_for_the_next_request(server: Server) -> None:
    post = POST + b"Content-Length: 17\r\n\r\n" + b'{"model": "gpt2"}'
    found = answers_in(said(server, GET + b"\r\n" + post + LAST))
    assert [status for status, _, _ in found] == [200, 200, 200]
    assert json.loads(found[1][2]) == {"command": "estimate --model gpt2"}


def test_a_client_is_told_to_go_on_at_once(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        head = POST + b"Expect: 100-continue\r\nContent-Length: 17\r\n\r\n"
        connection.sendall(head.replace(b"HERE", f"127.0.0.1:{server.server_port}".encode()))
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b'{"model": "gpt2"}')
        assert connection.recv(1 << 10).startswith(b"HTTP/1.1 200 ")


class Clock:
    """Time that goes on by itself, some seconds at each look."""

    def __init__(self, step: float) -> None:
        self._ticks = itertools.count(0.0, step)

    def monotonic(self) -> float:
        return next(self._ticks)


@pytest.mark.parametrize("seconds", [1.0, 3.0])
def test_a_byte_now_and_then_does_not_win_time(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(connections, "time", Clock(seconds))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x" * 1000)
        timed = Timed(ours)
        timed.allow(10)
        one = bytearray(1)
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                assert timed.readinto(one) == 1
        taken = 1000 - len(ours.recv(1000))
        assert 10 / seconds - 2 <= taken <= 10 / seconds, "as long as it was allowed, no longer"
        with pytest.raises(TimeoutError):
            timed.write(b"x")


def test_a_dripping_client_is_let_go(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SECONDS_TO_SPEAK", 0.2)
    address = "127.0.0.1", server.server_port
    with socket.create_connection(address, timeout=20) as connection, pytest.raises(OSError):
        for _ in range(1000):  # each wait far below the limit, all of them above
            connection.sendall(b"G")
            time.sleep(0.02)


def test_an_old_connection_gets_its_last_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SECONDS_OF_CONNECTION", -1)
    ((_, headers, _),) = answers_in(said(server, GET + b"\r\n" + LAST))
    assert headers["connection"] == "close"


class Full:
    """Room for no connection, whatever else ends meanwhile."""

    def acquire(self, blocking: bool = True) -> bool:
        return False

    def release(self) -> None:
        pass


def test_one_connection_too_many_is_told_so_at_once(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(server, "_room", Full())
        status, headers, body = only(server, LAST)
    assert (
        status == 503 and headers["retry-after"] == "1" and "ask again" in json.loads(body)["error"]
    )
    assert HEADERS.items() <= {n: headers.get(n.lower()) for n in HEADERS}.items()
    assert only(server, LAST)[0] == 200


def test_what_would_wait_too_long_is_refused_before_it_waits() -> None:
    lane = Lane(2)
    lane._mean = 1.0
    lane._turns.acquire()
    lane._turns.acquire()
    most = 2 * workers.SECONDS_TO_WAIT + 2  # some in turn, the rest for so many seconds
    for _ in range(most):
        lane._enter()
    with pytest.raises(Busy, match="ask again") as refused:
        lane.run(bytes, wanted=lambda: True)
    assert refused.value.seconds >= 1 and lane._owed == most
    lane._mean = 0.001
    lane._enter()  # quick answers may wait in greater number
    lane.close()


def test_a_burst_of_plans_is_refused_while_the_first_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One is made, the next has its turn, and no other waits some seconds to be refused."""
    made, refused = threading.Event(), threading.Semaphore(0)
    monkeypatch.setattr(Lane, "_submitted", lambda *_: made.wait(PATIENCE) and (workers.MADE, b""))
    lane, burst, answers = Workers().plans, 20, list[bytes]()

    def ask() -> None:
        try:
            answers.append(lane.run(bytes, wanted=lambda: True))
        except Busy:
            refused.release()

    threads = [threading.Thread(target=ask) for _ in range(burst)]
    for thread in threads:
        thread.start()
    for _ in range(burst - 1 - workers.PLANS_WAITING):
        assert refused.acquire(timeout=PATIENCE) and not answers
    made.set()
    for thread in threads:
        thread.join()
    assert len(answers) == 1 + workers.PLANS_WAITING


def test_a_turn_that_does_not_come_is_given_up() -> None:
    lane = Lane(1, wait=0.05)
    lane._turns.acquire()
    with pytest.raises(Busy):
        lane.run(bytes, wanted=lambda: True)
    assert lane._owed == 0
    lane.close()


def test_a_process_that_does_not_come_back_is_ended() -> None:
    lane = Lane(1, seconds=0.2)
    lane.warm(bytes)
    with pytest.raises(workers.TooLong, match="longer than"):
        lane.run(time.sleep, 60, wanted=lambda: True)  # takes no processor: nothing else ends it
    lane._seconds = 30
    assert lane.run(bytes, 3, wanted=lambda: True) == bytes(3), "by a new one"
    lane.close()


def test_a_request_of_the_largest_size_is_read(server: Server) -> None:
    body = b'{"model": "gpt2"}'.ljust(MAX_BODY_BYTES)
    assert (
        answers_in(said(server, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body + LAST))[0][
            0
        ]
        == 200
    )


def test_a_timed_socket_reads_and_writes_whole_messages() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        timed = Timed(ours)
        timed.allow(10)
        theirs.sendall(b"line\nrest")
        theirs.shutdown(socket.SHUT_WR)
        reader, writer = io.BufferedReader(timed), io.BufferedWriter(timed)
        assert (reader.readline(), reader.read()) == (b"line\n", b"rest")
        writer.write(b"answer")
        writer.flush()
        assert theirs.recv(100) == b"answer"
