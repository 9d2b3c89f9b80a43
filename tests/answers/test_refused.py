"""Runs that a library refuses: a finding says so, and the trace of the same run is refused."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from agreement.tiny_configs import TINY
from napkinmath import estimate

CLASSIFIER = ["ItsForSequenceClassification"]
REFUSED = [
    ("llama", {"architectures": CLASSIFIER}, {"bs": 2}, "pad_token_id"),
    ("bert", {"architectures": CLASSIFIER}, {"method": "qlora"}, "--keep-modules classifier"),
    ("distilbert", {"architectures": CLASSIFIER}, {"method": "lora"}, "pre_classifier"),
    ("mixtral", {}, {"method": "lora", "dropout": 0.1}, "dropout on the parameters of experts"),
    ("llama4_text", {}, {"method": "lora"}, "Llama 4's routers"),
]


def findings_of(family: str, changed: dict[str, object], options: dict[str, object]) -> str:
    """The text of all findings."""
    found = estimate({**TINY[family], **changed}, ctx=64, **options).findings
    return " ".join(finding.text for finding in found)


@pytest.mark.parametrize(("family", "changed", "options", "said"), REFUSED)
def test_a_refused_run_is_a_finding(
    family: str, changed: dict[str, object], options: dict[str, object], said: str
) -> None:
    assert said in findings_of(family, changed, options)


@pytest.mark.parametrize(
    ("family", "changed", "options", "said"),
    [
        ("llama", {"architectures": CLASSIFIER}, {"bs": 1}, "pad_token_id"),
        ("llama", {"architectures": CLASSIFIER, "pad_token_id": 0}, {"bs": 2}, "pad_token_id"),
        (
            "bert",
            {"architectures": CLASSIFIER},
            {"method": "qlora", "keep_modules": "classifier"},
            "--keep-modules",
        ),
        (
            "distilbert",
            {"architectures": CLASSIFIER},
            {"method": "lora", "targets": "q_lin"},
            "pre",
        ),
        ("mixtral", {}, {"method": "lora", "dropout": 0.1, "targets": "q_proj"}, "experts"),
        ("llama4_text", {}, {"method": "lora", "targets": "q_proj"}, "routers"),
    ],
)
def test_the_way_out_ends_it(
    family: str, changed: dict[str, object], options: dict[str, object], said: str
) -> None:
    assert said not in findings_of(family, changed, options)


@pytest.mark.torch
@pytest.mark.parametrize(("family", "changed", "options", "said"), REFUSED)
def test_the_trace_says_who_refuses(
    family: str, changed: dict[str, object], options: dict[str, object], said: str
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("peft")
    from napkinmath_profiler.cli.trace import traced_timeline
    from napkinmath_profiler.tracing.trace_errors import TraceError

    config = {**TINY[family], **changed}
    with pytest.raises(TraceError, match=r"(transformers|peft|bitsandbytes)/.*\.py:\d+"):
        traced_timeline({"config": config, "ctx": 64, **options})
