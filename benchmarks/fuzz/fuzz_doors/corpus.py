"""Inputs that once failed, each a small JSON file, to be tried for ever."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fuzz_doors.door import Case

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "fuzz_corpus"
MOST_TRIALS = 60


def write(folder: Path, door: str, case: Case, found: str) -> Path:
    """Writes a case under a name made of its door and its content."""
    content = {
        "door": door,
        "found": found,
        "argv": list(case.argv),
        "files": {name: _encoded(data) for name, data in case.files},
    }
    text = json.dumps(content, indent=1, ensure_ascii=True) + "\n"
    mark = hashlib.sha256(text.encode()).hexdigest()[:10]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{door.replace(' ', '-').replace('.', '-')}-{mark}.json"
    path.write_text(text, encoding="utf-8")
    return path


def read(path: Path) -> tuple[str, Case]:
    """The door and the case of a file."""
    content = json.loads(path.read_text(encoding="utf-8"))
    files = tuple((name, _decoded(data)) for name, data in content["files"].items())
    return content["door"], Case(tuple(content["argv"]), files)


def smaller(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with what is not needed left out, as far as some trials go."""
    trials = MOST_TRIALS
    changed = True
    while changed and trials > 0:
        changed = False
        for candidate in _candidates(case):
            trials -= 1
            if fails(candidate):
                case, changed = candidate, True
                break
            if trials <= 0:
                break
    return case


def _candidates(case: Case) -> Iterator[Case]:
    """The case without one or two of its words, or with less in one of its files."""
    for width in (2, 1):
        for at in range(len(case.argv) - width, -1, -1):
            if case.argv[at].startswith("-"):
                yield case._replace(argv=case.argv[:at] + case.argv[at + width :])
    for number, (name, data) in enumerate(case.files):
        for less in _less(data):
            files = list(case.files)
            files[number] = (name, less)
            yield case._replace(files=tuple(files))


def _less(data: bytes) -> Iterator[bytes]:
    """A JSON file without one of its keys, another file without a part of its bytes."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        for parts in (2, 4, 8, 16):
            width = max(1, len(data) // parts)
            yield from (data[:at] + data[at + width :] for at in range(0, len(data), width))
        return
    for less in _without_a_key(content):
        yield json.dumps(less).encode()


def _without_a_key(content: Any) -> Iterator[Any]:
    if not isinstance(content, dict):
        return
    for key in content:
        yield {name: value for name, value in content.items() if name != key}
        for inner in _without_a_key(content[key]):
            yield {**content, key: inner}


def _encoded(data: bytes) -> Any:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _decoded(data: Any) -> bytes:
    return data.encode() if isinstance(data, str) else base64.b64decode(data["base64"])
