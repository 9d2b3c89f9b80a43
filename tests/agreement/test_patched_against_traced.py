"""The rules' peak of a model patched by `napkinmath_kernels.patch` against the patched model's own
step on meta tensors."""

from __future__ import annotations

import logging
import os
from typing import Any, Literal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")
pytest.importorskip("triton")

from agreement.tiny_configs import TINY
from analytic_vs_traced import Case, _traced_attention, phase_peaks, traced_phase_peaks
from napkinmath.base.errors import InputError
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.parallel_config import DataParallel, ParallelConfig
from napkinmath.config.train_config import AdapterConfig, Kernels, OffloadConfig, TrainConfig
from napkinmath.estimate import estimate
from napkinmath.lowering.build import build_step
from napkinmath.lowering.choices import resolve
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config
from napkinmath_profiler.trace import trace_config
from napkinmath_profiler.tracing.meta_model import AdapterOptions, QuantizationOptions, TrainMethod

FAMILIES = ("llama", "llama_mha", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")
CELLS = [
    ("full", False, "auto", 0.0),
    ("lora", True, "eager", 0.1),
    ("qlora", False, "auto", 0.0),
    ("qlora", True, "auto", 0.0),
]
# The rows count what an adapter's backward makes and drops as if it were there at once: 21 to 37 kB
# of 11 to 15 MB here.
TOLERANCE = 0.004
# Token ids and labels are the batch's own in the rules and the caller's in the trace.
FP8_TOLERANCE = 0.0005


def peaks(
    family: str,
    kernels: Kernels,
    method: str,
    checkpointing: bool,
    attention: str,
    dropout: float,
    *,
    embeddings: Literal["keep", "host", "int8"] = "keep",
    form: str = "nf4",
    **sizes: object,
) -> tuple[int, int]:
    """(by the rules, traced)."""
    model = {**TINY[family], **sizes}
    case = Case(
        config=model,
        method=method,
        checkpointing=checkpointing,
        attention=attention,
        dropout=dropout,
        optimizer="adamw-fused",
    )
    spec = read_config(model)
    offload = OffloadConfig(embeddings=embeddings == "host")
    config = case.train_config().replace(kernels=kernels, stack="hf-bare", offload=offload)
    if config.quantization is not None:
        config = config.replace(
            quantization=config.quantization.replace(
                format=form, embeddings="int8" if embeddings == "int8" else "auto"
            )
        )
    ours = simulate(build_step(spec, resolve(spec, config, None)), steps=2)
    result = trace_config(
        model,
        kernels=kernels,
        embeddings=embeddings,
        method=TrainMethod(method),
        micro_batch_size=case.batch,
        sequence_length=case.sequence,
        dtype="bf16",
        checkpointing=checkpointing,
        use_reentrant=False,
        optimizer="adamw-fused",
        adapters=AdapterOptions(rank=case.rank, dropout=dropout),
        quantization=QuantizationOptions(quant_type=form),
        **_traced_attention(attention),
    )
    return max(phase_peaks(ours).values()), max(traced_phase_peaks(result).values())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("method", "checkpointing", "attention", "dropout"), CELLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_of_a_patched_model(
    family: str, method: str, checkpointing: bool, attention: str, dropout: float
) -> None:
    ours, traced = peaks(family, Kernels.NAPKINMATH, method, checkpointing, attention, dropout)
    assert ours == pytest.approx(traced, rel=TOLERANCE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kernels", "tolerance"), [(Kernels.HF, FP8_TOLERANCE), (Kernels.NAPKINMATH, TOLERANCE)]
)
@pytest.mark.parametrize(("family", "checkpointing"), [("qwen2", False), ("phi3", True)])
def test_the_peak_over_fp8_weights(
    kernels: Kernels, tolerance: float, family: str, checkpointing: bool
) -> None:
    """With biases, joint projections, dropout: transformers' FP8 linears as they are, and under our
    operations."""
    dropout = 0.1 if checkpointing else 0.0
    ours, traced = peaks(family, kernels, "qlora", checkpointing, "auto", dropout, form="fp8")
    assert ours == pytest.approx(traced, rel=tolerance)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "phi3"])
