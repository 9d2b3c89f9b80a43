"""The pre-flight check on live objects and inside the libraries' own trainers: what it reads, catches, and leaves alone."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch
from napkinmath.errors import DoesNotFit
from napkinmath.estimate import Verdict
from napkinmath.hardware import Hardware
from napkinmath.train_config import AdapterKind, Attention, Precision, RecomputeKind, TrainConfig
from napkinmath_profiler.preflight import preflight
from napkinmath_profiler.preflight.batch_shape import longest_of
from napkinmath_profiler.preflight.live_optimizer import optimizer_name
from napkinmath_profiler.tracing.trace_errors import TraceError
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=4096)


def llama(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes})).to(dtype).train()


def texts(found: Any) -> str:
    return "\n".join(finding.text for finding in found.findings)


def test_a_plain_model_is_read_as_it_is() -> None:
    model = llama()
    model.model.embed_tokens.requires_grad_(False)
    found = preflight(model, torch.optim.AdamW(model.parameters()), {"input_ids": torch.zeros(3, 128, dtype=torch.long)}, hardware="t4")
    config = found.estimate.config
    assert (config.micro_batch_size, config.sequence_length, config.optimizer) == (3, 128, "adamw-foreach")
    assert config.precision is Precision.BF16 and config.attention is Attention.SDPA and config.frozen == ("embed_tokens",)
    assert found.live.num_trained == found.estimate.num_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert found.verdict is Verdict.FITS and "FITS" not in str(found) and "fits on T4" in str(found)


def test_adapters_are_read_from_peft() -> None:
    settings = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1, use_dora=True, modules_to_save=["lm_head"])
    model = get_peft_model(llama(), settings)
    adapter = preflight(model, "adamw-fused", (1, 64)).estimate.config.adapter
    assert adapter is not None and adapter.kind is AdapterKind.DORA and adapter.rank == 4 and adapter.dropout == 0.1
    assert adapter.targets == ("down_proj", "q_proj") and adapter.trained_modules == ("lm_head",) and adapter.dtype == "fp32"


def test_the_adapters_of_the_estimate_are_as_many_as_live() -> None:
    model = get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear"))
    found = preflight(model, "adamw-fused", (1, 64))
    assert found.live.num_trained == found.estimate.num_trained


def test_quantized_models_are_read_from_bitsandbytes() -> None:
    pytest.importorskip("bitsandbytes")
    from napkinmath_profiler.trace import TraceOptions, prepared_model
    from napkinmath_profiler.tracing.meta_model import TrainMethod, config_from

    mapping = {"model_type": "llama", **SIZES}
    model = prepared_model(config_from(mapping), TraceOptions(method=TrainMethod.QLORA, checkpointing=True))
    found = preflight(model, "paged-adamw-8bit", (1, 64), autocast_dtype=torch.bfloat16)
    quantization = found.estimate.config.quantization
    assert quantization is not None and quantization.format == "nf4" and quantization.double_quant and quantization.kbit_preparation
    assert quantization.keep == ("lm_head",) and found.estimate.config.precision is Precision.BF16_AUTOCAST
    assert found.estimate.config.recompute.kind is RecomputeKind.FULL
    assert found.live.num_parameters == found.estimate.num_parameters and found.live.num_trained == found.estimate.num_trained


def test_eval_mode_with_checkpointing_is_caught() -> None:
    model = llama(num_hidden_layers=8)
    model.gradient_checkpointing_enable()
    assert "eval mode" not in texts(preflight(model, "sgd", (4, 512)))
    found = preflight(model.eval(), "sgd", (4, 512))
    assert "eval mode" in texts(found) and found.estimate.peak.nbytes > preflight(model.train(), "sgd", (4, 512)).estimate.peak.nbytes


def test_checkpointing_asked_for_and_not_on_is_caught() -> None:
    found = preflight(llama(), "sgd", (4, 512), requested_checkpointing=True)
    assert "no layer has it on" in texts(found)


def test_wide_adapters_logits_and_the_cache_are_caught() -> None:
    found = preflight(get_peft_model(llama(num_hidden_layers=8), LoraConfig(r=4, target_modules="all-linear")), "sgd", (4, 512))
    assert "adapters are fp32" in texts(found) and "logits" in texts(found) and "use_cache" in texts(found)
    model = llama()
    model.config.use_cache = False
    assert "use_cache" not in texts(preflight(model, "sgd", (4, 512)))


def test_attention_that_falls_to_the_math_path_is_caught() -> None:
    model = llama(torch.float32)
    found = preflight(model, "sgd", (2, 2048), hardware="a100-80")
    assert "math path" in texts(found)
    assert "math path" not in texts(preflight(model, "sgd", (2, 2048), hardware="a100-80", autocast_dtype=torch.bfloat16))


def test_states_of_the_first_step_are_named() -> None:
    assert "first step" in texts(preflight(llama(), "adamw-fused", (1, 16)))
    assert "first step" not in texts(preflight(llama(), "sgd", (1, 16)))


def test_the_longest_row_is_what_must_fit() -> None:
    rows = [{"input_ids": [0] * n} for n in (10, 12, 11, 900)]
    found = preflight(llama(), "sgd", (4, 1), dataset=rows)
    assert found.shape.sequence_length == 900 and "longest of 4 rows" in texts(found)
    assert longest_of(rows, 4, at_most=256).sequence_length == 256


def test_other_processes_are_named_and_counted() -> None:
    from napkinmath.catalog.gpus import find_hardware

    held = 3 << 30
    free = find_hardware("rtx4090")
    busy = free.replace(display=(held, held, held))
    found = preflight(llama(), "sgd", (1, 64), hardware=busy)
    assert "other processes hold 3.00 GiB" in texts(found)
    assert isinstance(found.estimate.hardware, Hardware) and found.estimate.hardware.usable_bytes == free.usable_bytes - held


def test_what_cannot_fit_is_refused_with_a_way_out() -> None:
    model = llama()
    with pytest.raises(DoesNotFit, match=r"batch 4096 x 8192, needs .* T4 has .*; try"):
        preflight(model, "adamw-fused", (4096, 8192), hardware="t4")
    assert preflight(model, "adamw-fused", (4096, 8192), hardware="t4", raises=False).verdict is Verdict.DOES_NOT_FIT


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
    assert optimizer_name(getattr(bitsandbytes.optim, kind)([torch.nn.Parameter(torch.zeros(2))])) == name


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


def train(folder: Path, callbacks: list[Any], **arguments: Any) -> tuple[list[float], torch.Tensor]:
    """Losses of a short training by Transformers' own Trainer, and the random state after it."""
    from transformers import Trainer, TrainingArguments

    torch.manual_seed(1)
    model = llama(torch.float32, attention_dropout=0.1)
    settings: dict[str, Any] = dict(
        output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, logging_steps=1, report_to=[], use_cpu=True, save_strategy="no"
    )
    trainer = Trainer(model=model, args=TrainingArguments(**{**settings, **arguments}), train_dataset=Rows(), callbacks=callbacks)
    trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row], torch.get_rng_state()


