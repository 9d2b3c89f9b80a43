"""Ops that the tracker runs differently from the meta device, because CUDA does: answers,
decompositions, missing dtypes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch._library.custom_ops import OPDEFS

from napkinmath_profiler.tracing.real_values import on_meta, value_of
from napkinmath_profiler.tracing.storage_events import TracePhase

aten = torch.ops.aten
# bitsandbytes/backends/cuda/ops.py: _gemm_4bit_custom_max_m. With fewer tokens the fused kernel may
# run, by GPU.
SMALL_GEMM_TOKENS = 1536


class OpHandlers:
    """Handlers that count how often each acted, by the name under which CUDA's choices list
    them."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts
        self._finite: set[int] = (
            set()
        )  # storages that say whether gradients overflowed: they did not

    def table(self, *, cuda: bool) -> dict[Any, Any]:
        """Op overload -> handler ``(tracker, func, args, kwargs) -> out``; without ``cuda`` only
        what meta cannot do at all."""
        table: dict[Any, Any] = {
            aten._local_scalar_dense.default: self.scalar_answer,
            aten._to_copy.default: self.copied_to_host,
            aten._grouped_mm.default: self.grouped_mm,
            aten._amp_foreach_non_finite_check_and_unscale_.default: self.check_finite,
            aten.addmm.dtype_out: self.addmm_into,
            aten._ctc_loss.Tensor: self.ctc_loss,
            aten._ctc_loss_backward.Tensor: self.ctc_loss_backward,
        }
        if not cuda:
            return table
        table[aten.index.Tensor] = self.boolean_index
        table[aten.equal.default] = self.equal
        table[aten.index_put.default] = self.index_put
        bitsandbytes = getattr(torch.ops, "bitsandbytes", None)
        if bitsandbytes is not None and hasattr(bitsandbytes, "gemm_4bit"):
            table[bitsandbytes.gemm_4bit.default] = self.gemm_4bit
        return table | self.traced_kernels()

    def traced_kernels(self) -> dict[Any, Any]:
        """Our own kernels' ops, run from inside: their fakes give outputs, their bodies the buffers
        between launches too."""

        ours = {
            name: definition
            for name, definition in OPDEFS.items()
            if name.startswith("napkinmath::")
        }
        return {
            definition._opoverload: self._body(definition._init_fn) for definition in ours.values()
        }

    def _body(self, function: Callable[..., Any]) -> Any:
        def run(tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            self._counts["opened kernels"] += 1
            with tracker, torch.no_grad():
                return function(*args, **kwargs)

        return run

    def scalar_answer(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Asked for a meta tensor's value: its own where that is known, else true, 1.0 or 1 (masks
        are full, norms are finite, steps have been taken)."""
        tensor = args[0]
        if tensor.device.type != "meta":
            return func(*args, **kwargs)
        known = value_of(tensor)
        if known is not None:
            return known.item()
        self._counts["scalar answers"] += 1
        if tensor.dtype == torch.bool:
            return True
        if tensor.untyped_storage()._cdata in self._finite:
            return 0.0
        return 1.0 if tensor.is_floating_point() else 1

    def copied_to_host(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """`tolist` and `cpu` of a tensor whose values are known."""
        known = value_of(args[0])
        device = kwargs.get("device")
        if known is None or device is None or torch.device(device).type != "cpu":
            return func(*args, **kwargs)
        return known.to(kwargs.get("dtype") or known.dtype, copy=True)

    def check_finite(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A gradient scaler's look for overflow: found none, so its step is taken."""
        out = func(*args, **kwargs)
        if args[1].device.type == "meta":
            self._finite.add(args[1].untyped_storage()._cdata)
        return out

    def grouped_mm(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The meta kernel takes bfloat16 only; CUDA takes float32 and float16 too, one product a
        group into the same output."""
        dtype = args[0].dtype
        if dtype == torch.bfloat16 or args[0].device.type != "meta":
            return func(*args, **kwargs)
        self._counts["grouped_mm"] += 1
        like = func(
            *(
                a.to(torch.bfloat16) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                for a in args
            ),
            **kwargs,
        )
        return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device="meta")

    def addmm_into(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A product added to float32 sums in place; before torch 2.12 the meta device takes the
        type for a factor and fails."""
        return kwargs["out"] if args[0].device.type == "meta" else func(*args, **kwargs)

    def ctc_loss(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The loss of each sequence and its table of every step and label, with blanks between, of
        the longest (ATen/native/cuda/LossCTC.cu)."""
        probabilities, targets, _, lengths = args[:4]
        if probabilities.device.type != "meta":
            return func(*args, **kwargs)
        self._counts["ctc_loss"] += 1
        steps, sequences, _ = probabilities.shape
        known = value_of(lengths)
        longest = targets.numel() // sequences if known is None else int(known.max())
        with tracker:
            table = probabilities.new_empty((sequences, steps, 2 * longest + 1))
            return probabilities.new_empty((sequences,)), table

    def ctc_loss_backward(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The gradient, beside a second such table while it runs."""
        if args[0].device.type != "meta":
            return func(*args, **kwargs)
        with tracker:
            second = torch.empty_like(args[6])
            gradient = torch.empty_like(args[1])
            del second
            return gradient

    def index_put(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The backward of an index writes into the zeros that it has just made; any dispatch mode
        makes it copy them."""
        tensor, accumulate = args[0], args[3] if len(args) > 3 else kwargs.get("accumulate", False)
        if (
            tensor.device.type != "meta"
            or not accumulate
            or tracker.phase is not TracePhase.BACKWARD
        ):
            return func(*args, **kwargs)
        self._counts["index backward"] += 1
        return tensor

    def equal(self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Two meta tensors of one shape are equal: who asks compares an incoming gradient with one,
        or a mask with itself."""
        if args[0].device.type != "meta" and args[1].device.type != "meta":
            return func(*args, **kwargs)
        known = [value_of(arg) for arg in args[:2]]
        if known[0] is not None and known[1] is not None:
            return torch.equal(known[0], known[1])
        self._counts["scalar answers"] += 1
        return args[0].shape == args[1].shape

    def boolean_index(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """A mask whose values are not known selects everything; CUDA makes a table of the positions, one int64 column a
        dimension, and gathers by it."""
        tensor, indices = args
        if tensor.device.type != "meta" or not any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices
        ):
            return func(*args, **kwargs)
        self._counts["boolean index"] += 1
        positions: list[Any] = []
        with tracker:
            for index in indices:
                if index is None or index.dtype not in (torch.bool, torch.uint8):
                    positions.append(index)
                    continue
                known = value_of(index)
                if known is None:
                    shape = (index.dim(), index.numel())
                    table = torch.empty(shape, dtype=torch.int64, device="meta")
                else:
                    table = on_meta(known.bool().nonzero().T.contiguous())
                positions.extend(table.unbind(0))
            return aten.index.Tensor(tensor, positions)

    def gemm_4bit(
        self, tracker: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """With many tokens bitsandbytes dequantizes scales and weight, then calls ``linear``."""
        bound = dict(zip([a.name for a in func._schema.arguments], args, strict=False), **kwargs)
        a, weight_shape = bound["A"], bound["shapeB"]
        if a.device.type != "meta" or a.numel() // a.shape[-1] <= SMALL_GEMM_TOKENS:
            return func(*args, **kwargs)
        self._counts["bitsandbytes gemm_4bit"] += 1
        absmax, packed = bound["absmax"], bound["B"]
        with tracker:
            if bound.get("absmax_8bit") is not None:
                dequantized = torch.empty_like(bound["absmax_8bit"], dtype=torch.float32)
                absmax = dequantized + bound["absmax_offset"]
            weight = torch.ops.bitsandbytes.dequantize_4bit.default(
                packed, absmax, bound["blocksize"], bound["quant_type"], weight_shape, a.dtype
            )
            return F.linear(a, weight, bound.get("bias"))
