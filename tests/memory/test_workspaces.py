"""What is made before a thread's first product and kept: once, whatever else is made there."""

from __future__ import annotations

from collections import Counter

import pytest
from napkinmath.config.train_config import (
    AdapterConfig,
    Kernels,
    QuantizationConfig,
    TrainConfig,
)
from napkinmath.estimate import Estimate, estimate
from napkinmath.ir.ledger import ALLOC, Phase, Tensor
from napkinmath.memory.simulate import peak_bytes, run_order, simulate

QLORA = TrainConfig(adapter=AdapterConfig(), quantization=QuantizationConfig())
CASES: dict[str, tuple[TrainConfig, str | None]] = {
    f"{name}, {gpu}": (config, gpu)
    for gpu in (None, "T4", "A100-80", "H100")
    for name, config in {
        "full": TrainConfig(),
        "accumulated": TrainConfig(gradient_accumulation_steps=3),
        "qlora": QLORA,
        "qlora, decoding kernels": QLORA.replace(kernels=Kernels.NAPKINMATH),
        "qlora, unsloth": QLORA.replace(kernels=Kernels.UNSLOTH),
    }.items()
}
DECODING = [case for case in CASES if "decoding" in case]


def estimated(case: str) -> Estimate:
    config, gpu = CASES[case]
    return estimate("tinyllama-1.1b", config.replace(sequence_length=64), hardware=gpu)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("steps", [1, 2])
def test_each_is_made_once(case: str, steps: int) -> None:
    e = estimated(case)
    kept = {payload for segment in e.step.workspaces for _, payload in segment.events}
    made = Counter[Tensor]()
    for segment in run_order(e.step, steps=steps)[0]:
        for action, payload in segment.events:
            if action == ALLOC and payload in kept:
                assert isinstance(payload, Tensor)
                made[payload] += segment.repeat
    assert dict(made) == dict.fromkeys(kept, 1)


@pytest.mark.parametrize("case", DECODING)
def test_a_sweep_holds_the_buffer_of_decoded_weights_as_an_estimate_does(case: str) -> None:
    e = estimated(case)
    buffer = next(t for t in e.timeline.tensors if t.name == "buffer of decoded weights")
    assert buffer.requested > 0
    backward = simulate(e.step, steps=2).phase_peaks()[Phase.BACKWARD]
    assert backward.nbytes == e.phase_peaks[Phase.BACKWARD].nbytes
    assert peak_bytes(e.step, steps=2) == peak_bytes(e.step, steps=1)
