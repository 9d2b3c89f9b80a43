"""Sources that were looked into: which code, of which time, made their figures, with the evidence.

A row is matched by words in its source and notes, the first row of ERAS that matches wins. A source
without a row here, and every source in blind mode, is read by the generic rules (tools.py). How a
stack behaves is in napkinmath's catalog (stacks.py).
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from published.era import Era
from published.rows import Row
from published.tools import generic_era

_FMS = r"fms-acceleration.*"
_FMS_EVIDENCE = (
    "fms-acceleration scripts/benchmarks/refs/requirements*.txt, scenarios*.yaml, defaults.yaml;"
    " fms-hf-tuning tuning/sft_trainer.py: adds padding and unknown tokens and resizes"
)
_FMS_FIELDS: dict[str, Any] = dict(
    evidence=_FMS_EVIDENCE, adapter_dropout=0.1, default_rank=16, adds_tokens=True
)

# What two eras of a source have in common.
_LITGPT: dict[str, Any] = dict(
    autocast=False,
    adapter_dtype="bf16",
    adapter_dropout=0.05,
    double_quant=False,
    prepares=False,
    unquantized=(),
    quantized_optimizer="paged-adamw",
    clips=False,
)
_TORCHTUNE = Era(
    name="torchtune",
    pattern=r"torchtune",
    stack="torchtune",
    offload_style="torchtune",
    eight_bit_optimizer="adamw-8bit-torchao",
    fsdp2=True,
    syncs_each_batch=True,
    logs="allocated",
    autocast=False,
    adapter_dtype="bf16",
    prepares=False,
    unquantized=("lm_head", "output"),
    clips=False,
    evidence=(
        "torchtune of November 2024 recipes/configs/llama3_2/3B_*_single_device.yaml: fused"
        " AdamW, bf16 throughout, adapters too; docs/source/tutorials/memory_optimizations.rst:"
        " torchao AdamW8bit; training/_distributed.py shard_model: fully_shard of layers"
    ),
)
_QWEN_DEEPSPEED: dict[str, Any] = dict(
    autocast=False, adapter_dtype="fp16", adapter_dropout=0.05, default_rank=64, lazy_modules=False
)


def _fms(version: str, files: str) -> list[Era]:
    """The three ways that benchmark prepares a model, under the transformers of one of its result
    files."""
    own: dict[str, Any] = dict(_FMS_FIELDS, prepares=False)
    return [
        Era(
            name=f"fms {version} scattermoe",
            pattern=_FMS + files + r".*framework_config \S*scattermoe",
            stack=f"hf-{version}-scattermoe",
            **own,
        ),
        Era(
            name=f"fms {version} foak",
            pattern=_FMS + files + r".*framework_config \S*foak",
            stack=f"hf-{version}-foak",
            **own,
        ),
        Era(
            name=f"fms {version} baseline",
            pattern=_FMS + files + r".*framework_config baseline",
            stack=f"hf-{version}-trl",
            **_FMS_FIELDS,
        ),
        Era(name=f"fms {version}", pattern=_FMS + files, stack=f"hf-{version}", **own),
    ]


ERAS: tuple[Era, ...] = (
    *_fms("4.45", r"(liger|granite)\.csv"),
    *_fms("4.44", r"refs_orca"),
    *_fms("4.48", r""),
    Era(
        name="litgpt tables",
        pattern=r"(litgpt|lit-gpt).*resource-tables",
        stack="litgpt-2023",
        evidence="lit-gpt of October 2023 finetune/lora.py, tutorials/resource-tables.md",
        **_LITGPT,
    ),
    Era(
        name="litgpt",
        pattern=r"^lightning-ai/lit|litgpt|lit-gpt",
        stack="litgpt",
        evidence=(
            "litgpt finetune/lora.py and full.py, config_hub/finetune/*/*.yaml,"
            " tutorials/resource-tables.md"
        ),
        **_LITGPT,
    ),
    Era(
        name="torchtune tutorials",
        pattern=r"torchtune.*(tutorials|apr-?\s?2024)",
        stack="torchtune-2024-04",
        autocast=False,
        adapter_dtype="bf16",
        prepares=False,
        unquantized=("lm_head", "output"),
        clips=False,
        evidence=(
            "torchtune of April 2024 recipes/configs/llama2/7B_lora_single_device.yaml,"
            " datasets/_alpaca.py"
        ),
        sequence_length=512,
        sequence_reason="alpaca_dataset truncated to 512 tokens by default",
    ),
    replace(
        _TORCHTUNE,
        name="torchtune of September 2024, full training on several GPUs",
        pattern=r"torchtune.*30b8519e8",
        when=r"^full",
        units="carved",
        evidence=(
            "torchtune 30b8519e8 recipes/configs/llama3_1/70B_full.yaml: custom_sharded_layers"
            " ['tok_embeddings', 'output'], which recipes/full_finetune_distributed.py makes units"
        ),
    ),
    replace(
        _TORCHTUNE,
        name="torchtune of May 2024",
        pattern=r"torchtune.*may-sep 2024",
        stack="torchtune-2024-04",
        fsdp2=False,
        evidence=(
            "the table came with torchtune 0217d44c2, whose recipes/*_distributed.py wrap layers with"
            " FullyShardedDataParallel"
        ),
    ),
    _TORCHTUNE,
    Era(
        name="bert on torch 1.x",
        pattern=r"perf_train_gpu_one",
        stack="hf-2022",
        evidence=(
            "transformers docs/source/en/perf_train_gpu_one.mdx of 2022: Trainer defaults, NVML at"
            " the end of training"
        ),
        autocast=False,
        lazy_modules=False,
    ),
    Era(
        name="PEFT comparison",
        pattern=r"huggingface/peft",
        stack="hf-loop",
        autocast=False,
        prepares=True,
        sequence_length=768,
        sequence_reason="max_seq_length of the comparison's data",
        evidence=(
            "huggingface/peft method_comparison/MetaMathQA/run.py, default_training_params.json"
        ),
        default_rank=32,
    ),
    Era(
        name="Qwen under ZeRO 3",
        pattern=r"qwenlm/qwen",
        when=r"^full",
        stack="deepspeed-2023-zero3",
        **_QWEN_DEEPSPEED,
        evidence=(
            "QwenLM/Qwen finetune/finetune_ds.sh, ds_config_zero3.json of September 2023: ZeRO"
            " stage 3 with fp32 masters, no autocast, overlap_comm"
        ),
    ),
    Era(
        name="Qwen under DeepSpeed",
        pattern=r"qwenlm/qwen",
        when=r"^qlora",
        stack="deepspeed-2023",
        **_QWEN_DEEPSPEED,
        evidence=(
            "QwenLM/Qwen finetune/finetune_qlora_single_gpu.sh and finetune_ds.sh of September"
            " 2023: DeepSpeed with fp32 masters, no autocast, reduce_bucket_size 2e8 with"
            " overlap_comm (ds_config_zero2.json)"
        ),
    ),
    Era(
        name="Qwen",
        pattern=r"qwenlm/qwen",
        stack="hf-2023-torch2.0",
        evidence=(
            "QwenLM/Qwen finetune.py, finetune/finetune_lora_single_gpu.sh; README: memory in GB,"
            " PyTorch 2.0, one A100-80; all kernels loaded at once is inferred from about 1 GB that"
            " is there at every length"
        ),
        adapter_dropout=0.05,
        default_rank=64,
        prepares=True,
        lazy_modules=False,
    ),
    Era(
        name="ms-swift",
        drops_long_samples=True,
        pattern=r"modelscope/(ms-)?swift",
        stack="hf-2023",
        evidence=(
            "ms-swift docs/source_en/LLM/Benchmark.md: torch 2.1.1, bitsandbytes 0.41.3, defaults"
            " of llm/utils/argument.py: truncation_strategy delete"
        ),
        adapter_dropout=0.05,
    ),
    Era(
        name="Liger example",
        pattern=r"linkedin/liger-kernel.*liger=yes",
        stack="hf-2024-fsdp",
        kernels="liger",
        evidence=(
            "linkedin/Liger-Kernel of August 2024 examples/huggingface/run_qwen.sh, training.py,"
            " config/fsdp_config.json: activation_checkpointing of FSDP"
        ),
    ),
    Era(
        name="Liger example, not patched",
        pattern=r"linkedin/liger-kernel",
        stack="hf-2024-fsdp",
        evidence="as patched, with --use_liger False",
    ),
    Era(
        name="fsdp_qlora",
        pattern=r"answerdotai/fsdp_qlora",
        stack="hf-2024-loop",
        evidence=(
            "AnswerDotAI/fsdp_qlora of March 2024 train.py: precision bf16 casts the whole model"
            " and PEFT's adapters, lora_dropout 0.1, no clipping, FSDP without mixed precision,"
            " checkpointing put within its units, on by default (use_gradient_checkpointing)"
        ),
        recomputes=True,
        autocast=False,
        adapter_dtype="bf16",
        adapter_dropout=0.1,
        default_rank=64,
        prepares=False,
        clips=False,
    ),
    Era(
        name="Moonlight's recipe",
        pattern=r"megatron-bridge: skills/nemo-mbridge-perf-activation-recompute",
        stack="nemo-all-to-all",
        evidence=(
            "the page's study of Moonlight; Megatron-Bridge recipes/moonlight/h100/moonlight_16b.py"
            " moonlight_16b_pretrain_8gpu_h100_bf16_config: use_precision_aware_optimizer with fp32"
            " masters, gradients and both moments in bf16; Megatron-LM"
            " core/optimizer/optimizer_config.py store_param_remainders True: of a master the half that"
            " the bf16 weight lacks"
        ),
        optimizer="adamw-te:exp_avg=bf16,exp_avg_sq=bf16,master=remainders",
        autocast=False,
        distributed_optimizer=True,
        logs="allocated",
    ),
    Era(
        name="BLOOM's trials",
        pattern=r"bigscience",
        stack="megatron-deepspeed-2021",
        autocast=False,
        lazy_modules=False,
        evidence=(
            "bigscience experiments/tr3m-1B3.md of December 2021 (1,113 MiB of a bare context),"
            " train/tr11-176B-ml/chronicles-prequel.md of February 2022; bigscience-workshop/"
            "Megatron-DeepSpeed 8387ae17 (2023), whose loss never copied its logits"
        ),
    ),
    Era(
        name="axolotl",
        pattern=r"axolotl",
        stack="hf",
        allocator="expandable_segments:True",
        prepares=False,
        evidence=(
            "axolotl loaders/model.py _convert_embedding_modules_dtype: after k-bit preparation"
            " norms, embeddings and head go back to the compute type wherever flash attention is on"
        ),
    ),
)


def era_of(row: Row, *, blind: bool = False) -> Era:
    """The first era whose pattern occurs in the row's source and notes; the generic reading where
    none does, or in blind mode."""
    text = f"{row['source']} | {row['notes']}".lower().replace("\n", " ")
    method = row.words("method") + " | " + row.words("precision")
    found = (
        None
        if blind
        else next(
            (era for era in ERAS if re.search(era.pattern, text) and re.search(era.when, method)),
            None,
        )
    )
    return replace(found, known=True) if found is not None else generic_era(row)