def test_the_trainer_learns_the_same_with_the_check(tmp_path: Path) -> None:
    from napkinmath_profiler.preflight.trainer_callback import PreflightCallback

    callback = PreflightCallback(hardware="t4")
    plain, checked = train(tmp_path, []), train(tmp_path, [callback])
    assert plain[0] == checked[0] and torch.equal(plain[1], checked[1])
    assert callback.found is not None and callback.found.verdict is Verdict.FITS
    assert callback.found.shape.micro_batch_size == 2 and callback.found.shape.sequence_length == 16


def test_the_trainer_stops_before_a_step_that_cannot_fit(tmp_path: Path) -> None:
    from napkinmath.catalog.gpus import find_hardware
    from napkinmath_profiler.preflight.trainer_callback import PreflightCallback

    tiny = find_hardware("t4", vram=600 << 20)
    with pytest.raises(DoesNotFit):
        train(tmp_path, [PreflightCallback(hardware=tiny)], per_device_train_batch_size=8192)


def test_trls_sft_trainer_is_checked(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from napkinmath_profiler.preflight.trainer_callback import PreflightCallback
    from napkinmath_profiler.preflight.trainer_callback import config_of as read
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"[UNK]": 0, "[PAD]": 1, "a": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), pad_token="[PAD]", eos_token="a"
    )
    data = datasets.Dataset.from_dict({"input_ids": [[2] * n for n in (8, 24, 8, 8)]})
    arguments = trl.SFTConfig(
        output_dir=str(tmp_path),
        max_steps=1,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_length=64,
        save_strategy="no",
    )
    callback = PreflightCallback(hardware="t4")
    trl.SFTTrainer(model=llama(torch.float32), args=arguments, train_dataset=data, processing_class=tokenizer, callbacks=[callback]).train()
    assert callback.found is not None and callback.found.shape.sequence_length == 24
    assert read(arguments).loss.value == "chunked"


def test_an_accelerated_loop_is_checked() -> None:
    accelerate = pytest.importorskip("accelerate")
    from napkinmath_profiler.preflight.accelerate_check import preflight_accelerated

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = llama(torch.float32)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    found = preflight_accelerated(accelerator, model, optimizer, (2, 32), hardware="t4")
    assert found.estimate.config.gradient_accumulation_steps == 4 and found.estimate.config.optimizer == "adamw-foreach"


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
