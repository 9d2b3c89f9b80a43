"""No key of another tool's file falls away in silence: each is priced, without effect, not priced
or unknown, and what is not priced leaves the answer open."""

from __future__ import annotations

import csv
import io
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cli.runs import run
from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import Difference, JobKeys, KeyUse
from napkinmath.config.train_config import AUTO_TILES
from napkinmath.config.zero_config import ZeroConfig
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.job_file import _KINDS, read_job, with_job_file
from napkinmath.inputs.jobs import priced
from napkinmath.inputs.known_keys import FOLDER, KnownKeys
from napkinmath.inputs.option_table import BY_KEY

LISTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "option_lists.json").read_text(encoding="utf-8")
)["tools"]
MODULES = {module.rpartition(".")[2]: module for module, _ in _KINDS.values()}
MODULES["megatron_deepspeed"] = MODULES["megatron"]  # Megatron-LM's, with a table of its own
GIVEN = (True, 2, "name", {"name": 1}, ["name"])
TABLES = sorted(path.stem for path in Path(FOLDER).glob("*.json"))


def keys_of(tool: str, content: dict[str, object]) -> JobKeys:
    read = __import__(MODULES[tool], fromlist=["read"]).read
    found = read(ForeignJob(tool, content, [], keys=tool))["job_keys"]
    assert isinstance(found, JobKeys)
    return found


def set_at(content: dict[str, Any], name: str, value: object) -> dict[str, Any]:
    """The content with a dotted key set."""
    first, _, rest = name.partition(".")
    if not rest:
        return {**content, first: value}
    inner = content.get(first)
    return {**content, first: set_at(inner if isinstance(inner, dict) else {}, rest, value)}


def uses_of(found: JobKeys, name: str) -> set[KeyUse]:
    """What a key is, or the section that holds it; a section whose keys are told one by one is
    read."""
    exact = {key.use for key in found.keys if f"{name}.".startswith(f"{key.name}.")}
    inner = any(key.name.startswith(f"{name}.") for key in found.keys)
    assert exact or inner, f"{name} is told of nowhere"
    return exact or {KeyUse.PRICED}


@pytest.mark.parametrize("tool", LISTS)
def test_every_key_of_the_tools_own_list_is_known(tool: str) -> None:
    """A key that none of the values suits is refused by name, which is no silence either."""
    unknown: list[str] = []
    for name in LISTS[tool]["keys"]:
        uses: set[KeyUse] = set()
        for value in GIVEN:
            try:
                found = keys_of(tool, set_at(LISTS[tool]["minimal"], name, value))
            except InputError:
                continue
            uses.update(uses_of(found, name))
            if uses != {KeyUse.UNKNOWN}:
                break
        if uses == {KeyUse.UNKNOWN}:
            unknown.append(name)
    assert not unknown, " ".join(unknown)


@pytest.mark.parametrize("tool", LISTS)
def test_a_key_nobody_has_is_named(tool: str) -> None:
    found = keys_of(tool, {**LISTS[tool]["minimal"], "ray_nobody_has_this": 3})
    assert [key.name for key in found.of(KeyUse.UNKNOWN)] == ["ray_nobody_has_this"]


@pytest.mark.parametrize("table", TABLES)
def test_a_key_stands_in_one_list_with_its_source(table: str) -> None:
    text = (Path(FOLDER) / f"{table}.json").read_text(encoding="utf-8")
    content = json.loads(text)
    assert content["source"] and content["commit"] and content["licence"]
    harmless = [key for keys in content["no_effect"].values() for key in keys]
    changing = [key for group in content["not_priced"] for key in group["keys"]]
    assert sorted({*harmless, *changing}) == sorted([*harmless, *changing])
    assert all(group["why"] for group in content["not_priced"])
    assert not [key for key in [*harmless, *changing] if key.endswith("*")], "no prefixes"


def test_a_switch_that_is_off_has_no_effect() -> None:
    known = KnownKeys("axolotl")
    for value in (None, False, 0, "", "false", [], {}):
        assert known.of("relora", value, {}).use is KeyUse.NO_EFFECT
    assert known.of("qat", {"group_size": 32}, {}).use is KeyUse.NOT_PRICED


def priced_of(tmp_path: Path, text: str, **flags: object) -> Any:
    job = tmp_path / "job.yaml"
    job.write_text(text, encoding="utf-8")
    notes: list[str] = []
    return priced(with_job_file({**flags, "job": str(job)}, notes), notes)[0]


