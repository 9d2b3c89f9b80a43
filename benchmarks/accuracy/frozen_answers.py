"""Some 400 answers of the command line, recorded before a change and compared byte for byte after
it.

    python benchmarks/accuracy/frozen_answers.py record FOLDER
    python benchmarks/accuracy/frozen_answers.py compare FOLDER

A change that moves code and no figure leaves every answer as it was: exit code, standard output,
standard error and files. `record` writes one text file for each answer. `compare` asks the recorded
questions again, prints which answers differ and the first line that does, and exits with 1. The cases are made from the catalogs: each model
type, method, format, optimizer, precision, stack, mesh, workload and output.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = next(
    folder for folder in Path(__file__).resolve().parents if (folder / "estimator").is_dir()
)
PROMPT = "$ estimate "
SMALL = "--model tinyllama --ctx 512 --bs 2"
MESHES = (
    "--gpus 4xA100-80 --ddp",
    "--gpus 4xA100-80 --fsdp",
    "--gpus 8xH100 --data-parallel fsdp1",
    "--gpus 8xH100 --data-parallel fsdp1 --sharding grad-op",
    "--gpus 16xH100 --fsdp --sharding hybrid",
    "--gpus 8xH100 --zero 1",
    "--gpus 8xH100 --zero 2 --grad-accum 4",
    "--gpus 8xH100 --zero 3",
    "--gpus 16xH100 --zero 3 --hpz 8",
    "--gpus 16xH100 --zero 3 --mics 8",
    "--gpus 8xH100 --zero 3 --offload optimizer,parameters",
    "--gpus 8xH100 --zero 3 --offload optimizer,parameters --nvme optimizer,parameters",
    "--gpus 4xH100 --tp 4",
    "--gpus 4xH100 --tp 4 --no-sequence-parallel",
    "--gpus 8xH100 --tp 2 --fsdp",
    "--gpus 4xH100 --pp 2 --micro-batches 4",
    "--gpus 8xH100 --pp 4 --pp-schedule gpipe --micro-batches 8",
    "--gpus 4xH100 --pp 2 --pp-schedule interleaved --pp-chunks 2 --micro-batches 8",
    "--gpus 4xH100 --pp 2 --pp-schedule zero-bubble --micro-batches 8",
    "--gpus 4xH100 --cp 2 --fsdp",
    "--gpus 4xH100 --cp 2 --cp-kind ulysses --fsdp",
    "--gpus 8xH100 --tp 2 --pp 2 --zero 1 --stack megatron --micro-batches 4",
    "--gpus 8xH100 --tp 2 --pp 2 --stack megatron --micro-batches 4",
    "--gpus 8xH100 --fsdp --pp 2 --micro-batches 4",
    "--gpus 16xL40S --fsdp --network 100 --nodes 4",
    "--gpus 8xH100 --fsdp --global-batch 64",
    "--gpus 8xH100 --fsdp --offload parameters,optimizer",
    "--gpus 8xH100 --ddp --bucket-mb 100 --bucket-view",
    "--gpus 1024xH100 --fsdp --sharding hybrid",
)
BIG_MESHES = (
    "--model llama-3.1-70b --gpus 64xH100 --tp 8 --pp 4 --micro-batches 16 --stack megatron",
    "--model llama-3.1-405b --gpus 128xH100 --tp 8 --pp 8 --micro-batches 32 --zero 1",
    "--model mixtral-8x7b --gpus 16xH100 --ep 8 --fsdp",
    "--model mixtral-8x7b --gpus 32xH100 --ep 8 --tp 2 --pp 2 --micro-batches 8 --stack megatron",
    "--model qwen3-30b-a3b --gpus 8xH100 --ep 4 --fsdp --expert-imbalance 1.3",
    "--model deepseek-v3 --gpus 128xH800 --ep 16 --pp 8 --micro-batches 32 --zero 1",
    "--model llama-3.1-8b --qlora --gpus 2xrtx3090 --fsdp",
    (
        "--model llama-3.1-70b --qlora --fsdp --offload optimizer,parameters --gpus 2xrtx3090"
        " --ctx 512"
    ),
)
STEPS = (
    "--gpu H100 --checkpointing every:2",
    "--gpu H100 --checkpointing interleaved:2",
    "--gpu H100 --checkpointing sqrt",
    "--gpu H100 --checkpointing selective",
    "--gpu H100 --checkpointing selective:sdpa,linear",
    "--gpu H100 --checkpointing offload",
    "--gpu H100 --checkpointing full --reentrant",
    "--gpu H100 --checkpointing full --eval",
    "--gpu H100 --offload optimizer",
    "--gpu H100 --offload parameters --lora",
    "--gpu H100 --offload parameters,optimizer",
    "--gpu H100 --offload activations",
    "--gpu H100 --offload activations --offload-style torchtune",
    "--gpu H100 --optimizer-in-backward --no-clip",
    "--gpu H100 --no-clip",
    "--gpu H100 --grad-accum 4",
    "--gpu H100 --packing",
    "--gpu H100 --packing --lengths 100,300,500 --attention flash2",
    "--gpu H100 --lengths 100,200,300,400,512",
    "--gpu H100 --compile",
    "--gpu H100 --loss chunked",
    "--gpu H100 --loss fused",
    "--gpu H100 --kernels liger",
    "--gpu H100 --kernels unsloth --qlora",
    "--gpu H100 --kernels napkinmath",
    "--gpu H100 --kernels napkinmath --qlora",
    "--gpu H100 --lora --adapter-dtype bf16 --dropout 0.1",
    "--gpu H100 --lora --train-modules embed_tokens,lm_head",
    "--gpu H100 --lora --adapters 3 --targets q_proj,v_proj",
    "--gpu H100 --freeze embed_tokens",
    "--gpu H100 --qlora --no-kbit",
    "--gpu H100 --qlora --no-double-quant --group-size 128",
    "--gpu H100 --qlora --keep-modules lm_head,q_proj",
    "--gpu RTX4090 --display windows --allocator expandable_segments:True",
    "--gpu RTX4090 --allocator max_split_size_mb:128",
    "--gpu A100-80 --mig 3g.40gb",
    "--gpu T4 --precision fp16-amp",
    "--gpu V100-32 --precision bf16",
    "--gpu MI300X",
    "--gpu B200",
    "--vram 24GiB",
    "--gpu RTX4090 --gpu H100 --gpu T4",
    "--gpu H100 --price 2.5",
    "--gpu H100 --workload dpo",
    "--gpu H100 --workload dpo --lora --no-reference",
    "--gpu H100 --workload distill --teacher llama-3.2-1b",
    "--gpu H100 --workload reward",
    "--gpu H100 --workload grpo --completion 128",
    "--gpu H100 --workload grpo --lora --teacher llama-3.2-1b",
    "--gpu H100 --workload ppo --teacher llama-3.2-1b",
    "--gpu H100 --eval-bs 8",
    "--gpu H100 --generate 64",
    "--gpu H100 --lora --explain",
    "--gpu H100 --qlora --explain",
    "--gpu H100 --explain --checkpointing full",
    "--explain --gpus 8xH100 --fsdp",
    "--timeline OUT.svg --gpu H100",
    "--timeline OUT.html --gpu H100 --qlora",
    "--export hf",
    "--export axolotl --qlora",
    "--export torchtune --model llama-3.1-8b",
    "--export accelerate --gpus 4xA100-80 --fsdp",
    "--export deepspeed --gpus 4xA100-80 --zero 3",
)
COMMANDS = (
    "gpus --json",
    "models --json",
    "gpus",
    "models qwen",
    "links --gpus 16xH100",
    "links --gpus 8xrtx4090 --json",
    "plan --model llama-3.1-8b --gpu rtx4090",
    "plan --model llama-3.1-8b --gpu rtx4090 --json",
    "plan --model tinyllama --gpu rtx3060 --ctx 1024 --global-batch 64",
    "plan --model llama-3.2-1b --gpu rtx4090 --max-ctx",
    "plan --model llama-3.2-1b --gpu rtx4090 --max-bs",
    "plan --model llama-3.2-1b --gpus 8xA100-80",
    "plan --model llama-3.1-70b --gpus 2xrtx3090 --ctx 512",
    "check --model llama-3.1-8b --qlora --gpu rtx4090",
    "check --model llama-3.1-70b --gpu rtx4090",
    "sweep --model llama-3.2-1b --lora --bs 1,2,4,8 --ctx 512,1024,2048 --gpu rtx4090",
    (
        "sweep --model llama-3.2-1b --method full --method lora --method qlora --bs 1..4 --ctx 1k"
        " --gpu H100"
    ),
    (
        "sweep --model tinyllama --bs 1,2 --ctx 512 --gpus 8xA100-80 --data-parallel fsdp2"
        " --data-parallel zero2"
    ),
    "sweep --model tinyllama --bs 1,2,4 --ctx 512,1024 --gpu H100 --out OUT.csv",
    "batch JOBS --out OUT.jsonl",
    "batch JOBS --out OUT.jsonl --exact",
    "version",
    "--help",
    "plan --help",
    "check --help",
    "sweep --help",
    "completion bash",
    "--model llama-9z",
    "--model tinyllama --bs zero",
    "--model tinyllama --optimizer adamx",
    "--model tinyllama --gpus 8xH100 --tp 3",
    "--arch 'L4 h512 a8 kv2 f1024 v32000 tied'",
    "--arch 'L4 h512 a8 f1024 v32000 gelu learned-pos moe8x2' --gpu H100",
)
JOBS = (
    {"model": "tinyllama", "method": "lora", "bs": 4, "id": "a"},
    {"model": "llama-3.2-1b", "method": "qlora", "ctx": 1024, "gpu": "rtx4090"},
    {"model": "gpt2", "bs": 8, "ctx": 512, "gpu": "H100"},
    {"model": "nonsense"},
    {"model": "tinyllama", "gpus": "8xA100-80", "data_parallel": "fsdp2"},
)
SPEED = re.compile(r"\b[\d,]+ a second\b")


def cases() -> Iterator[str]:
    """Command lines, without the program's name."""
    for name in one_model_a_type():
        yield f"--model {name} --bs 1 --ctx 256 --json"
        yield f"--model {name} --lora --bs 2 --ctx 333 --gpu H100"
    for words in alternatives():
        yield f"{SMALL} --gpu H100 {words} --json"
    for words in STEPS:
        yield f"{SMALL} {words}" if "--model" not in words else f"{words} --bs 2 --ctx 512"
    for words in MESHES:
        yield f"{SMALL} {words} --json"
        yield f"--model llama-3.1-8b --lora {words}"
    yield from BIG_MESHES
    yield from COMMANDS
    for job in sorted((ROOT / "tests" / "cli" / "jobs").iterdir()):
        yield f"{job.relative_to(ROOT)}"


