"""--hub against a hub of our own on the loopback: what is asked for, what is sent, and every way it
can fail."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from typing import ClassVar

import pytest
from cli.runs import run

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 99,
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers by path and remembers what it was asked."""

    asked: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        Hub.asked.append((self.path, self.headers.get("Authorization")))
        name = self.path.split("/resolve/")[0].strip("/")
        if name == "org/moved":
            self.send_response(307)
            self.send_header(
                "Location",
                f"http://localhost:{self.server.server_address[1]}/org/tiny/resolve/main/config.json",
            )
            self.end_headers()
            return
        status, body = {
            "org/tiny": (200, json.dumps(CONFIG).encode()),
            "bare": (200, json.dumps(CONFIG).encode()),
            "org/gated": (401, b"{}"),
            "org/broken": (200, b"<html>"),
            "org/binary": (200, b"\xff\xfe\x00"),
            "org/huge": (200, b" " * (9 << 20)),
            "org/down": (503, b""),
        }.get(name, (404, b""))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    Hub.asked = []
    for name in (
        "http_proxy",
        "HTTP_PROXY",
        "https_proxy",
        "HTTPS_PROXY",
        "all_proxy",
        "ALL_PROXY",
        "HF_TOKEN",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")
    address = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_ENDPOINT", address)
    yield address
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("org/tiny", "/org/tiny/resolve/main/config.json"),
        ("org/tiny@v1.0", "/org/tiny/resolve/v1.0/config.json"),
        ("bare", "/bare/resolve/main/config.json"),
    ],
)
def test_config_is_fetched_and_priced(hub: str, name: str, path: str) -> None:
    done = run("--hub", "--model", name, "--ctx", "64", "--json")
    assert done.code == 0, done.err
    assert Hub.asked == [(path, None)]


def test_nothing_is_fetched_unasked(hub: str) -> None:
    assert run("--model", "org/tiny").code == 2
    assert run("--model", "llama-7b", "--json").code == 0
    assert Hub.asked == []


def test_token_goes_to_the_hub_and_no_further(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert run("--hub", "--model", "org/moved", "--ctx", "64", "--json").code == 0
    assert [token for _, token in Hub.asked] == ["Bearer secret", None]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("org/gated", "gated"),
        ("org/none", "404"),
        ("org/broken", "not valid JSON"),
        ("org/binary", "UTF-8"),
        ("org/huge", "larger"),
        ("org/down", "503"),
        ("org/tiny/more", "not a hub id"),
    ],
)
def test_refusal_is_one_line(hub: str, name: str, said: str) -> None:
    done = run("--hub", "--model", name)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, "", 1)
    assert name in done.err and said in done.err


@pytest.mark.slow
@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:9", "ftp://example.org", "nonsense"])
def test_no_hub_there(hub: str, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    done = run("--hub", "--model", "org/tiny")
    assert (done.code, len(done.err.splitlines())) == (2, 1) and endpoint in done.err
