"""Megatron-LM's arguments, from a launch script or a file of them (Megatron-LM
training/arguments.py)."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.megatron_deepspeed import is_engine, read_engine
from napkinmath.inputs.megatron_mesh import MACHINES, count_of, read_mesh
from napkinmath.inputs.megatron_model import dropouts_of, lacks, model_config, settle_model
from napkinmath.inputs.te_optimizer import read_precision_aware

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.foreign import ForeignJob

_MARKS = (
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--num-layers",
    "--micro-batch-size",
)
_T5_VOCABULARY = 29_056  # bert-large-cased's 28,996 words, padded to 128


def kind_of_arguments(content: Mapping[str, object]) -> str:
    """Whose arguments these are: slime's launch Megatron-LM's training beside an engine."""
    return "slime" if "hf_checkpoint" in content else "megatron"


def is_arguments(text: str) -> bool:
    """Whether a text holds Megatron-LM's arguments."""
    return sum(mark in text for mark in _MARKS) >= 2


def arguments(text: str) -> dict[str, object]:
    """Every `--name value` of a script as name -> value, switches as True; shell variables are
    filled in where the script sets them."""
    import re

    text = re.sub(r"(^|\s)#.*", " ", text)
    text = re.sub(r"(\w+)=(\"?)\$\{\1:-([^}]*)\}", r"\1=\2\3", text)  # NAME=${NAME:-default}
    variables = {
        m[1]: m[2].strip("\"'")
        for m in re.finditer(r"(?:^|[\s;])(\w+)=(\"[^\"]*\"|'[^']*'|[^\s()\"']+)", text)
    }

    def filled(word: str) -> str:
        for _ in range(8):
            replaced = re.sub(
                r"\$\{?(\w+)(?::-([^}]*))?\}?", lambda m: variables.get(m[1], m[2] or m[0]), word
            )
            if replaced == word:
                return word
            word = replaced
        return word

    words = [word for word in re.split(r"[\s\"'()\\]+|(?<=[\w}])=(?=\$|\d)", text) if word]
    found: dict[str, object] = {
        name: filled(value) for name, value in variables.items() if name in MACHINES
    }
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        following = words[index + 1] if index + 1 < len(words) else "--"
        name = word[2:].replace("-", "_")
        found[name] = (
            True
            if following.endswith("=")  # the next array of the script: NAME=(
            or (following.startswith("-") and not following.lstrip("-").isdecimal())
            else _number(filled(following))
        )
    return {"megatron_arguments": True, **found}


def arguments_of_yaml(content: object, file: str) -> dict[str, object]:
    """The arguments of a model_config.yaml, whose MODEL_ARGS hold '--name: value'; switches that are
    false are left out. Raises InputError where they are none of Megatron-LM's."""
    given = values.mapping(
        values.mapping(content, "job file").get("MODEL_ARGS") or {}, "MODEL_ARGS"
    )
    if not any(key.startswith("--") for key in given):
        said = f"{shown(next(iter(given)))}, which is NeMo's, and no" if given else "no"
        raise InputError(
            f"MODEL_ARGS of job file {file} has {said} argument of Megatron-LM (--num-layers); give"
            " the run with flags, from --model on"
        )
    found = {
        key.removeprefix("--").replace("-", "_"): value
        for key, value in given.items()
        if value is not False
    }
    return {"megatron_arguments": True, **found}


def _number(text: str) -> object:
    try:
        return int(text)
    except ValueError:
        return text


