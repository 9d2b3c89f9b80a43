"""Tensor parallelism: linears split by columns or rows over ranks, the vocabulary over ranks, norms
over the sequence.

A rank's share of a layer is the same layer with fewer heads, a narrower feed-forward and a shorter
vocabulary, so the model is recorded with these symbols bound to the rank's share (`rank_share`).
What is left to lower are the borders: where a split linear reads what all ranks hold (`enter`) and
where its partial result is summed (`leave`). A linear is split by columns where its outputs are
counted in heads, feed-forward or vocabulary, by rows where its inputs are.

Sources: Shoeybi et al. (arXiv 1909.08053), Korthikanti et al. (arXiv 2205.05198); torch 2.13
distributed/tensor/parallel/style.py, _functional_collectives.py; transformers 5.23
distributed/tensor_parallel.py; Megatron-LM core/tensor_parallel/layers.py, mappings.py.
"""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.base.expr import Expr, Size, ceil_div
from napkinmath.base.record import Record
from napkinmath.ir.costs import Collective, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ir.step import Run
from napkinmath.lowering.parallel.vocabulary import vocabulary_loss

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.catalog.stacks import Stack
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.ledger import Weight
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.tape import Tape

SPLIT = ("a", "k", "f", "fe", "fs", "v")  # symbols that a rank has a share of
AXIS = "tensor"
NAMES = {
    "a": "num_attention_heads",
    "k": "num_key_value_heads",
    "f": "intermediate_size",
    "fe": "moe_intermediate_size",
    "fs": "shared_expert_intermediate_size",
}
MATRICES = ("linear", "linear without adapter", "unquantized linear", "conv")
# Linears that every rank holds whole: down-projections of latent attention, gates and projections
# around experts.
WHOLE = (
    "q_a_proj",
    "kv_a_proj_with_mqa",
    "shared_expert_gate",
    "fc1_latent_proj",
    "fc2_latent_proj",
    "router",
    "gate",
)


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
    gathers_rows: bool = True
    """Gathering along the sequence makes rank-major rows first and copies them into order (torch's
    functional collectives)."""


TRANSFORMERS = TensorStyle(
    name="transformers",
    source="transformers 5.23 distributed/tensor_parallel.py (tp_plan)",
    enters_once=False,
    new_buffers=True,
    splits_loss=False,
)
DTENSOR = TensorStyle(
    name="dtensor",
    source=(
        "torch 2.13 distributed/tensor/parallel (ColwiseParallel, RowwiseParallel,"
        " SequenceParallel, loss_parallel)"
    ),
    enters_once=True,
    new_buffers=True,
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
)


def tensor_style(config: TrainConfig, stack: str) -> TensorStyle:
    """Whose borders run: Megatron's own, transformers' plan where norms are whole, torch's styles
    with a split sequence."""
    if stack.startswith("megatron"):
        return MEGATRON
    return DTENSOR if config.parallel.sequence_parallel else TRANSFORMERS


def tensor_split(config: TrainConfig, stack: Stack) -> TensorSplit:
    """The split of a configuration with more than one tensor-parallel rank."""
    parallel = config.parallel
    return TensorSplit(
        parallel.tensor_parallel_size,
        tensor_style(config, stack.name),
        sequence=parallel.sequence_parallel,
    )


