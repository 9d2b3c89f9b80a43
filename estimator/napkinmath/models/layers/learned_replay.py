"""Learned blocks recorded on a tape: operation by operation as the library was seen to run them.

Composites (linears, embeddings, attention, masks, dropout) go through the same functions as those
of hand-written layers, so that adapters, quantized weights and kernels act alike.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, DType, find_dtype
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import AdapterKind
from napkinmath.ir.costs import Gemm, Move, traffic
from napkinmath.ir.ledger import Gradient, Role, Tensor, Value, Weight
from napkinmath.ir.tape import Tape
from napkinmath.lowering.adapters import lora_weight
from napkinmath.models.layers.attend import dense_gradients
from napkinmath.models.layers.learned_composites import COMPOSITES
from napkinmath.models.layers.learned_experts import MovedAdapters
from napkinmath.models.layers.learned_sizes import size_of
from napkinmath.models.layers.masks import mask_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from napkinmath.config.train_config import AdapterConfig
    from napkinmath.ir.costs import Cost

CHAIN, LINEAR, SUBCLASS = "x", "linear", "linear subclass"
CARRIED = "carried"
"""Begins the name of what a layer makes for the next ones: each layer's is kept under a number."""
ENCODED = "encoder states"
"""What an encoder without a norm behind its layers hands to the layers of its decoder."""
FULL_MASK, SLIDING_MASK = "full mask", "sliding mask"


class LearnedReplay:
    """One block on a tape. `block` is its data under the policy's variant; values are numbered as
    there."""

    def __init__(
        self,
        t: Tape,
        block: Mapping[str, Any],
        shared: dict[str, Value],
        *,
        padded: bool = False,
        eager_only: bool = False,
        moved: Mapping[str, Sequence[str]] | None = None,
        tied_to: str = "",
    ) -> None:
        self.t, self.block, self.shared, self.padded = t, block, shared, padded
        self.values: list[Value] = []
        self._rows: list[Sequence[Any]] = []
        self.eager_only, self.tied_to = eager_only, tied_to
        self.moved = MovedAdapters(t, block["weights"], moved or {})

    def run(self, x: Value | None) -> Value | None:
        """Records every operation; returns what the next block reads."""
        uncached: set[int] = set()
        for name in self.block["inputs"]:
            self.values.append(self._input(name, x))
            self._rows.append(())  # nothing is written by it
        for op in self.block["ops"]:
            self.moved.enter(op[1], self.weight)
            number = len(self.values)
            self._op(op)
            self.moved.touch(op[1])
            self._rows += op[3]
            held: list[int] = op[5]
            self.t.touch(*(self.values[number - back].tensor for back in held))
            if self._is_uncached(op, number):
                uncached.add(number)
        for number in range(len(self.block["weights"])):
            self.weight(-1 - number)
        if self.t.policy.adapter is not None:
            self._adapters_that_never_run(self.t.policy.adapter)
        for number, label in self.block["shares"]:
            self.shared[self._numbered(label)] = self.values[number]
        outliving: list[int] = self.block["outlives"]
        outliving = [number for number in outliving if number not in uncached]
        self.t.outliving += [self.values[number].tensor for number in outliving]
        returned: list[int] = self.block.get("returns", [])
        for number in returned:
            self.t.hand_back(self.values[number])
        output: int | None = self.block["output"]
        return None if output is None else self.values[output]

    def _is_uncached(self, op: Sequence[Any], number: int) -> bool:
        """Whether an operation is autocast's cast of a frozen weight, of which it caches none
        (aten/src/ATen/autocast_mode.cpp cached_cast)."""
        reads_weight = bool(op[2]) and op[2][0] < 0  # of a constant, nothing that was recorded
        of_weight = self.t.policy.autocast is not None and op[0] == "_to_copy" and reads_weight
        return of_weight and not self.values[number].requires_grad

    def _adapters_that_never_run(self, adapter: AdapterConfig) -> None:
        """Those of a subclass of nn.Linear whose weight its owner multiplies itself, past the
        adapter around it (torch nn/modules/activation.py MultiheadAttention.out_proj)."""
        called = {op[2][1] for op in self.block["ops"] if op[0] == LINEAR}
        for place, (path, kind, *_, axes) in enumerate(self.block["weights"]):
            if kind != SUBCLASS or -1 - place in called or adapter.kind is not AdapterKind.LORA:
                continue
            outputs, inputs = (size_of(n) for n in axes)
            with self.t.scope(path.rpartition(".")[0]):
                if self.t.policy.targets(self.t.module, kind):
                    with self.t.scope("lora"):
                        lora_weight(self.t, "lora_A.weight", (adapter.rank, inputs), False)
                        lora_weight(self.t, "lora_B.weight", (outputs, adapter.rank), False)

    def _input(self, name: str, x: Value | None) -> Value:
        if name == CHAIN:
            assert x is not None
            return x
        if name in (FULL_MASK, SLIDING_MASK):
            sliding = (key for key in self.shared if key.startswith(mask_name(1)[:-1]))
            return self.shared[mask_name(0) if name == FULL_MASK else next(sliding)]
        if name.startswith(CARRIED):
            return self.shared[self._numbered(name, latest=True)]
        return self.shared[name]

    def _numbered(self, label: str, *, latest: bool = False) -> str:
        """The key of a shared value: of what layers carry, a new one or the latest."""
        if not label.startswith(CARRIED):
            return label
        count = sum(key.startswith(f"{label} of ") for key in self.shared)
        return f"{label} of {count - latest}"

    def weight(self, number: int) -> Weight:
        """The weight that a negative number stands for, declared where it is not."""
        path, kind, dtype, buffer, axes = self.block["weights"][-1 - number]
        owner, _, leaf = path.rpartition(".")
        with self.t.scope(owner):
            return self.t.weight(
                leaf,
                tuple(size_of(n) for n in axes),
                kind=kind,
                dtype=find_dtype(dtype) if dtype else None,
                buffer=bool(buffer),
                tied_to=self._owner(-1 - number, path, kind),
            )

    def _owner(self, place: int, path: str, kind: str) -> str:
        """The weight that this one is: the head's embedding, or itself in an earlier block."""
        if kind == "head":
            return self.tied_to
        again: Sequence[int] = self.block.get("again", ())
        return path if place in again else ""

    def _read(self, number: int) -> Value:
        if number >= 0:
            return self.values[number]
        return self.moved.value(number, self.weight(number))

    def dtype(self, name: str) -> DType:
        """A recorded type as the policy has it: half types stand for one another."""
        found = find_dtype(name)
        if found is not BF16:
            return found
        policy = self.t.policy
        return policy.autocast or policy.compute_dtype

    def _op(self, op: Sequence[Any]) -> None:
        name, module, back, outs, facts, _ = op
        read = [n if n < 0 else len(self.values) - n for n in back]
        composite = COMPOSITES.get(name)
        if composite is not None and "branches" not in facts:
            made = composite(self, module, read, outs, facts)
            self.values += made
            return
        inputs = [self._read(n) for n in read]
        with self.t.scope(module):
            self.values += _Generic(self, name, inputs, outs, facts, read).record()

    def row(self, number: int) -> Sequence[Any]:
        """Extents and type of a weight or of what an operation made, as they were recorded."""
        if number < 0:
            _, _, dtype, _, axes = self.block["weights"][-1 - number]
            return axes, dtype
        return self._rows[number]


