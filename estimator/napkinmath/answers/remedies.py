"""What would make a step fit: the smallest set of changes that is enough, and what it costs.

Sets grow by one change at a time. Of each size the few with the lowest peaks are grown further, so
sets of one are all tried and larger ones almost all that could do. No set is grown where all changes
together are not enough. Changes that keep what is trained come first, other methods next, then
patched kernels and offloading.
"""

from __future__ import annotations

from napkinmath.answers.changes import CANDIDATES, METHODS, TriedChange, halved, on_model
from napkinmath.answers.figures import Remedy, Verdict
from napkinmath.answers.ranges import headroom_bytes, named_bytes
from napkinmath.answers.verdict import room_for, surely_fits
from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import find_stack, latest_before
from napkinmath.config.parallel_config import DataParallel
from napkinmath.config.train_config import (
    BITSANDBYTES_4BIT,
    AdapterConfig,
    Kernels,
    Loss,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.train_config import TrainConfig

MOST_CHANGES = 5
GROWN = 4  # sets of each size that are grown further
MOST_ACCUMULATION = 1024  # micro-steps: more than anyone runs
SLOWEST = 0.1  # of the speed before: a set that leaves less is named where no other is enough
VERIFIED = 3  # sets of each size whose allocator is replayed, fastest first
_WHOLE = (DataParallel.DP, DataParallel.DDP)  # engines that have no offloading of their own


def _smallest_batch(c: TrainConfig) -> TrainConfig | None:
    found = None
    while (smaller := halved(found or c)) is not None:
        if smaller.gradient_accumulation_steps > MOST_ACCUMULATION:
            break
        found = smaller
    return found


def _quantized(c: TrainConfig) -> TrainConfig | None:
    if c.quantization is not None:
        return None
    return c.replace(
        adapter=c.adapter or AdapterConfig(),
        quantization=QuantizationConfig(),
        recompute=RecomputeConfig(kind=RecomputeKind.FULL),
    )


def _experts_packed(c: TrainConfig) -> TrainConfig | None:
    q = c.quantization
    if q is None or q.experts or q.format not in BITSANDBYTES_4BIT:
        return None
    return c.replace(quantization=q.replace(experts=True))


def _packed_whole(c: TrainConfig) -> TrainConfig | None:
    """Both at once: packing the rest alone leaves the experts, which its preparation widens."""
    found = _quantized(c)
    return None if found is None else _experts_packed(found)


def _offloaded(c: TrainConfig) -> TrainConfig | None:
    if c.parallel.data_parallel in _WHOLE or c.offload.parameters:
        return None
    return c.replace(offload=c.offload.replace(optimizer=True, parameters=True))


def _patched(kernels: Kernels) -> Callable[[TrainConfig], TrainConfig | None]:
    """A change to another's operations and loss, where transformers' own run: both patch plain
    fine-tuning, and unsloth trains on one GPU."""

    def apply(c: TrainConfig) -> TrainConfig | None:
        own = c.kernels is Kernels.HF and c.loss is Loss.HF and c.workload.is_plain
        runs = c.parallel.world_size == 1 or (kernels is Kernels.LIGER and _shares_liger(c))
        return c.replace(kernels=kernels) if own and runs else None

    return apply


def _shares_liger(c: TrainConfig) -> bool:
    """Whether replicas or shards run Liger: its fused loss reads the head's whole weight, so beside
    tensor, context and pipeline ranks it is not offered. The Trainer patches the model before it is
    wrapped since transformers 4.45 (trainer.py use_liger_kernel)."""
    from napkinmath.catalog.trainer_meshes import has_trainer

    parallel, model = c.parallel, find_stack(c.stack).model
    whole = (
        parallel.tensor_parallel_size
        * parallel.context_parallel_size
        * parallel.pipeline_parallel_size
        == 1
    )
    trained = has_trainer(c.stack) and model.runs_transformers
    return whole and trained and not model.is_transformers_before((4, 45))


def _unpacked(c: TrainConfig) -> TrainConfig | None:
    kind, model = c.parallel.data_parallel, find_stack(c.stack).model
    packs = c.quantization is not None and (kind.is_fsdp or kind is DataParallel.ZERO3)
    if not packs or not model.runs_transformers or model.is_transformers_before((5, 0)):
        return None
    return c.replace(stack=latest_before((5, 0)).name)


_KEEPING = (
    *(c for c in CANDIDATES if not c.flag.startswith((*METHODS, "--bs"))),
    TriedChange(
        "--quantize-experts", "experts packed too: axolotl's quantize_moe_experts", _experts_packed
    ),
    TriedChange("--bs {bs} --grad-accum {accum}", "a smaller batch, accumulated", _smallest_batch),
)
_METHODS = (
    *(candidate for candidate in CANDIDATES if candidate.flag == "--lora"),
    TriedChange("--qlora --checkpointing full", "4-bit base weights under adapters", _quantized),
)
_PACKED_WHOLE = TriedChange(
    "--qlora --quantize-experts --checkpointing full",
    "4-bit base weights, experts among them, under adapters",
    _packed_whole,
)
_PATCHED = (
    TriedChange("--kernels liger", "Liger's operations and loss", _patched(Kernels.LIGER)),
    TriedChange("--kernels unsloth", "unsloth's operations and loss", _patched(Kernels.UNSLOTH)),
)
_OFFLOADING = (
    TriedChange("--offload optimizer,parameters", "states and weights in host memory", _offloaded),
)
_EARLIER = (
    TriedChange(
        f"--stack {latest_before((5, 0)).name}",
        "an earlier transformers, which packs no whole model on every GPU",
        _unpacked,
    ),
)
_KINDS = (_KEEPING, _METHODS, _PATCHED, _OFFLOADING, _EARLIER)
LEVELS = tuple(sum(_KINDS[:n], ()) for n in range(1, len(_KINDS) + 1))


def _swapping(e: Estimate) -> tuple[TriedChange, ...]:
    """Blocks of a denoiser that wait on the host, as many as its trainers let: fewer are tried once
    so many are enough."""
    canvas = e.spec.canvas
    if canvas is None or not canvas.lists:
        return ()
    from napkinmath.lowering.swapped_blocks import most_swapped

    most = most_swapped(e.spec, canvas)

    def swapped(c: TrainConfig) -> TrainConfig | None:
        # no trainer swaps packed weights: musubi-tuner's offloader moves nn.Linear's alone
        if c.adapter is None or c.quantization is not None or c.offload.blocks >= most:
            return None
        return c.replace(offload=c.offload.replace(blocks=most))

    return (TriedChange("--blocks-to-swap {blocks}", "blocks in host memory in turn", swapped),)


class _Tried:
    """A set of changes: the configuration it makes and its peak in requested bytes."""

    __slots__ = ("changes", "config", "peak")

    def __init__(self, changes: tuple[TriedChange, ...], config: TrainConfig, peak: int) -> None:
        self.changes, self.config, self.peak = changes, config, peak


def remedy(e: Estimate) -> Remedy | None:
    """The smallest set of changes under which the step surely fits its GPU; None where it fits as
    it is, where no GPU is named, or where no set of those known is enough."""
    if e.priced_verdict in (Verdict.FITS, Verdict.NOT_ASKED) or e.takes_more:
        return None
    slow: Remedy | None = None
    for candidates in LEVELS:
        swapping = _swapping(e) if _OFFLOADING[0] in candidates else ()
        packing = (_PACKED_WHOLE,) if _METHODS[0] in candidates and _has_experts(e) else ()
        tried = (*on_model(e, (*candidates, *packing)), *swapping)
        found = _smallest_set(e, tried)
        if found is not None and _is_slow(found):
            slow = slow or found
            named = slow.flags
            found = _smallest_set(e, tuple(change for change in tried if change.flag not in named))
        if found is not None and not _is_slow(found):
            return found
    return slow


def _has_experts(e: Estimate) -> bool:
    return bool(dict(e.spec.symbols).get("e"))


def _is_slow(found: Remedy) -> bool:
    """Whether it is so slow that other changes come first: what generates under FSDP gathers every
    weight for each token."""
    return found.speed_ratio is not None and found.speed_ratio < SLOWEST


def _smallest_set(e: Estimate, candidates: tuple[TriedChange, ...]) -> Remedy | None:
    sets = [_Tried((), e.config, e.peak.nbytes)]
    for size in range(1, MOST_CHANGES + 1):
        sets = _grown(e, sets, candidates)
        found = _first_that_fits(e, sets)
        if found is not None:
            return found
        if size == 1 and not _all_could_do(e, sets, candidates):
            return None
        sets = sets[:GROWN]
    return None


def _all_could_do(e: Estimate, singles: list[_Tried], candidates: tuple[TriedChange, ...]) -> bool:
    """Whether all changes together, with other methods or without (which some refuse), go below
    what the GPU has room for."""
    lowering = [single.changes[0] for single in singles]
    ordered = (*lowering, *(change for change in candidates if change not in lowering))
    keeping = [change for change in ordered if not change.flag.startswith(METHODS)]
    return _together(e, keeping) or _together(e, ordered)


def _together(e: Estimate, ordered: Sequence[TriedChange]) -> bool:
    """Whether the peak fits as one change after the other is made; one that does not lower it is
    left out."""
    assert e.hardware is not None
    ranks = e.config.parallel.world_size
    room = room_for(e.hardware, ranks, sure=True) - named_bytes(e)
    best = _Tried((), e.config, e.peak.nbytes)
    for change in ordered:
        more = _grown(e, [best], (change,))
        best = more[0] if more else best
        if best.peak <= room:
            return True
    return False


def _under(e: Estimate, config: TrainConfig) -> Estimate:
    """The estimate under a change, with what its job file asks for and is not priced."""
    found = e.under(config, e.compared(config)[1])
    return found if e.job_keys is None else found.of_job(e.job_keys)


def _grown(e: Estimate, sets: list[_Tried], candidates: tuple[TriedChange, ...]) -> list[_Tried]:
    """Each set with one change more, lowest peak first; the same configuration once."""
    found: dict[TrainConfig, _Tried] = {}
    for tried in sets:
        for candidate in candidates:
            config = None if candidate in tried.changes else candidate.apply(tried.config)
            if config is None or config in found:
                continue
            try:
                saved = e.compared(config)[0]
            except InputError:
                continue  # the family or the mesh refuses this change
            peak = e.peak.nbytes - saved
            if peak < tried.peak:
                found[config] = _Tried((*tried.changes, candidate), config, peak)
    return sorted(found.values(), key=lambda tried: tried.peak)


def _first_that_fits(e: Estimate, sets: list[_Tried]) -> Remedy | None:
    """The fastest of the sets whose requested bytes would go in, as far as a replay confirms it."""
    assert e.hardware is not None
    room = room_for(e.hardware, e.config.parallel.world_size, sure=True)
    likely = [tried for tried in sets if tried.peak <= room][: 2 * VERIFIED]
    answers = [(_under(e, t.config), t.changes) for t in likely]
    before = e.priced_time.tokens_per_s if e.priced_time is not None else None
    answers.sort(key=lambda item: -(_speed(item[0], before) or 0))
    for other, changes in answers:
        if surely_fits(other):
            other = _with_fewest_swapped(e, _with_largest_batch(e, other))
            return Remedy(
                flags=_flags(changes, other.config),
                headroom_bytes=headroom_bytes(other) or 0,
                speed_ratio=_speed(other, before),
            )
    return None


def _speed(e: Estimate, before: float | None) -> float | None:
    """Tokens a second as a ratio."""
    time = e.priced_time
    return time.tokens_per_s / before if before and time is not None else None


def _with_largest_batch(e: Estimate, fitting: Estimate) -> Estimate:
    """The same set with the largest batch that still fits, where the batch is one of its changes:
    the estimate's own, halved as often as it takes."""
    halves, found = e.config, fitting.config
    if found.micro_batch_size == halves.micro_batch_size:
        return fitting
    while (
        smaller := halved(halves)
    ) is not None and smaller.micro_batch_size != found.micro_batch_size:
        halves = smaller
        config = found.replace(
            micro_batch_size=smaller.micro_batch_size,
            gradient_accumulation_steps=smaller.gradient_accumulation_steps,
        )
        other = e.under(config, e.compared(config)[1])
        if surely_fits(other):
            return other
    return fitting


def _with_fewest_swapped(e: Estimate, fitting: Estimate) -> Estimate:
    """The same set with the fewest swapped blocks that still fit, where they are one of its
    changes."""
    low, high = e.config.offload.blocks, fitting.config.offload.blocks
    while high - low > 1:  # low does not fit, or was not asked
        config = fitting.config.replace(
            offload=fitting.config.offload.replace(blocks=(low + high) // 2)
        )
        other = e.under(config, e.compared(config)[1])
        if surely_fits(other):
            fitting, high = other, config.offload.blocks
        else:
            low = config.offload.blocks
    return fitting


def _flags(changes: tuple[TriedChange, ...], config: TrainConfig) -> tuple[str, ...]:
    """The changes as flags, the method first, with the sizes of the configuration that they
    make."""
    sizes = {
        "bs": config.micro_batch_size,
        "accum": config.gradient_accumulation_steps,
        "blocks": config.offload.blocks,
    }
    found = [candidate.flag.format(**sizes) for candidate in changes]
    if any(flag.startswith("--qlora") for flag in found):
        found = [
            flag
            for flag in found
            if not (flag.startswith("--lora") or flag == "--checkpointing full")
        ]
    return tuple(sorted(found, key=lambda flag: not flag.startswith(METHODS)))