AXOLOTL = "base_model: llama-3.2-1b\nsequence_len: 512\nadapter: lora\nlora_target_linear: true\n"
LIGER = """
plugins: [axolotl.integrations.liger.LigerPlugin]
liger_rms_norm: true
liger_fused_linear_cross_entropy: true
lora_mlp_kernel: false
"""
CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"
OFF = "lora_mlp_kernel: false\n"
FSDP2 = "fsdp_version: 2\nfsdp_config:\n  reshard_after_forward: true\n"
FSDP1 = "fsdp: [full_shard]\nfsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: "


def test_memory_that_is_not_priced_leaves_the_verdict_open(tmp_path: Path) -> None:
    plain = priced_of(tmp_path, AXOLOTL, gpu="A100-80")
    more = priced_of(tmp_path, AXOLOTL + "qat: {group_size: 32}\n", gpu="A100-80")
    assert (plain.verdict, more.priced_verdict, more.verdict) == (
        Verdict.FITS,
        Verdict.FITS,
        Verdict.UNKNOWN,
    )
    assert any("qat is not priced" in finding.text for finding in more.findings)
    assert more.memory.device == plain.memory.device and more.remedy is None


def test_memory_that_is_saved_and_not_priced_opens_a_refusal(tmp_path: Path) -> None:
    text = "base_model: llama-3.1-70b\nsequence_len: 4096\n"
    assert priced_of(tmp_path, text, gpu="rtx4090").verdict is Verdict.DOES_NOT_FIT
    fewer = priced_of(tmp_path, text + "layer_offloading: true\n", gpu="rtx4090")
    assert fewer.verdict is Verdict.UNKNOWN


NANOTRON = (
    "model:\n  dtype: bfloat16\n  model_config: {is_llama_config: true, hidden_size: 256,"
    " intermediate_size: 512, num_hidden_layers: 4, num_attention_heads: 4, vocab_size: 512}\n"
    "tokens: {micro_batch_size: 2, sequence_length: 256}\n"
    "parallelism: {dp: 2, tp: %d, pp: 1, tp_linear_async_communication: true}\n"
)


def test_what_tensor_ranks_send_is_moot_where_there_is_one(tmp_path: Path) -> None:
    """Every nanotron file has these keys (huggingface/smollm's of SmolLM2 with tp: 1)."""
    alone, two = (priced_of(tmp_path, NANOTRON % ranks, gpu="h100") for ranks in (1, 2))
    assert (alone.verdict, two.verdict) == (Verdict.FITS, Verdict.FITS)
    assert not alone.job_keys.of(KeyUse.NOT_PRICED)
    (left,) = two.job_keys.of(KeyUse.NOT_PRICED)
    assert left.name == "parallelism.tp_linear_async_communication"
    assert (left.time, left.memory) == (Difference.LESS, Difference.NONE)


def test_waits_of_nanotrons_longer_pipelines_are_named(tmp_path: Path) -> None:
    """Of its published runs those of 4 and 8 stages took far longer than their kernels, those of one
    and two did not."""
    for stages, named in ((2, []), (4, ["parallelism.pp_engine"])):
        text = (NANOTRON % 1).replace("pp: 1", f"pp: {stages}, pp_engine: 1f1b")
        found = priced_of(tmp_path, text, gpu="h100")
        left = found.job_keys.of(KeyUse.NOT_PRICED)
        assert [key.name for key in left] == named
        assert all((key.time, key.memory) == (Difference.MORE, Difference.NONE) for key in left)


def test_tiles_of_mlps_are_priced(tmp_path: Path) -> None:
    """axolotl makes a tile for every hidden-size tokens where no number of shards is given."""
    plain = priced_of(tmp_path, AXOLOTL + "tiled_mlp_num_shards: 4\n", gpu="h100")
    few = priced_of(tmp_path, AXOLOTL + "tiled_mlp: true\ntiled_mlp_num_shards: 4\n", gpu="h100")
    many = priced_of(tmp_path, AXOLOTL + "tiled_mlp: true\n", gpu="h100")
    tiles = [e.config.mlp_tiles for e in (plain, few, many)]
    assert tiles == [0, 4, AUTO_TILES]
    assert few.memory.requested < plain.memory.requested
    assert few.time.seconds > plain.time.seconds and few.time.mfu < plain.time.mfu


