"""build_step: a model and a training configuration become the ordered segments of one training
step.

The passes, in this order: record the model as a rank has it, cut it into a pipeline's stages, load,
lower the micro-steps, stream or replicate the parameters, update, save. An engine that shards
parameters does those after the cut itself; a workload surrounds the step of what it trains.
"""

from __future__ import annotations

from napkinmath.base.dtypes import UINT8
from napkinmath.config.workload_config import Workload
from napkinmath.ir.ledger import ALLOC, Phase, Role, Tensor
from napkinmath.ir.step import Segment, Step, tell_apart
from napkinmath.lowering.gradient_hooks import keeps_gradients
from napkinmath.lowering.lifecycle import load_segments, save_segments
from napkinmath.lowering.micro_step import lower_micro_steps
from napkinmath.lowering.optimizer import lower_update
from napkinmath.lowering.rank_record import record_model
from napkinmath.lowering.record import RankModel, Recording

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.step import Run
    from napkinmath.lowering.policy import Policy


def build_step(
    spec: ModelSpec,
    policy: Policy,
    *,
    pipeline_rank: int = 0,
    recording: Recording | None = None,
) -> Step:
    """Records every distinct block once and lowers it to segments; sizes stay symbolic.

    Of a pipeline it is one rank's step; its ranks may be cut from one `recording`. Raises
    InputError where model, method and parallelism contradict each other.
    """
    if not policy.config.workload.is_plain:
        return _workload_step(spec, policy, pipeline_rank)
    recording = record_model(spec, policy) if recording is None else recording.copied()
    model = _rank_model(recording, policy, pipeline_rank)
    if policy.shards:
        from napkinmath.lowering.data_parallel.engines import sharded_step

        step = sharded_step(model, policy)
    else:
        step = _whole_parameters_step(model, policy)
    if policy.keeps_fp8("linear") and policy.has_whole_weights:
        from napkinmath.lowering.transformer_engine import keep_weights_in_fp8

        keep_weights_in_fp8(step, alone=policy.stack.model.fp8_weights_alone)
    if policy.adapter is not None and policy.adapter.merge:
        from napkinmath.lowering.merging import merge_segments

        step.save = merge_segments(step.runs, policy) + step.save
    if policy.stack.loop.holds_last_step:
        from napkinmath.lowering.held_outputs import hold_through_update

        hold_through_update(step.update, step.runs)
    if policy.stack.engine.keeps_stage_outputs:
        from napkinmath.lowering.held_outputs import kept_by_stage

        step.load = [*step.load, *kept_by_stage(step.runs, policy)]
    step.workspaces = product_workspaces(policy) + decoding_buffer(recording)
    step.thresholds = recording.thresholds
    return step


def _rank_model(recording: Recording, policy: Policy, pipeline_rank: int) -> RankModel:
    """The runs of one pipeline rank, or of the whole model, under names of their own."""
    runs, chunks = recording.runs, list[list["Run"]]()
    if policy.config.parallel.pipeline_parallel_size > 1:
        from napkinmath.lowering.parallel.pipeline import stage_chunks

        chunks = stage_chunks(recording, policy, pipeline_rank)
        runs = [run for chunk in chunks for run in chunk]
    tell_apart(runs)
    return RankModel(recording, runs, chunks, pipeline_rank)


