"""The intermediate form: tensors with named axes and roles, the operations over them, and the
blocks they make up."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.cuda import ALLOCATION_GRANULE
from napkinmath.base.dtypes import DType
from napkinmath.base.expr import Size, ceil_div, product, round_up_to

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.ir.costs import Cost

    # (action, what): a tensor to allocate or free, a pair of slots to hand over between, or work to
    # run.
    Event = tuple[str, "Tensor" | tuple["Tensor", "Tensor"] | "Work"]
    Steps = tuple[tuple[str, "Tensor"], ...]
else:
    Steps = Event = object  # named in annotations only

# bytes; kMinBlockSize of c10/cuda/CUDACachingAllocator.cpp: every request is rounded up to it


class Role(str, Enum):
    """What a byte is there for."""

    WEIGHTS = "weights"
    QUANTIZATION = "quantization constants"
    ADAPTERS = "adapter weights"
    MASTER = "master weights"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    LOGITS = "logits and loss"
    WORKSPACE = "workspace and temporaries"
    COMMUNICATION = "communication buffers"
    ENGINE = "inference engine"
    SLACK = "allocator slack"
    CONTEXT = "device context"
    UNEXPLAINED = "unexplained"


class Phase(str, Enum):
    """Where in the life of a training run an event happens, in order."""

    LOAD = "load"
    ROLLOUT = "rollout"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIP = "gradient clipping"
    STEP = "optimizer step"
    EVALUATE = "evaluate"
    SAVE = "save"


_sizes: dict[tuple[tuple[Size, ...], int], tuple[Size, Size]] = {}


def storage_sizes(axes: tuple[Size, ...], bits: int) -> tuple[Size, Size]:
    """(bytes of a storage, what is asked of the allocator for it); remembered, as many tensors are
    alike."""
    elements = product(axes)
    stored = elements * (bits // 8) if bits >= 8 else ceil_div(elements * bits, 8)
    found = _sizes[axes, bits] = stored, round_up_to(stored, ALLOCATION_GRANULE)
    return found


class StreamUse:
    """Where the allocator's block of a tensor belongs, and when it may be used again.

    A block serves requests of the `stream` that it was made on alone. Where another stream reads it
    (record_stream), it waits in a `queue` until `lag` later groups have gone too: the last tensor of
    each `closes` its group. Source: torch c10/cuda/CUDACachingAllocator.cpp free, insert_events,
    process_events. `empties`: it is no memory of the training's cache, which is emptied before it is
    made and after it went.
    """

    __slots__ = ("closes", "empties", "lag", "queue", "stream")

    def __init__(
        self,
        stream: int = 0,
        queue: str = "",
        *,
        lag: int = 0,
        closes: bool = True,
        empties: bool = False,
    ) -> None:
        self.stream, self.queue, self.lag, self.closes = stream, queue, lag, closes
        self.empties = empties


class Tensor:
    """One storage: `axes` are its extents (symbols and numbers), so that bytes, formula and sweep
    come from one declaration.

    A tensor in host memory (`host`) takes none of the allocator's bytes; `host_bytes` is what it
    takes there. A `managed` one is in unified memory, on the device while there is room. `use` says
    on which stream it is made; None is the one that computes.
    """

    __slots__ = (
        "axes",
        "dtype",
        "host_bytes",
        "managed",
        "module",
        "name",
        "nbytes",
        "requested",
        "role",
        "source",
        "use",
    )

    def __init__(
        self,
        name: str,
        axes: tuple[Size, ...],
        dtype: DType,
        role: Role,
        module: str = "",
        source: str = "",
        *,
        host: bool = False,
        managed: bool = False,
        use: StreamUse | None = None,
    ) -> None:
        self.name, self.axes, self.dtype, self.role, self.module, self.source = (
            name,
            axes,
            dtype,
            role,
            module,
            source,
        )
        stored, requested = _sizes.get((axes, dtype.bits)) or storage_sizes(axes, dtype.bits)
        self.nbytes: Size = 0 if host else stored
        self.requested: Size = 0 if host else requested
        self.host_bytes: Size = stored if host else 0
        self.managed, self.use = managed, use

    def __repr__(self) -> str:
        return f"<{self.role.value}: {self.module}.{self.name} {self.dtype} {self.axes}>"


class Value:
    """A node of the autograd graph: a tensor, or a view of one with axes of its own."""

    __slots__ = ("_shared_gradient", "axes", "dtype", "requires_grad", "tensor", "weight")

    def __init__(
        self,
        tensor: Tensor,
        axes: tuple[Size, ...],
        dtype: DType,
        requires_grad: bool = False,
        weight: Weight | None = None,
    ) -> None:
        self.tensor, self.axes, self.dtype, self.requires_grad, self.weight = (
            tensor,
            axes,
            dtype,
            requires_grad,
            weight,
        )
        self._shared_gradient: Tensor | None = None

    def hold_gradient_in(self, whole: Tensor) -> None:
        """Makes the gradient that a first reader leaves a slice of a larger storage."""
        self._shared_gradient = self._shared_gradient or whole

    def shared_gradient(self) -> Tensor:
        """The slot that collects the gradient of a value which many blocks read."""
        if self._shared_gradient is None:
            name, role = f"grad of {self.tensor.name}", Role.ACTIVATION_GRADIENTS
            made = Tensor(name, self.axes, self.dtype, role, self.tensor.module)
            self._shared_gradient = made
        return self._shared_gradient


class Weight:
    """A parameter or buffer of the model: what is stored, whether it is trained, and its full shape
    before any packing."""

    __slots__ = (
        "axes",
        "buffer",
        "constants",
        "kind",
        "path",
        "tensor",
        "tied_to",
        "trainable",
        "value",
    )

    def __init__(
        self,
        path: str,
        axes: tuple[Size, ...],
        tensor: Tensor,
        *,
        trainable: bool,
        kind: str,
        constants: tuple[Tensor, ...] = (),
        buffer: bool = False,
        tied_to: str = "",
    ) -> None:
        self.path, self.axes, self.tensor, self.trainable, self.kind = (
            path,
            axes,
            tensor,
            trainable,
            kind,
        )
        self.constants, self.buffer, self.tied_to = constants, buffer, tied_to
        self.value = Value(tensor, axes, tensor.dtype, trainable, self)

    @property
    def elements(self) -> Size:
        """Logical element count, as `numel()` of the unpacked parameter."""
        return product(self.axes)


# Actions of an event: allocate and free a tensor, hand a tensor's storage on to another slot, run
# kernels.
BATCH = "batch"  # source of a tensor that the caller made and holds: token ids, labels
ALLOC, FREE, TAKE, RUN = "+", "-", "=", "!"


def allocs(*tensors: Tensor) -> Steps:
    """The events that allocate tensors, in that order."""
    return tuple([(ALLOC, tensor) for tensor in tensors])


def frees(*tensors: Tensor) -> Steps:
    """The events that free tensors, in that order."""
    return tuple([(FREE, tensor) for tensor in tensors])


class Work:
    """Kernels that an event runs: the operation they belong to (None: the engine's or the
    optimizer's own) and their costs."""

    __slots__ = ("backward", "costs", "op")

    def __init__(self, op: Op | None, costs: Sequence[Cost], backward: bool) -> None:
        self.op, self.costs, self.backward = op, costs, backward


class Gradient:
    """How a gradient reaches one input: a tensor that the backward steps allocate, or the incoming
    gradient itself (`tensor` None).

    `summed`: the backward added the gradient to a buffer of the weight's own, the tensor is empty.
    `joined`: the library's one product makes it together with those of other linears that read `of`.
    `cut`: it is a slice of the tensor, to which nothing is added in place.
    """

    __slots__ = ("cut", "joined", "of", "output", "summed", "tensor")

    def __init__(self, of: Value, tensor: Tensor | None, output: int = 0) -> None:
        self.of, self.tensor, self.output = of, tensor, output
        self.summed = self.joined = self.cut = False


class Op:
    """One operation: what it allocates forward and backward, what it keeps in between, and what
    both cost."""

    __slots__ = (
        "_backward_work",
        "_work",
        "backward",
        "backward_costs",
        "costs",
        "fitting",
        "forward",
        "gradients",
        "inputs",
        "module",
        "name",
        "outputs",
        "saves",
    )

    def __init__(
        self,
        name: str,
        module: str,
        inputs: tuple[Value, ...],
        outputs: tuple[Value, ...],
        *,
        forward: Steps,
        saves: tuple[Tensor, ...],
        costs: Sequence[Cost],
        backward: Steps,
        gradients: tuple[Gradient, ...],
        backward_costs: Sequence[Cost],
    ) -> None:
        self.name, self.module, self.inputs, self.outputs = name, module, inputs, outputs
        self.forward, self.saves, self.costs = forward, saves, costs
        self.backward, self.gradients, self.backward_costs = backward, gradients, backward_costs
        # after the backward: the engine brings gradients to the inputs' shapes and types
        self.fitting: Steps = ()
        self._work: Work | None = None
        self._backward_work: Work | None = None

    def work(self, *, backward: bool) -> Work:
        """Its kernels as events run them, one object however often they do: what is alike is priced
        once."""
        if backward:
            if self._backward_work is None or self._backward_work.costs is not self.backward_costs:
                self._backward_work = Work(self, self.backward_costs, True)
            return self._backward_work
        if self._work is None or self._work.costs is not self.costs:
            self._work = Work(self, self.costs, False)
        return self._work


class Block:
    """A recorded piece of the model: what one layer (or the embedding, or head and loss) does to
    its input."""

    __slots__ = (
        "cached",
        "externals",
        "gradients",
        "graph_use",
        "handed_on",
        "input",
        "last_use",
        "name",
        "ops",
        "output",
        "returned",
        "stored",
        "stream_in",
        "stream_out",
        "symbols",
        "weights",
    )

    def __init__(
        self,
        name: str,
        ops: list[Op],
        weights: list[Weight],
        input: Value | None,
        output: Value | None,
        externals: tuple[Value, ...],
        last_use: dict[Tensor, int],
        symbols: dict[str, int],
    ) -> None:
        self.name, self.ops, self.weights = name, ops, weights
        self.input, self.output = input, output
        self.externals, self.last_use, self.symbols = externals, last_use, symbols
        # weight casts that live as long as autocast's region, as they were made
        self.cached: tuple[Tensor, ...] = ()
        # a second result, which the model's loop over layers holds
        self.returned: Tensor | None = None
        # the last operation up to which a graph that is thrown away holds a tensor
        self.graph_use: dict[Tensor, int] = {}
        self.gradients: list[Tensor] = []  # what its backward leaves in `.grad`
        # what it puts into a container of the model's, as a recomputation of it does once more
        self.stored: tuple[Value, ...] = ()
        # a second result that the next layer's checkpoint holds
        self.handed_on: Tensor | None = None
        # the second of two streams, handed from block to block: among `externals` too
        self.stream_in: Value | None = None
        self.stream_out: Value | None = None

    def copy(self) -> Block:
        """The same record, to be marked apart."""
        found = Block(
            self.name,
            self.ops,
            self.weights,
            self.input,
            self.output,
            self.externals,
            self.last_use,
            self.symbols,
        )
        found.cached, found.returned = self.cached, self.returned
        found.graph_use, found.gradients = self.graph_use, self.gradients
        found.stored, found.handed_on = self.stored, self.handed_on
        found.stream_in, found.stream_out = self.stream_in, self.stream_out
        return found
