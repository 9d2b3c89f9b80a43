"""Context parallelism: each rank has a part of every sequence; only attention reads the other
parts.

Outside attention a rank's layers are those of a shorter sequence, so the model is recorded with s
bound to s/c. In attention, ring sends keys and values around and merges partial results in fp32;
Ulysses exchanges parts of the sequence for parts of the heads.

Sources: Liu et al. (arXiv 2310.01889, ring attention), Jacobs et al. (arXiv 2309.14509, Ulysses);
zhuzilin/ring-flash-attention ring_flash_attn/zigzag_ring_flash_attn.py, utils.py
update_out_and_lse, RingComm; torch 2.6 distributed/tensor/experimental/_attention.py
_AllGatherRotater (the default of keys and values), _AllToAllRotater (of gradients); Transformer
Engine attention/dot_product_attention/context_parallel.py; DeepSpeed sequence/layer.py
single_all_to_all.
"""

from __future__ import annotations

from napkinmath.base.dtypes import FP32
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Expr, Size, ceil_div, maximum
from napkinmath.config.parallel_config import ContextParallel
from napkinmath.config.train_config import Attention as Choice
from napkinmath.ir.cache import Grows
from napkinmath.ir.costs import AttentionCost, Collective, Move, traffic
from napkinmath.ir.ledger import ALLOC, FREE, Gradient, Role, Tensor, Value
from napkinmath.lowering.parallel.exchange import exchange
from napkinmath.ops.attention import fused_on_rank

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.ledger import Steps
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.ir.stack import Stack
    from napkinmath.ir.tape import Tape

AXIS = "context"


class ContextSplit:
    """How attention reads what other ranks hold; `degree` ranks share a sequence. A `narrow` ring
    merges in the type of its inputs."""

    def __init__(self, degree: int, kind: ContextParallel, *, narrow: bool = False) -> None:
        self.degree, self.kind, self.narrow = degree, kind, narrow

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

        def making(made: Tensor, given: Value) -> Steps:
            first, second = (
                t.tensor(n, made.axes, made.dtype, Role.COMMUNICATION)
                for n in ("parts to send", "parts received")
            )
            return (ALLOC, first), (ALLOC, second), (FREE, first), (ALLOC, made), (FREE, second)

        out = t.tensor("exchanged", axes, x.dtype)
        moved = traffic(Value(out, axes, x.dtype))
        cost = (
            Collective("all-to-all", moved, ranks=self.degree, axis=AXIS, overlaps=False),
            Move(4 * moved, 2),
        )
        return exchange(t, "all-to-all", x, out, making=making, costs=cost, backward_costs=cost)

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
        """Keys and values go round while the kernel runs on those at hand; results are merged in
        fp32, or in the type of the inputs by a narrow ring.

        Backward sends them round again, and the sums of their gradients with them.
        """
        rows, heads, length, _ = q.axes
        axes = (rows, length, heads, v.axes[3])
        tensor = t.tensor("attention output", axes, q.dtype)
        lse = t.tensor("log-sum-exp", (rows, heads, length), FP32)
        out = Value(tensor, axes, q.dtype, any(x.requires_grad for x in (q, k, v)))
        needs = out.requires_grad
        coming = [
            t.tensor(n, x.axes, x.dtype, Role.COMMUNICATION)
            for n, x in (("keys received", k), ("values received", v))
        ]
        summed = q.dtype if self.narrow else FP32
        forward = (
            _narrow_forward(t, out, lse, coming, self.degree)
            if self.narrow
            else _ring_forward(t, out, lse, coming, summed)
        )
        made = tuple(Gradient(x, t.gradient_of(x)) for x in (q, k, v) if x.requires_grad)
        merging = self._merging(Value(tensor, axes, summed))
        gradients = (Value(x.tensor, x.axes, summed) for x in (k, v))
        there, back = (
            self._steps(kernel, q, k, causal=causal, window=window, backward=backward)
            for backward in (False, True)
        )
        again = (self._arrives(back, k, v), self._returns(back, *gradients), merging)
        t.append(
            f"sdpa ring {kernel}",
            (q, k, v),
            (out,),
            forward=forward if needs else (*forward, (FREE, lse)),
            saves=(q.tensor, k.tensor, v.tensor, tensor, lse) if needs else (),
            costs=(*there, self._arrives(there, k, v), merging),
            backward=_ring_backward(t, q, k, v, coming, made, summed) if needs else (),
            gradients=made,
            backward_costs=(*back, *again),
        )
        t.last_use[lse] = len(t.ops) - 1
        return out

    def _arrives(self, kernels: list[AttentionCost], *sent: Value) -> Collective:
        """Keys and values of the other ranks. A narrow ring sends each part while the part before
        is worked on; torch gathers all parts at once, beside the rank's own one alone."""
        if self.narrow:
            return self._beside(kernels, "send", self.degree - 1, self.degree - 1, *sent)
        return self._beside(kernels, "all-gather", self.degree, 1, *sent)

    def _returns(self, kernels: list[AttentionCost], *sent: Value) -> Collective:
        """Sums of gradients, which go all the way round: each leaves as a part of the kernel has
        made it, so that the last one sticks out."""
        found = self._beside(kernels, "send", self.degree, self.degree - 1, *sent)
        found.chunks = self.degree
        return found

    def _beside(
        self, kernels: list[AttentionCost], kind: str, times: int, steps: int, *sent: Value
    ) -> Collective:
        """What travels beside so many of the kernel's steps."""
        moved = times * traffic(*sent)
        found = Collective(kind, moved, ranks=self.degree, axis=AXIS, overlaps=False)
        found.hide(kernels, reach=steps / self.degree)
        return found

    def _merging(self, out: Value) -> Move:
        """Each step's part of the output added to the others: one kernel, or a chain of them."""
        passes, kernels = (3, 2) if self.narrow else (5, 4)
        return Move(self.degree * passes * traffic(out), kernels * self.degree)

    def _steps(
        self, kernel: str, q: Value, k: Value, *, causal: bool, window: Size | None, backward: bool
    ) -> list[AttentionCost]:
        """The kernels of a rank's steps, one for the keys of each rank.

        A rank has one part from the front of the sequence and one from its end. Its own keys are
        masked; of the others all its queries see the first part, or those of its second part see
        both (torch distributed/tensor/experimental/_context_parallel/_attention.py, load balancing;
        Transformer Engine's sections "diagonal", "lower-triangle" and "upper-triangle").
        """
        rows, heads, length, size = q.axes

        def step(seen: Size, *, masked: bool) -> AttentionCost:
            return AttentionCost(
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
                backward=backward,
            )

        if window is not None:
            return [step(length * self.degree, masked=causal)]
        other = step(ceil_div(length, 2) if causal else length, masked=False)
        return [step(length, masked=causal), *[other] * (self.degree - 1)]


