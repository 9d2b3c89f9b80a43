"""Whatever is typed, the command answers with 0, 1, 2 or 3, and with one line where the answer is
2."""

from __future__ import annotations

import importlib
import json
import re
import tempfile
from pathlib import Path

import pytest
from cli.runs import TINY, Done, run
from hypothesis import given, settings
from hypothesis import strategies as st
from napkinmath.base.errors import InputError
from napkinmath.cli.flag_rows import REPEAT, SWITCH, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.inputs.job_file import _KINDS, read_job
from napkinmath.inputs.option_table import BY_KEY
from napkinmath.inputs.options import train_config
from napkinmath.models.arch_string import read_arch

ROWS = [
    row for title, rows in SHARED if title not in ("model", "workload", "output") for row in rows
]
# Words that some flag understands, so that random lines get past the first check.
WORDS = [
    "0",
    "1",
    "2",
    "8",
    "16",
    "64",
    "1k",
    "0.1",
    "-1",
    "1.5",
    "nan",
    "auto",
    "none",
    "full",
    "lora",
    "qlora",
    "dora",
    "ia3",
    "prefix",
    "nf4",
    "fp4",
    "int8",
    "gptq",
    "bf16",
    "fp16-amp",
    "fp32",
    "adamw",
    "adamw-8bit",
    "sgd",
    "lion",
    "every:2",
    "sqrt",
    "selective",
    "offload",
    "optimizer",
    "eager",
    "sdpa",
    "math",
    "chunked",
    "fused",
    "hf",
    "liger",
    "q_proj",
    "q_proj,v_proj",
    "all-linear",
    "lm_head",
    "H100",
    "4090",
    "24GiB",
    "1g.10gb",
    "linux",
    "expandable_segments:True",
    "embed_tokens",
    "1,2,3",
    "hf-2024",
    "hf-bare",
]
values = st.one_of(
    st.sampled_from(WORDS), st.text(max_size=12).filter(lambda text: not text.startswith("-"))
)


@st.composite
def flags(draw: st.DrawFn) -> list[str]:
    row = draw(st.sampled_from(ROWS))
    name = draw(st.sampled_from(row[0]))
    if row[1] in (TEXT, REPEAT):
        return [name, draw(values)]
    return ["--no-" + row[0][0][2:]] if row[1] == SWITCH and draw(st.booleans()) else [name]


def check(done: Done) -> None:
    assert done.code in (0, 1, 2, 3), done
    if done.code == 2:
        assert len(done.err.splitlines()) == 1 and done.out == "", done
        assert done.err.startswith("estimate: ")
    assert "Traceback" not in done.err


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(flags(), max_size=4))
def test_any_flags(lines: list[list[str]]) -> None:
    check(run(*TINY, *(word for line in lines for word in line), "--json"))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(max_size=15), max_size=4))
def test_any_words(words: list[str]) -> None:
    check(run(*words))


scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(), st.text(max_size=8)
)
anything = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
FIELDS = [
    *LLAMA,
    "head_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
    "attention_dropout",
    "text_config",
    "quantization_config",
    "torch_dtype",
    "architectures",
    "rope_scaling",
]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(FIELDS), st.one_of(anything, st.integers(1, 512)), max_size=3)
)
def test_any_config_value(changes: dict[str, object]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "config.json")
        file.write_text(json.dumps({**LLAMA, **changes}))
        check(run("--model", str(file), "--ctx", "16", "--json"))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(sorted(BY_KEY)), st.one_of(anything, st.sampled_from(WORDS)), max_size=5
    )
)
def test_any_option_value(options: dict[str, object]) -> None:
    """Typed values of a job file either make a configuration or an InputError."""
    try:
        train_config({key: value for key, value in options.items() if value is not None})
    except InputError as error:
        assert str(error) and "\n" not in str(error)


