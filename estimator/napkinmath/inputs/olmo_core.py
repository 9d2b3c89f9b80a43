"""OLMo-core's scripts of supervised fine-tuning, by their launch lines: `OLMo-sft.py train RUN
CHECKPOINT CLUSTER --seq_len=32768 ...`.

Arguments and defaults: allenai/OLMo-core src/scripts/train/sft/Olmo-2-7B-SFT.py, Olmo-3-7B-SFT.py,
Olmo-3-32B-SFT.py at fa6c5014c9f6, OLMo-sft.py at 0d2824ff060f and OLMo2-7B-sft.py at 05a43815d6ae
(BatchSizeConfig, SFTConfig.build); distributed/parallel/__init__.py (parameters are shared over
context ranks too); nn/functional/cross_entropy_loss.py; optim/adamw.py (foreach).
"""

from __future__ import annotations

from typing import NamedTuple

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.rows import Row, read_rows

SCRIPT, CLUSTER = "script", "cluster"
_PER_NODE, _TOKENS = 8, 16_384
_USUAL_STEP = 64 * _TOKENS
_OF_FEED_FORWARD = "selective:sdpa,q_proj,k_proj,v_proj,o_proj,down_proj"
"""A checkpoint around each feed-forward: what attention makes is kept."""


class _Script(NamedTuple):
    models: dict[str, str]
    """By `--model_name`; '' where the script has one model of its own."""
    cp: int = 0
    """Context ranks, where the script does not take as few as the length needs."""
    budget: float = 0.0
    """The compiler's share of activations; 0: feed-forwards are recomputed."""


_NAMED = {"olmo2-7b": "olmo-2-7b", "olmo3-7b": "olmo-3-7b", "olmo3-32b": "olmo-3-32b"}
SCRIPTS = {
    "OLMo-sft": _Script(_NAMED),
    # OLMo 3 was called 2.5 (official/OLMo3/OLMo-3-1025-7B-midtrain.py, load_path)
    "OLMo2-7B-sft": _Script({"olmo2-7b": "olmo-2-7b", "olmo2.5-7b-yarn-fullonly": "olmo-3-7b"}),
    "Olmo-2-7B-SFT": _Script({"": "olmo-2-7b"}),
    "Olmo-3-7B-SFT": _Script({"": "olmo-3-7b"}),
    "Olmo-3-32B-SFT": _Script({"": "olmo-3-32b"}, cp=8, budget=0.3),
}
_ROWS = (Row("ctx", "seq_len", _TOKENS), Row("compile", "train_module.compile_model", True))


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a launch of one of the scripts."""
    job.flatten()
    name = str(job.take(SCRIPT))
    script = SCRIPTS.get(name)
    if script is None:
        raise InputError(
            f"{SCRIPT} {shown(name)} of OLMo-core is unknown; known: {', '.join(SCRIPTS)}"
        )
    job.give("stack", "hf-bare")
    _give_model(job, name, script)
    read_rows(job, _ROWS)
    _give_batch(job, script)
    job.give("packing", True)
    job.give("attention", "flash2")
    job.give("optimizer", "adamw-foreach")
    job.give("clip", True)
    _give_recomputation(job, name, script)
    return job.finish()


def _give_model(job: ForeignJob, name: str, script: _Script) -> None:
    asked = str(job.take("model_name") or "")
    found = script.models.get("" if "" in script.models else asked)
    if found is None:
        known = ", ".join(script.models)
        job.refuse("model", f"--model_name {shown(asked)} of {name}.py is not known ({known})")
    job.give("model", found)


def _give_batch(job: ForeignJob, script: _Script) -> None:
    """As many context ranks as a sequence needs, and as many micro-steps as a rank's tokens."""
    length = values.count(job.options["ctx"], "seq_len")
    nodes = values.count(job.take("num_nodes") or 1, "num_nodes")
    whole = values.count(job.take("global_batch_size") or _USUAL_STEP, "global_batch_size")
    job.take("launch.num_gpus", CLUSTER)
    gpus = nodes * _PER_NODE
    most = _TOKENS * (2 if "titan" in str(job.content.get(CLUSTER)) else 1)  # its GPUs are B200
    needed = 1
    while length // needed > most:
        needed *= 2
    tokens = whole * needed // gpus
    micro_steps = 1
    while tokens // micro_steps > most * needed:
        micro_steps *= 2
    rows = tokens // micro_steps // length
    settled = job.is_settled("bs") and job.is_settled("grad_accum")
    if not settled and (rows < 1 or rows * length * micro_steps * (gpus // needed) != whole):
        raise InputError(
            f"global_batch_size {whole} is no whole number of sequences of {length} tokens for each"
            f" of {gpus // needed} data-parallel ranks; give --bs and --grad-accum"
        )
    context = script.cp or needed
    job.give("gpus", gpus)
    rows = max(1, rows)
    job.give("bs", rows)
    # ranks and rows follow from the length, context ranks from the script
    job.give("grad_accum", max(1, whole // (rows * length * (gpus // context))))
    give_engine(job, gpus, shards=_PER_NODE // (1 if script.cp else context), context=context)
    if context > 1:
        name_gathered(job, "seq_len", context)


def give_engine(job: ForeignJob, gpus: int, *, shards: int, context: int = 1) -> None:
    """FSDP 2 over fp32 parameters computed in bf16, whose gradients are scattered in every
    micro-step (train_module/transformer/train_module.py _train_microbatch_context). `shards`
    data-parallel ranks hold one copy."""
    if gpus == 1:
        job.give("precision", "bf16-amp")
        return
    replicated = gpus > shards * context
    options: dict[str, object] = {
        "gpus": gpus,
        "cp": context if context > 1 else None,
        "data_parallel": ["fsdp2"],
        "sharding": "hybrid" if replicated else "full",
        "shard_size": shards if replicated else None,
        "precision": "bf16",
        "sharded_dtype": "fp32",
        "reduce_dtype": "fp32",
        "sync_each_batch": True,
    }
    for option, value in options.items():
        job.give(option, value)


def name_gathered(job: ForeignJob, key: str, context: int) -> None:
    """Says how context ranks exchange keys and values by ring_flash_attn's llama3 form."""
    job.leave_out(
        key,
        f"a sequence over {context} GPUs gathers the keys and values of some heads at a time; a ring"
        " is priced",
        memory=Difference.EITHER,
        time=Difference.EITHER,
    )


def _give_recomputation(job: ForeignJob, name: str, script: _Script) -> None:
    if script.budget:
        job.give("checkpointing", "full")
        job.leave_out(
            SCRIPT,
            f"{name}.py keeps what the compiler chooses of {script.budget:.0%} of the activations;"
            " whole layers are recomputed here",
            memory=Difference.MORE,
            time=Difference.LESS,
            option="checkpointing",
        )
        return
    job.give("checkpointing", _OF_FEED_FORWARD)
    job.leave_out(
        SCRIPT,
        f"{name}.py recomputes its feed-forwards alone; what attention's linears make is kept here,"
        " its norms are recomputed",
        memory=Difference.MORE,
        time=Difference.LESS,
        option="checkpointing",
    )
