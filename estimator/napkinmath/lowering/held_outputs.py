"""Outputs and inputs that live longer than their micro-batch.

A loop's variable keeps them through the optimizer step, until the next forward binds it anew.
DeepSpeed's pipeline engine has at least two buffers a stage, and its last stage leaves what it
returned in them until another micro-batch takes their place.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.config.parallel_config import DataParallel
from napkinmath.ir.ledger import ALLOC, FREE, Block, Phase, Role, Tensor
from napkinmath.ir.step import Run, Segment, Update
from napkinmath.lowering.parallel.vocabulary import NAME

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.lowering.policy import Policy

RETURNED = "returned logits"
TAUGHT_LOGITS, TAUGHT_STATES = "teacher's logits", "teacher's hidden states"


def hold_through_update(update: Update, runs: list[Run]) -> None:
    """Keeps the logits that the head returned from clipping to zero_grad. Source: litgpt 0.4
    finetune/full.py, lora.py fit."""
    made = next(
        (v.tensor for op in runs[-1].block.ops for v in op.outputs if v.tensor.name == RETURNED),
        None,
    )
    if made is None:
        return
    held = Tensor(
        "returned logits, still bound", made.axes, made.dtype, made.role, made.module, made.source
    )
    update.clip = [Segment("loop's variables", Phase.STEP, [(ALLOC, held)]), *update.clip]
    update.zero = [*update.zero, Segment("loop's variables", Phase.STEP, [(FREE, held)])]


# Buffers of a last stage (runtime/pipe/schedule.py TrainSchedule.num_pipe_buffers).
_STAGE_BUFFERS = 2


def kept_by_stage(runs: list[Run], policy: Policy) -> list[Segment]:
    """fp32 logits of earlier micro-batches, where these runs end in the loss: with those that are
    made there are three, and two through each backward.

    Sources: DeepSpeed runtime/pipe/engine.py _exec_forward_pass, _exec_backward_pass (it returns
    before a last stage's outputs would be let go); Megatron-DeepSpeed megatron/model/gpt_model.py
    GPTModelPipe, which ends in float16_to_fp32.
    """
    config = policy.config
    if config.parallel.data_parallel in (DataParallel.ZERO2, DataParallel.ZERO3):
        return []  # which that engine does not run
    micro_batches = config.parallel.num_micro_batches or config.gradient_accumulation_steps
    made = next((op for op in runs[-1].block.ops if op.name == NAME), None)
    if made is None:
        return []
    logits = made.inputs[0].tensor
    kept = Tensor("logits of an earlier micro-batch", logits.axes, FP32, Role.LOGITS, logits.module)
    held = runs[-1].segment("outputs of earlier micro-batches", Phase.LOAD, [(ALLOC, kept)])
    return [held.copy(repeat=min(_STAGE_BUFFERS, micro_batches))]


def with_graph_before(segments: list[Segment], runs: list[Run]) -> list[Segment]:
    """A forward during which the inputs that the last backward's nodes keep are still there."""
    held = [(run, tensors) for run in runs if (tensors := inputs_kept_by_nodes(run.block))]
    name = "graph of the step before"
    return [
        *(run.segment(name, Phase.FORWARD, [(ALLOC, t) for t in tensors]) for run, tensors in held),
        *segments,
        *(
            run.segment(f"{name} dropped", Phase.FORWARD, [(FREE, t) for t in tensors])
            for run, tensors in held
        ),
    ]


def inputs_kept_by_nodes(block: Block) -> list[Tensor]:
    """Stand-ins for the inputs of quantized products that the nodes of a finished backward still
    hold (bitsandbytes' ctx.tensors)."""
    kept = {
        tensor: None
        for op in block.ops
        if op.inputs[1:] and op.inputs[1].weight is not None and op.inputs[1].weight.constants
        for tensor in op.saves
    }
    return [
        Tensor("input kept by the step before", t.axes, t.dtype, t.role, t.module) for t in kept
    ]
