"""A launch line whose Python script lies beside it: the script's literal defaults and calls count,
the line's words win over them, and nothing is run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import with_job_file

ARGPARSE = """
import argparse
from transformers import AutoModelForCausalLM, TrainingArguments, Trainer
from peft import LoraConfig, get_peft_model

open("ran", "w")

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--base", default="meta-llama/Llama-3.2-1B")
    p.add_argument("--lora_r", type=int, default=16)
    p.add_argument("-b", "--bs", "--batch", type=int, default=4)
    p.add_argument("--use-gc", action="store_true")
    args = p.parse_args()
    model = AutoModelForCausalLM.from_pretrained(args.base, dtype="bfloat16")
    config = LoraConfig(r=args.lora_r, lora_alpha=32, target_modules=["q_proj"])
    model = get_peft_model(model, config)
    given = TrainingArguments(
        per_device_train_batch_size=args.bs, gradient_accumulation_steps=4,
        bf16=True, gradient_checkpointing=args.use_gc,
    )
    Trainer(model=model, args=given).train()
main()
"""
DATACLASSES = """
from dataclasses import dataclass, field
import transformers
@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="meta-llama/Llama-3.2-1B")
@dataclass
class TrainingArguments(transformers.TrainingArguments):
    model_max_length: int = field(default=512)
    optim: str = field(default="adafactor")
parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))
model_args, training_args = parser.parse_args_into_dataclasses()
model = transformers.AutoModelForCausalLM.from_pretrained(model_args.model_name_or_path)
transformers.Trainer(model=model, args=training_args).train()
"""
LOOP = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("--model_name_or_path", default="meta-llama/Llama-3.2-1B")
p.add_argument("--lora_rank", type=int, default=16)
p.add_argument("--batch_size", type=int, default=4)
p.add_argument("--learning_rate", type=float, default=1e-4)
args = p.parse_args()
for batch in batches:
    model(batch).loss.backward()
"""
CASES: list[tuple[str, str, dict[str, object]]] = [
    (ARGPARSE, "python train.py", {"bs": 4, "rank": 16, "alpha": 32, "grad_accum": 4}),
    (ARGPARSE, "python train.py --lora_r 8", {"bs": 4, "rank": 8, "targets": ["q_proj"]}),
    (ARGPARSE, "python train.py --batch 2", {"bs": 2, "checkpointing": "none"}),
    (ARGPARSE, "python train.py -b 3 --use-gc", {"bs": 3, "checkpointing": "full"}),
    (ARGPARSE, "torchrun --nproc_per_node 2 ./train.py", {"gpus": 2, "model": "meta-llama/Llama-3.2-1B"}),
    (DATACLASSES, "python train.py --bf16 True", {"optimizer": "adafactor", "bs": 8}),
    (
        DATACLASSES,
        "accelerate launch train.py --optim adamw_torch --model_name_or_path Qwen/Qwen3-0.6B",
        {"optimizer": "adamw_torch", "model": "Qwen/Qwen3-0.6B"},
    ),
    (LOOP, "python train.py", {"rank": 16, "bs": 4}),
    (LOOP, "python train.py --batch_size 3", {"rank": 16, "bs": 3}),
    (LOOP, "python train.py --lora_rank 0", {"bs": 4, "rank": None}),
]  # fmt: skip


def options_of(folder: Path, python: str, line: str, **more: object) -> dict[str, object]:
    """The options of a launch line in a shell script with its Python script beside it."""
    (folder / "train.py").write_text(python)
    (folder / "run.sh").write_text(line)
    return with_job_file({"job": str(folder / "run.sh"), **more}, [])


@pytest.mark.parametrize(("python", "line", "wanted"), CASES)
def test_the_script_beside_a_line_gives_its_defaults(
    tmp_path: Path, python: str, line: str, wanted: dict[str, object]
) -> None:
    found = options_of(tmp_path, python, line)
    assert {key: found.get(key) for key in wanted} == wanted
    assert not (tmp_path / "ran").exists()


