"""The local page: what it answers, what it refuses, and a person's way through it in a real
browser."""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from napkinmath.base.errors import InputError
from napkinmath.cli.serve import make_server
from napkinmath.estimate import estimate
from napkinmath.serving import answers, workers
from napkinmath.serving.cache import ENTRY_BYTES, Cache
from napkinmath.serving.front_end import PAGE, front_end
from napkinmath.serving.requests import KNOWN, MAX_BODY_BYTES, options_of
from napkinmath.serving.server import Server
from napkinmath.serving.workers import Gone

from tests.serving.patient import PATIENCE_S, patient_server

SMALL = {"model": "smollm2-135m", "method": "lora", "bs": 2, "ctx": 512, "gpu": "rtx4090"}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with patient_server() as running:
        yield running


def ask(
    server: Server, method: str, path: str, body: bytes | None = None, **headers: str
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=PATIENCE_S)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        return (
            response.status,
            {name.lower(): value for name, value in response.getheaders()},
            response.read(),
        )
    finally:
        connection.close()


def post(server: Server, path: str, options: object) -> tuple[int, dict[str, Any]]:
    status, _, content = ask(server, "POST", path, json.dumps(options).encode())
    return status, json.loads(content)


def test_the_answer_is_the_estimate(server: Server) -> None:
    from napkinmath.config.train_config import AdapterConfig

    status, answer = post(server, "/api/estimate", SMALL)
    e = estimate(
        "smollm2-135m",
        adapter=AdapterConfig(),
        micro_batch_size=2,
        sequence_length=512,
        hardware="rtx4090",
    )
    assert (
        status == 200
        and answer["report"]["memory"]["requested"] == e.peak.nbytes
        and answer["report"]["verdict"] == "fits"
    )
    assert post(server, "/api/estimate", SMALL) == (status, answer)


def test_formulas_add_up_to_their_components(server: Server) -> None:
    report = post(server, "/api/estimate", SMALL)[1]["report"]
    details = post(server, "/api/details", SMALL)[1]
    rows = {row["key"]: row["nbytes"] for row in report["components"]}
    assert (
        sum(entry["nbytes"] for entry in details["formulas"]["weights.layers"])
        == rows["weights.layers"]
    )
    assert details["operations"] and details["fits_on"]
    held = details["timeline"]["tensors"], details["timeline"]["alive"]
    assert sum(held[0][tensor][3] * count for tensor, count in held[1]) > 0


@pytest.mark.slow
def test_limits_hold_and_one_more_does_not(server: Server) -> None:
    limits = post(server, "/api/limits", {**SMALL, "gpu": None, "vram": "2GiB"})[1]
    assert limits["batch"] >= 1
    assert (
        post(
            server, "/api/estimate", {**SMALL, "gpu": None, "vram": "2GiB", "bs": limits["batch"]}
        )[1]["report"]["verdict"]
        == "fits"
    )
    assert (
        post(
            server,
            "/api/estimate",
            {**SMALL, "gpu": None, "vram": "2GiB", "bs": limits["batch"] + 1},
        )[1]["report"]["verdict"]
        != "fits"
    )


@pytest.mark.slow
def test_a_plan_keeps_what_is_given_and_fits_the_page(server: Server) -> None:
    asked = {
        "model": "smollm2-1.7b",
        "method": "lora",
        "gpu": "t4",
        "ctx": 1024,
        "rank": 8,
        "precision": "fp16-autocast",
    }
    status, found = post(server, "/api/plan", {**asked, "goal": "tokens/s"})
    first = found["best"][0]["options"]
    assert status == 200 and (first["method"], first["ctx"], first["rank"]) == ("lora", 1024, 8)
    assert all(row["options"]["bs"] & (row["options"]["bs"] - 1) == 0 for row in found["best"]), (
        "the slider has powers of two"
    )
    fields = {
        "method",
        "checkpointing",
        "precision",
        "optimizer",
        "attention",
        "loss",
        "kernels",
        "bs",
        "ctx",
        "rank",
        "optimizer_in_backward",
    }
    assert all(
        set(row["options"]) <= fields and not row["options"]["optimizer_in_backward"]
        for row in found["best"]
    )
    mine = {name: value for name, value in first.items() if name != "optimizer_in_backward"}
    report = post(server, "/api/estimate", {"model": "smollm2-1.7b", "gpu": "t4", **mine})[1][
        "report"
    ]
    assert (
        report["verdict"] == "fits"
        and report["memory"]["requested"] == found["best"][0]["requested_bytes"]
    )
    longest = post(server, "/api/plan", {**asked, "goal": "context"})[1]["best"][0]["options"]
    assert longest["ctx"] > 1024
    assert post(server, "/api/plan", {**asked, "goal": "!!python/object"})[0] == 422
    assert (
        post(server, "/api/plan", {"model": "gpt2"})[0] == 422
        and post(server, "/api/estimate", {**asked, "goal": "batch"})[0] == 422
    )


