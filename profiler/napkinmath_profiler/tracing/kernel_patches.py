"""Other people's kernels and losses put into a transformers model, by the entry points that their
own users call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import torch
from napkinmath.base.installing import pip_install
from napkinmath.catalog.kernels import LIGER_SWITCHES
from napkinmath.config.train_config import AUTO_TILES, Kernels, Loss
from torch import nn

from napkinmath_profiler.tracing.quantized_model import forget_meta_tables
from napkinmath_profiler.tracing.trace_errors import TraceError

LIGER_LOSS_ONLY = {
    "rope": False,
    "rms_norm": False,
    "swiglu": False,
    "geglu": False,
    "cross_entropy": False,
    "layer_norm": False,
}
LIGER_WITHOUT_LOSS = {"fused_linear_cross_entropy": False, "cross_entropy": False}
TRL_OUTPUTS = ("log_probs", "entropy", "is_top1")  # trl/trainer/sft_trainer.py SFTTrainer.__init__


def patch_library(
    model: nn.Module, kernels: Kernels, loss: Loss, parts: tuple[str, ...] = ()
) -> None:
    """Patches a plain transformers model in place, before quantization and adapters, as its users'
    libraries do; of Liger's operations `parts`, if any are named.

    Raises TraceError where the library is not installed or does not know the model.
    """
    if kernels is Kernels.UNSLOTH:
        raise TraceError(
            "unsloth's patches need a GPU to be imported; use the analytic estimate for"
            " kernels=unsloth"
        )
    if kernels is Kernels.AXOLOTL:
        raise TraceError(
            "axolotl's adapter operations are not traced; use the analytic estimate for"
            " kernels=axolotl"
        )
    if kernels is Kernels.LIGER:
        chosen = {name: part in parts for name, part in LIGER_SWITCHES.items()} if parts else {}
        chosen |= {"cross_entropy": False} if parts else {}
        _apply_liger(model, chosen | (LIGER_WITHOUT_LOSS if loss is Loss.CHUNKED else {}))
    elif loss is Loss.FUSED and kernels is Kernels.HF:
        _apply_liger(model, {**LIGER_LOSS_ONLY, "fused_linear_cross_entropy": True})
    if loss is Loss.CHUNKED:
        _apply_trl_head(model)


def patch_adapted(
    model: nn.Module,
    kernels: Kernels,
    mlp_tiles: int = 0,
    *,
    embeddings: Literal["keep", "host", "int8"] = "keep",
) -> None:
    """Our own kernels take the place of modules as adapters and quantization left them; MLPs run in
    tiles whosever their kernels are."""
    ours = kernels is Kernels.NAPKINMATH
    if not ours and not mlp_tiles:
        return
    try:
        from napkinmath_kernels.patching import patch
        from napkinmath_kernels.weight_buffer import SHARED_BUFFER
    except ImportError as missing:
        raise TraceError(
            f"napkinmath's kernels cannot be imported ({missing}); {pip_install('kernels')}"
        ) from missing
    SHARED_BUFFER.release()  # each trace makes its own, as a process does
    tiles = "auto" if mlp_tiles == AUTO_TILES else mlp_tiles or None
    patch(
        model,
        norm=ours,
        rope=ours,
        mlp=ours,
        qlora=ours,
        loss=ours,
        mlp_tiles=tiles,
        embeddings=embeddings,
    )


def forward_arguments(loss: Loss) -> dict[str, Any]:
    """What a patched forward is called with besides the batch."""
    return {"fused_lm_head": True} if loss is Loss.CHUNKED else {}


def _apply_liger(model: nn.Module, chosen: dict[str, bool]) -> None:
    """transformers/integrations/liger.py apply_liger_kernel, which the Trainer calls for
    use_liger_kernel=True."""
    try:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance
        from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN
    except ImportError as missing:
        raise TraceError(
            "liger-kernel is not installed; `pip install liger-kernel`, or use the analytic"
            " estimate"
        ) from missing
    patched: Any = model
    kind: str = patched.config.model_type
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(kind)
    if apply is None:
        raise TraceError(
            f"liger-kernel does not know model type {kind!r}; it knows"
            f" {', '.join(sorted(MODEL_TYPE_TO_APPLY_LIGER_FN))}"
        )
    _find_implementations()
    known = inspect.signature(apply).parameters
    _apply_liger_kernel_to_instance(
        model=patched, **{name: value for name, value in chosen.items() if name in known}
    )


def _find_implementations() -> None:
    """Liger looks for its backends at an operation's first call; imports that fail there would keep
    frames, and so tensors, alive."""
    try:
        from liger_kernel.backends import registry
    except ImportError:  # versions before 0.8 have none
        return
    for operation in list(getattr(registry, "_DISCOVERY_MAP", ())):
        registry.list_registered(operation)


def _apply_trl_head(model: nn.Module) -> None:
    """TRL's chunked log-probabilities: the head runs tile by tile and no logits are held
    (trl/kernels/chunked_logprob.py)."""
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as missing:
        raise TraceError(
            "the chunked loss is TRL's (>= 1.10): `pip install trl`, or use the analytic estimate"
        ) from missing
    add_fused_lm_head(model, outputs=TRL_OUTPUTS)  # type: ignore[arg-type]


def _modeling_modules(model: nn.Module) -> set[ModuleType]:
    """transformers' modules that define the parts of ``model``."""
    names = {type(part).__module__ for part in model.modules()}
    return {
        sys.modules[name]
        for name in names
        if name in sys.modules and sys.modules[name].__name__.startswith("transformers.models.")
    }


