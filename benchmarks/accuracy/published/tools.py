"""What can be known of a run nobody has looked into: the tool its source or notes name, a date, and
the words of its cells.

No rule here knows a source: it reads the name of a library wherever it stands, and says what that
library does by default, with the file of the library that shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

from napkinmath.catalog.stacks import STACKS

from published.dates import Date, date_in, date_of_model
from published.era import Era
from published.rows import Row

RUN_AFTER_MONTHS = 3
_DEFAULT_DATE: Date = (2024, 6)
# transformers' Trainer by date: (first month after it, stack), and what torch's eager Trainer was
# like then.
_TRAINER = (
    ((2023, 3), "hf-2022"),
    ((2023, 10), "hf-2023-torch2.0"),
    ((2024, 2), "hf-2023"),
    ((2024, 11), "hf-4.45"),
    ((2025, 4), "hf-4.48"),
)
# torch loads a module's kernels when first called from CUDA 11.7 on (CUDA_MODULE_LOADING=LAZY), its
# default on Linux from CUDA 12.2.
_LAZY_SINCE: Date = (2023, 11)
# Words of data sets whose samples have known lengths, for tables that leave the length out.
_DATA_LENGTHS = (
    ("alpaca", 512, "Alpaca samples, commonly cut at 512 tokens"),
    ("metamath", 768, "MetaMathQA samples are below 768 tokens"),
    ("imdb", 512, "IMDB reviews, cut at 512"),
)
_USUAL_LENGTH = 1024  # max_length of trl's SFTConfig
_PRETRAINING_LENGTH = 4096  # Llama 2's, and of most pretraining since


@dataclass(frozen=True)
class Tool:
    """A training library: words that name it, and what its runs do."""

    name: str
    pattern: str
    evidence: str
    stack: str = ""
    """A row of napkinmath's stacks; '' is transformers' Trainer of the run's date."""
    by_date: tuple[tuple[Date, str], ...] = ()
    """(first month after it, stack) for libraries whose own code changed."""
    allocator: tuple[tuple[Date, str], ...] = ()
    """(first month of it, what the tool puts into PYTORCH_CUDA_ALLOC_CONF)."""
    fields: dict[str, Any] = field(default_factory=dict)


_EXPANDABLE = "expandable_segments:True"
_OWN_LOOP = dict(autocast=False, adapter_dtype="bf16", prepares=False, clips=False)

