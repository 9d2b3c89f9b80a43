"""Published tables as other people write them: cells in other words, columns missing or unknown,
and nothing that crashes."""

from __future__ import annotations

import csv
import json
import pathlib
import subprocess
import sys
from typing import Any

import held_out_library
import pytest
from napkinmath import estimate
from napkinmath.config.train_config import AdapterConfig, AdapterKind, Precision, RecomputeKind
from published import tools
from published.doubts import DOUBTS
from published.identify import gpu_memory, hardware_of, model_of, slower_form
from published.rows import Row, Unreadable, read_rows, read_span
from published.run import run_tables
from published.sources import era_of
from published.statistics import percentile
from published.targets import Linears, adapter_targets
from published.understand import Job, understand

GIB = 1 << 30
BASE = {
    "row_id": "x",
    "source": "someone/tables: README",
    "model": "Llama-2-7B",
    "gpu": "A100-SXM4",
    "gpu_mem_gb": "80",
    "n_gpus": "1",
    "method": "lora",
    "lora_rank": "8",
    "lora_targets": "q_proj,v_proj",
    "precision": "bf16",
    "optimizer": "AdamW",
    "seq_len": "2048",
    "micro_batch": "1",
    "grad_accum": "8",
    "checkpointing": "full",
    "attention": "flash2",
    "packed": "yes",
    "status": "ok",
    "mem_unit": "GiB",
    "measured_peak_alloc_gb": "20",
}


def row(**cells: str) -> Row:
    return Row({**BASE, **cells})


def job(**cells: str) -> Job:
    return understand(row(**cells), blind=True)


def adapter(**cells: str) -> AdapterConfig:
    found = job(**cells).config.adapter
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [
        ("512-1024", 512, 1024),
        ("30 to 32 GB", 30, 32),
        ("24.1\u201326", 24.1, 26),
        ("~12.3 GiB", 12.3, 12.3),
        ("4k", 4096, 4096),
        ("4,096", 4096, 4096),
        ("1 234", 1234, 1234),
        ("12,5 GB", 12.5, 12.5),
        ("bs=4", 4, 4),
        ("r16", 16, 16),
        ("1 x A100", 1, 1),
        ("up to 4096", 4096, 4096),
        ("20GB-24GB", 20, 24),
        ("14.2 GB (14.9 peak)", 14.2, 14.2),
        ("one", 1, 1),
        ("1.5k", 1500, 1500),
        ("2.5e-3", 0.0025, 0.0025),
    ],
)
def test_numbers_and_spans(text: str, low: float, high: float) -> None:
    assert read_span(text) == (low, high)


@pytest.mark.parametrize("text", ["abc", "auto", "\u00bd"])
def test_what_is_no_number_is_said(text: str) -> None:
    with pytest.raises(ValueError):
        read_span(text)
    with pytest.raises(Unreadable, match="seq_len"):
        understand(row(seq_len=text))


def test_a_span_is_a_sizes_end_and_a_measurements_middle() -> None:
    spans = row(seq_len="512-1024", measured_peak_alloc_gb="19-21")
    assert spans.whole("seq_len") == 1024
    assert dict(spans.measured()) == {"allocated": 20.0}


@pytest.mark.parametrize(
    ("cell", "unit", "wanted"),
    [
        ("20480 MiB", "GiB", 20 * GIB),
        ("20480", "", 20 * GIB),
        ("about 20GB", "GiB", 20e9),
        ("20", "gib", 20 * GIB),
        ("20", "GB (10^9)", 20e9),
        ("20", "", 20e9),
        ("20480", "MiB", 20 * GIB),
        ("20,5", "GB", 20.5e9),
    ],
)
def test_units_of_cells_and_columns(cell: str, unit: str, wanted: float) -> None:
    found = row(measured_peak_alloc_gb=cell, mem_unit=unit)
    ((_, value),) = found.measured()
    assert value * found.bytes_per_unit == pytest.approx(wanted)


