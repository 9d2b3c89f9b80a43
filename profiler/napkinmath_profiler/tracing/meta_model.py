"""The user's model, built by their own libraries from a config on the meta device."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from napkinmath.base.dtypes import BF16, FP16, FP32
from napkinmath.config.train_config import Batch
from napkinmath.ir.sounds import samples_of
from napkinmath.lowering.target_names import is_parameter
from torch import nn

from napkinmath_profiler.tracing.picture_inputs import CLASSIFIES, pixels_of, reads_pixels
from napkinmath_profiler.tracing.real_values import on_meta
from napkinmath_profiler.tracing.trace_errors import TraceError

DTYPES: dict[str, torch.dtype] = {
    dtype.name: getattr(torch, dtype.torch) for dtype in (FP32, BF16, FP16)
}
SEED = 0
LANGUAGE_LOSS_CLASSES = (
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForSeq2SeqLM",
    "AutoModelForMaskedLM",
    "AutoModelForImageClassification",
    "AutoModelForSequenceClassification",
    "AutoModelForVideoClassification",
    "AutoModelForAudioClassification",
)
_OWN_AUTO_CLASS = (
    *("CausalLM", "MaskedLM", "PreTraining", "ImageClassification", "VideoClassification"),
    *("AudioClassification", "SequenceClassification", "TokenClassification"),
    *("QuestionAnswering", "MultipleChoice", "CTC"),
)
# Ending of an architecture's name -> the auto class that builds it.
CLASS_OF_ARCHITECTURE_SUFFIX = {
    **{f"For{task}": f"AutoModelFor{task}" for task in _OWN_AUTO_CLASS},
    "LMHeadModel": "AutoModelForCausalLM",
    "ForConditionalGeneration": "AutoModelForSeq2SeqLM",
    "MTModel": "AutoModelForSeq2SeqLM",
    "EncoderModel": "AutoModelForTextEncoding",
    "Model": "AutoModel",
}
# The same of models that read sounds, where the type has no other.
OF_SOUNDS = {
    "ForSequenceClassification": "AutoModelForAudioClassification",
    "ForConditionalGeneration": "AutoModelForSpeechSeq2Seq",
}
LANGUAGE_MODEL_ENDINGS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""What any model of text is called, whatever class its type has."""
LAYERS_AT_RANDOM = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")
"""Probabilities of leaving a layer out, which would draw another step each time: all run."""
# PEFT's name of a task, whose head it trains whole beside the adapters.
PEFT_TASKS = {
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}


class TrainMethod(str, Enum):
    """What is trained."""

    FULL = "full"
    LORA = "lora"
    QLORA = "qlora"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """LoRA as PEFT takes it; ``adapter_dtype`` None means what PEFT does (float32 over a 16-bit
    base)."""

    rank: int = 16
    alpha: int = 32
    dropout: float = 0.0
    targets: str | tuple[str, ...] = "all-linear"
    adapter_dtype: str | None = None
    use_dora: bool = False
    use_rslora: bool = False
    trained_modules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOptions:
    """4-bit weights as bitsandbytes takes them."""

    quant_type: str = "nf4"
    double_quant: bool = True
    experts: bool = False
    """Experts held as 3-D parameters too, as axolotl packs them."""
    kbit_preparation: bool = True
    quant_storage: str = "uint8"
    """Type that holds the packed weights; a floating one can be sharded."""
    compute_dtype: str = ""
    """Type of the products (bnb_4bit_compute_dtype); '' is the type that the model is loaded in."""


def config_from(source: Any) -> Any:
    """A ``PretrainedConfig`` from a mapping, a path to a config.json or its folder, or a config as
    it is."""
    from transformers import AutoConfig

    if isinstance(source, Mapping):
        values = _nested(source)
        if "model_type" not in values:
            raise ValueError(
                "the config has no model_type, so transformers cannot tell which model it is; add"
                " one, such as llama"
            )
        return AutoConfig.for_model(values.pop("model_type"), **values)
    if isinstance(source, (str, bytes)) or hasattr(source, "__fspath__"):
        return AutoConfig.from_pretrained(os.fsdecode(source))
    return source


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields with dotted names ('vision_config.hidden_size') inside the config that they are of, and
    entries of lists ('depths.0') in their lists."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        owner, dot, field = name.partition(".")
        if dot and field.isdecimal():
            found[owner] = [*found.get(owner, []), value]
        elif dot:
            found[owner] = {**found.get(owner, {}), field: value}
        else:
            found[name] = value
    return found


