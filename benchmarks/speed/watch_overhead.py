"""What ``watch()`` costs of a training step: the same steps with it and without, in turn, at
several step lengths.

    python benchmarks/speed/watch_overhead.py [--device cuda:0|cpu] [--rounds 7] [--json FILE]

"inside" is the time spent in the watch's own code over the watched step; "watched / plain" is the
whole difference, with the noise of the machine in it. On a CPU the allocator's figures come from
books kept beside (in both of the runs compared); on a GPU they are read from PyTorch.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / name) for name in ("estimator", "profiler", "kernels", "benchmarks/campaign")
]

import torch  # noqa: E402
from campaign_parts.overhead import watch_overhead  # noqa: E402
from napkinmath_profiler.calibration.devices import choose_device  # noqa: E402
from napkinmath_profiler.calibration.stamp import stamp_of  # noqa: E402
from napkinmath_profiler.trace import TraceOptions  # noqa: E402

WANTED = 0.005
# (hidden size, layers, batch, context) of a Llama: steps of some 30 ms to half a second on a core,
# 20 to 500 ms on a GPU.
SIZES = {
    "cpu": ((128, 2, 1, 64), (256, 4, 2, 96), (384, 8, 2, 128)),
    "cuda": ((1024, 8, 1, 512), (2048, 22, 1, 1024), (2048, 22, 4, 2048)),
}


def config_of(hidden: int, layers: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 64,
        "vocab_size": 4000,
        "num_hidden_layers": layers,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    device = choose_device(arguments.device)
    if not device.is_cuda:
        torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(
        f"{device.name}, torch"
        f" {torch.__version__}\n{'step ms':>10}{'inside us':>12}{'inside':>9}{'watched / plain':>17}"
    )
    for hidden, layers, batch, context in SIZES[device.torch_device.type]:
        options = TraceOptions(
            micro_batch_size=batch,
            sequence_length=context,
            dtype="bf16" if device.is_cuda else "fp32",
        )
        found = watch_overhead(
            config_of(hidden, layers),
            options,
            device.torch_device,
            rounds=arguments.rounds,
            steps=4,
        )
        rows.append(
            {"hidden_size": hidden, "layers": layers, "batch": batch, "context": context, **found}
        )
        print(
            f"{found['plain_step_s'] * 1e3:10.1f}{found['inside_watch_s'] * 1e6:12.0f}{found['share_inside_watch']:9.3%}{1 + found['share_of_step']:17.3f}",
            flush=True,
        )
    slow = [row["plain_step_s"] for row in rows if row["share_inside_watch"] < WANTED]
    print(
        f"below {WANTED:.1%} of the step from {min(slow) * 1e3:.0f} ms a step on"
        if slow
        else f"never below {WANTED:.1%} of the step"
    )
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"stamp": stamp_of(device), "rows": rows}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