class TensorSplit:
    """The borders of one estimate's split region."""

    def __init__(self, degree: int, style: TensorStyle, *, sequence: bool) -> None:
        self.degree, self.style, self.sequence = degree, style, sequence
        self._known: dict[Size, bool] = {}

    def splits(self, size: Size) -> bool:
        """Whether an extent is counted in something that ranks share."""
        if not isinstance(size, Expr):
            return False
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = (
                size.args[0] in SPLIT
                if size.op == "sym"
                else any(self.splits(x) for x in size.args)
            )
        return found

    def shard(self, axes: tuple[Size, ...]) -> tuple[Size, ...]:
        """(rows, s, h) as a rank holds it outside the split region."""
        return (axes[0], ceil_div(axes[1], self.degree), *axes[2:]) if self.sequence else axes

    def whole(self, axes: tuple[Size, ...]) -> tuple[Size, ...]:
        """(rows, s/t, h) as the split region reads it."""
        if not self.sequence:
            return axes
        return (axes[0], self._share_of(axes[1]) or axes[1], *axes[2:])

    def _share_of(self, length: Size) -> Size | None:
        """The sequence of which an extent is one rank's share; None where it is none."""
        shared = (
            self.sequence
            and isinstance(length, Expr)
            and length.op == "ceil/"
            and length.args[1] == self.degree
        )
        return length.args[0] if shared and isinstance(length, Expr) else None

    # ------------------------------------------------------------ linears

    def linear(
        self, t: Tape, x: Value, outputs: Size, kind: str, product: Callable[[Value], Value]
    ) -> Value:
        """A linear split by columns, by rows or not at all; `product` records it on its input."""
        columns, rows = self.splits(outputs), self.splits(x.axes[-1])
        if columns == rows:
            if rows:
                raise InputError(
                    f"{t.module} reads and makes what tensor parallelism splits; use"
                    " tensor_parallel_size=1 for this model"
                )
            return product(x)
        if rows:
            return self.leave(t, product(x))
        read, first = self.enter(t, x), len(t.ops)
        out = product(read)
        if self.style.gathers_again and read.tensor is not x.tensor:
            self._gather_again(t, x, read, first)
        return self.head(t, out) if kind == "head" else out

    def _gather_again(self, t: Tape, x: Value, read: Value, first: int) -> None:
        """Keeps the share instead of what was gathered from it: the backward of each product
        gathers it anew, linears side by side once."""
        for op in t.ops[first:]:
            if read.tensor not in op.saves:
                continue
            op.saves = tuple(x.tensor if kept is read.tensor else kept for kept in op.saves)
            again = t.tensor("input gathered again", read.axes, read.dtype, Role.COMMUNICATION)
            op.backward = ((ALLOC, again), *op.backward, (FREE, again))
            if id(x) not in t.regathered:
                t.regathered[id(x)] = x
                gather = Collective(
                    "all-gather", traffic(read), ranks=self.degree, axis=AXIS, overlaps=True
                )
                op.backward_costs = (gather, *op.backward_costs)

    # ------------------------------------------------------------ borders

    def enter(self, t: Tape, x: Value) -> Value:
        """x as every rank's columns read it: gathered along the sequence, or as it is; its
        gradients are summed over ranks."""
        known = t.entered.get(id(x)) if self.style.enters_once else None
        if known is None:
            known = (
                self._gathered(t, x)
                if self._share_of(x.axes[1]) is not None
                else self._copied(t, x)
            )
            t.entered[id(x)] = known
        return known

    def whole_sequence(self, t: Tape, x: Value) -> Value:
        """x with all its positions, for what cannot work on a share of the sequence (routers,
        latent projections)."""
        return self.enter(t, x) if self._share_of(x.axes[1]) is not None else x

    def leave(self, t: Tape, x: Value) -> Value:
        """A partial result summed over ranks: whole, or each rank's share of the sequence."""
        if self.sequence and len(x.axes) > 2:
            return self._scattered(t, x)
        cost = self._sum(x)
        if self.style.new_buffers:
            return t.op("all-reduce", (x,), x.axes, x.dtype, gradients=("pass",), costs=(cost,))
        out = Value(x.tensor, x.axes, x.dtype, x.requires_grad)
        t.append(
            "all-reduce",
            (x,),
            (out,),
            forward=(),
            gradients=(Gradient(x, None),) if x.requires_grad else (),
            costs=(cost,),
        )
        return out

    def _sum(self, x: Value) -> Collective:
        return Collective("all-reduce", traffic(x), ranks=self.degree, axis=AXIS, overlaps=False)

    def _copied(self, t: Tape, x: Value) -> Value:
        if not x.requires_grad:
            return x
        out = Value(x.tensor, x.axes, x.dtype, True)
        made = t.gradient_of(x) if self.style.new_buffers else None
        backward = ((ALLOC, made),) if made is not None else ()
        t.append(
            "copy to ranks",
            (x,),
            (out,),
            forward=(),
            backward=backward,
            gradients=(Gradient(x, made),),
            backward_costs=(self._sum(x),),
        )
        return out

    def _gathered(self, t: Tape, x: Value) -> Value:
        axes = self.whole(x.axes)
        out = Value(t.tensor("gathered input", axes, x.dtype), axes, x.dtype, x.requires_grad)
        cost = Collective("all-gather", traffic(out), ranks=self.degree, axis=AXIS, overlaps=False)
        back = Collective(
            "reduce-scatter", traffic(out), ranks=self.degree, axis=AXIS, overlaps=False
        )
        rows, chunks = (self._reordered(t, out, n) for n in ("gathered rows", "rows to scatter"))
        made = t.gradient_of(x) if x.requires_grad else None
        t.append(
            "all-gather",
            (x,),
            (out,),
            forward=(*((ALLOC, r) for r in rows), (ALLOC, out.tensor), *((FREE, r) for r in rows)),
            costs=(cost, *self._copies(rows, out)),
            backward=(
                (*((ALLOC, c) for c in chunks), (ALLOC, made), *((FREE, c) for c in chunks))
                if made is not None
                else ()
            ),
            gradients=(Gradient(x, made),) if made is not None else (),
            backward_costs=(back, *self._copies(chunks, out)),
        )
        return out

    def _scattered(self, t: Tape, x: Value) -> Value:
        axes = self.shard(x.axes)
        out = Value(t.tensor("scattered output", axes, x.dtype), axes, x.dtype, x.requires_grad)
        cost = Collective(
            "reduce-scatter", traffic(x), ranks=self.degree, axis=AXIS, overlaps=False
        )
        back = Collective("all-gather", traffic(x), ranks=self.degree, axis=AXIS, overlaps=False)
        chunks, rows = (self._reordered(t, x, n) for n in ("rows to scatter", "gathered rows"))
        made = t.gradient_of(x) if x.requires_grad else None
        t.append(
            "reduce-scatter",
            (x,),
            (out,),
            forward=(
                *((ALLOC, c) for c in chunks),
                (ALLOC, out.tensor),
                *((FREE, c) for c in chunks),
            ),
            costs=(cost, *self._copies(chunks, x)),
            backward=(
                (*((ALLOC, r) for r in rows), (ALLOC, made), *((FREE, r) for r in rows))
                if made is not None
                else ()
            ),
            gradients=(Gradient(x, made),) if made is not None else (),
            backward_costs=(back, *self._copies(rows, x)),
        )
        return out

    def _reordered(self, t: Tape, x: Value, name: str) -> list[Tensor]:
        return (
            [t.tensor(name, x.axes, x.dtype, Role.COMMUNICATION)] if self.style.gathers_rows else []
        )

    def _copies(self, made: list[Tensor], x: Value) -> tuple[Move, ...]:
        return (Move(2 * traffic(x)),) if made else ()

    # ------------------------------------------------------------ vocabulary

    def embedded(self, t: Tape, x: Value) -> Value:
        """What a rank finds of the ids in its rows of the table, summed over ranks; ids of others'
        rows are masked out."""
        return self.leave(t, x)

    def splits_loss(self, logits: Value) -> bool:
        """Whether the loss is computed on each rank's share of these logits."""
        return self.style.splits_loss and self.splits(logits.axes[-1])

    def loss(self, t: Tape, logits: Value) -> Value:
        """Mean cross-entropy of fp32 logits of axes (..., v/t)."""
        return vocabulary_loss(t, logits, self)

    def head(self, t: Tape, logits: Value) -> Value:
        """Logits as the loss reads them: each rank's share, or gathered."""
        if self.style.splits_loss:
            return logits
        axes = (*logits.axes[:-1], logits.axes[-1] * self.degree)
        out = Value(
            t.tensor("gathered logits", axes, logits.dtype, Role.LOGITS),
            axes,
            logits.dtype,
            logits.requires_grad,
        )
        rows = t.tensor("gathered rows", axes, logits.dtype, Role.LOGITS)
        made = t.gradient_of(logits) if logits.requires_grad else None
        if made is not None:
            made.role = Role.LOGITS
        cost = Collective("all-gather", traffic(out), ranks=self.degree, axis=AXIS, overlaps=False)
        t.append(
            "gather logits",
            (logits,),
            (out,),
            forward=((ALLOC, rows), (ALLOC, out.tensor), (FREE, rows)),
            costs=(cost, Move(2 * traffic(out))),
            backward=((ALLOC, made),) if made else (),
            gradients=(Gradient(logits, made),) if made else (),
            backward_costs=(Move(2 * traffic(logits)),),
        )
        return out


