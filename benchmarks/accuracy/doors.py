"""The same configurations asked at every door: flags, a job file, Python, a request to the page, a
link of the page, a line of a batch, a row of a sweep.

Configurations are drawn with a seed; `door_kinds.py` has those of kinds that are not drawn. A door gives the same figures as the flags, or does not take
the question and says why. `python benchmarks/accuracy/doors.py --count 200 --json FILE` records how
many agree; what differs is printed, and ends with exit code 1. Links are written and read by the
page's own script, which needs node; without it they are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import napkinmath
from napkinmath.answers.ranges import headroom_bytes
from napkinmath.base.command_line import command
from napkinmath.base.errors import InputError
from napkinmath.cli.main import main as estimate_main
from napkinmath.estimate import Estimate
from napkinmath.inputs.option_table.flag_words import in_flags
from napkinmath.serving.answers import encoded
from napkinmath.serving.requests import options_of

sys.path.insert(0, str(Path(__file__).parent))

from door_kinds import KINDS

FIELDS = Path(napkinmath.__file__).parent / "serving" / "page" / "fields.js"
FLAGS = "flags"
FIGURES = (
    *("requested_bytes", "allocated_bytes", "reserved_bytes", "device_bytes", "headroom_bytes"),
    *("seconds", "tokens_per_s", "verdict"),
)
SAME_SUM = 1e-12  # relative: a grid adds seconds in another order than one estimate
Answer = dict[str, Any]
Options = dict[str, object]
"""Figures of a door, or {"refused": why}."""

MODELS = ("gpt2", "smollm2-135m", "qwen2.5-0.5b", "llama-3.2-1b", "pythia-160m", "opt-125m")
OTHERS = (  # models, and a length that they take; 0: no length
    *(("bert-base-uncased", 128), ("roberta-base", 256), ("t5-small", 256), ("vit-base", 0)),
    *(("resnet-50", 0), ("whisper-tiny", 0), ("mamba-130m", 512), ("deberta-v3-small", 128)),
)
ARCHES = ("L2 h64 a4 kv2 f128 v256", "L4 h512 a8 kv2 f1408 v32000", "L2 h64 a4 f128 v256 moe8x2")
GPUS = ("rtx3060", "rtx4090", "T4", "V100", "L4", "A100-40", "H100", "MI300X", "B200")
METHODS: tuple[Options, ...] = (
    {},
    {"method": "lora"},
    {"method": "lora", "rank": 64, "targets": "q_proj,v_proj"},
    {"method": "qlora"},
    {"method": "lora", "quant": "int8"},
    {"method": "dora"},
    {"method": "ia3"},
)
EXTRAS: tuple[Options, ...] = (
    {"checkpointing": "full"},
    {"checkpointing": "selective:linear"},
    {"optimizer": "adamw-8bit"},
    {"optimizer": "adafactor"},
    {"optimizer": "sgd"},
    {"optimizer_in_backward": True, "clip": False},
    {"precision": "bf16"},
    {"precision": "fp32"},
    {"precision": "fp16-autocast"},
    {"precision": "fp8"},
    {"loss": "chunked"},
    {"kernels": "liger"},
    {"attention": "eager"},
    {"attention": "flash2"},
    {"grad_accum": 4},
    {"grad_accum": 3, "allocator": "expandable_segments:True"},
    {"workload": "dpo"},
    {"workload": "kto"},
    {"workload": "grpo", "completion": 16},
    {"workload": "reward"},
    {"offload": "optimizer"},
    {"offload": "activations"},
    {"stack": "hf-2024"},
    {"stack": "torchtune"},
    {"lengths": "64,100,7,32"},
    {"packing": True},
    {"display": "windows"},
    {"eval_bs": 4},
    {"compile": True},
    {"dropout": 0.1},
)
MESHES: tuple[Options, ...] = (
    {"gpus": "2xH100"},
    {"gpus": "4xA100-80", "data_parallel": "fsdp2"},
    {"gpus": "4xL4", "zero": 3},
    {"gpus": "8xH100", "data_parallel": "fsdp1", "sharding": "hybrid", "shard_size": 4},
    {"gpus": "2xH100", "tp": 2},
    {"gpus": "2xH100", "pp": 2, "grad_accum": 4},
    {"gpus": "4xH100", "cp": 2},
)


def configuration(rng: random.Random) -> Options:
    """One configuration: most are of one GPU and answered, some are refused."""
    kind = rng.random()
    if kind < 0.25:
        options: Options = {"arch": rng.choice(ARCHES), "ctx": rng.choice((32, 64, 100, 256))}
    elif kind < 0.75:
        options = {"model": rng.choice(MODELS), "ctx": rng.choice((128, 333, 512, 1024))}
    else:
        model, length = rng.choice(OTHERS)
        options = {"model": model, **({"ctx": length} if length else {})}
    options["bs"] = rng.choice((1, 2, 3, 8))
    options |= rng.choice(METHODS)
    for extra in rng.sample(EXTRAS, rng.choice((0, 1, 1, 2))):
        options |= extra
    machine = rng.random()
    if machine < 0.7:
        options["gpu"] = rng.choice(GPUS)
    elif machine < 0.8:
        options["vram"] = rng.choice(("2GiB", "6GiB", "24GiB"))
    elif machine < 0.95:
        options |= rng.choice(MESHES)
    return options


def configurations(count: int, seed: int) -> list[Options]:
    """So many, drawn with a seed."""
    rng = random.Random(seed)
    return [configuration(rng) for _ in range(count)]


# ---------------------------------------------------------------- doors


def _ran(*argv: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = estimate_main(argv)
    return code, out.getvalue(), err.getvalue()


def _refused(said: str) -> Answer:
    """A refusal, in the words that come last: notes may stand before them."""
    last = said.strip().splitlines()[-1] if said.strip() else "nothing was said"
    return {"refused": last.removeprefix("estimate: ")}


def _has_gpu(options: Mapping[str, object]) -> bool:
    return bool(options.keys() & {"gpu", "gpus", "vram"})


def _of_command(options: Mapping[str, object], *words: str) -> Answer:
    """`check`, whose figures are those of the estimate; without a GPU the estimate's own."""
    code, out, err = _ran(*(("check",) if _has_gpu(options) else ()), *words, "--json")
    if code not in (0, 1, 3):
        return _refused(err)
    found = json.loads(out)
    return {name: found[name] for name in FIGURES} if _has_gpu(options) else row_of(found)