def _ring_forward(
    t: Tape, out: Value, lse: Tensor, coming: list[Tensor], summed: DType
) -> tuple[tuple[str, Tensor], ...]:
    """The parts of the output that are merged in the type of sums, beside the keys and values that
    arrive."""
    merged, part, difference = (
        t.tensor(n, out.axes, summed, Role.WORKSPACE)
        for n in ("merged output", "its part from a step", "their difference")
    )
    block = t.tensor("output of a step", out.axes, out.dtype, Role.WORKSPACE)
    temporaries = [*coming, merged, block, part, difference]
    return (
        *((ALLOC, x) for x in temporaries),
        *((FREE, x) for x in reversed(temporaries[1:])),
        (ALLOC, out.tensor),
        (ALLOC, lse),
        (FREE, temporaries[0]),
    )


def _narrow_forward(
    t: Tape, out: Value, lse: Tensor, coming: list[Tensor], degree: int
) -> tuple[tuple[str, Tensor], ...]:
    """Transformer Engine's: keys, values and outputs of all steps are there until the last step is
    done and all are merged (AttnFuncWithCPAndKVP2P.forward, of its last rank, whose outputs are all
    whole)."""
    steps = [
        *(t.tensor(x.name, x.axes, x.dtype, x.role) for _ in range(degree) for x in coming),
        *(t.tensor("output of a step", out.axes, out.dtype, Role.WORKSPACE) for _ in range(degree)),
    ]
    made = ((ALLOC, x) for x in (*steps, lse, out.tensor))
    return (*made, *((FREE, x) for x in steps))


def _ring_backward(
    t: Tape,
    q: Value,
    k: Value,
    v: Value,
    coming: list[Tensor],
    made: tuple[Gradient, ...],
    summed: DType,
) -> tuple[tuple[str, Tensor], ...]:
    """The gradients of each step, their sums, and those that arrive."""
    named = (("queries", q), ("keys", k), ("values", v))
    steps = [
        t.tensor(f"gradient of {n} from a step", x.axes, x.dtype, Role.WORKSPACE) for n, x in named
    ]
    sums = [t.tensor(f"{summed} gradient of {n}", x.axes, summed, Role.WORKSPACE) for n, x in named]
    arriving = [
        t.tensor(f"{summed} gradient of {n} received", x.axes, summed, Role.COMMUNICATION)
        for n, x in named[1:]
    ]
    work = [*coming, *steps, *sums, *arriving]
    return (
        *((ALLOC, x) for x in work),
        *((ALLOC, g.tensor) for g in made if g.tensor is not None),
        *((FREE, x) for x in work),
    )


def context_split(config: TrainConfig, stack: Stack) -> ContextSplit | None:
    """The split of a configuration whose sequences lie on several ranks."""
    parallel = config.parallel
    return (
        ContextSplit(
            parallel.context_parallel_size,
            parallel.context_parallel,
            narrow=stack.engine.narrow_ring,
        )
        if parallel.context_parallel_size > 1
        else None
    )


def check_context(spec: ModelSpec, config: TrainConfig) -> None:
    """Raises InputError where sequences or heads cannot be shared; `spec` is a tensor-parallel
    rank's."""
    degree, length = config.parallel.context_parallel_size, config.sequence_length
    if any(stage.publishes for stage in spec.stages):
        raise InputError(
            f"{spec.name} has several towers of layers, whose sequences ranks do not share; use"
            " context_parallel_size=1"
        )
    if any(stage.part.needs_whole_sequence for stage in spec.stages):
        raise InputError(
            f"{spec.name} chooses each token's keys among the whole sequence, which ranks do not"
            " share; use context_parallel_size=1"
        )
    if any(one.grows is Grows.NOT for stage in spec.stages for one in stage.part.cached):
        raise InputError(
            f"{spec.name} carries a state from token to token, which ranks hand on in turn: that is"
            " not priced; use context_parallel_size=1"
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
