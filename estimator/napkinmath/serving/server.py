"""The server: loopback only, three kinds of answers, bounded requests, and headers that let the page do nothing but ask it."""

from __future__ import annotations

import json
import os
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from napkinmath.errors import NapkinError
from napkinmath.serving import answers
from napkinmath.serving.requests import MAX_BODY_BYTES, options_of

TYPE_CHECKING = False
if TYPE_CHECKING:
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
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
ANSWERS = {
    "/api/estimate": answers.answer,
    "/api/details": answers.details,
    "/api/limits": answers.limits,
    "/api/command": answers.command_line,
}
SECONDS_TO_SPEAK = 10  # for a client to send what it announced
QUEUE = 512


class Server(ThreadingHTTPServer):
    """Answers on the loopback interface; one thread a connection, answers kept."""

    daemon_threads = True
    request_queue_size = QUEUE

    def __init__(self, port: int = 0, host: str = "127.0.0.1") -> None:
        super().__init__((host, port), Handler)
        self.cache = answers.Cache()
        self.hosts = {f"{name}:{self.server_port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        self.files = {path: (_read(name), kind) for path, (name, kind) in FILES.items()}

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://127.0.0.1:{self.server_port}/"


def _read(name: str) -> bytes:
    with open(os.path.join(PAGE, name), "rb") as file:
        return file.read()


class Handler(BaseHTTPRequestHandler):
    """GET the page's three files and the catalogue; POST options to one of ANSWERS or export/KIND."""

    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    timeout = SECONDS_TO_SPEAK
    server_version, sys_version = "napkinmath", ""

    def do_GET(self) -> None:
        """The page and the catalogue."""
        path = self.path.partition("?")[0]
        if not self._is_local():
            return
        if path == "/api/catalogue":
            self._answer(lambda: self.server.cache.get("catalogue", lambda: _encoded(answers.catalogue())))
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
        made = self._maker()
        if made is None:
            return self._fail(
                HTTPStatus.NOT_FOUND, f"there is no answer at {self.path[:80]!r}; ask {', '.join(ANSWERS)} or /api/export/KIND"
            )
        body = self._body()
        if body is None:
            return
        make = made

        def answer() -> bytes:
            options = options_of(body)
            key = (self.path, tuple(sorted((name, str(value)) for name, value in options.items())))
            return self.server.cache.get(key, lambda: _encoded(make(options)))

        self._answer(answer)

    def _maker(self) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
        if self.path in ANSWERS:
            return ANSWERS[self.path]
        kind = self.path.removeprefix("/api/export/")
        if kind != self.path and kind.isalnum() and len(kind) < 20:
            return lambda options: answers.job_file(options, kind)
        return None

    def _is_local(self) -> bool:
        """Only a browser that was told this very address: another name that resolves here may be somebody else's page."""
        if self.headers.get("Host") in self.server.hosts:
            return True
        self._fail(HTTPStatus.MISDIRECTED_REQUEST, f"this page is at {self.server.url} only")
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
            self._fail(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"options of {announced[:20]} bytes are too large; at most {MAX_BODY_BYTES}")
            return None
        return self.rfile.read(int(announced))

    def _answer(self, make: Callable[[], bytes]) -> None:
        try:
            content = make()
        except NapkinError as error:
            return self._fail(HTTPStatus.UNPROCESSABLE_ENTITY, str(error), keep=True)
        except Exception as error:  # our own mistake: said without its insides
            self.log_error("%s: %s", type(error).__name__, error)
            return self._fail(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"this configuration could not be priced ({type(error).__name__}); please report it"
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