def row_of(report: Mapping[str, Any]) -> Answer:
    """The figures that every table has, from `--json`."""
    memory, time, spare = report["memory"], report["time"], report["headroom"]
    return {
        "requested_bytes": memory["requested"],
        **{f"{x}_bytes": memory[x]["value"] for x in ("allocated", "reserved", "device")},
        "headroom_bytes": None if spare is None else spare["value"],
        "seconds": time and time["seconds"],
        "tokens_per_s": time and time["all_gpus"]["tokens_per_s"],
        "verdict": report["verdict"] if spare else None,
    }


def by_flags(options: Options) -> Answer:
    """Words of a command line, as the page writes them."""
    return _of_command(options, *shlex.split(command(dict(options)))[1:])


def by_job_file(options: Options, folder: Path) -> Answer:
    """A YAML file of our own keys."""
    job = folder / "job.yaml"
    job.write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in options.items()))
    return _of_command(options, str(job))


def by_python(options: Options) -> Answer:
    """`napkinmath.estimate` with flags as keywords."""
    try:
        with warnings.catch_warnings():  # notes, which other doors say elsewhere
            warnings.simplefilter("ignore")
            return figures_of(napkinmath.estimate(**options))  # type: ignore[arg-type]
    except InputError as error:
        return _refused(in_flags(str(error)))


def figures_of(e: Estimate) -> Answer:
    """The same figures of an estimate in Python."""
    return {
        "requested_bytes": e.peak.nbytes,
        "allocated_bytes": e.memory.allocated.value,
        "reserved_bytes": e.memory.reserved.value,
        "device_bytes": e.memory.device.value,
        "headroom_bytes": headroom_bytes(e),
        "seconds": e.time and e.time.seconds,
        "tokens_per_s": e.throughput and e.throughput.tokens_per_s,
        "verdict": e.verdict.value if e.hardware is not None else None,
    }


def by_request(options: Mapping[str, object]) -> Answer:
    """The body of a request to /api/estimate."""
    try:
        body = json.dumps(options).encode()
        return row_of(json.loads(encoded("/api/estimate", options_of(body)))["report"])
    except InputError as error:
        return _refused(in_flags(str(error)))