def test_the_roofline_has_the_steps_operations_under_the_roof() -> None:
    from napkinmath.report.roofline_svg import points_of, roofline_svg

    e = estimate("smollm2-135m", hardware="rtx4090")
    points, moving = points_of(e)
    assert e.time is not None and e.hardware is not None and e.hardware.gpu.bandwidth_bytes_per_s
    device = sum(p.device_s for p in e.time.phases)
    assert sum(p.seconds for p in points) + moving == pytest.approx(device, rel=0.02)
    roof = [
        min(e.time.peak_flops_per_s, p.intensity * e.hardware.gpu.bandwidth_bytes_per_s)
        for p in points
    ]
    assert all(p.rate <= 1.001 * limit for p, limit in zip(points, roof, strict=True))
    picture = ElementTree.fromstring(roofline_svg(e))
    assert len(picture.findall("{*}circle")) == len(points) > 3
    assert roofline_svg(estimate("smollm2-135m")) == ""


def test_job_files_and_commands(server: Server) -> None:
    assert post(server, "/api/command", SMALL)[1] == {
        "command": "estimate --model smollm2-135m --lora --bs 2 --ctx 512 --gpu rtx4090"
    }
    answer = post(server, "/api/export/axolotl", SMALL)[1]
    assert "adapter: lora" in answer["text"] and "micro_batch_size: 2" in answer["text"]
    assert post(server, "/api/export/fortran", SMALL)[0] == 422


def test_the_call_in_python_prices_the_same(server: Server) -> None:
    asked = {**SMALL, "targets": "q_proj,v_proj", "gpus": 2, "data_parallel": "zero2"}
    asked |= {"clip": False, "dropout": 0.05}
    found: dict[str, Any] = {}
    exec(post(server, "/api/command", {**asked, "shell": "python"})[1]["command"], found)
    report = post(server, "/api/estimate", asked)[1]["report"]
    assert found["e"].peak.nbytes == report["memory"]["requested"]
    own = {"config": {"model_type": "llama"}, "bs": 2, "shell": "python"}
    assert "'./config.json'" in post(server, "/api/command", own)[1]["command"]
    assert (
        "--model ./config.json --bs 2"
        in post(server, "/api/command", {**own, "shell": "posix"})[1]["command"]
    )


def test_the_catalogue_has_what_the_page_offers(server: Server) -> None:
    status, _, content = ask(server, "GET", "/api/catalogue")
    lists = json.loads(content)
    assert (
        status == 200
        and len(lists["models"]) > 300
        and len(lists["gpus"]) > 50
        and "axolotl" in lists["exports"]
    )


def test_no_option_of_the_page_names_a_file_or_reaches_the_network() -> None:
    assert not KNOWN & {"hub", "calibration", "allow_stale_calibration"}
    for asked in ({"lengths": "/etc/passwd"}, {"nvme": "/dev/nvme0"}, {"network": "/etc/hosts"}):
        with pytest.raises(InputError, match=r"whole number|unknown"):
            answers.answer(
                options_of(json.dumps({**SMALL, "gpus": "16", "nodes": 2, **asked}).encode())
            )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/etc/passwd"}, "not in the catalogue"),
        ({"model": "../../secret"}, "not in the catalogue"),
        ({"model": "http://example.org/x"}, "not in the catalogue"),
        ({"model": "smollm2-135m", "bs": 1e308}, "whole number"),
        ({"model": "smollm2-135m", "bs": -1}, "whole number"),
        ({"model": "smollm2-135m", "bs": True}, "whole number"),
        ({"model": "smollm2-135m", "grad_accum": (1 << 40) + 1}, "whole number"),
        ({"model": "smollm2-135m", "ctx": 1 << 25}, "whole number"),
        ({"model": "org/../../../etc/passwd"}, "not in the catalogue"),
        ({"arch": "h=1e308"}, "out of range"),
        ({"model": "smollm2-135m", "vram": "1e308GiB"}, "memory size"),
        ({"model": "smollm2-135m", "optimizer": "adamw\u202e"}, "short text"),
        ({"config": "x"}, "not an object"),
        ({"config": {"model_type": "llama"}}, "hidden_size"),
        ({"model": "gpt2", "config": {"model_type": "llama"}}, "both name the model"),
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
    for name, wanted in front_end().items():
        status, headers, content = ask(server, "GET", f"/{name}".replace("/index.html", "/"))
        assert status == 200 and content == wanted
        policy = headers["content-security-policy"]
        assert (
            "default-src 'none'" in policy
            and "frame-ancestors 'none'" in policy
            and "unsafe" not in policy
            and "http" not in policy
        )
        assert (
            headers["x-content-type-options"] == "nosniff"
            and headers["x-frame-options"] == "DENY"
            and headers["referrer-policy"] == "no-referrer"
        )
        assert "python" not in headers["server"].lower()


