"""DeepSpeed's JSON (DeepSpeed runtime/config.py, runtime/zero/config.py), every size spelled out so
that nothing is left to 'auto'."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import TrainConfig
from napkinmath.exports.names import number

_STAGES = {DataParallel.ZERO1: 1, DataParallel.ZERO2: 2, DataParallel.ZERO3: 3}


def stage(config: TrainConfig) -> int:
    """ZeRO's stage; 0 without."""
    return _STAGES.get(config.parallel.data_parallel, 0)


def write(config: TrainConfig, model: str) -> dict[str, object]:
    """The file of `deepspeed=` in TrainingArguments; it names no model and leaves the optimizer to
    the Trainer."""
    parallel = config.parallel
    if parallel.data_parallel.is_fsdp:
        raise InputError(
            "FSDP and DeepSpeed exclude each other; use --zero 3, or --export accelerate"
        )
    if (
        parallel.tensor_parallel_size
        * parallel.pipeline_parallel_size
        * parallel.context_parallel_size
        > 1
    ):
        raise InputError("DeepSpeed's config file spreads data only; leave --tp, --pp and --cp out")
    micro, accumulation = number(config.micro_batch_size), config.gradient_accumulation_steps
    return {
        "train_batch_size": micro * accumulation * parallel.data_parallel_size,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0 if config.clip_gradients else 0.0,
        **{half: _half(half, config) for half in ("bf16", "fp16")},
        "zero_optimization": _zero(config),
    }


def _half(half: str, config: TrainConfig) -> dict[str, object]:
    """The section of a type of 16 bits, with what it says of masters."""
    zero = config.parallel.zero
    found: dict[str, object] = {"enabled": config.precision.value.startswith(half)}
    if zero.master_dtype == half:
        found[f"{half}_master_weights_and_grads"] = True
        if zero.narrow_states:
            found[f"{half}_optimizer_states"] = True
    return found


def _zero(config: TrainConfig) -> dict[str, object]:
    sizes = config.parallel.zero
    found: dict[str, object] = {"stage": stage(config)}
    if not stage(config):
        return found
    found |= {
        "contiguous_gradients": sizes.contiguous_gradients,
        "overlap_comm": stage(config) == 3 if sizes.overlap_comm is None else sizes.overlap_comm,
        "reduce_bucket_size": sizes.reduce_bucket_size,
    }
    if config.offload.optimizer:
        found["offload_optimizer"] = _offloaded("optimizer", config)
    if stage(config) < 3:
        return found | {
            "allgather_bucket_size": sizes.allgather_bucket_size,
            "round_robin_gradients": sizes.round_robin_gradients,
        }
    if config.offload.parameters:
        found["offload_param"] = _offloaded("parameters", config)
    return found | _stage_3(config)


def _offloaded(what: str, config: TrainConfig) -> dict[str, object]:
    found: dict[str, object] = {
        "device": "nvme" if what in config.parallel.nvme else "cpu",
        "pin_memory": config.offload.pinned,
    }
    ratio = config.parallel.zero.offload_ratio
    return found if what == "parameters" or ratio == 1 else {**found, "ratio": ratio}


def _stage_3(config: TrainConfig) -> dict[str, object]:
    sizes = config.parallel.zero
    return {
        "stage3_prefetch_bucket_size": sizes.prefetch_bucket_size,
        "stage3_param_persistence_threshold": sizes.param_persistence_threshold,
        "stage3_max_live_parameters": sizes.max_live_parameters,
        "stage3_max_reuse_distance": sizes.max_reuse_distance,
        "sub_group_size": sizes.sub_group_size,
        "memory_efficient_linear": sizes.memory_efficient_linear,
        "stage3_gather_16bit_weights_on_model_save": config.parallel.full_state_dict,
    }
