"""Merging adapters into their weights after training (`--merge`), one module after the other, with the
optimizer's states still there.

B A is made, scaled and added. A dense weight takes the sum in place. A 4- or 8-bit weight is unpacked,
summed, sent to the host and quantized anew on its way back; all of it lives until the module is done.
DoRA makes the scaled weight anew; experts held as 3-D parameters have one product for all of them.
Sources: peft 0.21 tuners/lora/layer.py Linear.merge, get_delta_weight, ParamWrapper.get_delta_weight;
tuners/lora/bnb.py Linear4bit.merge, Linear8bitLt.merge; tuners/lora/variants.py
DoraLinearVariant.merge_unsafe; bitsandbytes 0.50 nn/modules.py Params4bit._quantize, Int8Params.cuda.
"""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP16, FP32, DType
from napkinmath.base.errors import InputError
from napkinmath.config.train_config import AdapterKind
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Work, allocs, frees
from napkinmath.ir.step import Run, Segment, by_block

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event, Weight
    from napkinmath.lowering.policy import Policy

_WAY_OUT = "; leave --merge out, and merge the saved adapter into whole 16-bit weights"


def merge_segments(runs: list[Run], policy: Policy) -> list[Segment]:
    """What merging makes, module by module. Raises InputError where PEFT cannot merge."""
    _check(policy)
    of_run = by_block(lambda run: _merged(run, policy))
    return [
        run.segment(f"{run.name} with its adapters merged", Phase.SAVE, events)
        for run in runs
        if (events := of_run(run))
    ]


def _check(policy: Policy) -> None:
    adapter, parallel = policy.adapter, policy.config.parallel
    assert adapter is not None
    if adapter.kind not in (AdapterKind.LORA, AdapterKind.DORA):
        raise InputError(
            f"--merge merges LoRA's and DoRA's adapters, not {adapter.kind.value}; leave it out"
        )
    if policy.shards or parallel.tensor_parallel_size * parallel.pipeline_parallel_size > 1:
        raise InputError(f"--merge needs weights whole on a GPU, and they are spread{_WAY_OUT}")
    if policy.format is not None and not policy.format.of_bitsandbytes:
        raise InputError(f"PEFT merges no adapter into {policy.format.name} weights{_WAY_OUT}")


def _merged(run: Run, policy: Policy) -> list[Event]:
    adapted = {w.path.partition(".lora")[0] for w in run.block.weights if w.kind == "adapter"}
    found: list[Event] = []
    for weight in run.block.weights:
        if weight.kind == "adapter" or weight.path.removesuffix(".weight") not in adapted:
            continue
        found += _into_packed(weight, policy) if weight.constants else _into_dense(weight, policy)
    return found


def _into_dense(weight: Weight, policy: Policy) -> list[Event]:
    assert policy.adapter is not None
    product, scaled = _delta(weight, policy)
    made: list[Event] = [*allocs(product, scaled), (FREE, product)]
    if policy.adapter.kind is AdapterKind.DORA:
        summed, new = (_like(weight, name, policy.adapter_dtype) for name in ("summed", "weighed"))
        stored = _like(weight, "merged", weight.tensor.dtype)
        made += [*allocs(summed, new), (FREE, summed), (ALLOC, stored), *frees(new, scaled, stored)]
        return made
    if weight.kind != "experts" or policy.adapter_dtype is weight.tensor.dtype:
        return [*made, (FREE, scaled)]
    narrow = _like(weight, "narrow B A of", weight.tensor.dtype)
    return [*made, (ALLOC, narrow), *frees(scaled, narrow)]


def _into_packed(weight: Weight, policy: Policy) -> list[Event]:
    assert policy.format is not None
    product, scaled = _delta(weight, policy)
    eight = policy.format.bits == 8
    whole = _like(weight, "unpacked", FP32 if eight else BF16)
    summed = _like(weight, "summed", policy.adapter_dtype)
    back = _like(weight, "summed again", FP16 if eight else policy.adapter_dtype)
    packed = _as(weight.tensor, weight)
    constants = [_as(t, weight) for t in weight.constants]
    return [
        *allocs(whole, product, scaled),
        (FREE, product),
        (ALLOC, summed),
        (RUN, Work(None, (HostCopy(summed.nbytes, to_host=True, pinned=False),), False)),
        *allocs(back, packed, *constants),
        *frees(back, whole, scaled, summed, packed, *constants),
    ]


def _delta(weight: Weight, policy: Policy) -> tuple[Tensor, Tensor]:
    """B A, and it times the scaling."""
    dtype = policy.adapter_dtype
    return _like(weight, "B A of", dtype), _like(weight, "scaled B A of", dtype)


def _like(weight: Weight, name: str, dtype: DType) -> Tensor:
    return Tensor(f"{name} {weight.tensor.name}", weight.axes, dtype, Role.WORKSPACE, weight.path)


def _as(tensor: Tensor, weight: Weight) -> Tensor:
    """A second copy, which takes the place of the first."""
    return Tensor(f"merged {tensor.name}", tensor.axes, tensor.dtype, Role.WORKSPACE, weight.path)
