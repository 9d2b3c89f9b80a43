"""The rules' peak of a training step against the real libraries' step on meta tensors, for every
family.

Four cells a family, chosen so that each method, checkpointing or not, both ways of attention and
both kinds of autocast occur; the whole matrix is benchmarks/accuracy/agreement_matrix.py. The sizes are small, so that a tensor too
many or too few is a large share of the peak.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

from agreement.tiny_configs import TINY
from agreement_matrix import SEQUENCE, compare
from analytic_vs_traced import Case

CELLS = [
    ("full", False, "auto"),
    ("lora", True, "auto"),
    ("qlora", False, "eager"),
    ("full", True, "eager"),
]
# Checkpointed cells run under autocast, of half weights with LoRA and of fp32 weights without.
PRECISION = {"full": "bf16-amp", "lora": "bf16-autocast"}
CHECKPOINTED = [cell for cell in CELLS if cell[1]]

# A few hundred bytes a tensor are rounding and bookkeeping (a loss, counters); 0.2% of these peaks
# is less than one activation.
TOLERANCE = 0.002

# Cells in which a detail is known to differ, with the measured difference that must not grow.
KNOWN: dict[tuple[str, str, bool, str], float] = {
    # Chunks of Mamba 2: a recomputed operand dies within its product's node.
    **{
        (family, *cell): 0.005
        for family in ("mamba2", "nemotron_h", "bamba")
        for cell in CHECKPOINTED
    },
    # Zamba 2's Mamba layer is a checkpoint within its hybrid layer's.
    ("zamba2", "lora", True, "auto"): 0.007,
    ("zamba2", "full", True, "eager"): 0.024,
    # Where the recomputation stops, the locals of the frames that it leaves: an index too few.
    ("granitemoe", "lora", True, "auto"): 0.0025,
    ("granitemoehybrid", "lora", True, "auto"): 0.0025,
    ("gemma3n_text", "lora", True, "auto"): 0.0025,
    # Casts of one chunk's slices and of their gradients, while the loop over chunks goes back.
    ("qwen3_next", "lora", True, "auto"): 0.007,
    ("olmo_hybrid", "full", True, "eager"): 0.007,
    # Casts within a step of Jamba's scan.
    ("jamba", "full", True, "eager"): 0.0035,
    # Not explained yet: an fp32 tensor of a recomputed layer that dies earlier or later in torch.
    **{(family, "full", True, "eager"): 0.022 for family in ("bert", "roberta", "distilbert")},
    **{(family, "full", True, "eager"): 0.028 for family in ("t5", "flan_t5")},
    ("opt_projected", "full", True, "eager"): 0.016,
    ("xglm", "lora", True, "auto"): 0.018,
    ("bloom", "lora", True, "auto"): 0.004,
    # The indexer's keys, expanded for each query, are there once more while they are copied.
    ("glm_moe_dsa", "lora", True, "auto"): 0.015,
    ("mamba2", "full", False, "auto"): 0.003,
}

# Cells that the libraries do not run: PEFT's all-linear on routers that return a tuple, on Mamba's
# out_proj, on a quantized dt_proj.
REFUSED = {
    *(
        (family, method)
        for family in ("phimoe", "llama4_text", "mamba", "mamba2", "nemotron_h", "falcon_h1")
        for method in ("lora", "qlora")
    ),
    ("jamba", "qlora"),
    # AltUp clamps its coefficients in place in training, which packed weights do not take.
    ("gemma3n_text", "qlora"),
}


@pytest.mark.parametrize(("method", "checkpointing", "attention"), CELLS)
@pytest.mark.parametrize("family", TINY)
def test_the_peak_is_that_of_the_traced_step(
    family: str, method: str, checkpointing: bool, attention: str
) -> None:
    if (family, method) in REFUSED:
        pytest.skip("the libraries refuse this method for this family")
    case = Case(
        config=TINY[family],
        method=method,
        checkpointing=checkpointing,
        attention=attention,
        sequence=SEQUENCE[method],
        optimizer="adamw-fused",
        precision=PRECISION[method] if checkpointing else "bf16",
    )
    cell = compare(family, case)
    assert abs(cell.difference) <= KNOWN.get(
        (family, method, checkpointing, attention), TOLERANCE
    ), f"{cell.name}: {cell.difference:+.3%}"


# T5's forward lacks one fp32 hidden state of its loss under autocast.
UNDER_AUTOCAST = {"t5": 0.006, "gemma4_unified": TOLERANCE}


@pytest.mark.parametrize("family", UNDER_AUTOCAST)
def test_autocast_casts_masks_and_repeated_keys(family: str) -> None:
    """T5's bias was kept in fp32 too (2.7% high), one key/value head as one (0.9% low)."""
    case = Case(config=TINY[family], attention="auto", precision="bf16-amp")
    cell = compare(family, case)
    assert abs(cell.difference) <= UNDER_AUTOCAST[family], f"{cell.difference:+.3%}"


# Half weights under autocast, as the Trainer's bf16=True has them.
HALVES_UNDER_AUTOCAST = {
    ("deepseek_v3", "full", True): 0.001,
    ("deepseek_v3", "qlora", False): 0.001,
    ("qwen2_moe", "lora", True): 0.001,
    # The indexer's keys, expanded for each query, are there once more while they are copied.
    ("glm_moe_dsa", "full", True): 0.01,
    ("ernie4_5_moe", "full", True): TOLERANCE,
    ("hunyuan_v1_moe", "lora", True): TOLERANCE,
    # A mask of the sampled expert is of the logits' type.
    ("phimoe", "full", True): 0.0025,
    ("minimax", "qlora", True): 0.001,
}


@pytest.mark.parametrize(("family", "method", "checkpointing"), HALVES_UNDER_AUTOCAST)
def test_mixtures_of_halves_under_autocast(
    family: str, method: str, *, checkpointing: bool
) -> None:
    """Sigmoid routers were scored in fp32 and sums over experts copied (DeepSeek V3 checkpointed
    5.6% high), latent attention ran in fp32 (QLoRA 17% high), an indexer expanded fp32 keys (137%
    high), routers' own types were missed (Hunyuan +5.6, Phi -7.1, ERNIE -2.2%, MiniMax +4.5%)."""
    case = Case(
        config=TINY[family],
        method=method,
        checkpointing=checkpointing,
        attention="auto",
        sequence=600,
        optimizer="adamw-fused",
        precision="bf16-autocast",
    )
    cell = compare(family, case)
    allowed = HALVES_UNDER_AUTOCAST[family, method, checkpointing]
    assert abs(cell.difference) <= allowed, f"{cell.difference:+.3%}"