def auto_class(config: Any) -> Any:
    """The transformers auto class that builds ``config`` with its training loss."""
    import transformers

    architecture = (getattr(config, "architectures", None) or [""])[0]
    ends = {
        suffix: name
        for suffix, name in CLASS_OF_ARCHITECTURE_SUFFIX.items()
        if architecture.endswith(suffix)
    }
    for name in (*ends.values(), *(OF_SOUNDS[end] for end in ends if end in OF_SOUNDS)):
        if type(config) in getattr(transformers, name)._model_mapping:
            return getattr(transformers, name)
    other = next((end for end in ends if end not in LANGUAGE_MODEL_ENDINGS), "")
    if other:
        raise TraceError(
            f"transformers has no class of {type(config).__name__} that ends in {other}"
            f" (architectures: {architecture}); give another --task"
        )
    # A config of two towers may also be mapped to its text alone (mllama): the whole model is what
    # is trained.
    first = ("AutoModelForImageTextToText",) if hasattr(config, "vision_config") else ()
    # one that reads sounds may be mapped to its decoder alone (whisper)
    first = ("AutoModelForSpeechSeq2Seq", "AutoModelForCTC", *first)
    for name in (*first, *LANGUAGE_LOSS_CLASSES):
        candidate = getattr(transformers, name)
        if type(config) in candidate._model_mapping:
            return candidate
    raise ValueError(
        f"no transformers auto class with a loss knows the config type {type(config).__name__};"
        " pass a live model instead"
    )


def build_model(
    config: Any, *, dtype: str, attn_implementation: str | None, device: str = "meta"
) -> nn.Module:
    """The transformers model of ``config`` on ``device``, in ``dtype``, in training mode.

    ``attn_implementation`` None is what transformers takes by itself: SDPA where the model has it,
    else eager.
    """
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    for name in LAYERS_AT_RANDOM:
        if getattr(config, name, None):
            setattr(config, name, 0.0)
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        chosen = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        model = auto_class(config).from_config(config, dtype=DTYPES[dtype], **chosen)
    if device == "meta":
        _leave_no_storage(model)
    _keep_in_float32(model, DTYPES[dtype])
    model.train()
    if hasattr(model, "freeze_feature_encoder"):  # as transformers' scripts do by default
        model.freeze_feature_encoder()
    return model


def _leave_no_storage(model: nn.Module) -> None:
    """Put on meta what was made elsewhere: `torch.normal` of a size asks for no default device."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.device.type != "meta":
                made = torch.empty_like(parameter, device="meta")
                setattr(module, name, nn.Parameter(made, requires_grad=parameter.requires_grad))


def _keep_in_float32(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep in float32 what ``from_pretrained`` keeps (transformers modeling_utils.py,
    ``_keep_in_fp32_modules``)."""
    kept: set[str] = set()
    if dtype == torch.float16:
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if not kept:
        return
    pattern = re.compile("|".join(rf"((^|\.){name}($|\.))" for name in sorted(kept)))
    for name, parameter in model.named_parameters():
        if pattern.search(name):
            parameter.data = parameter.data.to(torch.float32)


def prepare_for_kbit(model: nn.Module, *, checkpointing: bool, use_reentrant: bool) -> nn.Module:
    """PEFT's ``prepare_model_for_kbit_training``."""
    from peft import prepare_model_for_kbit_training

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": use_reentrant},
        )


def enable_checkpointing(
    model: Any, *, use_reentrant: bool, every: int = 1, offload: bool = False
) -> None:
    """transformers' activation checkpointing, by the name the installed version has for it."""
    kwargs = {"use_reentrant": use_reentrant}
    if hasattr(model, "activation_checkpointing_enable"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model.activation_checkpointing_enable(kwargs, every_n_layers=every, offload=offload)
    elif every == 1 and not offload:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    else:
        raise ValueError(
            "the installed transformers checkpoints every layer or none; upgrade it for every:K and"
            " offload"
        )


def unwrapped(model: Any) -> nn.Module:
    """The model inside PEFT's wrapper, or itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def peft_task(model: nn.Module, options: AdapterOptions) -> str | None:
    """The task_type that PEFT's guides give a LoraConfig for a class with a head of scores; None
    where adapters are all that is trained.

    With all-linear PEFT takes the type of sequences alone: it refuses to train whole what it
    adapts, and leaves out no other head.
    """
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        return None  # PEFT's class of the task hands on tokens
    name = type(model).__name__
    found = next((task for end, task in PEFT_TASKS.items() if name.endswith(end)), None)
    return found if found == "SEQ_CLS" or options.targets != "all-linear" else None


def add_adapters(model: nn.Module, options: AdapterOptions, *, device: str = "meta") -> nn.Module:
    """PEFT's LoRA around ``model``."""
    from peft import LoraConfig, get_peft_model

    targets: str | list[str] = []
    parameters: list[str] = []
    if isinstance(options.targets, str):
        targets = options.targets
    else:
        targets = [name for name in options.targets if not is_parameter(name)]
        parameters = [name for name in options.targets if is_parameter(name)]
    settings = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=targets,
        target_parameters=parameters or None,
        use_dora=options.use_dora,
        use_rslora=options.use_rslora,
        modules_to_save=list(options.trained_modules) or None,
        task_type=peft_task(model, options),
    )
    with torch.device(device), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = get_peft_model(model, settings)
    if options.adapter_dtype is not None:
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(DTYPES[options.adapter_dtype])
    return wrapped