def one_model_a_type() -> Iterator[str]:
    """The smallest catalogued model of each architecture."""
    rows = json.loads((ROOT / "estimator" / "napkinmath" / "catalog" / "models.json").read_text())
    smallest: dict[str, dict[str, object]] = {}
    for row in rows:
        kind = str(row["config"].get("model_type"))
        if kind not in smallest or row["parameters"] < smallest[kind]["parameters"]:
            smallest[kind] = row
    return (str(row["name"]) for row in smallest.values())


def alternatives() -> Iterator[str]:
    """Every value of the options that name a row of a catalog."""
    from napkinmath.catalog.optimizers import OPTIMIZERS
    from napkinmath.catalog.stacks import STACKS

    for name in OPTIMIZERS:
        yield f"--optimizer {name}"
    for name in STACKS:
        yield f"--stack {name}"
    for method in ("full", "lora", "qlora", "dora", "qdora", "qalora", "ia3", "prompt", "prefix"):
        yield f"--method {method}"
    for quant in ("nf4", "fp4", "int8", "gptq-int4", "awq-int4", "hqq-int4", "mxfp4", "nvfp4"):
        yield f"--qlora --quant {quant}"
    for precision in (
        "bf16",
        "bf16-amp",
        "bf16-autocast",
        "fp16",
        "fp16-amp",
        "fp32",
        "tf32",
        "fp8",
        "fp8-block",
    ):
        yield f"--precision {precision}"
    for attention in (
        "auto",
        "eager",
        "sdpa",
        "math",
        "efficient",
        "flash",
        "flash1",
        "flash2",
        "cudnn",
    ):
        yield f"--attention {attention}"