TOOLS: tuple[Tool, ...] = (
    Tool(
        "unsloth",
        r"unsloth",
        "unsloth models/_utils.py, loader.py: kernels patched, no k-bit upcast, adapters fp32;"
        " get_peft_model(use_gradient_checkpointing='unsloth')",
        fields=dict(
            prepares=False, kernels="unsloth", eight_bit_optimizer="adamw-8bit", recomputes=True
        ),
    ),
    Tool(
        "axolotl",
        r"axolotl",
        "axolotl loaders/model.py _convert_embedding_modules_dtype: norms, embeddings and head go"
        " back to the compute type with flash attention; utils/__init__.py"
        " set_pytorch_cuda_alloc_conf",
        allocator=(
            ((2024, 2), f"{_EXPANDABLE},roundup_power2_divisions:16"),
            ((2025, 11), _EXPANDABLE),
        ),
        fields=dict(prepares=False),
    ),
    Tool(
        "LLaMA-Factory",
        r"llama[- _]?factory|llamafactory|llamaboard",
        "LLaMA-Factory model/model_utils/checkpointing.py, model/adapter.py: trained parameters"
        " fp32, norms left unless asked; hparams/model_args.py"
        " disable_gradient_checkpointing=False",
        fields=dict(prepares=False, recomputes=True),
    ),
    Tool(
        "ms-swift",
        r"ms-?swift|/swift\b",
        "ms-swift llm/utils/argument.py: truncation_strategy delete, dropout 0.05,"
        " gradient_checkpointing True",
        fields=dict(
            adapter_dropout=0.05, drops_long_samples=True, recomputes=True, logs="reserved"
        ),
    ),
    Tool(
        "fms-acceleration",
        r"fms-acceleration",
        "fms-acceleration plugins/accelerated-peft, scripts/benchmarks/defaults.yaml: dropout 0.1,"
        " rank 16",
        fields=dict(adapter_dropout=0.1, default_rank=16, prepares=False, adds_tokens=True),
    ),
    Tool(
        "fms-fsdp",
        r"fms-fsdp",
        "fms-fsdp main_training_llama.py: torch's FSDP with bf16 mixed precision over fp32"
        " parameters, a loop of its own",
        stack="hf-bare",
        fields=dict(full_weights="fp32", clips=True, without_autocast=True),
    ),
    Tool(
        "fms-hf-tuning",
        r"fms-hf-tuning|foundation-model-stack",
        "fms-hf-tuning tuning/sft_trainer.py: TRL's SFTTrainer, tokens added",
        fields=dict(default_rank=8, adds_tokens=True),
    ),
    Tool(
        "litgpt",
        r"lit-?gpt|lit-?llama|lit-?parrot",
        "litgpt finetune/lora.py, full.py: bf16-true, adapters too; bitsandbytes replaces every"
        " linear; paged AdamW with it",
        stack="litgpt",
        by_date=(((2024, 1), "litgpt-2023"),),
        fields=dict(
            _OWN_LOOP,
            adapter_dropout=0.05,
            double_quant=False,
            unquantized=(),
            quantized_optimizer="paged-adamw",
            logs="allocated",
        ),
    ),
    Tool(
        "torchtune",
        r"torchtune",
        "torchtune recipes/*_single_device.py: bf16 throughout, adapters too; chunked loss and"
        " fused AdamW since late 2024; training/memory.py get_memory_stats",
        stack="torchtune",
        by_date=(((2024, 9), "torchtune-2024-04"),),
        allocator=(((2024, 11), _EXPANDABLE),),  # torchtune/__init__.py
        fields=dict(
            _OWN_LOOP,
            unquantized=("lm_head", "output"),
            offload_style="torchtune",
            eight_bit_optimizer="adamw-8bit-torchao",
            fsdp2=True,
            syncs_each_batch=True,
            logs="allocated",
        ),
    ),
    Tool(
        "prime-rl",
        r"prime-rl",
        "prime-rl trainer/model.py: fp32 parameters under fully_shard on one rank too, layers"
        " compiled; trainer/rl/train.py logs max_memory_reserved",
        stack="hf-bare-layers",
        by_date=(((2026, 3), "prime-rl-2025"),),
        allocator=(((2025, 1), _EXPANDABLE),),  # utils/process.py, benchmarks.yaml
        fields=dict(
            full_weights="fp32",
            without_autocast=True,
            fsdp2=True,
            syncs_each_batch=True,
            logs="reserved",
        ),
    ),
    Tool(
        "AutoModel",
        r"(?:nemo )?automodel",
        "NeMo AutoModel components/distributed/fsdp2.py: fully_shard with bf16 compute over"
        " transformers' or its own torch models, no autocast",
        stack="automodel",
        fields=dict(autocast=False, without_autocast=True, fsdp2=True),
    ),
    Tool(
        "torchtitan",
        r"torchtitan|torchtrain",
        "torchtitan train.py: fp32 parameters, bf16 compute by FSDP's mixed precision, foreach or"
        " fused AdamW; docs/float8.md: --training.compile is required for FP8",
        stack="torchtitan",
        allocator=(((2024, 5), _EXPANDABLE),),  # run_train.sh
        by_date=(
            ((2025, 4), "torchtitan-2024"),
            ((2025, 10), "torchtitan-2025"),
        ),  # components/loss.py compiles the loss since
        fields=dict(
            full_weights="fp32",
            clips=True,
            without_autocast=True,
            fsdp2=True,
            syncs_each_batch=True,
            compiles_fp8=True,
            logs="reserved",
        ),
    ),
    Tool(
        "llm-foundry",
        r"llm-?foundry|mosaicml|composer",
        "llm-foundry scripts/train: composer's amp_bf16 over fp32 parameters; setup.py of 2023:"
        " flash-attn 1.0.9",
        stack="hf-bare",
        fields=dict(full_weights="fp32", first_flash=True),
    ),
    Tool(
        "nanoGPT",
        r"nano-?gpt|build-nanogpt|nano-?chat|llm\.c",
        "nanoGPT train.py: autocast over fp32 parameters, fused AdamW; model.py: no cast of logits",
        stack="torch-loop",
        fields=dict(full_weights="fp32", own_loop=True),
    ),
    Tool(
        "plain loop",
        r"(?:plain|pure|vanilla|native|raw|bare) (?:py)?torch\b|\b(?:its|their|our)? ?own (?:training )?"
        r"(?:loop|code)\b|(?:model|code|written|gpt|loop) (?:from|in) (?:scratch|plain pytorch)",
        "torch nn/functional.py cross_entropy reads logits in their type; nothing casts outputs",
        stack="torch-loop",
        fields=dict(autocast=False, own_loop=True),
    ),
    Tool(
        "Megatron-Bridge",
        r"(?<!nvidia-nemo/)megatron-bridge(?!.*\bperf)",
        "Megatron-Bridge training/mixed_precision.py bf16_mixed (grad_reduce_in_fp32 True), which its"
        " performance recipes alone turn off; DistributedDataParallelConfig"
        " use_distributed_optimizer=True",
        stack="megatron",
        by_date=(((2026, 3), "megatron-2025"),),
        fields=dict(autocast=False, distributed_optimizer=True, logs="allocated"),
    ),
    Tool(
        "NeMo",
        r"megatron-bridge|\bnemo\b|nemo-|nvidia/dgxc-benchmarking: (?!maxtext)",
        "Megatron-Bridge recipes/llama: fused loss, tensor-parallel collectives beside products;"
        " adapters of the performance recipes (NeMo collections/llm/recipes/llama3_8b.py"
        " finetune_performance_optimizations): rank 16 on linear_qkv, in the model's type;"
        " DistributedDataParallelConfig use_distributed_optimizer=True",
        stack="nemo",
        fields=dict(
            autocast=False,
            distributed_optimizer=True,
            default_rank=16,
            default_targets="q_proj,k_proj,v_proj",
            logs="allocated",
        ),
    ),
    Tool(
        "Megatron-DeepSpeed",
        r"megatron-deepspeed|bigscience|vtrain|megatron-turing",
        "Megatron-DeepSpeed megatron/training.py: DeepSpeed's engine holds the gradients, which no"
        " product adds to (arXiv 2201.11990 for MT-NLG)",
        stack="megatron-deepspeed",
        fields=dict(autocast=False),
    ),
    Tool(
        "Megatron",
        r"megatron|gpt-?neox|pai-megatron",
        "Megatron-LM optimizer/optimizer.py: fp32 masters and gradients, gradients of 16 bits"
        " beside them; training/utils.py report_memory",
        stack="megatron",
        by_date=(((2024, 8), "megatron-2024"), ((2026, 3), "megatron-2025")),
        fields=dict(autocast=False, logs="allocated"),
    ),
    Tool(
        "DeepSpeed",
        r"deepspeed|zero-?offload|\bzero-?[123]\b",
        "DeepSpeed runtime/fp16, runtime/zero: 16-bit weights and gradients, fp32 masters",
        stack="deepspeed",
        by_date=(((2024, 2), "deepspeed-2023"),),
        fields=dict(autocast=False),
    ),
    Tool(
        "qlora",
        r"artidoro|guanaco|\bqlora repo|qlora\.py",
        "artidoro/qlora qlora.py: norms fp32, embeddings and head bf16, paged AdamW",
        fields=dict(quantized_optimizer="paged-adamw", adapter_dropout=0.05),
    ),
    Tool(
        "fsdp_qlora",
        r"fsdp[-_]qlora",
        "AnswerDotAI/fsdp_qlora train.py: use_gradient_checkpointing True by default, bf16"
        " throughout, no clipping",
        stack="hf-2024-loop",
        fields=dict(_OWN_LOOP, adapter_dropout=0.1, default_rank=64, recomputes=True),
    ),
    Tool(
        "InternEvo",
        r"internevo|internlm/internlm|internlm-train",
        "InternEvo solver/optimizer/hybrid_zero_optim.py: 16-bit weights and gradients, fp32"
        " masters in parts; train/training_internlm.py wrap_FSDP_model, without no_sync",
        stack="internevo",
        allocator=(((2024, 1), _EXPANDABLE),),  # train.py enable_pytorch_expandable_segments
        fields=dict(autocast=False, syncs_each_batch=True),
    ),
    Tool(
        "TRL",
        r"\btrl\b|huggingface/trl|sft_?trainer",
        "trl trainer/utils.py peft_module_casting_to_bf16, sft_trainer.py",
    ),
    Tool(
        "PEFT",
        r"\bpeft\b|alpaca-lora|\blorax?\.py",
        "peft utils/other.py prepare_model_for_kbit_training",
    ),
    Tool(
        "xtuner",
        r"xtuner",
        "xtuner model/sft.py: use_activation_checkpointing=True by default; mmengine"
        " runner/log_processor.py _get_max_memory",
        fields=dict(recomputes=True, logs="allocated"),
    ),
    Tool(
        "transformers",
        r"transformers|hugging ?face|hf trainer|\baccelerate\b|fastchat|lmflow",
        "transformers trainer.py",
    ),
)