def example_inputs(
    model: nn.Module,
    config: Any,
    *,
    micro_batch_size: int,
    sequence_length: int,
    attention_mask: bool = False,
    media: Batch | None = None,
    autocast: bool = False,
) -> dict[str, Any]:
    """Meta inputs and labels, of the shape that the loss of ``model`` takes; those of integers have
    values (see real_values.py). ``media`` says how many images a sequence has, and of which
    size; under ``autocast`` a processor's pixels stay in fp32."""
    whole, rows = (micro_batch_size, sequence_length), (micro_batch_size,)
    generator = torch.Generator().manual_seed(SEED)

    def up_to(limit: int, shape: tuple[int, ...]) -> torch.Tensor:
        return on_meta(torch.randint(0, max(limit, 1), shape, generator=generator))

    classes = int(getattr(config, "num_labels", 2) or 2)
    if reads_pixels(unwrapped(model)):
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        pixels = pixels_of(unwrapped(model), config, micro_batch_size, dtype, media)
        return {**pixels, "labels": up_to(classes, rows)}
    if getattr(model, "main_input_name", "input_ids") == "input_features":
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        steps = 2 * config.max_source_positions
        shape = (micro_batch_size, config.num_mel_bins, steps)
        features = torch.empty(shape, dtype=dtype, device="meta")
        return {"input_features": features, "labels": up_to(_vocabulary(config), whole)}
    if getattr(model, "main_input_name", "input_ids") == "input_values":
        samples = samples_of(sequence_length, config.conv_kernel, config.conv_stride)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        sound = torch.empty((micro_batch_size, samples), dtype=dtype, device="meta")
        labels = up_to(classes, rows)
        if type(unwrapped(model)).__name__.endswith("ForCTC"):
            labels = on_meta(_token_ids(config, whole, generator))
        return {"input_values": sound, "labels": labels}
    ids = _token_ids(config, whole, generator)
    batch = {"input_ids": on_meta(ids)}
    if media is not None and media.images:
        from napkinmath_profiler.tracing.media_inputs import with_images

        batch = with_images(batch, ids, unwrapped(model), config, media, autocast=autocast)
    name = type(unwrapped(model)).__name__
    if name.endswith("ForQuestionAnswering"):
        batch |= {end: up_to(sequence_length, rows) for end in ("start_positions", "end_positions")}
    elif name.endswith(("ForSequenceClassification", CLASSIFIES)):
        batch["labels"] = up_to(classes, rows)
    elif name.endswith("ForTokenClassification"):
        batch["labels"] = up_to(classes, whole)
    elif name.endswith(("LMHeadModel", "MTModel")) or not name.endswith("Model"):
        batch["labels"] = up_to(_vocabulary(config), whole)
    if attention_mask:
        batch["attention_mask"] = on_meta(torch.ones(whole, dtype=torch.long))
    return batch


def _token_ids(config: Any, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Random ids that mean words: none that pads, begins or stands for an image; the last ends the
    sequence where the config has such an id."""
    own = vars(config.get_text_config()) | vars(config)
    named = [v for k, v in own.items() if k.endswith(("_token_id", "_token_index"))]
    special = {i for v in named for i in (v if isinstance(v, (list, tuple)) else (v,))}
    plain = torch.tensor([i for i in range(_vocabulary(config)) if i not in special] or [0])
    chosen = torch.randint(0, len(plain), shape, generator=generator)
    ids, end = plain[chosen], getattr(config, "eos_token_id", None)
    if isinstance(end, int) and end < _vocabulary(config):  # a shrunk model keeps its old ids
        ids[:, -1] = end
    return ids


def _vocabulary(config: Any) -> int:
    return int(getattr(config.get_text_config(), "vocab_size", 0) or 2)


def configs_of(model: nn.Module) -> list[Any]:
    """Every config object that modules of ``model`` hold, each once, sub-configs included."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "to_dict"):
            held = [config, *(v for v in vars(config).values() if hasattr(v, "to_dict"))]
            found |= {id(one): one for one in held}
    return list(found.values())


def set_use_cache(model: nn.Module, use_cache: bool) -> None:
    """Say whether forwards fill a key/value cache: a bare loop's do, a Trainer's do not."""
    for config in configs_of(model):
        config.use_cache = use_cache