def test_ranks_of_an_unknown_number_share_no_more_than_their_stage(tmp_path: Path) -> None:
    """ZeRO 2 leaves every rank the weights, ZeRO 3 does not: 7B in bf16 is 12.6 GiB."""
    text = "base_model: llama-2-7b\nsequence_len: 512\nflash_attention: true\n"
    text += "gradient_checkpointing: true\nbf16: true\ndeepspeed: zero{}.json\n"
    for stage, verdict in ((2, Verdict.DOES_NOT_FIT), (3, Verdict.UNKNOWN)):
        found = priced_of(tmp_path, text.format(stage), gpu="rtx3060")
        assert (found.priced_verdict, found.verdict) == (Verdict.DOES_NOT_FIT, verdict)
        assert {f.verdict for f in found.fits_on if f.gpu == "RTX 3060 12GB"} == {verdict}


def test_what_saves_activations_saves_no_weights(tmp_path: Path) -> None:
    """LoRA on a 7B in bf16: its weights alone are 12.6 GiB."""
    text = (
        "base_model: llama-2-7b\nadapter: lora\nlora_r: 8\nlora_target_linear: true\nbf16: true\n"
    )
    text += "flash_attention: true\nsequence_len: 4096\ngradient_checkpointing: true\n"
    text += "unsloth_lora_mlp: true\n"
    for gpu, verdict in (("rtx3060", Verdict.DOES_NOT_FIT), ("t4", Verdict.UNKNOWN)):
        found = priced_of(tmp_path, text, gpu=gpu)
        assert [key.name for key in found.job_keys.of(KeyUse.NOT_PRICED)] == ["unsloth_lora_mlp"]
        assert (found.priced_verdict, found.verdict) == (Verdict.DOES_NOT_FIT, verdict)


def test_patched_kernels_stay_under_the_compiler(tmp_path: Path) -> None:
    e = priced_of(tmp_path, AXOLOTL + LIGER + "torch_compile: true\n")
    assert e.config.kernels.value == "liger" and not e.config.compile
    assert [key.name for key in e.job_keys.of(KeyUse.NOT_PRICED)] == ["torch_compile"]


@pytest.mark.parametrize(
    ("text", "kernels", "loss", "left_out"),
    [
        ("", "axolotl", "hf", []),  # on by itself, beside the library's loss
        ("lora_qkv_kernel: true\n", "axolotl qkv", "hf", []),
        ("lora_qkv_kernel: true\nlora_o_kernel: true\n", "axolotl qkv o", "hf", []),
        ("lora_qkv_kernel: true\n" + FSDP2, "hf", "hf", ["lora_qkv_kernel", "sharding"]),
        ("lora_qkv_kernel: true\npeft_use_dora: true\n", "hf", "hf", ["lora_qkv_kernel"]),
        ("unsloth_lora_mlp: true\n", "hf", "hf", ["unsloth_lora_mlp"]),
        (OFF, "hf", "hf", []),
        ("trust_remote_code: true\n", "hf", "hf", []),
        ("load_in_8bit: true\n", "hf", "hf", []),
        (LIGER, "liger norm loss", "hf", []),
        (LIGER + "liger_rope: true\nliger_glu_activation: true\n", "liger", "hf", []),
        (LIGER.replace("entropy: true", "entropy: false"), "liger norm", "hf", []),
        (LIGER + "liger_cross_entropy: true\n", "liger norm loss", "hf", ["liger_cross_entropy"]),
        (LIGER.replace(OFF, "lora_o_kernel: true\n"), "axolotl norm loss o", "hf", []),
        (LIGER.replace("true", "false"), "hf", "hf", []),
        ("liger_rms_norm: true\n" + OFF, "hf", "hf", []),  # nothing reads it without the plugin
        (CUT + OFF, "hf", "fused", []),
        (CUT + OFF + "cut_cross_entropy: true\n", "hf", "fused", []),
        (CUT + OFF + "cut_cross_entropy: false\n", "hf", "hf", []),
        ("cut_cross_entropy: true\n" + OFF, "hf", "hf", []),
        (OFF + "unfrozen_parameters: [^lm_head]\n", "hf", "hf", ["unfrozen_parameters"]),
    ],
)
def test_axolotls_operations_are_those_that_it_turns_on(
    tmp_path: Path, text: str, kernels: str, loss: str, left_out: list[str]
) -> None:
    e = priced_of(tmp_path, AXOLOTL + text)
    found = " ".join((e.config.kernels.value, *e.config.kernel_parts))
    assert (found, e.config.loss.value) == (kernels, loss)
    assert [key.name for key in e.job_keys.of(KeyUse.NOT_PRICED)] == left_out
    assert not e.job_keys.of(KeyUse.UNKNOWN)


