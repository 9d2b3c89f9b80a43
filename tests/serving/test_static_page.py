"""The page as static files: its archive, the same answers as the server's, and a browser without a
network."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from urllib.parse import parse_qsl

import pytest
from napkinmath.base.errors import InputError
from napkinmath.cli.main import main
from napkinmath.serving import answers, in_browser, static_page
from napkinmath.serving.front_end import front_end
from napkinmath.serving.requests import options_of
from serving.browsing import StaticHost, report_of, running

MOST_ARCHIVE_BYTES = 1_000_000
STEP = {"model": "smollm2-135m", "method": "lora", "bs": 2, "ctx": 512, "gpu": "RTX 4090"}
PATHS = ("/api/estimate", "/api/details", "/api/limits", "/api/command", "/api/export/axolotl")


def test_the_archive_is_small_the_same_each_time_and_without_what_serves() -> None:
    packed = static_page.archive()
    assert len(packed) <= MOST_ARCHIVE_BYTES and packed == static_page.archive()
    with tarfile.open(fileobj=io.BytesIO(packed)) as files:
        names = files.getnames()
    assert "napkinmath/catalog/models.json" in names
    assert not [n for n in names if "/cli/" in n or "/page/" in n or n.endswith("server.py")]


@pytest.mark.slow
def test_the_archive_alone_answers_as_the_server_does(tmp_path: Path) -> None:
    with tarfile.open(fileobj=io.BytesIO(static_page.archive())) as files:
        files.extractall(tmp_path, filter="data")
    code = """
import json, sys
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("numpy", "multiprocessing", "subprocess", "_socket"):
            raise ImportError(name, name=name)
sys.meta_path.insert(0, Lacking())
from napkinmath.serving.in_browser import reply
asked = json.load(sys.stdin)
print(json.dumps([reply(path, body) for path, body in asked]))
"""
    body = json.dumps(STEP)
    asked = [*((path, body) for path in PATHS), ("/api/plan", body), ("/api/catalogue", "{}")]
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{code}"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    *priced, plan, catalogue = json.loads(done.stdout)
    for path, (status, text) in zip(PATHS, priced, strict=True):
        assert (status, text) == (200, answers.encoded(path, options_of(body.encode())).decode())
    assert plan[0] == 501 and "`estimate serve`" in plan[1]
    alone, here = (json.loads(text) for text in (catalogue[1], json.dumps(answers.catalogue())))
    for found in (alone, here):  # tests of published tables add stacks to this process
        found["choices"].pop("stack")
    assert alone == here


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/api/estimate", '{"model": "no-such"}', 422, "not in the catalogue"),
        ("/api/estimate", "[", 422, "the request"),
        ("/api/estimate", '{"model": "gpt2", "bs": -1}', 422, "whole number"),
        ("/api/export/nothing", json.dumps(STEP), 422, "nothing"),
        ("/api/none", "{}", 500, "KeyError"),
    ],
)
def test_what_cannot_be_answered_is_one_line(path: str, body: str, status: int, words: str) -> None:
    given, text = in_browser.reply(path, body)
    assert given == status and words in json.loads(text)["error"] and "\n" not in text


def runtime_of(content: bytes) -> bytes:
    """A package as npm gives it, with every file the same."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as packed:
        for name in (*static_page.RUNTIME, "package.json"):
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            packed.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def test_the_folder_names_every_file_and_a_changed_one_renews_it() -> None:
    folders = [static_page.static_files(runtime_of(content)) for content in (b"a", b"b")]
    heads = [files["service_worker.js"].decode().splitlines()[:2] for files in folders]
    assert heads[0][0] != heads[1][0] and heads[0][1] == heads[1][1]
    named = json.loads(heads[0][1].removeprefix("const FILES = ").removesuffix(";"))
    assert set(named) == {"./", *folders[0]} - {"service_worker.js"}
    for name in ("LICENSE", "NOTICE", "MPL-2.0", "PSF-2.0"):
        assert folders[0][f"licences/{name}.txt"]


def test_the_page_and_its_style_are_those_of_the_server() -> None:
    files = static_page.page_files()
    served = front_end()
    assert set(served) <= set(files)
    assert {name for name in served if served[name] != files[name]} == {
        "index.html",
        "page.js",
    }
    page = files["index.html"].decode()
    assert "default-src 'none'" in page and 'src="/' not in page and 'href="/' not in page
    addresses = [text.replace(b"http://www.w3.org/2000/svg", b"") for text in files.values()]
    assert not [text for text in addresses if b"http://" in text or b"https://" in text]


