"""What the readers of other tools' job files share: keys taken one by one, so that those nobody
took can be said aloud."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.dtypes import dtype_name
from napkinmath.base.errors import InputError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# Keys that change neither memory nor time of a training step, by their beginning or whole.
_HARMLESS_STARTS = (
    "adam_",
    "chat_template",
    "checkpoint_",
    "comet_",
    "dataset",
    "data_",
    "ddp_",
    "debug",
    "early_stopping",
    "eval",
    "hf_",
    "hub_",
    "include_",
    "key_",
    "load_best",
    "logging",
    "log_",
    "loss_watchdog",
    "lr_",
    "mlflow_",
    "neptune",
    "num_train",
    "output_",
    "plot_",
    "push_to",
    "report_to",
    "resume",
    "save",
    "seed",
    "special_",
    "strict",
    "swanlab",
    "test_",
    "tokenizer",
    "tokens",
    "train_on",
    "trust_",
    "val_",
    "wandb",
    "warmup",
    "ray_",
    "profiler",
    "metric",
    "preprocessing",
    "preview",
)
_HARMLESS = frozenset(
    {
        "base_model_config",
        "base_model_ignore_patterns",
        "bnb_config_kwargs",
        "cache_dir",
        "cosine_min_lr_ratio",
        "do_eval",
        "do_predict",
        "do_train",
        "epochs",
        "experimental_skip_move_to_device",
        "extra_special_tokens",
        "group_by_length",
        "hub",
        "is_falcon_derived_model",
        "is_llama_derived_model",
        "is_mistral_derived_model",
        "is_qwen_derived_model",
        "learning_rate",
        "length_column_name",
        "local_rank",
        "lora_fan_in_fan_out",
        "lora_model_dir",
        "max_samples",
        "max_steps",
        "max_steps_per_epoch",
        "model_revision",
        "model_type",
        "momentum",
        "num_epochs",
        "optim_args",
        "overwrite_cache",
        "overwrite_output_dir",
        "remove_unused_columns",
        "revision_of_model",
        "run_name",
        "shuffle",
        "shuffle_dataset",
        "shuffle_merged_datasets",
        "split_batches",
        "stage",
        "template",
        "torchdistx_path",
        "weight_decay",
        "xpu",
        "device",
        "name",
        "version",
        "type_of_model",
        "preprocess_num_proc",
        "label_names",
        "mask_history",
        "eos_token",
        "pad_token",
        "role_field",
        "padding_side",
        "metrics",
        "rl_beta",
        "disable_tqdm",
        "fsdp_cpu_ram_efficient_loading",
        "packing_strategy",
        "neftune_noise_alpha",
        "flash_attn_fuse_qkv",
        "ddp",
        "bos_token",
        "unk_token",
        "average_tokens_across_devices",
        "completion_only_loss",
        "assistant_only_loss",
        "truncation_mode",
    }
)
_SHARDING = (
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "fsdp_version",
    "context_parallel_size",
    "tensor_parallel_size",
    "tensor_parallel_dim",
    "dp_shard_size",
    "sequence_parallel_degree",
)


class ForeignJob:
    """Another tool's job file: keys are taken, options and notes are given."""

    def __init__(self, tool: str, content: Mapping[str, object], notes: list[str]) -> None:
        self.tool, self.content, self.notes = tool, content, notes
        self.options: dict[str, object] = {}
        self._taken: set[str] = set()

    def take(self, *keys: str) -> object:
        """The first of these keys that has a value; None where none has."""
        found: object = None
        for key in keys:
            self._taken.add(key)
            value = self.content.get(key)
            if found is None and value is not None and value != "":
                found = value
        return found

    def switch(self, *keys: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.take(*keys)
        return default if value is None else values.switch(value, keys[0])

    def mapping(self, key: str) -> Mapping[str, object]:
        """A nested mapping; empty where absent."""
        value = self.take(key)
        return {} if value is None else values.mapping(value, key)

    def give(self, option: str, value: object) -> None:
        """Sets an option unless the value is None."""
        if value is not None:
            self.options[option] = value

    def note(self, text: str) -> None:
        """Says something aloud."""
        self.notes.append(f"{self.tool}: {text}")

    def assume(self, option: str, value: object, why: str) -> None:
        """Sets an option the file does not give, and says so."""
        self.options[option] = value
        self.note(f"{option} not given, taken as {value} ({why})")

    def finish(self) -> dict[str, object]:
        """The options; keys that nobody took and that may matter are said aloud."""
        sharding = [key for key in _SHARDING if self.content.get(key) and key not in self._taken]
        if sharding:
            self.note(f"{', '.join(sharding)} not priced: this is one GPU without sharding")
        ignored = [
            key
            for key, value in self.content.items()
            if key not in self._taken
            and key not in _SHARDING
            and _may_matter(key)
            and value not in (None, False, "", [], {})
        ]
        if ignored:
            self.note(f"ignored: {', '.join(ignored)}")
        return self.options


def precision_of(
    job: ForeignJob,
    *,
    bf16: bool,
    fp16: bool,
    tf32: bool,
    weights: str,
    quantized: bool,
    adapter: bool,
) -> str:
    """Our precision for a Trainer's bf16 / fp16 switches and the type weights are loaded in."""
    if bf16 and fp16:
        raise InputError("bf16 and fp16 are both true; keep one of them")
    kind = dtype_word(weights)
    full = kind == "fp32"
    if bf16:
        return "bf16-amp" if full and not quantized else "bf16-autocast"
    if fp16:
        return "fp16-autocast" if quantized or (adapter and not full) else "fp16-amp"
    if kind in ("bf16", "fp16"):
        return kind
    return "tf32" if tf32 else "fp32"


def dtype_word(value: object) -> str:
    """Our name of a dtype, other words in lower case; empty for None."""
    return "" if value is None else dtype_name(str(value))


def attention_word(value: object) -> str | None:
    """Our name of a transformers attn_implementation."""
    if value is None:
        return None
    word = str(value).lower()
    if "flash" in word or word in ("fa2", "fa3"):
        return "flash2"
    return {
        "disabled": "eager",
        "sdpa": "sdpa",
        "eager": "eager",
        "auto": "auto",
        "flex_attention": "sdpa",
    }.get(word, word)


def _may_matter(key: str) -> bool:
    return key not in _HARMLESS and not key.startswith(_HARMLESS_STARTS)