def test_a_pasted_line_has_its_script_where_it_is_pasted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").write_text(ARGPARSE)
    monkeypatch.chdir(tmp_path)
    found = with_job_file({"launch": ["python", "train.py", "--lora_r", "4"]}, [])
    assert (found["rank"], found["bs"]) == (4, 4)


def test_a_script_elsewhere_is_not_the_lines(tmp_path: Path) -> None:
    other, beside = tmp_path / "other", tmp_path / "beside"
    other.mkdir()
    beside.mkdir()
    options_of(tmp_path, ARGPARSE, "python train.py")
    shutil.move(tmp_path / "run.sh", other / "run.sh")
    above = with_job_file({"job": str(other / "run.sh")}, [])  # run from the folder above
    assert above["model"] == "meta-llama/Llama-3.2-1B"
    shutil.move(tmp_path / "train.py", beside / "train.py")
    with pytest.raises(InputError, match="launches no training"):
        with_job_file({"job": str(other / "run.sh")}, [])


def test_what_only_a_run_knows_is_asked_for_with_its_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"comes from \$BS .*add --bs"):
        options_of(tmp_path, ARGPARSE, "python train.py --bs $BS")
    unknown = ARGPARSE.replace("=args.bs,", "=count(),")
    with pytest.raises(InputError, match=r"comes from count\(\) of .*train.py .*add --bs"):
        options_of(tmp_path, unknown, "python train.py")
    assert options_of(tmp_path, ARGPARSE, "python train.py --bs $BS", bs="2")["bs"] == "2"


def test_explain_says_which_file_gave_a_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(ARGPARSE)
    (tmp_path / "run.sh").write_text("A=1\npython train.py --lora_r 8 --strange 7\n")
    done = run("run.sh", "--ctx", "64", "--explain")
    assert done.code == 0, done.err
    lines = {line.split(" = ")[0].strip(): line for line in done.out.splitlines() if " = " in line}
    assert "run.sh:2 (lora_r)" in lines["rank"]
    assert "train.py:16 (lora_alpha)" in lines["alpha"]
    assert "train.py:19 (gradient_accumulation_steps)" in lines["grad_accum"]
    assert "unknown, and left out: strange" in done.err


OWN_LINE = (
    "torchrun --nproc_per_node 8 own.py --model_name llama-3.2-1b --batch_size 1 --seq_len 128"
    " --lr 1e-5 --bf16"
)


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("--tp 2", {"tp": 2}),
        ("--tensor_parallel_size 2 --pp_size 4", {"tp": 2, "pp": 4}),
        ("--optimizer adafactor", {"optimizer": "adafactor"}),
    ],
)
def test_words_that_mean_the_same_everywhere_are_taken(
    words: str, options: dict[str, object]
) -> None:
    found = with_job_file({"launch": [f"{OWN_LINE} {words}"]}, notes := [])
    assert {key: found.get(key) for key in options} == options
    assert any("taken as --" in note for note in notes)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        ("--precision fp8", ["--precision", "bf16"]),
        ("--optimizer our_own", ["--optimizer", "lion"]),
        ("--fsdp2", ["--fsdp"]),
        ("--offload gradients", ["--offload", "none"]),
    ],
)
def test_a_word_with_the_name_of_an_option_withholds_the_verdict(
    words: str, flags: list[str]
) -> None:
    line = ["--json", "--", *OWN_LINE.split(), *words.split()]
    told = json.loads(run("--gpu", "h100", *line).out)
    name = words.split()[0].strip("-")
    assert [key["name"] for key in told["inputs"]["keys"]["not_priced"]] == [name]
    assert told["verdict"] == "cannot tell"
    settled = json.loads(run("--gpu", "h100", *flags, *line).out)
    assert settled["inputs"]["keys"]["not_priced"] == [] and settled["verdict"] == "fits"
    plain = json.loads(run("--gpu", "h100", "--json", "--", *OWN_LINE.split(), "--rank", "3").out)
    assert plain["inputs"]["keys"]["unknown"] == ["rank"] and plain["verdict"] == "fits"


FOLDER = """
: "${PARTS:=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)}"
TOLD="$(dirname "$0")"
"""


