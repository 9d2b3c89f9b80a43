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
from napkinmath.base.expr import Expr, Size, ceil_div, product
from napkinmath.ir.costs import Collective, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.lowering.parallel.exchange import exchange, through
from napkinmath.lowering.parallel.hidden import fuse_gather, hide_gather, hide_reduction
from napkinmath.lowering.parallel.tensor_share import shared_symbols
from napkinmath.lowering.parallel.tensor_style import TensorStyle, tensor_style
from napkinmath.lowering.parallel.vocabulary import vocabulary_loss
from napkinmath.ops.matmul import FP8_INPUT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.ledger import Steps
    from napkinmath.ir.stack import Stack
    from napkinmath.ir.tape import Tape
AXIS = "tensor"


def tensor_split(config: TrainConfig, stack: Stack) -> TensorSplit:
    """The split of a configuration with more than one tensor-parallel rank."""
    parallel, style = config.parallel, tensor_style(config, stack)
    overlaps = parallel.tensor_overlap
    if overlaps is None:
        overlaps = stack.engine.hides_tensor_collectives
    elif overlaps and style.compiler_overlaps and not config.compile:
        raise InputError(
            "tensor_overlap in torch's own tensor parallelism is a pass of its compiler; add"
            " compile, or use a stack with Megatron-LM's layers"
        )
    if overlaps and style.compiler_overlaps:
        style = style.replace(gathers_rows=False)
    return TensorSplit(
        parallel.tensor_parallel_size,
        style,
        sequence=parallel.sequence_parallel,
        overlaps=overlaps,
    )


