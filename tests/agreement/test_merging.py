"""What merging adapters makes beside the weights, held to PEFT's own merge on storage-less tensors."""

from __future__ import annotations

import weakref
from typing import Any

import peft
import pytest
import torch
from napkinmath.base.errors import InputError
from napkinmath.base.expr import Bindings
from napkinmath.estimate import Estimate
from napkinmath.inputs.jobs import priced
from napkinmath.ir.ledger import ALLOC, FREE, Phase, Tensor
from peft.tuners.lora.layer import Embedding, Linear
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

HIDDEN, WIDTH, VOCABULARY = 4096, 11008, 32000  # Llama 7B
FP32 = 4


class MostLive(TorchDispatchMode):
    """The most bytes of new meta storages alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.most = 0
        self.seen: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            known = {a.untyped_storage()._cdata for a in args if isinstance(a, torch.Tensor)}
            storage = out.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self.seen:
                self._born(out, storage.nbytes())
        return out

    def _born(self, out: torch.Tensor, nbytes: int) -> None:
        key = out.untyped_storage()._cdata
        self.live += nbytes
        self.most = max(self.most, self.live)

        def dead(_: object) -> None:
            self.live -= nbytes
            self.seen.pop(key, None)

        self.seen[key] = weakref.ref(out, dead)


def by_peft(layer: Any) -> int:
    """The most bytes that PEFT's merge makes, adapters in fp32 as get_peft_model leaves them."""
    for parameter in layer.parameters():
        if parameter is not layer.get_base_layer().weight:
            parameter.data = parameter.data.to("meta", torch.float32)
    with MostLive() as mode, torch.no_grad():
        layer.merge()
    return mode.most


def merged(**options: Any) -> Estimate:
    gpus = {} if "gpus" in options else {"gpu": "A100-80"}
    job = {"model": "llama-7b", "bs": 1, "ctx": 64, "merge": True, **gpus, **options}
    return priced(job, [])[0]


def made(e: Estimate, name: str) -> int:
    """The most bytes that merging one module makes."""
    bind, live, most = Bindings(e.step.symbols), 0, 0
    for segment in e.step.save:
        for action, tensor in segment.events:
            own = isinstance(tensor, Tensor) and name in tensor.module
            if own and action in (ALLOC, FREE):
                live += bind(tensor.nbytes) * (1 if action == ALLOC else -1)
                most = max(most, live)
    assert live == 0
    return most


def test_a_dense_weight_takes_the_sum_in_place() -> None:
    base = nn.Linear(HIDDEN, WIDTH, bias=False, device="meta", dtype=torch.bfloat16)
    layer = Linear(base, "default", peft.LoraConfig(r=16), r=16)
    assert made(merged(method="lora"), "up_proj") == by_peft(layer) == 2 * FP32 * HIDDEN * WIDTH


def test_an_embedding_too() -> None:
    base = nn.Embedding(VOCABULARY, HIDDEN, device="meta", dtype=torch.bfloat16)
    layer = Embedding(base, "default", peft.LoraConfig(r=16), r=16)
    e = merged(method="lora", targets="embed_tokens,q_proj")
    assert made(e, "embed_tokens") == by_peft(layer)


def test_four_bits_are_unpacked_summed_and_packed_anew() -> None:
    """bf16 unpacked, B A, both summed and again on their way back in fp32, packed."""
    elements = HIDDEN * WIDTH
    packed = elements // 2 + elements // 64
    e = merged(method="qlora")
    assert made(e, "up_proj") == pytest.approx((2 + 3 * FP32) * elements + packed, rel=1e-3)


def test_a_short_qlora_step_holds_less_than_merging() -> None:
    """The report names what is the peak, and nothing of it where a step holds more."""
    e = merged(method="qlora", targets="q_proj,v_proj,lm_head", ctx=16)
    assert next(iter(e.phase_peaks)) is Phase.SAVE
    assert next(iter(merged(method="qlora", bs=4, ctx=2048).phase_peaks)) is not Phase.SAVE


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"method": "lora", "gpus": "8xH100", "data_parallel": "fsdp2"}, "spread"),
        ({"method": "lora", "quant": "gptq"}, "gptq-int4"),
        ({"method": "ia3"}, "ia3"),
        ({"method": "full"}, "--full"),
    ],
)
def test_what_peft_cannot_merge_is_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(InputError, match=word):
        merged(**options)
