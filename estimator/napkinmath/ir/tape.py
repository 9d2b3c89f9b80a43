"""The tape: family builders write a layer's forward here as the library executes it; autograd's
rules are recorded beside it.

What an operation keeps for its backward depends on which inputs need a gradient, as in PyTorch, so
a frozen or quantized weight, an adapter or an evaluation pass changes the record and nothing else.
"""

from __future__ import annotations

from napkinmath.base.dtypes import DType
from napkinmath.base.expr import Bindings, Size, product
from napkinmath.ir.ledger import (
    ALLOC,
    FREE,
    Block,
    Gradient,
    Op,
    Role,
    Steps,
    Tensor,
    Value,
    Weight,
    allocs,
    frees,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from napkinmath.ir.costs import Cost
    from napkinmath.ir.recording import RecordingPolicy

# How the gradient of an input comes about; `None` in a list of gradients means that none is
# computed.
PASS = "pass"  # the incoming gradient itself, or a view of it
LIKE = "like"  # a new tensor shaped and typed like the input
REDUCE = (  # a product as large as the output, summed to the input's shape (a broadcast input)
    "reduce"
)


# The key of `Tape.thresholds` whose numbers are divisors of s instead of least values.
REMAINDER = "s modulo"


class Scope:
    """A module's forward call: names in the record, and the lifetime of its local variables."""

    __slots__ = ("_graph", "_locals", "_outer", "_tape", "name")

    def __init__(self, tape: Tape, name: str) -> None:
        self._tape, self.name, self._locals, self._graph = tape, name, [], []
        self._outer = tape.module

    _locals: list[Tensor]
    _graph: list[Tensor]

    def local(self, *values: Value) -> None:
        """Keeps values alive until the call returns: Python holds a local variable even when
        nothing uses it again."""
        self._locals.extend(v.tensor for v in values)

    def graph(self, *values: Value) -> None:
        """Keeps values alive until the call returns by a graph that is dropped there: not where
        checkpointing keeps no graph."""
        self._graph.extend(v.tensor for v in values)

    def release(self, *values: Value) -> None:
        """Ends the life of locals early, as `del x` or rebinding the name does: after the last
        operation recorded."""
        for value in values:
            if value.tensor in self._locals:
                self._locals.remove(value.tensor)
                self._tape.touch(value.tensor)

    def __enter__(self) -> Scope:
        self._tape.module = joined(self._outer, self.name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tape.module = self._outer
        self._tape.touch(*self._locals)
        for tensor in self._graph:
            self._tape.graph_use[tensor] = max(len(self._tape.ops) - 1, 0)


def joined(outer: str, inner: str) -> str:
    """The path of a part within another; either may be nameless."""
    return f"{outer}.{inner}" if outer and inner else outer or inner


class Tape:
    """Records the operations of one block under a policy (precision, what is trained, how linears
    are lowered)."""

    def __init__(self, policy: RecordingPolicy, sizes: Mapping[str, int] | None = None) -> None:
        self.policy, self.compiles = policy, policy.config.compile  # whether a compiler sees it
        self.sizes = sizes or {}  # the model's own symbols, on which a choice of kernel may turn
        self._kept: list[Tensor] = []
        self.ops: list[Op] = []
        self.weights: list[Weight] = []
        self._by_path: dict[str, Weight] = {}  # the first of each path, of those looked up so far
        self.module = ""  # dotted path of the module whose forward is being recorded
        self.last_use: dict[Tensor, int] = {}
        self.graph_use: dict[Tensor, int] = {}
        self.casts: dict[tuple[int, DType], Value] = {}  # autocast's cache of weight casts
        self.leaves: set[Value] = set()  # inputs made to need a gradient, which it takes too
        self.turned: set[Value] = set()  # whose rows do not lie in memory one after another
        self.entered: dict[int, Value] = {}  # what tensor parallelism gathered for some linears
        self.regathered: dict[int, Value] = {}  # whose gathering in the backward is counted
        self.cast_once: dict[int, Value] = {}  # inputs of FP8 linears, under a compiler
        # of linears that read one value, by a word and its id: it, and what is made of it once
        self.shared: dict[tuple[str, int], tuple[Value, Value]] = {}
        self.returned: Tensor | None = None  # a layer's second result
        self.outliving: list[Tensor] = []  # which the model's caller holds (a key/value cache)
        self.handed_on: Tensor | None = None  # of the second result, where the next layer takes it
        self.stored: list[Value] = []  # put into a container of the model's
        self.thresholds: dict[str, set[int]] = {}  # sizes of b and s that turned a choice
        self.decoded = 0  # bytes of the buffer that patched operations decode weights into
        self.records_no_graph = self.in_kernel = False  # in no_grad(); in SDPA, without autocast
        self.left_whole = ""  # module of the part that the quantizer leaves

    # ------------------------------------------------------------ structure

    def scope(self, name: str = "") -> Scope:
        """Enters a submodule (or with no name, a plain function call)."""
        return Scope(self, name)

    def without_graph(self, *values: Value) -> tuple[Value, ...]:
        """The values as `torch.no_grad()` sees them; the caller ends it by the attribute."""
        self.records_no_graph = True
        return tuple(Value(x.tensor, x.axes, x.dtype) for x in values)

    def touch(self, *tensors: Tensor) -> None:
        """Keeps tensors alive at least up to the operation recorded last."""
        for tensor in tensors:
            self.last_use[tensor] = max(len(self.ops) - 1, 0)

    def keep(self, *values: Value) -> None:
        """Keeps values alive to the end of the block: a caller outside the current scopes holds
        them."""
        self._kept.extend(v.tensor for v in values)

    def store(self, *values: Value) -> None:
        """Puts values into a container that outlives the layer; where the layer is checkpointed, its
        recomputation puts its own there, and with them the graph that made them."""
        self.stored.extend(values)

    def hand_back(self, value: Value) -> None:
        """A layer's second result: the loop over layers holds it until the next has returned."""
        self.keep(value)
        self.returned = value.tensor

    def at_least(self, symbol: str, value: int) -> bool:
        """Whether b or s reaches a value at which the library runs other operations (a batch of 2,
        an attention window).

        The values asked for are kept in `thresholds`: between two of them one record holds for
        every size.
        """
        self.thresholds.setdefault(symbol, set()).add(value)
        return self.policy.reaches(symbol, value)

    def divides(self, number: int, length: Size) -> bool:
        """Whether a length is a multiple of a number, as a kernel asks of its rows.

        A length that turns on s is noted: one record holds for lengths with the same remainder.
        """
        if isinstance(length, int):
            return length % number == 0
        self.thresholds.setdefault(REMAINDER, set()).add(number)
        found = self.policy.bound_length(length, self.sizes)
        return found is None or found % number == 0

    def known(self, size: Size) -> int:
        """The value of a size of the model's own symbols (a head size); KeyError for b and s."""
        return size if isinstance(size, int) else int(Bindings(self.sizes)(size))

    def weight(
        self,
        name: str,
        axes: tuple[Size, ...],
        *,
        kind: str = "other",
        dtype: DType | None = None,
        buffer: bool = False,
        tied_to: str = "",
    ) -> Weight:
        """Declares a parameter (or buffer) of the current module; `kind` is linear, embedding,
        norm, bias, conv, experts, head or other."""
        path = joined(self.module, name)
        if (known := self.declared(path)) is not None:
            return known
        whole = bool(self.left_whole) and f".{path}".endswith(f".{self.left_whole}.weight")
        made = self.policy.make_weight(
            path, axes, kind=kind, dtype=dtype, buffer=buffer, tied_to=tied_to, whole=whole
        )
        if self.records_no_graph:
            made.trainable = made.value.requires_grad = False
        self.weights.append(made)
        if not tied_to and self.policy.keeps_original(made):
            self._keep_original(made, name)
        return made

    def _keep_original(self, weight: Weight, name: str) -> None:
        """The untrained original beside a module that is trained whole."""
        path, axes, dtype = weight.path, weight.axes, weight.tensor.dtype
        source = "peft utils/other.py ModulesToSaveWrapper"
        kept = Tensor(f"{name} before training", axes, dtype, Role.WEIGHTS, path, source)
        copy, kind = f"{path}.original", weight.kind
        self.weights.append(Weight(copy, axes, kept, trainable=False, kind=kind, buffer=True))

    def declared(self, path: str) -> Weight | None:
        """This block's weight of that path: a module that runs twice has its weights once."""
        for weight in self.weights[len(self._by_path) :]:
            self._by_path.setdefault(weight.path, weight)
        return self._by_path.get(path)

    def tensor(
        self, name: str, axes: tuple[Size, ...], dtype: DType, role: Role = Role.ACTIVATIONS
    ) -> Tensor:
        """A storage of the current module that an operation's steps allocate."""
        return Tensor(name, axes, dtype, role, self.module)

    def hand_on(self, value: Value) -> None:
        """A second result that the next layer takes as an argument: its checkpoint holds it."""
        self.hand_back(value)
        self.handed_on = value.tensor

    def block(
        self,
        name: str,
        input: Value | None,
        output: Value | None,
        externals: Sequence[Value] = (),
        symbols: dict[str, int] | None = None,
    ) -> Block:
        """Closes the record."""
        self.touch(*self._kept)
        values, ends = tuple(externals), self.last_use
        block = Block(name, self.ops, self.weights, input, output, values, ends, symbols or {})
        block.graph_use, block.returned = self.graph_use, self.returned
        block.stored, block.handed_on = tuple(self.stored), self.handed_on
        casts = (value.tensor for value in self.casts.values())
        block.cached = tuple(dict.fromkeys((*casts, *self.outliving)))
        return block

    # ------------------------------------------------------------ operations

    def append(
        self,
        name: str,
        inputs: Sequence[Value],
        outputs: Sequence[Value],
        *,
        forward: Steps,
        saves: Sequence[Tensor] = (),
        costs: Sequence[Cost] = (),
        backward: Steps = (),
        gradients: Sequence[Gradient] = (),
        backward_costs: Sequence[Cost] = (),
    ) -> None:
        """Records an operation given in full; one whose outputs need no gradient has no node to
        save for."""
        saves = saves if any(out.requires_grad for out in outputs) else ()
        self.ops.append(
            Op(
                name,
                self.module,
                tuple(inputs),
                tuple(outputs),
                forward=forward,
                saves=tuple(saves),
                costs=costs,
                backward=backward,
                gradients=tuple(gradients),
                backward_costs=backward_costs,
            )
        )
        index = len(self.ops) - 1
        for value in (*inputs, *outputs):
            self.last_use[value.tensor] = index

    def view(
        self, x: Value, axes: tuple[Size, ...], name: str = "view", *, copies_gradient: bool = False
    ) -> Value:
        """The same storage with other axes (view, transpose, expand); its gradient is a view of the
        incoming one.

        `copies_gradient`: the incoming gradient's layout cannot be viewed that way, so autograd's
        reshape copies it.
        """
        out = Value(x.tensor, axes, x.dtype, x.requires_grad)
        if x.requires_grad:
            made = self.gradient_of(x) if copies_gradient else None
            self.append(
                name,
                (x,),
                (out,),
                forward=(),
                backward=((ALLOC, made),) if made else (),
                gradients=(Gradient(x, made),),
            )
        return out

    def op(
        self,
        name: str,
        inputs: Sequence[Value],
        axes: tuple[Size, ...],
        dtype: DType,
        *,
        saves: Sequence[Value | Tensor | None] = (),
        gradients: Sequence[str | None] = (),
        label: str = "",
        role: Role = Role.ACTIVATIONS,
        costs: Sequence[Cost] = (),
        backward_costs: Sequence[Cost] = (),
        temporaries: Sequence[Tensor] = (),
        backward_temporaries: Sequence[Tensor] = (),
    ) -> Value:
        """Records an operation with one new output.

        `gradients[i]` says how input i gets its gradient (LIKE, PASS, REDUCE or None) if it needs
        one; `saves` lists what the backward reads, given that some input needs a gradient (None
        entries are skipped). Temporaries live during the op.
        """
        needs = any(x.requires_grad for x in inputs) and dtype.floating
        tensor = Tensor(label or name, axes, dtype, role, self.module)
        out = Value(tensor, axes, dtype, needs)
        forward = (*allocs(*temporaries, tensor), *frees(*temporaries))
        if not needs:
            self.append(name, inputs, (out,), forward=forward, costs=costs)
            return out
        backward: list[tuple[str, Tensor]] = list(allocs(*backward_temporaries))
        sums: list[tuple[str, Tensor]] = []
        made = [
            self._gradient(x, how, out, backward, sums)
            for x, how in zip(inputs, gradients, strict=True)
            if x.requires_grad and how is not None
        ]
        self.append(
            name,
            inputs,
            (out,),
            forward=forward,
            saves=[s.tensor if isinstance(s, Value) else s for s in saves if s is not None],
            costs=costs,
            backward=(*backward, *frees(*backward_temporaries)),
            gradients=made,
            backward_costs=backward_costs,
        )
        self.ops[-1].fitting = tuple(sums)
        return out

    def _gradient(
        self,
        x: Value,
        how: str,
        out: Value,
        steps: list[tuple[str, Tensor]],
        sums: list[tuple[str, Tensor]],
    ) -> Gradient:
        if how == PASS:
            return Gradient(x, None)
        gradient = self.gradient_of(x)
        if (
            how == REDUCE
        ):  # the engine sums to the input's shape after the node has made all its products
            full = Tensor(
                "product before the sum", out.axes, out.dtype, Role.WORKSPACE, self.module
            )
            steps.append((ALLOC, full))
            sums += [(ALLOC, gradient), (FREE, full)]
        else:
            steps.append((ALLOC, gradient))
        return Gradient(x, gradient)

    def gradient_of(self, x: Value) -> Tensor:
        """The tensor that will hold the gradient of a value: of role gradients for a weight."""
        role = Role.GRADIENTS if x.weight is not None else Role.ACTIVATION_GRADIENTS
        return Tensor(
            f"grad of {x.tensor.name}",
            x.axes,
            x.dtype,
            role,
            x.tensor.module if x.weight else self.module,
        )


def elements(x: Value) -> Size:
    """Element count of a value."""
    return product(x.axes)
