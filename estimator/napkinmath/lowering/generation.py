"""Evaluation and generation: in the middle of training, and the rollouts that a step trains on.

Sources: trl 1.16 grpo_trainer.py _generate_single_turn; transformers 5.23 trainer.py
evaluation_loop, cache_utils.py DynamicLayer.update. An evaluation leaves out the adapters' own
products.
"""

from __future__ import annotations

from itertools import pairwise

from napkinmath.base.dtypes import FP32
from napkinmath.base.expr import Size, ceil_div, minimum, product, symbol
from napkinmath.base.record import Record
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.workload_config import Head
from napkinmath.ir.cache import Cached, Grows, cached_stages, has_encoder
from napkinmath.ir.costs import Move, Repeated, under_sizes
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work, allocs, frees
from napkinmath.ir.step import Run, Segment, Step
from napkinmath.lowering.data_parallel.forward_only import (
    gathered_for_each_token,
    gathered_for_rollout,
)
from napkinmath.lowering.data_parallel.units import sum_of
from napkinmath.lowering.forwards import NoGradForward, alone

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.ir.ledger import Event
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.lowering.policy import Policy

    Symbols = tuple[tuple[str, Size], ...]

_b, _s, _v = (symbol(name) for name in ("b", "s", "v"))
# Sizes of a growing cache that the allocator is shown. Every further 2 MiB of a tensor needs blocks
# that no earlier size left (memory/allocator.py). Four hold what every token does within a fifth where
# a tensor grows by up to 8 MiB, 0.6 of it at 16 MiB; more take a third of a cold command's time.
_SIZES_SHOWN = 4


class Model(Record):
    """What generates: the runs of the policy in its step."""

    step: Step
    runs: list[Run]
    policy: Policy

    def recorded(self, spec: ModelSpec) -> NoGradForward:
        """A forward of its weights."""
        forward = NoGradForward(spec, self.policy, self.policy.config, own=True)
        self.step.note(forward.thresholds)
        return forward

    def run(
        self,
        forward: NoGradForward,
        name: str,
        sizes: Symbols,
        *,
        whole: bool = False,
        phase: Phase = Phase.EVALUATE,
    ) -> list[Segment]:
        """The forward under other sizes; `whole`: its weights are gathered already."""
        called = forward.called(name)
        return alone(called, self.runs, self.policy, sizes, whole=whole, phase=phase)


def rollout(model: Model, spec: ModelSpec) -> tuple[list[Segment], list[Segment]]:
    """(what is loaded for it, what the policy or its engine generates at once for all micro-steps of
    a step).

    Source: trl grpo_config.py steps_per_generation.
    """
    config = model.policy.config
    rows = _b * config.gradient_accumulation_steps
    # The lengths that batches are padded to come after: a rollout knows the longest alone.
    whole = model.policy.sequence_length if model.policy.rollout and config.batch.lengths else _s
    whole *= config.parallel.context_parallel_size  # a rank of the policy has a part of it
    tokens = config.workload.completion_tokens or ceil_div(whole, 2)
    prompt = whole - tokens + 1 - minimum(whole - tokens, 1)  # one token at least
    if model.policy.rollout is not None:
        from napkinmath.lowering.rollout.beside import engine_phases
        from napkinmath.lowering.rollout.plan import EnginePlan

        plan = model.policy.rollout
        assert isinstance(plan, EnginePlan)
        return engine_phases(plan, model.step, model.runs, model.policy, (rows, prompt, tokens))
    return [], _generation(model, spec, _Lengths("rollout", rows, prompt, tokens, _s), timed=True)


def in_the_middle(model: Model, own: ModelSpec) -> list[Segment]:
    """Evaluation and generation after an optimizer step, the states in place; they take no part in
    the step's time."""
    workload = model.policy.config.workload
    found: list[Segment] = []
    if workload.eval_batch:
        rows: Symbols = (("b", workload.eval_batch),)
        found += _untimed(model.run(model.recorded(own), "evaluation", rows))
    if workload.generate_tokens:
        tokens = workload.generate_tokens
        lengths = _Lengths("generation", _b, _s, tokens, _s + tokens)
        found += _untimed(_generation(model, own, lengths, timed=False))
    return found