FOREIGN_KEYS = {
    "axolotl": [
        "base_model",
        "adapter",
        "load_in_4bit",
        "load_in_8bit",
        "lora_r",
        "lora_target_modules",
        "bf16",
        "fp16",
        "gradient_checkpointing",
        "sequence_len",
        "plugins",
        "torch_compile",
        "flash_attention",
    ],
    "trainer": [
        "model_name_or_path",
        "per_device_train_batch_size",
        "use_peft",
        "lora_r",
        "bf16",
        "dtype",
        "optim",
        "max_length",
        "packing",
        "gradient_checkpointing_kwargs",
        "loss_type",
        "max_grad_norm",
    ],
    "llama-factory": [
        "finetuning_type",
        "cutoff_len",
        "quantization_bit",
        "lora_target",
        "bf16",
        "use_galore",
        "flash_attn",
        "lora_rank",
        "use_unsloth",
    ],
    "torchtune": [
        "model",
        "optimizer",
        "loss",
        "tokenizer",
        "dataset",
        "batch_size",
        "dtype",
        "compile",
        "clip_grad_norm",
        "optimizer_in_bwd",
    ],
    "deepspeed": [
        "bf16",
        "fp16",
        "zero_optimization",
        "optimizer",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "train_micro_batch_size_per_gpu",
    ],
    "accelerate": [
        "distributed_type",
        "fsdp_config",
        "deepspeed_config",
        "mixed_precision",
        "num_processes",
        "num_machines",
        "parallelism_config",
    ],
    "llama-factory-1": [
        "micro_batch_size",
        "global_batch_size",
        "cutoff_len",
        "peft_config",
        "quant_config",
        "dist_config",
        "optim_config",
        "pref_loss",
        "flash_attn",
        "bf16",
        "cp_size",
        "mp_replicate_size",
    ],
    "megatron": [
        "num_layers",
        "hidden_size",
        "num_attention_heads",
        "ffn_hidden_size",
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "num_experts",
        "bf16",
        "swiglu",
        "recompute_granularity",
        "use_distributed_optimizer",
        "GPUS_PER_NODE",
    ],
    "torchtitan": [
        "model.name",
        "model.converters",
        "optimizer.implementation",
        "training.local_batch_size",
        "training.global_batch_size",
        "training.dtype",
        "parallelism.pipeline_parallel_degree",
        "parallelism.data_parallel_shard_degree",
        "activation_checkpoint.mode",
        "activation_checkpoint.selective_ac_option",
    ],
    "litgpt": [
        "checkpoint_dir",
        "precision",
        "quantize",
        "devices",
        "num_nodes",
        "lora_r",
        "lora_query",
        "lora_mlp",
        "optimizer",
        "train.global_batch_size",
        "train.max_norm",
    ],
    "ms-swift-2": [
        "model_type",
        "model_id_or_path",
        "sft_type",
        "batch_size",
        "max_length",
        "lora_target_modules",
        "quantization_bit",
        "dtype",
        "deepspeed",
        "gradient_accumulation_steps",
        "rlhf_type",
    ],
    "ms-swift": [
        "model",
        "tuner_type",
        "quant_bits",
        "quant_method",
        "target_modules",
        "torch_dtype",
        "bf16",
        "deepspeed",
        "fsdp",
        "rlhf_type",
        "task_type",
        "gradient_checkpointing_kwargs",
        "sequence_parallel_size",
        "split_dataset_ratio",
    ],
    "verl": [
        "algorithm.adv_estimator",
        "actor_rollout_ref.actor.strategy",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu",
        "actor_rollout_ref.actor.use_dynamic_bsz",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size",
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size",
        "actor_rollout_ref.model.lora_rank",
        "data.max_prompt_length",
        "trainer.n_gpus_per_node",
        "trainer.nnodes",
        "critic.model.path",
    ],
    "gpt-neox": [
        "num_layers",
        "hidden_size",
        "num-attention-heads",
        "attention_config",
        "activation",
        "intermediate_size",
        "expansion_factor",
        "tokenizer_type",
        "fp16",
        "precision",
        "zero_optimization",
        "checkpoint_activations",
        "model_parallel_size",
        "pipe_parallel_size",
        "moe_num_experts",
        "optimizer",
    ],
    "nanotron": [
        "model.dtype",
        "model.model_config.num_key_value_heads",
        "model.make_vocab_size_divisible_by",
        "tokens.micro_batch_size",
        "tokens.batch_accumulation_per_replica",
        "optimizer.zero_stage",
        "optimizer.accumulate_grad_in_fp32",
        "optimizer.optimizer_factory.name",
        "parallelism.tp_mode",
        "parallelism.dp",
        "parallelism.pp",
        "parallelism.pp_engine",
    ],
    "oumi": [
        "training.trainer_type",
        "training.optimizer",
        "training.use_peft",
        "peft.q_lora",
        "peft.q_lora_bits",
        "peft.lora_target_modules",
        "fsdp.enable_fsdp",
        "fsdp.sharding_strategy",
        "deepspeed.enable_deepspeed",
        "deepspeed.zero_stage",
        "model.torch_dtype_str",
        "model.freeze_layers",
        "training.mixed_precision_dtype",
    ],
    "openrlhf": [
        "data.max_len",
        "train.micro_batch_size",
        "train.batch_size",
        "ds.zero_stage",
        "ds.param_dtype",
        "ds.lora.rank",
        "ds.load_in_4bit",
        "ds.ring_attn_size",
        "actor.num_gpus_per_node",
        "actor.num_nodes",
        "algo.advantage.estimator",
        "train.colocate_all",
        "reward.model_name_or_path",
        "optim",
    ],
    "automodel": [
        "step_scheduler.local_batch_size",
        "step_scheduler.global_batch_size",
        "distributed.tp_size",
        "distributed.pp_size",
        "distributed.strategy",
        "distributed.dp_replicate_size",
        "distributed.activation_checkpointing",
        "distributed.pipeline.pp_schedule",
        "packed_sequence.packed_sequence_size",
        "peft.dim",
        "peft.target_modules",
        "quantization.load_in_4bit",
        "optimizer._target_",
        "loss_fn._target_",
        "model.torch_dtype",
        "model.use_liger_kernel",
    ],
    "prime-rl": [
        "model.ac",
        "model.ac.mode",
        "model.ac.freq",
        "model.lora.rank",
        "model.lora.target_modules",
        "model.cp",
        "model.ep",
        "model.optimization_dtype",
        "model.reshard_after_forward",
        "optim.type",
        "optim.max_norm",
        "data.batch_size",
        "data.micro_batch_size",
        "deployment.num_train_gpus",
        "deployment.num_train_nodes",
        "trainer.model.cp",
    ],
}
STARTS = {
    "axolotl": {"base_model": "llama-7b"},
    "trainer": {"model_name_or_path": "llama-7b"},
    "llama-factory": {"model_name_or_path": "llama-7b", "cutoff_len": 64},
    "llama-factory-1": {"model": "llama-7b", "model_class": "llm"},
    "torchtune": {"model": {"_component_": "x.lora_llama2_7b"}},
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "accelerate": {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP"},
    "megatron": {
        "megatron_arguments": True,
        "num_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
    },
    "torchtitan": {"model.name": "llama3", "model.flavor": "8B"},
    "litgpt": {"checkpoint_dir": "llama-7b", "train.micro_batch_size": 1},
    "ms-swift": {"model": "llama-7b", "tuner_type": "lora"},
    "ms-swift-2": {"model_type": "llama-7b", "sft_type": "lora"},
    "verl": {"actor_rollout_ref.model.path": "llama-7b"},
    "verl-sft": {"model.partial_pretrain": "llama-7b"},
    "verl-engine-sft": {"model.path": "llama-7b", "engine.strategy": "fsdp2", "data.max_length": 9},
    "gpt-neox": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "pos_emb": "rotary"},
    "nanotron": {
        "model": {
            "model_config": {
                "is_llama_config": True,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 128,
            }
        }
    },
    "oumi": {"model.model_name": "llama-7b", "training.trainer_type": "TRL_SFT"},
    "openrlhf": {"actor.model_name_or_path": "llama-7b"},
    "automodel": {
        "step_scheduler.local_batch_size": 1,
        "model.pretrained_model_name_or_path": "llama-7b",
    },
    "prime-rl": {"model.name": "llama-7b", "data.batch_size": 8},
    "megatron-swift": {"model": "llama-7b", "tuner_type": "lora", "micro_batch_size": 1},
    "megatron-bridge": {"model.seq_length": 64, "train": {"micro_batch_size": 1}},
    "nemo-rl": {"policy.model_name": "llama-7b", "sft": {}},
    "open-instruct": {"model_name_or_path": "llama-7b", "use_qlora": False, "use_lora": True},
    "slime": {"megatron_arguments": True, "hf_checkpoint": "llama-7b"},
    "llm-foundry": {
        "model": {"name": "hf_causal_lm", "pretrained_model_name_or_path": "llama-7b"},
        "train_loader": {"name": "text"},
    },
    "autotrain": {"task": "llm-sft", "base_model": "llama-7b", "params": {"block_size": 64}},
    "unsloth": {
        "model": "llama-7b",
        "training": {"max_seq_length": 64, "training_type": "lora"},
        "lora": {"lora_r": 4},
    },
    "diffusers": {
        "script": "train_dreambooth_lora_sdxl",
        "pretrained_model_name_or_path": "sd-1.5",
        "resolution": 64,
    },
    "sd-scripts": {
        "script": "train_network",
        "pretrained_model_name_or_path": "sd-1.5",
        "network_module": "networks.lora",
        "resolution": 64,
    },
    "musubi": {
        "script": "wan_train_network",
        "dit": "wan.safetensors",
        "task": "t2v-1.3B",
        "dataset_config": {"datasets": [{"resolution": 64, "target_frames": [1, 5]}]},
    },
    "diffusion-pipe": {
        "dataset": "d.toml",
        "model": {"type": "wan", "ckpt_path": "Wan2.1-T2V-1.3B"},
        "adapter": {"type": "lora", "rank": 4},
        "optimizer": {"type": "adamw"},
    },
    "onetrainer": {
        "training_method": "LORA",
        "model_type": "STABLE_DIFFUSION_15",
        "unet.weight_dtype": "FLOAT_16",
        "resolution": "64",
    },
    "simpletuner": {
        "model_family": "sd1x",
        "model_type": "lora",
        "resolution": 64,
        "data_backend_config": [{"resolution": 64}, {"dataset_type": "video"}],
    },
    "ai-toolkit": {
        "job": "extension",
        "model.name_or_path": "sd-1.5",
        "network.linear": 4,
        "datasets.resolution": 64,
    },
    "olmo-core": {"script": "Olmo-2-7B-SFT", "cluster": "ai2/jupiter", "seq_len": 64},
    "olmo": {
        "model": {"n_layers": 2, "d_model": 64, "n_heads": 4},
        "device_train_microbatch_size": 1,
    },
}
KEY = re.compile(r'"([a-z]+[a-z_.]+)"')


