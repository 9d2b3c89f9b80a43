"""Before and after training: loading, quantizing and preparing the weights, and saving them."""

from __future__ import annotations

from napkinmath.base.dtypes import BF16, FP16, FP32, INT64
from napkinmath.base.expr import Size
from napkinmath.ir.costs import HostCopy
from napkinmath.ir.ledger import ALLOC, FREE, RUN, Phase, Role, Tensor, Weight, Work
from napkinmath.ir.step import Run, Segment

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.ir.ledger import Event
    from napkinmath.lowering.policy import Policy


def load_segments(runs: list[Run], policy: Policy) -> list[Segment]:
    """Every weight arrives in the checkpoint's 16 bits; it is cast or quantized on the device, a
    tensor at a time.

    k-bit preparation then makes what was left unquantized fp32, once all is loaded. Sources:
    transformers 5.23 core_model_loading.py; bitsandbytes 0.50 nn/modules.py Params4bit._quantize;
    peft 0.21 utils/other.py prepare_model_for_kbit_training.
    """
    loaded: list[Segment] = []
    prepared: list[Segment] = []
    for run in runs:
        here, later = _load_block(run.block.weights, policy)
        loaded.append(
            Segment(f"weights of {run.name}", Phase.LOAD, here, run.count, run.stage.symbols)
        )
        if later:
            prepared.append(
                Segment(
                    f"k-bit preparation of {run.name}",
                    Phase.LOAD,
                    later,
                    run.count,
                    run.stage.symbols,
                )
            )
    return loaded + prepared


def _load_block(weights: list[Weight], policy: Policy) -> tuple[list[Event], list[Event]]:
    quantization = policy.config.quantization
    preparing = quantization is not None and quantization.kbit_preparation
    now: list[Event] = []
    later: list[Event] = []
    for weight in weights:
        if weight.tied_to:
            continue
        stored = [(ALLOC, t) for t in (weight.tensor, *weight.constants)]
        if weight.kind == "adapter" or weight.buffer or weight.tensor.dtype in (BF16, FP16):
            now += stored
            continue
        arrived = Tensor(
            f"{weight.tensor.name} as loaded", weight.axes, BF16, Role.WEIGHTS, weight.path
        )
        if preparing and not weight.constants and weight.tensor.dtype is FP32:
            now.append((ALLOC, arrived))
            later += [*stored, (FREE, arrived)]
        else:
            search = (
                nearest_code_search(weight)
                if weight.constants and policy.stack.quantizes_by_search
                else []
            )
            now += [(ALLOC, arrived), *search, *stored, (FREE, arrived)]
    return now, later


def nearest_code_search(weight: Weight) -> list[Event]:
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
    return [
        (ALLOC, scaled),
        (ALLOC, apart),
        (ALLOC, distance),
        (FREE, apart),
        (ALLOC, codes),
        (FREE, distance),
        (FREE, codes),
        (FREE, scaled),
    ]


def save_segments(runs: list[Run], policy: Policy) -> list[Segment]:
    """Saving what was trained: tensors are copied to the host one by one, the device holds nothing
    more."""
    segments: list[Segment] = []
    for run in runs:
        moved: Size = 0
        for weight in run.block.weights:
            if weight.trainable and not weight.tied_to:
                moved = moved + weight.tensor.nbytes
        if not isinstance(moved, int) or moved:
            work = Work(None, (HostCopy(moved, to_host=True, pinned=False),), False)
            segments.append(
                Segment(
                    f"saving {run.name}", Phase.SAVE, [(RUN, work)], run.count, run.stage.symbols
                )
            )
    return segments
