"""DeepSpeed's JSON: ZeRO stage and buffers, offload, precision, batch; 'auto' is what the Trainer's
integration fills in.

Keys and defaults: DeepSpeed 0.19 runtime/zero/config.py, offload_config.py, runtime/constants.py;
what 'auto' becomes: transformers 5.23 integrations/deepspeed.py HfTrainerDeepSpeedConfig.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.config.parallel_config import ZeroConfig

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
    "zero_quantized_weights": "quantized_weights",
    "zero_quantized_gradients": "quantized_gradients",
}
# Understood, and without effect on what is priced.
_ZERO_OTHER = (
    "stage",
    "offload_optimizer",
    "offload_param",
    "cpu_offload",
    "reduce_scatter",
    "allgather_partitions",
    "use_multi_rank_bucket_allreduce",
    "load_from_fp32_weights",
    "elastic_checkpoint",
    "stage3_gather_16bit_weights_on_model_save",
    "gather_16bit_weights_on_model_save",
    "stage3_gather_fp16_weights_on_model_save",
    "ignore_unused_parameters",
    "legacy_stage1",
    "memory_efficient_linear",
    "pipeline_loading_checkpoint",
    "override_module_apply",
    "zero_quantized_nontrainable_weights",
    "mics_hierarchical_params_gather",
    "log_trace_cache_warnings",
    "model_persistence_threshold",
    "stage3_model_persistence_threshold",
    "use_all_reduce_for_fetch_params",
    "stage3_use_all_reduce_for_fetch_params",
    "module_granularity_threshold",
    "stage3_module_granularity_threshold",
    "leaf_module",
)
_TOP = (
    "scheduler",
    "steps_per_print",
    "wall_clock_breakdown",
    "dump_state",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "communication_data_type",
    "prescale_gradients",
    "gradient_predivide_factor",
    "flops_profiler",
    "tensorboard",
    "wandb",
    "comet",
    "csv_monitor",
    "comms_logger",
    "aio",
    "seq_parallel_communication_data_type",
    "sparse_gradients",
    "memory_breakdown",
    "checkpoint",
    "data_types",
    "amp",
    "monitor_config",
    "graph_harvesting",
    "zero_load_from_fp32_weights",
    "activation_checkpointing",
    "disable_allgather",
    "fp32_allreduce",
    "data_efficiency",
    "compile",
    "hybrid_engine",
)
_OPTIMIZERS = {
    "adam": "adamw-fused",
    "adamw": "adamw-fused",
    "lion": "lion",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "muon": "muon",
}
DEVICES = ("none", "cpu", "nvme")


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a DeepSpeed config."""
    known = [
        "zero_optimization",
        "bf16",
        "bfloat16",
        "fp16",
        "optimizer",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "gradient_accumulation_steps",
        "gradient_clipping",
        *_TOP,
    ]
    _refuse_unknown(job.content, known, "DeepSpeed key")
    _read_batch(job)
    clipping = job.take("gradient_clipping")
    if clipping is not None and clipping != AUTO:
        job.give("clip", clipping != 0)
    _read_precision(job)
    optimizer = job.mapping("optimizer").get("type")
    if optimizer is not None and optimizer != AUTO:
        name = str(optimizer).lower()
        job.give("optimizer", _OPTIMIZERS.get(name, name))
    read_zero(job, job.mapping("zero_optimization"))
    for key in _TOP:
        job.take(key)
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


def _read_precision(job: ForeignJob) -> None:
    half = {key: _enabled(job.mapping(key)) for key in ("bf16", "bfloat16", "fp16")}
    if (half["bf16"] or half["bfloat16"]) is True and half["fp16"] is True:
        raise InputError("bf16 and fp16 are both enabled; keep one of them")
    if True in half.values():
        job.give("precision", "fp16-autocast" if half["fp16"] is True else "bf16-autocast")
    elif AUTO in half.values():
        job.note("bf16 or fp16 is 'auto': taken as bf16; give --precision for another")
    else:
        job.give("precision", "fp32")


def _enabled(section: Mapping[str, object]) -> object:
    value = section.get("enabled", False)
    return AUTO if value == AUTO else values.switch(value, "enabled")


def read_zero(job: ForeignJob, zero: Mapping[str, object]) -> None:
    """The section 'zero_optimization'."""
    if not zero:
        job.give("data_parallel", ["ddp"])
        return
    _refuse_unknown(zero, [*_SIZES, *_COUNTS, *_SWITCHES, *_ZERO_OTHER], "zero_optimization key")
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise InputError(f"zero_optimization stage {shown(stage)} is unknown; use 0, 1, 2 or 3")
    job.give("data_parallel", [f"zero{stage}" if stage else "ddp"])
    fields: dict[str, Any] = {}
    for key, field in _SIZES.items():
        if key in zero:
            fields[field] = 0 if zero[key] == AUTO else values.count(zero[key], key, low=0)
    for key, field in _COUNTS.items():
        if key in zero and zero[key] != -1:
            fields[field] = values.count(zero[key], key)
    for key, field in _SWITCHES.items():
        if key in zero:
            fields[field] = values.switch(zero[key], key)
    job.give("zero_options", ZeroConfig(**fields))
    read_offload(
        job,
        {
            name: device_of(zero, name, section)
            for name, section in (
                ("optimizer", "offload_optimizer"),
                ("parameters", "offload_param"),
            )
        },
    )


def device_of(zero: Mapping[str, object], name: str, section: str) -> str:
    """Where states or parameters are kept: none, cpu or nvme."""
    given = zero.get(section)
    if given is None:
        return "cpu" if name == "optimizer" and zero.get("cpu_offload") is True else "none"
    device = str(values.mapping(given, section).get("device", "none")).lower()
    if device not in DEVICES:
        raise InputError(
            f"{section} device {shown(device)} is unknown; use one of"
            f" {', '.join(DEVICES)}{suggest(device, list(DEVICES))}"
        )
    return device


def read_offload(job: ForeignJob, devices: Mapping[str, str]) -> None:
    """What is offloaded, and what of it to NVMe."""
    if moved := [name for name, device in devices.items() if device != "none"]:
        job.give("offload", ",".join(moved))
    if stored := [name for name, device in devices.items() if device == "nvme"]:
        job.give("nvme", ",".join(stored))


def _refuse_unknown(section: Mapping[str, object], known: list[str], what: str) -> None:
    for key in section:
        if key not in known:
            near = suggest(key, known)
            raise InputError(
                f"{what} {shown(key)} is unknown{near or '; see deepspeed.ai/docs/config-json'}"
            )