@pytest.mark.parametrize(
    "here",
    [
        '"$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"',
        '"$(cd -- "$(dirname -- "${BASH_SOURCE[0]:-$0}")" &> /dev/null && pwd -P)"',
        "$(dirname $(readlink -f $0))",
        '"$(dirname "$(realpath "$BASH_SOURCE")")"',
        '"$( cd "$( dirname "$0" )/../jobs" >/dev/null 2>&1; pwd )"',
    ],
)
def test_a_script_finds_what_lies_around_it_by_its_own_folder(tmp_path: Path, here: str) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "common.sh").write_text(FOLDER + ': "${GPUS:=4}"\n')
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}}))
    script = tmp_path / "jobs" / "run.sh"
    script.write_text(
        f'HERE={here}\nROOT=$(dirname "$HERE")\nsource "${{HERE}}/../parts/common.sh"\n'
        "torchrun --nproc_per_node ${GPUS} sft.py --model_name_or_path gpt2 --bf16 true"
        ' --deepspeed "$ROOT/ds.json" --output_dir $TOLD --run_name $PARTS\n'
    )
    options = with_job_file({"job": str(script)}, [])
    assert (options["gpus"], options["data_parallel"]) == (4, ["zero2"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("model = FSDP(model)", "shards its model in its code"),
        ("fully_shard(model)", "shards its model in its code"),
        ("model.embed.requires_grad_(False)", "freezes parameters in its code"),
        ("for p in model.parameters(): p.requires_grad = False", "freezes parameters in its code"),
    ],
)
@pytest.mark.parametrize("target", ["train.py", "/home/somebody/code/train.py"])
def test_a_loop_that_decides_in_its_code_is_not_priced_by_its_words(
    tmp_path: Path, line: str, said: str, target: str
) -> None:
    loop = LOOP.replace('p.add_argument("--lora_rank", type=int, default=16)\n', "")
    (tmp_path / "train.py").write_text(f"{loop}{line}\n")
    script = tmp_path / "run.sh"
    script.write_text(f"python {target} --model_name gpt2 --batch_size 2 --train_type qlora\n")
    with pytest.raises(InputError, match=f"loop of its own that is not read: it {said}"):
        with_job_file({"job": str(script)}, [])


def test_a_loop_of_ones_own_has_not_trls_defaults(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LOOP)
    script = tmp_path / "run.sh"
    script.write_text("python train.py --model_name_or_path gpt2 --per_device_train_batch_size 2\n")
    options = with_job_file({"job": str(script)}, [])
    assert (options["checkpointing"], options.get("loss")) == ("none", None)


_RUN_BY = {
    "fire": "def main({}): {}\nif __name__ == '__main__':\n    fire.Fire(main)\n",
    "typer": "def main({}): {}\ntyper.run(main)\n",
    "click": "@click.command()\n@click.option('--bs', default=4)\n"
    "@click.option('--base_model', default='llama-160m')\ndef main({}): {}\nmain()\n",
    "tyro": "@dataclass\nclass Args:\n    base_model: str = 'llama-160m'\n    bs: int = 4\n"
    "a = tyro.cli(Args)\nbase_model, bs = a.base_model, a.bs\n{1}\n",
}
_MAKES = (
    "Trainer(AutoModelForCausalLM.from_pretrained(base_model),"
    " TrainingArguments('x', per_device_train_batch_size=bs))"
)
_TAKES = {
    "typer": "base_model: str = typer.Option('llama-160m'), bs: int = typer.Option(4)",
    "click": "base_model, bs",
}


@pytest.mark.parametrize("library", sorted(_RUN_BY))
def test_a_library_makes_the_line_s_words_parameters(tmp_path: Path, library: str) -> None:
    takes = _TAKES.get(library, "base_model='llama-160m', bs=4")
    (tmp_path / "t.py").write_text(_RUN_BY[library].format(takes, _MAKES))
    plain = with_job_file({"job": str(tmp_path / "t.py")}, [])
    assert (plain["model"], plain["bs"]) == ("llama-160m", 4)
    (tmp_path / "run.sh").write_text("python t.py --base_model llama-3.2-1b --bs 2\n")
    found = with_job_file({"job": str(tmp_path / "run.sh")}, [])
    assert (found["model"], found["bs"]) == ("llama-3.2-1b", 2)