def test_what_is_switched_off_is_priced_and_said_so(server: Server) -> None:
    full = {"model": "smollm2-135m", "method": "full", "gpu": "rtx4090", "ctx": 64}
    off = {**full, "optimizer_in_backward": True, "clip": False}
    peaks = [
        post(server, "/api/estimate", asked)[1]["report"]["memory"]["requested"]
        for asked in (full, off)
    ]
    assert peaks[1] < peaks[0]
    assert post(server, "/api/command", off)[1]["command"].endswith(
        "--gpu rtx4090 --ctx 64 --optimizer-in-backward --no-clip"
    )
    assert post(server, "/api/estimate", {**full, "clip": "no"})[0] == 422


def test_the_page_is_self_contained_and_labelled() -> None:
    import re

    page = (Path(PAGE) / "index.html").read_text()
    assert (
        set(re.findall(r'(?:src|href)="([^"#]+)', page)) == set(front_end()) - {"index.html"}
        and "style=" not in page
        and "onclick" not in page
    )
    inputs = re.findall(r"<(?:input|select)[^>]*>", page)
    labels = re.findall(r"<label[^>]*>.*?</label>", page, re.S)
    assert len(inputs) == sum(
        len(re.findall(r"<(?:input|select)[^>]*>", label)) for label in labels
    ), "each field has a label around it"


def test_the_page_leaves_commands_to_the_server() -> None:
    script = front_end()["page.js"].decode()
    assert "estimate --" not in script
    composed = [line for line in script.splitlines() if "`--${" in line]
    assert all('make("option"' in line for line in composed), "names of flags, and no values"


def test_commands_from_hostile_links_are_quoted_for_the_shell_asked_for(server: Server) -> None:
    import shlex

    text = "L2 h64; $(touch x) `touch x` %PATH% !! & | > x -rf é \u2019"
    asked = {"arch": text, "targets": "-x'y", "gpu": ["a b", "$c"]}
    posix = post(server, "/api/command", asked)[1]["command"]
    assert shlex.split(posix)[1:] == [
        *("--arch", text, "--targets=-x'y", "--gpu", "a b", "--gpu", "$c")
    ]
    theirs = post(server, "/api/command", {**asked, "shell": "powershell"})[1]["command"]
    doubled = text.replace("\u2019", "\u2019\u2019")
    assert theirs == f"estimate --arch '{doubled}' '--targets=-x''y' --gpu 'a b' --gpu '$c'"
    for shell, words in (("cmd", "unknown"), ("powershell", "double quote")):
        status, answer = post(server, "/api/command", {"arch": 'a"b', "shell": shell})
        assert status == 422 and words in answer["error"]


def test_the_largest_sizes_are_answered(server: Server) -> None:
    status, answer = post(
        server,
        "/api/estimate",
        {"model": "smollm2-135m", "gpu": "t4", "bs": 1 << 24, "ctx": 1 << 24},
    )
    assert status == 200 and answer["report"]["verdict"] == "does not fit"


