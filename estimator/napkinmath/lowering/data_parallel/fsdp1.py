"""FSDP1 (FullyShardedDataParallel): one flat, padded parameter a unit.

Gathering makes the flat parameter whole in the type of computation, its modules use views of it,
and its backward concatenates the views' gradients into one. Sources: torch 2.13
distributed/fsdp/_flat_param.py (_use_low_precision_shard, _alloc_padded_unsharded_flat_param,
_use_unsharded_views), _runtime_utils.py (_post_backward_hook, _reduce_grad), peft 0.21
utils/other.py fsdp_auto_wrap_policy, which gives trained adapters flat parameters of their own.
Without such a policy the gradient is one of the whole layer, frozen weights too.
"""

from __future__ import annotations

from napkinmath.base.dtypes import UINT8, find_dtype
from napkinmath.base.expr import Size, ceil_div
from napkinmath.ir.costs import HostCopy, Move
from napkinmath.ir.ledger import ALLOC, FREE, RUN, TAKE, Role, Tensor, Weight, Work
from napkinmath.ir.step import Run
from napkinmath.lowering.data_parallel.flat import elements_of
from napkinmath.lowering.data_parallel.fsdp1_hooks import has_flat_adapters
from napkinmath.lowering.data_parallel.pieces import Piece, Symbols
from napkinmath.lowering.data_parallel.stored import is_sharded, on_host, stored_dtype
from napkinmath.lowering.data_parallel.streams import (
    CAST,
    REDUCED,
    TO_REDUCE,
    UNREDUCED,
    lends,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.base.dtypes import DType
    from napkinmath.ir.ledger import Event, StreamUse
    from napkinmath.lowering.data_parallel.pieces import Both
    from napkinmath.lowering.policy import Policy

SOURCE = "torch distributed/fsdp/_flat_param.py"


class FlatPiece(Piece):
    """One run's flat parameter: the rank's part of it, and what a gather and a reduction make."""

    __slots__ = ("flat_gradient", "kept_gradient", "zeros")

    def __init__(self, run: Run, policy: Policy) -> None:
        parallel = self.parallel = policy.config.parallel
        self.ranks, self.replicas = parallel.shard_degree, parallel.replica_degree
        self.symbols: Symbols = run.stage.symbols
        self.name, self.copies = run.name, run.count
        self.output = self.reduce_input = None
        # gradients of frozen views, which the split's backward fills in (split_with_sizes_backward)
        self.zeros: Tensor | None = None
        self.parts: list[Weight] = []
        self.gathered: list[Tensor] = []
        self.casts: list[Tensor] = []
        self.flat_gradient = self.reduced = self.gradient = self.host_gradient = None
        # the whole gradient that micro-steps without a reduction add up
        self.kept_gradient: Tensor | None = None
        self._flatten_all(run, policy)
        lends(self.gathered, parallel)
        self.sent = self.own_bytes()
        if policy.config.offload.parameters:
            self.casts += [
                _buffer("part from the host", p.tensor.axes, p.tensor, run) for p in self.parts
            ]
            self.host_gradient = on_host(self.gradient) if self.gradient is not None else None

    def _flatten_all(self, run: Run, policy: Policy) -> None:
        """Flat parameters of what is frozen and of what is trained, or one of both."""
        weights = [w for w in run.block.weights if is_sharded(w, policy)]
        frozen = [w for w in weights if not w.trainable and not w.constants]
        trained = [w for w in weights if w.trainable]
        if frozen and trained and has_flat_adapters(policy):
            self._flatten(frozen + trained, run, policy)
            self._split(frozen, trained)
        else:
            for group in filter(None, (frozen, trained)):
                self._flatten(group, run, policy)
        for weight in weights:
            if weight.constants:
                self._packed(weight)

    def _split(self, frozen: list[Weight], trained: list[Weight]) -> None:
        """The rank's part of a flat parameter that adapters share: the optimizer sees what is
        trained in it."""
        whole, like = self.parts.pop().tensor, self.flat_gradient
        assert like is not None
        size, module = (elements_of(frozen),), like.module
        name = "zeros for frozen weights"
        self.zeros = Tensor(name, size, like.dtype, Role.GRADIENTS, module, SOURCE)
        for group, name in ((frozen, "frozen"), (trained, "trained")):
            axes = (ceil_div(elements_of(group), self.ranks),)
            role, module = group[0].tensor.role, whole.module
            tensor = Tensor(whole.name, axes, whole.dtype, role, module, SOURCE)
            path, trains = f"{module}.{name}", group is trained
            self.parts.append(Weight(path, axes, tensor, trainable=trains, kind="flat"))

    def _flatten(self, group: list[Weight], run: Run, policy: Policy) -> None:
        computed, stored = group[0].tensor.dtype, stored_dtype(group[0], policy)
        role, module, trains = group[0].tensor.role, run.block.name, group[-1].trainable
        part = ceil_div(elements_of(group), self.ranks)
        tensor = Tensor("flat parameter", (part,), stored, role, module, SOURCE)
        path = f"{module}.{'trained' if trains else 'frozen'}"
        self.parts.append(Weight(path, (part,), tensor, trainable=trains, kind="flat"))
        if stored is not computed:
            name, role_of_cast = "part to gather", Role.COMMUNICATION
            cast = Tensor(name, (part,), computed, role_of_cast, module, SOURCE, use=CAST)
            self.casts.append(cast)
        if self.ranks > 1 or stored is not computed:
            name, size = "gathered flat parameter", (self.ranks * part,)
            self.gathered.append(Tensor(name, size, computed, role, module, SOURCE))
        if trains:
            self._flat_gradients(part, computed, stored, module)

    def _flat_gradients(self, part: Size, computed: DType, stored: DType, module: str) -> None:
        """The whole gradient of a flat parameter, and what its reduction makes of it."""
        wanted, whole = self.parallel.reduce_dtype, self.ranks * part
        reduced = computed if wanted == "auto" else find_dtype(wanted)

        def gradient(name: str, size: Size, dtype: DType, use: StreamUse) -> Tensor:
            return Tensor(name, (size,), dtype, Role.GRADIENTS, module, SOURCE, use=use)

        self.flat_gradient = gradient("gradient of the flat parameter", whole, computed, UNREDUCED)
        self.reduced = self.gradient = gradient("reduced gradients", part, reduced, REDUCED)
        if reduced is not stored:
            self.gradient = gradient("sharded gradients", part, stored, REDUCED)
        if reduced is not computed:
            name, role = "gradients to reduce", Role.COMMUNICATION
            self.reduce_input = Tensor(name, (whole,), reduced, role, module, SOURCE, use=TO_REDUCE)

    def _packed(self, weight: Weight) -> None:
        part = ceil_div(weight.tensor.nbytes, self.ranks)
        tensor = Tensor(weight.tensor.name, (part,), UINT8, Role.WEIGHTS, weight.path, SOURCE)
        self.parts.append(
            Weight(weight.path, tensor.axes, tensor, trainable=False, kind=weight.kind)
        )
        self.gathered.append(
            Tensor(
                f"gathered {weight.tensor.name}",
                (self.ranks * part,),
                UINT8,
                Role.WEIGHTS,
                weight.path,
                SOURCE,
            )
        )

    def own_bytes(self) -> tuple[Both, Both, Both]:
        gathered: Size = 0
        for tensor in self.gathered:
            gathered = gathered + tensor.nbytes
        source = self.reduce_input or self.flat_gradient
        reduced, summed = (
            tensor.nbytes if tensor is not None else 0 for tensor in (source, self.reduced)
        )
        return (gathered, 0), (reduced, 0), (summed, 0)

    # ------------------------------------------------------------ events

    @property
    def reduces(self) -> bool:
        return self.flat_gradient is not None

    def gather(self, *, backward: bool) -> list[Event]:
        """The whole flat parameter; the rank's part in the gathered type goes once the gather is
        done."""
        if not self.gathered:
            return []
        copied: list[Event] = [
            (RUN, Work(None, (HostCopy(c.nbytes, to_host=False),), backward))
            for c in self.casts
            if c.name.endswith("from the host")
        ]
        return [
            *((ALLOC, c) for c in self.casts),
            *copied,
            *((ALLOC, t) for t in self.gathered),
            *self.collective("all-gather", self.sent[0], backward=backward),
            *((FREE, c) for c in self.casts),
        ]

    def copy_out(self, *, backward: bool) -> list[Event]:
        """Nothing: modules use views."""
        return []

    def flatten_gradients(self) -> list[Event]:
        """The views' gradients are concatenated into the flat parameter's, while it is still
        whole."""
        if self.flat_gradient is None:
            return []
        copy = Work(None, (Move(2 * self.flat_gradient.nbytes),), True)
        zeros: list[Event] = [] if self.zeros is None else [(ALLOC, self.zeros)]
        return [*zeros, (ALLOC, self.flat_gradient), (RUN, copy)]

    def drop_unflattened(self, gradients: list[Tensor]) -> list[Event]:
        """The views' gradients go: all of a unit's together, for its flat parameter is one."""
        if self.flat_gradient is None:
            return []
        return [(FREE, t) for t in (*([] if self.zeros is None else [self.zeros]), *gradients)]

    def accumulate(self, gradients: list[Tensor], *, held: bool) -> list[Event]:
        """A flat gradient that is not reduced: the first one stays, later ones are added to it.

        Source: torch 2.13 distributed/fsdp/_runtime_utils.py _post_backward_hook (under no_sync the
        unsharded .grad stays).
        """
        if self.flat_gradient is None:
            return []
        flat = self.flat_gradient
        if self.kept_gradient is None:
            self.kept_gradient = Tensor(
                "whole gradient of the flat parameter",
                flat.axes,
                flat.dtype,
                Role.GRADIENTS,
                flat.module,
                SOURCE,
                use=UNREDUCED,
            )
        if not held:
            return [(TAKE, (flat, self.kept_gradient))]
        return [(RUN, Work(None, (Move(3 * flat.nbytes),), True)), (FREE, flat)]

    def copy_in(self, gradients: list[Tensor], *, held: bool = False) -> list[Event]:
        """The flat gradient, or the `held` sum, cast where the reduction has a type of its own,
        becomes the rank's part."""
        whole = self.kept_gradient if held else self.flat_gradient
        if whole is None or self.reduced is None:
            return []
        cast: list[Event] = (
            [(ALLOC, self.reduce_input), (FREE, whole)] if self.reduce_input is not None else []
        )
        source = self.reduce_input or whole
        return [*cast, (ALLOC, self.reduced), *self.reductions(), (FREE, source)]

    def settle(self, *, first: bool) -> tuple[list[Event], list[Event]]:
        """As FSDP2, but nothing of the reduction is held."""
        events, later = super().settle(first=first)
        return events + later, []

    def drop_reduce_input(self) -> list[Event]:
        """Nothing: it went with the reduction."""
        return []


def _buffer(name: str, axes: tuple[Size, ...], like: Tensor, run: Run) -> Tensor:
    return Tensor(name, axes, like.dtype, Role.COMMUNICATION, run.block.name, SOURCE)
