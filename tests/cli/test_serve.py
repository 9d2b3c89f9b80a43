"""The local page: what it answers, what it refuses, and a person's way through it in a real browser."""

from __future__ import annotations

import http.client
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from napkinmath.cli.serve import make_server
from napkinmath.errors import InputError
from napkinmath.estimate import estimate
from napkinmath.inputs.options import KEYS
from napkinmath.serving.requests import KNOWN, MAX_BODY_BYTES
from napkinmath.serving.server import FILES, PAGE, Server

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
SMALL = {"model": "smollm2-135m", "method": "lora", "bs": 2, "ctx": 512, "gpu": "rtx4090"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    running = Server(0)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


def ask(server: Server, method: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
    finally:
        connection.close()


def post(server: Server, path: str, options: object) -> tuple[int, dict[str, Any]]:
    status, _, content = ask(server, "POST", path, json.dumps(options).encode())
    return status, json.loads(content)


def test_the_answer_is_the_estimate(server: Server) -> None:
    from napkinmath.train_config import AdapterConfig

    status, answer = post(server, "/api/estimate", SMALL)
    e = estimate("smollm2-135m", adapter=AdapterConfig(), micro_batch_size=2, sequence_length=512, hardware="rtx4090")
    assert status == 200 and answer["report"]["memory"]["requested"] == e.peak.nbytes and answer["report"]["verdict"] == "fits"
    assert post(server, "/api/estimate", SMALL) == (status, answer)


def test_formulas_add_up_to_their_components(server: Server) -> None:
    report = post(server, "/api/estimate", SMALL)[1]["report"]
    details = post(server, "/api/details", SMALL)[1]
    rows = {row["key"]: row["nbytes"] for row in report["components"]}
    assert sum(entry["nbytes"] for entry in details["formulas"]["weights.layers"]) == rows["weights.layers"]
    assert details["timeline_svg"].startswith("<svg") and details["operations"] and details["fits_on"]


def test_limits_hold_and_one_more_does_not(server: Server) -> None:
    limits = post(server, "/api/limits", {**SMALL, "gpu": None, "vram": "2GiB"})[1]
    assert limits["batch"] >= 1
    assert post(server, "/api/estimate", {**SMALL, "gpu": None, "vram": "2GiB", "bs": limits["batch"]})[1]["report"]["verdict"] == "fits"
    assert (
        post(server, "/api/estimate", {**SMALL, "gpu": None, "vram": "2GiB", "bs": limits["batch"] + 1})[1]["report"]["verdict"] != "fits"
    )


def test_job_files_and_commands(server: Server) -> None:
    assert post(server, "/api/command", SMALL)[1] == {"command": "estimate --model smollm2-135m --lora --bs 2 --ctx 512 --gpu rtx4090"}
    answer = post(server, "/api/export/axolotl", SMALL)[1]
    assert "adapter: lora" in answer["text"] and "micro_batch_size: 2" in answer["text"]
    assert post(server, "/api/export/fortran", SMALL)[0] == 422


def test_the_catalogue_has_what_the_page_offers(server: Server) -> None:
    status, _, content = ask(server, "GET", "/api/catalogue")
    lists = json.loads(content)
    assert status == 200 and len(lists["models"]) > 300 and len(lists["gpus"]) > 50 and "axolotl" in lists["exports"]


def test_every_option_of_the_page_means_something() -> None:
    assert set(KEYS) >= KNOWN
    assert not KNOWN & {"config", "hub", "calibration", "allow_stale_calibration", "nvme", "lengths"}, "options that name files"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/etc/passwd"}, "not in the catalogue"),
        ({"model": "../../secret"}, "not in the catalogue"),
        ({"model": "http://example.org/x"}, "not in the catalogue"),
        ({"model": "smollm2-135m", "bs": 1e308}, "whole number"),
        ({"model": "smollm2-135m", "bs": -1}, "whole number"),
        ({"model": "smollm2-135m", "bs": True}, "whole number"),
        ({"model": "smollm2-135m", "config": "x"}, "not one of the page's"),
        ({"model": "smollm2-135m", "calibration": "/etc/passwd"}, "not one of the page's"),
        ({"model": "smollm2-135m", "optimizer": "!!python/object/apply:os.system"}, "unknown"),
        ({"model": "smollm2-135m", "optimizer": "x" * 300}, "short text"),
        ({"model": "smollm2-135m", "gpu": ["a"] * 9}, "too many"),
        ({"model": "smollm2-135m", "gpu": "rtx9090"}, "rtx9090"),
        ({"model": ["a"]}, "short text"),
        ({}, "no model"),
        ([1, 2], "not a JSON object"),
    ],
)
def test_bad_options_are_one_line(server: Server, options: object, words: str) -> None:
    status, answer = post(server, "/api/estimate", options)
    assert status == 422 and words in answer["error"] and "\n" not in answer["error"]


