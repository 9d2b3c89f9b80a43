"""Writes sbom.cdx.json, the bill of materials in CycloneDX's JSON: every package that constraints.txt
pins, and torch as the Makefile does, by name, version, package URL and hash. A test holds the file
to them.

Usage: python docs/generate_sbom.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import tomllib

ROOT = Path(__file__).resolve().parents[1]
SBOM = ROOT / "sbom.cdx.json"
PINNED = re.compile(r"^(?P<name>[^=\s]+)==(?P<version>\S+)(?: --hash=sha256:(?P<sha256>\S+))?$")
TORCH = re.compile(r"^TORCH := (\S+)$", re.MULTILINE)
NAME = re.compile(r"^[A-Za-z0-9._-]+")


def pinned() -> list[re.Match[str]]:
    """Name, version and hash of every package; torch has no hash, since its builds differ."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = TORCH.search((ROOT / "Makefile").read_text(encoding="utf-8"))
    assert torch is not None, "the Makefile pins no torch"
    found = [PINNED.match(line) for line in [*lines, torch[1]] if not line.startswith("#")]
    return sorted((match for match in found if match is not None), key=lambda m: m["name"])


def plain(requirement: str) -> str:
    """'PyYAML>=6' -> 'pyyaml', as package URLs write it."""
    name = NAME.match(requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def package_url(name: str, version: str) -> str:
    """The package URL of a Python package."""
    return f"pkg:pypi/{plain(name)}@{version.replace('+', '%2B')}"


def component(package: re.Match[str], required: set[str]) -> dict[str, Any]:
    """A package; what the light installation does not take is optional."""
    url = package_url(package["name"], package["version"])
    found: dict[str, Any] = {
        "type": "library",
        "bom-ref": url,
        "name": plain(package["name"]),
        "version": package["version"],
        "scope": "required" if plain(package["name"]) in required else "optional",
        "purl": url,
    }
    if package["sha256"]:
        found["hashes"] = [{"alg": "SHA-256", "content": package["sha256"]}]
    return found


def bill() -> dict[str, Any]:
    """The whole document; it has no date, so that the same packages give the same file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = set(map(plain, project["dependencies"]))
    extras = {plain(x) for extra in project["optional-dependencies"].values() for x in extra}
    components = [component(package, required) for package in pinned()]
    own = package_url(project["name"], project["version"])
    direct = [c["bom-ref"] for c in components if c["name"] in required | extras]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": project["name"],
                "version": project["version"],
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": own,
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": direct}],
    }


def text() -> str:
    """The file."""
    return json.dumps(bill(), indent=1) + "\n"


if __name__ == "__main__":
    SBOM.write_text(text(), encoding="utf-8")
    print(f"{SBOM.name}: {len(bill()['components'])} packages")