def _whole_parameters_step(model: RankModel, policy: Policy) -> Step:
    """The step of a rank that holds its model's parameters whole."""
    runs, config = model.runs, policy.config
    load = load_segments(runs, policy)
    if model.chunks:
        from napkinmath.lowering.parallel.pipeline import pipelined, waiting_buffers

        micro_steps = pipelined(model, policy)
        load += waiting_buffers(model, policy)
    else:
        micro_steps = lower_micro_steps(runs, model.shared, policy)
    if config.offload.parameters:
        from napkinmath.lowering.parameter_offload import load_on_host, stream

        load = load_on_host(load, runs)
        micro_steps = [(repeat, stream(segments, runs, policy)) for repeat, segments in micro_steps]
    if config.offload.blocks:
        from napkinmath.lowering.swapped_blocks import hold_on_host, swap

        load = hold_on_host(load, runs)
        micro_steps = [(repeat, swap(segments, runs, policy)) for repeat, segments in micro_steps]
    update = lower_update(runs, policy, model.sizes)
    if config.parallel.replicates:
        from napkinmath.lowering.data_parallel.replicated import replicate

        load, micro_steps = replicate(runs, policy, load, micro_steps, update, model.sizes)
    load += _gradient_buckets(policy)
    if keeps_gradients(policy):
        load += _kept_gradients(runs)
        update.zero = []
    save = save_segments(runs, policy)
    return Step(model.spec, policy, runs, load + update.load, micro_steps, update, save)


def _gradient_buckets(policy: Policy) -> list[Segment]:
    """The buckets that a stack makes even for one GPU."""
    stack = policy.stack
    if not stack.engine.bucket_bytes:
        return []
    name, size = "gradient buckets", (stack.engine.bucket_bytes,)
    bucket = Tensor(name, size, UINT8, Role.COMMUNICATION, source=stack.source)
    return [Segment(name, Phase.LOAD, [(ALLOC, bucket)])]


def _kept_gradients(runs: list[Run]) -> list[Segment]:
    """Gradients that are made once and zeroed in place."""
    return [
        run.segment(
            f"gradients of {run.name}", Phase.LOAD, [(ALLOC, t) for t in run.block.gradients]
        )
        for run in runs
        if run.block.gradients
    ]


def _workload_step(spec: ModelSpec, policy: Policy, pipeline_rank: int) -> Step:
    """The step of what a workload trains, with what the workload does around it."""
    from napkinmath.lowering.joined_steps import join, passes_first
    from napkinmath.lowering.workload import beside, beside_critic, surround, trained_models

    own, *others = trained_models(spec, policy)
    plain = policy.config.replace(workload=Workload(), loss=policy.config.step_loss)
    pipelined = plain.parallel.pipeline_parallel_size > 1
    around = beside(spec, policy, pipeline_rank)
    lowered = policy.under(plain, beside=None if pipelined else around)
    step = build_step(own, lowered, pipeline_rank=pipeline_rank)
    runs = step.runs
    for other in others:
        values = beside_critic(other, policy, pipeline_rank)
        lowered = policy.under(plain, beside=None if pipelined else values)
        critic = build_step(other, lowered, pipeline_rank=pipeline_rank)
        passes_first(critic, critic.runs, values, lowered, policy.config)
        join(step, critic)
    passes_first(step, runs, around, policy.under(plain), policy.config)
    surround(step, runs, spec, own, around, policy)
    step.policy = policy
    return step


# ---------------------------------------------------------------- made before the first product


def product_workspaces(policy: Policy) -> list[Segment]:
    """What torch allocates for cuBLAS on the first product of the forward's thread, and on that of
    the backward's.

    Source: torch aten/src/ATen/cuda/CublasHandlePool.cpp getCUDABlasLtWorkspace, one a thread and
    stream.
    """
    if not policy.product_workspace_bytes:
        return []
    size = (policy.product_workspace_bytes,)
    return [
        Segment(
            f"cuBLAS workspace of the {name}",
            phase,
            [(ALLOC, Tensor(f"cuBLAS workspace, {name}", size, UINT8, Role.WORKSPACE))],
        )
        for phase, name in ((Phase.FORWARD, "forward"), (Phase.BACKWARD, "backward"))
    ]


def decoding_buffer(recording: Recording) -> list[Segment]:
    """The buffer into which patched operations decode every weight."""
    if not recording.decoded:
        return []
    buffer = Tensor("buffer of decoded weights", (recording.decoded,), UINT8, Role.WORKSPACE)
    return [Segment(buffer.name, Phase.FORWARD, [(ALLOC, buffer)])]
