"""Contrastive training of an encoder: the texts of a sample (anchor, positive, negatives) are the
columns of its batch. The anchors are one forward, all other texts a second one over the same
weights, and one loss reads both.

Source: sentence-transformers 6.2 sentence_transformer/losses/multiple_negatives_ranking.py,
base/losses/merged_forward.py embed_columns; FlagEmbedding abc/finetune/embedder/AbsModeling.py
forward, whose passages are one batch too. Before 6 sentence-transformers embedded each column by
itself, which makes less of a layer's temporaries.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.config.train_config import AdapterKind, RecomputeKind
from napkinmath.config.workload_config import Head
from napkinmath.ir.ledger import Gradient
from napkinmath.ir.model_spec import ModelSpec, Part, Stage
from napkinmath.ir.symbols import b
from napkinmath.ops.embeddings import in_batch_negatives

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.ledger import Value, Weight
    from napkinmath.ir.recording import RecordingPolicy
    from napkinmath.ir.tape import Tape

CAST = "cast "
EMBEDDINGS = "embeddings of column"


class ColumnPart(Part):
    """A part as one column runs it: what it shares is its column's own, its weights are those of
    the first column, autocast's copies of them too (ATen/autocast_mode.cpp cached_cast)."""

    part: Part
    column: int
    stage: int
    """Which stage of the model it is: the same in every column."""

    def output_needs_grad(self, policy: RecordingPolicy) -> bool:
        return self.part.output_needs_grad(policy)

    def output_is_held(self, *, training: bool) -> bool:
        return self.part.output_is_held(training=training)

    @property
    def longest_sequence(self) -> int:
        return self.part.longest_sequence

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        mine = f"{self.column}: "
        own = {k.removeprefix(mine): v for k, v in shared.items() if k.startswith(mine)}
        if self.column and not t.policy.recomputes:
            self._take_casts(t, shared)
        out = self.part.record(t, x, own)
        for weight in t.weights if self.column else ():
            weight.tied_to = weight.path
        if self.column and t.policy.recomputes:
            self._pass_gradients(t, shared)
        elif not self.column:
            self._share_casts(t, shared)
        shared.update({mine + name: value for name, value in own.items()})
        return out

    def _share_casts(self, t: Tape, shared: dict[str, Value]) -> None:
        for weight, cast in self._casts(t):
            shared[f"{CAST}{self.stage} {weight.kind} {weight.path}"] = cast
            if t.policy.recomputes:
                del t.casts[id(weight.value), cast.dtype]  # what is shared says when it goes

    def _casts(self, t: Tape) -> list[tuple[Weight, Value]]:
        """Autocast's copies of the weights that are trained."""
        dtype = t.policy.autocast
        both = [(w, t.casts.get((id(w.value), dtype))) for w in t.weights] if dtype else []
        return [(w, cast) for w, cast in both if cast is not None and w.trainable]

    def _pass_gradients(self, t: Tape, shared: dict[str, Value]) -> None:
        """Under checkpointing a column's graph has the first one's copies, of which it makes others
        when it is run again: their gradients wait at the first one's."""
        makers = {id(op.outputs[0]): op for op in t.ops if op.outputs}
        for weight, cast in self._casts(t):
            first = shared.get(f"{CAST}{self.stage} {weight.kind} {weight.path}")
            if first is None:
                continue
            maker = makers[id(cast)]
            maker.inputs, maker.gradients = (first,), (Gradient(first, None),)
            maker.backward = ()
            del t.casts[id(weight.value), cast.dtype]

    def _take_casts(self, t: Tape, shared: dict[str, Value]) -> None:
        """Declares the weights of which the first column has made autocast's copies."""
        begins, module = f"{CAST}{self.stage} ", t.module
        for name, cast in list(shared.items()):
            if not name.startswith(begins) or t.policy.autocast is None:
                continue
            kind, _, path = name.removeprefix(begins).partition(" ")
            owner, _, leaf = path.removeprefix(f"{module}.").rpartition(".")
            with t.scope(owner):
                weight = t.weight(leaf, cast.axes, kind=kind)
            t.casts[id(weight.value), t.policy.autocast] = cast