def generic_era(row: Row) -> Era:
    """How a run behaves by the tool and the time that its text names; the Trainer of the run's time
    where none is named."""
    text = row.words("source", "notes").replace("\n", " ")
    tool = _said_to_run(row) or _tool(text)
    date, dated = _date(row, text)
    stack = _stack(tool, date)
    made = dict(tool.fields) if tool is not None else {}
    if tool is not None and stack != tool.stack:
        made.pop("logs", None)  # what an older version's log prints was not looked at
    if tool is None or tool.name in ("TRL", "PEFT", "transformers", "qlora"):
        made.setdefault("full_weights", "fp32" if _needs_fp32_weights(row) else "")
    era = Era(
        name=f"{tool.name if tool else 'Trainer'} of {date[0]}-{date[1]:02d}",
        pattern="",
        stack=stack,
        evidence=tool.evidence if tool else "none: the Trainer of that time",
        allocator=_allocator(tool, date),
        known=tool is not None and (dated or bool(tool.stack)),
        guess="version" if tool is not None else "library",
        lazy_modules=date >= _LAZY_SINCE,
        **made,
    )
    return _with_words(era, row, text, tool)


def _said_to_run(row: Row) -> Tool | None:
    """The library that the notes or the section of a source open with, whoever's page it is."""
    section = row.words("source").partition("[")[2]
    openings = (row.words("notes").strip(), section.strip())
    return next(
        (tool for part in openings for tool in TOOLS if re.match(rf"(?:{tool.pattern})", part)),
        None,
    )


