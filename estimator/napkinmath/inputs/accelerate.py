"""accelerate's YAML (`accelerate config`): processes, machines, FSDP or DeepSpeed, mixed precision.

Keys: accelerate 1.14 commands/config/cluster.py, utils/dataclasses.py
FullyShardedDataParallelPlugin, ParallelismConfig.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.inputs.deepspeed import AUTO, DEVICES, give_number, read_offload

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.foreign import ForeignJob

_SHARDING = {
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
_FSDP_OTHER = (
    "auto_wrap_policy",
    "transformer_layer_cls_to_wrap",
    "min_num_params",
    "use_orig_params",
    "sync_module_states",
    "limit_all_gathers",
    "ignored_modules",
    "xla_fsdp_grad_ckpt",
    "xla_fsdp_v2",
    "xla",
)
_FSDP_KEYS = (
    "version",
    "sharding_strategy",
    "reshard_after_forward",
    "offload_params",
    "backward_prefetch",
    "forward_prefetch",
    "state_dict_type",
    "cpu_ram_efficient_loading",
    "activation_checkpointing",
    *_FSDP_OTHER,
)
_DEEPSPEED_KEYS = (
    "zero_stage",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_config_file",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "deepspeed_exclusion_filter",
    "deepspeed_inclusion_filter",
    "deepspeed_moe_layer_cls_names",
)
_DISTRIBUTED = ("NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MULTI_CPU", "MULTI_XPU", "TP")
_HARMLESS = (
    "compute_environment",
    "debug",
    "downcast_bf16",
    "enable_cpu_affinity",
    "machine_rank",
    "main_training_function",
    "rdzv_backend",
    "same_network",
    "tpu_env",
    "tpu_use_cluster",
    "tpu_use_sudo",
    "use_cpu",
    "main_process_ip",
    "main_process_port",
    "gpu_ids",
    "dynamo_config",
    "dynamo_backend",
    "fp8_config",
    "mpirun_config",
    "ipex_config",
    "commands",
    "command_file",
    "megatron_lm_config",
    "num_cpu_threads_per_process",
    "tpu_name",
    "tpu_zone",
    "tpu_vm",
    "tpu_env",
)


def read(job: ForeignJob) -> dict[str, object]:
    """Options of an accelerate config."""
    kind = str(job.take("distributed_type") or "NO").upper()
    if kind not in _DISTRIBUTED:
        raise InputError(
            f"distributed_type {shown(kind)} is not priced; use one of"
            f" {', '.join(_DISTRIBUTED)}{suggest(kind, list(_DISTRIBUTED))}"
        )
    job.give("gpus", job.take("num_processes"))
    job.give("nodes", job.take("num_machines"))
    precision = str(job.take("mixed_precision") or "no").lower()
    if precision not in ("no", "bf16", "fp16", "fp8"):
        raise InputError(
            f"mixed_precision {shown(precision)} is unknown; use no, bf16, fp16 or fp8"
        )
    if precision != "no":
        job.give(
            "precision", {"bf16": "bf16-autocast", "fp16": "fp16-amp", "fp8": "fp8"}[precision]
        )
    fsdp, deepspeed = job.mapping("fsdp_config"), job.mapping("deepspeed_config")
    if kind == "FSDP" or (fsdp and kind == "MULTI_GPU"):
        _read_fsdp(job, fsdp)
    elif kind == "DEEPSPEED":
        _read_deepspeed(job, deepspeed)
    _read_mesh(job, job.mapping("parallelism_config"))
    for key in _HARMLESS:
        job.take(key)
    return job.finish()


def _read_fsdp(job: ForeignJob, section: Mapping[str, object]) -> None:
    fsdp = {key.removeprefix("fsdp_"): value for key, value in section.items()}
    for key in fsdp:
        if key not in _FSDP_KEYS:
            raise InputError(
                f"fsdp_config key {shown('fsdp_' + key)} is"
                f" unknown{suggest(key, list(_FSDP_KEYS)) or '; see `accelerate config`'}"
            )
    version = values.count(fsdp.get("version", 1), "fsdp_version", high=2)
    job.give("data_parallel", [f"fsdp{version}"])
    reshard = fsdp.get("reshard_after_forward")
    strategy = fsdp.get(
        "sharding_strategy",
        reshard if isinstance(reshard, str) and reshard.lower() in _SHARDING else None,
    )
    if strategy is not None:
        if str(strategy).lower() not in _SHARDING:
            raise InputError(
                f"fsdp_sharding_strategy {shown(strategy)} is unknown; use FULL_SHARD,"
                " SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD or HYBRID_SHARD_ZERO2"
            )
        job.give("sharding", _SHARDING[str(strategy).lower()])
    elif reshard is not None:
        job.give("reshard", values.switch(reshard, "fsdp_reshard_after_forward"))
    if _on(fsdp, "offload_params"):
        job.give("offload", "optimizer,parameters")
    if _on(fsdp, "activation_checkpointing"):
        job.give("checkpointing", "full")
    for key, option in (
        ("forward_prefetch", "forward_prefetch"),
        ("cpu_ram_efficient_loading", "broadcast_loading"),
    ):
        if _on(fsdp, key):
            job.give(option, True)
    if version == 1 and "backward_prefetch" in fsdp:
        job.give(
            "backward_prefetch", str(fsdp["backward_prefetch"]).upper() in ("BACKWARD_PRE", "1")
        )
    if str(fsdp.get("state_dict_type", "")).upper() == "FULL_STATE_DICT":
        job.give("full_state_dict", True)
    if str(fsdp.get("auto_wrap_policy", "")).upper() == "NO_WRAP":
        job.give("wrap", "none")


def _on(section: Mapping[str, object], key: str) -> bool:
    return (
        key in section and section[key] is not None and values.switch(section[key], f"fsdp_{key}")
    )


def _read_deepspeed(job: ForeignJob, section: Mapping[str, object]) -> None:
    for key in section:
        if key not in _DEEPSPEED_KEYS:
            raise InputError(
                f"deepspeed_config key {shown(key)} is"
                f" unknown{suggest(key, list(_DEEPSPEED_KEYS)) or '; see `accelerate config`'}"
            )
    if "deepspeed_config_file" in section:
        raise InputError(
            f"deepspeed_config_file {shown(section['deepspeed_config_file'])}: price that file"
            f" itself, with --gpus {job.options.get('gpus', 'N')}"
        )
    stage = section.get("zero_stage", 2)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise InputError(f"zero_stage {shown(stage)} is unknown; use 0, 1, 2 or 3")
    job.give("data_parallel", [f"zero{stage}" if stage else "ddp"])
    give_number(job, "grad_accum", section.get("gradient_accumulation_steps"))
    clipping = section.get("gradient_clipping")
    if clipping is not None and clipping != AUTO:
        job.give("clip", clipping != 0)
    devices = {
        name: str(section.get(key, "none")).lower()
        for name, key in (
            ("optimizer", "offload_optimizer_device"),
            ("parameters", "offload_param_device"),
        )
    }
    for device in devices.values():
        if device not in DEVICES:
            raise InputError(
                f"offload device {shown(device)} is unknown; use one of {', '.join(DEVICES)}"
            )
    read_offload(job, devices)


def _read_mesh(job: ForeignJob, section: Mapping[str, object]) -> None:
    """parallelism_config: tensor and context degrees, and copies of the sharded model."""
    mesh = {key.removeprefix("parallelism_config_"): value for key, value in section.items()}
    for key, option in (("tp_size", "tp"), ("cp_size", "cp")):
        if values.count(mesh.get(key, 1) or 1, key) > 1:
            job.give(option, mesh[key])
    if values.count(mesh.get("dp_replicate_size", 1) or 1, "dp_replicate_size") > 1:
        job.give("sharding", "hybrid")
        job.give("shard_size", mesh.get("dp_shard_size"))
