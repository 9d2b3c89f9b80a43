"""Names that people's own training scripts give to what the Trainer has under others.

Read in QwenLM/Qwen finetune.py, haotian-liu/LLaVA llava/train/train.py, artidoro/qlora qlora.py,
meta-llama/llama-cookbook configs/training.py, microsoft/DeepSpeedExamples applications/DeepSpeed-Chat (main.py, dschat/utils/ds_utils.py),
tloen/alpaca-lora finetune.py.
"""

from __future__ import annotations

from napkinmath.inputs.known_keys import is_off

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.words import Arguments

# The Trainer's key -> names that mean the same, the most telling first.
_NAMES = {
    "model_name_or_path": ("model_name", "model_path", "model_id", "model"),
    "per_device_train_batch_size": (
        *("micro_batch_size", "per_device_batch_size", "batch_size_training", "batch_size"),
    ),
    "gradient_accumulation_steps": ("grad_accum", "grad_accum_steps", "accumulation_steps"),
    "max_seq_length": ("max_seq_len", "seq_len", "seq_length", "max_len", "context_length"),
    "lora_r": ("lora_rank", "lora_dim"),
    "lora_target_modules": ("target_modules", "lora_targets", "trainable"),
    "lora_modules_to_save": ("modules_to_save",),
    "use_peft": ("use_lora", "lora_enable", "lora"),
    "load_in_4bit": ("use_qlora", "q_lora", "qlora", "use_4bit"),
    "learning_rate": ("lr",),
    "tp": ("tp_size", "tensor_parallel_size", "tensor_model_parallel_size", "tensor_parallel"),
    "pp": ("pp_size", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "cp": ("cp_size", "context_parallel_size"),
    "ep": ("ep_size", "expert_parallel_size", "expert_model_parallel_size"),
}
# Names that mean an adapter's beside a word of LoRA, and something else without: a process's rank.
_OF_LORA = {"lora_r": "rank", "lora_alpha": "alpha", "lora_dropout": "dropout"}
# What a script that trains is told.
_TRAINS = (
    *("learning_rate", "lr", "num_train_epochs", "num_epochs", "epochs", "max_steps"),
    *("gradient_accumulation_steps", "weight_decay", "zero_stage"),
    *("per_device_train_batch_size", "use_lora", "lora_enable", "use_qlora"),
)
# What a script may have defaults of that change an answer.
USUAL = frozenset(
    [
        *(name for key, names in _NAMES.items() for name in (key, *names)),
        *("lora_alpha", "lora_dropout", "lora_module_name", "zero_stage", "offload", "dtype"),
        *("bf16", "fp16", "gradient_checkpointing", "only_optimize_lora", "bits"),
        "data_output_path",  # DeepSpeed-Chat's, whose type is fp16
        *("optim", "per_gpu_train_batch_size", "attn_implementation"),
    ]
)
_CHAT = ("data_output_path", "data_split")
# alpaca-lora's words -> the Trainer's, and what its train() takes where they are not given.
_ALPACA_LORA = {
    "micro_batch_size": "per_device_train_batch_size",
    "cutoff_len": "max_seq_length",
    "num_epochs": "num_train_epochs",
}
_ALPACA_TAKES: dict[str, object] = {
    "micro_batch_size": 4,
    "cutoff_len": 256,
    "lora_r": 8,
    "lora_dropout": 0.05,
    "lora_target_modules": ["q_proj", "v_proj"],
}
_ALPACA_HAS: dict[str, object] = {
    **{"use_peft": True, "load_in_8bit": True, "fp16": True, "gradient_checkpointing": True},
    "optim": "adamw_torch",
}


def by_usual_names(given: Arguments, script: str = "") -> list[str]:
    """Gives a script's words the Trainer's names, and says which; nothing where the words are not
    those of a training. A script that says LoRA in its name has a rank of one."""
    content, told = given.content, list[str]()
    if not any(key in content or key in given.computed for key in _TRAINS):
        return told
    content["loaded_by_script"] = True
    for key, names in _NAMES.items():
        found = next((n for n in names if n in content or n in given.computed), None)
        if found is None or key in content or key in given.computed:
            continue
        if found == "lora" and not isinstance(content.get(found), bool):
            continue
        for kept in (content, given.computed):
            if found in kept:
                kept[key] = kept.pop(found)  # pyright: ignore[reportArgumentType]
        given.lines[key] = given.lines.get(found, 0)
        if found in given.elsewhere:
            given.elsewhere[key] = given.elsewhere.pop(found)
        if key != "learning_rate":
            told.append(f"{found} taken as {key}")
    _name_adapter(given, told, script)
    _name_modules(content, told)
    _name_bits(content, told)
    if is_off(content.get("lora_r")):
        content.pop("lora_r", None)
    if content.get("load_in_4bit"):
        content["use_peft"] = True
    _name_zero(content, told)
    if any(key in content for key in _CHAT):  # ds_utils.py get_train_ds_config
        half = "bf16" if str(content.pop("dtype", "fp16")) == "bf16" else "fp16"
        content.setdefault(half, True)
    return told


def by_alpaca_lora(given: Arguments, gpus: int) -> list[str]:
    """Gives the words of alpaca-lora's script, and of those made from it, the Trainer's names: LoRA
    on a base of 8 bits in fp16, whose `batch_size` is that of all GPUs."""
    content = given.content
    if "base_model" not in content and "base_model" not in given.computed:
        return []
    for kept in (content, given.computed):
        if "base_model" in kept:
            kept["model_name_or_path"] = kept.pop("base_model")  # pyright: ignore[reportArgumentType]
    given.lines["model_name_or_path"] = given.lines.get("base_model", 0)
    told = ["base_model taken as model_name_or_path"]
    keys = {*content, *given.computed}
    if not keys & {"micro_batch_size", "cutoff_len"} or "per_device_train_batch_size" in keys:
        return told
    for key, value in _ALPACA_TAKES.items():
        if key not in keys:
            content[key] = value
    for key, value in _ALPACA_HAS.items():
        if key not in keys:
            content[key] = value
    micro, whole = content.get("micro_batch_size"), content.pop("batch_size", 128)
    if isinstance(micro, int) and isinstance(whole, int) and micro > 0:
        content["gradient_accumulation_steps"] = max(1, whole // micro // gpus)
    for name, key in _ALPACA_LORA.items():
        if name in content:
            content[key] = content.pop(name)
            given.lines[key] = given.lines.get(name, 0)
    told.append("read as alpaca-lora's finetune.py: LoRA on a base in int8, fp16, checkpointing")
    return told


def _name_adapter(given: Arguments, told: list[str], script: str) -> None:
    keys = {*given.content, *given.computed}
    words = (script.lower(), *keys)
    if not any("lora" in word or word in ("use_peft", "load_in_4bit") for word in words):
        return
    for key, name in _OF_LORA.items():
        if key in keys or name not in given.content:
            continue
        given.content[key] = given.content.pop(name)
        given.lines[key] = given.lines.get(name, 0)
        told.append(f"{name} taken as {key}")
    has_rank = {"lora_r", "lora_rank", "use_peft", "use_lora"} & {*given.content, *given.computed}
    if "lora" in script.lower() and not has_rank:
        given.content |= {"use_peft": True, "lora_r": 8}  # peft tuners/lora/config.py
        told.append("its name says LoRA and no word its rank: 8 taken, PEFT's own")


def _name_modules(content: dict[str, object], told: list[str]) -> None:
    """DeepSpeed-Chat adapts the linears whose path has a text in it (dschat/utils/module/lora.py
    convert_linear_layer_to_lora)."""
    import re

    part = content.get("lora_module_name")
    if isinstance(part, str) and part and "lora_target_modules" not in content:
        several = part.split(",")  # names of PEFT's
        content["lora_target_modules"] = several if len(several) > 1 else f".*{re.escape(part)}.*"
        del content["lora_module_name"]
        told.append(f"lora_module_name {part} taken as lora_target_modules")


def _name_bits(content: dict[str, object], told: list[str]) -> None:
    name = "quantization_bit" if "quantization_bit" in content else "bits"
    bits = content.get(name)
    if bits in (4, 8) and f"load_in_{bits}bit" not in content:
        content[f"load_in_{bits}bit"] = True
        content.setdefault("use_peft", True)
        del content[name]
        told.append(f"{name} {bits} taken as load_in_{bits}bit")


def _name_zero(content: dict[str, object], told: list[str]) -> None:
    """DeepSpeed's stage among a script's own words."""
    stage = content.get("zero_stage")
    if not isinstance(stage, int) or content.get("deepspeed") not in (None, True):
        return
    zero: dict[str, object] = {"stage": stage}
    if content.pop("offload", False) is True:
        zero["offload_optimizer"] = {"device": "cpu"}
        if stage == 3:
            zero["offload_param"] = {"device": "cpu"}
    content["deepspeed"] = {"zero_optimization": zero}
    del content["zero_stage"]
    told.append(f"zero_stage {stage} taken as DeepSpeed's")
