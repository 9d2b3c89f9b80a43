"""Files of other programs that hold a launch line: a Makefile, a Dockerfile, a page of text, YAML of
schedulers, containers and workflows. Each is the run of its launch line."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.inputs.job_file import with_job_file

WORDS = "train.py --model_name_or_path llama-3.2-1b --bf16 --per_device_train_batch_size"
LINE = f"torchrun --nproc_per_node 4 {WORDS}"
_WORDS_2 = ", ".join(f'"{word}"' for word in [*WORDS.split(), "2"])
FILES = {
    "Makefile": (
        "MODEL := llama-3.2-1b\nGPUS ?= 4\nBS = 2  # a GPU\n\n.PHONY: train\ntrain: data\n\t@echo x\n"
        "\t@torchrun --nproc_per_node $(GPUS) train.py --model_name_or_path $(MODEL) \\\n"
        "\t\t--per_device_train_batch_size $(BS) --bf16\n\ntest:\n\tpytest -q\n"
    ),
    "gpu.mk": f"BS = 2\nall:\n\tfor i in 2; do {LINE} $$i; done\n",
    "Dockerfile": (
        "FROM x\nENV A=1\nRUN pip install -r a.txt && \\\n    apt-get update\n"
        f'ENTRYPOINT ["torchrun", "--nproc_per_node", "4"]\nCMD [{_WORDS_2}]\n'
    ),
    "Dockerfile.train": f"FROM x\nENV BS 2\nCMD {LINE} \\\n  $BS\n",
    "sky.yaml": (
        "resources:\n  accelerators: H100:2\nnum_nodes: 2\nenvs:\n  BS: 2\nrun: |\n  cd x\n"
        "  torchrun --nnodes $SKYPILOT_NUM_NODES --nproc_per_node $SKYPILOT_NUM_GPUS_PER_NODE \\\n"
        f"    {WORDS} $BS\n"
    ),
    ".dstack.yml": (
        "type: task\nenv:\n  - BS=2\n  - HF_TOKEN\ncommands:\n  - pip install trl\n  - |\n"
        f"    torchrun --nproc-per-node=$DSTACK_GPUS_PER_NODE \\\n      {WORDS} $BS\n"
        "resources:\n  gpu: 80GB:4\n"
    ),
    "workflow.yml": (
        "on: push\njobs:\n  a:\n    env: {BS: 2}\n    steps:\n      - run: pip install .\n"
        f"      - run: {LINE} $BS --run_name ${{{{ github.sha }}}}\n"
    ),
    "job.yaml": (
        "kind: Job\nspec:\n  containers:\n  - command: [torchrun, --nproc_per_node=4]\n"
        f"    args: [{_WORDS_2}]\n"
    ),
    "shell.yaml": (
        "kind: Job\nspec:\n  containers:\n  - command: [/bin/bash, -c]\n    args:\n    - |\n"
        f"      set -e\n      {LINE} 2\n"
    ),
    "compose.yaml": (
        f"services:\n  t:\n    environment:\n      - BS=2\n    command: {LINE} ${{BS}}\n"
    ),
    "README.md": f"# T\n```bash\n$ {LINE} 2\n```\n```python\ntorchrun = 3\n```\n",
}


def test_the_parameters_of_mosaicmls_platform_are_the_file_that_its_command_reads(
    tmp_path: Path,
) -> None:
    text = (
        "name: a\ncompute: {gpus: 4}\ncommand: |\n  cd llm-foundry/scripts\n"
        "  composer train/train.py /mnt/config/parameters.yaml\nparameters:\n  max_seq_len: 512\n"
        "  model: {name: hf_causal_lm, pretrained_model_name_or_path: mosaicml/mpt-7b,\n"
        "    config_overrides: {attn_config: {attn_impl: triton}}}\n"
        "  device_train_microbatch_size: 2\n  fsdp_config: {sharding_strategy: FULL_SHARD}\n"
    )
    path = tmp_path / "mcli.yaml"
    path.write_text(text, encoding="utf-8")
    options = with_job_file({"job": str(path)}, [])
    expected = {"gpus": 4, "bs": 2, "ctx": 512, "data_parallel": ["fsdp1"], "attention": "flash2"}
    assert {key: options.get(key) for key in expected} == expected
    alone = with_job_file({"job": str(path), "gpus": 2}, [])
    assert alone["gpus"] == 2


@pytest.mark.parametrize("name", FILES)
def test_a_launch_line_within_another_program_s_file_is_read(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(FILES[name], encoding="utf-8")
    found = with_job_file({"job": str(path)}, [])
    assert (found["model"], found["gpus"], found["bs"]) == ("llama-3.2-1b", 4, 2)
    told = run(str(path), "--json")
    assert told.code == 0, told.err


@pytest.mark.parametrize(
    ("asked", "gpu"),
    [
        ("accelerators: H100:2", "H100"),
        ("accelerators: {A100-80GB: 2}", "A100-80GB"),
        ("gpu: {name: L40S, count: 2}", "L40S"),
        ("accelerators: A100:2", "A100-40"),
        ("gpu: A100:2", ""),
        ("accelerators: {}", ""),
        ("gpu: 80GB:4", ""),
    ],
)
def test_the_gpu_that_a_scheduler_is_asked_for_is_the_run_s(
    asked: str, gpu: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(f"resources:\n  {asked}\nrun: |\n  {LINE} 2\n", encoding="utf-8")
    assert with_job_file({"job": str(path)}, []).get("gpu", "") == gpu


def test_two_launches_are_asked_about_and_none_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ci.yml"
    path.write_text(f"jobs:\n  a:\n    steps:\n    - run: {LINE} 2\n    - run: {LINE} 4\n")
    with pytest.raises(InputError, match="launches 2 trainings, on lines 4, 5"):
        with_job_file({"job": str(path)}, [])
    path.write_text("jobs:\n  a:\n    steps:\n    - run: pytest\n")
    with pytest.raises(InputError, match="launches no training"):
        with_job_file({"job": str(path)}, [])