def _tool(text: str) -> Tool | None:
    """The library named first in the source or the notes, the table's order deciding among several
    in the source."""
    for part in (text.partition(" ")[0], text):
        for tool in TOOLS:
            if re.search(tool.pattern, part):
                return tool
    return None


def _date(row: Row, text: str) -> tuple[Date, bool]:
    """(when, whether the text says so)."""
    stated = date_in(text)
    if stated is not None:
        return stated, True
    published = date_of_model(row["model"])
    if published is None:
        return _DEFAULT_DATE, False
    month = published[1] - 1 + RUN_AFTER_MONTHS
    return (published[0] + month // 12, month % 12 + 1), False


def _stack(tool: Tool | None, date: Date) -> str:
    if tool is not None and tool.stack:
        return next((stack for before, stack in tool.by_date if date < before), tool.stack)
    return next((stack for before, stack in _TRAINER if date < before), "hf")


def _allocator(tool: Tool | None, date: Date) -> str:
    since = [conf for first, conf in (tool.allocator if tool else ()) if first <= date]
    return since[-1] if since else ""


def _needs_fp32_weights(row: Row) -> bool:
    """Full training under fp16: the Trainer's gradient scaler refuses gradients of 16-bit weights
    (torch amp/grad_scaler.py unscale_)."""
    return bool(
        re.search(r"fp16|float16(?<!bfloat16)", row.words("precision"))
    ) and "lora" not in row.words("method")


def _with_words(era: Era, row: Row, text: str, tool: Tool | None) -> Era:
    """The era with what the notes add: fused kernels, TRL's preparation, DeepSpeed's flat buffers,
    the length of a known data set."""
    if _spread_over_layers(row) and (tool is None or tool.name == "transformers"):
        # pipelines and split products are the work of Megatron-LM's code, or of its like
        return replace(
            era,
            stack="megatron",
            autocast=False,
            full_weights="",
            sequence_length=_PRETRAINING_LENGTH,
            sequence_reason="the usual length of pretraining",
        )
    if tool is not None and tool.name == "fms-acceleration":
        era = _fms_framework(era, text)
    elif tool is not None and tool.name == "TRL" and f"{era.stack}-trl" in STACKS:
        era = replace(era, stack=f"{era.stack}-trl")
    words = " | ".join(
        (row.words("notes"), row.words("method"), row.words("optimizer"), row.words("sharding"))
    )
    if _by_apex(row) and (tool is None or tool.stack in ("", "torch-loop")):
        return replace(era, stack="apex-o2", autocast=False, full_weights="")
    if tool is None or tool.stack == "":
        if re.search(
            r"transformer ?engine|\bte\b", row.words("precision", "attention", "notes")
        ) and not re.search(r"(no|without|w/o) (te|transformer ?engine)\b", row.words("notes")):
            era = replace(era, stack="hf-transformer-engine")
        if re.search(r"\bunsloth\b", words) and not re.search(
            r"(no|without|w/o|vs\.?) unsloth", words
        ):
            era = replace(era, kernels="unsloth", prepares=False)
        elif (
            re.search(r"(?<![a-z])liger(?![a-z])", words)
            and "fms" not in text
            and not re.search(
                r"(no|without|w/o|vs\.?|non-?) ?liger|liger\s*[=:]\s*(no|off|false|0)\b", words
            )
        ):
            era = replace(era, kernels="liger")
        elif "deepspeed" in row.words("sharding", "notes") and "lora" not in row.words("method"):
            era = replace(
                era,
                stack="deepspeed-2023" if era.stack.startswith("hf-2023") else "deepspeed",
                autocast=False,
            )
    for word, length, reason in _DATA_LENGTHS:
        if word in text:
            return replace(era, sequence_length=length, sequence_reason=reason)
    if "pretrain" in row.words("method"):
        return replace(
            era,
            sequence_length=_PRETRAINING_LENGTH,
            sequence_reason="the usual length of pretraining; the table does not say",
        )
    return replace(
        era,
        sequence_length=_USUAL_LENGTH,
        sequence_reason="the usual limit of a fine-tuning run; the table does not say",
    )


def _by_apex(row: Row) -> bool:
    """Whether Apex made the model 16-bit (opt_level O2)."""
    text = row.words("precision")
    return bool(re.search(r"\bo2\b", text) and re.search(r"apex|fp16|float16", text))


def _spread_over_layers(row: Row) -> bool:
    """Whether tensor or pipeline parallelism runs, but for layers put on devices one after the
    other."""
    text = row.words("sharding")
    return bool(re.search(r"\b(tp|pp)\s*[=:_-]?\s*([2-9]|1\d)", text)) and not re.search(
        r"naive|device_map", text
    )


def _fms_framework(era: Era, text: str) -> Era:
    """fms-acceleration's own settings: 'foak' is its fused operations and kernels, 'baseline' plain
    TRL (its configs/*.yaml)."""
    if re.search(r"framework_config \S*scattermoe", text):
        found = f"{era.stack}-scattermoe"
        return replace(era, stack=found) if found in STACKS else era
    if re.search(r"framework_config \S*foak", text):
        return replace(era, stack=f"{era.stack}-foak") if f"{era.stack}-foak" in STACKS else era
    if "framework_config baseline" in text:
        return replace(
            era,
            stack=f"{era.stack}-trl" if f"{era.stack}-trl" in STACKS else era.stack,
            prepares=True,
        )
    return era
