"""Python scripts and notebooks are read by their text alone: what it says becomes the keys of a
Trainer's file, what only a run knows is asked for by name, and nothing is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.answers.figures import Verdict
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced

LOAD = 'model = AutoModelForCausalLM.from_pretrained("llama-3.2-1b")\n'
TRAIN = "Trainer(model, TrainingArguments(output_dir='x', bf16=True), train_dataset=d).train()\n"
UNSLOTH = """
from unsloth import FastLanguageModel
max_seq_length = 1024
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name = "unsloth/Llama-3.2-1B-Instruct",
    max_seq_length = max_seq_length,
)
model = FastLanguageModel.get_peft_model(
    model, r = 16, target_modules = ["q_proj", "v_proj"], lora_alpha = 16,
    use_gradient_checkpointing = "unsloth",
)
if False:
    model, tokenizer = FastLanguageModel.from_pretrained("mine", max_seq_length = 9)
"""
# Name -> the script and the options that follow.
SCRIPTS: dict[str, tuple[str, dict[str, object]]] = {
    "trainer": (LOAD + TRAIN, {"model": "llama-3.2-1b", "bs": 8, "precision": "bf16-checkpoint"}),
    "in one call": (
        "SFTTrainer('llama-3.2-1b', SFTConfig(max_length=512, per_device_train_batch_size=2))",
        {"model": "llama-3.2-1b", "ctx": 512, "bs": 2, "checkpointing": "full"},
    ),
    "arguments set later": (
        LOAD + "a = TrainingArguments('x')\na.per_device_train_batch_size = 3\nTrainer(model, a)",
        {"bs": 3, "checkpointing": "none"},
    ),
    "a mapping": (
        LOAD + "kw = {'bf16': True, 'gradient_accumulation_steps': 4}\nkw['optim'] = 'lion_8bit'\n"
        "Trainer(model, TrainingArguments(**kw, **dict(per_device_train_batch_size=2)))",
        {"bs": 2, "grad_accum": 4, "optimizer": "lion_8bit"},
    ),
    "weights made whole": (
        "q = Mxfp4Config(dequantize=True)\nm = AutoModelForCausalLM.from_pretrained("
        "'openai/gpt-oss-20b', quantization_config=q, dtype='bfloat16')\n"
        "Trainer(m, TrainingArguments(per_device_train_batch_size=1))",
        {"model": "openai/gpt-oss-20b", "quant": None, "precision": "bf16"},
    ),
    "a list in a mapping": (
        LOAD + "kw = dict(r=4)\nkw['target_modules'] = ['v_proj']\n"
        "model = get_peft_model(model, LoraConfig(**kw))\n" + TRAIN,
        {"targets": ["v_proj"], "rank": 4},
    ),
    "sums and texts": (
        "size = '1b'\nname = f'llama-3.2-{size}'\nB = 2\n"
        "m = AutoModelForCausalLM.from_pretrained(name)\n"
        "Trainer(m, args=TrainingArguments(per_device_train_batch_size=B * 2 + 1))",
        {"model": "llama-3.2-1b", "bs": 5},
    ),
    "peft": (
        LOAD
        + "c = LoraConfig(r=4, target_modules=['q_proj'])\nmodel = get_peft_model(model, c)\n"
        + TRAIN,
        {"method": "lora", "rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj"]},
    ),
    "qlora": (
        "b = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4',"
        " bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)\n"
        "m = AutoModelForCausalLM.from_pretrained('llama-3.2-1b', quantization_config=b)\n"
        "m = prepare_model_for_kbit_training(m, use_gradient_checkpointing=False)\n"
        "t = SFTTrainer(model=m, args=SFTConfig(gradient_checkpointing=False),"
        " peft_config=LoraConfig())",
        {"quant": "nf4", "double_quant": True, "method": "lora", "checkpointing": "none"},
    ),
    "kbit default": (
        "m = AutoModelForCausalLM.from_pretrained('llama-3.2-1b', load_in_8bit=True)\n"
        "m = prepare_model_for_kbit_training(m)\nm = get_peft_model(m, LoraConfig(r=2))\n"
        "Trainer(m, TrainingArguments('x'))",
        {"quant": "int8", "checkpointing": "full", "rank": 2},
    ),
    "argparse": (
        "p = argparse.ArgumentParser()\np.add_argument('--model', default='llama-3.2-1b')\n"
        "p.add_argument('--bs', type=int, default=6)\np.add_argument('--ckpt', action='store_true')\n"
        "args = p.parse_args()\nm = AutoModelForCausalLM.from_pretrained(args.model)\n"
        "Trainer(m, TrainingArguments(per_device_train_batch_size=args.bs,"
        " gradient_checkpointing=args.ckpt))",
        {"model": "llama-3.2-1b", "bs": 6, "checkpointing": "none"},
    ),
    "functions": (
        "def load(name='llama-3.2-1b', four=False):\n  if four:\n    return None\n"
        "  m = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16)\n"
        "  return m, 1\n"
        "def main(bs):\n  m, _ = load()\n  Trainer(m, TrainingArguments('x', bs))\n"
        "  return Trainer(m, TrainingArguments('x', per_device_train_batch_size=bs))\n"
        "if __name__ == '__main__':\n  main(bs=7)\n",
        {"bs": 7, "precision": "bf16"},
    ),
    "never called": (
        "def main(bs=7):\n  m = AutoModelForCausalLM.from_pretrained('llama-3.2-1b')\n"
        "  Trainer(m, TrainingArguments(per_device_train_batch_size=bs))\n",
        {"bs": 7},
    ),
    "a dataclass": (
        "@dataclass\nclass Script:\n  name: str = field(default='llama-3.2-1b')\n  bs: int = 2\n"
        "s, a = HfArgumentParser((Script, TrainingArguments)).parse_args_into_dataclasses()\n"
        "m = AutoModelForCausalLM.from_pretrained(s.name)\n"
        "Trainer(m, TrainingArguments(per_device_train_batch_size=s.bs))",
        {"bs": 2, "model": "llama-3.2-1b"},
    ),
    "its own trainer": (
        "class Mine(SFTTrainer):\n  pass\nMine('llama-3.2-1b', SFTConfig(max_length=64))",
        {"ctx": 64},
    ),
    "environment": (
        LOAD + "bs = int(os.environ.get('BS', '4'))\n"
        "Trainer(model, TrainingArguments(per_device_train_batch_size=bs))",
        {"bs": 4},
    ),
    "bf16 where there is": (
        LOAD + "Trainer(model, TrainingArguments(fp16=not torch.cuda.is_bf16_supported(),"
        " bf16=torch.cuda.is_bf16_supported()))",
        {"precision": "bf16-checkpoint"},
    ),
    "unsloth": (
        UNSLOTH + "SFTTrainer(model=model, args=SFTConfig(per_device_train_batch_size=2))",
        {
            "model": "unsloth/Llama-3.2-1B-Instruct",
            "quant": "nf4",
            "double_quant": True,
            "kernels": "unsloth",
            "checkpointing": "offload",
            "ctx": 1024,
            "rank": 16,
            "precision": "bf16-autocast",
        },
    ),
    "dpo": (
        UNSLOTH + "DPOTrainer(model=model, ref_model=None, args=DPOConfig(beta=0.1,"
        " max_length=256), beta=0.1)",
        {"workload": "dpo", "ctx": 256},
    ),
    "orpo": (UNSLOTH + "ORPOTrainer(model=model, args=ORPOConfig())", {"workload": "orpo"}),
    "kto": (UNSLOTH + "KTOTrainer(model=model, args=KTOConfig())", {"workload": "kto"}),
    "reward": ("RewardTrainer('llama-3.2-1b', RewardConfig())", {"workload": "reward"}),
    "grpo": (
        "GRPOTrainer('llama-3.2-1b', f, GRPOConfig(max_completion_length=64, num_generations=4,"
        " per_device_train_batch_size=4), peft_config=LoraConfig())",
        {"workload": "grpo", "completion": 64, "method": "lora", "ctx": 512 + 64},
    ),
    "grpo with its lengths": (
        "GRPOTrainer('llama-3.2-1b', f, GRPOConfig(max_completion_length=1024,"
        " max_prompt_length=256))",
        {"workload": "grpo", "completion": 1024, "ctx": 256 + 1024},
    ),
    "grpo of unsloth, prompts as they come": (
        "model, tok = FastLanguageModel.from_pretrained('llama-3.2-1b', max_seq_length=2048)\n"
        "model = FastLanguageModel.get_peft_model(model, r=8)\nlongest = find(data) + 1\n"
        "GRPOTrainer(model, f, GRPOConfig(max_prompt_length=longest,"
        " max_completion_length=2048 - longest, num_generations=4))",
        {"workload": "grpo", "ctx": 2048, "completion": 1536, "bs": 8},
    ),
    "rloo by default": (
        "RLOOTrainer('llama-3.2-1b', reward_funcs=f, args=RLOOConfig())",
        {"workload": "rloo", "completion": 512, "ctx": 1024},
    ),
    "a head of another task": (
        "N = 256\ndef cut(one):\n  return tok(one['text'], truncation=True, max_length=N)\n"
        "m = AutoModelForTokenClassification.from_pretrained('bert-base-cased', num_labels=9)\n"
        "Trainer(m, TrainingArguments('out', fp16=True))",
        {"task": "token-classification", "ctx": 256, "workload": None, "precision": "fp16-amp"},
    ),
    "a reward model's own trainer": (
        "tok.model_max_length = 4096\nclass GemmaRewardTrainer(Trainer):\n"
        "  def compute_loss(self, model, inputs):\n    return 0\n"
        "m = AutoModelForSequenceClassification.from_pretrained('gemma-2b', num_labels=1)\n"
        "GemmaRewardTrainer(model=m, args=TrainingArguments('out', bf16=True))",
        {"workload": "reward", "task": None, "ctx": 4096, "checkpointing": "none"},
    ),
    "an adapter whose model is not followed": (
        "m = DDP(AutoModelForCausalLM.from_pretrained('gpt2'))\nm = unwrapped(m.inner).module\n"
        "p = get_peft_model(m, LoraConfig(r=4, target_modules=['c_attn']))\n"
        "Trainer(model=p, args=TrainingArguments('out', bf16=True))",
        {"method": "lora", "rank": 4},
    ),
    "a trainer that is imported, by its name": (
        "from mine import MyDPOTrainer\nm = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "MyDPOTrainer(m, args=TrainingArguments('out', bf16=True))",
        {"workload": "dpo", "bs": 8, "checkpointing": "none"},
    ),
    "lightning": (
        "import lightning as L\nclass M(L.LightningModule):\n  def __init__(self):\n"
        "    self.m = AutoModelForCausalLM.from_pretrained('llama-3.2-1b')\n"
        "train = DataLoader(d, batch_size=3)\n"
        "t = L.Trainer(precision='bf16-mixed', devices=4, strategy='fsdp',"
        " accumulate_grad_batches=2, gradient_clip_val=1.0)\nt.fit(M(), train)",
        {
            "bs": 3,
            "grad_accum": 2,
            "gpus": 4,
            "data_parallel": ["fsdp1"],
            "precision": "bf16-checkpoint",
            "clip": True,
        },
    ),
}


def written(tmp_path: Path, text: str, name: str = "train.py") -> str:
    file = tmp_path / name
    if name.endswith(".ipynb"):
        cells = [
            {"cell_type": "markdown", "source": ["# text"]},
            {"cell_type": "code", "source": ["!pip install x \\\n", "  y\n", "%matplotlib inline"]},
            {"cell_type": "code", "source": ["%%bash\n", "rm -rf /\n"]},
            {"cell_type": "code", "source": ["if True:\n", "    !nvidia-smi\n", "def broken(:"]},
            {"cell_type": "code", "source": text.splitlines(keepends=True)},
        ]
        text = json.dumps({"cells": cells, "nbformat": 4})
    file.write_text(text, encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_and_its_notebook_become_the_run(tmp_path: Path, name: str) -> None:
    text, expected = SCRIPTS[name]
    for file in (written(tmp_path, text), written(tmp_path, text, "train.ipynb")):
        options = with_job_file({"job": file}, [])
        assert {key: options.get(key) for key in expected} == expected
    assert priced(options, [])[0].memory.device.value > 0


@pytest.mark.parametrize("name", SCRIPTS)
def test_origins_are_on_their_lines(tmp_path: Path, name: str) -> None:
    text, _ = SCRIPTS[name]
    keys = with_job_file({"job": written(tmp_path, text), "explain": True}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    count = len(text.splitlines())
    said = [origin for origin in keys.origins if origin.key]
    assert said and all(1 <= origin.line <= count for origin in said)


ASKED = [
    ("bs = len(data)\n", "per_device_train_batch_size=bs", {}, "--bs B", "len(data)"),
    ("bs = len(data)\n", "per_device_train_batch_size=bs", {"bs": "2"}, "", ""),
    ("", "per_device_train_batch_size=int(sys.argv[1])", {}, "--bs B", "sys.argv"),
    ("", "output_dir=sys.argv[1], run_name=now(), seed=x", {}, "", ""),
    ("bs = 2\nif len(d) > 3:\n  bs = 4\n", "per_device_train_batch_size=bs", {}, "--bs", "bs"),
    ("bs = 2\nif x:\n  bs = 2\n", "per_device_train_batch_size=bs", {}, "", ""),
    (
        "p = argparse.ArgumentParser()\np.add_argument('--b', required=True)\nargs = p.parse_args()\n",
        "per_device_train_batch_size=args.b",
        {},
        "--bs",
        "args.b",
    ),
    ("", "gradient_accumulation_steps=total // gpus", {}, "--grad-accum", "total // gpus"),
    ("if x:\n  model = get_peft_model(model, LoraConfig())\n", "bf16=True", {}, "--method", "x"),
]


@pytest.mark.parametrize(("before", "arguments", "flags", "flag", "source"), ASKED)
def test_what_only_a_run_knows_is_asked_for_by_name(
    tmp_path: Path,
    before: str,
    arguments: str,
    flags: dict[str, object],
    flag: str,
    source: str,
) -> None:
    text = f"{LOAD}{before}Trainer(model, TrainingArguments({arguments}))\n"
    given = {**flags, "job": written(tmp_path, text)}
    if not flag:
        assert priced(with_job_file(given, []), [])
        return
    with pytest.raises(InputError) as error:
        with_job_file(given, [])
    assert f"add {flag}" in str(error.value) and source in str(error.value)


@pytest.mark.parametrize(
    "load", ["AutoModelForCausalLM.from_pretrained(pick())", "AutoModelForCausalLM(config)", "go()"]
)
def test_a_model_that_a_run_picks_is_asked_for(tmp_path: Path, load: str) -> None:
    file = written(tmp_path, f"m = {load}\nTrainer(m, TrainingArguments('x'))\n")
    done = run(file)
    assert done.code == 2 and "add --model" in done.err, done.err
    assert run(file, "--model", "llama-3.2-1b").code == 0


def test_a_length_with_a_known_bound_is_priced_as_the_bound(tmp_path: Path) -> None:
    """`max_seq_length - prompt` is no more than max_seq_length: what does not fit may fit."""
    text = "n = longest(data)\nL = 4096\nSFTTrainer('llama-3.1-70b', SFTConfig(max_length=L - n))\n"
    file = written(tmp_path, text)
    options = with_job_file({"job": file, "gpu": "rtx4090"}, [])
    keys = options["job_keys"]
    assert options["ctx"] == 4096 and isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == ["max_length"]
    assert priced(options, [])[0].verdict is Verdict.UNKNOWN
    settled = with_job_file({"job": file, "gpu": "rtx4090", "ctx": "1k"}, [])
    assert priced(settled, [])[0].verdict is Verdict.DOES_NOT_FIT


def test_keys_keep_their_four_classes(tmp_path: Path) -> None:
    text = (
        "SFTTrainer('llama-3.2-1b', SFTConfig(per_device_train_batch_size=2, logging_steps=5,"
        " padding_free=True, nobody_has_this=1))"
    )
    keys = with_job_file({"job": written(tmp_path, text)}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    use = {key.name: key.use for key in keys.keys}
    assert use["per_device_train_batch_size"] is KeyUse.PRICED
    assert use["logging_steps"] is KeyUse.NO_EFFECT
    assert use["padding_free"] is KeyUse.NOT_PRICED
    assert use["nobody_has_this"] is KeyUse.UNKNOWN


_LOOP = (
    "t = AutoTokenizer.from_pretrained('gpt2')\n"
    "m = AutoModelForCausalLM.from_pretrained('gpt2'{load})\n"
    "e = t(texts, truncation=True, max_length=64)\n"
    "train, test = DataLoader(d, batch_size=4, shuffle=True), DataLoader(d, batch_size=32)\n"
    "opt = torch.optim.{opt}\n"
    "for epoch in range(3):\n"
    "  for i, batch in enumerate(tqdm(train)):\n"
    "    {call}\n"
    "    loss.backward()\n"
    "    if (i + 1) % 8 == 0:\n"
    "      {clip}\n"
    "      opt.step()\n"
    "  for batch in test:\n"
    "    m(**batch)\n"
)
_PARTS = {
    "load": "",
    "opt": "AdamW(m.parameters())",
    "call": "out = m(**batch); loss = out.loss / 8",
    "clip": "clip_grad_norm_(m.parameters(), 1.0)",
}
_LOOPED = {"bs": 4, "ctx": 64, "grad_accum": 8, "optimizer": "adamw_torch", "clip": True}
LOOPS: list[tuple[dict[str, str], dict[str, object]]] = [
    ({}, {**_LOOPED, "stack": "hf-loop", "precision": "checkpoint", "model": "gpt2"}),
    ({"clip": "pass"}, {**_LOOPED, "clip": False}),
    ({"call": "loss = m(**batch).loss"}, {**_LOOPED, "stack": "hf"}),
    ({"load": ", torch_dtype=torch.bfloat16"}, {**_LOOPED, "precision": "bf16"}),
    ({"opt": "AdamW(m.parameters(), fused=True)"}, {"optimizer": "adamw_torch_fused"}),
    ({"opt": "SGD(m.parameters(), lr=1, momentum=0.9)"}, {"optimizer": "momentum"}),
    (
        {
            "call": "with torch.autocast('cuda', dtype=torch.bfloat16): out = m(**batch)\n    loss = out.loss"
        },
        {"stack": "hf-loop", "precision": "bf16-checkpoint"},
    ),
    (
        {"call": "with torch.cuda.amp.autocast(): out = m(**batch)\n    loss = out.loss"},
        {"precision": "fp16-amp"},
    ),
]


@pytest.mark.parametrize("argument", ["amsgrad=True", "foreach=False"])
def test_an_optimizer_of_other_states_is_asked_for(argument: str, tmp_path: Path) -> None:
    text = _LOOP.format(**_PARTS | {"opt": f"AdamW(m.parameters(), {argument})"})
    with pytest.raises(InputError, match=rf"AdamW\({argument}\).*--optimizer"):
        with_job_file({"job": written(tmp_path, text)}, [])


@pytest.mark.parametrize(("parts", "expected"), LOOPS)
def test_a_loop_of_ones_own_becomes_its_run(
    parts: dict[str, str], expected: dict[str, object], tmp_path: Path
) -> None:
    text = _LOOP.format(**{**_PARTS, **parts})
    found = with_job_file({"job": written(tmp_path, text)}, [])
    assert {key: found.get(key) for key in expected} == expected


def test_accelerates_loop_is_read_in_its_functions(tmp_path: Path) -> None:
    text = (
        "def main(half, bs):\n"
        "  a = Accelerator(mixed_precision=half, gradient_accumulation_steps=2)\n"
        "  m = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "  e = t(x, truncation=True, max_length=64)\n"
        "  m, opt, d = a.prepare(m, AdamW(m.parameters()), DataLoader(x, batch_size=bs))\n"
        "  for batch in d:\n"
        "    with a.accumulate(m):\n"
        "      out = m(**batch)\n"
        "      a.backward(out.loss)\n"
        "      opt.step()\n"
        "main('bf16', 6)\n"
    )
    found = with_job_file({"job": written(tmp_path, text)}, [])
    expected = {
        "bs": 6,
        "grad_accum": 2,
        "precision": "bf16-checkpoint",
        "stack": "accelerate-loop",
        "clip": False,
    }
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"call": "m.generate(b); loss = m(**batch).loss"}, "generates in it"),
        ({"call": "m.base.weight.requires_grad = False; loss = 1"}, "freezes parameters"),
        ({"load": ")\nref = AutoModelForCausalLM.from_pretrained('gpt2'"}, "loads 2 models"),
        ({"clip": "dist.all_reduce(g)"}, "shares its gradients"),
    ],
)
def test_what_a_loop_does_that_is_not_read_is_said(
    parts: dict[str, str], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=f"loop of its own that is not read: it {said}.*'gpt2'"):
        with_job_file({"job": written(tmp_path, _LOOP.format(**{**_PARTS, **parts}))}, [])


def test_an_autocast_that_a_gpu_turns_on_is_read(tmp_path: Path) -> None:
    text = _LOOP.format(**_PARTS).replace("for ", "c = torch.cuda.is_available()\nfor ", 1)
    text += "with torch.autocast('cuda', dtype=torch.bfloat16, enabled=c): pass\n"
    assert with_job_file({"job": written(tmp_path, text)}, [])["precision"] == "bf16-checkpoint"


def test_a_trainer_of_the_scripts_own_modules_is_no_trainer_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("from .base import Trainer\n")
    base = tmp_path / "own" / "base.py"
    base.write_text("class Trainer:\n    def __init__(self, c): self.c = c\n")
    script = "from own import Trainer\nclass SFTTrainer(Trainer): pass\nSFTTrainer(c).train()\n"
    with pytest.raises(InputError, match="trains nothing: it makes no trainer"):
        with_job_file({"job": written(tmp_path, script), "model": "llama-3.2-1b"}, [])
    base.write_text("import transformers\nclass Trainer(transformers.Trainer): pass\n")
    with pytest.raises(InputError, match="add --model"):
        with_job_file({"job": written(tmp_path, script)}, [])


_FREEZES = "for p in model.model.layers[0].parameters(): p.requires_grad = False\n"


@pytest.mark.parametrize(
    ("before", "named"),
    [
        (_FREEZES, ["frozen_in_code"]),
        ("model.lm_head.requires_grad_(False)\n", ["frozen_in_code"]),
        ("model.lm_head.requires_grad_(True)\n", []),
        ("ref_model.requires_grad_(False)\n", []),
        ("for p in teacher.parameters(): p.requires_grad = False\n", []),
        (_FREEZES + "model = get_peft_model(model, LoraConfig(r=4))\n", []),
        ("model.model.layers = model.model.layers[:4]\n", ["layers_in_code"]),
    ],
)
def test_what_a_script_does_to_its_model_beside_the_trainer_is_named(
    tmp_path: Path, before: str, named: list[str]
) -> None:
    keys = with_job_file({"job": written(tmp_path, LOAD + before + TRAIN)}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == named


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("opt = SGD(model.parameters(), lr=1)\nOPT", {"optimizer": "sgd"}),
        ("opt = bnb.optim.AdamW8bit(model.parameters())\nOPT", {"optimizer": "adamw_8bit"}),
        ("opt = None\nOPT", {"optimizer": None}),
        ("model.to(torch.float32)\n" + TRAIN, {"precision": "bf16-amp"}),
        ("model.to('cuda')\n" + TRAIN, {"precision": "bf16-checkpoint"}),
    ],
)
def test_an_optimizer_and_a_type_that_a_script_sets_are_the_runs(
    tmp_path: Path, text: str, expected: dict[str, object]
) -> None:
    given = TRAIN.replace(", train_dataset=d", ", optimizers=(opt, None)")
    text = LOAD + text.replace("OPT", given)
    found = with_job_file({"job": written(tmp_path, text)}, [])
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize(
    "text",
    [
        "c = AutoConfig.from_pretrained('gpt2')\nc.n_layer = 2\n"
        "model = AutoModelForCausalLM.from_config(c)\n",
        "c = AutoConfig.from_pretrained('gpt2', n_embd=64)\n"
        "model = AutoModelForCausalLM.from_pretrained('gpt2', config=c)\n",
        LOAD + "opt = object()\n",
        LOAD.replace("model", "teacher") + "model = LlamaForCausalLM(LlamaConfig(n=1))\n",
    ],
)
def test_sizes_and_optimizers_that_only_a_script_has_are_asked_for(
    tmp_path: Path, text: str
) -> None:
    train = TRAIN.replace(", train_dataset=d", ", optimizers=(opt, None)" * ("opt" in text))
    with pytest.raises(InputError, match="add --optimizer" if "opt" in text else "add --model"):
        with_job_file({"job": written(tmp_path, text + train)}, [])


def test_a_library_whose_checkout_lies_around_the_script_is_the_library(tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("class SFTTrainer: pass\n")
    script = f"from trl import SFTTrainer, SFTConfig\n{LOAD}SFTTrainer(model, SFTConfig('x'))\n"
    assert with_job_file({"job": written(tmp_path, script)}, [])["ctx"] == 1024


def test_a_parser_of_one_dataclass_gives_a_tuple(tmp_path: Path) -> None:
    text = (
        "@dataclass\nclass A:\n    bs: int = 3\n"
        "a = TrlParser(dataclass_types=[A]).parse_args_and_config()[0]\n"
        f"{LOAD}Trainer(model, TrainingArguments(per_device_train_batch_size=a.bs))\n"
    )
    assert with_job_file({"job": written(tmp_path, text)}, [])["bs"] == 3


def test_a_loop_names_its_loss_and_what_a_run_decides(tmp_path: Path) -> None:
    text = _LOOP.format(**{**_PARTS, "call": "loss = f(m(**batch).logits)"})
    keys = with_job_file({"job": written(tmp_path, text)}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == ["compute_loss"]
    text = text.replace("batch_size=4", "batch_size=n")
    with pytest.raises(InputError, match="per_device_train_batch_size comes from n"):
        with_job_file({"job": written(tmp_path, text)}, [])


REFUSED = {
    "inference": (LOAD + "model.generate(**x)\n", "trains nothing"),
    "a training of functions": (
        "from olmo_core.train import TrainerConfig\nTrainerConfig(save_folder='x')\n",
        "builds a training of OLMo-core",
    ),
    "a pipeline": ("pipe = pipeline('text-generation', 'gpt2')\n", "trains nothing"),
    "a loop": (
        LOAD + "for b in d:\n  loss = model(b).loss\n  loss.backward()\n",
        "loop of its own",
    ),
    "embeddings": ("SentenceTransformerTrainer(m, args=a)", "SentenceTransformerTrainer"),
    "another adapter": (
        LOAD + "Trainer(get_peft_model(model, IA3Config()), TrainingArguments())",
        "IA3Config",
    ),
    "another step": (LOAD + "MiniLLMTrainer(model, args=MiniLLMConfig())", "mini"),
    "no Python": ("def (:\n", "not Python at line 1"),
    "empty": (" \n", "is empty"),
    "a null": ("x = 1\0\n", "not Python"),
}


def test_a_loss_of_the_scripts_own_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "class Weighted(Trainer):\n  def compute_loss(self, model, inputs):\n    return 0\n"
        "m = AutoModelForCausalLM.from_pretrained('gpt2')\n"
        "Weighted(model=m, args=TrainingArguments('out'))\n",
        encoding="utf-8",
    )
    for flags, named in (({}, ["compute_loss"]), ({"workload": "sft"}, [])):
        keys = with_job_file({**flags, "job": str(script)}, [])["job_keys"]
        assert isinstance(keys, JobKeys)
        settled = [key.name for key in keys.of(KeyUse.NOT_PRICED) if key.option not in flags]
        assert settled == named


def test_a_loss_of_a_class_over_trls_trainer_is_named(tmp_path: Path) -> None:
    """Self-distillation in a class over SFTTrainer was priced as plain fine-tuning."""
    text = (
        "class Distills(SFTTrainer):\n  def compute_loss(self, model, inputs):\n    return 0\n"
        f"{LOAD}Distills(model, args=SFTConfig('x', max_length=64))\n"
    )
    keys = with_job_file({"job": written(tmp_path, text)}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == ["compute_loss"]


@pytest.mark.parametrize(
    ("lines", "targets"),
    [
        ("t.append('v_proj')\nt.extend(['k_proj'])\n", ["q_proj", "v_proj", "k_proj"]),
        ("t.insert(0, 'o_proj')\nt.remove('q_proj')\n", ["o_proj"]),
        ("for n in model.modules():\n  t.append(n)\n", None),
        ("if x():\n  t.append('k_proj')\n", None),
        ("t.append(t)\n", None),
    ],
)
def test_a_list_is_what_its_methods_make_of_it(
    tmp_path: Path, lines: str, targets: list[str] | None
) -> None:
    """What was appended fell away: of three targets one was priced."""
    text = (
        f"{LOAD}t = ['q_proj']\n{lines}m = get_peft_model(model, LoraConfig(target_modules=t))\n"
        "Trainer(m, TrainingArguments('x', bf16=True))\n"
    )
    if targets is not None:
        assert with_job_file({"job": written(tmp_path, text)}, [])["targets"] == targets
        return
    with pytest.raises(InputError, match="lora_target_modules comes from"):
        with_job_file({"job": written(tmp_path, text)}, [])


@pytest.mark.parametrize("name", REFUSED)
def test_what_trains_nothing_is_refused_as_such(tmp_path: Path, name: str) -> None:
    text, said = REFUSED[name]
    done = run(written(tmp_path, text))
    assert done.code == 2 and said in done.err and len(done.err.splitlines()) == 1, done.err


HOSTILE = {
    "parentheses": "x = " + "(" * 5000 + "1" + ")" * 5000,
    "a long sum": "x = " + "+".join("1" * 9 for _ in range(20_000)),
    "lists": "x = " + "[" * 150 + "]" * 150 + "\n" + LOAD,
    "blocks": "".join(" " * i + "if x:\n" for i in range(90)) + " " * 90 + "pass\n",
    "recursion": "def f(x):\n  return f(f(f(x)))\nf(f(1))\n" + LOAD,
    "two that call each other": "def f():\n  g(); g()\ndef g():\n  f(); f()\nf()\n",
    "itself": "x = x\nx.y = x\nd = {}\nd['d'] = d\n" + LOAD,
    "a list in itself": "x = [1]\nx = x + [x]\n" + "x = x + x\n" * 60,
    "doubling": "x = 'ab'\n" + "x = x + x\n" * 60 + "y = 2\n" + "y = y * y\n" * 60,
    "doubling nests": "x = 1\n" + "x = [x, x]\n" * 60 + LOAD,
    "doubling nests that are used": "x = 1\n"
    + "x = [x, x]\n" * 60
    + f"{LOAD}if x:\n  y = x\n"
    + "d = {}\nd['d'] = [d]\nd['e'] = d\nTrainer(model, TrainingArguments(optim=x, a=d, b=x == d))",
    "a power": "x = 9 ** 9 ** 9 ** 9\ny = 1 << 10 ** 9\nz = 'a' * 10 ** 10\n",
    "attributes": "x = a" + ".b" * 3000,
    "classes": "class A(B): pass\nclass B(A): pass\nA()\n",
    "large": "x = 1\n" * 300_000,
    "calls": "f(" * 80 + ")" * 80,
    "statements": LOAD + "x = 1\n" * 60_000,
    "surrogates": "x = '\\ud800'\nmodel = AutoModel.from_pretrained('\\ud800')\nTrainer(model)",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_script_ends_in_one_line(tmp_path: Path, name: str) -> None:
    done = run(written(tmp_path, HOSTILE[name]))
    assert done.code == 2 and len(done.err.splitlines()) == 1, done.err[-800:]
    assert "defect" not in done.err and len(done.err) < 1000


@pytest.mark.parametrize(
    "text", ["[1]", "{}", '{"cells": 3}', '{"cells": [1, {"source": 3, "cell_type": "code"}]}', "{"]
)
def test_a_broken_notebook_ends_in_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "x.ipynb"
    file.write_text(text)
    done = run(str(file))
    assert done.code == 2 and len(done.err.splitlines()) == 1 and "defect" not in done.err


def test_trl_keeps_the_defaults_of_the_trainers_own_arguments(tmp_path: Path) -> None:
    """It makes its own of them with every value, so checkpoints and bf16 stay off."""
    script = tmp_path / "train.py"
    text = (
        "from transformers import AutoModelForCausalLM, TrainingArguments\n"
        "from trl import SFTConfig, SFTTrainer\n"
        "model = AutoModelForCausalLM.from_pretrained('Qwen/Qwen2-7B')\n"
        "args = TrainingArguments(output_dir='a', per_device_train_batch_size=1)\n"
        "SFTTrainer(model=model, args=args).train()\n"
    )
    script.write_text(text)
    plain = with_job_file({"job": str(script)}, [])
    script.write_text(text.replace("args = TrainingArguments(", "args = SFTConfig("))
    own = with_job_file({"job": str(script)}, [])
    assert (plain["checkpointing"], own["checkpointing"]) == ("none", "full")
    assert (plain["precision"], own["precision"]) == ("checkpoint", "bf16-checkpoint")


def test_a_model_config_written_out_says_the_model_and_the_adapter(tmp_path: Path) -> None:
    """The notebook asked for --model, which stands in its ModelConfig."""
    script = tmp_path / "train.py"
    text = (
        "from trl import GRPOConfig, GRPOTrainer, ModelConfig, get_peft_config\n"
        "config = ModelConfig(model_name_or_path='llama-160m', use_peft=True, lora_r=4)\n"
        "args = GRPOConfig(per_device_train_batch_size=4, num_generations=2)\n"
        "GRPOTrainer(model=config.model_name_or_path, reward_funcs=f, args=args,\n"
        "            peft_config=get_peft_config(config)).train()\n"
    )
    script.write_text(text)
    found = with_job_file({"job": str(script)}, [])
    assert (found["model"], found["method"], found["rank"]) == ("llama-160m", "lora", 4)
    script.write_text(text.replace("use_peft=True, ", ""))
    assert "method" not in with_job_file({"job": str(script)}, [])


def test_a_notebook_s_commands_are_read_where_its_code_trains_nothing(tmp_path: Path) -> None:
    """Notebooks that start a script with `!` were said to train nothing; the release that they
    install counts."""
    file = tmp_path / "x.ipynb"

    def notebook(*cells: str) -> None:
        made = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
        file.write_text(json.dumps({"cells": made}))

    line = "!torchrun --nproc_per_node 2 sft.py --config \\\n  train.yaml"
    (tmp_path / "train.yaml").write_text(
        "model_name_or_path: llama-160m\ndataset_name: a/b\nmax_seq_length: 512\nbf16: true\n"
    )
    notebook('!pip install "trl==0.12.1" peft', "x = 1", line)
    found = with_job_file({"job": str(file)}, [])
    assert (found["gpus"], found["model"], found["stack"]) == (2, "llama-160m", "trl-0.14")
    notebook("%%bash\nBS=3\npython t.py --model_name_or_path gpt2 --lr 1 --batch_size $BS")
    assert with_job_file({"job": str(file)}, [])["bs"] == 3
    notebook("name = 'a'", "!python t.py --learning_rate 1 --model_name_or_path {name}")
    with pytest.raises(InputError, match="add --model"):
        with_job_file({"job": str(file)}, [])
    notebook("!pip install trl", "print(1)")
    with pytest.raises(InputError, match="trains nothing"):
        with_job_file({"job": str(file)}, [])


def test_a_cast_is_what_it_casts(tmp_path: Path) -> None:
    script = tmp_path / "t.py"
    script.write_text(
        "from typing import cast\n@dataclass\nclass Own:\n    name: str = 'llama-160m'\n"
        "own, a = HfArgumentParser([Own, TrainingArguments]).parse_args_into_dataclasses()\n"
        "own = cast(Own, own)\nm = AutoModelForCausalLM.from_pretrained(own.name)\n"
        "Trainer(m, a).train()\n"
    )
    assert with_job_file({"job": str(script)}, [])["model"] == "llama-160m"


def test_an_engine_that_a_script_initializes_itself_is_read(tmp_path: Path) -> None:
    """`deepspeed.initialize` with a literal configuration was a loop that is not read."""
    script = tmp_path / "t.py"
    text = (
        "import deepspeed\nconfig = {'train_micro_batch_size_per_gpu': 4,"
        " 'gradient_accumulation_steps': 2, 'bf16': {'enabled': True},"
        " 'zero_optimization': {'stage': 2}, 'optimizer': {'type': 'AdamW', 'params': {'lr': 1}}}\n"
        "m = AutoModelForCausalLM.from_pretrained('llama-160m')\n"
        "engine, _, _, _ = deepspeed.initialize(model=m, config=config)\n"
        "for batch in DataLoader(data, batch_size=4):\n"
        "    loss = engine(**batch).loss\n    engine.backward(loss)\n    engine.step()\n"
    )
    script.write_text(text)
    found = with_job_file({"job": str(script), "gpus": 2}, [])
    said = [found.get(key) for key in ("bs", "grad_accum", "data_parallel", "optimizer", "model")]
    assert said == [4, 2, ["zero2"], "adamw-fused", "llama-160m"]
    script.write_text(text.replace("config=config", "config=make()"))
    with pytest.raises(InputError, match="trains in a loop of its own"):
        with_job_file({"job": str(script)}, [])


def test_a_script_that_is_given_alone_has_no_words(tmp_path: Path) -> None:
    """sentence-transformers' examples take their model from `sys.argv` where there is one."""
    script = tmp_path / "t.py"
    script.write_text(
        "import sys\nname = sys.argv[1] if len(sys.argv) > 1 else 'llama-160m'\n"
        "m = AutoModelForCausalLM.from_pretrained(name)\nTrainer(m, TrainingArguments('x')).train()\n"
    )
    assert with_job_file({"job": str(script)}, [])["model"] == "llama-160m"
    (tmp_path / "run.sh").write_text("python t.py gpt2 --learning_rate 1\n")
    with pytest.raises(InputError, match="add --model"):
        with_job_file({"job": str(tmp_path / "run.sh")}, [])
