"""Evaluation and generation: in the middle of training, and the rollouts that a step trains on.

Sources: trl 1.16 grpo_trainer.py _generate_single_turn; transformers 5.23 trainer.py
evaluation_loop, cache_utils.py DynamicLayer.update. An evaluation leaves out the adapters' own
products.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Size, ceil_div, minimum, product, symbol
from napkinmath.base.record import Record
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.workload_config import Head
from napkinmath.ir.costs import Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work, allocs, frees
from napkinmath.ir.step import Run, Segment, Step
from napkinmath.lowering.data_parallel.forward_only import (
    gathered_for_each_token,
    gathered_for_rollout,
)
from napkinmath.lowering.forwards import NoGradForward, alone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.lowering.policy import Policy

    Symbols = tuple[tuple[str, Size], ...]

_b, _s, _v, _dh = (symbol(name) for name in ("b", "s", "v", "dh"))
_LAUNCHES = 12  # kernels of one layer's forward for one token


class Model(Record):
    """What generates: the runs of the policy in its step."""

    step: Step
    runs: list[Run]
    policy: Policy

    def forward(
        self, spec: ModelSpec, name: str, sizes: Symbols, *, whole: bool = False
    ) -> list[Segment]:
        """A forward of its weights under other sizes; `whole`: they are gathered already."""
        forward = NoGradForward(spec, self.policy, self.policy.config, own=True).called(name)
        self.step.note(forward.thresholds)
        return alone(forward, self.runs, self.policy, sizes, whole=whole)


def rollout(model: Model, spec: ModelSpec) -> list[Segment]:
    """What the policy generates at once for all micro-steps of a step.

    Source: trl grpo_config.py steps_per_generation.
    """
    config = model.policy.config
    rows = _b * config.gradient_accumulation_steps
    tokens = config.workload.completion_tokens or ceil_div(_s, 2)
    prompt = _s - tokens + 1 - minimum(_s - tokens, 1)  # one token at least
    prefill = _prefill(model, spec, "rollout", (("b", rows), ("s", prompt)))
    return _generation(model, tokens, "rollout", rows, prefill, timed=True)


def in_the_middle(model: Model, own: ModelSpec) -> list[Segment]:
    """Evaluation and generation after an optimizer step, the states in place; they take no part in
    the step's time."""
    workload = model.policy.config.workload
    found: list[Segment] = []
    if workload.eval_batch:
        rows: Symbols = (("b", workload.eval_batch),)
        found += _untimed(model.forward(own, "evaluation", rows))
    if workload.generate_tokens:
        tokens, name = workload.generate_tokens, "generation"
        prefill = _prefill(model, own, name, ())
        found += _untimed(_generation(model, tokens, name, _b, prefill, timed=False))
    return found


def _untimed(segments: list[Segment]) -> list[Segment]:
    for segment in segments:
        segment.events = [event for event in segment.events if event[0] != RUN]
    return segments


def _prefill(model: Model, spec: ModelSpec, name: str, sizes: Symbols) -> list[Segment]:
    """The prompts' forward: transformers' generate keeps the last position's logits alone, so the
    head is next to nothing."""
    last = spec.stages[-1]
    scores = last.part.ending_in(Head.SCORE)
    if scores is not None:
        spec = spec.replace(stages=(*spec.stages[:-1], last.replace(part=scores)))
    whole = model.policy.config.parallel.data_parallel is DataParallel.ZERO3
    return model.forward(spec, f"{name}: prompt", sizes, whole=whole)


def _generation(
    model: Model, tokens: Size, name: str, rows: Size, prefill: list[Segment], *, timed: bool
) -> list[Segment]:
    """A key/value cache of `rows` sequences, their prompts' forward, then one token after the
    other: every weight is read for each, and gathered before where an engine shards it.

    A layer's cache grows by concatenation, so one layer's is there twice. Raises InputError for
    layers that cache something else.
    """
    length, policy = _s if name == "rollout" else _s + tokens, model.policy
    opened, closed = gathered_for_rollout(model.runs, policy, dict(model.step.spec.symbols), name)
    gathers = gathered_for_each_token(model.runs, policy, tokens)
    decoded: list[Segment] = []
    for run in model.runs:
        before, after = gathers.get(run.name, ([], []))
        read: Size = 0
        for weight in run.block.weights:
            read = read + weight.tensor.nbytes
        events = [*before]
        if run.stage.checkpointed:
            pair, grown = _caches(run, policy, rows, length)
            label = f"{name}: cache of {run.name}"
            opened.append(run.segment(label, Phase.EVALUATE, list(allocs(*pair))))
            closed.append(run.segment(f"{label} dropped", Phase.EVALUATE, list(frees(*pair))))
            read = read + 3 * product(grown.axes) * grown.dtype.bits // 8
            events += [(ALLOC, grown), (FREE, grown)]
        if timed:
            events.append((RUN, Work(None, (Move(tokens * read, tokens * _LAUNCHES),), False)))
        decoded.append(run.segment(f"{name}: {run.name}", Phase.EVALUATE, [*events, *after]))
    logits = Tensor("logits of the next token", (rows, _v), FP32, Role.LOGITS)
    next_token: list[Event] = [(ALLOC, logits), (FREE, logits)]
    decoded.append(Segment(f"{name}: next token", Phase.EVALUATE, next_token))
    return opened + prefill + decoded + closed


def _caches(run: Run, policy: Policy, rows: Size, length: Size) -> tuple[list[Tensor], Tensor]:
    """(keys and values of one layer, either of them while it grows)."""
    axes, module = _cache_axes(run, rows, length), run.block.name
    dtype = policy.autocast or policy.loaded_dtype
    pair = [
        Tensor(f"{what} cache", axes, dtype, Role.ACTIVATIONS, module) for what in ("key", "value")
    ]
    return pair, Tensor("grown cache", axes, dtype, Role.WORKSPACE, module)


def _cache_axes(run: Run, rows: Size, length: Size) -> tuple[Size, ...]:
    """(sequences, key/value heads, tokens kept, head size) of one layer's cache."""
    cached = run.stage.part.cached_heads
    if cached is None:
        raise InputError(
            "generation is priced for grouped-query attention; this model caches something else"
        )
    heads, window = cached
    return rows, heads, minimum(length, window) if window else length, _dh
