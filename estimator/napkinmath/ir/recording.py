"""What recording asks of the policy that it runs under, and the readers of a step of the policy that
made it: for type checkers alone.

The policy itself is above (lowering/policy.py). What it holds of the catalog and of parallelism is
seen here only as far as operations, layers and readers ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from napkinmath.base.dtypes import DType
from napkinmath.base.expr import Size
from napkinmath.config.train_config import AdapterConfig, AdapterKind, Attention, TrainConfig
from napkinmath.ir.ledger import Role, Value, Weight
from napkinmath.ir.stack import Stack
from napkinmath.ir.tape import Scope, Tape
from napkinmath.ir.weight_format import WeightFormat


class ChosenOptimizer(Protocol):
    """The row of the optimizer that updates."""

    @property
    def name(self) -> str:
        """As on the command line."""
        ...

    @property
    def foreach_copies(self) -> int:
        """Lists of parameter size that a foreach step holds."""
        ...


class RecordingPatch(Protocol):
    """The set of patched operations that replaces the library's (catalog/kernels.py)."""

    @property
    def name(self) -> str:
        """As `--kernels` has it."""
        ...

    @property
    def norm_in_place(self) -> bool:
        """Whether a norm's backward writes into its incoming gradient."""
        ...

    @property
    def defers_logits(self) -> bool:
        """Whether a trainer's own loss of a model's logits does not make them."""
        ...

    @property
    def adapted_head(self) -> str:
        """What its loss does with LoRA on the head: 'run', 'skipped', or ''."""
        ...

    @property
    def repeats_keys(self) -> bool:
        """Whether heads are repeated where the GPU has no FlashAttention."""
        ...

    @property
    def norm_processors(self) -> int: ...
    @property
    def rope(self) -> str: ...
    @property
    def parts(self) -> tuple[str, ...]:
        """The operations that it replaces."""
        ...

    @property
    def input_in_place(self) -> bool: ...
    @property
    def own_copies(self) -> bool: ...
    @property
    def gate_in_place(self) -> bool: ...
    @property
    def copies_halves(self) -> bool: ...
    @property
    def adapters(self) -> bool: ...
    @property
    def adapters_only(self) -> bool: ...


class RecordingRule(Protocol):
    """What a precision means (lowering/precision.py)."""

    @property
    def parameters(self) -> DType:
        """As stored."""
        ...

    @property
    def autocast(self) -> DType | None:
        """As computed; None: as stored."""
        ...

    @property
    def gemm(self) -> str: ...
    @property
    def fp8_block(self) -> int | None: ...
    @property
    def fp8_rows(self) -> bool: ...
    @property
    def meaning(self) -> str:
        """One line for people."""
        ...


class SplitTensors(Protocol):
    """The borders of what tensor parallelism splits (lowering/parallel/tensor.py)."""

    @property
    def degree(self) -> int:
        """Ranks that a tensor is split over."""
        ...

    def splits(self, size: Size) -> bool: ...
    def enter(self, t: Tape, x: Value) -> Value: ...
    def whole_sequence(self, t: Tape, x: Value) -> Value: ...
    def leave(self, t: Tape, x: Value) -> Value: ...
    def splits_loss(self, logits: Value) -> bool: ...
    def loss(self, t: Tape, logits: Value) -> Value: ...


class SplitContext(Protocol):
    """How attention reads what other ranks hold of a sequence (lowering/parallel/context.py)."""

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
    ) -> Value: ...


class SplitExperts(Protocol):
    """How tokens reach experts on other ranks (lowering/parallel/expert.py)."""

    @property
    def once(self) -> bool:
        """A token travels once to a rank, not once for each of its experts."""
        ...

    @property
    def own_tokens(self) -> bool:
        """Each tensor-parallel rank routes and sends its share of the sequence."""
        ...

    def experts(self, count: Size) -> Size: ...
    def rows(self, sent: Size) -> Size: ...
    def tokens(self, t: Tape, tokens: Size, limit: tuple[int, int] | None) -> Size: ...
    def exchanged(self, t: Tape, x: Value, rows: Size) -> Value: ...
    def arrived(self, sent: Size) -> Size: ...
    def gathered(self, t: Tape, x: Value) -> Value: ...
    def scattered(self, t: Tape, x: Value) -> Value: ...
    def sent_once(
        self, t: Tape, x: Value, rows: Size, tokens: Size, limit: tuple[int, int] | None
    ) -> Value: ...
    def dispatch(
        self, t: Tape, frame: Scope, x: Value, indices: Value, rows: Size, count: Size
    ) -> tuple[Value, Value]: ...
    def combine(
        self, t: Tape, x: Value, weights: Value, order: Value, rows: Size, tokens: Size
    ) -> Value: ...


