"""Denoisers of diffusers: the step priced by the rules and run by its classes on meta tensors.

    python benchmarks/accuracy/denoisers.py            # compares, where diffusers is installed
    python benchmarks/accuracy/denoisers.py --record   # writes what the tests compare with

A step is that of diffusers' examples: the model under autocast, mean squared error in fp32, clipped
gradients, AdamW. Latents and the text's embeddings are made before it. At the sizes of real models a
case takes 10 to 60 s.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import warnings
from typing import Any

from napkinmath.catalog.models import find_row
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import (
    AdapterConfig,
    Batch,
    Precision,
    RecomputeConfig,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.ir.model_spec import ModelSpec
from napkinmath.lowering.build import build_step
from napkinmath.lowering.policy import Policy
from napkinmath.memory.simulate import simulate
from napkinmath.models.families import read_config

RECORDED = pathlib.Path(__file__).parents[2] / "tests/models/denoisers_traced.json"
LORA, FULL = "lora", "full"
# Weights and autocast of the precisions of diffusers' examples.
TYPES = {
    "bf16-autocast": ("bfloat16", "bfloat16"),
    "bf16-amp": ("float32", "bfloat16"),
    "fp16-amp": ("float32", "float16"),
    "bf16": ("bfloat16", None),
    "bf16-fp8-base": ("float8_e4m3fn", "bfloat16"),
}
AMP = {"precision": "bf16-amp"}
NARROW = {"precision": "bf16-fp8-base"}
PLAIN = {"precision": "bf16"}
FOUR = {"fewer": {"num_layers": 4}}
FEW = {"fewer": {"num_layers": 3, "num_single_layers": 4}}
CASES: tuple[dict[str, Any], ...] = tuple(
    {"model": model, "size": size, "batch": batch, "method": method, "checkpointing": again, **more}
    for model, size, batch, method, again, more in (
        ("sd-1.5", (512, 512), 1, LORA, False, {}),
        ("sd-1.5", (640, 512), 3, LORA, True, {}),
        ("sd-1.5", (512, 512), 4, FULL, False, AMP),
        ("sd-2.1", (768, 768), 1, LORA, True, {}),
        ("sdxl", (1024, 1024), 1, LORA, True, {}),
        ("sdxl", (768, 1024), 2, LORA, False, {}),
        ("sdxl", (1024, 1024), 1, FULL, True, AMP),
        ("sd3-medium", (1024, 1024), 2, LORA, False, {}),
        ("sd3-medium", (512, 512), 1, FULL, True, AMP),
        ("sd3.5-medium", (1024, 1024), 1, LORA, True, {}),
        ("sd3.5-large", (1024, 512), 1, LORA, True, {"fewer": {"num_layers": 5}}),
        ("flux.1-dev", (1024, 1024), 1, LORA, True, FEW),
        ("flux.1-dev", (768, 512), 2, LORA, True, FEW),
        ("flux.1-dev", (1024, 1024), 1, LORA, False, FEW),
        ("flux.1-schnell", (512, 512), 1, FULL, True, {**FEW, **AMP}),
        ("flux.1-dev", (1024, 1024), 1, LORA, True, {}),
        ("flux.1-dev", (512, 512), 1, LORA, True, NARROW),
        ("flux.1-dev", (512, 512), 1, LORA, False, {**FEW, **NARROW}),
        ("sd-1.5", (512, 512), 1, LORA, True, NARROW),
        ("sd-1.5", (512, 512), 1, LORA, False, NARROW),
        ("wan2.1-t2v-1.3b", (832, 480), 1, LORA, True, {"frames": 33}),
        ("wan2.1-t2v-1.3b", (832, 480), 2, LORA, False, {"frames": 17, **FOUR}),
        ("wan2.1-t2v-1.3b", (512, 512), 1, FULL, True, {"frames": 1, **FOUR, **AMP}),
        ("wan2.1-t2v-1.3b", (512, 512), 1, LORA, False, {"frames": 5, **FOUR, **PLAIN}),
        ("wan2.1-i2v-14b", (832, 480), 1, LORA, True, {"frames": 49, **FOUR}),
        ("wan2.1-i2v-14b", (512, 512), 2, LORA, False, {"frames": 9, **FOUR}),
        ("wan2.2-t2v-a14b", (1280, 720), 1, LORA, True, {"frames": 81}),
        ("wan2.2-i2v-a14b", (512, 512), 1, LORA, True, {"frames": 17, **FOUR}),
        ("qwen-image", (1024, 1024), 1, LORA, True, {}),
        ("qwen-image", (768, 512), 2, LORA, True, {}),
        ("qwen-image", (1024, 1024), 1, LORA, False, {"fewer": {"num_layers": 10}}),
        ("qwen-image", (512, 512), 1, LORA, False, {**FOUR, **PLAIN}),
        ("qwen-image", (512, 512), 1, FULL, True, {**FOUR, **AMP}),
        ("wan2.2-ti2v-5b", (1280, 704), 1, LORA, True, {"frames": 49, **FOUR}),
    )
)


def fields_of(case: dict[str, Any]) -> dict[str, Any]:
    """The model's config, of fewer layers where the case says so."""
    row = find_row(case["model"])
    assert row is not None
    return {**row["config"], **case.get("fewer", {})}


