"""DeepSpeed's JSON: ZeRO stage and buffers, offload, precision, batch; 'auto' is what the Trainer's
integration fills in.

Keys and defaults: DeepSpeed 0.19 runtime/zero/config.py, offload_config.py, runtime/constants.py;
what 'auto' becomes: transformers 5.23 integrations/deepspeed.py HfTrainerDeepSpeedConfig.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.config.job_keys import Difference
from napkinmath.config.parallel_config import MIXED_DTYPES
from napkinmath.config.zero_config import ZeroConfig

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from napkinmath.inputs.foreign import ForeignJob

AUTO = "auto"
# DeepSpeed's key -> ZeroConfig's field; 'auto' gives 0, which is set from the hidden size.
_SIZES = {
    "reduce_bucket_size": "reduce_bucket_size",
    "allgather_bucket_size": "allgather_bucket_size",
    "sub_group_size": "sub_group_size",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_max_live_parameters": "max_live_parameters",
    "max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "max_reuse_distance": "max_reuse_distance",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "param_persistence_threshold": "param_persistence_threshold",
}
_COUNTS = {"zero_hpz_partition_size": "hpz_partition_size", "mics_shard_size": "mics_shard_size"}
_SWITCHES = {
    "contiguous_gradients": "contiguous_gradients",
    "overlap_comm": "overlap_comm",
    "round_robin_gradients": "round_robin_gradients",
    "memory_efficient_linear": "memory_efficient_linear",
    "zero_quantized_weights": "quantized_weights",
    "zero_quantized_gradients": "quantized_gradients",
}
_OPTIMIZERS = {
    "adam": "adamw-fused",
    "adamw": "adamw-fused",
    "lion": "lion",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "muon": "muon",
}
DEVICES = ("none", "cpu", "nvme")
MIXED_HALVES = ("bf16", "fp16")
# Keys of offload_optimizer that shorten the host's update (runtime/superoffload, runtime/swap_tensor).
_FASTER_OFFLOAD = {
    "super_offload": "the host updates sub-groups while the backward still runs",
    "pipeline_read": "states come from NVMe while others are updated",
    "pipeline_write": "states go to NVMe while others are updated",
}
_OLDER_OFFLOAD = {"optimizer": "cpu_offload", "parameters": "cpu_offload_param"}


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a DeepSpeed config."""
    _read_batch(job)
    clipping = job.take("gradient_clipping")
    if clipping is not None and clipping != AUTO:
        job.give("clip", clipping != 0)
    half = {key: job.section(key) for key in (*MIXED_HALVES, "bfloat16")}
    _read_precision(job, half)
    optimizer = job.section("optimizer").take("type")
    if optimizer is not None and optimizer != AUTO:
        name = str(optimizer).lower()
        job.give("optimizer", _OPTIMIZERS.get(name, name))
    read_zero(job, job.section("zero_optimization"))
    _read_sums(job)
    zero, masters = job.options.get("zero_options"), _masters(job, half)
    if isinstance(zero, ZeroConfig) and masters:
        job.give("zero_options", zero.replace(**masters))
    return job.finish()


def _read_batch(job: ForeignJob) -> None:
    """Of the three sizes one may be absent and follows from the others (DeepSpeed runtime/config.py
    _set_batch_related_parameters)."""
    rows, micro_steps, whole = (
        job.take(key)
        for key in (
            "train_micro_batch_size_per_gpu",
            "gradient_accumulation_steps",
            "train_batch_size",
        )
    )
    give_number(job, "bs", rows)
    give_number(job, "grad_accum", micro_steps)
    if micro_steps is None and rows is not None:
        give_number(job, "global_batch", whole)
    elif rows is None and whole not in (None, AUTO):
        job.note(
            f"train_batch_size {whole} is of all ranks together: without"
            " train_micro_batch_size_per_gpu give --bs"
        )


def give_number(job: ForeignJob, option: str, value: object) -> None:
    """A number, unless the Trainer sets it: then the flag or the Trainer's own job file does."""
    if value == AUTO:
        job.note(f"{option} is 'auto': taken from --{option.replace('_', '-')}, or its default")
    elif value is not None:
        job.give(option, value)


def _read_precision(job: ForeignJob, sections: Mapping[str, ForeignJob]) -> None:
    half = {key: _enabled(section) for key, section in sections.items()}
    if (half["bf16"] or half["bfloat16"]) is True and half["fp16"] is True:
        raise InputError("bf16 and fp16 are both enabled; keep one of them")
    if True in half.values():
        job.give("precision", "fp16-autocast" if half["fp16"] is True else "bf16-autocast")
    elif AUTO in half.values():
        job.note("bf16 or fp16 is 'auto': taken as bf16; give --precision for another")
    else:
        job.give("precision", "fp32")


def _enabled(section: ForeignJob) -> object:
    value = section.take("enabled")
    if value is None:
        return False
    return AUTO if value == AUTO else values.switch(value, "enabled")


# Names of one switch, oldest last (runtime/zero/config.py).
_GATHERED_ON_SAVE = (
    "gather_16bit_weights_on_model_save",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
)