def through_links(asked: list[Options]) -> list[Options] | None:
    """The options as the page's script reads them from the links that it writes; None without
    node."""
    if shutil.which("node") is None:
        return None
    script = FIELDS.read_text(encoding="utf-8")
    start = script.index("function read(text)"), script.index("function written(wanted)")
    ends = script.index("function set(name, value)"), script.index("function remember(")
    parts = "\n".join(script[a:b] for a, b in zip(start, ends, strict=True))
    line = "console.log(JSON.stringify(JSON.parse(require('fs').readFileSync(0)).map(one => fromLink(String(written(one))))))"
    done = subprocess.run(
        ["node", "-e", f"{parts}\n{line}"],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def by_batch(asked: list[Options], folder: Path) -> list[Answer]:
    """One file of lines, each answered in full."""
    jobs, out = folder / "jobs.jsonl", folder / "answers.jsonl"
    jobs.write_text("".join(f"{json.dumps(options)}\n" for options in asked))
    code, _, err = _ran("batch", str(jobs), "--out", str(out), "--exact", "--force")
    if not out.exists():
        raise SystemExit(f"batch ended with {code}: {err}")
    bad = Path(f"{out}.bad.jsonl")
    texts = [out.read_text(), bad.read_text() if bad.exists() else ""]
    lines = [json.loads(line) for line in "".join(texts).splitlines()]
    found = {line["line"]: _refused(line["reason"]) if "reason" in line else line for line in lines}
    return [found[number] for number in range(1, len(asked) + 1)]


def by_sweep(options: Options) -> Answer:
    """A grid of one."""
    code, out, err = _ran("sweep", *shlex.split(command(dict(options)))[1:], "--json")
    if code not in (0, 1, 3):
        return _refused(err)
    return json.loads(out)[0]


# ---------------------------------------------------------------- the comparison


def differences(answer: Answer, expected: Answer) -> dict[str, Any]:
    """Figures that a door has and gives otherwise: {name: (its own, expected)}."""
    return {
        name: (answer[name], wanted)
        for name, wanted in expected.items()
        if name in answer and not _same(answer[name], wanted)
    }


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= SAME_SUM * abs(other)
    return one == other


def compared(asked: list[Options], folder: Path) -> tuple[dict[str, Counter[str]], list[str]]:
    """By door how many agree, are refused alike, or are not taken for a reason of the door's; and a
    line for each that contradicts the flags."""
    links, batch = through_links(asked), by_batch(asked, folder)
    counts: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for number, options in enumerate(asked):
        expected = by_flags(options)
        doors = {
            "job file": by_job_file(options, folder),
            "Python": by_python(options),
            "request": by_request(options),
            "batch": batch[number],
        }
        if "gpus" not in options:
            doors["sweep"] = by_sweep(options)
        if links is not None:
            doors["link"] = by_request(links[number])
        for door, answer in {FLAGS: expected, **doors}.items():
            kind, why = judged(answer, expected)
            counts.setdefault(door, Counter())[kind] += 1
            if kind == "differs":
                wrong.append(f"{door}: {command(dict(options))}\n    {why}")
    return counts, wrong


def judged(answer: Answer, expected: Answer) -> tuple[str, str]:
    """What a door's answer is beside that of the flags, and why."""
    own, wanted = answer.get("refused"), expected.get("refused")
    if own and wanted:
        return "refused alike", own
    if own and any(reason in own for reason in REASONS):
        return "not taken, with a reason", own
    if own or wanted:
        return "differs", f"{own or 'answered'} / flags: {wanted or 'answered'}"
    found = differences(answer, expected)
    return ("differs", str(found)) if found else ("same figures", "")


REASONS = (  # what a door says of a question that it does not take
    "is not one of the page's",
    "is not in the catalogue",
)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="record the counts here")
    options = parser.parse_args(arguments)
    asked = [*configurations(options.count, options.seed), *KINDS]
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = compared(asked, Path(folder))
    print("\n".join(wrong))
    for door, found in counts.items():
        print(f"{door:10}" + "".join(f"  {kind} {number}" for kind, number in found.items()))
    if options.json is not None:
        drawn = {"configurations": options.count, "seed": options.seed}
        made = {**drawn, "kinds": len(KINDS), "doors": counts}
        options.json.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
