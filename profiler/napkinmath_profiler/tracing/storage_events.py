"""The flat record of a trace: one ``StorageRecord`` a storage, one ``StorageEvent`` a birth or a
death."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from napkinmath.base.cuda import ALLOCATION_GRANULE
from napkinmath.base.units import round_up


def rounded_bytes(num_bytes: int) -> int:
    """Bytes the CUDA caching allocator books for a request: the next multiple of its granule, and
    nothing for nothing."""
    return round_up(num_bytes, ALLOCATION_GRANULE)


class TracePhase(str, Enum):
    """What the program was doing when an event happened."""

    SETUP = "setup"
    FORWARD = "forward"
    LOSS = "loss"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    ZERO_GRAD = "zero_grad"
    BETWEEN = "between"
    """After a backward, outside the engine and any module: the loop's own code."""


class StorageRole(str, Enum):
    """What holds a storage; ``UNATTRIBUTED`` is a row of its own and never silently zero."""

    WEIGHTS = "weights"
    ADAPTER_WEIGHTS = "adapter weights"
    QUANTIZATION_CONSTANTS = "quantization constants"
    BUFFERS = "buffers"
    INPUTS = "inputs"
    GRADIENTS = "gradients"
    OPTIMIZER_STATES = "optimizer states"
    SAVED_ACTIVATIONS = "activations"
    ACTIVATION_GRADIENTS = "activation gradients"
    LOGITS = "logits"
    TEMPORARIES = "temporaries"
    WORKSPACE = "workspace"
    UNATTRIBUTED = "unattributed"


PERSISTENT_ROLES = frozenset(
    {
        StorageRole.WEIGHTS,
        StorageRole.ADAPTER_WEIGHTS,
        StorageRole.QUANTIZATION_CONSTANTS,
        StorageRole.BUFFERS,
        StorageRole.INPUTS,
        StorageRole.GRADIENTS,
        StorageRole.OPTIMIZER_STATES,
    }
)


@dataclass(slots=True, eq=False)
class StorageRecord:
    """One storage's life: who asked for it, for how many bytes, when, and when it went (``None``:
    still there)."""

    storage_id: int
    requested_bytes: int
    shape: tuple[int, ...]
    dtype: str
    op: str
    module: str
    phase: TracePhase
    step: int
    micro_step: int
    born: int
    scope: int
    role: StorageRole | None = None
    name: str = ""
    managed_bytes: int = 0
    """Bytes in unified memory instead, outside the allocator's books (paged optimizer states)."""
    of_loss: bool = False
    """In the backward: made by a node of the loss."""
    owner: str = ""
    """In the optimizer: the parameter (or the storage of one) that the operation worked on."""
    died: int | None = None
    died_phase: TracePhase | None = None
    died_scope: int | None = None
    died_op: str = ""
    died_module: str = ""

    @property
    def rounded_bytes(self) -> int:
        """Requested bytes rounded up as the allocator rounds them."""
        return rounded_bytes(self.requested_bytes)


class StorageEvent(NamedTuple):
    """A birth (``is_allocation``) or a death at one moment of the trace; its time is its index in
    the list."""

    is_allocation: bool
    storage_id: int
    phase: TracePhase
    module: str
    op: str
    step: int
    micro_step: int