def _untimed(segments: list[Segment]) -> list[Segment]:
    for segment in segments:
        segment.events = [event for event in segment.events if event[0] != RUN]
    return segments


class _Lengths:
    """What is generated: `rows` sequences of `prompt` and then `tokens` tokens, `whole` together."""

    __slots__ = ("name", "phase", "prompt", "rows", "tokens", "whole")

    def __init__(self, name: str, rows: Size, prompt: Size, tokens: Size, whole: Size) -> None:
        self.name, self.rows, self.prompt, self.tokens, self.whole = (
            name,
            rows,
            prompt,
            tokens,
            whole,
        )
        self.phase = Phase.ROLLOUT if name == "rollout" else Phase.EVALUATE

    def for_prompts(self, spec: ModelSpec) -> Symbols:
        """The sizes of the prompts' forward: an encoder reads them, and its decoder starts from one
        token."""
        return (
            ("b", self.rows),
            ("s", self.prompt),
            ("st", 1 if has_encoder(spec) else self.prompt),
        )

    def kept(self, item: Cached, spec: ModelSpec, shown: int) -> Size:
        """Rows of a cached tensor's storage after the prompts, after a share of the tokens, or after
        the last: a window is cut out of the prompts' keys when the next token comes."""
        encoder = has_encoder(spec)
        first, last = (1, self.tokens) if encoder else (self.prompt, self.whole)
        if not shown:
            return item.replace(window=0).rows(first, self.prompt)
        if shown < _SIZES_SHOWN:
            last = first + ceil_div((last - first) * shown, _SIZES_SHOWN)
        return item.rows(last, self.prompt)


def _generation(model: Model, spec: ModelSpec, lengths: _Lengths, *, timed: bool) -> list[Segment]:
    """The prompts' forward, then one token after the other through the same kernels: every weight
    is read for each, and gathered before where an engine shards it.

    Keys and values grow by concatenation, so one layer's keys are there twice. transformers keeps
    the last position's logits alone. Raises InputError for models that generate nothing.
    """
    cached_stages(spec)
    policy, name, phase = model.policy, lengths.name, lengths.phase
    forward = model.recorded(_without_logits(spec))
    whole = policy.config.parallel.data_parallel is DataParallel.ZERO3
    opened, closed = gathered_for_rollout(
        model.runs, policy, dict(model.step.spec.symbols), name, lengths.phase
    )
    gathers = gathered_for_each_token(model.runs, policy, lengths.tokens)
    growing: list[tuple[Run, _Caches]] = []
    decoded: list[Segment] = []
    works = _works_of_a_token(forward, model.runs, lengths) if timed else {}
    for run in model.runs:
        before, after = gathers.get(run.name, ([], []))
        events = [*before, *works.get(run.name, ())]
        if run.stage.part.cached and run.stage.modality == "":
            caches = _Caches(run, policy, spec, lengths)
            opened.append(run.segment(f"{name}: cache of {run.name}", phase, caches.opened))
            growing.append((run, caches))
            closed.append(run.segment(f"{name}: cache of {run.name} dropped", phase, caches.closed))
            events += caches.token(timed=timed)
        decoded.append(run.segment(f"{name}: {run.name}", phase, [*events, *after]))
    sizes = lengths.for_prompts(spec)
    prompts = model.run(forward, f"{name}: prompt", sizes, whole=whole, phase=phase)
    grown = [
        run.segment(f"{name}: cache of {run.name}, {of}", phase, caches.grown(shown))
        for shown, of in enumerate(_shown_sizes(lengths), start=1)
        for run, caches in growing
    ]
    return opened + prompts + grown + decoded + [_next_token(lengths)] + closed


def _shown_sizes(lengths: _Lengths) -> list[str]:
    """What the sizes of a growing cache are called, the whole one last."""
    return [f"{shown}/{_SIZES_SHOWN}" for shown in range(1, _SIZES_SHOWN)] + ["whole"]


def _without_logits(spec: ModelSpec) -> ModelSpec:
    """The model with a head that is next to nothing: of the logits one position's are made."""
    last = spec.stages[-1]
    scores = last.part.ending_in(Head.SCORE)
    if scores is None:
        return spec
    return spec.replace(stages=(*spec.stages[:-1], last.replace(part=scores)))