def test_chinese_llama_alpaca_names_what_it_trains() -> None:
    words = "torchrun run_clm_pt_with_peft.py --model_name_or_path llama-2-7b --lora_rank 8"
    line = f"{words} --trainable q_proj,v_proj --modules_to_save embed_tokens,lm_head --lr 1e-4"
    found = with_job_file({"launch": line.split()}, [])
    assert found["targets"] == "q_proj,v_proj" and found["train_modules"] == "embed_tokens,lm_head"


@pytest.mark.parametrize(
    "makes",
    [
        "LoraConfig(r=4)\nTrainer(m, a)",
        "c = TrlParser([ModelConfig]).parse_args_and_config()[0]\n"
        "SFTTrainer(m, args=a, peft_config=get_peft_config(c))",
    ],
)
def test_a_rank_makes_no_adapter_that_the_script_does_not(tmp_path: Path, makes: str) -> None:
    """The line's `lora_r` was an adapter all the same; and the script was not found under a folder
    that a variable names."""
    text = (
        "m = AutoModelForCausalLM.from_pretrained('llama-160m')\n"
        f"a = TrainingArguments('x', per_device_train_batch_size=3)\n{makes}\n"
    )
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "tune.py").write_text(text)
    (tmp_path / "scripts").mkdir()
    line = tmp_path / "scripts" / "run.sh"
    line.write_text("python ${BASE_PATH}/src/tune.py --lora_r 64\n")
    found = with_job_file({"job": str(line)}, [])
    assert (found["bs"], found.get("method")) == (3, None)


def test_a_line_s_own_length_wins_over_what_is_cut_in_code(tmp_path: Path) -> None:
    """Passages cut to 128 tokens stood for whole sequences."""
    (tmp_path / "t.py").write_text(
        "m = AutoModelForCausalLM.from_pretrained('llama-160m')\n"
        "tok(text, truncation=True, max_length=128)\nTrainer(m, TrainingArguments('x'))\n"
    )
    lengths: list[object] = []
    for words in ("", "--model_max_length 4096"):
        (tmp_path / "run.sh").write_text(f"python t.py --bf16 true {words}\n")
        lengths.append(with_job_file({"job": str(tmp_path / "run.sh")}, [])["ctx"])
    assert lengths == [128, 4096]


# A script with switches of its own, whose functions lie in another file (LLaVA, artidoro/qlora).
_OWN_SWITCHES = """
from dataclasses import dataclass, field
import argparse
import bitsandbytes as bnb
import torch
import transformers
from peft import LoraConfig, get_peft_model

@dataclass
class ModelArguments:
    model_name_or_path: str = "llama-160m"
    tune_adapter_only: bool = False
@dataclass
class TrainingArguments(transformers.TrainingArguments):
    lora_enable: bool = False
    lora_r: int = 64
    bits: int = 16
    double_quant: bool = True
    quant_type: str = "nf4"

def find_all_linear_names(model):
    cls, names = torch.nn.Linear, set()
    for name, module in model.named_modules():
        if isinstance(module, cls):
            names.add(name.split('.')[-1])
    if 'lm_head' in names:
        names.remove('lm_head')
    return list(names)

def train():
    parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))
    model_args, training_args = parser.parse_args_into_dataclasses()
    args = argparse.Namespace(**vars(model_args), **vars(training_args))
    loading = {}
    if training_args.bits == 4:
        loading["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_use_double_quant=args.double_quant,
            bnb_4bit_quant_type=args.quant_type,
            bnb_4bit_compute_dtype=(torch.float32 if args.fp16 else torch.bfloat16),
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model_name_or_path,
        torch_dtype=(torch.bfloat16 if args.bf16 else torch.float32),
        **loading,
    )
    if training_args.lora_enable:
        model = get_peft_model(
            model, LoraConfig(r=args.lora_r, target_modules=find_all_linear_names(model))
        )
    if args.tune_adapter_only:
        model.requires_grad_(False)
    transformers.Trainer(model=model, args=training_args).train()
"""
_SWITCHED: list[tuple[str, dict[str, object], list[str]]] = [
    ("--bf16 True", {"method": None, "rank": None, "quant": None, "precision": "bf16-autocast"}, []),
    ("", {"method": None, "precision": "fp32"}, []),
    ("--lora_enable True", {"method": "lora", "rank": 64, "targets": "all-linear"}, []),
    (
        "--lora_enable True --bits 4 --bf16 True --quant_type fp4",
        {"quant": "fp4", "double_quant": True, "quant_compute_dtype": "bf16", "rank": 64},
        [],
    ),
    ("--lora_r 8", {"method": None}, []),
    ("--tune_adapter_only True", {"method": None}, ["frozen_in_code"]),
]  # fmt: skip