class ContrastiveLoss(Part):
    """Each anchor's positive against all others of the batch."""

    others: int
    """Texts of a sample beside its anchor."""

    @property
    def task(self) -> str:
        return "feature-extraction"

    def record(self, t: Tape, x: Value | None, shared: dict[str, Value]) -> Value | None:
        anchors, others = (shared[f"{EMBEDDINGS} {i}"] for i in range(2))
        rows = t.view(others, (self.others * others.axes[0], *others.axes[1:]))
        return in_batch_negatives(t, anchors, rows)


def embedding_spec(spec: ModelSpec, config: TrainConfig, columns: int) -> ModelSpec:
    """The model as its embeddings are trained: of one column the embeddings and their cached
    gradients, else every column and the loss over all.

    Raises InputError for a model with a head, and for what is not priced of it.
    """
    _check(config)
    head = spec.stages[-1].part.ending_in(Head.EMBEDDINGS)
    if head is None:
        raise InputError(
            f"{shown(spec.name)} is read with a head of {spec.task}, which no embeddings come from;"
            " add --task feature-extraction"
        )
    last = spec.stages[-1].replace(part=head)
    if columns == 1:
        return spec.replace(stages=(*spec.stages[:-1], last))
    once = [*_apart(spec.stages[:-1]), last]
    stages: list[Stage] = []
    for column, texts in enumerate((1, columns - 1)):
        own = [
            stage.replace(
                part=ColumnPart(part=stage.part, column=column, stage=index),
                symbols=(*stage.symbols, *([("b", texts * b)] if texts > 1 else [])),
            )
            for index, stage in enumerate(once)
        ]
        own[-1] = own[-1].replace(publishes=f"{EMBEDDINGS} {column}", ends_forward=True)
        stages += own
    loss = Stage(part=ContrastiveLoss(others=columns - 1))
    return spec.replace(stages=(*stages, loss))


def _apart(stages: tuple[Stage, ...]) -> list[Stage]:
    """Every layer as a stage of its own, under its number: a gradient that waits for the other
    columns' is found by its path."""
    found: list[Stage] = []
    numbers: dict[str, int] = {}
    for stage in stages:
        for _ in range(stage.count):
            path = stage.path
            if stage.checkpointed:
                number = numbers[path] = numbers.get(path, -1) + 1
                path = f"{path}.{number}"
            found.append(stage.replace(count=1, path=path))
    return found


def _check(config: TrainConfig) -> None:
    """Raises InputError for what no trainer of embeddings does, or what is not priced of it."""
    parallel, adapter, offload = config.parallel, config.adapter, config.offload
    virtual = adapter is not None and adapter.kind in (AdapterKind.PROMPT, AdapterKind.PREFIX)
    meshes = (parallel.tensor_parallel_size, parallel.context_parallel_size)
    more = (parallel.expert_parallel_size, parallel.pipeline_parallel_size)
    asked = {
        "tensor, context, expert or pipeline parallelism": max(*meshes, *more) > 1,
        f"{parallel.data_parallel.value} over several GPUs (--ddp is)": parallel.world_size > 1
        and not parallel.replicates,
        "virtual tokens": virtual,
        "units of several layers": config.recompute.kind
        not in (RecomputeKind.NONE, RecomputeKind.FULL),
        "offloaded parameters": offload.parameters or bool(offload.blocks),
        "torch.compile": config.compile,
        "an evaluation or generation in the middle": bool(
            config.workload.eval_batch or config.workload.generate_tokens
        ),
    }
    for what, is_asked in asked.items():
        if is_asked:
            raise InputError(
                f"--workload {config.workload.kind.value} is not priced with {what}; leave it out"
            )
