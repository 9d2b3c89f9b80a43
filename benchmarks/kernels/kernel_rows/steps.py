"""Whole training steps of an 8B-shaped model of a few layers: patched against PEFT + bitsandbytes,
and offloaded against full recompute."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from napkinmath_kernels.checkpoint import Recompute
from napkinmath_kernels.patching import patch, unpatch

from kernel_rows.environment import version_of
from kernel_rows.goals import FULL_RECOMPUTE, PEFT, STEP_LAYERS, STEP_TOKENS, step_goals, step_op
from kernel_rows.timing import Clock, Rows


def is_quantized() -> bool:
    """True where bitsandbytes can hold the base in 4 bits; elsewhere it stays in bf16, and the rows
    are of a LoRA step."""
    return version_of("bitsandbytes") is not None


def _quantize(model: Any, device: torch.device) -> None:
    from bitsandbytes.nn.modules import Linear4bit

    for name, module in list(model.named_modules()):
        if type(module) is torch.nn.Linear and name != "lm_head":
            new = Linear4bit(
                module.in_features,
                module.out_features,
                bias=False,
                compute_dtype=torch.bfloat16,
                quant_type="nf4",
            )
            new.load_state_dict({"weight": module.weight.detach().cpu()})
            model.set_submodule(name, new.to(device))
    model.is_loaded_in_4bit = True


def _model(device: torch.device, tiny: bool) -> Any:
    import peft
    import transformers

    sizes = (64, 128, 2, 1, 200) if tiny else (4096, 14336, 32, 8, 128256)
    hidden, width, heads, kv_heads, vocabulary = sizes
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=STEP_LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=32768,
    )
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if is_quantized():
        _quantize(model, device)
    lora = peft.LoraConfig(
        r=16, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, lora).train()


def _time_step(step: Callable[[], Any], clock: Clock, repeats: int) -> tuple[float, int | None]:
    """(median seconds, peak bytes beyond those before) of whole steps."""
    step()
    clock.synchronize()
    before = torch.cuda.memory_allocated(clock.device) if clock.device.type == "cuda" else 0
    if clock.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(clock.device)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        clock.synchronize()
        times.append(time.perf_counter() - start)
    peak = (
        torch.cuda.max_memory_allocated(clock.device) - before
        if clock.device.type == "cuda"
        else None
    )
    return sorted(times)[len(times) // 2], peak


def run_steps(clock: Clock, rows: Rows, device: torch.device, tiny: bool) -> None:
    """Rows for each way to run the step, in turn on one model, then the goals."""
    op, peer = (step_op(), PEFT) if is_quantized() else (step_op().removeprefix("q"), "peft")
    if clock.seconds_left < (1 if tiny else 25):
        rows.add(
            op=op,
            shape="",
            contestant="napkinmath",
            status="not measured",
            reason="the budget was spent",
        )
        return
    model = _model(device, tiny)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=device.type == "cuda"
    )
    vocabulary = model.get_base_model().config.vocab_size
    ways: dict[str, dict[str, Any] | None] = {
        peer: None,
        "napkinmath": {"attention": "keep"},
        "napkinmath, own attention": {"attention": "napkinmath"},
        "napkinmath, full recompute": {"checkpoint": Recompute.FULL},
        "napkinmath, offloaded": {"checkpoint": Recompute.OFFLOAD},
    }
    for tokens in (16,) if tiny else sorted(STEP_TOKENS):
        ids = torch.randint(0, vocabulary, (1, tokens), device=device)
        figures: dict[str, tuple[float, int | None]] = {}

        def step(ids: torch.Tensor = ids) -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        shape = f"{tokens} tokens"
        for name, options in ways.items():
            if clock.seconds_left < (0 if tiny else 5):
                rows.add(
                    op=op,
                    shape=shape,
                    contestant=name,
                    status="not measured",
                    reason="the budget was spent",
                )
                continue
            try:
                if options is not None:
                    patch(model, **options)
                figures[name] = seconds, peak = _time_step(step, clock, 2 if tiny else 5)
                rows.add(
                    op=op,
                    shape=shape,
                    contestant=name,
                    status="measured",
                    median_s=seconds,
                    tokens_per_s=tokens / seconds,
                    peak_bytes=peak,
                )
            except Exception as error:  # a way that fails is a row, not the end of the run
                rows.add(
                    op=op,
                    shape=shape,
                    contestant=name,
                    status="failed",
                    reason=f"{type(error).__name__}: {error}"[:200],
                )
            finally:
                unpatch(model)
        _goals(op, shape, peer, figures, rows)


def _goals(
    op: str, shape: str, peer: str, figures: dict[str, tuple[float, int | None]], rows: Rows
) -> None:
    theirs, ours = figures.get(peer), figures.get("napkinmath")
    full, offloaded = (
        figures.get("napkinmath, full recompute"),
        figures.get("napkinmath, offloaded"),
    )
    values = {
        peer: theirs[0] / ours[0] if theirs and ours else None,
        f"memory:{peer}": (
            ours[1] / theirs[1] if theirs and ours and theirs[1] and ours[1] else None
        ),
        FULL_RECOMPUTE: offloaded[0] / full[0] if full and offloaded else None,
    }
    for against, goal in step_goals(peer).items():
        row, value = (
            {"op": op, "shape": shape, "contestant": "goal", "against": against, "goal": goal.text},
            values[against],
        )
        if value is None:
            rows.add(**row, status="not measured", reason="one side did not run")
        else:
            rows.add(**row, status="met" if goal.is_met(value) else "missed", value=value)