class TensorSplit:
    """The borders of one estimate's split region."""

    def __init__(
        self, degree: int, style: TensorStyle, *, sequence: bool, overlaps: bool = False
    ) -> None:
        self.degree, self.style, self.sequence = degree, style, sequence
        self.overlaps = overlaps
        self._known: dict[Size, bool] = {}
        self._shared = shared_symbols(style)

    def splits(self, size: Size) -> bool:
        """Whether an extent is counted in something that ranks share."""
        if not isinstance(size, Expr):
            return False
        found = self._known.get(size)
        if found is None:
            found = self._known[size] = (
                size.args[0] in self._shared
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
            first = len(t.ops)
            out = self.leave(t, product(x), narrow=self._casts_before(t, kind))
            if self._hides(kind):
                casts = self._casts_between(t, kind)
                hide_reduction(t.ops[-1], t.ops[first:], self.degree, casts=casts)
            return out
        narrow = t.policy.keeps_fp8(kind) or self._casts_before(t, kind)
        read, first = self.enter(t, x, narrow=narrow), len(t.ops)
        out = product(read)
        if read.tensor is not x.tensor:
            if self.style.gathers_again:
                self._gather_again(t, x, read, first)
            if self._hides(kind):
                gathering = next(op for op in t.ops if read in op.outputs)
                if self.style.compiler_overlaps:
                    casts = self._casts_between(t, kind)
                    fuse_gather(gathering, t.ops[first:], self.degree, casts=casts)
                else:
                    hide_gather(gathering, t.ops[first:], self.degree)
        return self.head(t, out) if kind == "head" else out

    def _hides(self, kind: str) -> bool:
        """Whether collectives of such a linear run beside its products: not of the head, which is
        no linear of Transformer Engine's and lies outside torch's compiled layers."""
        return self.overlaps and self.sequence and kind != "head"

    def _casts_before(self, t: Tape, kind: str) -> bool:
        """Whether a linear's input, and the gradient of its result, travel in FP8."""
        rule = t.policy.rule
        tensorwise = rule.fp8_block == 0 and not rule.fp8_rows and kind != "head"
        return self.style.casts_before_gather and tensorwise and t.policy.format is None

    def _casts_between(self, t: Tape, kind: str) -> bool:
        """Whether torch's compiler finds a cast to FP8 between a gather and its product."""
        eight = t.policy.rule.fp8_block is not None and self.style.compiler_overlaps
        return eight and not self._casts_before(t, kind)

    def _gather_again(self, t: Tape, x: Value, read: Value, first: int) -> None:
        """Keeps the share instead of what was gathered from it: the backward of each product
        gathers it anew, linears side by side once."""
        whole, part = self._kept(t, x, read)
        for op in t.ops[first:]:
            if whole.tensor not in op.saves:
                continue
            op.saves = tuple(part.tensor if kept is whole.tensor else kept for kept in op.saves)
            again = t.tensor("input gathered again", whole.axes, whole.dtype, Role.COMMUNICATION)
            op.backward = ((ALLOC, again), *op.backward, (FREE, again))
            t.touch(part.tensor)
            if id(x) not in t.regathered:
                t.regathered[id(x)] = x
                gather = Collective(
                    "all-gather", traffic(whole), ranks=self.degree, axis=AXIS, overlaps=True
                )
                op.backward_costs = (gather, *op.backward_costs)

    def _kept(self, t: Tape, x: Value, read: Value) -> tuple[Value, Value]:
        """What a product would keep of its gathered input, and the share of it to keep instead: in
        FP8 where that is what it reads."""
        if (FP8_INPUT, id(read)) not in t.shared:
            return read, x
        whole = t.shared[FP8_INPUT, id(read)][1]
        if (FP8_INPUT, id(x)) not in t.shared:
            share = t.tensor("share of the input in FP8", x.axes, whole.dtype)
            cast = next(op for op in t.ops if whole in op.outputs)
            cast.forward = (*cast.forward, (ALLOC, share))
            t.shared[FP8_INPUT, id(x)] = x, Value(share, x.axes, whole.dtype, False)
        return whole, t.shared[FP8_INPUT, id(x)][1]

    # ------------------------------------------------------------ borders

    def enter(self, t: Tape, x: Value, *, narrow: bool = False) -> Value:
        """x as every rank's columns read it: gathered along the sequence, in FP8 where it is
        `narrow`, or as it is; its gradients are summed over ranks."""
        known = t.entered.get(id(x)) if self.style.enters_once else None
        if known is None:
            known = (
                self._gathered(t, x, narrow=narrow)
                if self._share_of(x.axes[1]) is not None
                else self._copied(t, x)
            )
            t.entered[id(x)] = known
        return known

    def whole_sequence(self, t: Tape, x: Value) -> Value:
        """x with all its positions, for what cannot work on a share of the sequence (routers,
        latent projections)."""
        return self.enter(t, x) if self._share_of(x.axes[1]) is not None else x

    def leave(self, t: Tape, x: Value, *, narrow: bool = False) -> Value:
        """A partial result summed over ranks: whole, or each rank's share of the sequence, whose
        gradient is gathered in FP8 where it is `narrow`."""
        if self.sequence and len(x.axes) > 2:
            return self._scattered(t, x, narrow=narrow)
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

    def _gathered(self, t: Tape, x: Value, *, narrow: bool) -> Value:
        """All positions, of each rank's share of them."""
        out = t.tensor("gathered input", self.whole(x.axes), x.dtype)
        moved = traffic(Value(out, out.axes, x.dtype))
        sent = product(out.axes) if narrow else moved
        return self._reordered(t, x, out, (sent, moved), ("all-gather", "reduce-scatter"))

    def _scattered(self, t: Tape, x: Value, *, narrow: bool) -> Value:
        """Each rank's share of the positions, summed over ranks."""
        out = t.tensor("scattered output", self.shard(x.axes), x.dtype)
        back = product(x.axes) if narrow else traffic(x)
        return self._reordered(t, x, out, (traffic(x), back), ("reduce-scatter", "all-gather"))

    def _reordered(
        self,
        t: Tape,
        x: Value,
        out: Tensor,
        moved: tuple[Size, Size],
        kinds: tuple[str, str],
    ) -> Value:
        """A collective along the sequence and its opposite; a style may copy rows into the order of
        the ranks before or after."""
        longer = x.axes if kinds[0] == "reduce-scatter" else out.axes
        rows = self.style.gathers_rows

        def making(made: Tensor, given: Value) -> Steps:
            name = "gathered rows" if made.axes == longer else "rows to scatter"
            copied = [t.tensor(name, longer, x.dtype, Role.COMMUNICATION)] if rows else []
            return through(copied, made)

        there, back = (
            (
                Collective(kind, size, ranks=self.degree, axis=AXIS, overlaps=False),
                *((Move(2 * size),) if rows else ()),
            )
            for kind, size in zip(kinds, moved, strict=True)
        )
        return exchange(t, kinds[0], x, out, making=making, costs=there, backward_costs=back)

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
        return vocabulary_loss(t, logits, self.degree)

    def head(self, t: Tape, logits: Value) -> Value:
        """Logits as the loss reads them: each rank's share, or gathered."""
        if self.style.splits_loss:
            return logits
        dtype, axes = logits.dtype, (*logits.axes[:-1], logits.axes[-1] * self.degree)
        out = t.tensor("gathered logits", axes, dtype, Role.LOGITS)
        rows = t.tensor("gathered rows", axes, dtype, Role.LOGITS)
        moved = traffic(Value(out, axes, dtype))
        gather = Collective("all-gather", moved, ranks=self.degree, axis=AXIS, overlaps=False)
        return exchange(
            t,
            "gather logits",
            logits,
            out,
            making=lambda made, given: through([rows] if made is out else [], made),
            costs=(gather, Move(2 * moved)),
            backward_costs=(Move(2 * traffic(logits)),),
        )
