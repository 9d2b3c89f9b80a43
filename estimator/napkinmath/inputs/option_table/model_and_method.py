"""Options that name the model, what of it is trained, and how its frozen base is stored."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.quantization import FORMATS
from napkinmath.config.train_config import AdapterKind
from napkinmath.inputs.option_table.option import (
    CHOICE,
    COUNT,
    FLAG,
    KEYWORD,
    MAPPING,
    NAMES,
    NUMBER,
    ON,
    PAGE,
    SWITCH,
    Option,
    dtype,
)
from napkinmath.models.tasks import ENDINGS


def _targets(value: object, what: str) -> tuple[str, ...]:
    """Names of modules; all-linear or PEFT's own choice alone."""
    found = values.names(value, what)
    for word in ("all-linear", "peft-default"):
        if len(found) > 1 and word in found:
            raise InputError(
                f"{what} {shown(value)} mixes {word} with names; give one or the other"
            )
    return ("all-linear",) if found in (("all",), ("all-linear",), ("all_linear",)) else found


# name -> (adapter, default quantization format)
METHODS: dict[str, tuple[AdapterKind | None, str]] = {
    "full": (None, ""),
    "lora": (AdapterKind.LORA, ""),
    "qlora": (AdapterKind.LORA, "nf4"),
    "dora": (AdapterKind.DORA, ""),
    "qdora": (AdapterKind.DORA, "nf4"),
    "qalora": (AdapterKind.QALORA, "gptq-int4"),
    "ia3": (AdapterKind.IA3, ""),
    "prompt": (AdapterKind.PROMPT, ""),
    "prefix": (AdapterKind.PREFIX, ""),
}
SPELLINGS = {
    "pretrain": "full",
    "full-finetune": "full",
    "fft": "full",
    "qa-lora": "qalora",
    "(ia)3": "ia3",
    "prompt-tuning": "prompt",
    "prefix-tuning": "prefix",
}
ADAPTER_TYPES = ("auto", "base", "fp32", "bf16", "fp16")
COMPUTE_TYPES = ("auto", "fp32", "bf16", "fp16")
STORAGE_TYPES = ("auto", "uint8", "bf16", "fp16", "fp32")
MODEL = (
    Option(
        key="model",
        help="catalogued name, config.json or its folder, or a hub id with --hub",
        metavar="NAME|PATH",
        sets="estimate.model",
        short="-m",
    ),
    Option(
        key="arch",
        help="bare numbers instead of a model; words: tied gelu mqa learned-pos encoder moe8x2 ...",
        metavar='"L32 h4096 a32 kv8 f14336 v128256"',
        sets="estimate.model",
    ),
    Option(
        key="config",
        help="a model's config instead of its name",
        kind=MAPPING,
        sets="estimate.model",
        away={
            FLAG: "a mapping; --model takes the file that holds it",
            KEYWORD: "the first argument takes the mapping",
        },
    ),
    Option(
        key="task",
        help="head of the model: {choices} [what its config's architectures say]",
        kind=CHOICE,
        metavar="TASK",
        sets="estimate.model",
        choices=lambda: ENDINGS,
    ),
    Option(
        key="hub",
        help="fetch the config of a hub id over the network",
        kind=ON,
        sets="estimate.model",
        away={PAGE: "a request would reach the network"},
    ),
)
METHOD = (
    Option(
        key="method",
        help="{choices}",
        kind=CHOICE,
        metavar="NAME",
        sets="adapter.kind",
        shorthands=(
            ("full", "full", "train every parameter (the default)"),
            ("lora", "lora", "LoRA adapters"),
            ("qlora", "qlora", "LoRA over 4-bit weights"),
        ),
        choices=lambda: METHODS,
        spellings=SPELLINGS,
        joint=True,
        repeats=True,
    ),
    Option(
        key="rank",
        help="LoRA rank [16]",
        kind=COUNT,
        metavar="R",
        sets="adapter.rank",
        aliases=("adapter_rank",),
        short="-r",
        high=1 << 16,
    ),
    Option(
        key="alpha",
        help="LoRA scaling numerator; changes no size",
        kind=COUNT,
        metavar="A",
        sets="adapter.alpha",
        low=0,
        high=1 << 20,
    ),
    Option(
        key="targets",
        help="modules that get adapters, comma-separated, or peft-default [all-linear]",
        kind=NAMES,
        metavar="NAMES",
        sets="adapter.targets",
        reader=_targets,
    ),
    Option(
        key="dropout",
        help="adapter dropout [0]",
        kind=NUMBER,
        metavar="P",
        sets="adapter.dropout",
        low=0,
        high=1,
    ),
    Option(
        key="adapter_dtype",
        help="{choices} [auto: what the stack does]",
        kind=CHOICE,
        metavar="DTYPE",
        sets="adapter.dtype",
        choices=ADAPTER_TYPES,
        reader=dtype,
    ),
    Option(
        key="rslora", help="rank-stabilised scaling", kind=SWITCH, sets="adapter.rank_stabilized"
    ),
    Option(
        key="merge",
        help="adapters are merged into the weights after training (merge_and_unload)",
        kind=SWITCH,
        sets="adapter.merge",
    ),
    Option(
        key="train_modules",
        help="modules trained whole beside the adapters, e.g. embed_tokens,lm_head",
        kind=NAMES,
        metavar="NAMES",
        sets="adapter.trained_modules",
    ),
    Option(
        key="adapters",
        help="adapters resident at once, one trained [1]",
        kind=COUNT,
        metavar="N",
        sets="adapter.num_adapters",
        high=1 << 16,
    ),
    Option(
        key="virtual_tokens",
        help="tokens of prompt or prefix tuning [20]",
        kind=COUNT,
        metavar="N",
        sets="adapter.num_virtual_tokens",
        high=1 << 20,
    ),
    Option(
        key="freeze",
        help="modules that full fine-tuning leaves untrained",
        kind=NAMES,
        metavar="NAMES",
        sets="frozen",
        joint=True,
    ),
)
QUANTIZATION = (
    Option(
        key="quant",
        help="{choices} [QLoRA: nf4]",
        kind=CHOICE,
        metavar="FORMAT",
        sets="quantization.format",
        aliases=("quantization",),
        choices=lambda: FORMATS,
        joint=True,
    ),
    Option(
        key="double_quant",
        help="quantize the scales too [on for nf4 and fp4]",
        kind=SWITCH,
        sets="quantization.double_quant",
    ),
    Option(
        key="quantize_experts",
        help="pack experts held as 3-D parameters too [off: linears only]",
        kind=SWITCH,
        sets="quantization.experts",
    ),
    Option(
        key="group_size",
        help="weights that share a scale [the format's own]",
        kind=COUNT,
        metavar="N",
        sets="quantization.group_size",
        high=1 << 20,
    ),
    Option(
        key="kbit",
        help="prepare_model_for_kbit_training: norms, embeddings, head in fp32 [on]",
        kind=SWITCH,
        sets="quantization.kbit_preparation",
    ),
    Option(
        key="quant_compute_dtype",
        help="type of products with quantized weights: {choices} [auto]",
        kind=CHOICE,
        metavar="TYPE",
        sets="quantization.compute_dtype",
        choices=COMPUTE_TYPES,
        reader=dtype,
    ),
    Option(
        key="quant_storage",
        help="type that holds packed 4-bit weights: {choices} [auto: one that can be sharded]",
        kind=CHOICE,
        metavar="TYPE",
        sets="quantization.storage",
        choices=STORAGE_TYPES,
        reader=dtype,
    ),
    Option(
        key="quant_embeddings",
        help="frozen input embedding, by --kernels napkinmath: {choices} [auto: not quantized]",
        kind=CHOICE,
        metavar="TYPE",
        sets="quantization.embeddings",
        choices=("auto", "int8"),
    ),
    Option(
        key="keep_modules",
        help="modules left unquantized [lm_head]",
        kind=NAMES,
        metavar="NAMES",
        sets="quantization.keep",
    ),
)
