"""Transformer Engine's FusedAdam as files ask for it: by Megatron-Core's precision-aware optimizer,
or by its own name with its arguments."""

from __future__ import annotations

from napkinmath.catalog.te_adam import te_name
from napkinmath.inputs.foreign import dtype_word
from napkinmath.inputs.known_keys import is_off

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_MOMENTS = ("exp_avg_dtype", "exp_avg_sq_dtype")


def read_precision_aware(job: ForeignJob, prefix: str = "", recipe: object = None) -> None:
    """The states, masters and gradients of `use_precision_aware_optimizer`; it is of Adam only.

    FusedAdam keeps the masters, and reads gradients in the type of their buffers, unless an FP8
    `recipe` other than delayed scaling leaves fp32 masters to Megatron (Megatron-LM
    core/optimizer/optimizer_config.py use_precision_aware_optimizer_no_fp8_or_ds_fp8). Without the
    switch the types have to be fp32.
    """
    switched = job.switch(f"{prefix}use_precision_aware_optimizer")
    if not switched or not str(job.options.get("optimizer")).startswith("adam"):
        return
    if (sums := dtype_word(job.take(f"{prefix}main_grads_dtype"))) == "bf16":
        job.give("reduce_dtype", sums)
    held = dtype_word(job.take(f"{prefix}main_params_dtype")) or "fp32"
    master = "none"
    if held != "fp32" or str(recipe or "delayed") == "delayed":
        master = _master(job, held, f"{prefix}store_param_remainders", default=True)
    _give(job, prefix, master)


def is_transformer_engine(name: str) -> bool:
    """Whether a class of that name is its FusedAdam."""
    return name.startswith("transformer_engine.") and name.endswith(".FusedAdam")


def read_fused_adam(job: ForeignJob, prefix: str) -> None:
    """FusedAdam with its own arguments."""
    master = "none"
    if job.switch(f"{prefix}master_weights"):
        held = dtype_word(job.take(f"{prefix}master_weight_dtype")) or "fp32"
        master = _master(job, held, f"{prefix}store_param_remainders", default=False)
    _give(job, prefix, master)


def _give(job: ForeignJob, prefix: str, master: str) -> None:
    first, second = (dtype_word(job.take(f"{prefix}{name}")) or "fp32" for name in _MOMENTS)
    job.give("optimizer", te_name(first, second, master))


def _master(job: ForeignJob, held: str, switch: str, *, default: bool) -> str:
    """The word for masters of that type, of which bf16 weights are the upper half."""
    given = job.take(switch)
    wanted = default if given is None else not is_off(given)
    split = wanted and held == "fp32" and job.options.get("precision") != "fp16"
    return "remainders" if split else held
