"""Hypothesis draws the same examples in every run, so that a failure is the change's and not the
day's; `--hypothesis-profile=default` draws others.

`--lane quick` takes pure tests only: no torch, nothing slow, in under a minute. `--lane rest` takes
all others, so that the two together run every test once. A new test is in the quick lane unless its
file names torch at the top, or it is marked `slow` or `torch`.
"""

from __future__ import annotations

import functools
import gc
import re
import sys
from pathlib import Path

import pytest
from chromium import BROWSER
from hypothesis import settings

# no deadline: a busy machine must not fail a test
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

TESTS = Path(__file__).parent
# These run other packages, pages and notebooks, which need torch, a subprocess a test, or both.
LEFT_OUT = ("agreement", "docs", "kernels", "profiler")
NAMES_TORCH = re.compile(
    r'^(?:import|from) (?:torch|triton)\b|^pytest\.importorskip\("(?:torch|transformers)"'
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", choices=("quick", "rest"), help="pure and fast tests, or the others")


@functools.cache
def is_pure(path: Path) -> bool:
    """Whether a folder or file of tests can be collected without torch."""
    if path.relative_to(TESTS).parts[:1] in {(name,) for name in LEFT_OUT}:
        return False
    if path.suffix != ".py":
        return True
    lines = path.read_text(encoding="utf-8").splitlines()
    return not any(map(NAMES_TORCH.match, lines))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The quick lane does not even import what needs torch."""
    inside = collection_path.is_relative_to(TESTS)
    if config.getoption("--lane") == "quick" and inside and not is_pure(collection_path):
        return True
    return None


NO_CHROMIUM = "no Chromium here"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says what was left out for want of a browser: a skipped test is not a silent one."""
    skipped = terminalreporter.stats.get("skipped", [])
    left_out = [report for report in skipped if NO_CHROMIUM in str(report.longrepr)]
    if left_out:
        terminalreporter.write_line(
            f"left out: {len(left_out)} tests that need Chromium (Debian: apt-get install chromium)"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if BROWSER is None and item.get_closest_marker("browser"):
            item.add_marker(pytest.mark.skip(reason=NO_CHROMIUM))
    lane = config.getoption("--lane")
    if lane is None:
        return
    lanes: dict[str, list[pytest.Item]] = {"quick": [], "rest": []}
    for item in items:
        marked = any(map(item.get_closest_marker, ("slow", "torch")))
        lanes["quick" if is_pure(item.path) and not marked else "rest"].append(item)
    items[:] = lanes.pop(lane)
    config.hook.pytest_deselected(items=[item for others in lanes.values() for item in others])


_frozen: dict[str, int] = {}  # a file of tests, and how many modules were loaded when it was frozen
MODULES_WORTH_IT = 20


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """What files before this one left, and what was imported, stays out of garbage collections: a
    worker with torch and transformers has a million objects to look through each time."""
    loaded = len(sys.modules)
    if loaded - _frozen.get(str(item.path), -MODULES_WORTH_IT) >= MODULES_WORTH_IT:
        _frozen[str(item.path)] = loaded
        gc.collect()
        gc.freeze()


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Names the test that makes the quick lane load torch."""
    assert item.config.getoption("--lane") != "quick" or "torch" not in sys.modules, (
        "the quick lane loads no torch: mark this test `torch`"
    )
