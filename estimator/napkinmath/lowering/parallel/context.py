"""Context parallelism: each rank has a part of every sequence; only attention reads the other
parts.

Outside attention a rank's layers are those of a shorter sequence, so the model is recorded with s
bound to s/c. In attention, ring sends keys and values around and merges partial results in fp32;
Ulysses exchanges parts of the sequence for parts of the heads.

Sources: Liu et al. (arXiv 2310.01889, ring attention), Jacobs et al. (arXiv 2309.14509, Ulysses);
zhuzilin/ring-flash-attention ring_flash_attn/zigzag_ring_flash_attn.py, utils.py
update_out_and_lse, RingComm; DeepSpeed sequence/layer.py single_all_to_all.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Expr, Size, ceil_div, maximum
from napkinmath.config.parallel_config import ContextParallel
from napkinmath.ir.costs import Attention, Collective, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.ops.attention import fused_on_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.tape import Tape

AXIS = "context"


class ContextSplit:
    """How attention reads what other ranks hold; `degree` ranks share a sequence."""

    def __init__(self, degree: int, kind: ContextParallel) -> None:
        self.degree, self.kind = degree, kind

    def attention(
        self,
        t: Tape,
        kernel: str,
        q: Value,
        k: Value,
        v: Value,
        *,
        causal: bool,
        window: Size | None,
    ) -> Value:
        """Attention of a rank's queries over whole sequences; q, k, v of axes (rows, heads, s/c,
        head size), the result (rows, s/c, heads, head size)."""
        if self.kind is ContextParallel.ULYSSES:
            return self._ulysses(t, kernel, q, k, v, causal=causal, window=window)
        return self._ring(t, kernel, q, k, v, causal=causal, window=window)

    # ------------------------------------------------------------ Ulysses

    def _ulysses(
        self,
        t: Tape,
        kernel: str,
        q: Value,
        k: Value,
        v: Value,
        *,
        causal: bool,
        window: Size | None,
    ) -> Value:
        q, k, v = (self._exchanged(t, x, self._by_heads(x)) for x in (q, k, v))
        out = fused_on_rank(t, kernel, q, k, v, causal=causal, window=window)
        rows, length, heads, size = out.axes
        return self._exchanged(t, out, (rows, self._part(length), heads * self.degree, size))

    def _by_heads(self, x: Value) -> tuple[Size, ...]:
        """Fewer heads over the whole sequence; a key/value head that ranks would share is copied to
        each of them."""
        rows, heads, length, size = x.axes
        return (rows, maximum(1, heads // self.degree), length * self.degree, size)

    def _part(self, length: Size) -> Size:
        return (
            length.args[0]
            if isinstance(length, Expr) and length.op == "*" and length.args[1] == self.degree
            else length // self.degree
        )

    def _exchanged(self, t: Tape, x: Value, axes: tuple[Size, ...]) -> Value:
        """An all-to-all: a copy in the order of the ranks, what comes back, and its copy in the
        order of the tensor."""
        out = Value(t.tensor("exchanged", axes, x.dtype), axes, x.dtype, x.requires_grad)
        both = [
            [
                t.tensor(n, y.axes, x.dtype, Role.COMMUNICATION)
                for n in ("parts to send", "parts received")
            ]
            for y in (out, x)
        ]
        cost = (
            Collective("all-to-all", traffic(out), ranks=self.degree, axis=AXIS, overlaps=False),
            Move(4 * traffic(out), 2),
        )
        made = t.gradient_of(x) if x.requires_grad else None
        t.append(
            "all-to-all",
            (x,),
            (out,),
            forward=_through(both[0], out.tensor),
            costs=cost,
            backward=_through(both[1], made) if made is not None else (),
            gradients=(Gradient(x, made),) if made is not None else (),
            backward_costs=cost,
        )
        return out

    # ------------------------------------------------------------ ring

    def _ring(
        self,
        t: Tape,
        kernel: str,
        q: Value,
        k: Value,
        v: Value,
        *,
        causal: bool,
        window: Size | None,
    ) -> Value:
        """Keys and values go round in c - 1 sends while the kernel runs on those at hand; results
        are merged in fp32.

        Backward sends them round again, and their fp32 gradients with them.
        """
        rows, heads, length, size = q.axes
        axes = (rows, length, heads, v.axes[3])
        tensor, lse = (
            t.tensor("attention output", axes, q.dtype),
            t.tensor("log-sum-exp", (rows, heads, length), FP32),
        )
        out = Value(tensor, axes, q.dtype, any(x.requires_grad for x in (q, k, v)))
        coming = [
            t.tensor(n, x.axes, x.dtype, Role.COMMUNICATION)
            for n, x in (("keys received", k), ("values received", v))
        ]
        merged = [
            t.tensor(n, axes, FP32, Role.WORKSPACE)
            for n in ("merged output", "its part from a step", "their difference")
        ]
        block = t.tensor("output of a step", axes, q.dtype, Role.WORKSPACE)
        temporaries = [*coming, merged[0], block, *merged[1:]]
        forward = (
            *((ALLOC, x) for x in temporaries),
            *((FREE, x) for x in reversed(temporaries[1:])),
            (ALLOC, tensor),
            (ALLOC, lse),
            (FREE, temporaries[0]),
        )
        # A rank has one part from the front of the sequence and one from its end, so that its
        # queries see half of all keys on average (torch
        # distributed/tensor/experimental/_context_parallel/_attention.py, load balancing).
        seen, masked = (
            (ceil_div(length * self.degree, 2), False)
            if causal and window is None
            else (length * self.degree, causal)
        )
        cost = Attention(
            kernel,
            rows,
            heads,
            k.axes[1],
            length,
            seen,
            size,
            causal=masked,
            window=window,
            dtype=q.dtype,
            backward=False,
        )
        round_trip = Collective(
            "send", (self.degree - 1) * traffic(k, v), ranks=self.degree, axis=AXIS
        )
        merging = Move(self.degree * 5 * traffic(Value(tensor, axes, FP32)), 4 * self.degree)
        made = [(x, t.gradient_of(x)) for x in (q, k, v) if x.requires_grad]
        backward, saves = (), ()
        if out.requires_grad:
            sums = [
                t.tensor(f"fp32 gradient of {n}", x.axes, FP32, Role.WORKSPACE)
                for n, x in (("queries", q), ("keys", k), ("values", v))
            ]
            arriving = [
                t.tensor(f"fp32 gradient of {n} received", x.axes, FP32, Role.COMMUNICATION)
                for n, x in (("keys", k), ("values", v))
            ]
            steps = [
                t.tensor(f"gradient of {n} from a step", x.axes, x.dtype, Role.WORKSPACE)
                for n, x in (("queries", q), ("keys", k), ("values", v))
            ]
            work = [*coming, *steps, *sums, *arriving]
            backward = (
                *((ALLOC, x) for x in work),
                *((ALLOC, g) for _, g in made),
                *((FREE, x) for x in work),
            )
            saves = (q.tensor, k.tensor, v.tensor, tensor, lse)
        else:
            forward = (*forward, (FREE, lse))
        again = Attention(
            kernel,
            rows,
            heads,
            k.axes[1],
            length,
            seen,
            size,
            causal=masked,
            window=window,
            dtype=q.dtype,
            backward=True,
        )
        gradients = Value(k.tensor, k.axes, FP32), Value(v.tensor, v.axes, FP32)
        t.append(
            f"sdpa ring {kernel}",
            (q, k, v),
            (out,),
            forward=forward,
            saves=saves,
            costs=(cost, round_trip, merging),
            backward=backward,
            gradients=tuple(Gradient(x, g) for x, g in made),
            backward_costs=(
                again,
                round_trip,
                Collective("send", self.degree * traffic(*gradients), ranks=self.degree, axis=AXIS),
                merging,
            ),
        )
        t.last_use[lse] = len(t.ops) - 1
        return out


def _through(buffers: list[Tensor], result: Tensor) -> tuple[tuple[str, Tensor], ...]:
    first, second = buffers
    return (ALLOC, first), (ALLOC, second), (FREE, first), (ALLOC, result), (FREE, second)


def context_split(config: TrainConfig) -> ContextSplit | None:
    """The split of a configuration whose sequences lie on several ranks."""
    parallel = config.parallel
    return (
        ContextSplit(parallel.context_parallel_size, parallel.context_parallel)
        if parallel.context_parallel_size > 1
        else None
    )


def check_context(spec: ModelSpec, config: TrainConfig) -> None:
    """Raises InputError where sequences or heads cannot be shared; `spec` is a tensor-parallel
    rank's."""
    from napkinmath.config.train_config import Attention as Choice

    degree, length = config.parallel.context_parallel_size, config.sequence_length
    if any(stage.publishes for stage in spec.stages):
        raise InputError(
            f"{spec.name} has several towers of layers, whose sequences ranks do not share; use"
            " context_parallel_size=1"
        )
    if config.attention in (Choice.EAGER, Choice.MATH):
        raise InputError(
            f"context_parallel_size={degree} needs a fused attention kernel,"
            f" {config.attention.value} makes whole score matrices; use flash2 or sdpa"
        )
    if isinstance(length, int) and length % (2 * degree):
        raise InputError(
            f"sequence_length={length} does not divide into two parts for each of {degree}"
            f" context-parallel ranks; use a multiple of {2 * degree}"
        )
    heads = dict(spec.symbols).get("a", degree)
    if config.parallel.context_parallel is ContextParallel.ULYSSES and heads % degree:
        valid = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise InputError(
            f"Ulysses exchanges {heads} attention heads of a rank over"
            f" context_parallel_size={degree}; use one of {valid}, or ring"
        )
