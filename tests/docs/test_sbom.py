"""The bill of materials is what constraints.txt, the Makefile and pyproject.toml say, and names
packages by package URL only."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "estimator").is_dir()
)
tomllib = pytest.importorskip("tomllib")
sys.path.insert(0, str(ROOT / "docs"))

import generate_sbom as sbom  # noqa: E402

FOUND = json.loads(sbom.SBOM.read_text(encoding="utf-8"))
BY_NAME = {component["name"]: component for component in FOUND["components"]}
PURL = re.compile(r"pkg:pypi/[a-z0-9-]+@[0-9A-Za-z.%+!-]+")


def test_the_file_is_up_to_date() -> None:
    said = "run python docs/generate_sbom.py"
    assert sbom.SBOM.read_text(encoding="utf-8") == sbom.text(), said


def test_every_pin_is_in_it_once() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("==")[0] for line in lines if line and not line.startswith("#")}
    assert {sbom.plain(name) for name in pins} | {"torch"} == set(BY_NAME)
    assert len(FOUND["components"]) == len(pins) + 1
    assert [name for name, found in BY_NAME.items() if "hashes" not in found] == ["torch"]
    for line in lines:
        if not line.startswith("#"):
            name, version, digest = re.split(r"==| --hash=sha256:", line)
            found = BY_NAME[sbom.plain(name)]
            assert (found["version"], found["hashes"][0]["content"]) == (version, digest)


def test_what_the_light_installation_takes_is_required() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    required = {name for name, found in BY_NAME.items() if found["scope"] == "required"}
    today = [each for each in project["dependencies"] if "python_version <" not in each]
    assert required == {sbom.plain(each) for each in today}  # an older Python takes more


def test_packages_are_named_by_package_url_only() -> None:
    text = sbom.SBOM.read_text(encoding="utf-8")
    assert "://" not in text
    own = FOUND["metadata"]["component"]
    for component in [own, *FOUND["components"]]:
        assert PURL.fullmatch(component["purl"]) and component["bom-ref"] == component["purl"]
    references = {component["bom-ref"] for component in FOUND["components"]}
    (root,) = FOUND["dependencies"]
    assert root["ref"] == own["bom-ref"] and set(root["dependsOn"]) <= references
    assert (FOUND["bomFormat"], FOUND["specVersion"]) == ("CycloneDX", "1.6")
