"""What a training holds at a moment, read off autograd's graph and the running code: complete, by
module, and with nothing changed by the reading."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from napkinmath_profiler.measuring.device_memory import CpuMemory
from napkinmath_profiler.measuring.held import held_by_role, held_tensors
from napkinmath_profiler.measuring.live_tensors import Live, live_tensors, module_on_stack
from napkinmath_profiler.watch import watch
from torch import nn
from torch.utils.checkpoint import checkpoint

MIB = 1 << 20
WIDTH, ROWS, LAYERS = 128, 64, 4  # a bias is one allocation granule
BLOCK = WIDTH * ROWS * 4  # bytes of one activation


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.silu(self.up(x)))


class Model(nn.Module):
    def __init__(self, how: str = "") -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = (
                checkpoint(layer, x, use_reentrant=self.how == "reentrant")
                if self.how
                else layer(x)
            )
        return x


def found(model: nn.Module, books: CpuMemory) -> Live:
    return live_tensors(
        model, [tensor for _, tensor in held_tensors(model, None)], books.address_of
    )


def size(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def start(how: str = "") -> tuple[Model, CpuMemory, torch.Tensor]:
    torch.manual_seed(0)
    model, books = Model(how), CpuMemory()
    books.adopt([*model.parameters()])
    return model, books, torch.randn(ROWS, WIDTH, requires_grad=bool(how))


def test_every_byte_is_accounted_for_by_module() -> None:
    model, books, x = start()
    with books:
        books.adopt([x])
        out = model(x)
        live = found(model, books)
    assert (
        size(live.saved) + size(live.in_use) + sum(held_by_role(model, None).values())
        == books.current()[0]
    )
    by_module = {
        module: size(t for t in live.saved if t.module == module)
        for module in {t.module for t in live.saved}
    }
    # A layer keeps its input, the input of silu and its output; the last sum is the program's own.
    assert sum(by_module.values()) == 3 * LAYERS * BLOCK
    assert by_module["layers.1.down"] == BLOCK and by_module["layers.0.up"] == BLOCK
    assert [(t.nbytes, t.holder) for t in live.in_use] == [
        (BLOCK, "test_every_byte_is_accounted_for_by_module")
    ]
    assert out.shape == (ROWS, WIDTH)


@pytest.mark.parametrize("how", ["reentrant", "not reentrant"])
def test_a_checkpoint_keeps_its_inputs_and_recomputes_nothing_for_us(how: str) -> None:
    model, books, x = start(how)
    calls: list[int] = []
    model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    with books:
        books.adopt([x])
        out = model(x)
        live = found(model, books)
    assert size(live.saved) == LAYERS * BLOCK and len(calls) == 1
    assert (
        size(live.saved) + size(live.in_use) + sum(held_by_role(model, None).values())
        == books.current()[0]
    )
    assert out.grad_fn is not None


def test_what_was_recomputed_is_seen_in_the_backward() -> None:
    model, books, x = start("not reentrant")
    seen: list[Live] = []
    model.layers[2].down.weight.register_hook(lambda _: seen.append(found(model, books)))
    with books:
        books.adopt([x])
        model(x).sum().backward()
    recomputed = [t for t in seen[0].saved if t.holder == "SiluBackward0"]
    assert [(t.module, t.nbytes) for t in recomputed] == [("layers.2", BLOCK)]
    assert not [t for t in seen[0].saved if t.module.startswith("layers.3")]


def test_what_the_backward_has_passed_is_gone() -> None:
    model, books, x = start()
    seen: list[int] = []
    for layer in (model.layers[3], model.layers[0]):
        layer.up.weight.register_hook(lambda _: seen.append(size(found(model, books).saved)))
    with books:
        model(x).sum().backward()
    assert seen[0] >= 8 * BLOCK and seen[1] < 3 * BLOCK


def test_no_hook_unpacks_and_what_it_packed_counts() -> None:
    model, books, x = start()
    unpacked: list[int] = []

    def unpack(pair: tuple[str, torch.Tensor]) -> torch.Tensor:
        unpacked.append(1)
        return pair[1]

    with books, torch.autograd.graph.saved_tensors_hooks(lambda tensor: ("packed", tensor), unpack):
        books.adopt([x])
        out = model(x)
        live = found(model, books)
    assert size(live.saved) == 3 * LAYERS * BLOCK and not unpacked
    assert out.requires_grad


def test_reading_keeps_nothing_alive() -> None:
    """A loop that frees its loss after running out of memory gets the bytes back, though its
    variables were read."""
    model, books, x = start()
    out = model(x)
    end = weakref.ref(out)
    assert size(found(model, books).in_use) == 0  # made before the books were open
    module_on_stack(model)
    del out
    gc.collect()
    assert end() is None


def test_a_report_says_what_is_kept_by_module(tmp_path: Path) -> None:
    model, _, x = start()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    path = tmp_path / "report.txt"
    books = CpuMemory(limit_bytes=64 * MIB)
    with (
        pytest.raises(torch.OutOfMemoryError),
        watch(model, optimizer, memory=books, report=path, warn=lambda _: None),
    ):
        for rows in (ROWS, 256 * ROWS):
            model(x.repeat(rows // ROWS, 1)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    text = path.read_text()
    assert "activations, kept for the backward" in text
    kept = text.split("what is kept for the backward, by module\n")[1].split("\n\n")[0]
    assert "layers.*" in kept and f"[{256 * ROWS}, {WIDTH}] float32" in kept
    assert "what the running code holds" in text


def test_a_graph_that_cannot_be_read_costs_only_its_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from napkinmath_profiler.measuring import watching

    def broken(*_: object) -> Live:
        raise AttributeError("another torch")

    monkeypatch.setattr(watching, "live_tensors", broken)
    model, _, x = start()
    path = tmp_path / "report.txt"
    with (
        pytest.raises(torch.OutOfMemoryError),
        watch(model, memory=CpuMemory(limit_bytes=4 * MIB), report=path, warn=lambda _: None),
    ):
        model(x.repeat(64, 1))
    assert "activations, temporaries and what else" in path.read_text()
