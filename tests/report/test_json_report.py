"""--json: valid against its schema, the same figures as the estimate's, documented."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from napkinmath.ir.ledger import Phase, Role
from napkinmath.report.json_report import SCHEMA_VERSION, to_json
from priced import CONFIGS, priced, tiny

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = ROOT / "estimator" / "napkinmath" / "report" / "schema" / f"estimate-{SCHEMA_VERSION}.json"


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json.loads(SCHEMA.read_text(encoding="utf-8"))


def strict(part: Any) -> Any:
    """The schema refusing keys it does not list: readers must bear added keys, our own output must
    have none undocumented."""
    if isinstance(part, list):
        return [strict(item) for item in part]
    if not isinstance(part, dict):
        return part
    closed = {name: strict(item) for name, item in part.items()}
    return (
        {"additionalProperties": False, **closed}
        if "object" in part.get("type", ()) and "properties" in part
        else closed
    )


def validate(document: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.validators.Draft202012Validator(strict(schema)).validate(document)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("gpu", ["RTX 4090", "MI300X", None])
def test_every_estimate_is_valid(name: str, gpu: str | None, schema: dict[str, Any]) -> None:
    validate(json.loads(to_json(priced(name, gpu))), schema)


def test_the_schema_is_one_and_refuses_what_it_does_not_know(schema: dict[str, Any]) -> None:
    jsonschema.validators.Draft202012Validator.check_schema(schema)
    document = json.loads(to_json(priced("lora")))
    for broken in (
        {**document, "schema": 1},
        {**document, "new": 1},
        {k: v for k, v in document.items() if k != "peak"},
    ):
        with pytest.raises(jsonschema.ValidationError):
            validate(broken, schema)


def test_the_schema_knows_every_role_and_phase(schema: dict[str, Any]) -> None:
    assert schema["$defs"]["role"]["enum"] == [role.value for role in Role]
    assert schema["$defs"]["phase"]["enum"] == [phase.value for phase in Phase]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_figures_are_the_estimates_and_sum(name: str) -> None:
    e = priced(name)
    document = json.loads(to_json(e))
    assert (
        sum(row["nbytes"] for row in document["components"])
        == document["memory"]["device"]["value"]
    )
    assert (
        document["peak"]["nbytes"]
        == document["memory"]["requested"]
        == e.peak.nbytes
        == max(document["step_curve"]["nbytes"])
    )
    assert [point["nbytes"] for point in document["phase_peaks"]] == sorted(
        (p.nbytes for p in e.phase_peaks.values()), reverse=True
    )
    assert e.time is not None
    assert document["time"]["tokens_per_s"] == e.time.tokens_per_s
    assert document["exit_code"] == e.verdict.exit_code
    assert len(document["fits_on"]) == len(e.fits_on) >= 50
    assert document["step_curve"]["phases"][-1]["end"] == pytest.approx(
        document["step_curve"]["extent"]
    )


@pytest.mark.slow
def test_keys_keep_their_order_and_the_text_its_form(schema: dict[str, Any]) -> None:
    text = to_json(priced("qlora"))
    assert list(json.loads(text)) == list(schema["properties"])
    assert text == to_json(priced("qlora"))
    assert text.isascii()
    assert len(text.splitlines()) == len(schema["properties"]) + 2


def test_any_name_survives() -> None:
    name = 'a"b\\c\n\x00\ud800\u2028é'
    assert json.loads(to_json(tiny(name)))["model"]["name"] == name


def test_the_page_is_made_from_the_schema(schema: dict[str, Any]) -> None:
    spec = importlib.util.spec_from_file_location(
        "generate_json_schema", ROOT / "docs" / "generate_json_schema.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = (ROOT / "docs" / "json_schema.md").read_text(encoding="utf-8")
    assert page == module.page(schema), "run python docs/generate_json_schema.py"
    for key in schema["properties"]:
        assert f"| `{key}` |" in page
