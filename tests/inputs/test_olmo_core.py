"""OLMo-core's launch lines, and open-instruct's scripts that its trainer runs."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import with_job_file

SFT = "python src/scripts/train/sft/"
OWN = " run checkpoint ai2/jupiter --seq_len=32768 --num_nodes=4 --global_batch_size=1048576"


def read(line: str) -> dict[str, object]:
    return with_job_file({"launch": [line]}, [])


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (  # the layout that open-instruct's oc_sft_olmo3_7b_full.sh says this run derives
            f"{SFT}OLMo-sft.py train{OWN} --model_name=olmo3-7b",
            {"model": "olmo-3-7b", "gpus": 32, "cp": 2, "bs": 1, "grad_accum": 2, "shard_size": 4},
        ),
        (  # one node holds the only copy, and a sequence fits on one GPU
            f"{SFT}Olmo-2-7B-SFT.py launch run checkpoint ai2/jupiter --seq_len 4096",
            {"model": "olmo-2-7b", "gpus": 8, "cp": None, "bs": 4, "grad_accum": 8},
        ),
        (  # B200 take twice the tokens
            f"{SFT}Olmo-3-7B-SFT.py train run checkpoint ai2/titan --seq_len 32768",
            {"gpus": 8, "cp": None, "bs": 1, "grad_accum": 4, "sharding": "full"},
        ),
        (
            f"{SFT}Olmo-3-32B-SFT.py train run checkpoint ai2/jupiter --seq_len 32768 --num_nodes 16"
            " --global_batch_size 4194304",
            {"model": "olmo-3-32b", "gpus": 128, "cp": 8, "shard_size": 8, "checkpointing": "full"},
        ),
    ],
)
def test_a_scripts_layout_follows_from_its_words(line: str, options: dict[str, Any]) -> None:
    found = read(line)
    assert {key: found.get(key) for key in options} == options
    assert found["packing"] and found["data_parallel"] == ["fsdp2"]
    assert found["sharded_dtype"] == "fp32" and found["reduce_dtype"] == "fp32"


def test_words_that_replace_the_scripts_own_are_named() -> None:
    line = f"{SFT}Olmo-3-7B-SFT.py train{OWN} --train_module.rank_microbatch_size=32768 --lr=1"
    keys = read(line)["job_keys"]
    assert isinstance(keys, JobKeys)
    uses = {key.name: key.use for key in keys.keys}
    assert uses["train_module.rank_microbatch_size"] is KeyUse.NOT_PRICED
    assert uses["lr"] is KeyUse.UNKNOWN and uses["script"] is KeyUse.NOT_PRICED


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"{SFT}Olmo-3-Hybrid-7B-SFT.py train{OWN}", "no rules for what OLMo-core's"),
        (f"{SFT}OLMo-sft.py train{OWN} --model_name=olmo9-7b", "olmo9-7b"),
        (f"{SFT}Olmo-3-7B-SFT.py train{OWN}0 --num_nodes=3", "no whole number of sequences"),
        (f"{SFT}Olmo-3-7B-SFT.py dry_run{OWN}", "launches no training"),
    ],
)
def test_what_is_not_read_is_refused_by_name(line: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        read(line)


def test_open_instructs_olmo_core_scripts_are_fsdp_over_fp32_parameters() -> None:
    words = (
        "--model_name_or_path /no/model_and_optim --config_name olmo3_7B --max_seq_length 32768"
        " --per_device_train_batch_size 1 --gradient_accumulation_steps 2 --cp_degree 2"
        " --cp_strategy ulysses --with_tracking --mixer_list a 1.0"
    )
    start = "python mason.py --num_nodes 4 --gpus 8 -- torchrun --nnodes=4 --nproc_per_node=8"
    found = read(f"{start} open_instruct/olmo_core_finetune.py {words}")
    wanted: dict[str, object] = {
        "model": "olmo-3-7b",
        "data_parallel": ["fsdp2"],
        "sharding": "hybrid",
        "shard_size": 4,
        "cp": 2,
        "cp_kind": "ulysses",
        "packing": True,
        "precision": "bf16",
        "sharded_dtype": "fp32",
        "optimizer": "adamw-foreach",
        "compile": True,
    }
    assert {key: found.get(key) for key in wanted} == wanted
    other = read(f"torchrun --nproc_per_node=1 open_instruct/dpo.py {words}")
    assert other["workload"] == "dpo" and other["optimizer"] == "adamw-fused"
    assert read(f"python open_instruct/finetune.py {words}")["precision"] == "bf16-autocast"
