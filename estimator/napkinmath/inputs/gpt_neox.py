"""gpt-neox's YAML: Megatron's sizes beside DeepSpeed's sections.

Keys and defaults: EleutherAI/gpt-neox megatron/neox_arguments/neox_args.py and deepspeed_args.py at
ea7aefd8f8e1; how precision and vocabulary follow: neox_arguments/arguments.py calculate_derived,
megatron/tokenizer/tokenizer.py. A hyphen in a key is an underscore.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs import deepspeed
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import Row, degree, read_rows, world_size

# By the tokenizer's kind, and by what its file or encoding is called (NeoX's own is 20B's).
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "HFGPT2Tokenizer": 50257, "CharLevelTokenizer": 512}
_NAMED = {"20b": 50277, "neox": 50277, "cl100k": 100277, "o200k": 200019, "p50k": 50281}
# What goes to DeepSpeed as it is (deepspeed_args.py).
_DEEPSPEED = (
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("optimizer", "scheduler", "fp16", "bf16", "amp", "gradient_clipping", "zero_optimization"),
    *("prescale_gradients", "gradient_predivide_factor", "sparse_gradients", "steps_per_print"),
    *("wall_clock_breakdown", "dump_state", "flops_profiler", "communication_data_type"),
    *("autotuning", "activation_checkpointing", "sparse_attention", "data_efficiency"),
    *("tensorboard", "wandb", "csv_monitor", "elasticity", "comms_logger"),
    *("compression_training", "checkpoint", "data_types"),
)
_PLAIN = ("flash", "global")
_OPTIMIZERS: dict[str, object] = {"adam": "adamw-fused", "sgd": "sgd", "lion": "lion"}
_ROWS = (
    Row("ctx", "seq_length", 2048),
    Row("optimizer", "optimizer_type", words=_OPTIMIZERS),
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a gpt-neox file."""
    given = {key.replace("-", "_"): value for key, value in job.content.items()}
    _read_deepspeed(job, {key: given.pop(key) for key in _DEEPSPEED if key in given})
    job.content = given
    job.flatten()
    job.give("stack", "megatron-deepspeed")
    _read_precision(job)
    if not job.is_settled("model"):
        job.give("config", _config(job))
    read_rows(job, _ROWS)
    job.options.setdefault("bs", 1)
    clip = job.take("clip_grad")
    job.give("clip", None if clip is None else not is_off(clip))
    if job.switch("fp32_allreduce"):
        job.give("reduce_dtype", "fp32")
    _read_checkpointing(job)
    _read_mesh(job)
    return job.finish()


def _read_deepspeed(job: ForeignJob, content: dict[str, object]) -> None:
    inner = ForeignJob("DeepSpeed", content, job.notes, keys="deepspeed", given=job.given)
    job.options |= deepspeed.read(inner)
    job.adopt(inner)


def _read_precision(job: ForeignJob) -> None:
    """Half weights as they are, with a master copy in the engine."""
    word = str(job.take("precision") or job.options.get("precision") or "fp32")
    half = next((name for name in ("bf16", "fp16") if name in word.replace("bfloat", "bf")), None)
    job.give("precision", half or "fp32")


def _size(job: ForeignJob, name: str, default: int | None = None) -> int:
    value = job.take(name)
    if value is None and default is None:
        raise InputError(f"gpt-neox's {name} is not given; write it, or give --model NAME")
    return values.count(default if value is None else value, name)


def _config(job: ForeignJob) -> dict[str, object]:
    """Sizes as the config of the family that runs the same operations: Llama's with RMSNorm and a
    gated MLP, else GPT-NeoX's."""
    hidden, heads = _size(job, "hidden_size"), _size(job, "num_attention_heads")
    if _read_attention(job) == {"mamba"}:
        return _mamba(job, hidden)
    activation = str(job.take("activation") or "gelu").lower()
    job.take("norm", "pos_emb")
    gated = activation in ("swiglu", "geglu")
    inner = _width(job, hidden, gated=gated)
    groups = _size(job, "num_kv_heads", heads)
    experts = _size(job, "moe_num_experts", 1)
    tied = not job.switch("no_weight_tying")
    family = "mixtral" if experts > 1 else "llama" if gated else "gpt_neox"
    config: dict[str, object] = {
        "model_type": family,
        "hidden_size": hidden,
        "num_hidden_layers": _size(job, "num_layers"),
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": _vocabulary(job),
        "tie_word_embeddings": tied,
        "max_position_embeddings": _size(job, "max_position_embeddings", 2048),
    }
    parallel, share = job.switch("gpt_j_residual"), job.take("rotary_pct")
    if experts > 1:
        config |= {"num_local_experts": experts, "num_experts_per_tok": _size(job, "moe_top_k", 1)}
    if family != "gpt_neox":
        return {**config, "num_key_value_heads": groups}
    dropouts = [job.take("hidden_dropout"), job.take("attention_dropout")]
    return {
        **config,
        "hidden_act": "gelu",
        "use_parallel_residual": parallel,
        "rotary_pct": 1.0 if share is None else share,
        "hidden_dropout": dropouts[0] or 0.0,
        "attention_dropout": dropouts[1] or 0.0,
    }


