"""Guidelines of the field, each held against the numbers of one configuration on one GPU: where
they disagree, the numbers say by how much."""

from __future__ import annotations

from napkinmath.answers.estimate import Estimate
from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.base.units import format_bytes
from napkinmath.catalog.trainer_meshes import strategies_of
from napkinmath.config.lengths import padded_share
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.ledger import Role
from napkinmath.planning.search import same_but
from napkinmath.timing.schedule import BANDWIDTH, COMPUTE, LAUNCH

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

# A saving of this share of the peak, or a change of speed of this share, is worth following a
# guideline for.
WORTH_MEMORY, WORTH_SPEED = 0.05, 0.03
# Checkpointing runs the forward twice: 4/3 of the products on paper, about 20% by rule of thumb.
ON_PAPER, RULE_OF_THUMB = 1 / 3, 0.20


class Advice(Record):
    """One guideline: what the field says, what the numbers say here, and whether they agree."""

    name: str
    field: str
    here: str
    agrees: bool


def guidelines(e: Estimate) -> tuple[Advice, ...]:
    """Every guideline that bears on the configuration, those that disagree first. Needs a GPU with
    known speeds."""
    if e.hardware is None or e.time is None:
        way = f"the time is withheld: {e.withheld}" if e.withheld else "add --gpu NAME"
        raise InputError(f"guidelines compare speeds; {way}")
    found: list[Advice] = []
    for rule in _RULES:
        try:
            advice = rule(e)
        except InputError:
            continue  # the family or the method refuses the alternative
        if advice is not None:
            found.append(advice)
    return tuple(sorted(found, key=lambda advice: advice.agrees))


def _saved(e: Estimate, without: Estimate) -> int:
    """Bytes of the peak that the configuration saves against the same without something."""
    return without.peak.nbytes - e.peak.nbytes


def _faster(e: Estimate, other: Estimate) -> float:
    """How much faster the configuration is than another: 0.2 is 20%; negative is slower."""
    if e.time is None or other.time is None:
        raise InputError("one of two configurations has no time to compare; add --gpu NAME")
    return e.time.tokens_per_s / other.time.tokens_per_s - 1


def _percent(share: float) -> str:
    return (
        "as fast"
        if abs(share) < 0.005
        else f"{abs(share):.0%} {'faster' if share > 0 else 'slower'}"
    )


def _memory(nbytes: int, of: int = 0) -> str:
    """'4.51 GiB less', with the share of a whole where one is given: '4.51 GiB (20%) less'."""
    if not nbytes:
        return "the same memory"
    share = f" ({abs(nbytes) / of:.0%})" if abs(nbytes) > 0.005 * of > 0 else ""
    return f"{format_bytes(abs(nbytes))}{share} {'less' if nbytes > 0 else 'more'}"


# ---------------------------------------------------------------- the rows


def bf16(e: Estimate) -> Advice | None:
    """bf16 by default; not where the matrix units lack it."""
    assert e.hardware is not None
    field = "train in bf16"
    gpu = e.hardware.gpu
    if not gpu.supports("bf16"):
        return Advice(
            name="bf16",
            field=field,
            here=(
                f"{gpu.name} has no matrix units for it: fp16 with loss scaling, --precision"
                " fp16-amp"
            ),
            agrees=False,
        )
    plain = e.config.replace(precision=Precision.BF16_AUTOCAST)
    wide = e.config.replace(precision=Precision.TF32)
    here, there = same_but(e, plain), same_but(e, wide)
    return Advice(
        name="bf16",
        field=field,
        here=(
            f"against tf32 {_percent(_faster(here, there))},"
            f" {_memory(_saved(here, there), there.peak.nbytes)}"
        ),
        agrees=_faster(here, there) > WORTH_SPEED
        or _saved(here, there) > WORTH_MEMORY * there.peak.nbytes,
    )


def flash_attention(e: Estimate) -> Advice | None:
    """A fused attention kernel; next to nothing at short lengths."""
    fused = same_but(e, e.config.replace(attention=Attention.AUTO))
    stored = same_but(e, e.config.replace(attention=Attention.EAGER))
    saved, faster = _saved(fused, stored), _faster(fused, stored)
    if not saved and abs(faster) < 1e-9:
        return None  # a model without attention
    return Advice(
        name="flash attention",
        field="use flash attention",
        here=(
            f"against stored scores {_percent(faster)}, {_memory(saved, stored.peak.nbytes)} at"
            f" {e.config.sequence_length} tokens"
        ),
        agrees=saved > WORTH_MEMORY * stored.peak.nbytes or faster > WORTH_SPEED,
    )


