"""What a script does to its model, its process and its tokenizer between loading and training: it
is priced, or named as not priced."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath.base import values
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

NAME = 'name = "llama-3.2-1b"\ntokenizer = AutoTokenizer.from_pretrained(name)\n'
LOAD = "model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)\n"
TRAIN = "Trainer(model, TrainingArguments(output_dir='x', bf16=True)).train()\n"
LORA = "model = get_peft_model(model, LoraConfig(r=8, target_modules=['q_proj']))\n"
LOOP = (
    "dl = DataLoader(ds, batch_size=4)\nfor batch in dl:\n"
    "    loss = model(**batch).loss\n    loss.backward()\n    opt.step()\n"
)
SGD = "opt = torch.optim.SGD(model.parameters())\n"


def options_of(tmp_path: Path, text: str) -> dict[str, object]:
    path = tmp_path / "train.py"
    path.write_text(NAME + text)
    return with_job_file({"job": str(path)}, [])


def named(options: dict[str, object]) -> list[str]:
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys)
    return [key.name for key in keys.of(KeyUse.NOT_PRICED)]


@pytest.mark.parametrize(
    ("between", "rows"),
    [
        ("model.resize_token_embeddings(128512)\n", 128512),
        ("model.resize_token_embeddings(128256)\n", 128256),
        ("model.resize_token_embeddings(128257, pad_to_multiple_of=64)\n", 128320),
        ("model.resize_token_embeddings(len(tokenizer))\n", 128256),
        (
            "tokenizer.add_special_tokens({'pad_token': '[PAD]', 'additional_special_tokens': ['a']})\n"
            "model.resize_token_embeddings(len(tokenizer))\n",
            128258,
        ),
        (
            "tokenizer.add_tokens(['a', 'b'])\n"
            "model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=8)\n",
            128264,
        ),
    ],
)
def test_resized_embeddings_are_the_priced_models(tmp_path: Path, between: str, rows: int) -> None:
    options = options_of(tmp_path, LOAD + between + TRAIN)
    assert named(options) == []
    e = priced({**options, "ctx": 64}, [])[0]
    assert dict(e.spec.symbols)["v"] == rows
    assert e.spec.name == "llama-3.2-1b"


def test_a_text_configs_embeddings_are_resized_within_it(tmp_path: Path) -> None:
    text = LOAD.replace("name", "'gemma-3-4b'") + "model.resize_token_embeddings(262400)\n" + TRAIN
    config = values.mapping(options_of(tmp_path, text)["config"], "config")
    assert values.mapping(config["text_config"], "text_config")["vocab_size"] == 262400


@pytest.mark.parametrize(
    ("between", "expected"),
    [
        ("model = torch.compile(model)\n", {"compile": True}),
        ("model.compile()\n", {"compile": True}),
        ("model.set_attn_implementation('eager')\n", {"attention": "eager"}),
        ("model.config._attn_implementation = 'flash_attention_2'\n", {"attention": "flash2"}),
        ("apply_liger_kernel_to_llama()\n", {"kernels": "liger"}),
        (
            "model.gradient_checkpointing_enable({'use_reentrant': False})\n",
            {"checkpointing": "full", "reentrant": False},
        ),
        (
            "os.environ['PYTORCH_ALLOC_CONF'] = 'max_split_size_mb:64'\n",
            {"allocator": "max_split_size_mb:64"},
        ),
        (LORA + "model = model.merge_and_unload()\n", {"method": None}),
        ("torch.set_float32_matmul_precision('high')\n", {"precision": "bf16-autocast"}),
        (
            "apply_liger_kernel_to_llama(fused_linear_cross_entropy=False)\n",
            {"kernels": "liger", "kernel_parts": ["norm", "rope", "gate"]},
        ),
    ],
)
def test_what_a_script_does_to_its_model_is_priced(
    tmp_path: Path, between: str, expected: dict[str, object]
) -> None:
    options = options_of(tmp_path, LOAD + between + TRAIN)
    assert {key: options.get(key) for key in expected} == expected
    assert named(options) == []


@pytest.mark.parametrize(
    ("between", "key"),
    [
        (
            "model.resize_token_embeddings(len(AutoTokenizer.from_pretrained('gpt2')))\n",
            "tokenizer",
        ),
        ("tokenizer.add_tokens(new)\nmodel.resize_token_embeddings(len(tokenizer))\n", "tokenizer"),
        ("model = torch.compile(model, mode='max-autotune')\n", "torch_compile_mode"),
        (LORA + LORA, "second_adapter"),
        (LORA + "model.add_adapter('b', LoraConfig(r=64))\n", "second_adapter"),
        (
            LORA
            + "for n, p in model.named_parameters():\n  if 'norm' in n: p.requires_grad = True\n",
            "trained_in_code",
        ),
        (
            LORA + "for n, p in model.named_parameters():\n"
            "  if 'lora_A' in n: p.requires_grad = False\n",
            "frozen_in_code",
        ),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0,1'\n", "visible_in_code"),
        (
            "for n, m in model.named_modules():\n  if 'norm' in n: m.to(torch.float32)\n",
            "cast_in_code",
        ),
        ("model.lm_head = CastToFloat(model.lm_head)\n", "head_in_code"),
        ("del model.model.layers[8:]\n", "layers_in_code"),
        ("quantize_(model, int8_weight_only())\n", "quantized_in_code"),
        ("convert_to_float8_training(model)\n", "float8_in_code"),
        ("fully_shard(model)\n", "sharded_in_code"),
        ("model = torch.nn.DataParallel(model)\n", "replicated_in_code"),
        ("torch.cuda.set_per_process_memory_fraction(0.5)\n", "memory_fraction"),
        (
            "torch.backends.cuda.enable_flash_sdp(False)\n"
            "torch.backends.cuda.enable_mem_efficient_sdp(False)\n",
            "sdp_kernels_off",
        ),
    ],
)
def test_what_is_not_priced_is_named(tmp_path: Path, between: str, key: str) -> None:
    found = named(options_of(tmp_path, LOAD + between + TRAIN))
    assert found and all(name.startswith(tuple(key.split())) for name in found)


@pytest.mark.parametrize(
    "between",
    [
        "torch.backends.cuda.enable_flash_sdp(False)\n",
        "def hook(module, i, output): output.requires_grad_(True)\n" + LORA,
        "for p in model.parameters(): p.requires_grad = False\n" + LORA,
        LORA + "for n, p in model.named_parameters():\n"
        "  if 'lora_' not in n: p.requires_grad = False\n",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '1'\n",
        LORA + "for p in model.parameters():\n  if p.requires_grad: p.data = p.data.float()\n",
        "model.config.use_cache = False\nmodel.enable_input_require_grads()\nmodel.cuda().train()\n",
    ],
)
def test_what_changes_nothing_is_not_named(tmp_path: Path, between: str) -> None:
    assert named(options_of(tmp_path, LOAD + between + TRAIN)) == []


def test_what_follows_the_training_is_not_of_it(tmp_path: Path) -> None:
    after = "model.half()\nmodel.resize_token_embeddings(9)\nmodel.lm_head = f(model)\n"
    train = TRAIN.replace("Trainer", "t = Trainer", 1).replace(".train()", "\nt.train()")
    assert options_of(tmp_path, LOAD + train + after) == options_of(tmp_path, LOAD + train)


def test_a_switch_of_the_arguments_turns_no_checkpointing_off(tmp_path: Path) -> None:
    train = TRAIN.replace("bf16", "gradient_checkpointing=False, bf16")
    options = options_of(tmp_path, LOAD + "model.gradient_checkpointing_enable()\n" + train)
    assert options["checkpointing"] == "full"
    assert options_of(tmp_path, LOAD + train)["checkpointing"] == "none"


def test_a_loop_has_the_model_as_it_was_wrapped(tmp_path: Path) -> None:
    options = options_of(tmp_path, LOAD + "model = torch.compile(model)\n" + SGD + LOOP)
    assert options["compile"] is True
    wrapped = options_of(tmp_path, LOAD + "model = DDP(model)\n" + SGD + LOOP)
    assert named(wrapped) == ["ddp_in_code"]


@pytest.mark.parametrize(
    ("made", "optimizer"),
    [
        ("bnb.optim.AdamW", "adamw-bnb"),
        ("bnb.optim.Adam8bit", "adamw_8bit"),
        ("bnb.optim.PagedAdamW32bit", "paged_adamw_32bit"),
        ("bnb.optim.Lion8bit", "lion_8bit"),
        ("torch.optim.AdamW", "adamw_torch"),
    ],
)
def test_optimizers_of_bitsandbytes_are_its_own(tmp_path: Path, made: str, optimizer: str) -> None:
    options = options_of(tmp_path, LOAD + SGD.replace("torch.optim.SGD", made) + LOOP)
    assert options["optimizer"] == optimizer
    assert priced({**options, "ctx": 64}, [])[0].memory.device.value > 0


def test_an_optimizer_of_the_trainers_own_class_is_named(tmp_path: Path) -> None:
    own = "class Own(Trainer):\n  def create_optimizer(self):\n    self.optimizer = {}\n"
    train = TRAIN.replace("Trainer", "Own", 1)
    assert named(options_of(tmp_path, own.format("Muon(self.model)") + LOAD + train)) == [
        "create_optimizer"
    ]
    assert named(options_of(tmp_path, own.format("optimizer_cls(groups)") + LOAD + train)) == []
