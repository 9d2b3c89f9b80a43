"""How long the pre-flight check takes on live models of real size, and what it allocates.

    python benchmarks/speed/preflight_speed.py [--out FILE]

Models are built on meta (their layers, not their bytes, are what is read). Each case runs once
cold, in this process after imports, and then again; the goal is one second.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import warnings

import torch

LLAMA = {"model_type": "llama", "tie_word_embeddings": False, "max_position_embeddings": 8192}
SHAPES = {
    "1.1B": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_hidden_layers": 22,
        "vocab_size": 32000,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
    },
    "70B": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_hidden_layers": 80,
        "vocab_size": 128256,
    },
}


def main() -> None:
    from napkinmath_profiler.preflight import preflight
    from napkinmath_profiler.trace import TraceOptions, prepared_model
    from napkinmath_profiler.tracing.meta_model import TrainMethod, config_from

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="a JSON file for the figures")
    out = parser.parse_args().out
    figures: list[dict[str, object]] = []
    warnings.simplefilter("ignore")
    print(f"{'model':8} {'method':8} {'first s':>8} {'again s':>8} {'peak RSS grows MB':>18}")
    for name, shape in SHAPES.items():
        for method in TrainMethod:
            model = prepared_model(
                config_from({**LLAMA, **shape}), TraceOptions(method=method, checkpointing=True)
            )
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            seconds = []
            for _ in range(2):
                started = time.perf_counter()
                str(
                    preflight(
                        model,
                        "adamw-fused",
                        (4, 4096),
                        hardware="h100",
                        autocast_dtype=torch.bfloat16,
                        raises=False,
                    )
                )
                seconds.append(time.perf_counter() - started)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
            figures.append(
                {
                    "model": name,
                    "method": method.value,
                    "first_s": round(seconds[0], 3),
                    "again_s": round(seconds[1], 3),
                    "grown_mb": round(grown, 1),
                }
            )
            print(f"{name:8} {method.value:8} {seconds[0]:8.2f} {seconds[1]:8.2f} {grown:18.1f}")
    if out:
        with open(out, "w", encoding="utf-8") as file:
            json.dump({"cases": figures}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
