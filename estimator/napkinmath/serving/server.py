"""The server: loopback only, a few kinds of answers, bounded requests, and headers that let the
page do nothing but ask it."""

from __future__ import annotations

import json
import os
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from socket import MSG_PEEK, SHUT_WR
from threading import BoundedSemaphore, Thread

from napkinmath.base.errors import NapkinError
from napkinmath.serving import answers
from napkinmath.serving.cache import Cache
from napkinmath.serving.connections import Connection, whole_answer
from napkinmath.serving.front_end import KINDS, front_end
from napkinmath.serving.requests import options_of
from napkinmath.serving.wording import for_the_page
from napkinmath.serving.workers import Busy, Few, Gone, Lane, Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any

QUEUE = 512
MOST_CONNECTIONS = 512  # open at once, each with its thread; descriptors are often 1024
MOST_TURNED_AWAY = 64  # at once with an answer; beyond it connections are closed
SECONDS_TO_TURN_AWAY = 1


class Server(ThreadingHTTPServer):
    """Answers on the loopback interface; one thread a connection, answers kept."""

    daemon_threads = True
    request_queue_size = QUEUE

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.workers = Workers()  # first: server_close, which a taken port calls, ends them
        super().__init__((host, port), Handler)
        self.cache = Cache()
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self.files = _files()
        self._room = BoundedSemaphore(MOST_CONNECTIONS)
        self._hall = BoundedSemaphore(MOST_TURNED_AWAY)
        self.workers.warm(answers.begun)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, where there is room for one more; else for an answer that
        says so."""
        if self._room.acquire(blocking=False):
            return super().process_request(request, client_address)
        if not self._hall.acquire(blocking=False):
            return self.shutdown_request(request)
        Thread(target=self._turn_away, args=(request,), daemon=True).start()

    def _turn_away(self, request: socket.socket) -> None:
        """Says that there is no room, and reads what was sent: left unread it takes the answer
        back."""
        try:
            request.settimeout(SECONDS_TO_TURN_AWAY)
            request.sendall(_FULL)
            request.shutdown(SHUT_WR)
            request.recv(1 << 16)
        except OSError:  # it went away, or says nothing
            pass
        finally:
            self.shutdown_request(request)
            self._hall.release()

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: Any
    ) -> None:
        """The connection to its end."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing for a client that went away; the rest as ever."""
        import sys

        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    def server_close(self) -> None:
        """Ends the workers too."""
        super().server_close()
        self.workers.close()

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/"


def _is_answered(path: str) -> bool:
    kind = path.removeprefix("/api/export/")
    return path in answers.ANSWERS or (kind != path and kind.isalnum() and len(kind) < 20)


def _files() -> dict[str, tuple[bytes, str]]:
    """The page's files by path, each with its content type."""
    return {
        "/" if name == "index.html" else f"/{name}": (content, KINDS[os.path.splitext(name)[1]])
        for name, content in front_end().items()
    }


class Handler(Connection):
    """GET the page's files and the catalogue; POST options to one of ANSWERS or
    export/KIND."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        """The page and the catalogue."""
        path = self.path.partition("?")[0]
        if not self._is_local():
            return
        if path == "/api/catalogue":
            self._answer(
                lambda: self.server.cache.get("catalogue", lambda: _encoded(answers.catalogue()))
            )
        elif path in self.server.files:
            content, kind = self.server.files[path]
            self.send(HTTPStatus.OK, content, kind)
        else:
            self.fail(HTTPStatus.NOT_FOUND, f"there is no page {path[:80]!r} here")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """An answer for the options in the body."""
        if not self._is_local():
            return
        path = self.path
        if not _is_answered(path):
            known = ", ".join(answers.ANSWERS)
            return self.fail(
                HTTPStatus.NOT_FOUND,
                f"there is no answer at {path[:80]!r}; ask {known} or /api/export/KIND",
            )
        if self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            return self.fail(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the options as application/json"
            )
        if "Content-Length" not in self.headers:
            return self.fail(
                HTTPStatus.LENGTH_REQUIRED, "say how long the options are (Content-Length)"
            )
        self._answer(lambda: self._made(path))

    def _made(self, path: str) -> bytes:
        options = options_of(self.body, more=answers.WORDS.get(path, frozenset()))
        if path in answers.AT_ONCE:
            return answers.encoded(path, options)
        key = (path, sorted(options.items()))
        lane: Lane | Few = getattr(self.server.workers, answers.LANES.get(path, "quick"))
        return self.server.cache.get(
            key, lambda: lane.run(answers.encoded, path, options, wanted=self._is_there)
        )

    def _is_local(self) -> bool:
        """Only a browser that was given this very address: another name that resolves here may be
        somebody else's page."""
        if self.headers.get("Host") in self.server.hosts:
            return True
        self.fail(HTTPStatus.MISDIRECTED_REQUEST, f"this page is at {self.server.url} only")
        return False

    def _is_there(self) -> bool:
        """Whether the client still listens: a page that moved on closes what it asked before."""
        import select

        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or bool(self.connection.recv(1, MSG_PEEK))
        except (OSError, ValueError):
            return False

    def _answer(self, make: Callable[[], bytes]) -> None:
        try:
            content = make()
        except Gone:
            self.close_connection = True
            return
        except Busy as error:
            return self.fail(
                HTTPStatus.SERVICE_UNAVAILABLE,
                str(error),
                keep=True,
                more={"Retry-After": str(error.seconds)},
            )
        except NapkinError as error:
            return self.fail(HTTPStatus.UNPROCESSABLE_ENTITY, for_the_page(str(error)), keep=True)
        except Exception as error:  # our own mistake: said without its insides
            self.log_error("%s: %s", type(error).__name__, error)
            return self.fail(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"this configuration could not be priced ({type(error).__name__}); please"
                " report it",
            )
        self.send(HTTPStatus.OK, content, "application/json")


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


_FULL = whole_answer(
    HTTPStatus.SERVICE_UNAVAILABLE,
    _encoded({"error": "too many connections are open; ask again in a moment"}),
    {"Retry-After": "1"},
)
