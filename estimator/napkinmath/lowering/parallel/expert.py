"""Expert parallelism: each rank holds whole experts; tokens travel to them and their outputs travel
back.

A rank receives as many rows as it sends where routing is even. `expert_imbalance` says how many
times the mean the busiest rank receives; with `expert_capacity` rows beyond capacity x mean are
dropped and buffers are as large as it. Experts may have tensor-parallel ranks of their own (ETP).
Each rank then routes its share of a split sequence and sends it to the ranks of its experts. What
arrives is gathered among the ranks that share an expert; their parts are summed on the way back.
Where all-to-alls run beside other micro-batches, what is
longer than a layer's work sticks out.

Sources: transformers 5.23 distributed/expert_parallel.py AllToAllEP; Lepikhin et al. (arXiv
2006.16668, capacity); Megatron-LM core/transformer/moe/token_dispatcher.py
MoEAlltoAllTokenDispatcher, MoEFlexTokenDispatcher, MoEAllGatherTokenDispatcher, core/pipeline_parallel/combined_1f1b.py
(overlap_moe_expert_parallel_comm); DeepSeek-V3 (arXiv 2412.19437 section 3.2.1, DualPipe).
"""

from __future__ import annotations

from napkinmath.base.dtypes import INT64
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Size, ceil_div
from napkinmath.ir.costs import Collective, Move, places_reached, traffic
from napkinmath.ir.ledger import ALLOC, Value
from napkinmath.ir.step import Run
from napkinmath.ir.symbols import e, topk
from napkinmath.ir.tape import LIKE
from napkinmath.lowering.data_parallel.holders import check_spread_engine
from napkinmath.lowering.parallel.exchange import exchange
from napkinmath.ops.index import constant
from napkinmath.ops.routing import sort_by_expert, take_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.parallel_config import ParallelConfig
    from napkinmath.ir.ledger import Tensor
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.stack import Stack
    from napkinmath.ir.tape import Scope, Tape

AXIS, TENSOR_AXIS = "expert", "expert tensor"


