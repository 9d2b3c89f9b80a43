"""Host time of a QLoRA linear, forward and backward, as ratios within one run.

    python benchmarks/kernels/host_time.py --out benchmarks/results/cpu/host_time.json

What is timed is Python and the dispatcher: tensors are tiny and, in our own forms, the launch that
decodes the weight is replaced by a no-op. PEFT + bitsandbytes runs as installed, with its decoding
on the CPU, so that ratio is kinder to us than a GPU would be. `dense_ratio` has no decoding on
either side: PEFT over a plain frozen linear. Forms take turns; a figure is the median of process
time. Times depend on the machine, so only ratios are written.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

from napkinmath_kernels.ops import qlora, qlora_branch
from napkinmath_kernels.ops.nf4 import quantize

SIZE, RANK, TOKENS = 64, 4, 4
#: CI's ceiling on `op_ratio`: generous, since a shared runner is noisy.
CEILING = 0.9
Step = Callable[[], None]


def _ours(weight: object, call: Callable[..., list[torch.Tensor]]) -> Step:
    adapter = qlora.LoraAdapter(
        torch.randn(RANK, SIZE, requires_grad=True),
        torch.randn(SIZE, RANK, requires_grad=True),
        1.0,
    )
    group = [qlora.FrozenLinear(weight, None, adapter)]  # type: ignore[arg-type]
    x = torch.randn(TOKENS, SIZE, requires_grad=True)
    dy = torch.ones(TOKENS, SIZE)

    def step() -> None:
        call(x, group)[0].backward(dy)

    return step


def _through_op(x: torch.Tensor, group: list[qlora.FrozenLinear]) -> list[torch.Tensor]:
    """The form before: the same checks, then the custom op."""
    qlora.check_linears("qlora_linears", x, group, 0.0)
    return qlora._qlora_linears_op(x, *qlora.flatten(group, x), 0.0, None)


def _peft(base: torch.nn.Module) -> Step:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(
        torch.nn.Sequential(base),  # type: ignore[arg-type]
        LoraConfig(r=RANK, target_modules=["0"], lora_dropout=0.0),
    ).base_model.model[0]  # type: ignore[index]
    x = torch.randn(TOKENS, SIZE, requires_grad=True)
    dy = torch.ones(TOKENS, SIZE)

    def step() -> None:
        model(x).backward(dy)

    return step


def forms() -> dict[str, Step]:
    """A step of each form by name; the peers only where they are installed."""
    packed, dense = quantize(torch.randn(SIZE, SIZE)), torch.randn(SIZE, SIZE)
    found = {
        "ours": _ours(packed, qlora.qlora_linears),
        "custom op": _ours(packed, _through_op),
        "ours, dense": _ours(dense, qlora.qlora_linears),
    }
    try:
        import bitsandbytes
        import peft  # noqa: F401
    except ImportError:
        return found
    linear = torch.nn.Linear(SIZE, SIZE, bias=False)
    found["PEFT, dense"] = _peft(linear)
    found["PEFT + bitsandbytes"] = _peft(
        bitsandbytes.nn.modules.Linear4bit(SIZE, SIZE, bias=False, quant_type="nf4").to("cpu")
    )
    return found


def medians(steps: dict[str, Step], repeats: int) -> dict[str, float]:
    """Median process time of each form, seconds, the forms taking turns."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 20):
        for name, step in steps.items():
            before = time.process_time_ns()
            step()
            if turn >= 20:
                taken[name].append((time.process_time_ns() - before) / 1e9)
    return {name: statistics.median(times) for name, times in taken.items()}


def ratios(repeats: int) -> dict[str, float]:
    """Our time by that of each other form."""
    torch.set_num_threads(1)
    with mock.patch.object(qlora_branch, "decode_into", lambda *_: None):
        time_of = medians(forms(), repeats)
    found = {"op_ratio": time_of["ours"] / time_of["custom op"]}
    if "PEFT, dense" in time_of:
        found["dense_ratio"] = time_of["ours, dense"] / time_of["PEFT, dense"]
        found["peft_bitsandbytes_ratio"] = time_of["ours"] / time_of["PEFT + bitsandbytes"]
        found["op_peft_bitsandbytes_ratio"] = time_of["custom op"] / time_of["PEFT + bitsandbytes"]
    return {name: round(ratio, 3) for name, ratio in found.items()}


def main() -> int:
    """Exit code 1 if the short way is not clearly shorter than the custom op."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=300)
    options = parser.parse_args()
    found = {"torch": torch.__version__, **ratios(options.repeats)}
    text = json.dumps(found, indent=2) + "\n"
    print(text, end="")
    if options.out:
        options.out.write_text(text)
    return int(found["op_ratio"] > CEILING)


if __name__ == "__main__":
    sys.exit(main())