@pytest.mark.parametrize(("words", "said", "left"), _SWITCHED, ids=[it[0] for it in _SWITCHED])
def test_a_script_s_own_switches_decide(
    tmp_path: Path, words: str, said: dict[str, object], left: list[str]
) -> None:
    """The default rank of LLaVA's arguments was an adapter, though its switch was off; what a
    namespace of several dataclasses holds was asked for."""
    (tmp_path / "llava").mkdir()
    (tmp_path / "llava" / "train.py").write_text(_OWN_SWITCHES)
    (tmp_path / "go.py").write_text("from llava.train import train\ntrain()\n")
    (tmp_path / "run.sh").write_text(
        f"python go.py --per_device_train_batch_size 2 --model_max_length 512 {words}\n"
    )
    found = with_job_file({"job": str(tmp_path / "run.sh")}, [])
    assert {key: found.get(key) for key in said} == said
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == left


def test_a_model_s_own_class_is_named(tmp_path: Path) -> None:
    """LLaVA's model has a tower and a projector that its base's name does not say."""
    (tmp_path / "own.py").write_text("class LlavaForCausalLM:\n    pass\n")
    body = "m = {}.from_pretrained('llama-160m')\nTrainer(m, TrainingArguments('x'))\n"
    named: list[list[str]] = []
    for line, name in (
        ("from own import LlavaForCausalLM", "LlavaForCausalLM"),
        ("from somewhere.models import LlavaForCausalLM", "LlavaForCausalLM"),
        ("from transformers import LlamaForCausalLM", "LlamaForCausalLM"),
    ):
        (tmp_path / "t.py").write_text(f"{line}\n{body.format(name)}")
        keys = with_job_file({"job": str(tmp_path / "t.py")}, [])["job_keys"]
        assert isinstance(keys, JobKeys)
        named.append([key.name for key in keys.of(KeyUse.NOT_PRICED)])
    assert named == [["model_class"], ["model_class"], []]


def test_a_trainer_of_the_script_s_own_has_the_lengths_of_its_arguments(tmp_path: Path) -> None:
    """VLM-R1's GRPO trainer stood under a second name, in a module of the folder that the script
    enters, and its loss is its own; its pin lies there too."""
    code = tmp_path / "src" / "part"
    (code / "open").mkdir(parents=True)
    (code / "setup.py").write_text("deps = ['trl==0.17.0']\n")
    (code / "open" / "own.py").write_text(
        "class OwnGRPOTrainer(Trainer):\n    def compute_loss(self, model, inputs):\n        ...\n"
    )
    (code / "open" / "run.py").write_text(
        "from own import OwnGRPOTrainer\nfrom trl import GRPOConfig, ModelConfig, TrlParser\n"
        "class OwnConfig(ModelConfig):\n    freeze: bool = False\n"
        "a, m = TrlParser((GRPOConfig, OwnConfig)).parse_args_and_config()\n"
        "make = OwnGRPOTrainer\n"
        "t = make(model=m.model_name_or_path, args=a, peft_config=get_peft_config(m))\nt.train()\n"
    )
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "run.sh").write_text(
        "cd ${HERE}/src/part\ntorchrun --nproc_per_node 2 open/run.py --max_prompt_length 256"
        " --max_completion_length 1024 --model_name_or_path llama-160m --bf16 --num_generations 4\n"
    )
    found = with_job_file({"job": str(tmp_path / "scripts" / "run.sh")}, [])
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == ["compute_loss"]
    said = [found.get(key) for key in ("workload", "completion", "ctx", "stack", "method")]
    assert said == ["grpo", 1024, 1280, "trl-0.18", None]


