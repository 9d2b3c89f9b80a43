"""ParallelConfig: how one training step is spread over many GPUs; degrees have Megatron's names."""

from __future__ import annotations

from enum import Enum

from napkinmath.base.divisors import divisors, largest_divisor
from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record
from napkinmath.config.pipeline_schedules import MOST_CHUNKS, PipelineSchedule
from napkinmath.config.zero_config import ZeroConfig

MAX_RANKS = 1 << 20
MAX_MICRO_STEPS = 1 << 40  # more than any run has tokens
ASSUMED_NODE = 8  # GPUs of a node where no cluster says otherwise
MIXED_DTYPES = ("auto", "fp32", "bf16", "fp16")


class DataParallel(str, Enum):
    """Who keeps what of a model that every data-parallel rank trains."""

    NONE = "none"
    DP = "dp"
    DDP = "ddp"
    ZERO1 = "zero1"
    ZERO2 = "zero2"
    ZERO3 = "zero3"
    FSDP1 = "fsdp1"
    FSDP2 = "fsdp2"

    @property
    def is_zero(self) -> bool:
        """Whether it is one of DeepSpeed's ZeRO stages."""
        return self in (DataParallel.ZERO1, DataParallel.ZERO2, DataParallel.ZERO3)

    @property
    def is_fsdp(self) -> bool:
        """Whether it is FSDP, of either version."""
        return self in (DataParallel.FSDP1, DataParallel.FSDP2)


class Sharding(str, Enum):
    """FSDP's sharding strategies."""

    FULL = "full"
    """Parameters, gradients and states; parameters are gathered again for the backward."""
    GRAD_OP = "grad-op"
    """Parameters stay gathered from the forward to the end of the backward."""
    HYBRID = "hybrid"
    """FULL within a group of ranks (a node), replicated over the groups."""
    HYBRID_GRAD_OP = "hybrid-grad-op"
    """GRAD_OP within a group, replicated over the groups."""
    NO_SHARD = "no-shard"
    """Nothing: FSDP as DDP."""


class ContextParallel(str, Enum):
    """How attention reads the parts of a sequence that other ranks hold."""

    RING = "ring"
    ULYSSES = "ulysses"


def check_micro_steps(name: str, number: int) -> None:
    """Raises InputError above MAX_MICRO_STEPS."""
    if number > MAX_MICRO_STEPS:
        raise InputError(
            f"{name}={number} is more than the {MAX_MICRO_STEPS} micro-steps that are priced; use"
            " larger micro-batches or more data-parallel ranks"
        )


