"""How libraries write the borders of the region that tensor parallelism splits, one row each."""

from __future__ import annotations

from napkinmath.base.record import Record
from napkinmath.catalog.stacks import find_stack

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.stack import Stack


class TensorStyle(Record):
    """How a library writes the borders of the split region."""

    name: str
    source: str
    enters_once: bool
    """Linears that read the same tensor share one border (a module's input is prepared, or q, k, v
    are one linear)."""
    new_buffers: bool
    """Reductions write to a new tensor (torch's functional collectives) instead of in place."""
    gathers_again: bool = False
    """The gathered input is not kept: its shard is, and gathered again for the weight's gradient
    (Megatron-LM)."""
    splits_loss: bool = True
    """The loss is computed on each rank's share of the vocabulary; otherwise logits are
    gathered."""
    copies_heads: bool = False
    """Key/value heads that are fewer than ranks are held by several of them."""
    splits_mixers: bool = False
    """State-space and linear-attention layers are split by their heads and groups (Megatron-LM
    core/ssm/mamba_mixer.py, gated_delta_net/common.py); otherwise no library's plan has them."""
    splits_widths: bool = False
    """Mamba's and the short convolutions' channels are split, which have no heads."""
    copies_group: bool = False
    """A state-space layer's one group is held by every rank."""
    gathers_rows: bool = True
    """Gathering along the sequence makes rank-major rows first and copies them into order (torch's
    functional collectives)."""
    compiler_overlaps: bool = False
    """Collectives run beside products where the compiler fuses the two, over memory that ranks
    write for each other (torch distributed/_symmetric_memory fused_all_gather_matmul,
    fused_matmul_reduce_scatter; _inductor/fx_passes/micro_pipeline_tp.py)."""
    casts_before_gather: bool = False
    """With one scale a tensor, inputs are cast to FP8 before they are gathered, and so are the
    gradients of results (torchao float8/float8_tensor_parallel.py Float8ColwiseParallel,
    Float8RowwiseParallel)."""


TRANSFORMERS = TensorStyle(
    name="transformers",
    source="transformers 5.23 distributed/tensor_parallel.py (tp_plan)",
    enters_once=False,
    new_buffers=True,
    splits_loss=False,
)
HEAD_SPLIT = TRANSFORMERS.replace(
    name="head-split",
    source=(
        "NeMo-RL v0.3.0 models/dtensor/parallelize.py _parallelize_llama, Automodel distributed/"
        "optimized_tp_plans.py (lm_head ColwiseParallel with output_layouts Shard(-1))"
    ),
    splits_loss=True,
)
DTENSOR = TensorStyle(
    name="dtensor",
    source=(
        "torch 2.13 distributed/tensor/parallel (ColwiseParallel, RowwiseParallel,"
        " SequenceParallel, loss_parallel)"
    ),
    enters_once=True,
    new_buffers=True,
    compiler_overlaps=True,
    casts_before_gather=True,
)
MEGATRON = TensorStyle(
    name="megatron",
    source=(
        "Megatron-LM core/tensor_parallel/layers.py"
        " LinearWithGradAccumulationAndAsyncCommunication, cross_entropy.py"
    ),
    enters_once=True,
    new_buffers=False,
    gathers_again=True,
    gathers_rows=False,
    copies_heads=True,
    splits_mixers=True,
)
NANOTRON = MEGATRON.replace(
    name="nanotron",
    source=(
        "nanotron 3c356115 parallel/tensor_parallel/functional.py column_linear, row_linear,"
        " _ColumnLinearAsyncCommunication; distributed_differentiable_primitives.py"
    ),
    copies_heads=False,
    splits_mixers=False,
)
NANOTRON_2024 = NANOTRON.replace(name="nanotron-2024", gathers_again=False)
ENGINE = MEGATRON.replace(
    name="engine",
    source=(
        "vllm 0.11 model_executor/layers/linear.py, layers/mamba/mamba_utils.py"
        " extra_groups_for_head_shards, mamba1_state_shape, short_conv_state_shape"
    ),
    splits_widths=True,
    copies_group=True,
)
_OWN = {
    row.name: row for row in (MEGATRON, NANOTRON, NANOTRON_2024)
}  # of libraries whose stack names it


def tensor_style(config: TrainConfig, stack: Stack) -> TensorStyle:
    """Whose borders run: the library's own, torch's styles with a split sequence; where norms are
    whole, transformers' plan, whose head stays split for a loss that is made across ranks."""
    if stack.engine.tensor_style:
        return _OWN[stack.engine.tensor_style]
    if config.parallel.sequence_parallel:
        return DTENSOR
    return HEAD_SPLIT if stack.loss.across_ranks else TRANSFORMERS


def configured_style(config: TrainConfig) -> TensorStyle:
    """The same for the stack that a configuration names."""
    return tensor_style(config, find_stack(config.stack))
