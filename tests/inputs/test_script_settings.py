"""What people's own scripts read and are started with: settings files, keywords from elsewhere,
modules, switches that exclude one another, loops of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import with_job_file

SETTINGS = "base: llama-3.2-1b\ntrain: {per_device_train_batch_size: 3, max_length: 640}\n"
MODEL = "model = AutoModelForCausalLM.from_pretrained(cfg['base'], dtype='bfloat16')\n"
READS = {
    "a function's default": (
        "def load(path='conf/run.yaml'):\n  with open(path) as f:\n    return yaml.safe_load(f)\n"
        f"cfg = load()\n{MODEL}SFTTrainer(model, args=SFTConfig(**cfg['train']))\n"
    ),
    "attributes": (
        "cfg = OmegaConf.load('conf/run.yaml')\nt = cfg.train\n"
        "model = AutoModelForCausalLM.from_pretrained(cfg.base, dtype='bfloat16')\n"
        "SFTTrainer(model, args=SFTConfig(max_length=t.max_length,"
        " per_device_train_batch_size=t.get('per_device_train_batch_size', 1)))\n"
    ),
    "a path's text": (
        f"cfg = yaml.safe_load(Path('conf/run.yaml').open())\n{MODEL}kept = cfg['train']\n"
        "known = {k: v for k, v in kept.items() if k in fields}\n"
        "SFTTrainer(model, args=SFTConfig(**known))\n"
    ),
}


def _run(folder: Path, name: str, files: dict[str, str], **flags: object) -> dict[str, object]:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")
    return with_job_file({**flags, "job": str(folder / name)}, [])


def _named(found: dict[str, object]) -> set[str]:
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    return {key.name for key in keys.of(KeyUse.NOT_PRICED)}


@pytest.mark.parametrize("name", READS)
def test_settings_that_a_script_reads_are_its_values(name: str, tmp_path: Path) -> None:
    found = _run(tmp_path, "train.py", {"train.py": READS[name], "conf/run.yaml": SETTINGS})
    assert (found["model"], found["bs"], found["ctx"]) == ("llama-3.2-1b", 3, 640)


def test_settings_that_are_not_here_are_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"per_device_train_batch_size comes from cfg\['train'\]"):
        _run(tmp_path, "train.py", {"train.py": READS["a function's default"]})


def test_words_that_exclude_one_another(tmp_path: Path) -> None:
    script = (
        "p = argparse.ArgumentParser()\ng = p.add_mutually_exclusive_group()\n"
        "g.add_argument('--use_lora', nargs=0, action=Mode)\n"
        "g.add_argument('--full', nargs=0, action=Mode)\n"
        "p.set_defaults(use_lora=True, full=False)\na = p.parse_args()\n"
        "m = AutoModelForCausalLM.from_pretrained('llama-3.2-1b')\nc = None\n"
        "if a.use_lora:\n  c = LoraConfig(r=8)\n"
        "GRPOTrainer(m, args=GRPOConfig(beta=0.0), peft_config=c)\n"
    )
    files = {"pkg/rl.py": script, "go.sh": "python -m pkg.rl --full\n"}
    full = _run(tmp_path, "go.sh", files)
    assert (full["workload"], full.get("rank")) == ("grpo", None)
    lora = _run(tmp_path, "go.sh", {"go.sh": "python -m pkg.rl --use_lora\n"})
    assert (lora["workload"], lora["rank"]) == ("grpo", 8)


LOOP = (
    "m = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)\n{start}"
    "for b in data:\n  {run}.backward(m(**b).loss)\n"
)
STARTS = "e, _, _, _ = deepspeed.initialize(config=CONFIG, model=m)\n"
LINE = "CUDA_VISIBLE_DEVICES=0,1 deepspeed loop.py --model_name_or_path llama-3.2-1b --lr 1e-4"


def test_deepspeed_in_a_loop_of_its_own(tmp_path: Path) -> None:
    files = {"loop.py": LOOP.format(start=STARTS, run="e"), "go.sh": f"{LINE} --batch_size 2\n"}
    with pytest.raises(InputError, match="DeepSpeed's choices in its code"):
        _run(tmp_path, "go.sh", files)
    half = '{"zero_optimization": {"stage": 2}, "bfloat16": {"enabled": true}}'
    line = f"{LINE} --batch_size 2 --deepspeed_config ds.json --lora True --lora_dim 4"
    line += " --lora_module_name q_proj,v_proj\n"
    found = _run(tmp_path, "go.sh", {"ds.json": half, "go.sh": line})
    assert (found["data_parallel"], found["gpus"]) == (["zero2"], 2)
    assert (found["precision"], found["rank"]) == ("bf16-checkpoint", 4)
    assert found["targets"] == ["q_proj", "v_proj"]


def test_the_type_of_a_loop_is_named_unless_a_word_says_it(tmp_path: Path) -> None:
    line = LINE.replace("deepspeed", "torchrun --nproc_per_node 2")
    files = {"loop.py": LOOP.format(start="", run="loss"), "go.sh": f"{line} --batch_size 2\n"}
    assert "own_loop" in _named(_run(tmp_path, "go.sh", files))
    assert "own_loop" not in _named(_run(tmp_path, "go.sh", {}, precision="bf16"))
    said = _run(tmp_path, "go.sh", {"go.sh": f"{line} --batch_size 2 --bf16\n"})
    assert "own_loop" not in _named(said)


def test_either_switch_of_checkpointing_turns_it_on(tmp_path: Path) -> None:
    trainer = "model_name_or_path: llama-3.2-1b\nbf16: true\ngradient_checkpointing: false\n"
    fsdp = "distributed_type: FSDP\nnum_processes: 2\nfsdp_config: {fsdp_version: 2,"
    fsdp += " fsdp_activation_checkpointing: true}\n"
    for path, text in (("a.yaml", trainer), ("b.yaml", fsdp)):
        (tmp_path / path).write_text(text, encoding="utf-8")
    for names in (("a.yaml", "b.yaml"), ("b.yaml", "a.yaml")):
        files = [str(tmp_path / name) for name in names]
        found = with_job_file({"job": files}, [])
        assert found["checkpointing"] == "full"
        keys = found["job_keys"]
        assert isinstance(keys, JobKeys)
        assert not keys.differing


SWIFT = {
    "a program by its path": 'torchrun --nproc_per_node 2 "$(which swift)" rlhf --rlhf_type grpo',
    "by what a shell says": "NPROC_PER_NODE=2 $(command -v swift) rlhf --rlhf_type grpo",
}


@pytest.mark.parametrize("name", SWIFT)
def test_a_program_that_the_shell_looks_for(name: str, tmp_path: Path) -> None:
    found = _run(tmp_path, "go.sh", {"go.sh": f"{SWIFT[name]} --model llama-3.2-1b\n"})
    assert (found["workload"], found["rank"], found["gpus"]) == ("grpo", 8, 2)


def test_the_scripts_of_megatron_swift_are_its_own(tmp_path: Path) -> None:
    line = "torchrun --nproc_per_node 2 swift/cli/_megatron/sft.py --model llama-3.2-1b"
    line += " --micro_batch_size 1 --global_batch_size 8 --save out --max_epochs 3\n"
    found = _run(tmp_path, "go.sh", {"go.sh": line})
    assert (found["stack"], found["precision"], found["grad_accum"]) == ("megatron", "bf16", 4)
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert not list(keys.of(KeyUse.UNKNOWN))


def test_what_is_asked_for_names_the_file_that_says_it(tmp_path: Path) -> None:
    files = {
        "acc.yaml": "distributed_type: MULTI_GPU\nnum_processes: 2\n",
        "go.sh": 'accelerate launch --config_file acc.yaml t.py --model_name_or_path "$1" --lr 1\n',
    }
    with pytest.raises(InputError, match=r"known only when \S*go\.sh runs"):
        _run(tmp_path, "go.sh", files)


def test_a_script_that_only_runs_another_names_it(tmp_path: Path) -> None:
    text = 'D="$(dirname "$0")"\nbash "$D/train_sft.sh" --fast\n'
    with pytest.raises(InputError, match=r"it runs 'train_sft\.sh': give that"):
        _run(tmp_path, "go.sh", {"go.sh": text})