# ---------------------------------------------------------------- a rank's share


def rank_share(spec: ModelSpec, degree: int, style: TensorStyle = MEGATRON) -> ModelSpec:
    """The model with the sizes of one tensor-parallel rank; raises InputError where they do not
    divide."""
    check_degree(spec, degree, copies_heads=style.copies_heads)
    stages = tuple(stage.replace(symbols=_share(stage.symbols, degree)) for stage in spec.stages)
    return spec.replace(symbols=_share(spec.symbols, degree), stages=stages)


def _share(symbols: tuple[tuple[str, int], ...], degree: int) -> tuple[tuple[str, int], ...]:
    """Heads, widths and vocabulary over ranks; key/value heads that are fewer than ranks are on
    several of them."""
    return tuple(
        (name, max(1, -(-value // degree)) if name in SPLIT else value) for name, value in symbols
    )


def divides(symbols: dict[str, int], degree: int, *, copies_heads: bool) -> str:
    """The symbol that a degree does not divide; '' where it divides all. The vocabulary is padded,
    key/value heads fewer than ranks may be copied."""
    for name in ("a", "f", "fe", "fs"):
        if symbols.get(name, 0) % degree:
            return name
    heads = symbols.get("k", degree)
    return "k" if heads % degree and (degree % heads or not copies_heads) else ""


def valid_degrees(spec: ModelSpec, limit: int = 1024, *, copies_heads: bool = True) -> list[int]:
    """The tensor-parallel degrees that divide a model's heads and widths."""
    symbols = dict(spec.symbols)
    return [
        n
        for n in range(1, min(limit, symbols.get("a", 1)) + 1)
        if not divides(symbols, n, copies_heads=copies_heads)
    ]


def check_degree(spec: ModelSpec, degree: int, *, copies_heads: bool) -> None:
    """Raises InputError, naming the valid degrees, where the model's sizes do not divide."""
    symbols = dict(spec.symbols)
    failed = divides(symbols, degree, copies_heads=copies_heads)
    if failed:
        raise InputError(
            f"{NAMES[failed]}={symbols[failed]} of {spec.name} does not divide by"
            f" tensor_parallel_size={degree}; use"
            f" {listed(valid_degrees(spec, copies_heads=copies_heads))}"
        )


def listed(numbers: list[int]) -> str:
    """'1, 2, 4 or 8'."""
    texts = [str(n) for n in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def check_layers(runs: list[Run], split: TensorSplit, name: str) -> None:
    """Raises InputError for layers that hold a matrix which is neither split nor meant to be whole
    on every rank."""
    for run in runs:
        if not run.stage.checkpointed or run.stage.modality:
            continue
        for weight in run.block.weights:
            if _unsplit(weight, split):
                module = weight.path.rpartition(".")[0]
                why = (
                    "normalizes over all heads"
                    if weight.kind == "norm"
                    else "is not counted in heads or feed-forward"
                )
                raise InputError(
                    f"{name} cannot be split by tensor parallelism: {module} {why}; use"
                    " tensor_parallel_size=1"
                )


def _unsplit(weight: Weight, split: TensorSplit) -> bool:
    if weight.kind == "norm":  # a norm over all heads needs the sums of every rank
        return len(weight.axes) == 1 and split.splits(weight.axes[0])
    if weight.kind not in MATRICES or any(split.splits(axis) for axis in weight.axes):
        return False
    return not any(part in WHOLE for part in weight.path.split("."))