def keys_of(kind: str) -> list[str]:
    """A reader's keys: as written out above, or every word of that form in its source."""
    if kind in FOREIGN_KEYS:
        return FOREIGN_KEYS[kind]
    source = importlib.import_module(_KINDS[kind][0]).__file__
    return sorted(set(KEY.findall(Path(str(source)).read_text())))


def test_every_reader_is_tried() -> None:
    assert set(STARTS) == set(_KINDS)
    assert all(len(keys_of(kind)) > 3 for kind in STARTS)


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_foreign_job(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(sorted(STARTS)))
    content = {
        **STARTS[kind],
        **data.draw(
            st.dictionaries(
                st.sampled_from(keys_of(kind)),
                st.one_of(anything, st.sampled_from(WORDS), st.booleans()),
                max_size=4,
            )
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "job.json")
        file.write_text(json.dumps(content))
        try:
            train_config(read_job(str(file), []))
        except InputError as error:
            assert str(error)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.sampled_from(
                [
                    "L2",
                    "h64",
                    "a4",
                    "kv2",
                    "f128",
                    "v1k",
                    "tied",
                    "gelu",
                    "mqa",
                    "encoder",
                    "moe4x2",
                    "MPT",
                    "learned-pos",
                    "gated",
                    "dh16",
                ]
            ),
            st.text(max_size=5),
        ),
        max_size=8,
    )
)
def test_any_architecture(words: list[str]) -> None:
    try:
        config = read_arch(" ".join(words))
    except InputError as error:
        assert str(error)
    else:
        assert config["model_type"]
