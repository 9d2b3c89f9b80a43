"""Text that a job file may hold ends in a value or in one line, whatever its shape."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from napkinmath.base.errors import InputError
from napkinmath.inputs import yaml_text
from napkinmath.inputs.job_file import read_job

if TYPE_CHECKING:
    from pathlib import Path

MERGE_BOMB = "a0: &a0 {x: 1}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 30)
)
ALIAS_BOMB = "a0: &a0 [1]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30)
)
REFUSED = {
    "deep lists": ("model: " + "[" * 900, "levels"),  # above 1,000 PyYAML 6.0.4 refuses it first
    "deeper lists": ("model: " + "[" * 30_000, "more than 64 levels|maximum nesting depth"),
    "deep mappings": ("{a: " * 30_000, "levels"),
    "deep blocks": ("".join(" " * i + "a:\n" for i in range(200)), "levels"),
    "merge keys": (MERGE_BOMB, "values"),
    "aliases": (ALIAS_BOMB, "values"),
    "many values": ("a: [" + "1," * (yaml_text.MAX_NODES + 1) + "]", "values"),
    "itself": ("a: &a [1, *a]", "alias"),
    "tag of bool": ("bs: !!bool 3", "tag"),
    "tag of int": ("bs: !!int x", "tag"),
    "tag of a time": ("bs: !!timestamp x", "tag"),
    "tag of python": ("bs: !!python/object/apply:os.system [ls]", "tag"),
    "tag of ours": ("bs: !own 3", "tag"),
    "huge integer": ("bs: " + "9" * 10_000, "digits"),
    "no such date": ("bs: 2024-13-45", "month"),
    "no such hour": ("bs: 2024-01-01 99:00:00", "hour"),
    "twice": ("bs: 1\nctx: 2\nbs: 3", "'bs' twice, again at line 3"),
    "twice inside": ("a:\n  b: 1\n  b: 2", "'b' twice, again at line 3"),
    "key of a mapping": ("? {a: 1}\n: 2", "unhashable"),
    "no such alias": ("a: *b", "alias"),
}
JSON_REFUSED = {
    "deep": ('{"model": ' + "[" * 200_000, "nested"),
    "huge integer": ('{"bs": ' + "9" * 10_000 + "}", "digits"),
    "twice": ('{"bs": 1, "bs": 2}', "'bs' twice"),
    "twice inside": ('{"a": {"b": 1, "b": 1}}', "'b' twice"),
}


def refusal(path: Path, text: str) -> str:
    path.write_text(text)
    with pytest.raises(InputError) as error:
        read_job(str(path), [])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_yaml_is_refused_by_one_line(tmp_path: Path, name: str) -> None:
    text, said = REFUSED[name]
    assert re.search(said, refusal(tmp_path / "job.yaml", text))


@pytest.mark.parametrize("name", JSON_REFUSED)
def test_json_is_refused_by_one_line(tmp_path: Path, name: str) -> None:
    text, said = JSON_REFUSED[name]
    assert said in refusal(tmp_path / "job.json", text)


def test_plain_anchors_merges_and_equal_keys_of_two_mappings_are_read() -> None:
    text = "a: &a {x: 1}\nb: {<<: *a, y: [{x: 1}, {x: 2}]}\nc: *a\nx: y\ny: x"
    assert yaml_text.load(text, "job.yaml", what="job file") == {
        "a": {"x": 1},
        "b": {"x": 1, "y": [{"x": 1}, {"x": 2}]},
        "c": {"x": 1},
        "x": "y",
        "y": "x",
    }