@pytest.mark.parametrize(
    "empty", ["", "-", "n/a", "N/A", "none", "?", "unknown", "not reported", "\u2014", "nan"]
)
def test_empty_cells_are_empty(empty: str) -> None:
    assert row(seq_len=empty).number("seq_len") is None
    assert not row(lora_rank=empty).states("lora_rank")
    assert job(lora_rank=empty, grad_accum=empty, offload=empty, compile=empty).assumed.keys() >= {
        "rank"
    }


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Llama 3.1 8B Instruct", "llama-3.1-8b"),
        ("unsloth/mistral-7b-v0.3-bnb-4bit", "mistral-7b-v0.3"),
        ("TheBloke/Llama-2-7B-GPTQ", "llama-2-7b"),
        ("GPT-2 (124M)", "gpt2"),
        ("vicuna 13b v1.5", "llama-2-13b"),
        ("Hermes-2-Pro-Mistral-7B", "hermes-2-pro-mistral-7b"),
        ("Llama-3-8B-Instruct-Gradient", "llama-3-8b"),
        ("Qwen1.5-14B-Chat", "qwen1.5-14b"),
        ("gemma-7b-it", "gemma-7b"),
    ],
)
def test_models_however_they_are_spelled(written: str, name: str) -> None:
    assert job(model=written).spec.name == name


@pytest.mark.parametrize(
    ("source", "notes", "tool"),
    [
        ("unslothai/unsloth: README.md", "LLaMA-Factory; packed", "LLaMA-Factory"),
        ("unslothai/unsloth: README.md [LLaMA-Factory, a comparison]", "", "LLaMA-Factory"),
        ("unslothai/unsloth: README.md", "faster than LLaMA-Factory", "unsloth"),
        ("NVIDIA-NeMo/Automodel: docs/performance.mdx", "NeMo AutoModel; TE", "AutoModel"),
    ],
)
def test_the_tool_that_a_row_opens_with_ran(source: str, notes: str, tool: str) -> None:
    assert job(source=source, notes=notes).era.name.startswith(f"{tool} of")


def test_apex_is_read_beside_a_plain_loop() -> None:
    """The words of the loop won over those of the precision, and bf16's autocast was priced."""
    found = job(precision="fp16 (apex O2)", method="full", notes="own loop in plain PyTorch")
    assert found.era.stack == "apex-o2"


@pytest.mark.parametrize(
    ("source", "notes", "stack"),
    [
        ("someone/course: README.md", "Megatron-Bridge recipe", "megatron"),
        ("NVIDIA-NeMo/Megatron-Bridge: docs/performance-summary.md", "", "nemo"),
    ],
)
def test_a_recipe_of_megatron_bridge_sums_in_fp32(source: str, notes: str, stack: str) -> None:
    assert job(source=source, notes=notes, method="full").era.stack.startswith(stack)


@pytest.mark.parametrize(
    ("gpu", "watts", "is_doubted"),
    [("H100 SXM 500W", 500, False), ("B200 (power limited)", 0, True), ("H100 SXM", 0, False)],
)
def test_watts_of_a_gpu_cell(gpu: str, watts: float, is_doubted: bool) -> None:
    found = job(gpu=gpu)
    assert found.hardware.gpu.power_limit_w == watts
    assert ("power" in found.assumed) == is_doubted


@pytest.mark.parametrize(
    ("gpu", "is_doubted"),
    [
        ("H100", True),
        ("A100 (80GB)", True),
        ("H100 SXM", False),
        ("H100 500W", False),
        ("L4", False),
    ],
)
def test_a_name_that_slower_cards_have_too_is_doubted(gpu: str, is_doubted: bool) -> None:
    found = job(gpu=gpu)
    assert ("form" in found.assumed) == is_doubted
    # H100 PCIe has half the watts of the SXM card, whose clock follows by the exponent 0.55, and 2.0
    # of its 3.35 TB/s
    assert slower_form(job(gpu="H100").hardware.gpu) == pytest.approx(3.352 / 2.039 - 1, abs=0.01)
    # an A100 whose memory nobody names may have 40 GB, of 1.56 instead of 2.04 TB/s
    a100 = job(gpu="A100").hardware.gpu
    assert slower_form(a100, any_memory=True) == pytest.approx(2.039 / 1.555 - 1, abs=0.01)


