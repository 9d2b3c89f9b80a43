"""How long a traced step takes and how much memory, beside torch.distributed's MemTracker on the
same model.

    python benchmarks/speed/trace_speed.py [--without-peer] [--json FILE]

Seconds are after imports and include building the model; each case runs in a process of its own, so
peak memory is its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pathlib
import platform
import resource
import time
from collections.abc import Callable
from typing import Any

LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 4096}
SHAPES: dict[str, dict[str, object]] = {
    "TinyLlama 1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 22,
        "vocab_size": 32000,
    },
    "Llama 7B": {
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "num_hidden_layers": 32,
        "vocab_size": 32000,
    },
    "Llama 70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
    },
    "Llama 405B": {
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "num_hidden_layers": 126,
        "vocab_size": 128256,
    },
}
METHODS: dict[str, dict[str, object]] = {
    "full": {},
    "qlora, checkpointed": {"method": "qlora", "checkpointing": True},
}


def traced(shape: str, method: str, all_layers: bool) -> dict[str, Any]:
    """One trace of two steps, batch 1 x 2048."""
    import bitsandbytes  # noqa: F401  (imports are not timed)
    import peft  # noqa: F401
    from napkinmath_profiler.trace import trace_config
    from napkinmath_profiler.tracing.meta_model import TrainMethod
    from transformers import LlamaForCausalLM  # noqa: F401

    options: dict[str, Any] = dict(METHODS[method])
    options["method"] = TrainMethod(options.get("method", "full"))
    started = time.perf_counter()
    result = trace_config({**LLAMA, **SHAPES[shape]}, all_layers=all_layers, **options)
    return {
        "seconds": time.perf_counter() - started,
        "events": len(result.events),
        "peak_bytes": result.peak_bytes,
    }


def peer(shape: str) -> dict[str, Any]:
    """MemTracker over the same two steps of the same model on meta."""
    import torch
    from napkinmath_profiler.trace import TraceOptions, optimizer_of, prepared_model
    from napkinmath_profiler.tracing.attention_choice import AttentionBackend
    from napkinmath_profiler.tracing.cuda_choices import AppliedChoices, cuda_choices
    from napkinmath_profiler.tracing.meta_model import config_from, example_inputs
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answers(TorchDispatchMode):
        """MemTracker answers no question for a value; transformers asks one of its mask."""

        def __torch_dispatch__(
            self,
            func: Any,
            types: Any,
            args: tuple[Any, ...] = (),
            kwargs: dict[str, Any] | None = None,
        ) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "meta":
                return True if args[0].dtype == torch.bool else 1
            return func(*args, **(kwargs or {}))

    started = time.perf_counter()
    options, config = TraceOptions(optimizer="momentum"), config_from({**LLAMA, **SHAPES[shape]})
    model = prepared_model(config, options)
    inputs = example_inputs(
        model, config, micro_batch_size=1, sequence_length=2048, attention_mask=False
    )
    optimizer = optimizer_of(model, options)
    assert optimizer is not None
    tracker = MemTracker()
    tracker.track_external(model, optimizer)
    with cuda_choices(AttentionBackend.FLASH, (8, 0), AppliedChoices()), Answers(), tracker:
        for _ in range(2):
            outputs = model(input_ids=inputs["input_ids"], use_cache=False, attention_mask=None)
            outputs.logits.float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    peak = tracker.get_tracker_snapshot("peak")
    return {
        "seconds": time.perf_counter() - started,
        "peak_bytes": max(int(v["Total"]) for v in peak.values()),
        "torch": torch.__version__,
    }


def alone(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """Run ``function`` in a fresh process; adds its peak resident memory, or says how it failed."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_report, args=(theirs, function, arguments))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        return {"error": f"exit code {process.exitcode}"}
    finally:
        process.join()


def _report(pipe: Any, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]) -> None:
    try:
        found = function(*arguments)
    except Exception as error:
        found = {
            "error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        }
    pipe.send(
        {**found, "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    )


def main() -> None:
    """Run every case, print a table, keep it as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--without-peer", action="store_true")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for shape in SHAPES:
        for method in METHODS:
            rows.append(
                {
                    "what": "trace",
                    "model": shape,
                    "method": method,
                    **alone(traced, shape, method, False),
                }
            )
            show(rows[-1])
    rows.append(
        {
            "what": "trace, every layer",
            "model": "Llama 7B",
            "method": "full",
            **alone(traced, "Llama 7B", "full", True),
        }
    )
    show(rows[-1])
    if not arguments.without_peer:
        rows.append(
            {"what": "MemTracker", "model": "Llama 7B", "method": "full", **alone(peer, "Llama 7B")}
        )
        show(rows[-1])
    if arguments.json:
        arguments.json.write_text(
            json.dumps(
                {"machine": platform.processor() or platform.machine(), "rows": rows}, indent=1
            )
            + "\n"
        )


def show(row: dict[str, Any]) -> None:
    """One row of the table."""
    what = f"{row['what']:20} {row['model']:16} {row['method']:20}"
    if "error" in row:
        print(f"{what} {row['error']}")
    else:
        print(
            f"{what} {row['seconds']:8.2f} s  peak {row['peak_bytes'] / 2**30:9.2f} GiB  process"
            f" {row['resident_bytes'] / 2**30:5.2f} GiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