class ParallelConfig(Record):
    """The mesh of ranks and what each axis does. The default is one GPU."""

    data_parallel: DataParallel = DataParallel.NONE
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    """Ranks among which the experts are spread: of the tensor-, context- and data-parallel axes
    together, without those that share one expert."""
    expert_tensor_parallel_size: int = 0
    """Ranks that share the products of one expert; 0 is all tensor-parallel ranks."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest expert-parallel rank over the mean."""
    expert_capacity: float = 0.0
    """Capacity factor: rows beyond it times the mean are dropped and buffers are padded to it; 0
    drops none."""
    expert_overlap: bool | None = None
    """Expert all-to-alls run beside the work of other micro-batches; None: as the pipeline schedule
    does."""
    expert_tokens_once: bool | None = None
    """A token travels once to a rank with some of its experts (DeepEP); None: as the stack does."""
    expert_tokens_gathered: bool = False
    """Every rank gathers the tokens of all among which experts are spread, and sums their outputs."""
    sequence_parallel: bool = False
    """Norms and dropout on s/t of the sequence between tensor-parallel regions."""
    tensor_overlap: bool | None = None
    """Gathers and reductions along the sequence run in chunks beside the products of their linears;
    None: as the stack does."""
    context_parallel: ContextParallel = ContextParallel.RING
    pipeline_schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    num_micro_batches: int = 0
    """Micro-batches in a pipelined step; 0 is gradient_accumulation_steps."""
    virtual_pipeline_size: int = 1
    """Model chunks on each pipeline rank, as many as the schedule takes."""

    sharding: Sharding = Sharding.FULL
    shard_size: int = 0
    """Data-parallel ranks that hold one copy together; 0 is all, or with a hybrid strategy the GPUs
    of a node."""
    reshard_after_forward: bool | None = None
    """FSDP2's own switch; None: as the sharding strategy says."""
    wrap: str = "auto"
    """Which modules are FSDP units: 'carved' (layers, embedding, norm with head), 'layer' (layers,
    all else is the root's), 'none' (the whole model is one); 'auto' is what accelerate does: carved
    with FSDP2, layer with FSDP1."""
    forward_prefetch: bool = False
    """FSDP1: the next unit is gathered before the current one runs."""
    backward_prefetch: bool = True
    limit_all_gathers: bool = True
    """FSDP1: at most two units are gathered at a time."""
    sharded_dtype: str = "auto"
    """Type of sharded parameters: 'auto' is fp32 for what is trained in mixed precision, as
    accelerate upcasts it."""
    reduce_dtype: str = "auto"
    """Type of the gradients' reduction: 'auto' is that of computation."""
    sync_each_batch: bool = False
    """Gradients are reduced in every micro-step instead of the last one only, which keeps them
    unsharded in between."""

    bucket_mb: int = 25
    """DDP's bucket_cap_mb."""
    gradient_as_bucket_view: bool = False
    zero: ZeroConfig = ZeroConfig()

    nvme: tuple[str, ...] = ()
    """What of the offloaded lies on NVMe instead of in host memory: 'optimizer', 'parameters'."""
    broadcast_loading: bool = False
    """Only one rank of a node reads the checkpoint and broadcasts it (accelerate's
    cpu_ram_efficient_loading)."""
    full_state_dict: bool = False
    """A checkpoint is gathered on rank 0 instead of being saved in shards."""

    @property
    def hides_experts(self) -> bool:
        """Whether expert all-to-alls run beside the work of other micro-batches."""
        if self.expert_overlap is None:
            return self.pipeline_parallel_size > 1 and self.pipeline_schedule.record.hides_experts
        return self.expert_overlap

    def validate(self) -> None:
        """Raises InputError for degrees, names and sizes that do not go together."""
        self._validate_fields()
        self._validate_sharding()
        self._validate_mesh()
        self._validate_traffic()

    def _validate_fields(self) -> None:
        for name in _DEGREES:
            value = getattr(self, name)
            low = 0 if name == "expert_tensor_parallel_size" else 1
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or not low <= value <= MAX_RANKS:
                raise InputError(
                    f"{name}={shown(value)} is not a number of ranks; use {low} to {MAX_RANKS}"
                )
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise InputError(
                    f"{name}={shown(getattr(self, name))} is unknown; use one of"
                    f" {', '.join(m.value for m in kind)}"
                )

    def _validate_traffic(self) -> None:
        for name in ("sharded_dtype", "reduce_dtype"):
            if getattr(self, name) not in MIXED_DTYPES:
                raise InputError(
                    f"{name}={shown(getattr(self, name))} is unknown; use one of"
                    f" {', '.join(MIXED_DTYPES)}"
                )
        if self.wrap not in ("auto", "carved", "layer", "none"):
            raise InputError(f"wrap={shown(self.wrap)} is unknown; use auto, carved, layer or none")
        if not 1 <= self.bucket_mb <= 1 << 20:
            raise InputError(
                f"bucket_mb={shown(self.bucket_mb)} is out of range; use 1 or more, usually 25"
            )
        for name in self.nvme:
            if name not in ("optimizer", "parameters"):
                raise InputError(f"nvme={shown(name)} is unknown; use optimizer or parameters")

    def _validate_sharding(self) -> None:
        size, kind = self.data_parallel_size, self.data_parallel
        if size > 1 and kind is DataParallel.NONE:
            choices = ", ".join(m.value for m in DataParallel if m is not DataParallel.NONE)
            raise InputError(
                f"{size} data-parallel ranks need a way to share the work; set data_parallel to one of"
                f" {choices}"
            )
        if self.sharding is not Sharding.FULL and not kind.is_fsdp:
            raise InputError(
                f"sharding={self.sharding.value} is FSDP's, not {kind.value}'s; use data_parallel"
                " fsdp1 or fsdp2"
            )
        if self.shard_size < 0 or (self.shard_size and size % self.shard_size):
            raise InputError(
                f"shard_size={self.shard_size} does not divide {size} data-parallel ranks; use one"
                f" of {divisors(size)}"
            )
        self.zero.validate_groups(kind.value, size)

    def _validate_mesh(self) -> None:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise InputError(
                "sequence_parallel splits between tensor-parallel ranks; set tensor_parallel_size"
                " to 2 or more"
            )
        if self.tensor_overlap and not self.sequence_parallel:
            raise InputError(
                "tensor_overlap hides collectives along the sequence; set tensor_parallel_size to 2"
                " or more and sequence_parallel"
            )
        sent = (self.expert_overlap, self.expert_tokens_once, self.expert_tokens_gathered)
        if any(sent) and not self.spreads_experts:
            raise InputError(
                "expert_overlap, expert_tokens_once and expert_tokens_gathered are of tokens between"
                " expert-parallel ranks; set expert_parallel_size to 2 or more"
            )
        if self.expert_tokens_once and self.expert_tokens_gathered:
            raise InputError("expert_tokens_once and expert_tokens_gathered exclude each other")
        self._validate_experts()
        if self.virtual_pipeline_size < 1 or self.num_micro_batches < 0:
            raise InputError(
                "virtual_pipeline_size is 1 or more, num_micro_batches 0 (the accumulation steps)"
                " or more"
            )
        check_micro_steps("num_micro_batches", self.num_micro_batches)
        self._validate_chunks()

    def _validate_experts(self) -> None:
        size, tensor = self.expert_parallel_size, self.expert_tensor_ranks
        ranks = self.data_parallel_size * self.context_parallel_size * self.tensor_parallel_size
        if ranks % tensor:
            raise InputError(
                f"expert_tensor_parallel_size={tensor} does not divide {ranks} ranks that are no"
                f" pipeline stages; use one of {divisors(ranks)}"
            )
        ranks //= tensor
        if ranks % size:
            alone = ranks * tensor % size == 0 and tensor > 1
            raise InputError(
                f"expert_parallel_size={size} does not divide {ranks} data-"
                f" and context-parallel rank{'s' if ranks > 1 else ''}; use"
                f" {'one of ' if ranks > 1 else ''}{divisors(ranks)}"
                f"{', or expert_tensor_parallel_size=1' if alone else ''}"
            )
        if tensor != self.tensor_parallel_size > 1 and not self.sequence_parallel:
            raise InputError(
                f"expert_tensor_parallel_size={tensor} beside tensor_parallel_size="
                f"{self.tensor_parallel_size} sends each rank's own tokens; add sequence_parallel"
            )
        copied = self.spreads_experts and ranks > size
        if copied and self.data_parallel is DataParallel.NONE:
            raise InputError(
                f"an expert is on {ranks // size} ranks, which sum its gradients; set data_parallel"
                " to zero1 or ddp"
            )
        if self.expert_imbalance < 1 or self.expert_capacity < 0:
            raise InputError(
                "expert_imbalance is 1 (even) or more, expert_capacity 0 (no limit) or more, e.g."
                " 1.25"
            )

    def _validate_chunks(self) -> None:
        row, chunks = self.pipeline_schedule.record, self.virtual_pipeline_size
        if 1 < row.least_chunks != chunks and self.pipeline_parallel_size > 1:
            raise InputError(
                f"virtual_pipeline_size={chunks} is not what pipeline_schedule={row.name} takes; use"
                f" {row.usual_chunks}"
            )
        if chunks > row.most_chunks:
            others = [s.value for s in PipelineSchedule if s.record.most_chunks >= chunks]
            way = f"needs pipeline_schedule {' or '.join(others)}"
            many = f"is more than the {MOST_CHUNKS} chunks of a rank that are priced"
            raise InputError(f"virtual_pipeline_size={chunks} {way if others else many}")

    # ------------------------------------------------------------ degrees

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return (
            self.data_parallel_size
            * self.tensor_parallel_size
            * self.pipeline_parallel_size
            * self.context_parallel_size
        )

    @property
    def expert_tensor_ranks(self) -> int:
        """Ranks that share the products of one expert."""
        return self.expert_tensor_parallel_size or self.tensor_parallel_size

    @property
    def spreads_experts(self) -> bool:
        """Whether ranks that hold the same experts are others than those that hold the same of all
        else."""
        return (
            self.expert_parallel_size > 1 or self.expert_tensor_ranks != self.tensor_parallel_size
        )

    def experts_over(self, ranks: int) -> int:
        """Of `ranks` that share all else, each with its tensor-parallel ranks: how many hold the
        same experts.

        Sources: Megatron-LM core/parallel_state.py (expert_decoder_rank_generator), torchtitan
        distributed/parallel_dims.py (efsdp).
        """
        apart = self.expert_tensor_ranks * self.expert_parallel_size
        return max(1, ranks * self.tensor_parallel_size // apart)

    @property
    def is_hybrid(self) -> bool:
        """Whether shards are replicated over groups of ranks."""
        return self.sharding in (Sharding.HYBRID, Sharding.HYBRID_GRAD_OP)

    @property
    def shards(self) -> bool:
        """Whether data-parallel ranks have parts of something."""
        kind = self.data_parallel
        return (kind.is_fsdp or kind.is_zero) and self.sharding is not Sharding.NO_SHARD

    @property
    def shard_degree(self) -> int:
        """Ranks that hold one copy of what is sharded: of the data-parallel axis, each with all its
        context-parallel ranks.

        Sources: torchtitan distributed/parallel_dims.py (the mesh dp_shard_cp), DeepSpeed
        runtime/engine.py (seq_data_parallel_group).
        """
        size, context = self.data_parallel_size, self.context_parallel_size
        if not self.shards:
            return 1
        if self.zero.mics_shard_size:
            return self.zero.mics_shard_size
        if self.shard_size:
            return self.shard_size * context
        return (largest_divisor(size, ASSUMED_NODE) if self.is_hybrid else size) * context

    @property
    def replica_degree(self) -> int:
        """Copies of the sharded model on the data-parallel axis."""
        return max(1, self.data_parallel_size * self.context_parallel_size // self.shard_degree)

    @property
    def replicates(self) -> bool:
        """Whether several ranks hold the whole of what one rank has, and sum its gradients."""
        if self.data_parallel not in (DataParallel.DP, DataParallel.DDP):
            return False
        ranks = self.data_parallel_size * self.context_parallel_size
        return ranks > 1 or (self.spreads_experts and self.experts_over(ranks) > 1)

    @property
    def reshards(self) -> bool:
        """Whether gathered parameters are dropped after the forward: not between micro-batches of a
        pipeline, unless that is asked for."""
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return (
            self.sharding in (Sharding.FULL, Sharding.HYBRID) and self.pipeline_parallel_size == 1
        )


_DEGREES = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "expert_parallel_size",
    "expert_tensor_parallel_size",
)
_KINDS: dict[str, type[Enum]] = {
    "data_parallel": DataParallel,
    "sharding": Sharding,
    "pipeline_schedule": PipelineSchedule,
    "context_parallel": ContextParallel,
}