@pytest.mark.parametrize(
    ("notes", "guess"),
    [("nothing is said", "library"), ("torchtune 0.4 recipes", "version"), ("nanoGPT", "version")],
)
def test_a_source_never_looked_into_is_doubted_by_what_it_names(notes: str, guess: str) -> None:
    """One that names no library has the wider range; one that was looked into has neither doubt."""
    found = job(notes=notes).assumed
    assert {"library", "version"} & set(found) == {guess}
    assert DOUBTS["library"][0] > DOUBTS["version"][0]
    assert (job(notes=notes).era.guess == "library") == (guess == "library")
    known = understand(row(source="pytorch/torchtune: README")).assumed
    assert not {"library", "version"} & set(known)


def test_the_name_of_a_library_can_be_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "TOOLS", tools.TOOLS)  # put back afterwards
    held_out_library.forget_libraries()
    assert "library" in job(notes="torchtune 0.4 recipes").assumed


@pytest.mark.parametrize(
    ("notes", "packed", "is_doubted"),
    [
        ("1024 is the cap of lengths", "no", True),
        ("samples truncated at 512", "", True),
        ("1024 is the cap of lengths", "yes", False),
        ("full sequences", "no", False),
    ],
)
def test_a_cap_of_lengths_is_no_length(notes: str, packed: str, is_doubted: bool) -> None:
    assert ("cap" in job(notes=notes, packed=packed, seq_len="512").assumed) == is_doubted


@pytest.mark.parametrize("name", ["MoE-7B-A1B shared experts", "someone-8x3b", "new-30b-a3b"])
def test_a_mixture_of_unknown_sizes_is_no_dense_model(name: str) -> None:
    with pytest.raises(Unreadable, match="mixture of experts whose sizes"):
        job(model=name, params_b="7")
    known = job(model=name, params_b="7", arch="mixtral L8 h512 a8 kv8 ffn1024 moe8x2 V32000")
    assert dict(known.spec.symbols)["e"] == 8


def test_experts_may_spread_over_tensor_ranks() -> None:
    cells = {"model": "Moonlight-16B-A3B", "n_gpus": "8", "method": "full", "micro_batch": "1"}
    found = job(**cells, sharding="tp2 pp1 cp1 ep8 dp4").config.parallel
    assert (found.expert_parallel_size, found.expert_tensor_ranks) == (8, 1)
    assert job(**cells, sharding="tp2 ep4 dp4").config.parallel.expert_tensor_ranks == 2
    assert job(**cells, sharding="tp2 ep2 etp4 dp4").config.parallel.expert_tensor_ranks == 4


def test_a_model_of_known_size_alone_is_a_typical_decoder() -> None:
    found = job(model="Nous-Hermes-13b")
    assert (
        dict(found.spec.symbols)["h"] == 5120
        and 12.5e9 < estimate(found.spec, sequence_length=64).num_parameters < 13.5e9
    )
    assert "model" in found.assumed
    assert dict(job(model="a-model-nobody-knows", params_b="6.74").spec.symbols)["h"] == 4096
    with pytest.raises(Unreadable, match="a-model-nobody-knows"):
        job(model="a-model-nobody-knows")


@pytest.mark.parametrize(
    ("written", "name", "gib"),
    [
        ("a100 80g", "A100-SXM4-80GB", 80),
        ("1 x A100 (40G)", "A100-SXM4-40GB", 40),
        ("RTX4090 24G", "RTX 4090", 24),
        ("Tesla T4 (Colab)", "T4", 16),
        ("g5.xlarge", "A10G", 24),
        ("AWS p4d", "A100-SXM4-40GB", 40),
        ("RTX 3080 Ti Laptop 16GB", "RTX 3080 Ti Laptop", 16),
        ("8xH100 80GB", "H100-SXM5-80GB", 80),
    ],
)
def test_gpus_however_they_are_spelled(written: str, name: str, gib: int) -> None:
    given = row(gpu=written, gpu_mem_gb="")
    found = hardware_of(given, era_of(given, blind=True), {})
    assert found.gpu.name == name
    assert 0.85 * gib * GIB < found.memory_bytes <= gib * GIB


