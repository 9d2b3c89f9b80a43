"""One connection of the server: requests whose end is certain, within an absolute time, and answers
that all carry the same headers, those to what nobody could read included."""

from __future__ import annotations

import contextlib
import io
import json
import re
import socket
import time
from http import HTTPStatus
from http.client import LineTooLong
from http.server import BaseHTTPRequestHandler

from napkinmath.base.units import MIB
from napkinmath.serving.requests import MAX_BODY_BYTES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from email.message import Message
    from typing import Any

    from _typeshed import WriteableBuffer

# Nothing from anywhere but here, in no frame; the timeline is an image of this very answer.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src"
        " 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Cache-Control": "no-store",
}
SECONDS_TO_SPEAK = 10  # for a client to send a whole request, the wait for it included
SECONDS_TO_LISTEN = 10  # for a client to take a whole answer
SECONDS_OF_CONNECTION = 300  # after which an answer is the connection's last
MOST_IN_HEAD = 1 << 17  # bytes of a request's first line and headers; browsers send a few thousand
MOST_READ_AWAY = MIB  # of a body that is refused
WRITE_BYTES = 1 << 16  # headers and answer leave together
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, token
_DIGITS = re.compile(r"[0-9]{1,9}")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")  # RFC 9110, field-value
_ONCE = ("content-length", "content-type", "host")


class Timed(io.RawIOBase):
    """A socket that raises TimeoutError once `until` has passed, however often a byte comes."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__()
        self._socket, self.until = connection, 0.0

    def readable(self) -> bool:
        """It is."""
        return True

    def writable(self) -> bool:
        """It is."""
        return True

    def allow(self, seconds: float) -> None:
        """So long from now on."""
        self.until = time.monotonic() + seconds

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Bytes received; 0 at the end."""
        self._wait()
        return self._socket.recv_into(buffer)

    def write(self, data: Any) -> int:
        """Bytes sent."""
        self._wait()
        return self._socket.send(data)

    def _wait(self) -> None:
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the client takes too long")
        self._socket.settimeout(left)


class Lines(io.BufferedReader):
    """Reads `left` bytes of lines at most, until it is set anew."""

    left = 0

    def readline(self, size: int | None = -1, /) -> bytes:
        """The next line; raises LineTooLong, which the standard library answers."""
        line = super().readline(size)
        self.left -= len(line)
        if self.left < 0:
            raise LineTooLong("header line")
        return line


class Connection(BaseHTTPRequestHandler):
    """Reads requests with their bodies and sends answers; what the answers are is the Handler's."""

    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # 0.9 has answers without headers
    disable_nagle_algorithm = True
    server_version, sys_version = "napkinmath", ""
    body = b""

    def setup(self) -> None:
        """Reading and writing with an end."""
        super().setup()
        self.timed = Timed(self.connection)
        self.rfile = self.lines = Lines(self.timed)
        self.wfile = io.BufferedWriter(self.timed, WRITE_BYTES)
        self.ends = time.monotonic() + SECONDS_OF_CONNECTION

    def finish(self) -> None:
        """Sends what is left, if the client takes it in time."""
        with contextlib.suppress(TimeoutError):
            super().finish()

    def handle_one_request(self) -> None:
        """One request, within its time."""
        self.command, self.body = "", b""
        self.timed.allow(SECONDS_TO_SPEAK)
        self.lines.left = MOST_IN_HEAD
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Reads the body too, whatever the method: it is never taken for the next request."""
        if not super().parse_request():
            return False
        if self.request_version < "HTTP/1.0":  # as text: 0.9, which the library takes
            return self._refused(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED, "send HTTP/1.1")
        refused = unclear(self.headers)
        if refused:
            return self._refused(HTTPStatus.BAD_REQUEST, refused)
        length = int(self.headers.get("Content-Length", "0"))
        if length > MAX_BODY_BYTES:
            self._read_away(min(length, MOST_READ_AWAY))
            return self._refused(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"options of {length} bytes are too large; at most {MAX_BODY_BYTES}",
            )
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # it went away
            self.close_connection = True
            return False
        return True

    def _read_away(self, length: int) -> None:
        """Takes what the client sends, since an answer to what is left unread may be lost."""
        while length > 0:
            taken = len(self.rfile.read(min(length, WRITE_BYTES)))
            length -= taken or length

    def handle_expect_100(self) -> bool:
        """Asks the client to go on, now."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses, in the form of every other answer."""
        status = HTTPStatus(code)
        self.fail(status, f"{status.phrase.lower()}: {status.description or 'not understood'}")

    def log_error(self, format: str, *args: Any) -> None:
        """Nothing of a connection that was kept open and said no more."""
        if "timed out" not in format:
            super().log_error(format, *args)

    def _refused(self, status: HTTPStatus, message: str) -> bool:
        self.fail(status, message)
        return False

    def fail(
        self,
        status: HTTPStatus,
        message: str,
        *,
        keep: bool = False,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Says why there is no answer, and ends the connection unless it is to be kept."""
        self.close_connection = self.close_connection or not keep
        self.send(status, json.dumps({"error": message}).encode(), "application/json", more)

    def send(
        self,
        status: HTTPStatus,
        content: bytes,
        kind: str,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """One whole answer."""
        self.timed.allow(SECONDS_TO_LISTEN)
        if self.request_version < self.default_request_version:
            self.request_version = self.default_request_version  # to 0.9 no headers are sent
        if time.monotonic() > self.ends:
            self.close_connection = True
        self.send_response(status)
        for name, value in {**HEADERS, "Content-Type": kind, **(more or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.wfile.flush()

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Nothing for a request that went well; errors are written by log_error."""


def unclear(headers: Message) -> str:
    """Why it is not certain where the request ends or whom it is for; '' where it is."""
    if headers.defects or headers.get_payload() or not all(map(_NAME.fullmatch, headers.keys())):
        return "the headers cannot be read; send one `Name: value` a line"
    if any(_CONTROL.search(str(value)) for value in headers.values()):
        return "a header has a control character or goes on in another line; send each in one line"
    if "Transfer-Encoding" in headers:
        return "a body is taken with Content-Length only, not in chunks"
    for name in _ONCE:
        if len(headers.get_all(name, [])) > 1:
            return f"the header {name} is given twice; give it once"
    if not _DIGITS.fullmatch(headers.get("Content-Length", "0")):
        return "Content-Length is not a number of bytes; send up to nine digits"
    return ""


def whole_answer(status: HTTPStatus, content: bytes, more: Mapping[str, str]) -> bytes:
    """An answer as it leaves, for where there is no connection to send it by."""
    own = {
        "Content-Type": "application/json",
        "Content-Length": str(len(content)),
        "Connection": "close",
    }
    lines = [f"HTTP/1.1 {status.value} {status.phrase}"]
    lines += [f"{name}: {value}" for name, value in {**HEADERS, **own, **more}.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content
