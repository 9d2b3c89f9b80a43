"""A static folder on loopback and a browser that can reach nothing else: what it asked of other
hosts ends at a proxy that only writes it down."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from chromium import BROWSER

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--remote-debugging-port=0",  # without it a headless browser ends once the page has loaded
)
LIMIT_S = 150
# The browser asks its vendor for the time, updates and hints whatever page is open.
OF_THE_BROWSER = re.compile(r"[./ ](google|googleapis|gstatic|gvt1)\.com")


class StaticHost(ThreadingHTTPServer):
    """Serves a folder at /deep/; a POST to /done is the page's report. `gone` answers nothing but
    that."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Files, directory=str(folder)))
        self.gone, self.refused, self.reports = False, list[str](), list[str]()
        self.reported = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/deep/"


class _Files(SimpleHTTPRequestHandler):
    server: StaticHost  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.server.gone:
            self.server.refused.append(self.path)
            return self.send_error(503)
        self.path = self.path.removeprefix("/deep")
        super().do_GET()

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        self.server.reports.append(text)
        self.send_response(204)
        self.end_headers()
        self.server.reported.set()

    def log_message(self, *args: Any) -> None:
        pass


class _Proxy(BaseHTTPRequestHandler):
    def handle_one_request(self) -> None:
        line = self.rfile.readline().decode("latin-1").strip()
        if line:
            self.server.asked.append(line)  # pyright: ignore[reportAttributeAccessIssue]
        self.close_connection = True


@contextmanager
def running(server: ThreadingHTTPServer) -> Iterator[None]:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def report_of(host: StaticHost, profile: Path) -> tuple[str, list[str]]:
    """What the page reports, and the requests that it made to other hosts."""
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _Proxy)
    proxy.asked = []  # pyright: ignore[reportAttributeAccessIssue]
    host.reported.clear()
    with running(proxy):
        browser = subprocess.Popen(
            [
                str(BROWSER),
                *FLAGS,
                f"--proxy-server=127.0.0.1:{proxy.server_port}",
                f"--user-data-dir={profile}",
                host.url,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            came = host.reported.wait(LIMIT_S)
        finally:
            browser.terminate()
            browser.wait()
    asked: list[str] = proxy.asked  # pyright: ignore[reportAttributeAccessIssue]
    of_the_page = [line for line in asked if not OF_THE_BROWSER.search(line)]
    return host.reports[-1] if came else "", of_the_page