def lora(e: Estimate) -> Advice | None:
    """LoRA to save memory; activations and logits stay."""
    if e.config.quantization is not None:
        return None
    adapted = same_but(e, _trainable(e.config, adapter=e.config.adapter or AdapterConfig()))
    full = same_but(e, _trainable(e.config, adapter=None))
    saved, faster = _saved(adapted, full), _faster(adapted, full)
    why = (
        "what it saves are gradients and optimizer states, activations stay"
        if saved > 0
        else "gradients and states are small already, and the adapters' own activations come on top"
    )
    return Advice(
        name="LoRA",
        field="LoRA takes a fraction of the memory",
        here=(
            f"against full fine-tuning {_memory(saved, full.peak.nbytes)}, {_percent(faster)}:"
            f" {why}"
        ),
        agrees=saved > 0.25 * full.peak.nbytes,
    )


def _trainable(config: TrainConfig, *, adapter: AdapterConfig | None) -> TrainConfig:
    return config.replace(adapter=adapter, frozen=() if adapter is not None else config.frozen)


def qlora(e: Estimate) -> Advice | None:
    """4-bit weights save memory and cost time for unpacking."""
    if e.config.adapter is None:
        return None
    packed = same_but(
        e, e.config.replace(quantization=e.config.quantization or QuantizationConfig())
    )
    dense = same_but(e, e.config.replace(quantization=None))
    saved, faster = _saved(packed, dense), _faster(packed, dense)
    return Advice(
        name="QLoRA",
        field="4-bit weights save most of the memory",
        here=(
            f"against 16-bit weights {_memory(saved, dense.peak.nbytes)},"
            f" {_percent(faster)}{'' if saved >= 0 else ': what is not packed, k-bit preparation makes fp32'}"
        ),
        agrees=saved > 0.3 * dense.peak.nbytes,
    )


def checkpointing(e: Estimate) -> Advice | None:
    """Checkpointing: a third more on paper, a fifth by rule of thumb; here what the clock says, and
    the memory it is for."""
    plain = e.config.replace(
        recompute=RecomputeConfig(), offload=e.config.offload.replace(checkpoints=False)
    )
    checked = e.config.replace(
        recompute=(
            e.config.recompute
            if e.config.recompute.kind is not RecomputeKind.NONE
            else RecomputeConfig(kind=RecomputeKind.FULL)
        )
    )
    on, off = same_but(e, checked), same_but(e, plain)
    slower, saved = _faster(off, on), _saved(on, off)
    worth = saved > WORTH_MEMORY * off.peak.nbytes
    near = RULE_OF_THUMB - 0.05 <= slower <= ON_PAPER + 0.05
    note = "" if worth else "; it saves too little to be worth it here"
    if worth and slower > ON_PAPER + 0.05 and e.config.adapter is not None:
        note = (
            "; frozen weights have no gradient, so the forward that runs again is half of the"
            " products, not a third"
        )
    return Advice(
        name="checkpointing",
        field=f"costs {ON_PAPER:.0%} on paper, about {RULE_OF_THUMB:.0%} by rule of thumb",
        here=f"the step takes {slower:.0%} longer for {_memory(saved, off.peak.nbytes)}{note}",
        agrees=near and worth,
    )


def packing(e: Estimate) -> Advice | None:
    """Packing: what padding to the longest of a batch costs, from the lengths given."""
    lengths, batch = e.config.batch.lengths, e.config.micro_batch_size
    if not lengths or not isinstance(batch, int):
        return None
    share = padded_share(lengths, batch)
    return Advice(
        name="packing",
        field="pack short sequences",
        here=(
            f"{share:.0%} of what a batch of {batch} computes is padding: packed, the same data"
            f" take {share:.0%} fewer tokens"
        ),
        agrees=share > WORTH_SPEED,
    )


