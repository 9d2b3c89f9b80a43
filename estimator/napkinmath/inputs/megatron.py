"""Megatron-LM's arguments, from a launch script or a file of them (Megatron-LM
training/arguments.py)."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import give_experts

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
_DEFAULT_VOCABULARY = 50257  # GPT-2's tokenizer, which the published launch scripts use
_T5_VOCABULARY = 29_056  # bert-large-cased's 28,996 words, padded to 128
_GPUS_PER_NODE, _NODES = (
    ("GPUS_PER_NODE", "NPROC_PER_NODE", "nproc_per_node", "nproc-per-node"),
    ("NNODES", "NUM_NODES", "nnodes"),
)


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
        name: filled(value)
        for name, value in variables.items()
        if name in (*_GPUS_PER_NODE, *_NODES)
    }
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        following = words[index + 1] if index + 1 < len(words) else "--"
        name = word[2:].replace("-", "_")
        found[name] = (
            True
            if following.endswith("=")  # the next array of the script: NAME=(
            or (following.startswith("-") and not following.lstrip("-").isdigit())
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
        job.give("config", _model(job))
        job.give("ctx", _count(job, "seq_length"))
    rows = _count(job, "micro_batch_size") or 1
    job.give("bs", rows)
    job.give("precision", "bf16" if job.take("bf16") else "fp16" if job.take("fp16") else "fp32")
    if "encoder_num_layers" not in job.content and job.options["precision"] != "fp32":
        read_attention(job)
    job.give("clip", job.take("clip_grad") not in (0, "0", "0.0"))
    job.give("optimizer", {"sgd": "sgd"}.get(str(job.take("optimizer") or "adam"), "adamw-fused"))
    _sums(job)
    read_recomputation(job)
    _mesh(job, rows)
    return job.finish()


def read_attention(job: ForeignJob) -> None:
    """Kernels of 16 bits that are named (transformer/enums.py AttnBackend); the rest, which holds
    its scores, is left to the table of keys."""
    backend = str(job.content.get("attention_backend") or "").lower().rpartition(".")[2]
    if backend in _KERNELS:
        job.take("attention_backend")
        job.give("attention", _KERNELS[backend])
    elif job.content.get("use_flash_attn"):
        job.take("use_flash_attn")
        job.give("attention", "flash2")


def _sums(job: ForeignJob) -> None:
    """The type of the gradient buffers: fp32 unless 16 bits are asked for."""
    in_fp32 = job.take("accumulate_allreduce_grads_in_fp32"), job.take("grad_reduce_in_fp32")
    if job.take("grad_reduce_in_bf16") or False in in_fp32:
        job.give("reduce_dtype", "bf16")


def _count(job: ForeignJob, name: str) -> int | None:
    value = job.take(name)
    return None if value is None else values.count(value, f"--{name.replace('_', '-')}")


def _model(job: ForeignJob) -> dict[str, object]:
    """Sizes as the config of the family that runs the same operations: Llama's or Mixtral's with
    SwiGLU and RMSNorm, else GPT-2's."""
    sizes = {
        name: _count(job, name) for name in ("num_layers", "hidden_size", "num_attention_heads")
    }
    missing = [f"--{name.replace('_', '-')}" for name, value in sizes.items() if value is None]
    if missing:
        raise InputError(
            f"Megatron-LM's arguments lack {', '.join(missing)}; give them, or a model with --model"
        )
    layers, hidden, heads = (int(value or 0) for value in sizes.values())
    gated = bool(job.take("swiglu"))
    width = _count(job, "ffn_hidden_size") or (
        64 * ((8 * hidden // 3 + 63) // 64) if gated else 4 * hidden
    )
    vocabulary = _count(job, "vocab_size") or _count(job, "padded_vocab_size")
    if vocabulary is None:
        vocabulary = _DEFAULT_VOCABULARY
        job.note(f"--vocab-size not given, taken as {vocabulary} (GPT-2's tokenizer)")
    groups = _count(job, "num_query_groups") if job.take("group_query_attention") else None
    if groups is None:
        job.take("num_query_groups")
    experts, chosen = _count(job, "num_experts"), _count(job, "moe_router_topk")
    inner = _count(job, "moe_ffn_hidden_size")
    width = inner or width if experts else width
    multiple = (_count(job, "make_vocab_size_divisible_by") or 128) * (
        _count(job, "tensor_model_parallel_size") or 1
    )
    vocabulary = (
        -(-vocabulary // multiple) * multiple
    )  # training/global_vars.py _vocab_size_with_padding
    for name in (
        "normalization",
        "add_bias_linear",
        "disable_bias_linear",
        "position_embedding_type",
        "kv_channels",
        "add_qkv_bias",
        "rotary_base",
        "use_rotary_position_embeddings",
    ):
        job.take(name)
    if not gated:
        if experts:
            job.note("experts without --swiglu are priced with it")
        else:
            return {
                "model_type": "gpt2",
                "n_embd": hidden,
                "n_layer": layers,
                "n_head": heads,
                "n_inner": width,
                "vocab_size": vocabulary,
                "activation_function": "gelu",
                **_dropouts(job),
                "n_positions": _count(job, "max_position_embeddings") or 1024,
                "tie_word_embeddings": not job.take("untie_embeddings_and_output_weights"),
            }
    config: dict[str, object] = {
        "model_type": "mixtral" if experts else "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups or heads,
        "intermediate_size": width,
        "vocab_size": vocabulary,
        "tie_word_embeddings": not job.take("untie_embeddings_and_output_weights"),
    }
    job.take("max_position_embeddings")
    if _dropouts(job)["resid_pdrop"]:
        job.note("the hidden dropout of this layer is not priced, as if --hidden-dropout 0")
    return (
        {**config, "num_local_experts": experts, "num_experts_per_tok": chosen or 2}
        if experts
        else config
    )


def _read_t5(job: ForeignJob) -> None:
    """pretrain_t5.py's encoder and decoder as T5's, whose products they are."""
    names = ("hidden_size", "num_attention_heads", "encoder_num_layers", "decoder_num_layers")
    hidden, heads, above, below = (_count(job, name) or 12 for name in names)
    vocabulary = _count(job, "vocab_size") or _count(job, "padded_vocab_size")
    if vocabulary is None:
        vocabulary = _T5_VOCABULARY
        job.note(f"--vocab-size not given, taken as {vocabulary} (BERT's cased words)")
    job.take("vocab_extra_ids", "max_position_embeddings")
    job.give("ctx", _count(job, "encoder_seq_length") or _count(job, "seq_length"))
    job.give("target_ctx", _count(job, "decoder_seq_length"))
    dropout = _dropouts(job)["resid_pdrop"]
    job.give(
        "config",
        {
            "model_type": "t5",
            "d_model": hidden,
            "num_heads": heads,
            "num_layers": above,
            "num_decoder_layers": below,
            "d_kv": _count(job, "kv_channels") or hidden // heads,
            "d_ff": _count(job, "ffn_hidden_size") or 4 * hidden,
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


def _dropouts(job: ForeignJob) -> dict[str, float]:
    """0.1 unless given, as training/arguments.py has it."""
    given = {name: job.take(name) for name in ("hidden_dropout", "attention_dropout")}
    hidden, attention = (
        0.1 if value is None else values.number(value, f"--{name.replace('_', '-')}")
        for name, value in given.items()
    )
    return {"resid_pdrop": hidden, "embd_pdrop": hidden, "attn_pdrop": attention}


def _check_program(job: ForeignJob) -> None:
    """Raises InputError for a program that trains no GPT or T5, unless a model is given."""
    import re

    found = re.search(r"\b(pretrain_(bert|ict|vision\w*)|tasks/\S*main)\.py\b", job.text)
    if found is not None:
        job.refuse("model", f"{shown(found[0])} of Megatron-LM trains another model than GPT")


def read_recomputation(job: ForeignJob) -> None:
    """--recompute-granularity and its neighbours; --checkpoint-activations was full until 2022."""
    granularity, method, layers = (
        job.take("recompute_granularity"),
        job.take("recompute_method"),
        _count(job, "recompute_num_layers"),
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
        job.note(
            "selective recomputation of the attention core is what a fused attention kernel does;"
            " nothing else is recomputed"
        )
    elif granularity is not None:
        raise InputError(
            f"--recompute-granularity {shown(granularity)} is unknown; use full or selective"
        )
    job.give("checkpointing", "none")


def _mesh(job: ForeignJob, rows: int) -> None:
    """Degrees; the data-parallel ranks are what is left of the GPUs, or what the scripts' batch
    says."""
    tensor, pipeline, context = (
        _count(job, name) or 1
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
        )
    )
    expert = _count(job, "expert_model_parallel_size")
    each, nodes = _first(job, _GPUS_PER_NODE), _first(job, _NODES)
    inner = tensor * pipeline * context
    least = inner * max(1, (expert or 1) // context)
    gpus = (each or 1) * (nodes or 1)
    if each is None or gpus % inner:
        job.note(
            f"the number of GPUs not given, taken as {least} (as few as the degrees take); add"
            " --gpus N"
        )
        gpus = least
    job.give("gpus", gpus)
    if nodes is not None and each is not None and gpus == each * nodes:
        job.give("nodes", nodes)
    for option, degree in (("tp", tensor), ("pp", pipeline), ("cp", context)):
        job.give(option, degree if degree > 1 else None)
    data = gpus // (tensor * pipeline)
    give_experts(job, "expert_model_parallel_size", tensor=tensor, data=data)
    sequence = bool(job.take("sequence_parallel"))
    job.give("sequence_parallel", sequence if tensor > 1 else None)
    overlaps = bool(job.take("tp_comm_overlap"))
    if overlaps and tensor > 1 and not sequence:
        raise InputError("--tp-comm-overlap needs --sequence-parallel, as Megatron-LM does")
    job.give("tp_comm_overlap", True if overlaps and tensor > 1 else None)
    hides = bool(job.take("overlap_moe_expert_parallel_comm"))
    job.give("ep_comm_overlap", True if hides and (expert or 1) > 1 else None)
    _chunks(job, pipeline)
    data = gpus // inner
    whole = _count(job, "global_batch_size")
    if whole is not None:
        if whole % (rows * data):
            raise InputError(
                f"--global-batch-size {whole} is not a multiple of {rows} x {data} (micro-batch x"
                f" data-parallel ranks); use {rows * data}, {2 * rows * data}, ..."
            )
        job.give("grad_accum", whole // (rows * data))
    if job.take("use_distributed_optimizer"):
        if data > 1:
            job.give("zero", 1)
    elif data > 1:
        job.give("data_parallel", ["ddp"])


def _first(job: ForeignJob, names: tuple[str, ...]) -> int | None:
    found: int | None = None
    for name in names:
        value = job.take(name)
        if found is None and value is not None and str(value).isdecimal():
            found = values.count(str(value), f"--{name.replace('_', '-')}", low=0)
    return found


def _chunks(job: ForeignJob, pipeline: int) -> None:
    """Model chunks of a rank, given as such or by the layers of one."""
    each, chunks = (
        _count(job, "num_layers_per_virtual_pipeline_stage"),
        _count(job, "num_virtual_stages_per_pipeline_rank"),
    )
    if each is not None:
        layers = values.count(job.content.get("num_layers"), "--num-layers")
        chunks = layers // (pipeline * each)
    if chunks and chunks > 1:
        job.give("pp_chunks", chunks)
        job.give("pp_schedule", "interleaved")