_NO_TRAINING = r"text_generation|ptq|quantize|export|convert|generate_|inference|server"
_OPTIMIZERS = {
    **{"adam": "adamw-fused", "sgd": "sgd", "lion": "lion"},
    **dict.fromkeys(("muon", "dist_muon"), "muon"),
}
_KERNELS = {"flash": "flash2", "fused": "cudnn", "auto": None}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a Megatron-LM launch."""
    job.take("megatron_arguments")
    _check_program(job)
    fused = is_off(job.take("no_gradient_accumulation_fusion"))
    job.give("stack", "megatron" if fused else "megatron-unfused")
    if "encoder_num_layers" in job.content:
        _read_t5(job)
    else:
        settled = job.is_settled("model") and lacks(job)
        job.give("config", None if settled else model_config(job))
        if settled:
            settle_model(job)
        job.give("ctx", _sequence(job))
    rows = count_of(job, "micro_batch_size") or count_of(job, "batch_size") or 1
    job.give("bs", rows)
    bf16, fp16, eight = job.take("bf16"), job.take("fp16"), job.take("fp8_format", "fp8")
    kind = "bf16" if bf16 else "fp16" if fp16 else "fp32"
    job.give("precision", "fp8" if bf16 and not is_off(eight) else kind)
    if "encoder_num_layers" not in job.content and job.options["precision"] != "fp32":
        read_attention(job)
    job.give("clip", job.take("clip_grad") not in (0, "0", "0.0"))
    _read_optimizer(job)
    read_sums(job)
    read_recomputation(job)
    data = read_mesh(job, rows)
    if is_engine(job):
        read_engine(job, data)
    elif job.take("use_distributed_optimizer"):
        job.give("zero", 1 if data > 1 else None)
    elif data > 1:
        job.give("data_parallel", ["ddp"])
    return job.finish()


def _sequence(job: ForeignJob) -> int | None:
    """Tokens of the language model: beside an encoder --seq-length is the images' (pretrain_vlm.py
    model_provider; examples/mimo --total-seq-length)."""
    own = count_of(job, "seq_length")
    return count_of(job, "decoder_seq_length") or count_of(job, "total_seq_length") or own


def _read_optimizer(job: ForeignJob) -> None:
    """--optimizer (training/arguments.py: also soap and adaptive_muon, which are not modelled)."""
    name = str(job.take("optimizer") or "adam").lower()
    if name not in _OPTIMIZERS:
        job.refuse("optimizer", f"--optimizer {shown(name)} of Megatron-LM is not modelled")
    job.give("optimizer", _OPTIMIZERS.get(name))


def read_attention(job: ForeignJob) -> None:
    """Kernels of 16 bits that are named (transformer/enums.py AttnBackend); the rest, which holds
    its scores, is left to the table of keys."""
    backend = str(job.content.get("attention_backend") or "").lower().rpartition(".")[2]
    if backend in _KERNELS:
        job.take("attention_backend")
        job.give("attention", _KERNELS[backend])
    elif job.content.get("use_flash_attn") or job.content.get("use_flash_attn_v2"):
        job.take("use_flash_attn", "use_flash_attn_v2")
        job.give("attention", "flash2")


def read_sums(job: ForeignJob) -> None:
    """The type of the gradient buffers: fp32 unless 16 bits are asked for; and what the optimizer
    keeps (training/arguments.py validate_args)."""
    in_fp32 = job.take("accumulate_allreduce_grads_in_fp32"), job.take("grad_reduce_in_fp32")
    if job.take("grad_reduce_in_bf16") or False in in_fp32:
        job.give("reduce_dtype", "bf16")
    read_precision_aware(job, recipe=job.content.get("fp8_recipe"))


def _read_t5(job: ForeignJob) -> None:
    """pretrain_t5.py's encoder and decoder as T5's, whose products they are."""
    names = ("hidden_size", "num_attention_heads", "encoder_num_layers", "decoder_num_layers")
    hidden, heads, above, below = (count_of(job, name) or 12 for name in names)
    vocabulary = count_of(job, "vocab_size") or count_of(job, "padded_vocab_size")
    if vocabulary is None:
        vocabulary = _T5_VOCABULARY
        job.note(f"--vocab-size not given, taken as {vocabulary} (BERT's cased words)")
    job.take("vocab_extra_ids", "max_position_embeddings", "tokenizer_type", "kv_channels")
    job.give("ctx", count_of(job, "encoder_seq_length") or count_of(job, "seq_length"))
    job.give("target_ctx", count_of(job, "decoder_seq_length"))
    dropout = dropouts_of(job)["resid_pdrop"]
    job.give(
        "config",
        {
            "model_type": "t5",
            "d_model": hidden,
            "num_heads": heads,
            "num_layers": above,
            "num_decoder_layers": below,
            "d_kv": count_of(job, "kv_channels") or hidden // heads,
            "d_ff": count_of(job, "ffn_hidden_size") or 4 * hidden,
            "vocab_size": vocabulary,
            "feed_forward_proj": "gated-gelu" if job.take("swiglu") else "relu",
            "dropout_rate": dropout,
        },
    )
    job.leave_out(
        "encoder_num_layers",
        "biases, norms and positions of Megatron's T5 are priced as those of T5 1.0",
        memory=Difference.EITHER,
        time=Difference.EITHER,
    )


def _check_program(job: ForeignJob) -> None:
    """Raises InputError for a program that trains nothing, or, unless a model is given, no GPT or
    T5."""
    import re

    is_script = "MODEL_ARGS:" not in job.text  # whose own program is elsewhere
    programs = re.findall(r"([\w.-]+)\.py\b", job.text) if is_script else []
    others = [name for name in programs if re.search(_NO_TRAINING, name)]
    if others and not any("train" in name or "tune" in name for name in programs):
        raise InputError(
            f"{shown(others[0] + '.py')} of Megatron-LM trains nothing; give the script of a training"
        )
    found = re.search(r"\b(pretrain_(bert|ict|vision\w*)|tasks/\S*main)\.py\b", job.text)
    if found is not None:
        job.refuse("model", f"{shown(found[0])} of Megatron-LM trains another model than GPT")
    data = str(job.content.get("data_path"))
    other = data if "bert" in data.lower() else None
    if not is_script:  # test_cases/MODEL/NAME/model_config.yaml, whose images no key tells
        folders = job.path.replace("\\", "/").split("/")[-3:-1]
        told = (word for word in folders if re.match(r"bert|multimodal", word, re.I))
        other = next(told, other)
    if other is not None and "encoder_num_layers" not in job.content:  # no T5 either
        job.refuse("model", f"{shown(other)} is of another model than Megatron-LM's GPT")


def read_recomputation(job: ForeignJob) -> None:
    """--recompute-granularity and its neighbours; --checkpoint-activations was full until 2022."""
    granularity, method, layers = (
        job.take("recompute_granularity"),
        job.take("recompute_method"),
        count_of(job, "recompute_num_layers"),
    )
    if granularity is None and job.switch("checkpoint_activations"):
        job.give("checkpointing", "full")
        return
    if granularity == "full":
        if method == "block":
            job.note("--recompute-method block is priced as every layer recomputed")
        job.give(
            "checkpointing",
            f"every:{layers}" if method == "uniform" and (layers or 1) > 1 else "full",
        )
        return
    if granularity == "selective" or job.take("recompute_activations"):
        job.leave_out(
            "recompute_activations" if granularity is None else "recompute_granularity",
            "the attention core runs again in the backward, which frees nothing of a fused kernel"
            " (core/transformer/attention.py _checkpointed_attention_forward)",
            time=Difference.MORE,
        )
    elif granularity is not None:
        raise InputError(
            f"--recompute-granularity {shown(granularity)} is unknown; use full or selective"
        )
    job.give("checkpointing", "none")