@contextmanager
def libraries_restored(model: nn.Module) -> Generator[None]:
    """Undoes afterwards what a trace changed beyond its model: names and forwards in the modeling
    modules, bitsandbytes' tables."""
    names = [(module, dict(vars(module))) for module in _modeling_modules(model)]
    classes = [
        value
        for _, known in names
        for value in known.values()
        if isinstance(value, type) and issubclass(value, nn.Module)
    ]
    forwards = [
        (kind, kind.__dict__["forward"]) for kind in set(classes) if "forward" in kind.__dict__
    ]
    try:
        yield
    finally:
        for module, known in names:
            vars(module).update(known)
        for kind, forward in forwards:
            kind.forward = forward  # type: ignore[method-assign]
        forget_meta_tables()


@contextmanager
def trl_on_cuda() -> Generator[None]:
    """TRL asks for the device's name before it launches a kernel or a product with fp32 output: on
    meta it gets CUDA's answers."""
    if "trl" not in sys.modules:  # nothing of it runs, and importing it takes longer than a trace
        yield
        return
    try:
        from trl.kernels import chunked_logprob
        from trl.trainer import utils
    except ImportError:
        yield
        return

    def use_triton(device: torch.device) -> bool:
        return device.type in ("cuda", "xpu", "meta")

    with ExitStack() as stack:
        for module in (chunked_logprob, utils):
            if hasattr(module, "_use_triton"):
                stack.enter_context(mock.patch.object(module, "_use_triton", use_triton))
        stack.enter_context(
            mock.patch.object(
                chunked_logprob, "_addmm_fp32", _in_place_product(chunked_logprob._addmm_fp32)
            )
        )
        yield


def _in_place_product(add: Callable[..., None]) -> Callable[..., None]:
    def product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
        if acc.device.type != "meta":
            add(
                acc, a, b
            )  # on CUDA one GEMM writes fp32 over the accumulator: nothing is allocated

    return product


@contextmanager
def fp8_on_cuda() -> Generator[None]:
    """transformers' FP8 product on Hopper (deepgemm.py deepgemm_fp8_fp4_linear): the input in FP8
    with a scale for 128 values of a row, then the output; its kernels come from the hub."""
    module = sys.modules.get("transformers.integrations.finegrained_fp8")
    if module is None or not hasattr(module, "fp8_linear"):
        yield
        return
    own = module.fp8_linear

    def product(input: torch.Tensor, weight: torch.Tensor, *rest: Any) -> torch.Tensor:
        if not input.is_meta:
            return own(input, weight, *rest)
        rows = input.numel() // input.shape[-1]
        narrow = input.new_empty((rows, input.shape[-1]), dtype=torch.float8_e4m3fn)
        scales = input.new_empty((rows, -(-input.shape[-1] // 128)), dtype=torch.float32)
        output = input.new_empty((*input.shape[:-1], weight.shape[0]))
        del narrow, scales
        return output

    with mock.patch.object(module, "fp8_linear", product):
        yield


@contextmanager
def liger_on_cuda() -> Generator[None]:
    """Liger's fused loss on CUDA multiplies into its buffers: logits into one storage, weight
    gradients by addmm onto their sum."""
    if (
        "liger_kernel" not in sys.modules
    ):  # nothing of it runs, and importing it takes longer than a trace
        yield
        return
    try:
        from liger_kernel.ops import fused_linear_cross_entropy as fused
    except ImportError:
        yield
        return
    with ExitStack() as stack:
        if hasattr(fused, "_can_use_mm_out"):
            stack.enter_context(
                mock.patch.object(fused, "_can_use_mm_out", _multiplies_into_storage)
            )
            stack.enter_context(mock.patch.object(fused, "torch", _TorchOfLiger()))
        yield


def _multiplies_into_storage(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """liger_kernel/ops/fused_linear_cross_entropy.py _can_use_mm_out for a CUDA tensor."""
    if (
        torch.is_grad_enabled()
        or x.dtype != weight.dtype
        or x.dtype not in (torch.float16, torch.bfloat16, torch.float32)
    ):
        return False
    return not torch.is_autocast_enabled("cuda") or x.dtype == torch.get_autocast_dtype("cuda")


class _TorchOfLiger:
    """torch, but for a product on meta without ``out``: the fused loss has one, which on CUDA is an
    addmm onto the sum it is added to."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def mm(self, a: torch.Tensor, b: torch.Tensor, **out: torch.Tensor) -> torch.Tensor:
        """Nothing but a number to add where CUDA allocates nothing."""
        if a.device.type == "meta" and not out and a.dtype in (torch.float16, torch.bfloat16):
            return torch.empty((), dtype=a.dtype, device="meta")
        return torch.mm(a, b, **out)
