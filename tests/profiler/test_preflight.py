"""The pre-flight check on live objects and inside the libraries' own trainers: what it reads,
catches, and leaves alone."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from napkinmath.base.errors import DoesNotFit
from napkinmath.catalog.gpus import find_hardware
from napkinmath.config.hardware import Hardware
from napkinmath.config.train_config import (
    AdapterKind,
    Attention,
    Precision,
    RecomputeKind,
    TrainConfig,
)
from napkinmath.estimate import Verdict
from napkinmath_profiler.preflight import preflight
from napkinmath_profiler.preflight.batch_shape import ROWS_AT_ONCE, _all_over, longest_of
from napkinmath_profiler.preflight.live_optimizer import optimizer_name
from napkinmath_profiler.tracing.trace_errors import TraceError
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
)


def llama(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).to(dtype).train()


def texts(found: Any) -> str:
    return "\n".join(finding.text for finding in found.findings)


def test_allocator_settings_without_a_rule_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    assert "PYTORCH_CUDA_ALLOC_CONF is not priced" in texts(preflight(llama(), "sgd", (1, 64)))


def test_a_plain_model_is_read_as_it_is() -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    found = preflight(
        model,
        torch.optim.AdamW(model.parameters()),
        {"input_ids": torch.zeros(3, 128, dtype=torch.long)},
        hardware="t4",
    )
    config = found.estimate.config
    assert (config.micro_batch_size, config.sequence_length, config.optimizer) == (
        3,
        128,
        "adamw-foreach",
    )
    assert (
        config.precision is Precision.BF16
        and config.attention is Attention.SDPA
        and config.frozen == ("embed_tokens",)
    )
    assert (
        found.live.num_trained
        == found.estimate.num_trained
        == sum(p.numel() for p in model.parameters() if p.requires_grad)
    )
    assert found.verdict is Verdict.FITS and "FITS" not in str(found) and "fits on T4" in str(found)


def test_adapters_are_read_from_peft() -> None:
    settings = LoraConfig(
        r=4,
        target_modules=["q_proj", "down_proj"],
        lora_dropout=0.1,
        use_dora=True,
        modules_to_save=["lm_head"],
    )
    model = get_peft_model(llama(), settings)
    adapter = preflight(model, "adamw-fused", (1, 64)).estimate.config.adapter
    assert (
        adapter is not None
        and adapter.kind is AdapterKind.DORA
        and adapter.rank == 4
        and adapter.dropout == 0.1
    )
    assert (
        adapter.targets == ("down_proj", "q_proj")
        and adapter.trained_modules == ("lm_head",)
        and adapter.dtype == "fp32"
    )


def test_the_adapters_of_the_estimate_are_as_many_as_live() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    found = preflight(model, "adamw-fused", (1, 64))
    assert found.live.num_trained == found.estimate.num_trained


def test_quantized_models_are_read_from_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    from napkinmath_profiler.trace import TraceOptions, prepared_model
    from napkinmath_profiler.tracing.meta_model import TrainMethod, config_from

    mapping = {"model_type": "llama", **SIZES}
    model = prepared_model(
        config_from(mapping), TraceOptions(method=TrainMethod.QLORA, checkpointing=True)
    )
    found = preflight(model, "paged-adamw-8bit", (1, 64), autocast_dtype=torch.bfloat16)
    quantization = found.estimate.config.quantization
    assert (
        quantization is not None
        and quantization.format == "nf4"
        and quantization.double_quant
        and quantization.kbit_preparation
    )
    assert (
        quantization.keep == ("lm_head",)
        and found.estimate.config.precision is Precision.BF16_AUTOCAST
    )
    assert found.estimate.config.recompute.kind is RecomputeKind.FULL
    assert (
        found.live.num_parameters == found.estimate.num_parameters
        and found.live.num_trained == found.estimate.num_trained
    )


def test_eval_mode_with_checkpointing_is_caught() -> None:
    model = llama(num_hidden_layers=8)
    model.gradient_checkpointing_enable()
    assert "eval mode" not in texts(preflight(model, "sgd", (4, 512)))
    found = preflight(model.eval(), "sgd", (4, 512))
    assert (
        "eval mode" in texts(found)
        and found.estimate.peak.nbytes
        > preflight(model.train(), "sgd", (4, 512)).estimate.peak.nbytes
    )


def test_checkpointing_asked_for_and_not_on_is_caught() -> None:
    found = preflight(llama(), "sgd", (4, 512), requested_checkpointing=True)
    assert "no layer has it on" in texts(found)


def test_wide_adapters_logits_and_the_cache_are_caught() -> None:
    found = preflight(
        get_peft_model(llama(num_hidden_layers=8), LoraConfig(r=4, target_modules="all-linear")),
        "sgd",
        (4, 512),
    )
    assert (
        "adapters are fp32" in texts(found)
        and "logits" in texts(found)
        and "use_cache" in texts(found)
    )
    model = llama()
    model.config.use_cache = False
    assert "use_cache" not in texts(preflight(model, "sgd", (4, 512)))


def test_attention_that_falls_to_the_math_path_is_caught() -> None:
    model = llama(torch.float32)
    found = preflight(model, "sgd", (2, 2048), hardware="a100-80")
    assert "math path" in texts(found)
    assert "math path" not in texts(
        preflight(model, "sgd", (2, 2048), hardware="a100-80", autocast_dtype=torch.bfloat16)
    )


def test_states_of_the_first_step_are_named() -> None:
    assert "first step" in texts(preflight(llama(), "adamw-fused", (1, 16)))
    assert "first step" not in texts(preflight(llama(), "sgd", (1, 16)))


def test_the_longest_row_is_what_must_fit() -> None:
    rows = [{"input_ids": [0] * n} for n in (10, 12, 11, 900)]
    found = preflight(llama(), "sgd", (4, 1), dataset=rows)
    assert found.shape.sequence_length == 900 and "longest of 4 rows" in texts(found)
    assert longest_of(rows, 4, at_most=256).sequence_length == 256


def test_other_processes_are_named_and_counted() -> None:
    held = 3 << 30
    free = find_hardware("rtx4090")
    busy = free.replace(display=(held, held, held))
    found = preflight(llama(), "sgd", (1, 64), hardware=busy)
    assert "other processes hold 3.00 GiB" in texts(found)
    assert (
        isinstance(found.estimate.hardware, Hardware)
        and found.estimate.hardware.usable_bytes == free.usable_bytes - held
    )


def test_what_cannot_fit_is_refused_with_a_way_out() -> None:
    model = llama()
    with pytest.raises(DoesNotFit, match=r"batch 4096 x 8192, needs .* T4 has .*; try"):
        preflight(model, "adamw-fused", (4096, 8192), hardware="t4")
    assert (
        preflight(model, "adamw-fused", (4096, 8192), hardware="t4", raises=False).verdict
        is Verdict.DOES_NOT_FIT
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), "adamw-fused"),
        (lambda p: torch.optim.AdamW(p, foreach=False), "adamw"),
        (lambda p: torch.optim.Adam(p), "adamw-foreach"),
        (lambda p: torch.optim.SGD(p, lr=0.1), "sgd"),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum"),
        (lambda p: torch.optim.Adagrad(p), "adagrad"),
    ],
)
def test_optimizers_of_torch(make: Any, name: str) -> None:
    assert optimizer_name(make([torch.nn.Parameter(torch.zeros(2))])) == name


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("AdamW8bit", "adamw-8bit"),
        ("PagedAdamW8bit", "paged-adamw-8bit"),
        ("PagedAdamW32bit", "paged-adamw"),
        ("AdamW", "adamw-bnb"),
        ("Lion8bit", "lion-8bit"),
    ],
)
def test_optimizers_of_bitsandbytes(kind: str, name: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    assert (
        optimizer_name(getattr(bitsandbytes.optim, kind)([torch.nn.Parameter(torch.zeros(2))]))
        == name
    )


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(TraceError, match="Linear has no transformers config"):
        preflight(torch.nn.Linear(2, 2), "sgd", (1, 1))
    with pytest.raises(TraceError, match="not a batch"):
        preflight(llama(), "sgd", "sixteen")
    with pytest.raises(TraceError, match=r"has none of input_ids.*but labels"):
        preflight(llama(), "sgd", {"labels": torch.zeros(1, 1)})

    class Own(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([torch.nn.Parameter(torch.zeros(1))], {})

    with pytest.raises(TraceError, match=r"Own is not in the catalogue"):
        preflight(llama(), Own(), (1, 1))


# ---------------------------------------------------------------- integrations


class Rows(torch.utils.data.Dataset):
    def __init__(self, lengths: tuple[int, ...] = (16,) * 8) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(self.lengths[index]) % 100
        return {"input_ids": ids, "labels": ids}


def train(
    folder: Path, callbacks: list[Any], **arguments: Any
) -> tuple[list[float], torch.Tensor, dict[str, torch.Tensor]]:
    """Losses of a short training by Transformers' own Trainer, the random state after it and the
    model that came out."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(1)
    model = llama(torch.float32, attention_dropout=0.1)
    settings: dict[str, Any] = dict(
        output_dir=str(folder),
        max_steps=3,
        per_device_train_batch_size=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    trainer = Trainer(
        model=model,
        args=TrainingArguments(**{**settings, **arguments}),
        train_dataset=Rows(),
        callbacks=callbacks,
    )
    trainer.train()
    return (
        [row["loss"] for row in trainer.state.log_history if "loss" in row],
        torch.get_rng_state(),
        model.state_dict(),
    )


def test_the_trainer_learns_the_same_with_the_check(tmp_path: Path) -> None:
    from napkinmath_profiler.preflight.trainer_callback import PreflightCallback

    class Timed(PreflightCallback):
        seconds = 0.0

        def on_train_begin(self, *args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            answer = super().on_train_begin(*args, **kwargs)
            self.seconds += time.thread_time() - begun
            return answer

    callback = Timed(hardware="t4")
    plain, checked = train(tmp_path, []), train(tmp_path, [callback])
    assert plain[0] == checked[0] and torch.equal(plain[1], checked[1])
    assert plain[2].keys() == checked[2].keys() and all(
        torch.equal(plain[2][name], checked[2][name]) for name in plain[2]
    )
    assert 0 < callback.seconds < 1, "it adds less than a second"
    assert callback.found is not None and callback.found.verdict is Verdict.FITS
    assert callback.found.shape.micro_batch_size == 2 and callback.found.shape.sequence_length == 16


def test_the_trainer_stops_before_a_step_that_cannot_fit(tmp_path: Path) -> None:
    from napkinmath_profiler.preflight.trainer_callback import PreflightCallback

    tiny = find_hardware("t4", vram=600 << 20)
    with pytest.raises(DoesNotFit):
        train(tmp_path, [PreflightCallback(hardware=tiny)], per_device_train_batch_size=8192)


def test_the_trainers_train_mode_is_not_taken_for_eval_mode(tmp_path: Path) -> None:
    """from_pretrained leaves eval mode, in which checkpointing is off; the Trainer sets train mode
    later than it calls back."""
    from napkinmath_profiler.preflight.trainer_callback import PreflightCallback
    from transformers import Trainer, TrainingArguments

    callback = PreflightCallback(hardware="t4")
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=1,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        save_strategy="no",
    )
    Trainer(
        model=llama(torch.float32).eval(),
        args=arguments,
        train_dataset=Rows(),
        callbacks=[callback],
    ).train()
    assert callback.found is not None and "eval mode" not in texts(callback.found)
    assert (
        callback.found.estimate.config.recompute.kind is RecomputeKind.FULL
        and callback.found.estimate.step.policy.recomputes
    )


def test_the_check_never_ends_a_training_by_a_mistake_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from napkinmath_profiler.preflight import trainer_callback

    monkeypatch.setattr(trainer_callback, "preflight", lambda *_, **__: 1 // 0)
    losses, *_ = train(tmp_path, [trainer_callback.PreflightCallback(hardware="t4")])
    assert len(losses) == 3 and "left out: ZeroDivisionError" in caplog.text


def test_rows_that_draw_random_numbers_change_nothing() -> None:
    import random

    import numpy

    class Noisy(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            _ = random.random(), numpy.random.rand(), torch.rand(1)
            return super().__getitem__(index)

    def states() -> tuple[object, ...]:
        return (
            random.getstate(),
            numpy.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
        )

    model, before = llama(), states()
    weights = [p.clone() for p in model.parameters()]
    preflight(model, "adamw-fused", (2, 1), dataset=Noisy(), hardware="t4")
    assert states() == before
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True)) and all(
        p.grad is None for p in model.parameters()
    )


def test_large_datasets_are_read_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict(
        {"input_ids": [[1] * (1 + i % 700) for i in range(20_000)], "other": ["x"] * 20_000}
    ).shuffle(seed=0)
    found = longest_of(data, 4)
    assert (found.sequence_length, found.usual_length) == (
        700,
        345,
    ) and found.rows_seen == found.num_rows == 20_000

    class Slow(Rows):
        def __getitem__(self, index: int) -> dict[str, Any]:
            time.sleep(0.002)
            return super().__getitem__(index)

    monkeypatch.setattr("napkinmath_profiler.preflight.batch_shape.SECONDS_TO_READ", 0.1)
    cut = preflight(llama(), "sgd", (4, 1), dataset=Slow((16,) * 99 + (900,) + (16,) * 4900))
    assert 10 < cut.shape.rows_seen < 200 and cut.shape.num_rows == 5000
    assert "rows looked at, of 5,000" in texts(cut) or cut.shape.sequence_length == 16


def test_memory_that_others_and_this_process_hold_is_read_from_the_driver(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The device's own figures stand for a GPU: 24 GiB, of which 6 GiB belong to others and 2 GiB
    to tensors of this process."""
    gib = 1 << 30
    properties = type(
        "Properties", (), {"name": "NVIDIA GeForce RTX 4090", "total_memory": 24 * gib}
    )()
    answers = {
        "is_available": True,
        "current_device": 0,
        "get_device_properties": properties,
        "memory_reserved": 3 * gib,
        "memory_allocated": 2 * gib,
    }
    for name, value in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    context = find_hardware("rtx4090").context_bytes
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda *_: (24 * gib - 9 * gib - context, 24 * gib)
    )
    found = preflight(llama(), "sgd", (1, 64))
    assert found.held_by_others == 6 * gib and found.held_here == 2 * gib
    assert "other processes hold 6.00 GiB" in texts(
        found
    ) and "this process holds 2.00 GiB" in texts(found)
    assert (
        found.estimate.hardware is not None and found.estimate.hardware.others_bytes[0] == 8 * gib
    )


def test_sharded_models_are_read_through_their_wrappers() -> None:
    """On pretended ranks: FSDP2's parameters count whole, and the step is priced for one rank of
    four."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        model = llama()
        plain = sum(p.numel() for p in model.parameters())
        mesh = init_device_mesh("cpu", (4,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        found = preflight(fully_shard(model, mesh=mesh), "adamw-fused", (1, 64))
        parallel = found.estimate.config.parallel
        assert parallel.data_parallel.value == "fsdp2" and parallel.data_parallel_size == 4
        assert found.live.num_parameters == found.estimate.num_parameters == plain
        wrapped = preflight(
            torch.nn.parallel.DistributedDataParallel(llama()), "adamw-fused", (1, 64)
        )
        assert (
            wrapped.live.wrappers == ("DistributedDataParallel",)
            and wrapped.estimate.config.parallel.data_parallel.value == "ddp"
        )
    finally:
        torch.distributed.destroy_process_group()


class DeepSpeedEngine(torch.nn.Module):
    """The two things that are read of DeepSpeed's engine, which is not installed here."""

    def __init__(self, module: torch.nn.Module, stage: int) -> None:
        super().__init__()
        self.module, self.stage = module, stage

    def zero_optimization_stage(self) -> int:
        return self.stage


def test_deepspeeds_engine_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkinmath_profiler.preflight.check._world_size", lambda: 8)
    found = preflight(DeepSpeedEngine(llama(), 3), "adamw-fused", (1, 64))
    assert found.live.wrappers == ("DeepSpeedEngine",)
    assert (
        found.estimate.config.parallel.data_parallel.value == "zero3"
        and found.estimate.config.parallel.data_parallel_size == 8
    )


def test_half_precision_is_only_asked_of_who_uses_it() -> None:
    assert "no matrix units for bf16" not in texts(
        preflight(llama(torch.float32), "sgd", (1, 64), hardware="t4")
    )
    assert "no matrix units for bf16" in texts(
        preflight(llama(torch.bfloat16), "sgd", (1, 64), hardware="t4")
    )


def test_an_accelerated_loop_is_checked() -> None:
    accelerate = pytest.importorskip("accelerate")
    from napkinmath_profiler.preflight.accelerate_check import preflight_accelerated

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = llama(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found = preflight_accelerated(accelerator, model, optimizer, (2, 32), hardware="t4")
    assert (
        found.estimate.config.gradient_accumulation_steps == 4
        and found.estimate.config.optimizer == "adamw-foreach"
    )


def test_a_lightning_module_is_checked() -> None:
    lightning = pytest.importorskip("pytorch_lightning")
    from napkinmath_profiler.preflight.lightning_callback import PreflightLightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = llama(torch.float32)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    callback = PreflightLightning(hardware="t4")
    trainer = lightning.Trainer(
        max_steps=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Rows(), batch_size=2))
    assert callback.found is not None and callback.found.shape.sequence_length == 16


def test_single_frozen_layers_are_said_to_be_priced_as_trained() -> None:
    model = llama()
    model.model.layers[0].requires_grad_(False)
    assert "trained parameters and" in texts(preflight(model, "sgd", (1, 16)))


def test_gpt2_is_read_too() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=512))
    found = preflight(model, "adamw-fused", (1, 32), train_config=TrainConfig(stack="hf-bare"))
    assert found.live.num_parameters == found.estimate.num_parameters


def test_an_optimizer_of_another_model_is_told() -> None:
    model = llama()
    wrong = preflight(model, torch.optim.SGD(llama().parameters(), lr=0.1), (1, 64))
    right = preflight(model, torch.optim.SGD(model.parameters(), lr=0.1), (1, 64))
    assert "no parameter of this model" in texts(wrong)
    assert "no parameter of this model" not in texts(right)


def test_nothing_trained_and_eval_mode_are_told() -> None:
    frozen = llama()
    frozen.requires_grad_(False)
    assert "nothing is trained" in texts(preflight(frozen, "sgd", (1, 64)))
    assert "eval mode" in texts(preflight(llama().eval(), "sgd", (1, 64)))
    plain = texts(preflight(llama(), "sgd", (1, 64)))
    assert "eval mode" not in plain and "nothing is trained" not in plain


def test_a_model_in_fp32_hears_of_no_16_bit_copy() -> None:
    for length in (64, 512, 4096):
        assert "16-bit copy" not in texts(preflight(llama(torch.float32), "sgd", (1, length)))


def test_the_way_out_is_kept_where_nothing_is_raised() -> None:
    found = preflight(llama(), "adamw-fused", (4096, 8192), hardware="t4", raises=False)
    assert "; try " in texts(found)


class Endless:
    """A dataset of 10^12 rows that counts how many were read."""

    num_read = 0

    def __len__(self) -> int:
        return 10**12

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_read += 1
        return {"input_ids": [0] * (1 + index % 7)}


def test_a_dataset_without_end_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("napkinmath_profiler.preflight.batch_shape.SECONDS_TO_READ", 0.02)
    rows = Endless()
    found = longest_of(rows, 1)
    assert 0 < rows.num_read < 10**7 and found.num_rows == 10**12 and found.sequence_length == 7


def test_every_piece_of_a_dataset_comes_once() -> None:
    for num_rows in (0, 1, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 97 * ROWS_AT_ONCE, 1000 * ROWS_AT_ONCE):
        assert sorted(_all_over(num_rows)) == list(range(0, num_rows, ROWS_AT_ONCE))