def test_what_trains_by_another_package_is_refused_by_its_name(tmp_path: Path) -> None:
    """ "trains nothing" was said of colpali's scripts."""
    (tmp_path / "t.py").write_text(
        "from engine.training import Training, Config\n"
        "trainer = Training(Config(lr=1)) if fast else Training(None)\ntrainer.train()\n"
    )
    with pytest.raises(InputError, match="trains with Training of engine, which is not read"):
        with_job_file({"job": str(tmp_path / "t.py")}, [])


def not_priced(options: dict[str, object]) -> list[str]:
    keys = options["job_keys"]
    assert isinstance(keys, JobKeys)
    return [key.name for key in keys.of(KeyUse.NOT_PRICED)]


_VISION = "m = AutoModelForImageTextToText.from_pretrained('{}')\n{}\nTrainer(m, TrainingArguments('x'))\n"
_SEEN = {
    "a processor's": "def collate(rows):\n    return processor(text=texts, images=pictures)",
    "a message's": "rows = [{'role': 'user', 'content': [{'type': 'image'}]} for row in data]",
    "unsloth's collator": "c = UnslothVisionDataCollator(m, tokenizer)",
}


@pytest.mark.parametrize("how", _SEEN)
def test_images_that_a_script_puts_into_its_batch_are_named(tmp_path: Path, how: str) -> None:
    """humor-r1's captions were priced as text alone, without a word."""
    script = tmp_path / "t.py"
    script.write_text(_VISION.format("Qwen/Qwen2.5-VL-3B-Instruct", _SEEN[how]))
    assert not_priced(with_job_file({"job": str(script)}, [])) == ["images_in_code"]
    assert not_priced(with_job_file({"job": str(script), "image": "448x448"}, [])) == []
    assert not_priced(with_job_file({"job": str(script), "images": "0"}, [])) == []
    script.write_text(_VISION.format("Qwen/Qwen2.5-3B", _SEEN[how]))
    assert not_priced(with_job_file({"job": str(script)}, [])) == []
    for other in ("def f(t):\n    return p(text=t, images=None)", "ask([{'type': 'image'}])"):
        script.write_text(_VISION.format("Qwen/Qwen2.5-VL-3B-Instruct", other))
        assert not_priced(with_job_file({"job": str(script)}, [])) == []


def test_a_loss_behind_many_modules_is_found_and_an_unread_trainer_named(tmp_path: Path) -> None:
    """pe_rank's trainer stands in the fifteenth module that its script reads."""
    names = [f"part{number}" for number in range(14)]
    for name in names:
        (tmp_path / f"{name}.py").write_text("X = 1\n")
    (tmp_path / "own.py").write_text(
        "from transformers import Trainer as Base\nclass Trainer(Base):\n    pass\n"
        "class RankTrainer(Trainer):\n    def compute_loss(self, model, inputs):\n        ...\n"
    )
    body = (
        "m = AutoModelForCausalLM.from_pretrained('llama-160m')\n"
        "RankTrainer(model=m, args=TrainingArguments('x')).train()\n"
    )
    imports = "".join(f"from {name} import X\n" for name in names)
    script = tmp_path / "t.py"
    script.write_text(f"{imports}from own import RankTrainer\n{body}")
    assert not_priced(with_job_file({"job": str(script)}, [])) == ["compute_loss"]
    script.write_text(f"from somewhere.else_ import RankTrainer\n{body}")
    assert not_priced(with_job_file({"job": str(script)}, [])) == ["trainer_class"]
    script.write_text(f"from trl.extras import RankTrainer\n{body}")
    assert not_priced(with_job_file({"job": str(script)}, [])) == []


