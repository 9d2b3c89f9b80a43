"""Writes docs/json_schema.md from the JSON schema of `estimate --json`; a test holds the page to
it.

Usage: python docs/generate_json_schema.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCHEMA = ROOT / "estimator" / "napkinmath" / "report" / "schema" / "estimate-2.json"
PAGE = ROOT / "docs" / "json_schema.md"

HEAD = """# The JSON of `estimate --json`

`estimate ... --json` prints one JSON object (a list of them where `--gpu` is given several times). This page is made by
`python docs/generate_json_schema.py` from [`estimate-2.json`](../estimator/napkinmath/report/schema/estimate-2.json), a JSON Schema
(draft 2020-12) that the tests validate every kind of estimate against.

{about}

Keys keep their order. Within a schema version keys are only added; a key that is removed, renamed or means something else makes a
new version, so check `schema` first.

```python
import json, subprocess

priced = json.loads(subprocess.run(["estimate", "--model", "llama-7b", "--qlora", "--json"], capture_output=True, check=True).stdout)
assert priced["schema"] == 2
print(priced["memory"]["device"]["value"] / 2**30, "GiB;", priced["verdict"])
assert sum(row["nbytes"] for row in priced["components"]) == priced["memory"]["device"]["value"]
```

From schema 1 (napkinmath 0.1): `headroom` and `fits_on[].headroom_bytes` are the device's memory less the device figure, which counts
the allocator's cache as taken. Schema 1 counted that cache as free; add `returnable_bytes` for nearly that number. `largest` and
`returnable_bytes` are new.

"""


def page(schema: dict[str, Any]) -> str:
    """The page as Markdown."""
    lines = [HEAD.format(about=schema["description"]), "| key | type | meaning |\n|---|---|---|\n"]
    for name, part in schema["properties"].items():
        lines += rows(name, part)
    lines.append("\n## Shared parts\n\n| key | type | meaning |\n|---|---|---|\n")
    for name, part in schema["$defs"].items():
        lines += rows(name, part)
    return "".join(lines)


def rows(path: str, part: dict[str, Any]) -> list[str]:
    """The row of a key, then those of what is inside it; items of a list are written `key[]`."""
    found = [f"| `{path}` | {kind(part)} | {part.get('description', '')} |\n"]
    inner, prefix = (part["items"], f"{path}[]") if "items" in part else (part, path)
    inner = next((form for form in inner.get("anyOf", ()) if "properties" in form), inner)
    for name, child in inner.get("properties", {}).items():
        found += rows(f"{prefix}.{name}", child)
    return found


def kind(part: dict[str, Any]) -> str:
    """The type of a key in words."""
    if "$ref" in part:
        return f"[{part['$ref'].rpartition('/')[2]}](#shared-parts)"
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return ", ".join(f"`{json.dumps(value)}`" for value in part["enum"])
    if "anyOf" in part:
        return " or ".join(kind(choice) for choice in part["anyOf"])
    types = part["type"] if isinstance(part["type"], list) else [part["type"]]
    if "items" in part:
        return f"list of {kind(part['items'])}"
    return " or ".join(types)


def main() -> None:
    PAGE.write_text(page(json.loads(SCHEMA.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