def test_liger_without_its_loss_keeps_its_other_operations(tmp_path: Path) -> None:
    text = "model_name_or_path: llama-3.2-1b\nmax_length: 4096\nloss_type: nll\n"
    text += "use_liger_kernel: true\n"
    whole = priced_of(tmp_path, text)
    assert (whole.config.kernels.value, whole.config.kernel_parts) == ("liger", ())
    e = priced_of(tmp_path, text + "liger_kernel_config: {fused_linear_cross_entropy: false}\n")
    assert e.config.kernel_parts == ("norm", "rope", "gate") and not e.job_keys.of(
        KeyUse.NOT_PRICED
    )
    assert e.peak.nbytes > whole.peak.nbytes  # of the logits


def test_units_of_fsdp_that_are_parts_of_layers_are_named(tmp_path: Path) -> None:
    text = AXOLOTL + OFF + "flash_attention: true\n" + FSDP1
    for name, left_out in (("MixtralSparseMoeBlock", 1), ("Qwen2MoeDecoderLayer", 0)):
        e = priced_of(tmp_path, f"{text}{name}\n", gpus=2)
        names = [key.name for key in e.job_keys.of(KeyUse.NOT_PRICED)]
        assert names == ["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] * left_out


def test_all_four_lists_are_in_the_json(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(AXOLOTL + OFF + "wandb_project: x\nqat: {group_size: 32}\nnonsense: 1\n")
    done = run(str(job), "--gpu", "A100-80", "--json")
    assert done.code == 3, done.err
    inputs = json.loads(done.out)["inputs"]
    assert inputs["tool"] == "axolotl" and inputs["path"] == str(job)
    keys = inputs["keys"]
    assert "sequence_len" in keys["priced"] and keys["unknown"] == ["nonsense"]
    assert [key["name"] for key in keys["no_effect"]] == ["wandb_project"]
    assert keys["not_priced"][0] == {
        "name": "qat",
        "why": "quantization-aware training keeps fake-quantized copies",
        "memory": "more",
        "time": "more",
    }
    assert "not priced: qat" in done.err and "unknown, and left out: nonsense" in done.err
    assert "wandb" not in done.err


# What used to fall away: file -> (fields of the options, keys that are named as not priced).
SILENT: dict[str, tuple[str, dict[str, object], tuple[str, ...]]] = {
    "LLaMA-Factory's DPO": (
        "model_name_or_path: llama-3.2-1b\nfinetuning_type: lora\nstage: dpo\n",
        {"workload": "dpo"},
        (),
    ),
    "LLaMA-Factory's reward model": (
        "model_name_or_path: llama-3.2-1b\nfinetuning_type: lora\nstage: rm\n",
        {"workload": "reward"},
        (),
    ),
    "LLaMA-Factory's frozen towers": (
        "model_name_or_path: qwen2.5-vl-3b\nfinetuning_type: full\nstage: sft\n",
        {"freeze": ["visual", "vision_tower", "vision_model", "audio_tower"]},
        (),
    ),
    "LLaMA-Factory's DeepSpeed": (
        "model_name_or_path: llama-3.2-1b\nfinetuning_type: full\nstage: sft\ndeepspeed:"
        " examples/deepspeed/ds_z3_config.json\n",
        {"data_parallel": ["zero3"]},
        (),
    ),
    "LLaMA-Factory 1": (
        "model: Qwen/Qwen3-0.6B\nmodel_class: llm\ndist_config:\n  name: fsdp2\npeft_config:\n"
        "  name: lora\n  r: 16\n",
        {"data_parallel": ["fsdp2"], "rank": 16, "checkpointing": "full"},
        (),
    ),
    "axolotl's DPO": (AXOLOTL + "rl: dpo\n", {"workload": "dpo"}, ()),
    "axolotl's reward model": (AXOLOTL + "reward_model: true\n", {"workload": "reward"}, ()),
    "axolotl's FSDP": (
        AXOLOTL + "fsdp_version: 2\nfsdp_config:\n  offload_params: true\n",
        {"data_parallel": ["fsdp2"], "offload": "optimizer,parameters"},
        (),
    ),
    "axolotl's reentrant checkpoints": (
        AXOLOTL + "gradient_checkpointing: true\n",
        {"reentrant": True},
        (),
    ),
    "axolotl's checkpoints under RL": (
        AXOLOTL + "gradient_checkpointing: true\nrl: dpo\n",
        {"reentrant": False},
        (),
    ),
    "axolotl's Ray": (AXOLOTL + "ray_num_workers: 4\n", {}, ("ray_num_workers",)),
    "axolotl's EBFT": (AXOLOTL + "rl: ebft\n", {"workload": None}, ("rl",)),
    "LLaMA-Factory's rotations": (
        "model_name_or_path: llama-3.2-1b\nfinetuning_type: oft\nuse_adam_mini: true\n",
        {"method": "lora"},
        ("finetuning_type", "use_adam_mini"),
    ),
    "torchtune's own sizes": (
        "model:\n  _component_: torchtune.models.llama2.llama2\n  vocab_size: 32000\n"
        "  num_layers: 22\n  num_heads: 32\n  num_kv_heads: 4\n  embed_dim: 2048\n",
        {
            "config": {
                "model_type": "llama",
                "hidden_size": 2048,
                "intermediate_size": 5632,
                "num_hidden_layers": 22,
                "num_attention_heads": 32,
                "num_key_value_heads": 4,
                "vocab_size": 32000,
            }
        },
        (),
    ),
    "axolotl's frozen parameters": (
        "base_model: llama-3.2-1b\nunfrozen_parameters: [lm_head]\n",
        {},
        ("unfrozen_parameters",),
    ),
    "axolotl's packed experts": (
        "base_model: mixtral-8x7b\nadapter: qlora\nload_in_4bit: true\nquantize_moe_experts: true\n",
        {"quant": "nf4", "quantize_experts": True, "checkpointing": "none"},
        (),
    ),
    "axolotl's packed experts, sharded": (
        "base_model: mixtral-8x7b\nadapter: lora\nload_in_8bit: true\nquantize_moe_experts: true\n"
        "fsdp_config:\n  fsdp_version: 2\n  activation_checkpointing: true\n",
        {"quant": "int8", "quantize_experts": True, "checkpointing": "full"},
        ("quantize_moe_experts",),
    ),
    "torchtune's DPO": (
        "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\nloss:\n  _component_:"
        " torchtune.rlhf.loss.DPOLoss\n",
        {"workload": "dpo"},
        (),
    ),
    "torchtune's distributed recipe": (
        "# tune run --nnodes 1 --nproc_per_node 4 full_finetune_distributed --config x\n"
        "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\n",
        {"data_parallel": ["fsdp2"], "gpus": 4},
        (),
    ),
    "TRL's DPO": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nbeta: 0.1\n"
        "loss_type: sigmoid\n",
        {"workload": "dpo"},
        (),
    ),
    "TRL's GRPO": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nnum_generations: 8\n"
        "use_vllm: true\n",
        {"workload": "grpo", "bs": 1, "reference": False},
        ("use_vllm",),
    ),
    "TRL's GRPO with a divergence": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 8\nnum_generations: 8\n"
        "beta: 0.04\n",
        {"workload": "grpo", "reference": True},
        (),
    ),
    "unsloth's GRPO, whose batch is a group": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nnum_generations: 6\n"
        "use_unsloth: true\n",
        {"workload": "grpo", "bs": 6},
        (),
    ),
    "Megatron's kernel of attention": (
        "MODEL_ARGS: {--num-layers: 2, --hidden-size: 64, --num-attention-heads: 4, --seq-length: 64,"
        " --bf16: true, --attention-backend: fused, --transformer-impl: transformer_engine}\n",
        {"attention": "cudnn"},
        (),
    ),
    "the Trainer's FSDP": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nfsdp: full_shard"
        " auto_wrap\n",
        {"data_parallel": ["fsdp1"], "sharding": "full"},
        (),
    ),
    "the Trainer's FSDP of no version, which is 2 in transformers 5": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nfsdp: true\n",
        {"data_parallel": ["fsdp2"], "sharding": "full"},
        (),
    ),
    "the Trainer's FSDP on the host, by its name of transformers 5": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nfsdp: true\n"
        "fsdp_config: {version: 2, cpu_offload: true}\n",
        {"data_parallel": ["fsdp2"], "offload": "optimizer,parameters"},
        (),
    ),
    "the Trainer's FSDP without a limit of gathers": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nfsdp: full_shard\n"
        "fsdp_config: {version: 1, limit_all_gathers: false}\n",
        {"data_parallel": ["fsdp1"], "limit_all_gathers": False},
        (),
    ),
    "the Trainer's FSDP by size": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nfsdp: full_shard\n"
        "fsdp_config: {auto_wrap_policy: SIZE_BASED_WRAP, min_num_params: 100000000}\n",
        {"data_parallel": ["fsdp1"]},
        ("fsdp_config.min_num_params",),
    ),
    "the Trainer's FSDP by size 0, which wraps nothing": (
        "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 1\nfsdp: full_shard\n"
        "fsdp_config: {auto_wrap_policy: SIZE_BASED_WRAP}\n",
        {"data_parallel": ["fsdp1"], "wrap": "none"},
        (),
    ),
    "DeepSpeed's types": (
        "zero_optimization: {stage: 2}\nbf16: {enabled: true}\n"
        "data_types: {grad_accum_dtype: fp32}\n",
        {"data_parallel": ["zero2"]},
        ("data_types",),
    ),
    "DeepSpeed's masters": (
        "zero_optimization: {stage: 2}\nbf16: {enabled: true, bf16_master_weights_and_grads:"
        " true, bf16_optimizer_states: true}\n",
        {"zero_options": ZeroConfig(master_dtype="bf16", narrow_states=True)},
        (),
    ),
    "DeepSpeed's masters under its other optimizer": (
        "zero_optimization: {stage: 1}\nbf16: {enabled: true, bf16_master_weights_and_grads:"
        " true, bf16_optimizer_states: true}\ndata_types: {grad_accum_dtype: fp32}\n",
        {"zero_options": ZeroConfig(), "reduce_dtype": "fp32"},
        ("bf16.bf16_master_weights_and_grads",),
    ),
    "DeepSpeed's partial offload": (
        "zero_optimization: {stage: 3, offload_optimizer: {device: cpu, ratio: 0.5,"
        " super_offload: true}}\nbf16: {enabled: true}\n",
        {"zero_options": ZeroConfig(offload_ratio=0.5), "offload": "optimizer"},
        (
            "zero_optimization.offload_optimizer.super_offload",
            "zero_optimization.offload_optimizer.ratio",
        ),
    ),
    "DeepSpeed's older offload": (
        "zero_optimization: {stage: 3, cpu_offload: true, cpu_offload_param: true}\nbf16:"
        " {enabled: true}\n",
        {"offload": "optimizer,parameters"},
        (),
    ),
    "DeepSpeed's parameters below stage 3, which its engine does not read": (
        "zero_optimization: {stage: 2, offload_optimizer: {device: cpu}, offload_param: {device:"
        " cpu}}\nbf16: {enabled: true}\n",
        {"data_parallel": ["zero2"], "offload": "optimizer"},
        (),
    ),
    "ZeRO++ and MiCS below stage 3, which the engine does not read": (
        "zero_optimization: {stage: 2, zero_hpz_partition_size: 8, mics_shard_size: 4}\nbf16:"
        " {enabled: true}\n",
        {"data_parallel": ["zero2"], "zero_options": ZeroConfig()},
        (),
    ),
    "ZeRO++ with its second copy off": (
        "zero_optimization: {stage: 3, zero_hpz_partition_size: 0, zero_quantized_weights: true}\n"
        "bf16: {enabled: true}\n",
        {"zero_options": ZeroConfig(quantized_weights=True)},
        (),
    ),
    "accelerate's parameters below stage 3": (
        "distributed_type: DEEPSPEED\nnum_processes: 2\nmixed_precision: bf16\n"
        "deepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu,"
        " offload_param_device: cpu}\n",
        {"data_parallel": ["zero2"], "offload": "optimizer"},
        (),
    ),
    "DeepSpeed's sums": (
        "zero_optimization: {stage: 1}\nbf16: {enabled: true}\n"
        "data_types: {grad_accum_dtype: fp32}\n",
        {"data_parallel": ["zero1"], "reduce_dtype": "fp32"},
        (),
    ),
    "Megatron's gradient buffers": (
        "MODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 64\n  --num-attention-heads: 4\n"
        "  --seq-length: 64\n  --bf16: true\n  --grad-reduce-in-bf16: true\n",
        {"stack": "megatron", "reduce_dtype": "bf16"},
        (),
    ),
    "Megatron's way of tokens to experts": (
        "MODEL_ARGS:\n  --num-layers: 4\n  --hidden-size: 64\n  --num-attention-heads: 4\n"
        "  --seq-length: 64\n  --swiglu: true\n  --num-experts: 8\n"
        "  --expert-model-parallel-size: 2\n  --moe-token-dispatcher-type: flex\n"
        "  --moe-enable-deepep: true\n",
        {"ep": 2, "deepep": True},
        (),
    ),
    "accelerate's mesh": (
        "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\nparallelism_config:\n"
        "  parallelism_config_tp_size: 2\n  parallelism_config_cp_size: 2\n",
        {"tp": 2, "cp": 2},
        (),
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_used_to_fall_away_is_read_or_named(name: str, tmp_path: Path) -> None:
    text, expected, named = SILENT[name]
    job = tmp_path / "job.yaml"
    job.write_text(text, encoding="utf-8")
    options = read_job(str(job), [])
    found = {key: options.get(key) for key in expected}
    if name == "LLaMA-Factory's frozen towers":
        found["freeze"] = found["freeze"][:4]  # type: ignore[index]
    assert found == expected
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys)
    assert set(named) <= {key.name for key in keys.of(KeyUse.NOT_PRICED)}


