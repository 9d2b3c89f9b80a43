"""What each precision means: type of parameters, autocast type, whether a loss scaler runs."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP8_E4M3, FP16, FP32, DType
from napkinmath.base.record import Record
from napkinmath.config.train_config import Precision

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.hardware import Gpu
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.config.train_config import TrainConfig


class PrecisionRule(Record):
    """One row: `parameters` as stored, `autocast` as computed (None: as stored), and the GEMM rate
    that applies."""

    parameters: DType
    autocast: DType | None = None
    gemm: str = ""
    """FLOP/s row of the GPU that utilisation is measured against where it is not the operands' type
    (tf32, fp8)."""
    loss_scaling: bool = False
    fp8_block: int | None = None
    """Linears but the head multiply in FP8: side of the blocks that share a scale, 0 for one scale
    a tensor or a row."""
    fp8_rows: bool = False
    """Each row of a factor has a scale, along the dimension that its product sums over."""
    meaning: str = ""


def computed_rule(
    rule: PrecisionRule, parallel: ParallelConfig, *, master_weights: bool
) -> PrecisionRule:
    """The types a rank computes in: FSDP gathers parameters in the type of mixed precision,
    DeepSpeed and stacks with fp32 `master_weights` keep them in it without autocast.

    With FP8 and a named sharded type FSDP's policy is all the mixed precision there is, as in
    torchtitan (parallelize_llama.py apply_fsdp). Under stacks with masters nothing autocasts
    (Megatron-FSDP shards 16-bit weights beside their fp32 masters). Sources: accelerate 1.14 utils/dataclasses.py
    FullyShardedDataParallelPlugin.set_mixed_precision; DeepSpeed runtime/engine.py
    _configure_distributed_model; Megatron-LM core/transformer/module.py Float16Module.
    """
    if rule.autocast is None:
        return rule
    if parallel.data_parallel.is_fsdp:
        alone = master_weights or (rule.fp8_block is not None and parallel.sharded_dtype != "auto")
        return rule.replace(parameters=rule.autocast, autocast=None if alone else rule.autocast)
    return (
        rule.replace(parameters=rule.autocast, autocast=None)
        if parallel.data_parallel.is_zero or master_weights
        else rule
    )


def gathered_dtype(
    loaded: PrecisionRule, computed: PrecisionRule, parallel: ParallelConfig
) -> DType | None:
    """Type in which an engine gathers, or keeps, adapters whatever type they were made in; None
    where they stay in it. FSDP's mixed precision casts every parameter of a unit (torch
    distributed/fsdp/_fully_shard/_fsdp_param.py init_dtype_attrs)."""
    kind = parallel.data_parallel
    if loaded.autocast is not None and (kind.is_fsdp or kind.is_zero):
        return loaded.autocast
    return computed.parameters if kind.is_fsdp and parallel.sharded_dtype != "auto" else None


PRECISIONS: dict[Precision, PrecisionRule] = {
    Precision.BF16: PrecisionRule(parameters=BF16, meaning="everything in bf16"),
    Precision.BF16_AUTOCAST: PrecisionRule(
        parameters=BF16,
        autocast=BF16,
        meaning=(
            "bf16 weights under bf16 autocast: the Trainer's bf16=True on a model loaded in bf16"
        ),
    ),
    Precision.BF16_AMP: PrecisionRule(
        parameters=FP32,
        autocast=BF16,
        meaning=(
            "fp32 weights under bf16 autocast: the Trainer's bf16=True on a model loaded in fp32"
        ),
    ),
    Precision.BF16_FP8_BASE: PrecisionRule(
        parameters=FP8_E4M3,
        autocast=BF16,
        meaning=(
            "frozen weights in FP8 (E4M3) without scales, cast for each operation by bf16 autocast:"
            " sd-scripts' fp8_base"
        ),
    ),
    Precision.FP16_FP8_BASE: PrecisionRule(
        parameters=FP8_E4M3,
        autocast=FP16,
        loss_scaling=True,
        meaning="the same under fp16 autocast with loss scaling",
    ),
    Precision.FP16: PrecisionRule(parameters=FP16, meaning="everything in fp16"),
    Precision.FP16_AMP: PrecisionRule(
        parameters=FP32,
        autocast=FP16,
        loss_scaling=True,
        meaning="fp32 master weights under fp16 autocast with loss scaling",
    ),
    Precision.FP16_AUTOCAST: PrecisionRule(
        parameters=FP16,
        autocast=FP16,
        loss_scaling=True,
        meaning=(
            "fp16 weights under fp16 autocast with loss scaling: the Trainer's fp16=True on a"
            " frozen or quantized base"
        ),
    ),
    Precision.FP32: PrecisionRule(parameters=FP32, meaning="everything in fp32"),
    Precision.TF32: PrecisionRule(
        parameters=FP32, gemm="tf32", meaning="fp32 storage, TF32 matrix products"
    ),
    Precision.FP8: PrecisionRule(
        parameters=FP32,
        autocast=BF16,
        gemm="fp8",
        fp8_block=0,
        meaning="fp32 weights, bf16 activations, tensor-scaled E4M3/E5M2 products",
    ),
    Precision.FP8_ROW: PrecisionRule(
        parameters=FP32,
        autocast=BF16,
        gemm="fp8",
        fp8_block=0,
        fp8_rows=True,
        meaning="fp32 weights, bf16 activations, E4M3 products with a scale for each row (torchao's rowwise)",
    ),
    Precision.FP8_BLOCK: PrecisionRule(
        parameters=FP32,
        autocast=BF16,
        gemm="fp8",
        fp8_block=128,
        meaning=(
            "fp32 weights, bf16 activations, products with a scale for each 128x128 block of"
            " weights and each 128 activations"
        ),
    ),
}


def computes(gpu: Gpu, dtype: str) -> bool:
    """Whether a GPU's matrix units take a type, as far as its rates are known."""
    return not gpu.dense_flops or gpu.supports(dtype)


def in_fp16(config: TrainConfig) -> TrainConfig:
    """The training in fp16 that stands for one in bf16, its loss scaled where a trainer does that.

    The scaler refuses fp16 gradients, so weights that are trained stay in fp32, and so do adapters
    (torch amp/grad_scaler.py unscale_, "Attempting to unscale FP16 gradients").
    """
    adapter = config.adapter
    if adapter is None or adapter.trained_modules or config.precision is Precision.BF16_AMP:
        return config.replace(precision=Precision.FP16_AMP)
    if adapter.dtype not in ("auto", "fp32"):
        config = config.replace(adapter=adapter.replace(dtype="fp32"))
    return config.replace(precision=Precision.FP16_AUTOCAST)


def words_of_fp16(config: TrainConfig) -> str:
    """The flags that make it so: '--precision fp16-amp'."""
    there = in_fp16(config)
    widened = there.adapter is not None and there.adapter != config.adapter
    return f"--precision {there.precision.value}{' --adapter-dtype fp32' if widened else ''}"


def on_gpu(config: TrainConfig, gpu: Gpu | None, notes: list[str]) -> TrainConfig:
    """A training whose precision nobody gave, in fp16 where the GPU has no matrix units for bf16, as
    people train there and `plan` has it; `notes` receives that."""
    in_bf16 = (Precision.BF16_AUTOCAST, Precision.BF16_AMP)
    if gpu is None or computes(gpu, "bf16") or config.precision not in in_bf16:
        return config
    notes.append(f"{words_of_fp16(config)}: {gpu.name} has no matrix units for bf16")
    return in_fp16(config)
