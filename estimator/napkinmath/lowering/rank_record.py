"""The model recorded as a rank has it."""

from __future__ import annotations

from napkinmath.lowering.record import Recording, record_runs

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.lowering.policy import Policy


def record_model(spec: ModelSpec, policy: Policy) -> Recording:
    """The model recorded as a rank has it: its share of split layers, of sequences and of
    experts."""
    recording = record_runs(_rank_share(spec, policy), policy)
    if policy.tensor is not None:
        from napkinmath.lowering.parallel.tensor_share import check_layers

        check_layers(recording.runs, policy.tensor.splits, spec.name)
    if policy.experts is not None:
        from napkinmath.lowering.parallel.expert import check_spread

        check_spread(recording.runs, spec.name)
    return recording


def _rank_share(spec: ModelSpec, policy: Policy) -> ModelSpec:
    """The model with a rank's sizes; InputError where they do not divide."""
    if policy.experts is not None and policy.experts.apart:
        from napkinmath.lowering.parallel.tensor_share import expert_share
        from napkinmath.lowering.parallel.tensor_style import tensor_style

        parallel, style = policy.config.parallel, tensor_style(policy.config, policy.stack)
        tensor, within = parallel.tensor_parallel_size, parallel.expert_tensor_ranks
        spec = expert_share(spec, tensor, within, style)
    elif policy.tensor is not None:
        from napkinmath.lowering.parallel.tensor_share import rank_share

        spec = rank_share(spec, policy.tensor.degree, policy.tensor.style)
    if policy.context is not None:
        from napkinmath.lowering.parallel.context import check_context

        check_context(spec, policy.config)
    if policy.experts is not None:
        from napkinmath.lowering.parallel.expert import check_experts

        check_experts(spec, policy.config.parallel)
    return spec