def test_the_peak_of_a_model_with_liger(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """Frozen heads alone: off CUDA Liger sums a trained head's gradient through an fp32 copy of
    it."""
    caplog.set_level(
        logging.CRITICAL
    )  # a captured warning about missing backends holds the frame it came from, and its tensors
    pytest.importorskip("liger_kernel")
    ours, traced = peaks(family, Kernels.LIGER, "lora", False, "auto", 0.0)
    assert ours == pytest.approx(traced, rel=TOLERANCE)


@pytest.mark.parametrize("kernels", [Kernels.NAPKINMATH, Kernels.LIGER, Kernels.UNSLOTH])
def test_a_family_that_the_patch_does_not_know_is_refused_by_name(kernels: Kernels) -> None:
    with pytest.raises(
        InputError,
        match=rf"--kernels {kernels.value} does not know falcon models.*use --kernels hf",
    ):
        estimate("falcon-7b", TrainConfig(kernels=kernels, adapter=AdapterConfig()))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("how", "method", "checkpointing"),
    [("host", "lora", False), ("host", "qlora", True), ("int8", "qlora", True)],
)
def test_the_peak_with_an_embedding_held_otherwise(
    how: Literal["host", "int8"], method: str, checkpointing: bool
) -> None:
    """A table that is most of what a step holds, on the host or in 8 bits."""
    given = ("llama", Kernels.NAPKINMATH, method, checkpointing, "auto", 0.0)
    sizes = {"vocab_size": 20000, "tie_word_embeddings": False}
    ours, traced = peaks(*given, embeddings=how, **sizes)
    assert ours == pytest.approx(traced, rel=TOLERANCE)
    assert ours < 0.9 * peaks(*given, **sizes)[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kernels": Kernels.HF, "adapter": AdapterConfig()}, "add --kernels napkinmath"),
        ({"kernels": Kernels.LIGER, "adapter": AdapterConfig()}, "add --kernels napkinmath"),
        ({"kernels": Kernels.NAPKINMATH}, "add --lora or --qlora"),
        (
            {
                "kernels": Kernels.NAPKINMATH,
                "adapter": AdapterConfig(),
                "parallel": ParallelConfig(data_parallel=DataParallel.DDP, data_parallel_size=2),
            },
            "is for one GPU",
        ),
    ],
)
def test_embeddings_that_cannot_be_on_the_host_are_refused(
    options: dict[str, Any], said: str
) -> None:
    config = TrainConfig(offload=OffloadConfig(embeddings=True), **options)
    with pytest.raises(InputError, match=said):
        estimate("llama-3.1-8b", config)


OWN_MODULES = [name for name, stack in STACKS.items() if stack.runs_own_modules]


@pytest.mark.parametrize("stack", OWN_MODULES)
def test_a_stack_with_modules_of_its_own_takes_no_patch(stack: str) -> None:
    """What patches the classes of transformers reaches none of Megatron's, torchtune's, ..."""
    adapter = AdapterConfig()
    for kernels in (Kernels.NAPKINMATH, Kernels.LIGER, Kernels.UNSLOTH):
        with pytest.raises(InputError, match=f"which stack {stack} does not run; use --kernels hf"):
            estimate("llama-3.2-1b", TrainConfig(kernels=kernels, adapter=adapter, stack=stack))
    with pytest.raises(InputError, match="--mlp-tiles wraps the MLPs of transformers"):
        estimate("llama-3.2-1b", TrainConfig(mlp_tiles=4, stack=stack)).peak.nbytes  # noqa: B018


def test_experts_that_stay_whole_are_named() -> None:
    tiled = TrainConfig(mlp_tiles=4, adapter=AdapterConfig())
    assert any("experts whole" in said for said in estimate("mixtral-8x7b", tiled).assumptions)
    assert not any("experts" in said for said in estimate("llama-3.2-1b", tiled).assumptions)


def test_unsloth_without_adapters_is_refused() -> None:
    with pytest.raises(InputError, match="add --lora or --qlora"):
        estimate("llama-3.2-1b", TrainConfig(kernels=Kernels.UNSLOTH))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("mixtral", "lora"),
        ("qwen3_moe", "lora"),
        ("gpt_oss", "full"),
        ("gpt_oss", "lora"),
        ("gpt_oss", "qlora"),
    ],
)
def test_the_peak_of_a_patched_mixture(family: str, method: str) -> None:
    """The experts' products stay grouped, and the gate between them is one operation; gpt-oss keeps
    its own gate and rotation."""
    attention = "eager" if family == "gpt_oss" else "auto"
    ours, traced = peaks(family, Kernels.NAPKINMATH, method, False, attention, 0.0)
    assert ours == pytest.approx(traced, rel=TOLERANCE)