class RecordingPolicy(Protocol):
    """The decisions of a training configuration for every weight and linear of a model
    (lowering/policy.py)."""

    @property
    def config(self) -> TrainConfig:
        """What the user asked for, defaults filled in."""
        ...

    @property
    def stack(self) -> Stack:
        """The training library's row."""
        ...

    @property
    def patch(self) -> RecordingPatch | None:
        """None: the library's own operations."""
        ...

    def patches(self, part: str) -> bool:
        """Whether the patch replaces that operation (catalog/kernels.py KernelSet.parts)."""
        ...

    @property
    def adapter(self) -> AdapterConfig | None:
        """None: no adapters."""
        ...

    @property
    def format(self) -> WeightFormat | None:
        """Of quantized weights; None: none are."""
        ...

    @property
    def tensor(self) -> SplitTensors | None:
        """None: no tensor parallelism."""
        ...

    @property
    def context(self) -> SplitContext | None:
        """None: no context parallelism."""
        ...

    @property
    def experts(self) -> SplitExperts | None:
        """None: no expert parallelism."""
        ...

    @property
    def rule(self) -> RecordingRule:
        """The types that a rank computes in."""
        ...

    @property
    def loaded_rule(self) -> RecordingRule:
        """The types as loaded."""
        ...

    @property
    def autocast(self) -> DType | None:
        """The type that autocast computes in; None: it is off."""
        ...

    @property
    def compute_dtype(self) -> DType: ...
    @property
    def product_dtype(self) -> DType: ...
    @property
    def loaded_dtype(self) -> DType: ...
    @property
    def adapter_dtype(self) -> DType: ...
    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        ...

    @property
    def trains_adapters(self) -> bool:
        """Whether adapters are trained beside frozen weights."""
        ...

    @property
    def recomputes(self) -> bool: ...
    @property
    def reentrant(self) -> bool: ...
    @property
    def shards(self) -> bool: ...
    @property
    def has_whole_weights(self) -> bool: ...
    @property
    def inputs_require_grad(self) -> bool: ...
    @property
    def pixels_require_grad(self) -> bool: ...
    @property
    def holds_logits(self) -> bool: ...
    @property
    def masks_packed(self) -> bool: ...
    @property
    def packed_length(self) -> int: ...
    @property
    def sequence_length(self) -> Size: ...
    @property
    def processors(self) -> int:
        """Streaming multiprocessors of the GPU."""
        ...

    @property
    def sdpa_choice(self) -> Attention:
        """The attention that was asked for, or the stack's."""
        ...

    def reaches(self, symbol: str, value: int) -> bool: ...
    def bound_length(self, length: Size, sizes: Mapping[str, int]) -> int | None: ...
    def virtual_tokens(self, kind: AdapterKind) -> int: ...
    def targets(self, path: str, kind: str) -> bool: ...
    def adapts_parameter(self, names: tuple[str, ...], path: str) -> int: ...
    def parameter_dtype(self, kind: str) -> DType: ...
    def attended_dtype(self, dtype: DType) -> DType: ...
    def sdpa_kernel(self, dtype: DType, *, head_size: int, masked: bool, grouped: bool) -> str: ...
    def keeps_original(self, weight: Weight) -> bool: ...
    def keeps_fp8(self, kind: str) -> bool: ...
    def sums_in_product(self, weight: Weight) -> bool: ...

    @property
    def main_gradient_dtype(self) -> DType: ...
    def make_weight(
        self,
        path: str,
        axes: tuple[Size, ...],
        *,
        kind: str,
        dtype: DType | None,
        buffer: bool,
        tied_to: str,
        whole: bool = False,
    ) -> Weight: ...
    def embedding(self, t: Tape, ids: Value, found: Value, rows: Size) -> Value: ...
    def linear(
        self,
        t: Tape,
        x: Value,
        outputs: Size,
        *,
        bias: bool,
        kind: str,
        role: Role,
        weight: Weight | None,
    ) -> Value: ...
