"""A switch changes a figure or is said to change none."""

from __future__ import annotations

import json

import pytest
from cli.runs import run
from napkinmath.answers.figures import Verdict
from napkinmath.answers.idle import SWITCHES
from napkinmath.config.train_config import TrainConfig
from napkinmath.estimate import Estimate, estimate
from napkinmath.inputs.jobs import priced
from napkinmath.report.words import margin

TINY = {"arch": "L4 h64 a4 kv2 f128 v256", "ctx": 64}
EIGHT = {"gpus": "8xH100"}
FSDP1 = {**EIGHT, "data_parallel": "fsdp1"}
LORA = {"method": "lora", "gpu": "H100"}
# options that set a switch, and its flag
GIVEN = [
    (EIGHT | {"forward_prefetch": True}, "--forward-prefetch"),
    (FSDP1 | {"forward_prefetch": True}, "--forward-prefetch"),
    (FSDP1 | {"limit_all_gathers": False}, "--no-limit-all-gathers"),
    (FSDP1 | {"backward_prefetch": False}, "--no-backward-prefetch"),
    (EIGHT | {"data_parallel": "fsdp2", "backward_prefetch": False}, "--no-backward-prefetch"),
    (LORA | {"offload": "activations", "prefetch": 3}, "--prefetch"),
    (LORA | {"offload": "parameters", "prefetch": 3}, "--prefetch"),
    (LORA | {"offload": "parameters", "prefetch": 0}, "--prefetch"),
    ({"compile": True}, "--compile"),
    ({"compile": True, "arch": "L2 h64 a4 f128 v100 gelu learned-pos"}, "--compile"),
]
PLAIN = {
    "forward_prefetch": False,
    "limit_all_gathers": True,
    "backward_prefetch": True,
    "prefetch": 1,
    "compile": False,
}


def of(options: dict[str, object]) -> Estimate:
    (found,) = priced({**TINY, **options}, [])
    return found


def seconds(e: Estimate) -> float | None:
    return e.time.seconds if e.time is not None else None


@pytest.mark.parametrize(("options", "flag"), GIVEN, ids=str)
def test_a_switch_that_changes_nothing_says_so(options: dict[str, object], flag: str) -> None:
    e = of(options)
    plain = of({**options, **{k: v for k, v in PLAIN.items() if k in options}})
    same = e.peak.nbytes == plain.peak.nbytes and seconds(e) == seconds(plain)
    said = [f.text for f in e.findings if f.text.startswith(f"{flag} changes no figure")]
    assert len(said) == same
    assert not [f for f in plain.findings if "changes no figure" in f.text]


def test_both_happen() -> None:
    told = [
        any("changes no figure" in f.text for f in of(options).findings) for options, _ in GIVEN
    ]
    assert any(told) and not all(told)


def test_defaults_are_those_of_a_configuration() -> None:
    config = TrainConfig()
    assert all(switch.value(config) == switch.default for switch in SWITCHES)
    assert all(switch.reset(config) == config for switch in SWITCHES)


@pytest.mark.parametrize("options", [EIGHT, {"gpu": "H100"}], ids=["eight GPUs", "one GPU"])
@pytest.mark.parametrize("size", ["1MiB", "1TiB"])
def test_a_machine_with_too_little_memory_is_a_finding(
    options: dict[str, object], size: str
) -> None:
    e = of({**options, "offload": "optimizer", "host_ram": size})
    found = [f for f in e.findings if "a machine's memory is too small" in f.text]
    assert len(found) == (size == "1MiB")
    assert (e.verdict is Verdict.DOES_NOT_FIT) is (size == "1MiB")
    assert any(fit.verdict is Verdict.FITS for fit in e.fits_on) is (size == "1TiB")
    assert e.priced_verdict is Verdict.FITS  # the GPU takes it either way
    if found:
        assert found[0].nbytes == e.host_memory.needed - (1 << 20)
        assert "too much for 1.00 MiB of host memory" in margin(e)[0]


@pytest.mark.parametrize(
    ("run", "said"),
    [
        ({"epochs": 3}, True),
        ({"epochs": 3, "samples": 10}, False),
        ({"epochs": 1}, False),
        ({}, False),
    ],
)
def test_epochs_of_no_samples_are_said_to_say_nothing(run: dict[str, object], said: bool) -> None:
    texts = [f.text for f in estimate("gpt2", ctx=64, **run).findings]
    assert any("--epochs says nothing" in text for text in texts) is said


def test_findings_of_idle_switches_and_hosts_are_in_json_and_in_the_report() -> None:
    words = ("--arch", TINY["arch"], "--ctx", "64", "--gpus", "8xH100", "--data-parallel", "fsdp1")
    asked = (*map(str, words), "--forward-prefetch", "--host-ram", "1MiB")
    texts = [f["text"] for f in json.loads(run(*asked, "--json").out)["findings"]]
    assert any("--forward-prefetch" in t for t in texts) and any("too small" in t for t in texts)
    shown = " ".join(run(*asked).out.split())
    assert "--forward-prefetch changes no figure" in shown and "TOO LITTLE" in shown


def test_json_marks_the_gpus_that_the_report_marks() -> None:
    document = json.loads(run("--arch", str(TINY["arch"]), "--ctx", "64", "--json").out)
    marked = {row["gpu"] for row in document["fits_on"] if row["no_bf16"]}
    assert {"T4"} <= marked and "A100-SXM4-80GB" not in marked
    half = json.loads(run("--arch", str(TINY["arch"]), "--precision", "fp16", "--json").out)
    assert not any(row["no_bf16"] for row in half["fits_on"])


def test_a_plain_step_compares_nothing() -> None:
    e = estimate("gpt2", TrainConfig(sequence_length=64))
    assert not [f for f in e.findings if "changes no figure" in f.text]
