"""Adapters and packed weights in a file of the Trainer or TRL.

Defaults as in TRL 1.16 model_config.py and peft 0.18 tuners/lora/config.py.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import find_stack
from napkinmath.inputs.foreign import dtype_word
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.pins import is_pinned_before
from napkinmath.inputs.retrieval import is_llm2vec
from napkinmath.inputs.rows import give_targets

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

# Switches of TRL's ModelConfig and of scripts of somebody's own.
_SWITCHES = ("use_peft", "use_peft_lora", "use_lora", "lora_enable", "enable_lora", "peft_enabled")
# bitsandbytes 0.47, and what was released with it in August 2025.
_KEEPS_TYPE = (("bitsandbytes", (0, 47)), ("transformers", (4, 55)), ("trl", (0, 21)))


def trains_adapter(job: ForeignJob, mode: str) -> bool:
    """Whether adapters are asked for: by a switch, else by a rank where no `trl` reads it
    (trl 1.16 model_config.py: use_peft is off by default, whatever rank is named)."""
    by_rank = job.program != "TRL" and not is_off(job.content.get("lora_r"))
    switched = any(job.content.get(name) is not None for name in _SWITCHES)
    asked = job.switch(*_SWITCHES, default=mode in ("lora", "qlora"))
    if by_rank and not switched and not asked and not job.program and not job.trained_by:
        job.note(
            "lora_r without use_peft: taken as LoRA, as scripts of one's own do; TRL's own trains all"
            " weights then: --method full"
        )
    return asked or (by_rank and not switched)


def mode_of(job: ForeignJob) -> str:
    """Firefly's word for the method, 'qlora' unless it says another (yangjianxin1/Firefly
    component/argument.py, train.py: NF4 with double quantization, adapters on every linear)."""
    mode = job.take("train_mode")
    is_its = all(key in job.content for key in ("template_name", "train_file"))
    return str(mode if mode is not None else "qlora" if is_its else "").lower()


def read_bitsandbytes(job: ForeignJob, *, default: bool = False, as_loaded: bool = False) -> bool:
    """load_in_4bit / load_in_8bit, or the words of huggingface/peft examples/sft/train.py; returns
    whether the base is quantized. `as_loaded`: it multiplies in the type of loading, float32 unless
    that is said (trl 1.16 trainer/utils.py get_quantization_config, model_config.py dtype)."""
    four = job.switch("load_in_4bit", "use_4bit_quantization", default=default)
    eight = job.switch("load_in_8bit", "use_8bit_quantization", "use_8bit_qunatization")
    if four and eight:
        raise InputError("load_in_4bit and load_in_8bit are both true; keep one of them")
    kind, compute = job.take("bnb_4bit_quant_type"), job.take("bnb_4bit_compute_dtype")
    usual = job.take("default_compute_dtype")
    if as_loaded and compute is None and not {"dtype", "torch_dtype"} & {*job.content}:
        usual = "float32"
    nested = job.switch(
        "use_bnb_nested_quant", "bnb_4bit_use_double_quant", "use_nested_quant", default=default
    )
    if four:
        job.give("quant", str(kind or "nf4"))
        job.give("double_quant", nested)
        job.give("quant_compute_dtype", dtype_word(compute) or None)
        _give_default_products(job, usual)
    elif eight:
        job.give("quant", "int8")
    return four or eight


def _give_default_products(job: ForeignJob, usual: object) -> None:
    """A BitsAndBytesConfig without a compute type asks for fp32, which Linear4bit follows since
    bitsandbytes 0.47 (nn/modules.py compute_type_is_set); before, its first input's type counted."""
    stack = str(job.given.get("stack") or job.options.get("stack") or "hf")
    older = any(is_pinned_before(job, library, first) for library, first in _KEEPS_TYPE)
    if usual is not None and not older and find_stack(stack) is find_stack("hf"):
        why = "transformers' default, slow; bitsandbytes keeps to it since 0.47"
        job.assume("quant_compute_dtype", dtype_word(usual), why)


def read_lora(job: ForeignJob, *, adapter: bool, quantized: bool) -> None:
    """LoRA's rank, targets and whole modules, with TRL's defaults. Raises InputError for a quantized
    base that nothing is trained on."""
    rank, alpha = job.take("lora_r", "lora_rank"), job.take("lora_alpha")
    dropout = job.take("lora_dropout")
    targets = job.take("lora_target_modules", "target_modules")
    saved = job.take("lora_modules_to_save")
    rslora, dora = job.switch("use_rslora"), job.switch("use_dora")
    job.take("lora_task_type")
    if not adapter:
        if quantized:
            raise InputError("a quantized base needs an adapter to train; set use_peft: true")
        return
    job.give("method", "dora" if dora else "lora")
    if rank is None:
        job.assume("rank", 16, "TRL's lora_r")
    else:
        job.give("rank", rank)
    job.give("alpha", alpha)
    if dropout is None:
        job.assume("dropout", 0.05, "TRL's lora_dropout")
    else:
        job.give("dropout", dropout)
    if targets is None and is_llm2vec(job):
        job.give("targets", "all-linear")
    elif targets is None:
        job.assume(
            "targets",
            "peft-default",
            "PEFT's own for the model's type, usually q_proj and v_proj",
        )
    else:
        give_targets(job, targets, "lora_target_parameters")
    job.give("train_modules", saved)
    if rslora:
        job.give("rslora", True)