def test_bad_requests(server: Server) -> None:
    assert ask(server, "POST", "/api/estimate", b"{")[0] == 422
    assert ask(server, "POST", "/api/estimate", b"[" * 9000)[0] == 422
    assert ask(server, "POST", "/api/estimate", b"x" * (MAX_BODY_BYTES + 1))[0] == 413
    assert ask(server, "POST", "/api/estimate", b"{}", **{"Content-Type": "text/plain"})[0] == 415
    assert ask(server, "POST", "/api/nothing", b"{}")[0] == 404
    assert ask(server, "GET", "/../../../etc/passwd")[0] == 404
    assert ask(server, "GET", "/page.css/../../answers.py")[0] == 404
    assert ask(server, "DELETE", "/")[0] == 501


def test_only_this_address_is_answered(server: Server) -> None:
    assert ask(server, "GET", "/", Host="evil.example")[0] == 421
    assert ask(server, "POST", "/api/estimate", b"{}", Host="evil.example:80")[0] == 421
    assert server.server_address[0] == "127.0.0.1"


def test_headers_let_the_page_do_nothing_but_ask_its_server(server: Server) -> None:
    for path in FILES:
        status, headers, content = ask(server, "GET", path)
        assert status == 200 and content == (Path(PAGE) / FILES[path][0]).read_bytes()
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert (
            headers["x-content-type-options"] == "nosniff"
            and headers["x-frame-options"] == "DENY"
            and headers["referrer-policy"] == "no-referrer"
        )
        assert "python" not in headers["server"].lower()


def test_the_page_is_self_contained_and_labelled() -> None:
    import re

    page = (Path(PAGE) / "index.html").read_text()
    assert not re.search(r'(?:src|href)="(?!/page\.|#)', page) and "style=" not in page and "onclick" not in page
    inputs = re.findall(r"<(?:input|select)[^>]*>", page)
    labels = re.findall(r"<label[^>]*>.*?</label>", page, re.S)
    assert len(inputs) == sum(len(re.findall(r"<(?:input|select)[^>]*>", label)) for label in labels), "each field has a label around it"


def test_ports() -> None:
    with pytest.raises(InputError, match="is not a port"):
        make_server("http")
    taken = make_server("0")
    try:
        with pytest.raises(InputError, match="cannot be used"):
            make_server(str(taken.server_port))
    finally:
        taken.server_close()


PATH = """
const until = async (holds) => { for (let i = 0; i < 400 && !holds(); i++) await new Promise((r) => setTimeout(r, 25)); };
(async () => {
  await until(() => document.getElementById("gpu").options.length > 50);
  const form = document.getElementById("form");
  form.model.value = "smollm2-360m";
  form.bs.value = 3;
  form.bs.dispatchEvent(new Event("input", { bubbles: true }));
  await until(() => document.getElementById("config").textContent.includes("--bs 8"));
  document.querySelector("#components button").click();
  const kind = document.getElementById("kind");
  kind.value = "axolotl";
  kind.dispatchEvent(new Event("change"));
  await until(() => document.getElementById("config").textContent.includes("micro_batch_size"));
  document.body.append("WALKED " + location.hash);
})();
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_person_goes_from_model_to_copied_config(tmp_path: Path) -> None:
    walked = Server(0)
    script, kind = walked.files["/page.js"]
    walked.files["/page.js"] = script + PATH.encode(), kind
    threading.Thread(target=walked.serve_forever, daemon=True).start()
    flags = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--virtual-time-budget=20000",
        "--window-size=400,800",
    )
    try:
        command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", walked.url]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    finally:
        walked.shutdown()
        walked.server_close()
    assert "WALKED #model=smollm2-360m" in page and "bs=8" in page
    assert "FITS RTX 4090" in page and "micro_batch_size: 8" in page and "data:image/svg+xml" in page
    assert "B = " in page, "the formulas of the first component are open"