class _Generic:
    """One operation as it was seen alone: what it makes, keeps and hands back."""

    def __init__(
        self,
        replay: LearnedReplay,
        name: str,
        inputs: list[Value],
        outs: Sequence[Any],
        facts: Mapping[str, Any],
        read: Sequence[int],
    ) -> None:
        self.replay, self.t, self.name, self.inputs = replay, replay.t, name, inputs
        self.outs, self.facts, self.read = outs, facts, read

    def record(self) -> list[Value]:
        """Appends it to the tape; returns its outputs."""
        made = self._tensors(self.facts["made"], self.name, Role.ACTIVATIONS)
        branch = self._branch()
        outputs: list[Value] = []
        for index, (axes, dtype, source) in enumerate(self.outs):
            sizes = tuple(size_of(n) for n in axes)
            from_input = source[0] == "i"
            number = int(source[1:])
            tensor = self.inputs[number].tensor if from_input else made[number]
            needs = branch is not None and branch[1][index : index + 1] == "1"
            outputs.append(Value(tensor, sizes, self.replay.dtype(dtype), needs))
        if branch is None and not made:
            for value in (*self.inputs, *outputs):  # a view without a node
                if self.t.ops:
                    self.t.touch(value.tensor)
            return outputs
        self._append(made, outputs, branch)
        return outputs

    def _branch(self) -> Sequence[Any] | None:
        """What was seen with these inputs needing a gradient; None where none does."""
        branches = self.facts["branches"]
        # recorded with every weight trained: what had no gradient then was detached
        seen = [any(bits[i] == "1" for bits in branches) for i in range(len(self.inputs))]
        both = zip(self.inputs, seen, strict=True)
        needing = "".join("1" if x.requires_grad and had else "0" for x, had in both)
        if "1" not in needing:
            return None
        found = branches.get(needing)
        if found is not None:
            return found if "1" in found[1] else None
        covering = [
            bits
            for bits in branches
            if all(b == "1" or n == "0" for b, n in zip(bits, needing, strict=True))
        ]
        if not covering:
            raise InputError(
                f"operation {self.name} was learned without these gradients together:"
                f" {needing}, which this training asks for"
            )
        return branches[min(covering, key=lambda bits: bits.count("1"))]

    def _tensors(self, rows: Sequence[Any], name: str, role: Role) -> list[Tensor]:
        dtype = self.replay.dtype
        return [
            self.t.tensor(name, tuple(size_of(n) for n in axes), dtype(kind), role)
            for axes, kind in map(self._row, rows)
        ]

    def _row(self, written: Any) -> tuple[Sequence[Any], str]:
        """Extents and type of a storage: of its own, of a tensor of the operation ('o0', 'i1'), or
        a tensor's extents with another type."""
        name, dtype = (written, "") if isinstance(written, str) else written
        if not isinstance(name, str):
            return name, dtype
        place = int(name[1:])
        found = self.outs[place] if name[0] == "o" else self.replay.row(self.read[place])
        return found[0], dtype or found[1]

    def _append(
        self, made: list[Tensor], outputs: list[Value], branch: Sequence[Any] | None
    ) -> None:
        steps = _steps(self.facts["steps"], made) if "steps" in self.facts else None
        forward = tuple(("+", x) for x in made) if steps is None else steps
        kept = self._tensors(branch[6], f"{self.name} keeps", Role.ACTIVATIONS) if branch else []
        forward = (*(("+", x) for x in kept), *forward)
        if branch is None:
            self.t.append(
                self.name, self.inputs, outputs, forward=forward, costs=self._costs(outputs)
            )
            return
        saves, _, rows, written, handed, kernels, _ = branch
        backward_made = self._tensors(rows, f"in backward of {self.name}", Role.WORKSPACE)
        gradients, casts = self._gradients(handed, backward_made, outputs)
        self.t.append(
            self.name,
            self.inputs,
            outputs,
            forward=forward,
            saves=self._saved(saves, made, outputs, kept),
            costs=self._costs(outputs),
            backward=(*_steps(written, backward_made), *(("+", x) for x in casts)),
            gradients=gradients,
            backward_costs=self._backward_costs(outputs, backward_made, kernels),
        )

    def _saved(
        self, saves: str, made: list[Tensor], outputs: list[Value], kept: list[Tensor]
    ) -> list[Tensor]:
        found: list[Tensor] = []
        for word in saves.split():
            kind, number = word[0], int(word[1:])
            if kind in "io":
                values = self.inputs if kind == "i" else outputs
                found.append(values[number].tensor)
            else:
                found.append((made if kind == "m" else kept)[number])
        return found

    def _gradients(
        self, handed: str, made: list[Tensor], outputs: list[Value]
    ) -> tuple[list[Gradient], list[Tensor]]:
        """Gradients, and those among them that are casts: a gradient handed through has the type
        of the output, which autograd casts for an input of a narrower one."""
        gradients: list[Gradient] = []
        casts: list[Tensor] = []
        for word in handed.split():
            position, _, number = word.partition(":")
            value, place = self.inputs[int(position)], int(number)
            if not value.requires_grad:
                continue
            own = self.t.gradient_of(value)
            if place < 0:
                is_cast = value.dtype is not outputs[-1 - place].dtype
                casts += [own] * is_cast
                gradients.append(Gradient(value, own if is_cast else None, -1 - place))
                continue
            tensor = made[place]
            tensor.role, tensor.name, tensor.module = own.role, own.name, own.module
            gradients.append(Gradient(value, tensor))
        return gradients, casts

    def _costs(self, outputs: list[Value]) -> tuple[Cost, ...]:
        moved = traffic(*self.inputs) + traffic(*outputs)
        product = self.facts.get("product")
        if product is None:
            return (Move(moved),) if self.facts["made"] or not outputs else ()
        m, n, k, count = (size_of(x) for x in product)
        return (Gemm(m, n, k, outputs[0].dtype, count),)

    def _backward_costs(
        self, outputs: list[Value], made: list[Tensor], kernels: int
    ) -> tuple[Cost, ...]:
        if not kernels:
            return ()
        product = self.facts.get("product")
        if product is not None:
            m, n, k, count = (size_of(x) for x in product)
            dtype = outputs[0].dtype
            return (Gemm(m, k, n, dtype, count), Gemm(k, n, m, dtype, count))
        moved = traffic(*outputs) * 2
        for tensor in made:
            moved = moved + tensor.nbytes
        return (Move(moved, kernels),)


def _steps(written: str, tensors: Sequence[Tensor]) -> tuple[tuple[str, Tensor], ...]:
    found: list[tuple[str, Tensor]] = []
    for sign in ("+", "-"):
        written = written.replace(sign, f" {sign}")
    for word in written.split():
        found.append((word[0], tensors[int(word[1:])]))
    return tuple(found)


def gradients_lie_by_heads(t: Tape, block: Mapping[str, Any], shared: dict[str, Value]) -> bool:
    """Whether the kernel of the block's attention hands back gradients of queries and keys with the
    heads outside the rows."""
    for op in block["ops"]:
        if op[0] not in ("attend", "sdpa"):
            continue
        facts, outs = op[4], op[3]
        return dense_gradients(
            t,
            t.policy.autocast or t.policy.parameter_dtype("norm"),
            shared,
            grouped=facts["grouped"],
            window=t.known(size_of(facts["window"][0])) if "window" in facts else 0,
            size=size_of(outs[0][0][-1]),
        )
    return False
