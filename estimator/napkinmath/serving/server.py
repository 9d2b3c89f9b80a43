"""The server: loopback only, a few kinds of answers, bounded requests, and headers that let the
page do nothing but ask it."""

from __future__ import annotations

import json
import os
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import MSG_PEEK
from threading import BoundedSemaphore

from napkinmath.base.errors import NapkinError
from napkinmath.serving import answers
from napkinmath.serving.cache import Cache
from napkinmath.serving.requests import MAX_BODY_BYTES, options_of
from napkinmath.serving.workers import Busy, Gone, Workers

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping
    from typing import Any

PAGE = os.path.join(os.path.dirname(__file__), "page")
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# Nothing from anywhere but here, in no frame; the timeline is an image of this very answer.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
        " data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
SECONDS_TO_SPEAK = 10  # for a client to send what it announced
QUEUE = 512
MOST_CONNECTIONS = 1024  # open at once, each with its thread


class Server(ThreadingHTTPServer):
    """Answers on the loopback interface; one thread a connection, answers kept."""

    daemon_threads = True
    request_queue_size = QUEUE

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        self.workers = Workers()  # first: server_close, which a taken port calls, ends them
        super().__init__((host, port), Handler)
        self.cache = Cache()
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self.files = {path: (_read(name), kind) for path, (name, kind) in FILES.items()}
        self._room = BoundedSemaphore(MOST_CONNECTIONS)
        self.workers.warm(answers.begun)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, where there is room for one more."""
        if not self._room.acquire(blocking=False):
            return self.shutdown_request(request)
        super().process_request(request, client_address)

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


def _read(name: str) -> bytes:
    with open(os.path.join(PAGE, name), "rb") as file:
        return file.read()


class Handler(BaseHTTPRequestHandler):
    """GET the page's three files and the catalogue; POST options to one of ANSWERS or
    export/KIND."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_TO_SPEAK
    disable_nagle_algorithm = True
    wbufsize = 1 << 16  # headers and answer leave together
    server_version, sys_version = "napkinmath", ""

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
            self._send(HTTPStatus.OK, content, kind)
        else:
            self._fail(HTTPStatus.NOT_FOUND, f"there is no page {path[:80]!r} here")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """An answer for the options in the body."""
        if not self._is_local():
            return
        path = self.path
        if not _is_answered(path):
            known = ", ".join(answers.ANSWERS)
            return self._fail(
                HTTPStatus.NOT_FOUND,
                f"there is no answer at {path[:80]!r}; ask {known} or /api/export/KIND",
            )
        body = self._body()
        if body is None:
            return

        def answer() -> bytes:
            options = options_of(body, more=answers.WORDS.get(path, frozenset()))
            key = (path, tuple(sorted((name, str(value)) for name, value in options.items())))
            workers = self.server.workers
            lane = (
                workers.later
                if path in answers.LATER
                else workers.long
                if path in answers.SEARCHES
                else workers.quick
            )
            return self.server.cache.get(
                key, lambda: lane.run(answers.encoded, path, options, wanted=self._is_there)
            )

        self._answer(answer)

    def _is_local(self) -> bool:
        """Only a browser that was told this very address: another name that resolves here may be
        somebody else's page."""
        if self.headers.get("Host") in self.server.hosts:
            return True
        self._fail(HTTPStatus.MISDIRECTED_REQUEST, f"this page is at {self.server.url} only")
        return False

    def _is_there(self) -> bool:
        """Whether the client still listens: a page that moved on closes what it asked before."""
        import select

        try:
            readable, _, _ = select.select([self.connection], [], [], 0)
            return not readable or bool(self.connection.recv(1, MSG_PEEK))
        except (OSError, ValueError):
            return False

    def _body(self) -> bytes | None:
        if self.headers.get("Content-Type", "").partition(";")[0].strip() != "application/json":
            self._fail(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "send the options as application/json")
            return None
        announced = self.headers.get("Content-Length", "")
        if not announced.isdigit():
            self._fail(HTTPStatus.LENGTH_REQUIRED, "say how long the options are (Content-Length)")
            return None
        if int(announced) > MAX_BODY_BYTES:
            self._fail(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"options of {announced[:20]} bytes are too large; at most {MAX_BODY_BYTES}",
            )
            return None
        return self.rfile.read(int(announced))

    def _answer(self, make: Callable[[], bytes]) -> None:
        try:
            content = make()
        except Gone:
            self.close_connection = True
            return
        except Busy as error:
            return self._fail(HTTPStatus.SERVICE_UNAVAILABLE, str(error), keep=True)
        except NapkinError as error:
            return self._fail(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), keep=True)
        except Exception as error:  # our own mistake: said without its insides
            self.log_error("%s: %s", type(error).__name__, error)
            return self._fail(
                HTTPStatus.INTERNAL_SERVER_ERROR,
                f"this configuration could not be priced ({type(error).__name__}); please"
                " report it",
            )
        self._send(HTTPStatus.OK, content, "application/json")

    def _fail(self, status: HTTPStatus, message: str, *, keep: bool = False) -> None:
        self.close_connection = self.close_connection or not keep
        self._send(status, _encoded({"error": message}), "application/json")

    def _send(self, status: HTTPStatus, content: bytes, kind: str) -> None:
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Nothing for a request that went well; errors are told by log_error."""


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
