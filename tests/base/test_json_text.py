"""JSON by CPython's accelerators alone is what `json` reads and writes."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from napkinmath.base.json_text import dumps, loads
from recount_models import CATALOG

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.mark.slow
@given(value=values)
def test_as_json_does(value: object) -> None:
    assert dumps(value) == json.dumps(value)
    assert loads(f" {json.dumps(value, indent=2)}\n") == value


def test_the_catalog_is_read_alike() -> None:
    text = CATALOG.read_text(encoding="utf-8")
    assert loads(text) == json.loads(text)


@pytest.mark.parametrize("broken", ["", "{", "[1,]", "{} {}", "nul", '{"a": 1,}'])
def test_what_is_not_json_is_refused(broken: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(broken)


def test_what_json_has_no_words_for_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        dumps([math.nan])
    with pytest.raises(TypeError):
        dumps({"a": object()})


@pytest.mark.slow
@pytest.mark.parametrize("flags", [(), ("--json",), ("--gpu", "4090"), ("--gpu", "4090", "--json")])
def test_the_cold_command_loads_neither_json_nor_re(flags: tuple[str, ...]) -> None:
    command = (
        "from napkinmath.cli.main import main; import sys; main(sys.argv[1:]);"
        " print(sorted({'json', 're'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:0] = {sys.path!r}; {command}",
            "--model",
            "llama-7b",
            "--qlora",
            *flags,
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.rstrip().endswith("[]")