def test_an_unknown_gpu_is_its_memory_or_none_at_all() -> None:
    assumed: dict[str, str] = {}
    given = row(gpu="Gaudi2", gpu_mem_gb="96 GB")
    assert hardware_of(given, era_of(given, blind=True), assumed).memory_bytes == 96 * GIB
    assert "gpu" in assumed
    assert gpu_memory(row(gpu="TPU v4", gpu_mem_gb="")) is None
    assert gpu_memory(row(gpu="A10G", gpu_mem_gb="n/a")) is None
    assert gpu_memory(row(gpu_mem_gb="81920")) == 80


@pytest.mark.parametrize(
    ("method", "kind", "rank"),
    [
        ("LoRA", AdapterKind.LORA, 8),
        ("Q-LoRA (4bit)", AdapterKind.LORA, 8),
        ("QDoRA", AdapterKind.DORA, 8),
        ("(IA)^3", AdapterKind.IA3, None),
        ("AdaLoRA", AdapterKind.LORA, 8),
        ("VeRA", AdapterKind.LORA, 1),
        ("LoHa", AdapterKind.LORA, 8),
        ("adapter", AdapterKind.LORA, 1),
        ("adapter_v2", AdapterKind.LORA, 8),
        ("prompt_tuning", AdapterKind.PROMPT, None),
        ("p-tuning v2", AdapterKind.PROMPT, None),
        ("", AdapterKind.LORA, 8),
    ],
)
def test_methods_of_adapters(method: str, kind: AdapterKind, rank: int | None) -> None:
    found = adapter(method=method)
    assert found.kind is kind
    assert rank is None or found.rank == rank


def test_ranks_and_virtual_tokens_stand_where_they_stand() -> None:
    assert adapter(method="lora r=16", lora_rank="").rank == 16
    assert adapter(lora_rank="rank 32").rank == 32
    assert adapter(method="QLoRA, lora_r 32", lora_rank="").rank == 32
    assert adapter(method="prompt tuning", notes="num_virtual_tokens 200").num_virtual_tokens == 200
    prefixed = job(method="prefix tuning").config
    assert prefixed.recompute.kind is RecomputeKind.NONE  # PEFT refuses both


def test_targets_named_in_the_method_are_read() -> None:
    named = job(method="LoRA (r=8) q_proj,v_proj", lora_targets="")
    assert named.config.adapter is not None and set(named.config.adapter.targets) == {
        "q_proj",
        "v_proj",
    }
    assert "targets" not in named.assumed


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ({"method": "qlora"}, RecomputeKind.FULL),
        ({"method": "lora"}, RecomputeKind.NONE),
        ({"method": "qlora", "source": "Lightning-AI/litgpt: table"}, RecomputeKind.NONE),
        ({"source": "unslothai/unsloth: README"}, RecomputeKind.FULL),
        ({"source": "hiyouga/LLaMA-Factory: README"}, RecomputeKind.FULL),
        ({"method": "qlora", "checkpointing": "off"}, RecomputeKind.NONE),
        ({"checkpointing": "selective every 2nd layer"}, RecomputeKind.INTERLEAVED),
        ({"checkpointing": "selective layer"}, RecomputeKind.INTERLEAVED),
        ({"checkpointing": "selective layernorm, moe_act"}, RecomputeKind.SELECTIVE),
    ],
)
def test_checkpointing_that_a_table_leaves_out_is_what_the_tool_does(
    cells: dict[str, str], kind: RecomputeKind
) -> None:
    assert job(**{"checkpointing": "", **cells}).config.recompute.kind is kind


def test_dequantized_weights_and_other_vendors() -> None:
    assert job(method="lora", precision="MXFP4 dequantized to bf16").config.quantization is None
    assert (
        job(gpu="MI250X", gpu_mem_gb="", precision="").config.precision is Precision.BF16_AUTOCAST
    )


