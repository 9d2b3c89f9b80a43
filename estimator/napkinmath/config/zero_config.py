"""ZeroConfig: what DeepSpeed's `zero_optimization` says of one training step."""

from __future__ import annotations

from napkinmath.base.divisors import divisors
from napkinmath.base.errors import InputError, shown
from napkinmath.base.record import Record


class ZeroConfig(Record):
    """DeepSpeed's `zero_optimization`; sizes in elements, 0 where the integration's 'auto' sets
    them from the hidden size.

    Defaults: DeepSpeed runtime/zero/config.py DeepSpeedZeroConfig.
    """

    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    """Elements used in between within which a gathered parameter is kept for its next use."""
    param_persistence_threshold: int = 100_000
    sub_group_size: int = 1_000_000_000
    contiguous_gradients: bool = True
    overlap_comm: bool | None = None
    """None: on for stage 3, off for 1 and 2."""
    round_robin_gradients: bool = False
    memory_efficient_linear: bool = True
    """Stage 3: linears let go of gathered weights after the forward; torch's own keeps a view of each
    until its backward (runtime/zero/linear.py LinearFunctionForZeroStage3)."""
    hpz_partition_size: int = 1
    """ZeRO++: ranks that keep a second copy of the 16-bit parameters among them, so that gathers in
    the backward stay within."""
    mics_shard_size: int = 0
    """MiCS: ranks that share one copy; 0 is off."""
    quantized_weights: bool = False
    """ZeRO++: parameters are gathered as int8."""
    quantized_gradients: bool = False
    """ZeRO++: gradients are reduced as int4 by all-to-all."""
    master_dtype: str = "fp32"
    """Type of the masters and of the gradients that the update reads: 'bf16' by
    `bf16_master_weights_and_grads`, 'fp16' by `fp16_master_weights_and_grads`."""
    narrow_states: bool = False
    """States on the host in the masters' type (`bf16_optimizer_states`); a GPU's always are."""
    offload_ratio: float = 1.0
    """Stage 3: part of the sub-groups whose optimizer is on the host."""

    def validate(self) -> None:
        """Raises InputError for a negative size."""
        for name in (
            "reduce_bucket_size",
            "allgather_bucket_size",
            "prefetch_bucket_size",
            "max_live_parameters",
            "max_reuse_distance",
            "sub_group_size",
        ):
            if getattr(self, name) < 0:
                raise InputError(
                    f"{name}={shown(getattr(self, name))} is negative; give a number of elements,"
                    " e.g. 500000000"
                )
        if self.param_persistence_threshold < 0:
            raise InputError(
                f"param_persistence_threshold={shown(self.param_persistence_threshold)} is"
                " negative; use 0 or more elements"
            )
        if self.hpz_partition_size < 1 or self.mics_shard_size < 0:
            raise InputError(
                "hpz_partition_size is 1 (off) or more, mics_shard_size 0 (off) or more"
            )

    def validate_groups(self, strategy: str, ranks: int) -> None:
        """Raises InputError where a strategy has no such groups, or they do not divide so many
        data-parallel ranks."""
        if self.master_dtype != "fp32" and not strategy.startswith("zero"):
            raise InputError(
                f"masters in {self.master_dtype} are of ZeRO 1 to 3, not of {strategy}; leave them"
                " out, or set data_parallel to zero1, zero2 or zero3"
            )
        for name in ("hpz_partition_size", "mics_shard_size"):
            group = getattr(self, name)
            if group <= 1:
                continue
            if strategy != "zero3":
                raise InputError(
                    f"{name}={group} is of ZeRO 3, not of {strategy}; leave it out, or set"
                    " data_parallel to zero3"
                )
            if ranks == 1:
                raise InputError(
                    f"{name}={group} divides data-parallel ranks, and there is one; leave it out, or"
                    " give several GPUs"
                )
            if ranks % group:
                raise InputError(
                    f"{name}={group} does not divide {ranks} data-parallel ranks; use one of"
                    f" {divisors(ranks)}"
                )
