"""How the trainers' files shard a step: FSDP's section, DeepSpeed's file, degrees of a mesh.

Keys: accelerate 1.14 utils/dataclasses.py FullyShardedDataParallelPlugin, ParallelismConfig;
transformers 5.23 training_args.py (fsdp, fsdp_config, deepspeed); axolotl 0.19
utils/schemas/fsdp.py, config.py.
"""

from __future__ import annotations

import os

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.nearby import nearby
from napkinmath.models import config_file

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

STRATEGIES = {
    "full_shard": "full",
    "shard_grad_op": "grad-op",
    "no_shard": "no-shard",
    "hybrid_shard": "hybrid",
    "hybrid_shard_zero2": "hybrid-grad-op",
    "1": "full",
    "2": "grad-op",
    "3": "no-shard",
    "4": "hybrid",
    "5": "hybrid-grad-op",
}
# What the words of a Trainer's `fsdp` mean beside a strategy.
_WORDS = ("auto_wrap", "offload")
_PREFIX = "fsdp_"
# How classes end that are parts of a layer.
_PARTS = ("MoeBlock", "MoE", "Moe", "MLP", "Attention", "Experts")


def read_sharding(job: ForeignJob, *, newest: bool = False) -> None:
    """`deepspeed`, or `fsdp` with `fsdp_config`, of a Trainer's file. The `newest` transformers takes
    FSDP 2 where no version is said (5.23 training_args.py _process_fsdp_args); words in `fsdp` are of
    releases that took 1."""
    deepspeed = job.take("deepspeed")
    if not is_off(deepspeed):
        read_deepspeed(job, deepspeed)
        return
    given = job.take("fsdp")
    words, version = _words(given), job.take("fsdp_version")
    named = job.content.get("fsdp_config")
    if isinstance(named, str):
        found = file_of(job, named, "FSDP's file")
        if found is None:
            job.leave_out(
                "fsdp_config",
                f"the file {shown(named)} is not there, and whether it offloads or checkpoints is not"
                " known",
                memory=Difference.EITHER,
                time=Difference.EITHER,
            )
        job.content = {**job.content, "fsdp_config": found or {}}
    section = job.section("fsdp_config")
    if newest and version is None and not {"version", "fsdp_version"} & {*section.content}:
        version = 2 if given is True else None
        if words and version is None:
            job.note(
                "fsdp_config.version not given, taken as 1, which releases had by default that take"
                " words in fsdp; transformers 5.23 takes 2: --data-parallel fsdp2"
            )
    if words or section.content or version is not None:
        read_fsdp(job, section, version=version, words=words)


def _words(given: object) -> list[str]:
    """'full_shard auto_wrap', ['full_shard', 'auto_wrap'] or true as words."""
    if is_off(given):
        return []
    if given is True:
        return ["full_shard"]
    texts = given.replace(",", " ").split() if isinstance(given, str) else values.listed(given)
    words = [str(text).strip().lower() for text in texts]
    for word in words:
        if word not in STRATEGIES and word not in _WORDS:
            raise InputError(f"fsdp {shown(word)} is unknown; use e.g. 'full_shard auto_wrap'")
    return words


def read_fsdp(
    job: ForeignJob, section: ForeignJob, *, version: object = None, words: list[str] | None = None
) -> None:
    """FSDP's section, whose keys begin with fsdp_ or not; `words` are those of a Trainer's
    `fsdp`."""

    def take(key: str) -> object:
        return section.take(key, _PREFIX + key)

    def on(key: str) -> bool:
        value = take(key)
        return value is not None and values.switch(value, _PREFIX + key)

    of_trainer, words = words is not None, words or []
    own = take("version")
    number = values.count(own if own is not None else version or 1, "fsdp_version", high=2)
    job.give("data_parallel", [f"fsdp{number}"])
    _strategy(job, take("sharding_strategy"), take("reshard_after_forward"), words)
    # transformers 5 names it cpu_offload
    if any([on("offload_params"), on("cpu_offload")]) or "offload" in words:
        job.give("offload", "optimizer,parameters")
    if on("activation_checkpointing"):
        job.give("checkpointing", "full")
    for key, option in (
        ("forward_prefetch", "forward_prefetch"),
        ("cpu_ram_efficient_loading", "broadcast_loading"),
    ):
        if on(key):
            job.give(option, True)
    # accelerate's own file has no such key (commands/launch.py); FSDP 2 has no such limit
    if of_trainer and number == 1 and take("limit_all_gathers") is not None:
        job.give("limit_all_gathers", on("limit_all_gathers"))
    prefetch = take("backward_prefetch")
    if number == 1 and prefetch is not None:
        job.give("backward_prefetch", str(prefetch).upper() in ("BACKWARD_PRE", "1"))
    if str(take("state_dict_type") or "").upper() == "FULL_STATE_DICT":
        job.give("full_state_dict", True)
    policy = str(take("auto_wrap_policy") or ("" if of_trainer else "TRANSFORMER_BASED_WRAP"))
    _units_by_policy(job, section, policy.upper())
    _name_units(section)