def read_zero(job: ForeignJob, section: ForeignJob) -> None:
    """The section 'zero_optimization'."""
    zero = section.content
    if not zero:
        job.give("data_parallel", ["ddp"])
        return
    section.take("stage", *_SIZES, *_COUNTS, *_SWITCHES)
    stage = values.whole(zero.get("stage", 0))
    if stage not in (0, 1, 2, 3):
        raise InputError(
            f"zero_optimization stage {shown(zero['stage'])} is unknown; use 0, 1, 2 or 3"
        )
    job.give("data_parallel", [f"zero{stage}" if stage else "ddp"])
    fields: dict[str, Any] = {}
    for key, field in _SIZES.items():
        if key in zero:
            fields[field] = 0 if zero[key] == AUTO else values.count(zero[key], key, low=0)
    for key, field in _COUNTS.items():
        size = values.whole(zero.get(key, -1))
        if size in (-1, 0):  # both are off (runtime/zero/config.py)
            continue
        if stage == 3:
            fields[field] = values.count(zero[key], key)
        else:
            job.note(f"{key} is of stage 3: ZeRO stage {stage} does not read it")
    for key, field in _SWITCHES.items():
        if key in zero:
            fields[field] = values.switch(zero[key], key)
    fields |= _offload_ratio(section, stage)
    job.give("zero_options", ZeroConfig(**fields))
    if any([_is_true(section.take(key), key) for key in _GATHERED_ON_SAVE]) and stage == 3:
        job.give("full_state_dict", True)
    devices = {
        name: device_of(section, name, key)
        for name, key in (
            ("optimizer", "offload_optimizer"),
            ("parameters", "offload_param"),
        )
    }
    read_offload(job, of_stage(job, devices, stage))


def of_stage(job: ForeignJob, devices: Mapping[str, str], stage: int) -> Mapping[str, str]:
    """What a stage offloads: `offload_param` is given to stage 3's optimizer alone
    (runtime/engine.py _configure_zero_optimizer), and is silently without effect below it."""
    if stage == 3 or devices["parameters"] == "none":
        return devices
    job.note(
        f"parameters stay on the GPUs: ZeRO stage {stage} does not read offload_param, stage 3 does"
    )
    return {**devices, "parameters": "none"}


def _masters(job: ForeignJob, half: Mapping[str, ForeignJob]) -> dict[str, Any]:
    """Masters and the update's gradients in 16 bits, where the engine takes them: of ZeRO, with the
    optimizer on the host or with states as narrow (runtime/base_optimizer.py
    _configure_master_weights)."""
    narrow = half["bf16"].switch("bf16_optimizer_states")
    wanted = [
        dtype for dtype in MIXED_HALVES if half[dtype].switch(f"{dtype}_master_weights_and_grads")
    ]
    if narrow and "bf16" not in wanted:
        raise InputError(
            "bf16_optimizer_states needs bf16_master_weights_and_grads; set both, or leave it out"
        )
    if not wanted:
        return {}
    key = f"{wanted[0]}_master_weights_and_grads"
    if job.options["data_parallel"] == ["ddp"]:
        raise InputError(f"{key} needs ZeRO; set a stage of 1, 2 or 3")
    if "optimizer" not in str(job.options.get("offload", "")) and not narrow:
        both = " or set bf16_optimizer_states" if wanted[0] == "bf16" else ""
        raise InputError(
            f'{key} needs the optimizer on the host; set offload_optimizer to {{"device":'
            f' "cpu"}}{both}'
        )
    if job.options["data_parallel"] == ["zero1"] and job.options.get("reduce_dtype") == "fp32":
        why = "stage 1 with sums in fp32 runs an optimizer that has fp32 masters"
        half[wanted[0]].leave_out(key, why, memory=Difference.LESS)
        return {}
    return {"master_dtype": wanted[0], "narrow_states": narrow}


def _offload_ratio(zero: ForeignJob, stage: int) -> dict[str, Any]:
    """The part of stage 3's sub-groups whose optimizer is on the host (ZeRO-Offload++), and what
    else changes its time."""
    given = values.mapping(zero.content.get("offload_optimizer") or {}, "offload_optimizer")
    for key, why in _FASTER_OFFLOAD.items():
        if _is_true(given.get(key), key):
            zero.leave_out(f"offload_optimizer.{key}", why, time=Difference.LESS)
    share = values.number(given.get("ratio", 1.0), "offload_optimizer ratio")
    if stage != 3 or share == 1:
        return {}
    why = "the GPU updates a part of the sub-groups, which is priced in memory alone"
    zero.leave_out("offload_optimizer.ratio", why, time=Difference.LESS)
    return {"offload_ratio": share}


def _read_sums(job: ForeignJob) -> None:
    """The type in which gradients add up: of fp32 beside bf16 stage 1 runs another optimizer
    (runtime/engine.py _do_optimizer_sanity_check), and stage 3 keeps fp32 partitions."""
    types = values.mapping(job.content.get("data_types") or {}, "data_types")
    given, zero = types.get("grad_accum_dtype"), job.content.get("zero_optimization")
    stage = values.mapping(zero or {}, "zero_optimization").get("stage")
    if given is not None and stage in (1, 3) and str(given) in MIXED_DTYPES:
        job.section("data_types").take("grad_accum_dtype")
        job.give("reduce_dtype", str(given))


def _is_true(value: object, key: str) -> bool:
    return value not in (None, AUTO) and values.switch(value, key)


def device_of(zero: ForeignJob, name: str, key: str) -> str:
    """Where states or parameters are kept: none, cpu or nvme."""
    older = zero.take(_OLDER_OFFLOAD[name])
    given = zero.take(key)
    if given is None:
        return "cpu" if _is_true(older, _OLDER_OFFLOAD[name]) else "none"
    device = str(values.mapping(given, key).get("device", "none")).lower()
    if device not in DEVICES:
        raise InputError(
            f"{key} device {shown(device)} is unknown; use one of"
            f" {', '.join(DEVICES)}{suggest(device, list(DEVICES))}"
        )
    return device


def read_offload(job: ForeignJob, devices: Mapping[str, str]) -> None:
    """What is offloaded, and what of it to NVMe."""
    if moved := [name for name, device in devices.items() if device != "none"]:
        job.give("offload", ",".join(moved))
    if stored := [name for name, device in devices.items() if device == "nvme"]:
        job.give("nvme", ",".join(stored))
