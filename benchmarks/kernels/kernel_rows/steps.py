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
from kernel_rows.goals import (
    FULL_RECOMPUTE,
    LOST,
    PEFT,
    STEP_LAYERS,
    STEP_TOKENS,
    step_goals,
    step_op,
)
from kernel_rows.lost_context import ContextLost, is_lost
from kernel_rows.timing import Clock, Rows

FULL, OFFLOADED = "napkinmath, full recompute", "napkinmath, offloaded"


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


#: Ways to run the step, and the options of `patch` for each; the peer's model stays as it is.
WAYS: dict[str, dict[str, Any]] = {
    "napkinmath": {"attention": "keep"},
    "napkinmath, own attention": {"attention": "napkinmath"},
    FULL: {"checkpoint": Recompute.FULL},
    OFFLOADED: {"checkpoint": Recompute.OFFLOAD},
}
SECONDS_TO_BUILD, SECONDS_A_WAY = 25.0, 5.0


def run_steps(clock: Clock, rows: Rows, device: torch.device, tiny: bool) -> None:
    """Rows for each way to run the step, in turn on one model, then the goals. What an earlier run
    measured is not measured again. Raises ContextLost."""
    op, peer = (step_op(), PEFT) if is_quantized() else (step_op().removeprefix("q"), "peft")
    sizes = (16,) if tiny else tuple(sorted(STEP_TOKENS))
    left = {
        (tokens, name)
        for tokens in sizes
        for name in (peer, *WAYS)
        if not rows.is_settled(op, f"{tokens} tokens", name)
    }
    if not left:
        return
    if clock.seconds_left < (1 if tiny else SECONDS_TO_BUILD):
        reason = "the budget was spent"
        rows.add(op=op, shape="", contestant="napkinmath", status="not measured", reason=reason)
        return
    model = _model(device, tiny)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=device.type == "cuda"
    )
    vocabulary = model.get_base_model().config.vocab_size
    for tokens in sizes:
        ids = torch.randint(0, vocabulary, (1, tokens), device=device)

        def step(ids: torch.Tensor = ids) -> None:
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

        for name in (peer, *WAYS):
            if (tokens, name) in left:
                row = {"op": op, "shape": f"{tokens} tokens", "contestant": name}
                rows.add(**row, **_measure_way(model, WAYS.get(name), step, tokens, clock))
                if rows.rows[-1]["status"] == LOST:
                    raise ContextLost(f"{op}, {name}")
        _goals(op, f"{tokens} tokens", peer, rows)


def _measure_way(
    model: Any,
    options: dict[str, Any] | None,
    step: Callable[[], None],
    tokens: int,
    clock: Clock,
) -> dict[str, Any]:
    """One way's figures, or why there are none."""
    tiny = clock.device.type != "cuda"
    if clock.seconds_left < (0 if tiny else SECONDS_A_WAY):
        return {"status": "not measured", "reason": "the budget was spent"}
    try:
        if options is not None:
            patch(model, **options)
        seconds, peak = _time_step(step, clock, 2 if tiny else 5)
    except Exception as error:  # a way that fails is a row, not the end of the run
        reason = f"{type(error).__name__}: {error}"[:200]
        error.__traceback__ = None  # its frames hold tensors
        return {"status": LOST if is_lost(clock.device) else "failed", "reason": reason}
    finally:
        unpatch(model)
        model.zero_grad(set_to_none=True)
    return {
        "status": "measured",
        "median_s": seconds,
        "tokens_per_s": tokens / seconds,
        "peak_bytes": peak,
    }


def _goals(op: str, shape: str, peer: str, rows: Rows) -> None:
    figures: dict[str, tuple[float, int | None]] = {
        row["contestant"]: (row["median_s"], row["peak_bytes"])
        for row in rows.of(op, shape)
        if row["status"] == "measured"
    }
    theirs, ours = figures.get(peer), figures.get("napkinmath")
    full, offloaded = figures.get(FULL), figures.get(OFFLOADED)
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