def _units_by_policy(job: ForeignJob, section: ForeignJob, policy: str) -> None:
    """Units other than layers: the whole model, or modules of so many parameters (accelerate
    utils/dataclasses.py set_auto_wrap_policy: of size 0 nothing is wrapped). Trainers before
    transformers 5 wrap by size wherever `min_num_params` says one."""
    key = next((k for k in ("min_num_params", "fsdp_min_num_params") if k in section.content), "")
    size = values.count(section.content[key], key, low=0) if key else 0
    if policy == "NO_WRAP" or (policy == "SIZE_BASED_WRAP" and not size):
        job.give("wrap", "none")
    elif policy == "SIZE_BASED_WRAP" or (size and not policy):
        section.leave_out(
            key,
            f"FSDP's units are modules of {size:,} parameters: layers are priced; give --wrap",
            memory=Difference.EITHER,
            time=Difference.EITHER,
            option="wrap",
        )


def _name_units(section: ForeignJob) -> None:
    """Says that FSDP's units are parts of layers: what lies between them stays in the root unit,
    which is whole from the first forward to the end of the backward."""
    key = "transformer_layer_cls_to_wrap"
    key = key if key in section.content else _PREFIX + key
    given = section.content.get(key)
    names = given.split(",") if isinstance(given, str) else values.listed(given or [])
    if names and all(str(name).strip().endswith(_PARTS) for name in names):
        section.leave_out(
            key,
            f"FSDP's units are {shown(given)}, parts of layers: layers are priced; give --wrap",
            memory=Difference.MORE,
            time=Difference.EITHER,
            option="wrap",
        )


def _strategy(job: ForeignJob, given: object, reshard: object, words: list[str]) -> None:
    named = next((word for word in words if word in STRATEGIES), None)
    if isinstance(reshard, str) and reshard.lower() in STRATEGIES:
        named, reshard = reshard.lower(), None
    if given is not None:
        named = str(given).lower()
    if named is None:
        if reshard is not None:
            job.give("reshard", values.switch(reshard, "fsdp_reshard_after_forward"))
        return
    if named not in STRATEGIES:
        raise InputError(
            f"fsdp_sharding_strategy {shown(given)} is unknown; use FULL_SHARD, SHARD_GRAD_OP,"
            " NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2"
        )
    job.give("sharding", STRATEGIES[named])


def read_mesh(job: ForeignJob, names: Mapping[str, tuple[str, ...]]) -> None:
    """Degrees of a mesh by the names that a tool gives them: tp, cp, ulysses, replicas, shards."""

    def degree(which: str) -> int:
        value = job.take(*names[which]) if which in names else None
        if is_off(value) or value == -1:  # -1: what the other axes leave
            return 1
        return values.count(value, names[which][0])

    for option in ("tp", "cp"):
        if (size := degree(option)) > 1:
            job.give(option, size)
    if (size := degree("ulysses")) > 1:
        job.give("cp", size)
        job.give("cp_kind", "ulysses")
    if degree("replicas") > 1:
        job.give("sharding", "hybrid")
        job.give("shard_size", degree("shards"))
    elif "shards" in names:
        degree("shards")


# ---------------------------------------------------------------- DeepSpeed's file


def read_deepspeed(job: ForeignJob, given: object) -> None:
    """ZeRO of the file that a Trainer's file names, or of the mapping in it; the Trainer's own
    batch, precision and optimizer stay."""
    from napkinmath.inputs import deepspeed

    content = given if values.is_mapping(given) else file_of(job, str(given))
    if content is None:
        guess_stage(job, str(given))
        return
    inner = ForeignJob(
        "DeepSpeed", values.mapping(content, "deepspeed"), job.notes, keys="deepspeed"
    )
    deepspeed.read(inner)
    kept = ("data_parallel", "zero_options", "offload", "nvme", "reduce_dtype")
    for option in kept:
        job.give(option, inner.options.get(option))
    half = str(inner.options.get("precision", "fp32"))
    if half != "fp32" and not {"bf16", "fp16"} & {*job.content}:  # the engine casts the model
        job.give("precision", half)
    job.adopt(inner, "deepspeed")


def file_of(job: ForeignJob, name: str, what: str = "DeepSpeed's file") -> object:
    """The contents of a file that the job file names, or of JSON in its place, as the Trainer takes
    both (training_args.py _VALID_DICT_FIELDS); None where the file is not there."""
    if name.startswith("{"):
        return config_file.parse(name, name, what=f"in place of {what} the text")
    path = nearby(name, job.path)
    if not os.path.isfile(path):
        return None
    return config_file.parse(config_file.read_text(path, what=what), path, what=what)


def guess_stage(job: ForeignJob, name: str) -> None:
    """ZeRO's stage from a file's name ('zero3_bf16.json', 'ds_z2_config.json'); a file that is not
    there and says none leaves memory open."""
    base = os.path.basename(name).lower()
    stages = [
        base[base.index(mark) + len(mark)]
        for mark in ("zero", "zero_", "zero-", "stage", "stage_", "stage-", "_z", "-z")
        if mark in base and base[base.index(mark) + len(mark) :][:1] in ("1", "2", "3")
    ]
    if not stages:
        job.leave_out(
            "deepspeed",
            f"the file {shown(name)} is not there; give it beside this one, or --zero STAGE",
            memory=Difference.LESS,
            time=Difference.EITHER,
        )
        return
    job.give("data_parallel", [f"zero{stages[0]}"])
    if "offload" in base and "no_offload" not in base:
        job.give("offload", "optimizer,parameters" if stages[0] == "3" else "optimizer")
    job.note(f"the file {shown(name)} is not there: ZeRO {stages[0]} taken from its name")