def spec_of(case: dict[str, Any]) -> ModelSpec:
    """The model of a case."""
    return read_config(fields_of(case))


def priced(case: dict[str, Any]) -> dict[str, int]:
    """Peak and parameters by the rules."""
    spec = spec_of(case)
    canvas = spec.canvas
    assert canvas is not None
    adapter = AdapterConfig(rank=16, targets=canvas.targets, dtype="base")
    kind = RecomputeKind.FULL if case["checkpointing"] else RecomputeKind.NONE
    config = TrainConfig(
        micro_batch_size=case["batch"],
        precision=Precision(case.get("precision", "bf16-autocast")),
        adapter=adapter if case["method"] == LORA else None,
        recompute=RecomputeConfig(kind=kind),
        optimizer="adamw-foreach",
        batch=Batch(image_size=tuple(case["size"]), frames=case.get("frames", 0)),
    )
    step = build_step(spec, Policy(config, STACKS["diffusers"]))
    weights = [(w, run.count) for run in step.runs for w in run.block.weights if not w.buffer]
    trained = sum(int(w.elements) * n for w, n in weights if w.trainable)  # type: ignore[arg-type]
    return {"peak": simulate(step, steps=2).peak().nbytes, "trained": trained}


def traced(case: dict[str, Any]) -> dict[str, int]:
    """The same of diffusers' class."""
    import contextlib

    import diffusers  # pyright: ignore[reportMissingImports]
    import torch
    import torch.nn.functional as F
    from napkinmath_profiler.trace import trace

    _as_cuda_norms()
    fields = fields_of(case)
    cls = getattr(diffusers, fields.pop("model_type"))
    stored, autocast = TYPES[case.get("precision", "bf16-autocast")]
    with torch.device("meta"):
        model = cls(**fields).to(getattr(torch, stored))
    if case["method"] == LORA:
        from peft import LoraConfig

        canvas = spec_of(case).canvas
        assert canvas is not None
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=list(canvas.targets)))
    if case["checkpointing"]:
        model.enable_gradient_checkpointing()
    if hasattr(model, "rope"):  # from_pretrained leaves Wan's tables in fp32
        model.rope.float()
    model.train()
    given = stored
    if autocast and stored.startswith("float8"):  # sd-scripts makes adapters of its own in fp32
        given = autocast
        for p in model.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    inputs, target = _inputs(case, fields, getattr(torch, given))
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step(model: Any, optimizer: Any) -> None:
        under = contextlib.nullcontext()
        if autocast:
            under = torch.autocast("cuda", getattr(torch, autocast))
        with under:
            predicted = model(**inputs, return_dict=False)[0]
        loss: Any = F.mse_loss(predicted.float(), target.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    optimizer = torch.optim.AdamW(parameters)
    timeline = trace(model, optimizer=optimizer, step=step)
    # what the last block makes of the text may be read by nobody, and gets no gradient
    return {"peak": timeline.peak().nbytes, "trained": sum(p.numel() for p in optimizer.state)}


def _inputs(case: dict[str, Any], fields: dict[str, Any], dtype: Any) -> tuple[dict[str, Any], Any]:
    """What the model is called with, and the target."""
    import torch

    (width, height), rows = case["size"], case["batch"]
    canvas = spec_of(case).canvas
    assert canvas is not None

    def new(*shape: int, dtype: Any = dtype) -> Any:
        return torch.empty(rows, *shape, dtype=dtype, device="meta")

    if "text_dim" in fields:
        return _of_video(case, canvas, fields, new)
    channels = fields.get("in_channels", 4)
    text = fields.get("joint_attention_dim") or fields["cross_attention_dim"]
    latents = new(channels, height // 8, width // 8)
    found = {"encoder_hidden_states": new(canvas.text, text), "timestep": new()}
    if "pooled_projection_dim" not in fields and "joint_attention_dim" in fields:  # Qwen-Image
        tokens = (height // 16) * (width // 16)
        latents = found["hidden_states"] = new(tokens, channels)
        found["img_shapes"] = [[(1, height // 16, width // 16)]] * rows
        return found, torch.empty_like(latents)
    if "sample_size" not in fields:  # FLUX
        tokens = (height // 16) * (width // 16)
        latents = new(tokens, channels)
        places = {"txt_ids": canvas.text, "img_ids": tokens}
        for name, length in places.items():
            found[name] = torch.empty(length, 3, dtype=dtype, device="meta")
        found["guidance"] = new(dtype=torch.float32) if fields["guidance_embeds"] else None
    if "pooled_projection_dim" in fields:
        found["hidden_states"] = latents
        found["pooled_projections"] = new(fields["pooled_projection_dim"])
    else:
        found["sample"] = latents
        if fields.get("addition_embed_type"):
            found["added_cond_kwargs"] = {"text_embeds": new(1280), "time_ids": new(6)}
    return found, torch.empty_like(latents)


def _of_video(
    case: dict[str, Any], canvas: Any, fields: dict[str, Any], new: Any
) -> tuple[dict[str, Any], Any]:
    """Of Wan: latents of frames, and where it reads one the first picture's features."""
    import torch

    (width, height), frames = case["size"], (case["frames"] - 1) // 4 + 1
    shape = (frames, height // canvas.factor, width // canvas.factor)
    found = {
        "hidden_states": new(fields["in_channels"], *shape),
        "timestep": torch.empty(case["batch"], dtype=torch.int64, device="meta"),
        "encoder_hidden_states": new(canvas.text, fields["text_dim"]),
    }
    if "image_dim" in fields:
        found["encoder_hidden_states_image"] = new(257, fields["image_dim"])
    return found, new(fields["out_channels"], *shape)


def _as_cuda_norms() -> None:
    """Makes F.rms_norm one operation, as at::_fused_rms_norm is on CUDA: on meta torch takes it
    apart."""
    import torch

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any) -> Any:
            kept = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
            ctx.save_for_backward(x, weight, kept)
            return torch.empty_like(x)

        @staticmethod
        def backward(ctx: Any, *grad_outputs: Any) -> Any:
            x, weight, _ = ctx.saved_tensors
            needs = ctx.needs_input_grad
            return tuple(
                torch.empty_like(v) if n else None for v, n in zip((x, weight), needs, strict=True)
            )

    def rms_norm(x: Any, shape: Any, weight: Any = None, eps: Any = None) -> Any:
        if torch.is_autocast_enabled("cuda"):
            x, weight = x.float(), weight.float()
        apply: Any = Fused.apply  # pyright: ignore
        return apply(x, weight)

    torch.nn.functional.rms_norm = rms_norm


def main() -> None:
    """Compares every case, and records the traced figures if asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--only", default="", help="models whose name contains this")
    arguments = parser.parse_args()
    import diffusers  # pyright: ignore[reportMissingImports]
    import torch

    cases: list[dict[str, Any]] = []
    warnings.simplefilter("ignore")
    for case in CASES:
        if arguments.only not in case["model"]:
            continue
        ours, theirs = priced(case), traced(case)
        off = (ours["peak"] / theirs["peak"] - 1) * 100
        print(json.dumps(case), ours, theirs, f"{off:+.4f}%", flush=True)
        cases.append({**case, **theirs})
    if arguments.record and not arguments.only:
        used: tuple[Any, ...] = (diffusers, torch)
        versions = {each.__name__: str(each.__version__) for each in used}
        RECORDED.write_text(json.dumps({"versions": versions, "cases": cases}, indent=1) + "\n")


if __name__ == "__main__":
    main()
