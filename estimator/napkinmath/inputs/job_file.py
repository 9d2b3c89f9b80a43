"""Job files: ours, those of axolotl, TRL / HF Trainer, torchtune and LLaMA-Factory, and how
accelerate and DeepSpeed spread them."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.inputs import yaml_text
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.method_options import ADAPTER_OPTIONS, QUANT_OPTIONS
from napkinmath.inputs.option_table import MODEL_KEYS, find_option, nearest
from napkinmath.inputs.option_table.option import JOB
from napkinmath.models import config_file
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

WHAT = "job file"
_KINDS: dict[str, tuple[str, str]] = {
    "torchtune": ("napkinmath.inputs.torchtune", "torchtune"),
    "axolotl": ("napkinmath.inputs.axolotl", "axolotl"),
    "llama-factory": ("napkinmath.inputs.llama_factory", "LLaMA-Factory"),
    "trainer": ("napkinmath.inputs.trainer", "Trainer"),
    "deepspeed": ("napkinmath.inputs.deepspeed", "DeepSpeed"),
    "accelerate": ("napkinmath.inputs.accelerate", "accelerate"),
    "megatron": ("napkinmath.inputs.megatron", "Megatron-LM"),
}


def with_job_file(given: Mapping[str, object], notes: list[str]) -> dict[str, object]:
    """The options of the job file, if one was given, under those of the command line."""
    options = dict(given)
    path = options.pop("job", None)
    if path is None:
        return options
    if not isinstance(path, str):
        raise InputError(f"{WHAT} {shown(path)} is not a path")
    from_file = read_job(path, notes)
    _make_way(from_file, options, notes)
    return {**from_file, **options}


def read_job(path: str, notes: list[str]) -> dict[str, object]:
    """The options a job file gives; `notes` receives what was assumed and what was ignored."""
    content = _load(path)
    kind = kind_of(content, path)
    if kind == "model config":
        return {"model": path}
    if kind == "own":
        return own_options(content, path)
    module, tool = _KINDS[kind]
    read: Callable[[ForeignJob], dict[str, object]] = __import__(module, fromlist=["read"]).read
    notes.append(f"{quoted(path)} read as a job file of {tool}")
    return read(ForeignJob(tool, content, notes))


def kind_of(content: Mapping[str, object], path: str) -> str:
    """Whose job file this is: a key of _KINDS, 'own' or 'model config'."""
    if any(
        values.is_mapping(value) and "_component_" in values.mapping(value, WHAT)
        for value in content.values()
    ):
        return "torchtune"
    if "megatron_arguments" in content:
        return "megatron"
    if "base_model" in content:
        return "axolotl"
    if (
        "finetuning_type" in content
        or "cutoff_len" in content
        or ("stage" in content and "model_name_or_path" in content)
    ):
        return "llama-factory"
    if "train_micro_batch_size_per_gpu" in content or "zero_optimization" in content:
        return "deepspeed"
    if "compute_environment" in content:
        return "accelerate"
    if "peft_type" in content:
        raise InputError(
            f"{WHAT} {quoted(path)} is an adapter's config; give its base with --model and --lora"
            f" --rank {shown(content.get('r', 16))}"
        )
    if (
        "model_name_or_path" in content
        or any(key.startswith(("per_device_", "per_gpu_")) for key in content)
        or "optim" in content
    ):
        return "trainer"
    if "model_type" in content and "model" not in content:
        return "model config"
    return "own"


def _load(path: str) -> dict[str, object]:
    """The file's mapping, from JSON or YAML."""
    text = config_file.read_text(path, what=WHAT)
    if not text.strip():
        raise InputError(f"{WHAT} {quoted(path)} is empty; write e.g. model: llama-7b")
    if "--" in text and not path.endswith(".json"):
        from napkinmath.inputs.megatron import arguments, is_arguments

        if is_arguments(text):
            return arguments(text)
    value = (
        config_file.parse(text, path, what=WHAT)
        if path.endswith(".json")
        else yaml_text.load(text, path, what=WHAT)
    )
    if not values.is_mapping(value):
        raise InputError(
            f"{WHAT} {quoted(path)} holds {shown(value, limit=40)} at its top level, not keys and"
            " values; write e.g. model: llama-7b"
        )
    return values.mapping(value, WHAT)


def own_options(content: Mapping[str, object], path: str) -> dict[str, object]:
    """Our own file: every key is an option, with dashes or underscores; an unknown one is
    refused."""
    options: dict[str, object] = {}
    for given, value in content.items():
        option = find_option(given)
        if option is None or not option.is_at(JOB):
            raise InputError(
                f"{WHAT} {quoted(path)} has the unknown key {shown(given)}{nearest(given, JOB)};"
                " keys are the flags of `estimate --help`"
            )
        key = option.key
        if key in options:
            raise InputError(
                f"{WHAT} {quoted(path)} gives {key} twice, again as {shown(given)}; keep one"
            )
        if value is not None:
            options[key] = "none" if value is False and key in ("quant", "offload") else value
    return options


def _make_way(from_file: dict[str, object], given: Mapping[str, object], notes: list[str]) -> None:
    """Drops what a file says where the command line says something else about the same thing."""
    dropped: list[str] = []
    if any(key in given for key in MODEL_KEYS):
        dropped += [key for key in MODEL_KEYS if key in from_file and key not in given]
    if "method" in given:
        methods = values.listed(given["method"])
        if "full" in methods:
            dropped += [
                key
                for key in (*ADAPTER_OPTIONS, "quant", *QUANT_OPTIONS)
                if key in from_file and key not in given
            ]
        elif "lora" in methods and "quant" not in given:
            dropped += [
                key for key in ("quant", *QUANT_OPTIONS) if key in from_file and key not in given
            ]
    if any(key in given for key in ("data_parallel", "zero")):
        dropped += [
            key for key in ("data_parallel", "zero") if key in from_file and key not in given
        ]
    for key in dropped:
        del from_file[key]
    if dropped:
        notes.append(f"the command line replaces {', '.join(dropped)} of the job file")
