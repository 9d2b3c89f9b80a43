"""Peaks under other losses and kernels against the step that those libraries' own code takes on
meta tensors."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from napkinmath.config.train_config import AUTO_TILES

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytest.importorskip("trl")
pytest.importorskip("liger_kernel")

from agreement_matrix import compare
from analytic_vs_traced import Case

# A vocabulary of more than one tile, so that tiles, their casts and what is left over all occur.
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40000,
}
GEMMA2: dict[str, object] = {
    **LLAMA,
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "head_dim": 64,
    "sliding_window": 64,
    "final_logit_softcapping": 30.0,
}
# Most of what a step holds is the MLP's.
WIDE: dict[str, object] = {**LLAMA, "intermediate_size": 2048, "vocab_size": 512}
GPT2: dict[str, object] = {
    "model_type": "gpt2",
    "n_embd": 256,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 40000,
    "n_positions": 1024,
}
TOLERANCE = 0.001  # scalars, counters and boolean temporaries, beside tiles of 128 MiB
CASES = [
    ("full", "bf16", False),
    ("full", "bf16-amp", True),
    ("lora", "bf16-autocast", True),
    ("qlora", "bf16-autocast", False),
]


@pytest.mark.parametrize("config", [LLAMA, GEMMA2, GPT2], ids=lambda c: c["model_type"])
@pytest.mark.parametrize(("method", "precision", "checkpointing"), CASES)
def test_the_chunked_loss_is_trls(
    config: dict[str, object], method: str, precision: str, checkpointing: bool
) -> None:
    case = Case(
        config=config,
        method=method,
        precision=precision,
        checkpointing=checkpointing,
        loss="chunked",
        sequence=1024,
        optimizer="adamw-fused",
        attention="eager" if config is GEMMA2 else "sdpa_flash",
    )
    cell = compare(str(config["model_type"]), case)
    assert abs(cell.difference) <= TOLERANCE, f"{cell.name}: {cell.difference:+.3%}"


# Sizes of small buffers that a fused operation makes and drops inside are rounded up together in
# its row; a layer here is a few MB.
KERNELS_TOLERANCE = 0.007


@pytest.mark.parametrize(("method", "precision", "checkpointing"), CASES)
@pytest.mark.parametrize(
    ("kernels", "loss"),
    [("hf", "fused"), ("liger", "hf"), ("napkinmath", "hf"), ("napkinmath", "chunked")],
)
def test_patched_models_are_as_their_libraries_run_them(
    kernels: str, loss: str, method: str, precision: str, checkpointing: bool
) -> None:
    case = Case(
        config=LLAMA,
        method=method,
        precision=precision,
        checkpointing=checkpointing,
        kernels=kernels,
        loss=loss,
        sequence=1024,
        optimizer="adamw-fused",
    )
    cell = compare(f"llama, {kernels} kernels, {loss} loss,", case)
    assert abs(cell.difference) <= (TOLERANCE if kernels == "hf" else KERNELS_TOLERANCE), (
        f"{cell.name}: {cell.difference:+.3%}"
    )


@pytest.mark.parametrize("config", [LLAMA, GEMMA2], ids=lambda c: c["model_type"])
@pytest.mark.parametrize("parts", [("norm", "rope", "gate"), ("norm",), ("rope", "loss")])
@pytest.mark.parametrize(("method", "precision", "checkpointing"), CASES[1:3])
def test_parts_of_ligers_operations_are_as_its_switches_choose_them(
    parts: tuple[str, ...],
    config: dict[str, object],
    method: str,
    precision: str,
    checkpointing: bool,
) -> None:
    """axolotl's switches, and transformers' liger_kernel_config."""
    case = Case(
        config=config,
        method=method,
        precision=precision,
        checkpointing=checkpointing,
        kernels="liger",
        kernel_parts=parts,
        sequence=1024,
        optimizer="adamw-fused",
        attention="eager" if config is GEMMA2 else "sdpa_flash",
    )
    cell = compare(f"{config['model_type']}, Liger's {parts}", case)
    assert abs(cell.difference) <= KERNELS_TOLERANCE, f"{cell.name}: {cell.difference:+.3%}"


@pytest.mark.parametrize("precision", ["bf16", "bf16-amp"])
@pytest.mark.parametrize("kernels", ["liger", "napkinmath"])
def test_an_adapter_on_the_head_makes_no_logits(kernels: str, precision: str) -> None:
    """Ours multiplies by it; Liger's loss reads the base's weight, so that it gets no gradient."""
    case = Case(
        config=LLAMA,
        method="lora",
        precision=precision,
        kernels=kernels,
        sequence=1024,
        optimizer="adamw-fused",
        targets=("q_proj", "lm_head"),
    )
    cell = compare(f"llama, {kernels} kernels, LoRA on the head,", case)
    assert abs(cell.difference) <= KERNELS_TOLERANCE, f"{cell.name}: {cell.difference:+.3%}"


# The thin gradients of two adapters of a patched MLP, 64 kB each, which the row counts together.
TILES_TOLERANCE = 0.002


@pytest.mark.parametrize(("method", "precision", "checkpointing"), CASES)
@pytest.mark.parametrize("kernels", ["hf", "napkinmath"])
def test_mlps_in_tiles_are_as_a_checkpoint_of_each_tile_runs_them(
    kernels: str, method: str, precision: str, checkpointing: bool
) -> None:
    """Two tiles, four, and as many as make tiles of about hidden-size tokens."""
    peaks: dict[int, int] = {}
    for tiles in (0, 2, 4, AUTO_TILES):
        case = Case(
            config=WIDE,
            method=method,
            precision=precision,
            checkpointing=checkpointing,
            kernels=kernels,
            mlp_tiles=tiles,
            sequence=1024,
            optimizer="adamw-fused",
        )
        if not tiles:
            peaks[tiles] = case.analytic().peak().nbytes
            continue
        cell = compare(f"llama, {kernels} kernels, {tiles} tiles", case)
        peaks[tiles] = max(cell.analytic.values())
        assert abs(cell.difference) <= TILES_TOLERANCE, f"{cell.name}: {cell.difference:+.3%}"
    if not checkpointing:
        assert max(peaks[4], peaks[AUTO_TILES]) < peaks[0]
