"""Adapters that PEFT moves from modules of transformers 4 to the parameters that replaced them, in
learned blocks: experts and routers.

Source: peft 0.21 utils/transformers_weight_conversion.py; lowering/expert_adapters.py has the
operations.
"""

from __future__ import annotations

from napkinmath.ir.ledger import Value, Weight
from napkinmath.ir.tape import Tape
from napkinmath.lowering.expert_adapters import adapted_experts, adapted_matrix, fold
from napkinmath.lowering.packed_parameters import unpacked_parameter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any


class MovedAdapters:
    """Those of one block: `names` has the modules of transformers 4 by the end of the parameter's
    path ('gate_up_proj': gate_proj and up_proj)."""

    def __init__(
        self, t: Tape, rows: Sequence[Sequence[Any]], names: Mapping[str, Sequence[str]]
    ) -> None:
        self.t = t
        self._gone = {name for old in names.values() for name in old}
        self._fused: dict[int, int] = {}
        self._linears: set[int] = set()
        for place, row in enumerate(rows):
            old = next((o for end, o in names.items() if f".{row[0]}".endswith(f".{end}")), ())
            ranks = t.policy.adapts_parameter(tuple(old), f"{t.module}.{row[0]}")
            if not ranks:
                continue
            if row[1] == "linear" and t.policy.format is not None:
                self._linears.add(-1 - place)
            else:
                self._fused[-1 - place] = ranks
        self._owners = {n: rows[-1 - n][0].rpartition(".")[0] for n in self._fused}
        self._factors: dict[int, tuple[Value, Value]] = {}

    def leaves_out(self, number: int, name: str) -> bool:
        """Whether the linear of a weight has no adapter, because parameters have those of its name.
        A quantized linear among them is adapted as a linear (peft 0.21 tuners/lora/model.py
        _create_new_module asks the quantizers' layers before it wraps a parameter)."""
        return name in self._gone and number not in self._linears

    def enter(self, module: str, weight: Callable[[int], Weight]) -> None:
        """Makes the factors of a module's experts before its first operation, the last parameter's
        first."""
        for number in sorted(self._fused):
            if number in self._factors or not self._is_in(number, module):
                continue
            stack = weight(number)
            if len(stack.axes) == 3:
                with self.t.scope(self._owners[number]) as frame:
                    self._factors[number] = adapted_experts(
                        self.t, frame, stack, fused=self._fused[number], transposed=False
                    )

    def touch(self, module: str) -> None:
        """Holds the factors as long as their module runs."""
        for number, factors in self._factors.items():
            if self._is_in(number, module):
                self.t.touch(*(x.tensor for x in factors))

    def value(self, number: int, weight: Weight) -> Value:
        """What an operation reads: the weight, unpacked where it is an expert stack, with its
        adapter's product where it has one."""
        if number not in self._fused:
            return unpacked_parameter(self.t, weight) if weight.kind == "experts" else weight.value
        with self.t.scope(self._owners[number]):
            if number in self._factors:
                return fold(self.t, weight, *self._factors[number])
            return adapted_matrix(self.t, weight)

    def _is_in(self, number: int, module: str) -> bool:
        owner = self._owners[number]
        return module == owner or module.startswith(f"{owner}.")