def _next_token(lengths: _Lengths) -> Segment:
    logits = Tensor("logits of the next token", (lengths.rows, _v), FP32, Role.LOGITS)
    events: list[Event] = [(ALLOC, logits), (FREE, logits)]
    return Segment(f"{lengths.name}: next token", lengths.phase, events)


def _works_of_a_token(
    forward: NoGradForward, runs: list[Run], lengths: _Lengths
) -> dict[str, list[Event]]:
    """By run: its recorded kernels for one token of each sequence, once for every token."""
    one: dict[str, Size] = {"b": lengths.rows, "s": 1, "st": 1}
    found: dict[str, list[Event]] = {}
    for segment in forward.on(runs):
        events = found.setdefault(segment.run, [])
        if events:
            continue  # a run cut in two: its copies run the same kernels
        for action, work in segment.events:
            if action != RUN or not isinstance(work, Work):
                continue
            costs = [Repeated(under_sizes(cost, one), lengths.tokens) for cost in work.costs]
            events.append((RUN, Work(work.op, costs, False)))
    return found


class _Caches:
    """The tensors that a layer of a run keeps: after the prompts, and after the last token."""

    def __init__(self, run: Run, policy: Policy, spec: ModelSpec, lengths: _Lengths) -> None:
        self.lengths = lengths
        dtype = policy.autocast or policy.loaded_dtype
        self.shown = [
            [
                _cached_tensor(item, lengths.kept(item, spec, shown), run, dtype, lengths)
                for item in run.stage.part.cached
            ]
            for shown in range(_SIZES_SHOWN + 1)
        ]
        for before, after in pairwise(self.shown):  # what does not grow stays
            after[:] = [n if n.axes != o.axes else o for o, n in zip(before, after, strict=True)]
        self.first, self.last = self.shown[0], self.shown[-1]
        growing = [item.grows is Grows.TOKENS for item in run.stage.part.cached]
        self.growing = [t for t, grows in zip(self.last, growing, strict=True) if grows]
        self.read = sum_of(
            [
                product(t.axes) * t.dtype.bits // 8 * (3 if grows else 2)
                for t, grows in zip(self.last, growing, strict=True)
            ]
        )

    @property
    def opened(self) -> list[Event]:
        """They are made by the prompts' forward."""
        return list(allocs(*self.first))

    def grown(self, shown: int) -> list[Event]:
        """They have the next size: each is made anew with a token more, and the old one goes
        (transformers cache_utils.py DynamicLayer.update, torch.cat)."""
        events: list[Event] = []
        for old, new in zip(self.shown[shown - 1], self.shown[shown], strict=True):
            if new is not old:
                events += [(ALLOC, new), (FREE, old)]
        return events

    @property
    def closed(self) -> list[Event]:
        """They are dropped."""
        return list(frees(*self.last))

    def token(self, *, timed: bool) -> list[Event]:
        """A layer's keys are copied as they grow by a token. Keys and values are read and written by
        that and read by attention, at their mean length; a state is read and written."""
        events: list[Event] = []
        if self.growing:
            keys = self.growing[0]
            copy = Tensor("grown cache", keys.axes, keys.dtype, Role.WORKSPACE, keys.module)
            events = [(ALLOC, copy), (FREE, copy)]
        if timed:
            tokens = self.lengths.tokens
            mean = ceil_div(self.read * (2 * self.lengths.whole - tokens), 2 * self.lengths.whole)
            cost = Move(mean, 2 if self.growing else 1)
            events.append((RUN, Work(None, (Repeated(cost, tokens),), False)))
        return events


def _cached_tensor(item: Cached, rows: Size, run: Run, dtype: DType, lengths: _Lengths) -> Tensor:
    """One tensor of a layer's cache, of all sequences."""
    heads, *size = item.axes
    axes = (lengths.rows, heads, *((rows,) if item.grows is not Grows.NOT else ()), *size)
    name, module = f"{item.name} cache", run.block.name
    return Tensor(name, axes, item.dtype or dtype, Role.ACTIVATIONS, module)