def test_a_module_around_a_model_says_its_checkpointing(tmp_path: Path) -> None:
    """humor-r1's reward model, which is given checkpointing by its own keyword, was a KeyError."""
    script = tmp_path / "t.py"
    script.write_text(
        "class Scores(torch.nn.Module):\n"
        "    def __init__(self, name, gradient_checkpointing):\n"
        "        self.backbone = AutoModelForCausalLM.from_pretrained(name)\n"
        "        if gradient_checkpointing:\n"
        "            self.backbone.gradient_checkpointing_enable()\n"
        "m = Scores('llama-160m', gradient_checkpointing=True)\n"
        "t = TrainingArguments('x', gradient_checkpointing=False)\nTrainer(model=m, args=t).train()\n"
    )
    assert with_job_file({"job": str(script)}, [])["checkpointing"] == "full"


_CHANGED = {
    "layers_in_code": [
        "for layer in m.model.layers:\n    layer.mlp = MoE(hidden_size=8, expert=layer.mlp)",
        "for name, part in m.named_modules():\n    setattr(part, name, made(part))",
        "m.model.layers[0].mlp = Own(m.config)",
    ],
    "adapters_in_code": ["from lycoris import create_lycoris\ncreate_lycoris(m, 1.0)"],
    "": [
        "for layer in m.model.layers:\n    layer.training = True",
        "for part in m.modules():\n    setattr(part, 'is_tuned', True)",
    ],
}


@pytest.mark.parametrize(
    ("key", "text"), [(key, text) for key, texts in _CHANGED.items() for text in texts]
)
def test_what_a_script_changes_in_its_model_is_named(tmp_path: Path, key: str, text: str) -> None:
    """DeepSpeed's experts put into each layer, and LyCORIS, fell away in silence."""
    script = tmp_path / "t.py"
    script.write_text(
        f"m = AutoModelForCausalLM.from_pretrained('llama-160m')\n{text}\n"
        "Trainer(m, TrainingArguments('x')).train()\n"
    )
    assert not_priced(with_job_file({"job": str(script)}, [])) == ([key] if key else [])


def test_a_file_of_another_machine_is_looked_for_near_the_script(tmp_path: Path) -> None:
    """ "cannot read '/home/me/...'; check the path" was said of a path that the user never gave."""
    (tmp_path / "configs").mkdir()
    file = tmp_path / "configs" / "sft.yaml"
    file.write_text("model_name_or_path: llama-160m\nper_device_train_batch_size: 2\n")
    (tmp_path / "run.sh").write_text("python sft.py --config /home/me/project/configs/sft.yaml\n")
    notes: list[str] = []
    assert with_job_file({"job": str(tmp_path / "run.sh")}, notes)["bs"] == 2
    assert any("is not here" in note and "configs/sft.yaml' is read" in note for note in notes)
    file.unlink()
    with pytest.raises(InputError, match=r"run\.sh' names '/home/me/project/configs/sft\.yaml'"):
        with_job_file({"job": str(tmp_path / "run.sh")}, [])


def test_a_line_of_words_is_no_file_of_settings(tmp_path: Path) -> None:
    """PEFT's examples asked for --quant: both ways of parsing were taken for possible."""
    (tmp_path / "t.py").write_text(
        "@dataclass\nclass Own:\n    name: str = 'llama-160m'\n    patched: bool = False\n"
        "parser = HfArgumentParser((Own, TrainingArguments))\n"
        "if len(sys.argv) == 2 and sys.argv[1].endswith('.json'):\n"
        "    own, a = parser.parse_json_file(json_file=os.path.abspath(sys.argv[1]))\n"
        "else:\n    own, a = parser.parse_args_into_dataclasses()\n"
        "if own.patched:\n    m = FastLanguageModel.from_pretrained(own.name)[0]\n"
        "else:\n    m = AutoModelForCausalLM.from_pretrained(own.name)\nTrainer(m, a).train()\n"
    )
    (tmp_path / "run.sh").write_text("python t.py --per_device_train_batch_size 3 --name gpt2\n")
    found = with_job_file({"job": str(tmp_path / "run.sh")}, [])
    assert (found["model"], found["bs"], found.get("quant")) == ("gpt2", 3, None)