def test_tokens_that_a_tool_adds_lengthen_the_vocabulary() -> None:
    fms = {
        "source": "foundation-model-stack/fms-acceleration: refs/a100_80gb.csv",
        "notes": "framework_config none",
    }
    for model, rows in (
        ("Mistral-7B-v0.1", 32001),
        ("Meta-Llama-3-8B", 128258),
        ("Llama-2-70B-GPTQ", 32001),
    ):
        found = job(model=model, **fms)
        assert dict(found.spec.symbols)["v"] == rows
        assert dict(job(model=model).spec.symbols)["v"] < rows


@pytest.mark.parametrize(
    "method", ["full", "Full FT", "SFT (full)", "pretraining", "fine-tune", "galore 8bit"]
)
def test_methods_of_full_training(method: str) -> None:
    assert job(method=method).config.adapter is None


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("16-true", Precision.FP16),
        ("bf16-true", Precision.BF16),
        ("O2", Precision.BF16_AUTOCAST),
        ("float16", Precision.FP16_AUTOCAST),
        ("32", Precision.FP32),
        ("FP8 (E4M3)", Precision.FP8),
        ("TF32 (fp32 weights)", Precision.TF32),
        ("TF32 and bf16 autocast", Precision.BF16_AUTOCAST),
    ],
)
def test_precisions(text: str, wanted: Precision) -> None:
    assert job(precision=text).config.precision is wanted


@pytest.mark.parametrize(
    ("text", "wanted", "assumed"),
    [
        ("paged_adamw_32bit", "paged-adamw", False),
        ("adamw_bnb_8bit", "adamw-8bit", False),
        ("SGD momentum 0.9", "momentum", False),
        ("GaLore AdamW", "galore", False),
        ("AnyPrecisionAdamW", "anyprecision-adamw", False),
        ("adamw_apex_fused", "adamw-fused", True),
        ("Sophia", "auto", True),
        ("not stated", "auto", False),
        ("adamw_torch_fused", "adamw-fused", False),
    ],
)
def test_optimizers(text: str, wanted: str, assumed: bool) -> None:
    found = job(optimizer=text)
    assert found.config.optimizer == wanted
    assert any("optimizer" in kind for kind in found.assumed) is assumed


def test_offloads() -> None:
    assert job(method="full", offload="ZeRO-Offload").config.offload.optimizer
    assert job(method="full", optimizer="DeepSpeedCPUAdam").config.offload.optimizer
    assert job(
        method="full", offload="weights"
    ).config.offload.optimizer  # updated where they are kept
    assert not job(method="lora", offload="weights").config.offload.optimizer
    # stage 3 keeps the optimizer on the GPU unless it is named; stage 2 reads no offload_param
    stages = {
        stage: job(method="full", offload="parameters to cpu", sharding=stage, n_gpus="8").config
        for stage in ("zero3", "zero2", "fsdp full_shard")
    }
    kept = {s: (c.offload.parameters, c.offload.optimizer) for s, c in stages.items()}
    assert kept == {
        "zero3": (True, False),
        "zero2": (False, True),
        "fsdp full_shard": (True, True),
    }
    assert job(checkpointing="unsloth").config.offload.checkpoints
    partly = job(method="full", offload="10%")
    assert partly.config.offload.optimizer and "offload" in partly.assumed


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("qv", {"q_proj", "v_proj"}),
        ("['q_proj', 'v_proj']", {"q_proj", "v_proj"}),
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ("mlp", {"gate_proj", "up_proj", "down_proj"}),
        ("W_pack", {"q_proj", "k_proj", "v_proj"}),
        ("every linear layer", {"all-linear"}),
    ],
)
def test_targets(text: str, wanted: set[str]) -> None:
    spec, _ = model_of(row(), era_of(row(), blind=True), {})
    assert set(adapter_targets(text, Linears(spec), spec.family)) == wanted
    assert "targets" in job(lora_targets="something else").assumed


