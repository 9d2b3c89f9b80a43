"""Before and after training: loading, quantizing and preparing the weights, and saving them."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP16, FP32, INT64
from napkinmath.base.expr import Size
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Weight, Work, allocs, frees
from napkinmath.ir.step import Run, Segment, by_block

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event, Steps
    from napkinmath.lowering.policy import Policy


def load_segments(runs: list[Run], policy: Policy) -> list[Segment]:
    """Every weight arrives in the checkpoint's 16 bits; it is cast or quantized on the device, a
    tensor at a time.

    k-bit preparation then makes what was left unquantized fp32, once all is loaded, and empties the
    allocator's cache since peft 0.20. Sources: transformers 5.23 core_model_loading.py;
    bitsandbytes 0.50 nn/modules.py Params4bit._quantize; peft 0.21 utils/other.py
    prepare_model_for_kbit_training. By the emptying the reserved memory of an 8B model's QLoRA
    step is 0.2% and not 2.2% below an H200's.
    """
    loaded: list[Segment] = []
    prepared: list[Segment] = []
    known: dict[int, tuple[list[Event], list[Event]]] = {}
    for run in runs:
        if id(run.block) not in known:
            known[id(run.block)] = _load_block(run.block.weights, policy)
        here, later = known[id(run.block)]
        loaded.append(run.segment(f"weights of {run.name}", Phase.LOAD, here))
        if later:
            prepared.append(run.segment(f"k-bit preparation of {run.name}", Phase.LOAD, later))
    if prepared and policy.stack.quantizer.empties_cache:
        prepared[-1].empties = True
    return loaded + prepared


def _load_block(weights: list[Weight], policy: Policy) -> tuple[list[Event], list[Event]]:
    quantization = policy.config.quantization
    preparing = quantization is not None and quantization.kbit_preparation
    now: list[Event] = []
    later: list[Event] = []
    for weight in (w for w in weights if not w.tied_to):
        dtype, stored = weight.tensor.dtype, allocs(weight.tensor, *weight.constants)
        if weight.kind == "adapter" or weight.buffer or dtype in (BF16, FP16):
            now += stored
            continue
        name = f"{weight.tensor.name} as loaded"
        arrived = Tensor(name, weight.axes, BF16, Role.WEIGHTS, weight.path)
        if preparing and not weight.constants and dtype is FP32:
            now.append((ALLOC, arrived))
            later += [*stored, (FREE, arrived)]
            continue
        searches = weight.constants and policy.stack.quantizer.searches
        search = nearest_code_search(weight) if searches else ()
        now += [(ALLOC, arrived), *search, *stored, (FREE, arrived)]
    return now, later


def nearest_code_search(weight: Weight) -> Steps:
    """torchao's NF4 before it went by chunks: every element beside all 16 codes, twice, then the
    index of the nearest.

    Source: torchao 0.1 dtypes/nf4tensor.py convert_to_norm_float_weight, quantize_tensor_nearest.
    """
    scaled, codes = (
        Tensor(name, (*weight.axes, last), dtype, Role.WORKSPACE, weight.path)
        for name, last, dtype in (("scaled blocks", 1, BF16), ("indices of codes", 1, INT64))
    )
    apart, distance = (
        Tensor(name, (*weight.axes, 16), BF16, Role.WORKSPACE, weight.path)
        for name in ("differences from the codes", "distances from the codes")
    )
    return (
        *allocs(scaled, apart, distance),
        *frees(apart),
        *allocs(codes),
        *frees(distance, codes, scaled),
    )


def save_segments(runs: list[Run], policy: Policy) -> list[Segment]:
    """Saving what was trained: tensors are copied to the host one by one, the device holds nothing
    more."""

    def saved(run: Run) -> list[Event]:
        moved: Size = 0
        for weight in run.block.weights:
            if weight.trainable and not weight.tied_to:
                moved = moved + weight.tensor.nbytes
        if isinstance(moved, int) and not moved:
            return []
        return [(RUN, Work(None, (HostCopy(moved, to_host=True, pinned=False),), False))]

    of_run = by_block(saved)
    return [
        run.segment(f"saving {run.name}", Phase.SAVE, events)
        for run in runs
        if (events := of_run(run))
    ]