def test_what_several_ask_at_once_is_made_once() -> None:
    cache, calls, begun = Cache(), [], threading.Barrier(9)

    def make() -> bytes:
        calls.append(1)
        time.sleep(0.05)
        return b"answer"

    def ask_for_it() -> None:
        begun.wait()
        found.append(cache.get("key", make))

    found: list[bytes] = []
    threads = [threading.Thread(target=ask_for_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    begun.wait()
    for thread in threads:
        thread.join()
    assert found == [b"answer"] * 8 and len(calls) == 1


def test_the_cache_holds_so_many_bytes_and_no_mistakes() -> None:
    cache, calls = Cache(kept_bytes=2 * (40 + ENTRY_BYTES)), []

    def make(key: int) -> bytes:
        calls.append(key)
        return bytes(40)

    for key in (1, 2, 1, 3, 1, 2):  # 3 drives out 2, which was not asked for since
        cache.get(key, lambda key=key: make(key))
    assert calls == [1, 2, 3, 2]
    with pytest.raises(ZeroDivisionError):
        cache.get("bad", lambda: bytes(1 // 0))
    assert cache.get("bad", lambda: b"good") == b"good"


def test_a_long_question_with_a_short_answer_is_no_way_to_fill_the_memory() -> None:
    cache, asked, kept = Cache(kept_bytes=1 << 20), 4000, 60_000
    tracemalloc.start()
    try:
        for number in range(asked):
            cache.get(("/api/limits", f"{number}".ljust(kept)), lambda: b"{}")
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 2 << 20, held


def test_an_answer_that_nobody_waits_for_is_not_made(server: Server) -> None:
    with pytest.raises(Gone):
        server.workers.quick.run(answers.begun, wanted=lambda: False)
    cache, first = Cache(), threading.Event()

    def left() -> bytes:
        first.set()
        time.sleep(0.05)
        raise Gone("went away")

    def ask_and_leave() -> None:
        with pytest.raises(Gone):
            cache.get("key", left)

    thread = threading.Thread(target=ask_and_leave)
    thread.start()
    first.wait()
    assert cache.get("key", lambda: b"made for who stayed") == b"made for who stayed"
    thread.join()


@pytest.mark.slow
def test_moves_do_not_wait_for_searches(server: Server, tmp_path: Path) -> None:
    ends = tmp_path / "ends"
    searching = threading.Thread(
        target=server.workers.long.run, args=(until, ends), kwargs={"wanted": lambda: True}
    )
    searching.start()
    try:
        assert post(server, "/api/estimate", {**SMALL, "ctx": 576})[0] == 200
        assert searching.is_alive()
    finally:
        ends.touch()
    searching.join()


def until(ends: Path) -> bytes:
    """Runs in a worker."""
    while not ends.exists():
        time.sleep(0.01)
    return b""


def test_an_ended_worker_is_replaced(server: Server) -> None:
    pid = int(server.workers.later.run(pid_of, wanted=lambda: True))
    os.kill(pid, signal.SIGKILL)
    statuses = [post(server, "/api/details", {**SMALL, "ctx": 608})[0] for _ in range(3)]
    assert statuses[-1] == 200 and set(statuses) <= {503, 200}


def test_workers_end_with_a_server_that_is_killed() -> None:
    code = (
        "import os; from serving.test_serve import pid_of; from napkinmath.serving.workers import Lane;"
        " print(Lane(1).run(pid_of, wanted=lambda: True).decode(), flush=True);"
        " os.kill(os.getpid(), 9)"
    )
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    worker = int(done.stdout)
    for _ in range(20 * PATIENCE_S):
        try:
            os.kill(worker, 0)
        except ProcessLookupError:
            return
        if (
            Path(f"/proc/{worker}/stat").exists()
            and Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        ):
            return  # ended; nobody has asked how
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("the worker outlived its server")


def pid_of() -> bytes:
    """Runs in a worker."""
    return str(os.getpid()).encode()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timer signals on this system")
def test_an_endless_answer_is_ended() -> None:
    before = signal.signal(signal.SIGPROF, workers._out_of_time)
    try:
        outcome, reason = workers._made(0.1, endless)
    finally:
        signal.signal(signal.SIGPROF, before)
    assert outcome == workers.REFUSED and b"longer than 0.1 s" in reason


def endless() -> bytes:
    while True:
        pass


def test_more_than_can_be_answered_is_refused(
    monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    monkeypatch.setattr(workers, "MOST_WAITING", 0)
    asked = json.dumps({**SMALL, "ctx": 640}).encode()
    status, headers, answer = ask(server, "POST", "/api/estimate", asked)
    assert status == 503 and "ask again" in json.loads(answer)["error"]
    assert int(headers["retry-after"]) >= 1


def test_our_own_mistakes_are_said_without_their_insides(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.workers, "quick", None)
    status, answer = post(server, "/api/estimate", {**SMALL, "ctx": 672})
    assert status == 500 and "AttributeError" in answer["error"] and "quick" not in answer["error"]


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="no such signals on this system")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_search_in_the_making_does_not_hold_the_end_of_the_server(
    number: signal.Signals, tmp_path: Path
) -> None:
    code = (
        # what a shell starts in the background ignores an interrupt, and hands that on
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import sys; from pathlib import Path; from serving import test_serve;"
        " from napkinmath.cli import serve; made = serve.make_server('0');"
        " made.workers.long._pool.submit(test_serve.until, Path('never'));"
        " serve.make_server = lambda port: made; sys.exit(serve.run(['--port', '0']))"
    )
    path = os.pathsep.join([str(Path(__file__).resolve().parents[1]), *sys.path])
    running = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None and b"napkinmath is at" in running.stdout.readline()
    running.send_signal(number)
    _, said = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0 and b"Traceback" not in said


@pytest.mark.slow
def test_ports() -> None:
    for port in ("http", "²", "-1", "65536", "9" * 5000):
        with pytest.raises(InputError, match="is not a port"):
            make_server(port)
    taken = make_server("0")
    try:
        with pytest.raises(InputError, match="cannot be used"):
            make_server(str(taken.server_port))
    finally:
        taken.server_close()