def eight_bit(e: Estimate) -> Advice | None:
    """8-bit optimizer states: a quarter of the states, which adapters hardly have."""
    if e.config.offload.optimizer:
        return None
    small = same_but(e, e.config.replace(optimizer="adamw-8bit"))
    large = same_but(e, e.config.replace(optimizer="adamw-fused"))
    saved = _saved(small, large)
    states = large.breakdown.get(Role.OPTIMIZER, 0)
    kept = small.breakdown.get(Role.OPTIMIZER, 0)
    share = f", {1 - kept / states:.0%} of which go" if states > kept else ""
    return Advice(
        name="8-bit optimizer",
        field="8-bit optimizers save three quarters of the states",
        here=(
            f"the states are {format_bytes(states)} of {format_bytes(large.peak.nbytes)}{share}:"
            f" {_memory(saved)} at the peak, {_percent(_faster(small, large))}"
        ),
        agrees=saved > WORTH_MEMORY * large.peak.nbytes,
    )


def accumulation(e: Estimate) -> Advice | None:
    """Accumulation is for batches that do not fit: where twice the micro-batch fits, half the
    micro-steps are faster."""
    count, batch = e.config.gradient_accumulation_steps, e.config.micro_batch_size
    if count < 2 or count % 2 or not isinstance(batch, int):
        return None
    larger = same_but(
        e, e.config.replace(micro_batch_size=2 * batch, gradient_accumulation_steps=count // 2)
    )
    fits = larger.verdict is Verdict.FITS
    faster = _faster(larger, e)
    said = (
        f"--bs {2 * batch} --grad-accum {count // 2}"
        f" {'fits and is ' + _percent(faster) if fits else 'does not surely fit'}"
    )
    return Advice(
        name="gradient accumulation",
        field="accumulate where the batch does not fit",
        here=said,
        agrees=not fits or faster < WORTH_SPEED,
    )


def bound(e: Estimate) -> Advice | None:
    """Training is bound by compute; small batches, quantized weights and optimizers are bound by
    bandwidth or by launches."""
    assert e.time is not None and e.hardware is not None
    shares = {name: e.time.share(name) for name in (COMPUTE, BANDWIDTH, LAUNCH)}
    name = max(shares, key=lambda key: shares[key])
    rent = {
        COMPUTE: "rent FLOP/s",
        BANDWIDTH: "rent bandwidth, or fuse kernels: more FLOP/s would not help that part",
        LAUNCH: "the GPU waits for the host: a larger batch, or --compile",
    }
    return Advice(
        name="bound",
        field="training is bound by compute",
        here=(
            f"{', '.join(f'{share:.0%} {key}' for key, share in shares.items() if share >= 0.005)}"
            f" on {e.hardware.gpu.name}: {rent[name]}"
        ),
        agrees=name == COMPUTE,
    )


def several_gpus(e: Estimate) -> Advice | None:
    """On several GPUs first bf16, LoRA, checkpointing and ZeRO-3, or what the stack's trainer has
    in its place: that recipe on the same GPUs, beside what is run."""
    parallel = e.config.parallel
    if e.cluster is None or parallel.world_size < 2:
        return None
    (strategy, *_) = strategies_of(e.config.stack, ("zero3", "fsdp2", "zero1"))
    way = "--zero 3" if strategy == "zero3" else f"--data-parallel {strategy}"
    sharded = ParallelConfig(
        data_parallel=DataParallel(strategy), data_parallel_size=parallel.world_size
    )
    recipe = e.config.replace(
        precision=Precision.BF16_AUTOCAST,
        adapter=e.config.adapter or AdapterConfig(),
        quantization=None,
        recompute=RecomputeConfig(kind=RecomputeKind.FULL),
        parallel=sharded,
        frozen=(),
    )
    first = same_but(e, recipe)
    speed, saved = _faster(first, e), _saved(first, e)
    agrees = first.verdict is Verdict.FITS and (
        speed > -WORTH_SPEED or e.verdict is not Verdict.FITS
    )
    return Advice(
        name="several GPUs",
        field="first bf16, LoRA, checkpointing and ZeRO-3",
        here=(
            f"--lora --checkpointing full {way}"
            f" {'fits' if first.verdict is Verdict.FITS else 'does not surely fit'} and is"
            f" {_percent(speed)}{' than' if abs(speed) >= 0.005 else ' as'} this,"
            f" {_memory(saved, e.peak.nbytes)} a GPU"
        ),
        agrees=agrees,
    )


_RULES: tuple[Callable[[Estimate], Advice | None], ...] = (
    bf16,
    flash_attention,
    lora,
    qlora,
    checkpointing,
    packing,
    eight_bit,
    accumulation,
    several_gpus,
    bound,
)
