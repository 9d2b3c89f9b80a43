"""Drives a headless Chromium over its debugging pipe (DevTools protocol): opens an address, runs
scripts, clicks, takes pictures, and writes down every request."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-default-apps",
    "--remote-debugging-pipe",
)
WIDTHS = {"phone": (390, 844), "desktop": (1280, 1000)}
"""The two widths that the page is checked at, in CSS pixels."""
SECONDS_TO_ANSWER = 120  # of a machine that does much else


class ScriptError(RuntimeError):
    """An exception of the page's JavaScript."""


class Page:
    """One tab. `requests` has the address of everything it asked for, `errors` what its console
    and its exceptions said."""

    def __init__(self, sent: int, received: int) -> None:
        self._sent, self._received, self._left = sent, received, b""
        self._number, self._session = 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._loaded = False
        target = self._browser("Target.createTarget", url="about:blank")["targetId"]
        attached = self._browser("Target.attachToTarget", targetId=target, flatten=True)
        self._session = str(attached["sessionId"])
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def _browser(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._exchange({"method": method, "params": parameters})

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        return self._exchange({"method": method, "params": parameters, "sessionId": self._session})

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        os.write(self._sent, json.dumps({"id": self._number, **message}).encode() + b"\0")
        while True:
            came = self._message()
            if came.get("id") == self._number:
                if "error" in came:
                    raise RuntimeError(f"{message['method']}: {came['error']['message']}")
                return came.get("result", {})

    def _message(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            part = os.read(self._received, 1 << 20)
            if not part:
                raise RuntimeError("the browser ended")
            self._left += part
        text, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(text)
        self._note(found)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        method, given = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(given["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and given["entry"]["source"] not in ("network", "other"):
            self.errors.append(f"{given['entry']['text']} {given['entry'].get('url', '')}")

    def shape(self, width: int, height: int, *, touch: bool = False, dark: bool = False) -> None:
        """The window's size, whether it is a phone's, and its colour scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if touch else 1,
            mobile=touch,
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        hover = {"name": "hover", "value": "none" if touch else "hover"}
        self.call("Emulation.setEmulatedMedia", features=[scheme, hover])

    def open(self, address: str) -> None:
        """Loads an address to its end; raises TimeoutError where that takes too long."""
        self._loaded = False
        self.call("Page.navigate", url=address)
        until = time.monotonic() + SECONDS_TO_ANSWER
        while not self._loaded:
            self.run("1")
            if time.monotonic() > until:
                raise TimeoutError(f"{address} did not load")

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited; raises ScriptError for its exception."""
        done = self.call(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in done:
            details = done["exceptionDetails"]
            raise ScriptError(details.get("exception", {}).get("description", details["text"]))
        return done["result"].get("value")

    def until(self, condition: str, seconds: float = SECONDS_TO_ANSWER) -> None:
        """Waits until an expression is true; TimeoutError says which was not."""
        end = time.monotonic() + seconds
        while not self.run(f"Boolean({condition})"):
            if time.monotonic() > end:
                raise TimeoutError(f"not true within {seconds:g} s: {condition}")
            time.sleep(0.05)

    def key(self, name: str, text: str = "") -> None:
        """One key pressed and released."""
        codes = {"Tab": 9, "Enter": 13, "ArrowRight": 39, "ArrowLeft": 37, " ": 32}
        given = {"key": name, "code": name, "windowsVirtualKeyCode": codes.get(name, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **given)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def offline(self, is_off: bool) -> None:
        """Whether the network is gone."""
        self.call(
            "Network.emulateNetworkConditions",
            offline=is_off,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """A screenshot as PNG, of the window or of the whole page."""
        taken = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def chromium(profile: Path | None = None) -> Iterator[Page]:
    """A tab of a new browser, which is ended after it; the profile is a fresh one unless named."""
    if BROWSER is None:
        raise FileNotFoundError("Chromium is not installed (Debian: apt-get install chromium)")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        to_read, sent = os.pipe()
        received, to_write = os.pipe()
        flags = (*FLAGS, f"--user-data-dir={profile or folder}")
        with _as_descriptors(to_read, to_write):
            browser = subprocess.Popen(
                [BROWSER, *flags],
                pass_fds=(3, 4),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        os.close(to_read)
        os.close(to_write)
        try:
            yield Page(sent, received)
        finally:
            os.close(sent)
            os.close(received)
            browser.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                browser.wait(10)
            browser.kill()
            browser.wait()


@contextmanager
def _as_descriptors(to_read: int, to_write: int) -> Iterator[None]:
    """The browser's ends as descriptors 3 and 4, which it expects; ours come back afterwards."""
    kept = {number: _copy(number) for number in (3, 4)}
    ends = os.dup(to_read), os.dup(to_write)
    try:
        os.dup2(ends[0], 3)
        os.dup2(ends[1], 4)
        yield
    finally:
        for end in ends:
            os.close(end)
        for number, copy in kept.items():
            os.close(number)
            if copy is not None:
                os.dup2(copy, number)
                os.close(copy)


def _copy(number: int) -> int | None:
    try:
        return os.dup(number)
    except OSError:
        return None
