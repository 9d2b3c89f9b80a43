"""Host time of a QLoRA linear and of a patched step, forward and backward, as ratios within one run.

    python benchmarks/kernels/host_time.py --out benchmarks/results/cpu/host_time.json

What is timed is Python and the dispatcher: tensors are tiny and, in our own forms, the launch that
decodes the weight is replaced by a no-op. PEFT + bitsandbytes runs as installed, with its decoding
on the CPU, so that ratio is kinder to us than a GPU would be. `dense_ratio` has no decoding on
either side: PEFT over a plain frozen linear. Forms take turns; a figure is the median of process
time. Times depend on the machine, so only ratios are written. `step_ratio` is a Llama of four
layers with PEFT over bitsandbytes, patched against as it is: every launch of ours is a no-op, what
torch computes on either side is too small to matter.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import pkgutil
import statistics
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "kernels"))

from napkinmath_kernels import Backend, backend, patch, triton_kernels, use_backend
from napkinmath_kernels.ops import linear_group, qlora, qlora_branch
from napkinmath_kernels.ops.nf4 import quantize

SIZE, RANK, TOKENS = 64, 4, 4
#: CI's ceiling on `op_ratio`: generous, since a shared runner is noisy.
CEILING = 0.9
Step = Callable[[], None]


def _ours(weight: object, call: Callable[..., torch.Tensor]) -> Step:
    module = qlora.QLoRALinear(weight, RANK)  # type: ignore[arg-type]
    x = torch.randn(TOKENS, SIZE, requires_grad=True)
    dy = torch.ones(TOKENS, SIZE)

    def step() -> None:
        call(module, x).backward(dy)

    return step


def _through_op(module: qlora.QLoRALinear, x: torch.Tensor) -> torch.Tensor:
    """The form before: the checks of every call, then the custom op."""
    group = [module.frozen()]
    linear_group.check_linears("qlora_linears", x, group, 0.0)
    return qlora._qlora_linears_op(x, *linear_group.flatten(group, x), 0.0, None)[0]


def _as_module(module: qlora.QLoRALinear, x: torch.Tensor) -> torch.Tensor:
    return module(x)


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
        "ours": _ours(packed, _as_module),
        "custom op": _ours(packed, _through_op),
        "ours, dense": _ours(dense, _as_module),
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


@contextlib.contextmanager
def without_launches() -> Generator[None]:
    """The host path of a GPU: every launch function is reached and does nothing."""
    names = [
        f"{triton_kernels.__name__}.{m.name}" for m in pkgutil.iter_modules(triton_kernels.__path__)
    ]
    with contextlib.ExitStack() as stack:
        for module in map(importlib.import_module, names):
            if hasattr(module, "launch"):
                stack.enter_context(mock.patch.object(module, "launch", lambda *_, **__: None))
        stack.enter_context(mock.patch.object(backend, "is_interpreted", lambda: True))
        stack.enter_context(use_backend(Backend.TRITON))
        yield


def _model() -> Any:
    """A Llama of four layers in bf16, its linears in NF4, PEFT's adapters on all of them."""
    import bitsandbytes
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=64,
    )
    made: Any = transformers.LlamaForCausalLM(config)
    model = made.to(torch.bfloat16)
    for name, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            sizes = (module.in_features, module.out_features)
            four_bit = bitsandbytes.nn.modules.Linear4bit(
                *sizes, bias=False, quant_type="nf4", compute_dtype=torch.bfloat16
            )
            model.set_submodule(name, four_bit.to("cpu"))
    options = {"r": 2, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**options)).train()


def _train_step(model: Any) -> Step:
    ids = torch.randint(0, 64, (1, 2))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        for parameter in trained:
            parameter.grad = None

    return step


def step_ratio(repeats: int) -> float:
    """Host time of a patched step by that of the unpatched one."""
    patched = _model()
    patch(patched)
    ours = _train_step(patched)

    def quiet() -> None:
        with without_launches():
            ours()

    # what no launch has written must not slow torch's arithmetic, nor the choice of its kernels
    torch.set_flush_denormal(True)
    with torch.backends.mkldnn.flags(enabled=False):
        time_of = medians({"patched": quiet, "plain": _train_step(_model())}, repeats)
    return time_of["patched"] / time_of["plain"]


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
        found["step_ratio"] = step_ratio(max(10, repeats // 5))
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
