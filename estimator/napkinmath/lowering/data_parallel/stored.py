"""What one rank stores: each weight's part in the type that it is kept in, and shadow runs that
loading, clipping and update work on."""

from __future__ import annotations

from napkinmath.base.dtypes import FP32, UINT8, DType, find_dtype
from napkinmath.base.expr import Size, ceil_div, product
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import Block, Role, Tensor, Weight
from napkinmath.ir.step import Run
from napkinmath.lowering.data_parallel.holders import is_spread, shard_ranks

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.lowering.policy import Policy

# packed 4-bit weights are stored as bf16 numbers, so that they can be sharded like any parameter
STORAGE_BYTES = 2


def stored_dtype(weight: Weight, policy: Policy) -> DType:
    """Type in which a dense parameter is kept between gathers: the one named, else fp32 where it is
    trained in mixed precision, else as loaded.

    Stacks with fp32 masters shard the 16 bits beside them (Megatron-LM core/distributed/fsdp/src
    megatron_fsdp/param_and_grad_buffer.py). Over a 4-bit base nothing is upcast, but PEFT makes adapters fp32 by itself; FSDP1's flat
    parameters want one type. Source: accelerate 1.14 utils/fsdp_utils.py fsdp2_prepare_model.
    """
    wanted = policy.config.parallel.sharded_dtype
    dense = weight.trainable or policy.format is None  # a frozen one lies in it too, as loaded
    if dense and wanted != "auto":
        return find_dtype(wanted)
    if policy.loaded_rule.autocast is None or policy.stack.optimizer.master_weights:
        return weight.tensor.dtype
    if weight.trainable:
        adapter = policy.adapter
        kept = policy.format is not None and (
            policy.config.parallel.data_parallel is DataParallel.FSDP1
            or (adapter is not None and adapter.dtype not in ("auto", "fp32"))
        )
        return weight.tensor.dtype if kept else FP32
    return weight.tensor.dtype if policy.format is not None else policy.loaded_rule.parameters


def is_sharded(weight: Weight, policy: Policy) -> bool:
    """Whether a weight is split over the ranks: parameters are, buffers and constants of
    quantization are not."""
    if weight.buffer or weight.tied_to:
        return False
    return not (weight.constants and policy.quant_storage == "uint8")


def row_shard(weight: Weight, dtype: DType, ranks: int, role: Role | None = None) -> Tensor:
    """The padded rows of one rank: FSDP2 splits dimension 0, and every rank holds as many rows as
    the first.

    Source: torch 2.13 distributed/fsdp/_fully_shard/_fsdp_param.py _init_sharded_param,
    padded_sharded_param_size.
    """
    axes = row_axes(weight, ranks)
    return Tensor(
        weight.tensor.name,
        axes,
        UINT8 if weight.constants else dtype,
        role or weight.tensor.role,
        weight.path,
    )


def row_axes(weight: Weight, ranks: int) -> tuple[Size, ...]:
    """Axes of a rank's rows; a packed weight is one column of 16-bit words."""
    if weight.constants:
        return (
            STORAGE_BYTES
            * ceil_div(
                ceil_div(product(weight.tensor.axes) * weight.tensor.dtype.bits, 8),
                STORAGE_BYTES * ranks,
            ),
        )
    return (ceil_div(weight.axes[0], ranks), *weight.axes[1:])


def row_shards(run: Run, policy: Policy) -> list[tuple[Weight, Weight]]:
    """(weight of the model, the rank's part of it) of each weight of a run that is split."""
    return [
        (w, _part(w, policy, ranks_of(w, policy)))
        for w in run.block.weights
        if is_sharded(w, policy)
    ]


def splits_parameters(parallel: ParallelConfig) -> bool:
    """Whether data-parallel ranks store parts of the parameters, not of optimizer states and
    gradients alone."""
    return parallel.data_parallel.is_fsdp or parallel.data_parallel is DataParallel.ZERO3


def ranks_of(weight: Weight, policy: Policy) -> int:
    """Ranks that a weight is split over."""
    parallel = policy.config.parallel
    return shard_ranks(parallel, spread=is_spread(weight.path, parallel))


def _part(weight: Weight, policy: Policy, ranks: int) -> Weight:
    tensor = row_shard(weight, stored_dtype(weight, policy), ranks)
    return Weight(
        weight.path,
        tensor.axes,
        tensor,
        trainable=weight.trainable,
        kind=weight.kind,
        constants=weight.constants,
    )


def shadow(run: Run, weights: list[Weight], gradients: list[Tensor]) -> Run:
    """A run that computes nothing and owns what the rank stores of another's weights."""
    block = Block(run.block.name, [], weights, None, None, (), {}, run.block.symbols)
    block.gradients = gradients
    return Run(block, run.count, run.stage, run.first)


def on_host(tensor: Tensor) -> Tensor:
    """The same tensor in host memory."""
    return Tensor(
        tensor.name, tensor.axes, tensor.dtype, tensor.role, tensor.module, tensor.source, host=True
    )


def packs_on_device(policy: Policy) -> bool:
    """Whether every rank packs the whole model on its own GPU before any of it is sharded.

    Source: transformers 5.23 quantizers/quantizer_bnb_4bit.py update_device_map and
    integrations/bitsandbytes.py Bnb4bitQuantize, which leaves a weight where it was packed.
    transformers 4 takes it back to the host (4.57 modeling_utils.py
    _load_state_dict_into_meta_model). Under DeepSpeed's stage 3 both do the same: zero.Init is for
    models that are not quantized (5.23 modeling_utils.py get_init_context).
    """
    model, form = policy.stack.model, policy.format
    here = model.runs_transformers and not model.is_transformers_before((5, 0))
    return here and form is not None and form.of_bitsandbytes