@pytest.mark.parametrize("case", ["no npm", "npm fails", "another file", "a folder in use"])
def test_what_stands_in_the_way_is_one_line_with_the_way_out(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, arguments, words = tmp_path / "page", [], "--runtime pyodide-"
    monkeypatch.setenv("PATH", str(tmp_path))
    if case == "npm fails":
        npm = tmp_path / "npm"
        npm.write_text("#!/bin/sh\nexit 1\n")
        npm.chmod(0o755)
    elif case == "another file":
        (tmp_path / "other.tgz").write_bytes(runtime_of(b"x"))
        arguments = ["--runtime", str(tmp_path / "other.tgz")]
    elif case == "a folder in use":
        out.mkdir()
        (out / "thesis.txt").write_text("mine")
        with pytest.raises(InputError, match="another folder"):
            static_page.write_folder(str(out), {"thesis.txt": b""})
        assert (out / "thesis.txt").read_text() == "mine"
        return
    assert main(["page", "--out", str(out), *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and words in said and not out.exists()


WALK = """
const until = async (holds) => { for (let i = 0; i < 1200 && !holds(); i++) await new Promise((r) => setTimeout(r, 100)); };
(async () => {
  const began = performance.now(), text = (id) => document.getElementById(id).textContent;
  await until(() => document.getElementById("figures").children.length || !document.getElementById("error").hidden);
  const first = performance.now() - began;
  await until(() => text("limits").includes("Largest batch") || !document.getElementById("error").hidden);
  document.getElementById("search").click();
  await until(() => text("plan-said").includes("serve"));
  const registration = await Promise.race([navigator.serviceWorker.ready, new Promise((r) => setTimeout(r, 20000))]);
  await fetch("/done", { method: "POST", body: JSON.stringify({ verdict: text("verdict"), error: text("error"), limits: text("limits"), plan: text("plan-said"), figures: text("figures"), link: location.hash.slice(1), kept: Boolean(registration && registration.active), first_s: first / 1000 }) });
})();
"""


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.browser
@pytest.mark.skipif(
    "NAPKINMATH_PAGE_RUNTIME" not in os.environ,
    reason="needs NAPKINMATH_PAGE_RUNTIME naming the npm package of Pyodide",
)
def test_a_browser_without_a_network_answers_twice_the_second_time_without_the_host(
    tmp_path: Path,
) -> None:
    package = Path(os.environ["NAPKINMATH_PAGE_RUNTIME"]).read_bytes()
    files = static_page.static_files(static_page.checked(package, "the runtime"))
    files["page.js"] += WALK.encode()
    static_page.write_folder(str(tmp_path / "page"), files)
    host = StaticHost(tmp_path / "page")
    with running(host):
        for host.gone in (False, True):
            text, elsewhere = report_of(host, tmp_path / "profile")
            assert text, "the page did not report"
            found = json.loads(text)
            link = dict(parse_qsl(found["link"]))
            served = json.loads(
                answers.encoded("/api/estimate", options_of(json.dumps(link).encode()))
            )
            assert found["verdict"].startswith("FITS RTX 4090") and not found["error"], found
            assert (
                f"{served['report']['memory']['device']['value'] / 2**30:.2f} (" in found["figures"]
            )
            assert "Largest batch" in found["limits"] and "`estimate serve`" in found["plan"]
            assert found["kept"] and elsewhere == [], elsewhere
    # A browser may try the page itself beside the service worker, and looks for a newer one.
    assert set(host.refused) <= {"/deep/", "/deep/service_worker.js", "/favicon.ico"}


@pytest.mark.slow
@pytest.mark.browser
def test_the_watch_for_other_hosts_sees_one(tmp_path: Path) -> None:
    page = tmp_path / "page"
    page.mkdir()
    (page / "index.html").write_text(
        "<script>fetch('http://elsewhere.invalid/').catch(() => {}).then(() =>"
        " fetch('/done', {method: 'POST', body: 'asked'}))</script>"
    )
    host = StaticHost(page)
    with running(host):
        text, elsewhere = report_of(host, tmp_path / "profile")
    assert text == "asked" and any("elsewhere.invalid" in line for line in elsewhere)