def test_a_deepspeed_file_beside_the_job_is_read(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(
        '{"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}},'
        ' "data_types": {"grad_accum_dtype": "fp32"}, "progressive_layer_drop": {"enabled": true}}'
    )
    job = tmp_path / "job.yaml"
    job.write_text(AXOLOTL + "deepspeed: ds.json\n")
    options = with_job_file({"job": str(job), "gpus": 8}, [])
    assert (options["data_parallel"], options["offload"]) == (["zero3"], "optimizer")
    assert options["reduce_dtype"] == "fp32"
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys)
    assert "deepspeed.progressive_layer_drop" in {key.name for key in keys.of(KeyUse.NOT_PRICED)}


def test_sharding_over_nobody_knows_how_many_is_at_most_one_gpu(tmp_path: Path) -> None:
    text = AXOLOTL + OFF + "fsdp_version: 2\nfsdp_config: {reshard_after_forward: true}\n"
    alone = priced_of(tmp_path, text, gpu="A100-80")
    assert alone.config.parallel.world_size == 1
    assert alone.job_keys.changes("memory") == {Difference.LESS}
    eight = priced_of(tmp_path, text, gpu="A100-80", gpus=8)
    assert eight.config.parallel.world_size == 8 and not eight.job_keys.changes("memory")


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("/tmp/nowhere/Llama-3.2-1B", "Llama-3.2-1B"),
        ("./models/Llama-3.2-1B/", "Llama-3.2-1B"),
        ("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-1B"),
        ("/tmp/nowhere/what-is-this", "/tmp/nowhere/what-is-this"),
    ],
)
def test_a_checkpoints_path_means_its_last_part(tmp_path: Path, given: str, taken: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"base_model: {given}\n")
    assert with_job_file({"job": str(job)}, [])["model"] == taken


