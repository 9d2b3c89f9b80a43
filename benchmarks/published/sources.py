"""Whose code, of which time, made the figures of a row: the stack to price, and what its runs did by default.

A row is matched by words in its source and notes, the first row of ERAS that matches wins; the last matches everything, so that
a source nobody has seen is priced as the transformers Trainer of 2024. How a stack behaves is in napkinmath's catalog
(stacks.py); here is only which one it was, with the evidence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from published.rows import Row


@dataclass(frozen=True)
class Era:
    """A library at a time, as the published runs used it."""

    name: str
    pattern: str
    """Regular expression on "source | notes", lower case."""
    stack: str
    evidence: str
    when: str = ""
    """Regular expression on "method | precision" that the row must match too."""
    autocast: bool = True
    """A plain 'bf16' or 'fp16' means weights of that type under autocast (a Trainer's bf16=True), not everything in it."""
    adapter_dtype: str = "auto"
    adapter_dropout: float = 0.0
    double_quant: bool = True
    prepares: bool = True
    """k-bit preparation runs on quantized models (embeddings, norms and head in fp32)."""
    unquantized: tuple[str, ...] = ("lm_head",)
    default_rank: int = 8
    eight_bit_optimizer: str = "adamw-8bit"
    """What a plain 8-bit AdamW is."""
    quantized_optimizer: str = ""
    """Optimizer of quantized models, where the script picks another for them."""
    drops_long_samples: bool = False
    """Samples longer than the limit are left out rather than cut."""
    offload_style: str = "trl"
    """Implementation of activation offloading (a row of napkinmath's lowering/saved_offload.py)."""
    clips: bool = True
    lazy_modules: bool = True
    sequence_length: int = 0
    sequence_reason: str = ""

    def dropout(self, row: Row) -> float:
        """Dropout of the adapters."""
        return self.adapter_dropout

    def kbit_preparation(self, row: Row) -> bool:
        """Whether k-bit preparation ran."""
        return self.prepares


_FMS = r"fms-acceleration.*"
_FMS_EVIDENCE = "fms-acceleration scripts/benchmarks/refs/requirements*.txt, scenarios*.yaml, defaults.yaml"
_FMS_FIELDS = dict(evidence=_FMS_EVIDENCE, adapter_dropout=0.1, default_rank=16)


def _fms(version: str, files: str) -> list[Era]:
    """The three ways that benchmark prepares a model, under the transformers of one of its result files."""
    own = dict(_FMS_FIELDS, prepares=False)
    return [
        Era(name=f"fms {version} foak", pattern=_FMS + files + r".*framework_config \S*foak", stack=f"hf-{version}-foak", **own),
        Era(
            name=f"fms {version} baseline", pattern=_FMS + files + r".*framework_config baseline", stack=f"hf-{version}-trl", **_FMS_FIELDS
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
        autocast=False,
        adapter_dtype="bf16",
        adapter_dropout=0.05,
        double_quant=False,
        prepares=False,
        unquantized=(),
        quantized_optimizer="paged-adamw",
        clips=False,
    ),
    Era(
        name="litgpt",
        pattern=r"^lightning-ai/lit|litgpt|lit-gpt",
        stack="litgpt",
        evidence="litgpt finetune/lora.py and full.py, config_hub/finetune/*/*.yaml, tutorials/resource-tables.md",
        autocast=False,
        adapter_dtype="bf16",
        adapter_dropout=0.05,
        double_quant=False,
        prepares=False,
        unquantized=(),
        quantized_optimizer="paged-adamw",
        clips=False,
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
        evidence="torchtune of April 2024 recipes/configs/llama2/7B_lora_single_device.yaml, datasets/_alpaca.py",
        sequence_length=512,
        sequence_reason="alpaca_dataset truncated to 512 tokens by default",
    ),
    Era(
        name="torchtune",
        pattern=r"torchtune",
        stack="torchtune",
        offload_style="torchtune",
        eight_bit_optimizer="adamw-8bit-torchao",
        autocast=False,
        adapter_dtype="bf16",
        prepares=False,
        unquantized=("lm_head", "output"),
        clips=False,
        evidence="torchtune of November 2024 recipes/configs/llama3_2/3B_*_single_device.yaml: fused AdamW, bf16 throughout, adapters too; docs/source/tutorials/memory_optimizations.rst: torchao AdamW8bit",
    ),
    Era(
        name="bert on torch 1.x",
        pattern=r"perf_train_gpu_one",
        stack="hf-2022",
        evidence="transformers docs/source/en/perf_train_gpu_one.mdx of 2022: Trainer defaults, NVML at the end of training",
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
        evidence="huggingface/peft method_comparison/MetaMathQA/run.py, default_training_params.json",
        default_rank=32,
    ),
    Era(
        name="Qwen under DeepSpeed",
        pattern=r"qwenlm/qwen",
        when=r"^(full|qlora)",
        stack="deepspeed-2023",
        autocast=False,
        adapter_dtype="fp16",
        adapter_dropout=0.05,
        default_rank=64,
        lazy_modules=False,
        evidence="QwenLM/Qwen finetune/finetune_qlora_single_gpu.sh and finetune_ds.sh of September 2023: DeepSpeed with fp32 masters, no autocast, reduce_bucket_size 2e8 with overlap_comm (ds_config_zero2.json)",
    ),
    Era(
        name="Qwen",
        pattern=r"qwenlm/qwen",
        stack="hf-2023-torch2.0",
        evidence="QwenLM/Qwen finetune.py, finetune/finetune_lora_single_gpu.sh; README: memory in GB, PyTorch 2.0, one A100-80; all kernels loaded at once is inferred from about 1 GB that is there at every length",
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
        evidence="ms-swift docs/source_en/LLM/Benchmark.md: torch 2.1.1, bitsandbytes 0.41.3, defaults of llm/utils/argument.py: truncation_strategy delete",
        adapter_dropout=0.05,
    ),
    Era(
        name="axolotl",
        pattern=r"axolotl",
        stack="hf",
        prepares=False,
        evidence="axolotl loaders/model.py _convert_embedding_modules_dtype: after k-bit preparation norms, embeddings and head go back to the compute type wherever flash attention is on",
    ),
    Era(name="default", pattern=r"", stack="hf-2024", evidence="none: a source without a row of its own is taken for the Trainer of 2024"),
)


def era_of(row: Row) -> Era:
    """The first era whose pattern occurs in the row's source and notes."""
    text = f"{row['source']} | {row['notes']}".lower().replace("\n", " ")
    method = row.words("method") + " | " + row.words("precision")
    return next(era for era in ERAS if re.search(era.pattern, text) and re.search(era.when, method))