def _width(job: ForeignJob, hidden: int, *, gated: bool) -> int:
    """A gated MLP is made a third of what is given, as large as one that is not (transformer.py
    ParallelMLP)."""
    given, factor = job.take("intermediate_size", "ffn_dim"), job.take("expansion_factor")
    multiple = _size(job, "mlp_multiple_of", 1)
    width = 4 * hidden if given is None else values.count(given, "intermediate_size")
    if given is None and factor is not None:
        width = int(hidden * values.number(factor, "expansion_factor", high=1024))
    inner = int(width * 2 / 3) // 2 if gated else width
    return -(-inner // multiple) * multiple


def _vocabulary(job: ForeignJob) -> int:
    """Padded to a multiple of make_vocab_size_divisible_by times the tensor-parallel ranks."""
    given, name = job.take("padded_vocab_size"), job.take("tokenizer_type") or "GPT2BPETokenizer"
    file = str(job.take("vocab_file") or "neox").lower()
    multiple = _size(job, "make_vocab_size_divisible_by", 128) * degree(job, "model_parallel_size")
    if given is not None:
        return values.count(given, "padded_vocab_size")
    named = next((size for word, size in _NAMED.items() if word in file), None)
    size = _VOCABULARIES.get(str(name), named or (100277 if "Tiktoken" in str(name) else 32000))
    job.note(f"padded_vocab_size not given, {name} taken as of {size} tokens")
    if named is None and name not in _VOCABULARIES:
        job.leave_out(
            "vocab_file",
            f"the tokens of {shown(file)} are not known here and taken as {size}; write"
            " padded_vocab_size",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    return -(-size // multiple) * multiple


def _mamba(job: ForeignJob, hidden: int) -> dict[str, object]:
    """The layers of state-spaces/mamba, whose other sizes gpt-neox does not let one choose."""
    return {
        "model_type": "mamba",
        "hidden_size": hidden,
        "num_hidden_layers": _size(job, "num_layers"),
        "vocab_size": _vocabulary(job),
        "tie_word_embeddings": not job.switch("no_weight_tying"),
    }


def _read_attention(job: ForeignJob) -> set[str]:
    """Kinds of layers: flash or whole scores, or Mamba's; no others."""
    given = job.take("attention_config")
    kinds = {str(kind).lower() for part in values.listed(given or []) for kind in _kinds(part)}
    others = sorted(kinds - set(_PLAIN))
    if others and kinds != {"mamba"}:
        job.refuse("model", f"attention_config {shown(others)} of gpt-neox is not modelled")
    if kinds != {"mamba"}:
        job.give("attention", "flash2" if kinds == {"flash"} else "eager")
    return kinds


def _kinds(part: object) -> list[object]:
    """The names in [['flash', 'global'], 12]."""
    listed = values.listed(part)
    return values.listed(listed[0]) if listed else []


def _read_checkpointing(job: ForeignJob) -> None:
    on = job.switch("checkpoint_activations")
    every = _size(job, "checkpoint_num_layers", 1)
    job.give("checkpointing", "none" if not on else f"every:{every}" if every > 1 else "full")


def _read_mesh(job: ForeignJob) -> None:
    """The data-parallel ranks are what is left of the GPUs; without a number as few as the degrees
    take."""
    tp, pp = degree(job, "model_parallel_size"), degree(job, "pipe_parallel_size")
    gpus = world_size(job, per_node="global_num_gpus world_size")
    if gpus is None:
        gpus = tp * pp
        job.note(
            f"the number of GPUs not given, taken as {gpus} (as few as the degrees take); add"
            " --gpus N"
        )
        job.leave_out(
            "data_parallel_size",
            "the file does not say how many GPUs share the optimizer's states; add --gpus N",
            memory=Difference.LESS,
            time=Difference.EITHER,
            option="gpus",
        )
    job.give("gpus", gpus)
    job.give("tp", tp if tp > 1 else None)
    job.give("pp", pp if pp > 1 else None)
    sequence, stage = job.switch("sequence_parallel"), job.take("zero_stage")
    job.give("sequence_parallel", sequence if tp > 1 else None)
    if gpus <= tp * pp:  # nothing is left to shard over
        job.options.pop("data_parallel", None)
        job.options.pop("zero_options", None)
    elif stage is not None and "data_parallel" not in job.options:
        job.give("data_parallel", [f"zero{stage}"] if stage else ["ddp"])