def test_a_key_given_twice_is_said_and_the_last_is_taken(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(AXOLOTL + "micro_batch_size: 2\nmicro_batch_size: 4\n")
    notes: list[str] = []
    assert read_job(str(job), notes)["bs"] == 4
    assert any("'micro_batch_size' twice" in note for note in notes)
    job.write_text("model: llama-7b\nbs: 2\nbs: 4\n")
    with pytest.raises(InputError, match="twice, again at line 3; keep one"):
        read_job(str(job), [])


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        (r"model.layers.[\d]+.self_attn.(q|v)_proj", True),
        (r".*\.(q|v)_proj", True),
        (r"model.layers.(0|1).self_attn.q_proj", False),
    ],
)
def test_a_pattern_of_targets_is_pefts(pattern: str, fits: bool, tmp_path: Path) -> None:
    text = AXOLOTL.replace("lora_target_linear: true\n", f"lora_target_modules: '{pattern}'\n")
    if not fits:
        with pytest.raises(InputError, match="names some layers"):
            priced_of(tmp_path, text)
        return
    named = AXOLOTL.replace("lora_target_linear: true\n", "lora_target_modules: [q_proj, v_proj]\n")
    assert priced_of(tmp_path, text).num_trained == priced_of(tmp_path, named).num_trained


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("lora_target_modules: [q_proj, lm_head]\n", ["lora_target_modules"]),
        ("lora_target_modules: [lm_head]\nlora_modules_to_save: [lm_head]\n", []),
        ("lora_target_modules: [q_proj]\n", []),
    ],
)
def test_what_axolotl_adapts_beside_all_linears_is_named(
    more: str, named: list[str], tmp_path: Path
) -> None:
    e = priced_of(tmp_path, AXOLOTL + more)
    assert [key.name for key in e.job_keys.of(KeyUse.NOT_PRICED)] == named


