"""accelerate's launch config, with its FSDP section (accelerate 1.15
commands/config/config_args.py, utils/dataclasses.py)."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.config.parallel_config import DataParallel, ParallelConfig, Sharding
from napkinmath.config.train_config import TrainConfig

_STRATEGIES = {
    Sharding.FULL: "FULL_SHARD",
    Sharding.GRAD_OP: "SHARD_GRAD_OP",
    Sharding.HYBRID: "HYBRID_SHARD",
    Sharding.HYBRID_GRAD_OP: "HYBRID_SHARD_ZERO2",
    Sharding.NO_SHARD: "NO_SHARD",
}


def write(config: TrainConfig, model: str) -> dict[str, object]:
    """The file of `accelerate launch --config_file`; it names no model."""
    parallel = config.parallel
    if (
        parallel.tensor_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.context_parallel_size
        > 1
    ):
        raise InputError(
            "accelerate's config file spreads data only; leave --tp, --pp and --cp out, or use"
            " another tool"
        )
    precision = config.precision.value
    content: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _kind(parallel),
        "mixed_precision": precision[:4] if precision.endswith(("-amp", "-autocast")) else "no",
        "num_machines": 1,
        "num_processes": parallel.world_size,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": False,
    }
    if parallel.data_parallel.is_fsdp:
        content["fsdp_config"] = _fsdp(config)
    if parallel.data_parallel.is_zero:
        content["deepspeed_config"] = _zero(config)
    if config.compile:
        content["dynamo_config"] = {"dynamo_backend": "INDUCTOR"}
    return content


def _kind(parallel: ParallelConfig) -> str:
    if parallel.data_parallel.is_fsdp:
        return "FSDP"
    if parallel.data_parallel.is_zero:
        return "DEEPSPEED"
    return "MULTI_GPU" if parallel.world_size > 1 else "NO"


def _fsdp(config: TrainConfig) -> dict[str, object]:
    parallel = config.parallel
    common: dict[str, object] = {
        "fsdp_auto_wrap_policy": "NO_WRAP" if parallel.wrap == "none" else "TRANSFORMER_BASED_WRAP",
        "fsdp_offload_params": config.offload.parameters,
        "fsdp_state_dict_type": (
            "FULL_STATE_DICT" if parallel.full_state_dict else "SHARDED_STATE_DICT"
        ),
        "fsdp_activation_checkpointing": False,
        "fsdp_cpu_ram_efficient_loading": parallel.broadcast_loading,
    }
    if parallel.data_parallel is DataParallel.FSDP2:
        keeps = parallel.sharding in (Sharding.GRAD_OP, Sharding.HYBRID_GRAD_OP)
        reshard = (
            parallel.reshard_after_forward
            if parallel.reshard_after_forward is not None
            else not keeps
        )
        return {"fsdp_version": 2, "fsdp_reshard_after_forward": reshard, **common}
    return {
        "fsdp_version": 1,
        "fsdp_sharding_strategy": _STRATEGIES[parallel.sharding],
        "fsdp_backward_prefetch": "BACKWARD_PRE" if parallel.backward_prefetch else "NO_PREFETCH",
        "fsdp_forward_prefetch": parallel.forward_prefetch,
        "fsdp_use_orig_params": True,
        "fsdp_sync_module_states": parallel.broadcast_loading,
        **common,
    }


def _zero(config: TrainConfig) -> dict[str, object]:
    from napkinmath.exports.deepspeed import stage

    return {
        "zero_stage": stage(config),
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": 1.0 if config.clip_gradients else 0.0,
        "offload_optimizer_device": "cpu" if config.offload.optimizer else "none",
        "offload_param_device": "cpu" if config.offload.parameters else "none",
        "zero3_init_flag": stage(config) == 3,
        "zero3_save_16bit_model": stage(config) == 3,
    }
