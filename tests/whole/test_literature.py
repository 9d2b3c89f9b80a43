"""Claims of the literature, each with the accounting that yields it. Where a claim is a formula and
not a measurement, the test says so."""

from __future__ import annotations

import math
import pathlib

import pytest
from napkinmath.catalog.models import find_row
from napkinmath.config.train_config import (
    AdapterConfig,
    Attention,
    OffloadConfig,
    Precision,
    QuantizationConfig,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import Estimate, estimate
from napkinmath.ir.ledger import Phase, Role

GB = 10**9
FULL = RecomputeConfig(kind=RecomputeKind.FULL)
STATES = (Role.WEIGHTS, Role.MASTER, Role.GRADIENTS, Role.OPTIMIZER)


def highest(e: Estimate, *roles: Role) -> int:
    """Bytes of roles at whichever phase peak holds most of them."""
    return max(
        sum(e.timeline.breakdown(point).get(role, 0) for role in roles)
        for point in e.phase_peaks.values()
    )


def per_parameter(e: Estimate, *roles: Role) -> float:
    """Bytes of roles at the optimizer step for each parameter of the model: the backward's
    temporaries are gone by then."""
    held = e.timeline.breakdown(e.phase_peaks[Phase.STEP])
    return sum(held.get(role, 0) for role in roles) / e.num_parameters


# ---------------------------------------------------------------- QLoRA (arXiv 2305.14314)


def test_qlora_trains_65b_in_less_than_48_gb() -> None:
    """Section 1: one 48 GB GPU. As its code runs it: NF4 with double quantization, r = 64 on all
    linears, bf16 adapters, checkpointing, batch 1 x 512, and AdamW states in paged memory, which
    the device holds only while there is room.
    """
    e = estimate(
        "llama-65b",
        micro_batch_size=1,
        sequence_length=512,
        adapter=AdapterConfig(rank=64, dtype="bf16"),
        quantization=QuantizationConfig(),
        recompute=FULL,
        optimizer="paged-adamw",
        hardware="a40",
    )
    assert e.memory.device.value < 48 * GB
    assert highest(e, Role.WEIGHTS) > 32 * GB  # half a byte a parameter, embeddings and head more


def test_16_bit_full_finetuning_of_65b_takes_more_than_780_gb() -> None:
    """Section 1: 12 bytes a parameter: 2 of weights, 2 of gradients, 8 of two fp32 Adam states, as
    bitsandbytes keeps them."""
    e = estimate(
        "llama-65b",
        micro_batch_size=1,
        sequence_length=512,
        precision=Precision.BF16,
        recompute=FULL,
        optimizer="adamw-bnb",
    )
    assert per_parameter(e, *STATES) == pytest.approx(12, abs=0.001)
    assert highest(e, *STATES) > 780 * GB


def test_double_quantization_takes_constants_from_half_a_bit_to_an_eighth() -> None:
    """Section 3: 32/64 = 0.5 bits a parameter; 8/64 + 32/(64·256) = 0.127."""
    bits = {}
    for double in (False, True):
        e = estimate(
            "llama-65b",
            sequence_length=8,
            adapter=AdapterConfig(),
            quantization=QuantizationConfig(double_quant=double),
        )
        linear = (
            e.num_parameters - 2 * 32000 * 8192 - 161 * 8192
        )  # embeddings, head and norms stay whole
        bits[double] = 8 * highest(e, Role.QUANTIZATION) / linear
    assert bits[False] == pytest.approx(0.5, abs=0.001)
    assert bits[True] == pytest.approx(8 / 64 + 32 / (64 * 256), abs=0.001)


# ---------------------------------------------------------------- ZeRO (arXiv 1910.02054)


def test_gpt2_1_5b_needs_24_gb_for_mixed_precision_adam() -> None:
    """Section 3.1: 16 bytes a parameter; here fp32 weights (4), gradients (4) and two states (8),
    as torch's AMP keeps them."""
    e = estimate(
        "gpt2-xl",
        micro_batch_size=1,
        sequence_length=8,
        precision=Precision.FP16_AMP,
        optimizer="adamw-fused",
    )
    assert per_parameter(e, *STATES) == pytest.approx(16, abs=0.01)
    assert per_parameter(e, *STATES) * 1.5 == pytest.approx(
        24, abs=0.02
    )  # the paper rounds 1.558 B parameters to 1.5


def test_the_other_anatomy_counts_18_bytes() -> None:
    """Hugging Face's model anatomy counts 6 + 8 + 4: weights in fp32 and as fp16 copies, states,
    gradients. The copies live from the cast in the forward to their use in the backward, while the
    gradients appear: 18 is a sum over time, 16 what is there at once.
    """
    e = estimate(
        "gpt2-xl",
        micro_batch_size=1,
        sequence_length=8,
        precision=Precision.FP16_AMP,
        optimizer="adamw-fused",
    )
    casts = max(
        sum(
            e.timeline.live_counts(p)[i] * t.requested
            for i, t in enumerate(e.timeline.tensors)
            if "in fp16" in t.name and "weight" in t.name
        )
        for p in e.phase_peaks.values()
    )
    linear_share = casts / e.num_parameters / 2
    assert (
        0.94 < linear_share <= 1
    )  # autocast casts what enters a product: not embeddings that only look up, not norms
    assert per_parameter(e, Role.WEIGHTS) + 2 * linear_share == pytest.approx(6, abs=0.12)
    assert per_parameter(e, Role.OPTIMIZER) == pytest.approx(8, abs=0.01)
    assert per_parameter(e, Role.GRADIENTS) == pytest.approx(4, abs=0.01)


def test_a_fused_fp32_buffer_of_1_5b_takes_6_gb() -> None:
    """Section 3.2, temporary buffers: all gradients flattened in fp32 are 4 bytes a parameter.
    foreach AdamW's temporary is such a buffer."""
    fused, foreach = (
        estimate(
            "gpt2-xl",
            micro_batch_size=1,
            sequence_length=8,
            precision=Precision.FP32,
            optimizer=o,
            clip_gradients=False,
        )
        for o in ("adamw-fused", "adamw-foreach")
    )
    buffer = foreach.phase_peaks[Phase.STEP].nbytes - fused.phase_peaks[Phase.STEP].nbytes
    assert buffer == pytest.approx(6 * GB, rel=0.05)


@pytest.fixture(scope="module")
def zero_activations() -> dict[RecomputeKind, float]:
    """Activations of GPT-2 1.5B, sequence 1K, batch 32, in GB, without and with checkpointing."""
    found = {}
    for kind in (RecomputeKind.NONE, RecomputeKind.FULL):
        e = estimate(
            "gpt2-xl",
            micro_batch_size=32,
            sequence_length=1024,
            precision=Precision.FP16,
            recompute=RecomputeConfig(kind=kind),
            optimizer="sgd",
        )
        found[kind] = highest(e, Role.ACTIVATIONS) / GB
    return found


def test_zeros_60_gb_of_activations_are_a_formula(
    zero_activations: dict[RecomputeKind, float],
) -> None:
    """Section 3.2 gives 60 GB, footnote: 12 · hidden · batch · sequence · layers values, two bytes
    each. A GPT-2 layer that holds what its backward reads keeps more than 12 values a position:
    with scores never stored it is over 60 GB, with them far over.
    """
    formula = 12 * 1600 * 32 * 1024 * 48 * 2
    assert formula == pytest.approx(60 * GB, rel=0.01)
    assert zero_activations[RecomputeKind.NONE] > 60


def test_checkpointing_brings_them_to_about_8_gb(
    zero_activations: dict[RecomputeKind, float],
) -> None:
    """The same section: about the square root: 60 / sqrt(48) = 8.7 GB. One checkpoint a layer: 48 ·
    32 · 1024 · 1600 · 2 B = 5 GB, and one layer's own activations beside it."""
    assert 60 / math.sqrt(48) == pytest.approx(8.7, abs=0.05)
    assert pytest.approx(5 * GB, rel=0.01) == 48 * 32 * 1024 * 1600 * 2
    assert 5 < zero_activations[RecomputeKind.FULL] < 10


def test_checkpoints_of_100b_take_60_gb() -> None:
    """Section 3.2: a 100 B model at batch 32 needs about 60 GB with checkpointing: 125 layers of
    hidden size 8192, sequence 1K (table 4)."""
    config = {
        "model_type": "gpt2",
        "n_embd": 8192,
        "n_layer": 125,
        "n_head": 64,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    e = estimate(
        config,
        micro_batch_size=32,
        sequence_length=1024,
        precision=Precision.FP16,
        recompute=FULL,
        optimizer="sgd",
    )
    assert e.num_parameters == pytest.approx(100 * GB, rel=0.02)
    checkpoints = [t for t in e.timeline.tensors if t.name == "hidden states" and ".h" in t.module]
    assert sum(t.nbytes for t in checkpoints[-1:]) * 125 == pytest.approx(
        60 * GB, rel=0.13
    )  # 67.1e9 bytes, 62.5 GiB


# ---------------------------------------------------------------- LoRA (arXiv 2106.09685)


def test_lora_saves_two_thirds_of_weights_and_states() -> None:
    """Section 4.2: up to 2/3 of memory: of three parameter-sized units (weights and two Adam states
    in one type) one is left."""
    full, lora = (
        estimate(
            "gpt2-xl",
            sequence_length=8,
            precision=Precision.FP32,
            optimizer="adamw-fused",
            adapter=a,
        )
        for a in (None, AdapterConfig(rank=4, targets=("c_attn",)))
    )
    units = (Role.WEIGHTS, Role.ADAPTERS, Role.OPTIMIZER)
    assert 1 - highest(lora, *units) / highest(full, *units) == pytest.approx(2 / 3, abs=0.01)


def test_rank_256_trains_about_8_percent_of_mistral_7b() -> None:
    """r·(in + out) of seven linears in 32 layers: 256 · 81,920 · 32 = 671 M beside 7.24 B."""
    e = estimate("mistral-7b", sequence_length=8, adapter=AdapterConfig(rank=256))
    assert e.num_trained == 256 * 81920 * 32
    assert e.num_trained / (e.num_parameters + e.num_trained) == pytest.approx(0.085, abs=0.005)


# ---------------------------------------------------------------- packing, generation


def test_packing_pays_the_sum_of_squares_padding_the_square_of_the_sum() -> None:
    """Scores of sequences packed with their own masks grow with the sum of squared lengths;
    attended as one sequence, with its square."""
    lengths = [512, 256, 1024, 256]
    together = estimate(
        "llama-7b", micro_batch_size=1, sequence_length=sum(lengths), attention=Attention.EAGER
    )
    apart = [
        estimate("llama-7b", micro_batch_size=1, sequence_length=n, attention=Attention.EAGER)
        for n in lengths
    ]
    assert scores(together) == pytest.approx(
        sum(lengths) ** 2 / sum(n * n for n in lengths) * sum(map(scores, apart)), rel=1e-9
    )


def scores(e: Estimate) -> int:
    """Bytes of one layer's attention probabilities."""
    return next(t.nbytes for t in e.timeline.tensors if t.name == "softmax")


def test_beam_search_holds_a_cache_for_every_beam() -> None:
    """Five beams hold five copies of keys and values: 2 · layers · kv heads · head size · tokens ·
    2 B each."""
    from napkinmath.answers.inference import kv_cache_bytes

    one = kv_cache_bytes("llama-7b", batch=1, tokens=2048)
    assert one == 2 * 32 * 32 * 128 * 2048 * 2
    assert kv_cache_bytes("llama-7b", batch=1, tokens=2048, num_beams=5) == 5 * one


def test_offloading_the_optimizer_moves_its_states_to_the_host() -> None:
    """ZeRO-Offload's accounting on one GPU: the device keeps weights and gradients, the host 8
    bytes of states and its fp32 copies."""
    e = estimate(
        "gpt2-xl",
        sequence_length=8,
        config=TrainConfig(precision=Precision.BF16, offload=OffloadConfig(optimizer=True)),
    )
    assert e.timeline.breakdown(e.peak).get(Role.OPTIMIZER, 0) < 0.01 * e.num_parameters


def test_tinyllama_qlora_of_2024_is_explained_but_for_a_fiftieth() -> None:
    """docs/tinyllama.md: 6.42 GB measured with checkpointing requested but inactive; each rung of
    the ladder is a rule, the rest is named."""
    from tinyllama import MEASURED_ALLOCATED_GB, MEASURED_RESERVED_GB, ladder

    rungs = [e.replay.peak_allocated / GB for _, e in ladder()]
    active, inactive, *_, last = rungs
    assert active < 2 < inactive - active  # eval mode costs more than the whole checkpointed step
    assert last == pytest.approx(MEASURED_ALLOCATED_GB, rel=0.02)
    assert ladder()[-1][1].replay.peak_reserved / GB == pytest.approx(
        MEASURED_RESERVED_GB, rel=0.02
    )
    page = (pathlib.Path(__file__).parents[2] / "docs" / "tinyllama.md").read_text()
    assert all(f"| {value:.2f} |" in page for value in rungs)


# ---------------------------------------------------------------- LLM.int8() (arXiv 2208.07339) and its integration


@pytest.mark.parametrize(("batch", "fp16_ms", "int8_ms"), [(1, 239, 282), (8, 8 * 32, 8 * 37.5)])
def test_llm_int8_is_15_to_23_percent_slower(batch: int, fp16_ms: float, int8_ms: float) -> None:
    """BLOOM-176B, one token for each sequence, A100s
    (huggingface.co/blog/hf-bitsandbytes-integration): 282 ms against 239. One token reads every
    weight once, and int8 reads half the bytes; but each of 280 linears starts 33 kernels instead of
    one by the library's own Python, and the host waits twice for how many outliers there are. So the saved bytes do not show,
    and what is left is the host's time.
    """
    int8 = QuantizationConfig(format="int8", double_quant=False, kbit_preparation=False)
    config = TrainConfig(
        micro_batch_size=batch,
        sequence_length=1,
        precision=Precision.FP16,
        adapter=AdapterConfig(rank=1, targets=("query_key_value",)),
        training_mode=False,
    )
    plain, quantized = (
        estimate(
            "bloom-176b", config.replace(stack="hf-2022", quantization=q), hardware="a100-80"
        ).time.phases[0]  # type: ignore[union-attr]
        for q in (None, int8)
    )
    assert plain.device_s > plain.host_s
    assert quantized.device_s < 0.7 * plain.device_s
    assert quantized.host_s > 4 * plain.host_s
    assert quantized.seconds / plain.seconds == pytest.approx(
        1.19, abs=0.12
    )  # 15 to 23% slower; 30% here, since fp16 is 7% too short and int8 3% too long
    assert plain.seconds * 1e3 == pytest.approx(fp16_ms, rel=0.18)
    assert quantized.seconds * 1e3 == pytest.approx(int8_ms, rel=0.08)


def test_llm_int8_of_today_starts_half_the_kernels() -> None:
    """bitsandbytes 0.45 stopped quantizing by columns and reordering tiles; a prompt of 2,048
    tokens was and is faster than in fp16."""
    int8 = QuantizationConfig(format="int8", double_quant=False, kbit_preparation=False)
    config = TrainConfig(
        sequence_length=2048,
        precision=Precision.FP16,
        adapter=AdapterConfig(rank=1, targets=("query_key_value",)),
        training_mode=False,
    )
    found = {
        (stack, q is not None): estimate(
            "bloom-176b", config.replace(stack=stack, quantization=q), hardware="a100-80"
        )
        for stack in ("hf-2022", "hf")
        for q in (None, int8)
    }
    first = {key: e.time.phases[0] for key, e in found.items() if e.time is not None}
    assert first["hf", True].host_s < 0.65 * first["hf-2022", True].host_s
    for stack in ("hf-2022", "hf"):
        assert first[stack, True].seconds < first[stack, False].seconds
    assert highest(found["hf-2022", True], Role.ACTIVATIONS) > highest(
        found["hf", True], Role.ACTIVATIONS
    )  # columns of x in int8 stay


# ---------------------------------------------------------------- bert-large's ladder (transformers perf_train_gpu_one, 2022)

# (batch, accumulation, checkpointing, precision, optimizer, NVML's MiB, samples/s)
BERT_LADDER: dict[str, tuple[int, int, bool, Precision, str, int, float]] = {
    "plain": (4, 1, False, Precision.FP32, "auto", 14949, 8.86),
    "accumulation": (1, 4, False, Precision.FP32, "auto", 8681, 7.75),
    "and checkpointing": (1, 4, True, Precision.FP32, "auto", 6775, 5.99),
    "fp16": (4, 1, False, Precision.FP16_AMP, "auto", 13939, 18.64),
    "fp16, accumulation, checkpointing": (1, 4, True, Precision.FP16_AMP, "auto", 7275, 10.09),
    "adafactor": (4, 1, False, Precision.FP32, "adafactor", 12295, 7.96),
    "adafactor and all": (1, 4, True, Precision.FP16_AMP, "adafactor", 4847, 9.06),
    "8-bit adam": (4, 1, False, Precision.FP32, "adamw-8bit", 13085, 9.15),
    "8-bit adam and all": (1, 4, True, Precision.FP16_AMP, "adamw-8bit", 5363, 10.35),
}
BERT_CONTEXT = 1343 * 2**20  # "just to load the kernels", as that page measured before it began
# largest error of a rung: fp16 without checkpointing, 9% too low; the others are within 4%
BERT_MEMORY = 0.10
# the last rungs ran on a slower host than the first: 8-bit Adam 45% too fast, checkpointed fp16
# 21%, the rest 10%
BERT_SPEED = 0.46


@pytest.fixture(scope="module")
def bert_ladder() -> dict[str, Estimate]:
    """The rungs as that page ran them: bert-large for classification at 512 tokens, V100 16 GB,
    transformers of 2022."""
    row = find_row("bert-large-uncased")
    assert row is not None
    config = {**row["config"], "architectures": ["BertForSequenceClassification"]}
    return {
        name: estimate(
            config,
            micro_batch_size=batch,
            sequence_length=512,
            gradient_accumulation_steps=accumulation,
            recompute=FULL if checkpointing else RecomputeConfig(),
            precision=precision,
            optimizer=optimizer,
            attention=Attention.EAGER,
            stack="hf-2022",
            hardware="v100-16",
        )
        for name, (
            batch,
            accumulation,
            checkpointing,
            precision,
            optimizer,
            _,
            _,
        ) in BERT_LADDER.items()
    }


@pytest.mark.parametrize("rung", BERT_LADDER)
def test_bert_large_climbs_its_ladder(rung: str, bert_ladder: dict[str, Estimate]) -> None:
    e, (*_, mib, samples) = bert_ladder[rung], BERT_LADDER[rung]
    assert (e.memory.reserved.value + BERT_CONTEXT) / 2**20 == pytest.approx(mib, rel=BERT_MEMORY)
    assert e.time is not None
    assert e.time.tokens_per_s / 512 == pytest.approx(samples, rel=BERT_SPEED)


def test_the_ladders_steps_are_those_measured(bert_ladder: dict[str, Estimate]) -> None:
    """Each optimisation saves what it saved there: by bytes a parameter where it is the optimizer,
    by activations where it is the batch."""
    predicted = {name: e.memory.reserved.value / 2**20 for name, e in bert_ladder.items()}
    for lower, upper in [
        ("accumulation", "plain"),
        ("and checkpointing", "accumulation"),
        ("adafactor", "plain"),
        ("8-bit adam", "plain"),
    ]:
        assert predicted[upper] - predicted[lower] == pytest.approx(
            BERT_LADDER[upper][5] - BERT_LADDER[lower][5], rel=0.25
        )
    states = (
        bert_ladder["plain"].num_parameters * 4 / 2**20
    )  # Adafactor keeps no second moment of that size; 8 bits are a quarter
    assert predicted["fp16, accumulation, checkpointing"] - predicted[
        "adafactor and all"
    ] == pytest.approx(2 * states, rel=0.15)
    assert predicted["fp16, accumulation, checkpointing"] - predicted[
        "8-bit adam and all"
    ] == pytest.approx(1.5 * states, rel=0.15)