def answer(line: str, folder: Path) -> str:
    """What one command line gives: exit code, both outputs and the file it writes."""
    import shlex

    from napkinmath.cli.main import main

    for leftover in folder.iterdir():
        leftover.unlink()
    jobs = folder / "jobs.jsonl"
    jobs.write_text("".join(json.dumps(job) + "\n" for job in JOBS))
    words = [
        str(jobs) if word == "JOBS" else str(folder / word) if word.startswith("OUT.") else word
        for word in shlex.split(line)
    ]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    parts = [PROMPT + line, f"exit {code}", out.getvalue(), "--- stderr", err.getvalue()]
    for file in sorted(folder.iterdir()):
        if file != jobs:
            parts += [f"--- {file.name}", file.read_text(errors="replace")]
    return SPEED.sub("N a second", "\n".join(parts).replace(str(folder), "FOLDER"))


def answers(lines: Iterable[str]) -> Iterator[str]:
    """What each command line gives, in their order."""
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1", "HF_HUB_OFFLINE": "1"}
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = cache
        for line in lines:
            yield answer(line, Path(folder))


def compare(folder: Path) -> int:
    """Prints the answers that differ from the recorded ones; 1 where any does."""
    recorded = {file.name: file.read_text() for file in sorted(folder.glob("*.txt"))}
    lines = [before.partition("\n")[0].removeprefix(PROMPT) for before in recorded.values()]
    different = count = 0
    for (name, before), text in zip(recorded.items(), answers(lines), strict=True):
        count += 1
        if before != text:
            different += 1
            pairs = zip(before.splitlines(), text.splitlines(), strict=False)
            was, now = next(
                (pair for pair in pairs if pair[0] != pair[1]), ("(its length)", "(its length)")
            )
            print(f"{name}: {text.splitlines()[0]}\n  before: {was[:300]}\n  now:    {now[:300]}")
    print(f"{count} answers, {different} differ")
    return int(different > 0 or count == 0)


def record(folder: Path) -> int:
    """Writes one file for each answer."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for number, text in enumerate(answers(cases())):
        (folder / f"{number:03d}.txt").write_text(text)
        count += 1
    print(f"{count} answers in {folder}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT / "estimator"))
    folder = arguments.folder.resolve()
    return record(folder) if arguments.what == "record" else compare(folder)


if __name__ == "__main__":
    sys.exit(main())