def test_the_page_has_the_tables_of_keys() -> None:
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, str(root / "docs" / "generate_job_files.py"), "--check"])
    assert done.returncode == 0, "run python docs/generate_job_files.py"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "zero_optimization: {stage: 2, overlap_com: true}\n",
            "overlap_com (did you mean overlap_",
        ),
        ("zero_optimization: {stage: 2}\nbf15: {}\nbf17: 1\n", "bf17 (did you mean bf16"),
        (
            "base_model: llama-7b\nsequence_lenght: 512\n",
            "sequence_lenght (did you mean sequence_len",
        ),
    ],
)
def test_an_unknown_key_is_told_with_the_nearest(text: str, said: str, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(text)
    notes: list[str] = []
    with_job_file({"job": str(job)}, notes)
    assert any(said in note for note in notes), notes


OPEN = "model_name_or_path: smollm2-1.7b\nper_device_train_batch_size: 1\nuse_peft: true\n"


@pytest.mark.slow
def test_plans_and_sweeps_leave_it_open_too(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(OPEN + "label_smoothing_factor: 0.1\n")
    planned = run("plan", str(job), "--gpu", "rtx4090", "--json")
    assert planned.code == 3 and "nothing listed surely fits" in planned.err
    printed = run("plan", str(job), "--gpu", "rtx4090")
    line = next(row for row in printed.out.splitlines() if row.startswith("run it:"))
    words = shlex.split(line.partition("estimate")[2])
    assert run(*words).code == 0, words
    for exact in ((), ("--exact",)):
        swept = run("sweep", str(job), "--gpu", "A100-80", "--bs", "1,2", "--csv", *exact)
        verdicts = [row["verdict"] for row in csv.DictReader(io.StringIO(swept.out))]
        assert verdicts == ["cannot tell"] * 2 or set(verdicts) == {"unknown"}, swept.out


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (OPEN + "eval_strategy: steps\nper_device_eval_batch_size: 32\n", True),
        (OPEN + "eval_strategy: steps\n", True),  # eight by default
        (OPEN + "per_device_eval_batch_size: 32\n", False),
        (OPEN + "eval_strategy: steps\nper_device_eval_batch_size: 1\n", False),
        (AXOLOTL + "val_set_size: 0.05\neval_batch_size: 4\n", True),
        (AXOLOTL + "val_set_size: 0.05\n", False),
    ],
)
def test_an_evaluation_larger_than_a_step_is_named(text: str, named: bool, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(text)

    def changes(**flags: object) -> frozenset[Difference]:
        keys = with_job_file({**flags, "job": str(job)}, [])["job_keys"]
        assert isinstance(keys, JobKeys)
        return keys.changes("memory")

    assert (Difference.MORE in changes()) == named
    assert Difference.MORE not in changes(eval_bs=32)


def test_an_option_that_a_hint_names_settles_the_key() -> None:
    hints = [
        (table, group)
        for table in TABLES
        for group in json.loads((Path(FOLDER) / f"{table}.json").read_text())["not_priced"]
        if "--" in group["why"]
    ]
    assert len(hints) > 8
    assert [t for t, group in hints if group.get("option") not in BY_KEY] == []


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ("sample_packing: false\npad_to_sequence_len: false\n", True),
        ("pad_to_sequence_len: false\n", True),
        ("sample_packing: true\npad_to_sequence_len: false\n", False),
        ("sample_packing: false\npad_to_sequence_len: true\n", False),
        ("rl: grpo\npad_to_sequence_len: false\n", False),
    ],
)
def test_rows_that_axolotl_pads_to_their_longest_are_said(
    more: str, named: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(AXOLOTL + more)
    keys = with_job_file({"job": str(path)}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    left = [key.name for key in keys.of(KeyUse.NOT_PRICED)]
    assert ("pad_to_sequence_len" in left) == named