class ExpertSplit:
    """How tokens reach experts on `degree` ranks; this rank's is the busiest."""

    def __init__(self, parallel: ParallelConfig, stack: Stack) -> None:
        self.degree = parallel.expert_parallel_size
        tensor, within = parallel.tensor_parallel_size, parallel.expert_tensor_ranks
        self.apart = tensor != within
        self.own_tokens = self.apart or (
            tensor > 1 and parallel.sequence_parallel and stack.model.fused_experts
        )
        self.tensor = within if self.own_tokens else 1
        asked = parallel.expert_tokens_once
        self.gathers = parallel.expert_tokens_gathered
        self.once = self.gathers or (stack.engine.sends_tokens_once if asked is None else asked)
        if self.once and not stack.model.fused_experts:
            flag = "--ep-all-gather" if self.gathers else "--deepep"
            raise InputError(
                f"stack {stack.name} sends a row for each of a token's experts; take {flag} back,"
                " or use --stack megatron, nemo or automodel"
            )
        self.overlaps = parallel.hides_experts
        self.percent = round(100 * (parallel.expert_capacity or parallel.expert_imbalance))

    def experts(self, count: Size) -> Size:
        """The experts of a rank."""
        return count // self.degree

    def rows(self, sent: Size) -> Size:
        """Rows that the busiest rank receives, of `sent` that every rank sends."""
        return sent if self.percent == 100 else ceil_div(sent * self.percent, 100)

    def arrived(self, sent: Size) -> Size:
        """Rows of its experts, once those of the ranks that share them are gathered."""
        return self.rows(sent) * self.tensor

    def dispatch(
        self, t: Tape, frame: Scope, x: Value, indices: Value, rows: Size, count: Size
    ) -> tuple[Value, Value]:
        """(received rows, the order in which rows were sent) for x of axes (tokens, h)."""
        with t.scope() as inner:
            sorted_ids, order = sort_by_expert(t, Value(indices.tensor, (rows,), INT64))
            tokens = constant(t, "token of each row", (rows,), INT64)
            sent = take_rows(t, x, tokens, "rows to send")
            counts = constant(t, "rows for each expert", (count,), INT64)
            inner.local(sent, counts, order)
            t.touch(sorted_ids.tensor)
            received = self.gathered(t, self.exchanged(t, sent, self.rows(rows)))
        frame.local(order, received)
        return received, order

    def tokens(self, t: Tape, tokens: Size, limit: tuple[int, int] | None) -> Size:
        """Tokens that the busiest rank receives where each travels once to a rank."""
        if self.gathers:
            return tokens * self.degree * self.tensor
        mean = self.tensor * places_reached(self.degree, t.known(topk), limit)
        return ceil_div(tokens * round(self.percent * mean), 100)

    def sent_once(
        self, t: Tape, x: Value, rows: Size, tokens: Size, limit: tuple[int, int] | None
    ) -> Value:
        """Tokens sent once to every rank that has some of their experts, or to all, or outputs back
        and summed; `tokens` are a rank's own."""
        choices = t.known(topk) * self.tensor
        message = Value(x.tensor, (tokens * choices, *x.axes[1:]), x.dtype)
        ranks, axis = self.degree * self.tensor, AXIS if self.tensor == 1 else TENSOR_AXIS
        out = t.tensor("exchanged tokens", (rows, *x.axes[1:]), x.dtype)
        if self.gathers:
            if rows is tokens:
                back = ("reduce-scatter", "all-gather")
                return self._among(t, x, out, traffic(x), back, (ranks, axis))
            moved = traffic(Value(out, out.axes, x.dtype))
            return self._among(t, x, out, moved, ("all-gather", "reduce-scatter"), (ranks, axis))
        cost = Collective(
            "all-to-all", traffic(message), ranks=ranks, axis=axis, overlaps=self.overlaps
        )
        cost.choices, cost.limit = choices, limit
        return exchange(
            t,
            "all-to-all",
            x,
            out,
            making=lambda made, given: ((ALLOC, made),),
            costs=(cost,),
            backward_costs=(cost,),
        )

    def exchanged(self, t: Tape, x: Value, rows: Size) -> Value:
        """Rows sent to the ranks of their experts, or back."""
        if self.degree == 1:
            return x
        out = t.tensor("exchanged rows", (rows, *x.axes[1:]), x.dtype)
        larger = x
        if self.percent >= 100 and rows is not x.axes[0]:
            larger = Value(out, out.axes, x.dtype)
        moved = traffic(larger)
        cost = (
            Collective("all-to-all", moved, ranks=self.degree, axis=AXIS, overlaps=self.overlaps),
        )
        return exchange(
            t,
            "all-to-all",
            x,
            out,
            making=lambda made, given: ((ALLOC, made),),
            costs=cost,
            backward_costs=cost,
        )

    def gathered(self, t: Tape, x: Value) -> Value:
        """Rows of all ranks that share an expert."""
        if self.tensor == 1:
            return x
        out = t.tensor("gathered rows", (x.axes[0] * self.tensor, *x.axes[1:]), x.dtype)
        moved = traffic(Value(out, out.axes, x.dtype))
        return self._among(t, x, out, moved, ("all-gather", "reduce-scatter"), self._shared)

    def scattered(self, t: Tape, x: Value) -> Value:
        """Parts of outputs summed over the ranks that share an expert, each rank's rows left."""
        if self.tensor == 1:
            return x
        out = t.tensor("summed rows", (x.axes[0] // self.tensor, *x.axes[1:]), x.dtype)
        return self._among(t, x, out, traffic(x), ("reduce-scatter", "all-gather"), self._shared)

    @property
    def _shared(self) -> tuple[int, str]:
        return self.tensor, TENSOR_AXIS

    def _among(
        self,
        t: Tape,
        x: Value,
        out: Tensor,
        moved: Size,
        kinds: tuple[str, str],
        group: tuple[int, str],
    ) -> Value:
        """A collective among a group of ranks, and its opposite backward."""
        there, back = (
            Collective(kind, moved, ranks=group[0], axis=group[1], overlaps=self.overlaps)
            for kind in kinds
        )
        return exchange(
            t,
            kinds[0],
            x,
            out,
            making=lambda made, given: ((ALLOC, made),),
            costs=(there,),
            backward_costs=(back,),
        )

    def combine(
        self, t: Tape, x: Value, weights: Value, order: Value, rows: Size, tokens: Size
    ) -> Value:
        """Expert outputs back at the ranks of their tokens, in order, weighed and summed."""
        with t.scope() as frame:
            back = self.exchanged(t, self.scattered(t, x), rows)
            ordered = _in_order(t, back, order)
            frame.local(back, ordered)
            weighed = _weighed(t, ordered, weights, rows)
            return t.op(
                "sum over choices",
                (weighed,),
                (tokens, x.axes[-1]),
                weighed.dtype,
                gradients=("pass",),
                costs=(Move(traffic(weighed)),),
            )


def _in_order(t: Tape, x: Value, order: Value) -> Value:
    """Rows in the order of their tokens."""
    return t.op(
        "index_put",
        (x,),
        x.axes,
        x.dtype,
        saves=(order,),
        gradients=(LIKE,),
        costs=(Move(2 * traffic(x), 2),),
        backward_costs=(Move(2 * traffic(x)),),
    )


def _weighed(t: Tape, x: Value, weights: Value, rows: Size) -> Value:
    """Each row times the weight of its choice."""
    return t.op(
        "mul routing weights",
        (x, t.view(weights, (rows, 1))),
        x.axes,
        x.dtype,
        saves=(x, weights),
        gradients=(LIKE, "reduce"),
        costs=(Move(2 * traffic(x)),),
        backward_costs=(Move(4 * traffic(x), 3),),
    )


def check_experts(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Raises InputError where a model has no experts, or not a multiple of the ranks, or an engine
    cannot hold different ones."""
    check_spread_engine(parallel)
    degree, count = parallel.expert_parallel_size, dict(spec.symbols).get("e", 0)
    if not count:
        given = (
            f"expert_parallel_size={degree}"
            if degree > 1
            else f"expert_tensor_parallel_size={parallel.expert_tensor_ranks}"
        )
        raise InputError(f"{given} spreads experts, but {spec.name} has none; leave it out")
    if count % degree:
        valid = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
        raise InputError(
            f"num_experts={count} of {spec.name} does not divide by expert_parallel_size={degree};"
            f" use one of {valid}"
        )


def check_spread(runs: list[Run], name: str) -> None:
    """Raises InputError for experts that are one product over all of them, which no rank can do
    alone."""
    if any(
        weight.kind == "experts" and e in weight.axes
        for run in runs
        for weight in run.block.weights
    ):
        raise InputError(
            f"the experts of {name} are one product over all of them and are not spread; use"
            " expert_parallel_size=1"
        )