def write(path: pathlib.Path, rows: list[dict[str, str]], *, delimiter: str = ",") -> pathlib.Path:
    columns = list(dict.fromkeys(column for cells in rows for column in cells))
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns, delimiter=delimiter)
        table.writeheader()
        table.writerows(rows)
    return path


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_tables_of_other_shapes_are_read(tmp_path: pathlib.Path, delimiter: str) -> None:
    cells: dict[str, str] = {
        k.replace("_", " ").title(): v for k, v in BASE.items() if k != "row_id"
    }
    path = write(
        tmp_path / "t.csv",
        [{"Extra column": "1", **cells, "another": "two\nlines"}],
        delimiter=delimiter,
    )
    (found,) = read_rows(path)
    assert (found.row_id, found["seq_len"], found["lora_targets"]) == (
        "t.csv:2",
        "2048",
        "q_proj,v_proj",
    )


def test_damaged_tables_lose_no_rows(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(
        b"\xef\xbb\xbfrow_id,model,seq_len\na,\xff\xfe7B\0,2048,extra,cells\nb\n\n,,\n"
    )
    assert [r.row_id for r in read_rows(path)] == ["a", "b"]
    path.write_bytes(b"")
    assert read_rows(path) == []


ODD: list[dict[str, str]] = [
    {"model": ""},
    {"seq_len": "auto"},
    {"micro_batch": "-3"},
    {"n_gpus": "many"},
    {"method": "LISA"},
    {"model": "x" * 500},
    {"seq_len": "1e400"},
    {"arch": "L? h? a?", "model": "??"},
    {"gpu": "abacus"},
    {"measured_peak_alloc_gb": "lots"},
    {"lora_rank": "0"},
    {"seq_len": "9" * 30},
    {"status": "\u2620"},
]


def test_every_row_is_priced_or_listed_with_its_reason(tmp_path: pathlib.Path) -> None:
    rows = [{**BASE, **odd, "row_id": f"odd{i}"} for i, odd in enumerate(ODD)]
    path = write(tmp_path / "memory.csv", rows)
    results = run_tables(path, None, blind=True)
    document: dict[str, Any] = json.loads(json.dumps(results.as_json()))
    priced, skipped = {i for i, _ in results.understood}, {s["row_id"] for s in document["skipped"]}
    assert priced | skipped == {r["row_id"] for r in rows} and not priced & skipped
    assert all(len(s["reason"]) > 10 for s in document["skipped"])
    assert set(document) == {"rows", "verdicts", "skipped"}
    assert all(
        set(r) >= {"row_id", "quantity", "predicted", "measured", "unit"} for r in document["rows"]
    )


def test_percentiles_interpolate() -> None:
    assert percentile([1, 2, 3, 4, 5], 0.9) == pytest.approx(4.6)


@pytest.mark.slow
def test_the_command_writes_json_and_a_table_of_predictions(tmp_path: pathlib.Path) -> None:
    path = write(
        tmp_path / "memory.csv",
        [
            BASE,
            {
                **BASE,
                "row_id": "y",
                "measured_peak_alloc_gb": "",
                "measured_unspecified_gb": "17 GB",
            },
        ],
    )
    script = pathlib.Path(__file__).parents[2] / "benchmarks" / "accuracy" / "published.py"
    ran = subprocess.run(
        [
            sys.executable,
            str(script),
            "--memory",
            str(path),
            "--throughput",
            str(path),
            "--json",
            "--csv",
            str(tmp_path / "out.csv"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    document = json.loads(ran.stdout)
    assert [(r["row_id"], r["quantity"]) for r in document["rows"]] == [
        ("x", "allocated"),
        ("y", "device"),
    ]
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert [(line["row_id"], line["quantity"]) for line in lines] == [
        ("x", "allocated"),
        ("y", "device"),
    ]
    assert all(
        float(line["low"]) <= float(line["predicted"]) <= float(line["high"]) for line in lines
    )
    missing = subprocess.run(
        [sys.executable, str(script), "--memory", str(tmp_path / "none.csv")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert missing.returncode == 2 and missing.stderr.count("\n") == 1
