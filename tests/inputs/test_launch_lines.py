"""Launch lines: a script's words are those that a shell makes of it, its launcher's processes are
GPUs, and what only a run knows is asked for by name. Nothing of a script is run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.config.job_keys import JobKeys, KeyUse
from napkinmath.inputs.job_file import with_job_file
from napkinmath.inputs.jobs import priced
from napkinmath.inputs.scripts.programs import PROGRAMS
from napkinmath.inputs.scripts.shell import commands

SCRIPTS = [
    'A=(); torchrun a "${A[@]}" b "" "${A[@]}x"',
    "torchrun a.py --b 'c d' \"e f\" g\\ h",
    'A=1; B="x y"\ntorchrun $A "$B" $B ${A}z \'$A\' "\\$A"',
    "torchrun a \\\n  b \\\n  c # d\n",
    "X=(a 'b c' # no\n d)\nX+=(e)\ntorchrun ${X[@]} \"${X[@]}\"",
    "N=$((2 * 4 + 1)); torchrun --n=$N $((N - 1)) $(( N / 2 ))",
    "torchrun ${A:-b} ${C:-'d'} \"${D:-f g}\" ${E-h}",
    'F="--a 1 --b 2"\ntorchrun $F "$F"',
    "cat <<EOF >/dev/null\ntorchrun no\nEOF\ntorchrun yes >/dev/fd/1 2>&1",
    "export A=3\ntorchrun $A && true || torchrun no",
    'if true; then A=1; fi\ntorchrun "a$A"',
    'A=1; A="$A 2"; torchrun $A; ',
    "torchrun --j '{\"a\": [1, 2]}' key=[a,b] x=1",
    "B=1 C=2 torchrun ${B:-3}",
    "true | torchrun a#b '#c' \"\" ''",
    'A=t\nif [ "$A" = t ]; then N=3; elif [ $A = x ]; then N=4; else N=5; fi\ntorchrun $N',
    "A=4\nif [[ $A -gt 8 && -n x ]]; then N=1\nelif [[ $A -ge 4 ]]; then N=2\nfi\ntorchrun $N",
    'if [ a != a ] || [ "b" ]; then N=1; else N=2; fi\ntorchrun $N',
    "if [ ! 3 -lt 2 ]; then\n  A=(x)\n  if false; then A+=(no); else A+=(y); fi\nfi\ntorchrun ${A[@]}",
    '[ -z "" ] && N=9\n[ 1 -eq 1 ] || N=8\ntorchrun $N',
    'for i in 8; do B=$i; done\nS=x; S+=" y"\ntorchrun $B $S',
    "for m in org/Model-1.5; do for b in 2; do torchrun --m $m $b; done; done",
    'for m in "a b"; do torchrun "$m"; done',
    "A=a.b.yaml; torchrun ${A%.yaml} ${A##*.} ${A#*.} ${A%%.*} ${A%.*} ${A/b/x} ${A%no} ${A#.*}",
    "A=Org/Name; torchrun ${A##*/} ${A%%/*} ${A#*/} ${A%/*} ${A,,} ${A^^} ${A##*-}",
    'A="a,b,c"; torchrun ${A//,/ } "${A//,/ }" ${A/,}',
    "A=(4 8); torchrun ${A[1]} ${#A[@]} ${A[0]}x",
    "N=2; N=$[N*2]; M=$(expr 2 \\* 4); torchrun $N $M",
    "A=1; B=2; unset A; torchrun ${A:-5} $B",
    "V=4,5,6\nIFS=',' read -ra G <<< \"$V\"\ntorchrun ${#G[@]} ${#G[*]} ${G[1]} ${G[@]}",
    'read -r -a G <<< "4 5"; torchrun ${#G[@]}',
    "read A <<< 'x y'; torchrun $A",
    'G=(0 1)\nV=$(IFS=,; echo "${G[*]}")\ntorchrun $V',
    "V=4,5\ntorchrun $(echo $V | tr ',' '\\n' | wc -l) $(echo \"$V\" | awk -F',' '{print NF}')",
    "V=4,5\ntorchrun $(echo $V | grep -o , | wc -l) $(echo ${V//,/ } | wc -w)",
    'O="--a"\nif [ 1 = 1 ]; then\n  O="$O --b"\nfi\nif [ 1 = 2 ]; then O="$O --c"; fi\ntorchrun $O',
]
LLAMA = "--model_name_or_path llama-3.2-1b"
# Words after `--`, flags, options that follow.
LINES: list[tuple[str, dict[str, object], dict[str, object]]] = [
    (f"torchrun --nproc_per_node 4 train.py {LLAMA} --bf16", {}, {"gpus": 4}),
    (
        f"torchrun --nproc-per-node=4 --nnodes=2 t.py {LLAMA} --learning_rate 1e-5",
        {},
        {"gpus": 8, "nodes": 2},
    ),
    (f"python -m torch.distributed.run --nproc_per_node 2 t.py {LLAMA}", {}, {"gpus": 2}),
    (f"torchrun --standalone --nproc_per_node 4 t.py {LLAMA}", {"gpus": "2"}, {"gpus": "2"}),
    (f"nohup srun -n 1 torchrun --nproc_per_node 4 t.py {LLAMA} &", {}, {"gpus": 4}),
    (f"torchrun --nproc_per_node auto t.py {LLAMA}", {}, {"model": "llama-3.2-1b"}),
    (
        f"python train.py {LLAMA} --per_device_train_batch_size=2 --max_grad_norm 0 --fp16 False",
        {},
        {"bs": 2, "clip": False},
    ),
    (f"deepspeed --num_gpus 4 t.py {LLAMA} --deepspeed ds.json", {}, {"data_parallel": ["zero3"]}),
    (f"deepspeed --include localhost:0,1,2 t.py {LLAMA} --bf16 true", {}, {"gpus": 3}),
    (
        f"accelerate launch --config_file a.yaml --num_processes 8 t.py {LLAMA}",
        {},
        {"gpus": 8, "data_parallel": ["fsdp2"]},
    ),
    (f"accelerate launch --multi_gpu --num_processes 2 t.py {LLAMA}", {}, {"gpus": 2}),
    (  # its preset checkpoints by FSDP, whatever the model's own switch says
        "NPROC_PER_NODE=4 swift sft --model Qwen/Qwen3-0.6B --train_type lora --fsdp fsdp2"
        " --gradient_checkpointing false",
        {},
        {"data_parallel": ["fsdp2"], "checkpointing": "full", "reentrant": False, "gpus": 4},
    ),
    (
        "accelerate launch --use_deepspeed --zero_stage 3 --offload_optimizer_device cpu"
        f" --num_processes 4 t.py {LLAMA}",
        {},
        {"data_parallel": ["zero3"], "offload": "optimizer"},
    ),
    (
        f"trl dpo {LLAMA} --use_peft --lora_r 4",
        {},
        {"workload": "dpo", "rank": 4, "method": "lora"},
    ),
    (f"python trl/scripts/sft.py {LLAMA}", {}, {"ctx": 1024, "checkpointing": "full"}),
    (f"python examples/run_clm.py {LLAMA} --block_size 256", {}, {"ctx": 256}),
    (f"trl sft {LLAMA} --lora_r 4", {}, {"method": None, "rank": None}),
    ("trl sft --config train.yaml --use_peft --lora_r 32", {}, {"rank": 32, "bs": 2}),
    ("python run.py train.yaml --per_device_train_batch_size 16", {}, {"rank": 8, "bs": 16}),
    (
        "CUDA_VISIBLE_DEVICES=0,1 llamafactory-cli train factory.yaml lora_rank=4",
        {},
        {"gpus": 2, "rank": 4},
    ),
    (
        f"llamafactory-cli train --stage sft {LLAMA} --finetuning_type lora --cutoff_len 64",
        {},
        {"ctx": 64, "method": "lora"},
    ),
    ("axolotl train ax.yaml --micro-batch-size 3 --sequence_len=64", {}, {"bs": 3, "ctx": 64}),
    (
        "accelerate launch --num_processes 2 -m axolotl.cli.train ax.yaml",
        {},
        {"gpus": 2, "bs": 1},
    ),
    (
        "tune run --nproc_per_node 2 lora_finetune_distributed --config tune.yaml batch_size=3"
        " model.lora_rank=4",
        {},
        {"gpus": 2, "bs": 3, "rank": 4},
    ),
]
_SWIFT_2 = {"rank": 8, "alpha": 32, "bs": 1, "precision": "bf16-autocast", "stack": "hf-2024"}
_QKV = ["q_proj", "k_proj", "v_proj", "c_attn", "W_pack", "query_key_value", "wqkv", "qkv_proj"]
LINES += [
    (
        "NPROC_PER_NODE=4 swift sft --model llama-3.2-1b --max_length 512",
        {},
        {"gpus": 4, "ctx": 512},
    ),
    (  # ms-swift v1.1.0 examples/pytorch/llm/scripts/*/lora/sft.sh
        "python llm_sft.py --model_type qwen-7b-chat --sft_type lora --dtype AUTO",
        {},
        {**_SWIFT_2, "model": "qwen-7b-chat", "targets": _QKV, "ctx": 2048, "grad_accum": 16},
    ),
    (
        "torchrun --nproc_per_node=2 ../swift/cli/sft.py --model_type qwen1half-1_8b-chat-int4"
        " --lora_target_modules ALL --batch_size 2 --deepspeed zero2-offload",
        {},
        {"model": "qwen1.5-1.8b-chat-gptq-int4", "targets": "all-linear", "grad_accum": 4}
        | {"gpus": 2, "data_parallel": ["zero2"], "offload": "optimizer"},
    ),
    (
        "swift orpo --model_type phi3-4b-4k-instruct --max_length 512 --lora_dtype bf16",
        {},
        {"model": "phi-3-mini-4k-instruct", "workload": "orpo", "adapter_dtype": "bf16"},
    ),
    (
        "swift pt --model_type llama3-8b --model_id_or_path ./my/base",
        {},
        {"model": "llama3-8b", "method": "full"},
    ),
    ("swift rlhf --model llama-3.2-1b --max_length 512", {}, {"workload": "dpo"}),
    (
        "python finetune_lora.py --model_name llama-3.2-1b --rank 4 --alpha 8 --lr 1e-4"
        " --max_len 512",
        {},
        {"method": "lora", "rank": 4, "alpha": 8, "ctx": 512},
    ),
    (
        "python train.py --model_name llama-3.2-1b --rank 4 --lr 1e-4 --max_len 512",
        {},
        {"method": None, "rank": None},
    ),
    (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=llama-3.2-1b"
        " algorithm.adv_estimator=grpo data.max_prompt_length=128 data.max_response_length=128"
        " data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64"
        " actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 trainer.n_gpus_per_node=4"
        " trainer.nnodes=1",
        {},
        {"model": "llama-3.2-1b", "workload": "grpo"},
    ),
    (
        "torchrun --standalone --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer"
        " data.train_batch_size=64 data.micro_batch_size_per_gpu=4 +data.x=1"
        " model.partial_pretrain=llama-3.2-1b model.lora_rank=32 ulysses_sequence_parallel_size=2"
        " use_remove_padding=true",
        {},
        {
            **{"model": "llama-3.2-1b", "gpus": 8, "bs": 4, "grad_accum": 4, "ctx": 1024},
            **{"rank": 32, "cp": 2, "cp_kind": "ulysses", "data_parallel": ["fsdp2"]},
            **{"sharded_dtype": "fp32", "precision": "bf16", "checkpointing": "full"},
        },
    ),
    (
        "litgpt finetune_lora meta-llama/Llama-3.2-1B --train.micro_batch_size 2 --devices 4"
        " --train.global_batch_size 32",
        {},
        {"model": "meta-llama/Llama-3.2-1B", "gpus": 4, "bs": 2, "grad_accum": 4, "rank": 8},
    ),
    (
        "autotrain llm --train --model llama-3.2-1b --project-name x --data-path . --lr 2e-4"
        " --batch-size 4 --block-size 512 --trainer sft --peft --quantization int8 --unsloth",
        {},
        {"model": "llama-3.2-1b", "ctx": 512, "bs": 4, "quant": "int8", "kernels": "unsloth"},
    ),
    (
        "unsloth train --model llama-3.2-1b --dataset alpaca --max-seq-length 512 --lora-r 8"
        " --no-load-in-4bit --gradient-checkpointing true",
        {},
        {"model": "llama-3.2-1b", "ctx": 512, "rank": 8, "bs": 2, "checkpointing": "full"},
    ),
    (
        "NPROC_PER_NODE=4 megatron sft --model llama-3.2-1b --tensor_model_parallel_size 2"
        " --micro_batch_size 2 --global_batch_size 16",
        {},
        {"gpus": 4, "tp": 2, "bs": 2, "grad_accum": 4},
    ),
    (
        "composer -n 8 train.py foundry.yaml model.n_layers=1 max_seq_len=64",
        {},
        {"gpus": 8, "ctx": 64, "grad_accum": 2, "bs": 4},
    ),
    (
        "uv run python examples/run_sft.py --config rl.yaml policy.train_micro_batch_size=2"
        " cluster.gpus_per_node=4",
        {},
        {"model": "llama-3.2-1b", "gpus": 4, "bs": 2, "ctx": 512},
    ),
    (
        "python mason.py --num_nodes 2 --gpus 8 -- accelerate launch --mixed_precision bf16"
        " --num_processes 8 --use_deepspeed --deepspeed_config_file no/stage3_no_offloading.conf"
        " open_instruct/finetune.py --model_name_or_path llama-3.2-1b --max_seq_length 512"
        " --with_tracking --per_device_train_batch_size 1",
        {},
        {"gpus": 16, "nodes": 2, "data_parallel": ["zero3"], "offload": None, "ctx": 512},
    ),
    (
        "torchrun --nproc_per_node 8 run_train.py --config-file nano.yaml",
        {},
        {"bs": 2},
    ),
]
FILES = {
    "foundry.yaml": (
        "max_seq_len: 128\nmodel: {name: mpt_causal_lm, d_model: 64, n_heads: 4, n_layers: 2}\n"
        "train_loader: {name: text}\nglobal_train_batch_size: 64\n"
        "device_train_microbatch_size: 4\nfsdp_config: {sharding_strategy: FULL_SHARD}\n"
    ),
    "rl.yaml": (
        "sft: {seed: 1}\npolicy: {model_name: llama-3.2-1b, train_micro_batch_size: 1,"
        " max_total_sequence_length: 512, dtensor_cfg: {enabled: true}}\n"
        "cluster: {gpus_per_node: 1, num_nodes: 1}\n"
    ),
    "nano.yaml": (
        "model:\n  model_config:\n    is_llama_config: true\n    hidden_size: 64\n"
        "    intermediate_size: 128\n    num_hidden_layers: 2\n    num_attention_heads: 4\n"
        "    num_key_value_heads: 4\n    vocab_size: 256\n    max_position_embeddings: 128\n"
        "parallelism:\n  dp: 8\n  tp: 1\n  pp: 1\n"
        "tokens:\n  micro_batch_size: 2\n  sequence_length: 128\n"
    ),
    "a.yaml": "distributed_type: FSDP\nnum_processes: 4\nfsdp_config:\n  fsdp_version: 2\n",
    "ds.json": '{"zero_optimization": {"stage": 3}}',
    "train.yaml": "model_name_or_path: llama-3.2-1b\nper_device_train_batch_size: 2\nlora_r: 8\n",
    "factory.yaml": (
        "stage: sft\nmodel_name_or_path: llama-3.2-1b\nfinetuning_type: lora\nlora_rank: 16\n"
    ),
    "ax.yaml": "base_model: llama-3.2-1b\nmicro_batch_size: 1\nsequence_len: 128\n",
    "tune.yaml": (Path(__file__).parents[1] / "cli/jobs/torchtune_lora.yaml").read_text(),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.skipif(shutil.which("bash") is None, reason="bash says what the words are")
@pytest.mark.parametrize("script", SCRIPTS)
def test_words_are_those_of_a_shell(script: str) -> None:
    stand_in = "torchrun() { printf '%s\\0' torchrun \"$@\"; }\n"
    said = subprocess.run(["bash", "-c", stand_in + script], capture_output=True, check=False)
    words = [word.decode() for word in said.stdout.split(b"\0")[:-1]]
    found = next(c.words for c in commands(script) if c.words[0].text == "torchrun")
    assert [word.text for word in found] == words
    assert not any(word.source for word in found)


@pytest.mark.parametrize(
    ("script", "source"),
    [
        ("torchrun $1", "$1"),
        ("A=$(nproc)\ntorchrun a $A", "$(nproc)"),
        ("torchrun `hostname`", "`hostname`"),
        ("for i in 1 2; do torchrun $i; done", "a loop"),
        ("if [ $1 ]; then A=1; else A=2; fi\ntorchrun $A", "two ways"),
        ("torchrun ${A:-$B}", "$B"),
        ("torchrun x/$HOME", "$HOME"),
        ("torchrun $(expr $A + 1)", "expr"),
        ("torchrun ${A%.*}", "${A%.*}"),
        ("torchrun $((RANDOM + 1))", "RANDOM"),
        ("for i in 1 2; do torchrun $i; done", "a loop over '1, 2'"),
        ("A=(x)\nif [ $1 ]; then A=(y); fi\ntorchrun ${A[@]}", "two ways"),
        ('A="--x 1"\nif [ $1 ]; then A="$A --y"; fi\ntorchrun $A', "to which a branch"),
        ("if [ $1 ]; then A='--x 1 --y'; else A='--x 2 --y'; fi\ntorchrun $A", "two ways"),
        ("if [ $1 ]; then A='--x 1 --y'; else A='--y'; fi\ntorchrun $A", "to which a branch"),
        ("A=(--x)\nif [ $1 ]; then A+=(--y 2); fi\ntorchrun ${A[@]}", "to which a branch"),
        ("if [ $1 ]; then\n A='--x 1'\nfi\ntorchrun $A", "to which a branch"),
        ("A=--x=1\nif [ $1 ]; then if [ $2 ]; then A=--x=2; fi; fi\ntorchrun $A", "two ways"),
        ("if [ x < y ]; then N=1; else N=2; fi\ntorchrun $N", "two ways"),
        ('IFS=, read -ra G <<< "$VISIBLE"\ntorchrun ${#G[@]}', "$VISIBLE"),
        ("torchrun $(echo $VISIBLE | tr ',' '\\n' | wc -l)", "$(echo $VISIBLE"),
        ("G=(0 $(x))\ntorchrun ${#G[@]}", "$(x)"),
    ],
)
def test_what_is_worked_out_is_told(script: str, source: str) -> None:
    found = next(c.words for c in commands(script) if c.words[0].text == "torchrun")
    assert any(source in word.source for word in found)


_GPT = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 "
ENGINE = (
    "MBS=2\nZERO=1\nMOE=false\nCONFIG=./ds.json\n"
    "cat <<EOT > $CONFIG\n"
    '{"train_micro_batch_size_per_gpu": $MBS, "train_batch_size": $UNKNOWN,\n'
    ' "zero_optimization": {"stage": $ZERO, "reduce_bucket_size": 1000}, "bf16": {"enabled": true}}\n'
    f'EOT\nOPT="{_GPT} --micro-batch-size $MBS \\\n  --global-batch-size $((MBS * 8)) --bf16 "\n'
    'if [ "$MOE" = true ]; then OPT="$OPT --num-experts 8"; fi\n'
    'OPT="$OPT --deepspeed --deepspeed_config $CONFIG --zero-stage $ZERO"\n'
    "deepspeed --num_gpus 4 pretrain_gpt.py $OPT --data-path <PATH TO DATA> $EXTRA_ARGS\n"
)


def test_a_script_of_megatron_deepspeed_writes_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(ENGINE, encoding="utf-8")
    found = with_job_file({"job": str(tmp_path / "run.sh")}, [])
    assert (found["stack"], found["data_parallel"]) == ("megatron-deepspeed", ["zero1"])
    assert (found["bs"], found["grad_accum"], found["gpus"]) == (2, 2, 4)
    assert found["zero_options"].reduce_bucket_size == 1000
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert [key.name for key in keys.of(KeyUse.UNKNOWN)] == ["$EXTRA_ARGS"]


@pytest.mark.parametrize(
    ("words", "reduced", "optimizer"),
    [
        ("--use-precision-aware-optimizer", None, "adamw-te:master=remainders"),
        ("--main-grads-dtype fp32 --exp-avg-dtype fp32", None, "adamw-fused"),
        ("--optimizer sgd --use-precision-aware-optimizer", None, "sgd"),
        (
            "--use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype bf16",
            "bf16",
            "adamw-te:exp_avg=bf16,master=remainders",
        ),
        (
            "--use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-sq-dtype fp8",
            None,
            "adamw-te:exp_avg_sq=fp8,master=fp16",
        ),
        # The masters of blockwise FP8 are Megatron's.
        (
            "--fp8-recipe blockwise --use-precision-aware-optimizer --exp-avg-dtype bf16",
            None,
            "adamw-te:exp_avg=bf16",
        ),
    ],
)
def test_what_the_precision_aware_optimizer_keeps(
    words: str, reduced: str | None, optimizer: str, folder: Path
) -> None:
    line = f"torchrun p.py {_GPT} --micro-batch-size 1 --bf16 {words}"
    found = with_job_file({"launch": [line]}, [])
    assert found.get("reduce_dtype") == reduced
    assert found["optimizer"] == optimizer


def test_gpus_that_a_key_leaves_open_are_no_list(folder: Path) -> None:
    line = f"torchrun p.py {_GPT} --micro-batch-size 1 --bf16 --cpu-offloading"
    large = line.replace("--num-layers 2 --hidden-size 64", "--num-layers 200 --hidden-size 8192")
    for launch, code, listed in ((line, 0, True), (large, 3, False)):
        done = run("--gpu", "a100", "--", *launch.split())
        assert done[0] == code
        assert ("also fits" in done[1]) is listed
        assert "none of the" not in done[1]
        assert "perhaps" not in done[1]


def test_gpus_beside_a_script_of_megatron_divide_its_batch(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(ENGINE, encoding="utf-8")
    found = with_job_file({"job": str(tmp_path / "run.sh"), "gpus": "8"}, [])
    assert (found["gpus"], found["grad_accum"]) == ("8", 1)


@pytest.mark.parametrize(
    ("script", "asked"),
    [
        (f"torchrun p.py {_GPT} --micro-batch-size $1", "micro_batch_size comes from $1"),
        (f"torchrun p.py {_GPT} --tensor-model-parallel-size $7", "add --tp"),
        (
            f"torchrun p.py {_GPT} --micro-batch-size $OPTIMAL_BATCH",
            "micro_batch_size comes from $OPTIMAL_BATCH",
        ),
        (
            "if [ $1 ]; then L=2; else L=4; fi\n"
            "torchrun p.py --num-layers $L --hidden-size 64 --num-attention-heads 4"
            " --micro-batch-size $2",
            "add --model NAME.PATH and --bs B",
        ),
    ],
)
def test_what_a_script_of_megatron_is_told_is_asked_for(
    script: str, asked: str, tmp_path: Path
) -> None:
    (tmp_path / "run.sh").write_text(script, encoding="utf-8")
    with pytest.raises(InputError, match=asked.replace("$", "[$]")):
        with_job_file({"job": str(tmp_path / "run.sh")}, [])


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("torchrun $HOME/models/llama-3.2-1b", "$HOME/models/llama-3.2-1b"),
        ("A=$(pwd)/x\nB=$A/y\ntorchrun ${B}/z", "$(pwd)/x/y/z"),
        ("M=a\nwhile [ $1 ]; do case $1 in --m) M=$2;; esac; done\ntorchrun $M", "a"),
        ("N=4\ntorchrun $(expr 16 / $N)", "4"),
        ("if [ $1 ]; then A='--y 2 --x 1'; else A='--y 2'; fi\ntorchrun $A", "--y"),
        ("if [ $1 ]; then A='--y 2'; else A=' --y  2'; fi\ntorchrun $A", "--y"),
        ("A=1\nif [ $1 ]; then A=2; exit; fi\ntorchrun $A", "1"),
        ("if [ $1 ]; then A=3; else echo no; exit 1; fi\ntorchrun $A", "3"),
        ("A=1\nif [ $1 ]; then A=2; else torchrun $A; fi", "1"),
        ("A=(--x)\nif [ $1 ]; then A+=(--y 2); fi\ntorchrun ${A[@]}", "--x"),
    ],
)
def test_what_is_known_in_spite_of_a_run_is_kept(script: str, word: str) -> None:
    """The end of a path, and what a script takes where it is given no argument."""
    found = next(c.words for c in commands(script) if c.words[0].text == "torchrun")
    assert found[1].text == word and not found[1].source


def test_a_model_below_a_folder_of_the_run_is_the_last_part_of_its_path(folder: Path) -> None:
    (folder / "run.sh").write_text(
        "torchrun t.py --model_name_or_path $HOME/m/llama-3.2-1b --bf16\n"
    )
    (folder / "run.py").write_text(
        "m = AutoModelForCausalLM.from_pretrained(f'{root}/m/llama-3.2-1b')\n"
        "Trainer(m, TrainingArguments('x'))\n"
    )
    for name in ("run.sh", "run.py"):
        assert "llama-3.2-1b" in run(name).out


# Scripts with what a scheduler sets and starts, flags, and options that follow.
JOBS: list[tuple[str, dict[str, object], dict[str, object]]] = [
    (
        "#SBATCH --nodes=2\n#SBATCH --gpus-per-node=8\nG=$(nvidia-smi -L | wc -l)\n"
        f'CMD="t.py {LLAMA} --max_length 96 --output_dir $2"\nL="accelerate launch'
        " --num_processes $((SLURM_NNODES * G)) --num_machines $SLURM_NNODES"
        ' --main_process_ip $HOST "\n'
        'srun --jobid $ID bash -c "$L --role \\$SLURMD_NODENAME: $CMD"',
        {},
        {"gpus": 16, "ctx": 96},
    ),
    (
        "#SBATCH -N 2\n#SBATCH --ntasks-per-node 4\n#SBATCH --gres=gpu:a100:4\n"
        f"srun singularity exec img.sif python t.py {LLAMA}",
        {},
        {"gpus": 8, "nodes": 2},
    ),
    (f"CMD='torchrun --nproc_per_node 3 t.py {LLAMA}'\neval $CMD", {}, {"gpus": 3}),
    (
        "python3 -m verl.trainer.main_ppo --config-path=./config --config-name=ppo_megatron_trainer"
        " actor_rollout_ref.model.path=llama-3.2-1b trainer.n_gpus_per_node=4",
        {},
        {"stack": "megatron", "precision": "bf16", "data_parallel": ["zero1"]},
    ),
    (
        "python3 -m verl.trainer.main_ppo --config-path=conf --config-name=mine"
        " actor_rollout_ref.model.path=llama-3.2-1b",
        {},
        {"workload": "rloo", "gpus": 2},
    ),
    (
        "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --hidden-size 64 --bf16"
        " --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128"
        " --micro-batch-size 1 --global-batch-size 8 --no-gradient-accumulation-fusion",
        {},
        {"stack": "megatron-unfused", "gpus": 8},
    ),
    # names that people's own scripts have
    (
        'Z=$2\nif [ "$Z" == "" ]; then\n  Z=3\nfi\necho deepspeed main.py\n'
        f"deepspeed --num_gpus 4 main.py --data_split 2,4,4 {LLAMA} --max_seq_len 512 --lora_dim 64"
        " --zero_stage $Z --deepspeed --num_train_epochs 4",
        {},
        {
            **{"gpus": 4, "ctx": 512, "rank": 64, "method": "lora", "precision": "fp16-autocast"},
            **{"data_parallel": ["zero3"], "checkpointing": "none"},
        },
    ),
    (
        f"python finetune.py {LLAMA} --use_lora --q_lora --lr 1e-5 --batch_size 3",
        {},
        {"method": "lora", "quant": "nf4", "bs": 3},
    ),
    (f"python qlora.py {LLAMA} --bits 8 --lora_r 64 --max_steps 3", {}, {"quant": "int8"}),
    (
        f"python llm_sft.py {LLAMA} --quantization_bit 4 --target_modules q_proj v_proj --lr 1e-4",
        {},
        {"quant": "nf4", "targets": ["q_proj", "v_proj"]},
    ),
    (
        "python train_agent.py algorithm.adv_estimator=grpo trainer.n_gpus_per_node=2"
        " actor_rollout_ref.model.path=llama-3.2-1b",
        {},
        {"workload": "grpo", "gpus": 2},
    ),
    (
        "python pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4"
        " --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1"
        " --checkpoint-activations --fp16",
        {},
        {"checkpointing": "full", "stack": "megatron"},
    ),
    (f"uv run t.py {LLAMA} --tools python search --bf16", {}, {"precision": "bf16-checkpoint"}),
    (f"torchrun t.py {LLAMA} --deepspeed ds.json", {"gpus": 2}, {"data_parallel": ["zero3"]}),
]


@pytest.mark.parametrize(("script", "flags", "expected"), JOBS)
def test_a_schedulers_script_becomes_the_run(
    script: str, flags: dict[str, object], expected: dict[str, object], folder: Path
) -> None:
    """Run from elsewhere: what it names lies in the root of its repository."""
    (folder / "scripts" / "slurm").mkdir(parents=True)
    (folder / "conf").mkdir()
    (folder / "conf" / "mine.yaml").write_text(
        "algorithm: {adv_estimator: rloo}\ntrainer: {n_gpus_per_node: 2}\n", encoding="utf-8"
    )
    path = folder / "scripts" / "slurm" / "run.sh"
    path.write_text(script, encoding="utf-8")
    os.chdir("/")
    found = with_job_file({**flags, "job": str(path)}, [])
    assert {key: found.get(key) for key in expected} == expected


@pytest.mark.parametrize("program", ["pretrain_bert.py", "tasks/main.py"])
def test_programs_of_megatron_that_train_no_gpt(program: str, folder: Path) -> None:
    path = folder / "bert.sh"
    path.write_text(
        f"python {program} --num-layers 2 --hidden-size 64 --num-attention-heads 4"
        " --seq-length 128 --max-position-embeddings 128 --micro-batch-size 1 --fp16",
        encoding="utf-8",
    )
    with pytest.raises(InputError, match="trains another model than GPT; add --model"):
        with_job_file({"job": str(path)}, [])


@pytest.mark.parametrize(("line", "flags", "expected"), LINES)
def test_a_launch_line_becomes_its_run(
    folder: Path, line: str, flags: dict[str, object], expected: dict[str, object]
) -> None:
    """The same pasted as one word, as words, and in a script."""
    script = folder / "run.sh"
    script.write_text(f"#!/bin/bash\nset -e\necho python\n{line}\n", encoding="utf-8")
    for given in (
        {"launch": [line]},
        {"launch": line.replace(" &", "").split()},
        {"job": "run.sh"},
    ):
        options = with_job_file({**flags, **given}, [])
        assert {key: options.get(key) for key in expected} == expected
    assert priced(options, [])[0].memory.device.value > 0


def test_every_origin_has_its_line(folder: Path) -> None:
    (folder / "run.sh").write_text(f"\n\ntorchrun --nproc_per_node 2 t.py {LLAMA} \\\n  --bf16\n")
    keys = with_job_file({"job": "run.sh", "explain": True}, [])["job_keys"]
    assert isinstance(keys, JobKeys)
    lines = {origin.option: origin.line for origin in keys.origins}
    assert (lines["gpus"], lines["model"], lines["precision"]) == (3, 3, 4)


@pytest.mark.parametrize(
    ("words", "flags", "asked"),
    [
        ("--per_device_train_batch_size $BS", {}, "--bs B"),
        ("--per_device_train_batch_size $BS", {"bs": "2"}, ""),
        ("--output_dir $OUT --run_name $(date) --seed $RANDOM", {}, ""),
        ("--max_length $LEN", {}, "--ctx"),
        ("--lora_r $R --use_peft", {}, "--rank"),
        ("--lora_r $R --use_peft", {"rank": "4"}, ""),
        ("--optim $O", {}, "--optimizer"),
    ],
)
def test_what_only_a_run_knows_is_asked_for(
    folder: Path, words: str, flags: dict[str, object], asked: str
) -> None:
    (folder / "run.sh").write_text(f"torchrun t.py {LLAMA} {words}\n")
    if not asked:
        assert priced(with_job_file({**flags, "job": "run.sh"}, []), [])
        return
    with pytest.raises(InputError) as error:
        with_job_file({**flags, "job": "run.sh"}, [])
    assert asked in str(error.value) and "$" in str(error.value) and "line 1" in str(error.value)


def test_a_count_that_accelerate_is_told_by_a_run_is_asked_for(folder: Path) -> None:
    """It was one GPU without a word where no other flag stood beside it."""
    (folder / "run.sh").write_text(f"accelerate launch --num_processes $(count) t.py {LLAMA}\n")
    with pytest.raises(InputError, match=r"num_processes comes from \$\(count\).*add --gpus"):
        with_job_file({"job": "run.sh"}, [])
    assert with_job_file({"job": "run.sh", "gpus": "4"}, [])["gpus"] == "4"


def test_a_model_and_a_count_that_are_computed_are_asked_for_at_once(folder: Path) -> None:
    (folder / "run.sh").write_text("torchrun --nproc_per_node $N t.py --model_name_or_path $M\n")
    done = run("run.sh")
    assert done.code == 2 and "--gpus" in done.err and "--model" in done.err
    assert run("run.sh", "--gpus", "2", "--model", "llama-3.2-1b").code == 0


REFUSED = [
    *(f"{name} {'x' if not p.verbs else p.verbs[0]} --a 1" for name, p in PROGRAMS.items()),
    "ls -l",
    "torchrun",
    "torchrun t.py",
    "python -c 'print(1)'",
    "python prepare.py --input x",
    "accelerate config",
    "accelerate launch --config_file ds.json t.py",
    "accelerate launch --config_file gone.yaml t.py",
    "llamafactory-cli chat factory.yaml",
    "axolotl inference ax.yaml",
    "tune run full_finetune --config llama3/8B_full",
    "tune run",
    "python3 -m verl.trainer.main_ppo nobody.has.this=1",
    "python3 -m verl.trainer.main_ppo model_engine=mindspeed actor_rollout_ref.model.path=gpt2",
    "python3 -m verl.trainer.main_ppo actor_rollout_ref.actor.strategy=veomni"
    " actor_rollout_ref.model.path=gpt2",
    "python3 -m openrlhf.cli.train_nothing --nobody_has 1",
    "deepspeed --include a:0@b:0,1 t.py --bf16",
]


@pytest.mark.parametrize("line", REFUSED)
def test_what_is_not_read_is_refused_in_one_line(folder: Path, line: str) -> None:
    done = run("--", *line.split())
    assert done.code == 2 and len(done.err.splitlines()) == 1, done.err
    assert "Traceback" not in done.err and "defect" not in done.err


def test_a_script_that_only_edits_the_config_is_no_second_training(folder: Path) -> None:
    (folder / "c.yaml").write_text("base_model: llama-3.2-1b\nsequence_len: 64\n")
    (folder / "edit.py").write_text("import sys, yaml\nyaml.safe_load(open(sys.argv[1]))\n")
    line = "python3 edit.py c.yaml\ntorchrun --nproc_per_node=2 -m axolotl.cli.train c.yaml\n"
    (folder / "run.sh").write_text(line)
    found = with_job_file({"job": str(folder / "run.sh")}, [])
    assert (found["gpus"], found["ctx"]) == (2, 64)


def test_a_checkpoint_of_megatron_names_its_model(folder: Path) -> None:
    line = "NPROC_PER_NODE=2 megatron sft --load ./converted/Qwen3-8B-mcore --micro_batch_size 1"
    found = with_job_file({"launch": line.split()}, [])
    assert found["model"] == "Qwen3-8B"
    given = with_job_file({"launch": [*line.split(), "--model", "Qwen/Qwen3-4B"]}, [])
    assert given["model"] == "Qwen/Qwen3-4B"


def test_two_trainings_in_one_script_are_asked_about(folder: Path) -> None:
    line = f"torchrun t.py {LLAMA} --max_length"
    (folder / "run.sh").write_text(f"{line} 64\n{line} 128\n")
    done = run("run.sh")
    assert done.code == 2 and "lines 1, 2" in done.err
    (folder / "run.sh").write_text(f"{line} 64\n{line} 64\n")
    assert run("run.sh").code == 0


HOSTILE = {
    "doubling": "A=ab\n" + "A=$A$A\n" * 40 + "torchrun t.py --x $A\n",
    "doubling an array": "A=(a b)\n" + 'A=("${A[@]}" "${A[@]}")\n' * 40 + 'torchrun "${A[@]}"\n',
    "nested defaults": "torchrun " + "${A:-" * 5000 + "}" * 5000,
    "nested commands": "torchrun " + "$(" * 20000,
    "nested sums": "torchrun $((" + "(" * 3000 + "1" + ")" * 3000 + "))",
    "open quote": 'torchrun "' + "x" * 1000,
    "large": "torchrun " + "x " * 600_000,
    "itself": "A=$A\nB=${B:-$B}\ntorchrun $A $B",
    "empty": "\n \n",
    "brackets": "(" * 5000 + ")" * 9000,
    "dots": "python -m verl.x " + "a." * 4000 + "b=1",
    "here": "cat <<EOF\n" * 500,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_script_ends_in_one_line(tmp_path: Path, name: str) -> None:
    script = tmp_path / "run.sh"
    script.write_text(HOSTILE[name], encoding="utf-8")
    done = run(str(script))
    assert done.code == 2 and len(done.err.strip().splitlines()) == 1, done.err[-500:]
    assert "defect" not in done.err and len(done.err) < 1000


def test_a_launch_line_in_quotes_is_that_line(folder: Path) -> None:
    line = "torchrun --nproc_per_node 2 sft.py --model_name_or_path Qwen/Qwen2.5-0.5B --bf16 True"
    quoted, pasted = run(line, "--json"), run("--json", "--", *line.split())
    assert quoted.code == pasted.code == 0 and quoted.out == pasted.out
    assert "close it" in run("python sft.py 'x").err


@pytest.mark.parametrize(
    ("program", "words", "workload"),
    [
        ("train_sft", "--train.batch_size 8 --model.model_name_or_path {}", None),
        ("train_rm", "--model.model_name_or_path {} --data.chosen_key chosen", "reward"),
        ("train_dpo", "--model.model_name_or_path {} --data.chosen_key chosen", "dpo"),
        # The names of 2024 and 2025, without dots.
        ("train_rm", "--pretrain {} --micro_train_batch_size 1 --chosen_key chosen", "reward"),
        ("train_dpo", "--pretrain {} --micro_train_batch_size 1 --beta 0.1", "dpo"),
    ],
)
def test_openrlhf_reads_its_words_into_a_variable(
    program: str, words: str, workload: str | None, tmp_path: Path
) -> None:
    """Its own examples keep the words in a here-document; the program says the workload."""
    path = tmp_path / "train.sh"
    path.write_text(
        f"MODEL=Qwen/Qwen2.5-0.5B\nread -r -d '' training_commands <<EOF\nopenrlhf.cli.{program} \\\n"
        f"   {words.format('$MODEL')} \\\n   --ds.packing_samples\nEOF\n"
        "if [[ ${1} != slurm ]]; then\n    deepspeed --module $training_commands\nfi\n",
        encoding="utf-8",
    )
    found = with_job_file({"job": str(path)}, [])
    assert (found["model"], found.get("workload")) == ("Qwen/Qwen2.5-0.5B", workload)
    assert found["packing"] is True


def test_openrlhf_s_words_without_dots_are_those_with_dots() -> None:
    line = (
        "python3 -m openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen2.5-0.5B --bf16 --flash_attn"
        " --actor_num_nodes 1 --actor_num_gpus_per_node 4 --micro_train_batch_size 2"
        " --train_batch_size 64 --prompt_max_len 512 --generate_max_len 1536 --zero_stage 3"
        " --advantage_estimator group_norm --gradient_checkpointing --lora_rank 8 --save_path x"
    )
    found = with_job_file({"launch": [line]}, [])
    wanted = {"ctx": 2048, "completion": 1536, "bs": 2, "grad_accum": 8, "gpus": 4, "rank": 8}
    assert {key: found[key] for key in wanted} == wanted
    assert (found["workload"], found["checkpointing"], found["precision"]) == (
        "grpo",
        "full",
        "bf16-autocast",
    )
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys)
    assert not keys.of(KeyUse.UNKNOWN)


@pytest.mark.parametrize(
    ("words", "flags", "optimizer"),
    [
        ("--optimizer muon", {}, "muon"),
        ("--optimizer $OPT", {"optimizer": "lion"}, "lion"),
        ("--optimizer soap", {"optimizer": "soap"}, "soap"),
    ],
)
def test_megatron_s_optimizer_is_no_other(
    words: str, flags: dict[str, object], optimizer: str
) -> None:
    line = f"torchrun p.py {_GPT} --micro-batch-size 1 --bf16 {words}"
    assert with_job_file({"launch": [line], **flags}, [])["optimizer"] == optimizer
    if flags:
        with pytest.raises(InputError, match="--optimizer"):
            with_job_file({"launch": [line]}, [])


@pytest.mark.parametrize(
    ("folder", "data"),
    [("bert/release", "x"), ("gpt/a", "/d/my-bert_00_text"), ("multimodal-b/a", "x")],
)
def test_megatron_s_arguments_of_another_model_are_refused(
    tmp_path: Path, folder: str, data: str
) -> None:
    sizes = "--num-layers: 2\n  --hidden-size: 64\n  --num-attention-heads: 4\n"
    job = tmp_path / folder / "model_config.yaml"
    job.parent.mkdir(parents=True)
    job.write_text(f"MODEL_ARGS:\n  {sizes}  --micro-batch-size: 1\n  --data-path: {data}\n")
    with pytest.raises(InputError, match="of another model than Megatron-LM's GPT; add --model"):
        with_job_file({"job": str(job)}, [])
    assert with_job_file({"job": str(job), "model": "gpt2"}, [])["bs"] == 1


def test_a_script_of_megatron_that_trains_nothing_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ptq.sh"
    path.write_text(
        f'options="{_GPT} --micro-batch-size 1 --fp16"\n'
        "torchrun examples/export/text_generation_ptq.py ${options}\n"
    )
    with pytest.raises(InputError, match="trains nothing"):
        with_job_file({"job": str(path)}, [])


def test_slurm_says_the_gpus_of_a_line_that_is_set_in_two_ways(tmp_path: Path) -> None:
    path = tmp_path / "submit.sh"
    path.write_text(
        "#SBATCH --nodes=4\n#SBATCH --gpus-per-node=4\n"
        f'CMD="python3 pretrain_gpt.py {_GPT} --micro-batch-size 1 --global-batch-size 64 --bf16"\n'
        'if [ "$PROFILES" = true ]; then\n    CMD="nsys profile $CMD --profile"\nfi\n'
        'srun bash -c "RANK=\\$SLURM_PROCID $CMD"\n'
    )
    found = with_job_file({"job": str(path)}, [])
    assert (found["gpus"], found["grad_accum"]) == (16, 4)


def test_the_words_of_peft_s_own_script() -> None:
    """huggingface/peft examples/sft/train.py."""
    line = (
        "python train.py --model_name_or_path Qwen/Qwen2.5-0.5B --learning_rate 1e-4 --lora_r 8"
        " --use_4bit_quantization True --use_nested_quant True --use_flash_attn True --use_peft_lora"
    )
    found = with_job_file({"launch": [f"{line} True"]}, [])
    assert (found["quant"], found["double_quant"], found["attention"]) == ("nf4", True, "flash2")
    plain = line.replace("use_4bit_quantization True", "use_4bit_quantization False")
    full = with_job_file({"launch": [f"{plain} False"]}, [])
    assert "quant" not in full and full.get("method", "full") == "full"


def test_deepspeed_chat_adapts_the_modules_whose_path_has_a_text() -> None:
    line = (
        "deepspeed main.py --data_split 2,4,4 --model_name_or_path facebook/opt-125m --zero_stage 2"
        " --per_device_train_batch_size 8 --learning_rate 1e-3 --lora_dim 128"
        " --lora_module_name decoder.layers. --num_gpus 2"
    )
    found = with_job_file({"launch": [line]}, [])
    assert found["targets"] == r".*decoder\.layers\..*"
    assert priced(found, [])[0].num_trained > 0


@pytest.mark.parametrize(
    ("dispatcher", "deepep", "gathers"),
    [("flex", True, None), ("alltoall", False, None), ("allgather", False, True)],
)
def test_one_dispatcher_of_experts_is_read(
    dispatcher: str, deepep: bool, gathers: bool | None
) -> None:
    line = (
        f"torchrun --nproc_per_node 8 p.py {_GPT} --micro-batch-size 1 --bf16 --num-experts 8"
        f" --expert-model-parallel-size 8 --moe-token-dispatcher-type {dispatcher} --swiglu"
    )
    found = with_job_file({"launch": [line]}, [])
    assert (found.get("deepep"), found.get("ep_all_gather")) == (deepep, gathers)


MEGATRON = """
TP=$8
if [ "$FLASH" = "True" ]; then
    TRAINING="
        --tensor-model-parallel-size $TP \\
        --pipeline-model-parallel-size $PP \\
        --micro-batch-size 1 --global-batch-size 512 --use-flash-attn
    "
else
    TRAINING="
        --tensor-model-parallel-size $TP \\
        --pipeline-model-parallel-size $PP \\
        --micro-batch-size 1 --global-batch-size 512
    "
fi
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --swiglu \\
    --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512 --bf16 \\
    --normalization RMSNorm --norm-epsilon 1e-5 --disable-bias-linear --position-embedding-type rope \\
    --tokenizer-type Llama3Tokenizer --use-distributed-optimizer --sequence-parallel $TRAINING
"""


def test_a_step_of_megatron_is_shared_out_by_the_mesh_that_flags_say(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(MEGATRON)
    asked = run(str(script), "--gpus", "64")
    assert asked.code == 2
    assert "add --tp N and --pp N and --attention" in asked.err
    plain = tmp_path / "plain.sh"
    plain.write_text(
        "TP=$8\ntorchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 --bf16"
        " --hidden-size 64 --num-attention-heads 4 --seq-length 64 --tensor-model-parallel-size $TP"
    )
    assert "add --tp N" in run(str(plain)).err
    done = run(
        str(script), "--gpus", "64", "--tp", "2", "--pp", "4", "--attention", "flash2", "--json"
    )
    content = json.loads(done.out)
    config = content["config"]
    assert config["gradient_accumulation_steps"] == 512 // (64 // (2 * 4))
    assert "128256 (Llama3Tokenizer)" in done.err
    assert config["parallel"]["data_parallel"] == "zero1"


def test_alpaca_loras_words_are_lora_in_eight_bits_with_the_batch_of_all_gpus() -> None:
    """tloen/alpaca-lora finetune.py: accumulation is batch_size // micro_batch_size // GPUs."""
    words = "finetune.py --base_model llama-3.2-1b --micro_batch_size 8"
    found = json.loads(run("--json", "--", "torchrun", "--nproc_per_node", "2", *words.split()).out)
    config = found["config"]
    assert config["gradient_accumulation_steps"] == 128 // 8 // 2
    assert (config["adapter"]["kind"], config["sequence_length"]) == ("lora", 256)
    assert config["quantization"]["format"] == "int8"
    assert config["adapter"]["targets"] == ["q_proj", "v_proj"]


def test_a_batch_and_a_sharding_by_other_names_are_not_lost() -> None:
    line = "torchrun --nproc_per_node 2 finetuning.py --model_name llama-3.2-1b --lr 1e-4"
    words = f"{line} --batch_size_training 2 --enable_fsdp True --n_batch_size 3".split()
    found = with_job_file({"launch": words}, [])
    keys = found["job_keys"]
    assert found["bs"] == 2 and isinstance(keys, JobKeys)
    open_ = {key.name: key.option for key in keys.of(KeyUse.NOT_PRICED)}
    assert open_ == {"enable_fsdp": "data_parallel", "n_batch_size": "bs"}


def test_a_script_told_only_of_lora_or_of_its_batch_has_the_usual_names() -> None:
    told = run("--json", "--", "deepspeed", "train.py", *LLAMA.split(), "--use_lora", "true")
    assert json.loads(told.out)["config"]["adapter"]["kind"] == "lora"
    line = "train.py --model_name llama-3.2-1b --per_device_train_batch_size 3"
    told = run("--json", "--", "accelerate", "launch", *line.split())
    assert json.loads(told.out)["config"]["micro_batch_size"] == 3


def test_a_script_of_ones_own_names_no_key_of_ours_and_commas_of_targets() -> None:
    """TRL's sft_vlm.py has these commas in its own docstring; PEFT adapts v_proj alone."""
    line = "sft_vlm.py --model_name_or_path qwen2.5-vl-3b --dtype bfloat16 --use_peft"
    line += " --lora_target_modules q_proj, v_proj --per_device_train_batch_size 1"
    told = run("--", "accelerate", "launch", *line.split())
    assert "loaded_by_script" not in told.err
    assert "'q_proj,' ends in a comma" in told.err


def test_llama_factorys_flash_attn_was_a_switch() -> None:
    line = "src/train_bash.py --stage sft --model_name_or_path llama-3.2-1b --finetuning_type lora"
    for word, kernel in (("--flash_attn", "flash2"), ("--flash_attn False", "auto")):
        told = run("--json", "--", "python", *line.split(), *word.split(), "--bf16")
        assert json.loads(told.out)["config"]["attention"] == kernel


def test_megatron_drops_hidden_states_unless_it_is_told_not_to(tmp_path: Path) -> None:
    def masks(*more: str) -> int:
        line = (
            MEGATRON.replace("$TP", "1")
            .replace("$PP", "1")
            .replace("--bf16", f"--bf16 {' '.join(more)}")
        )
        script = tmp_path / "train.sh"
        script.write_text(line.replace('"$FLASH"', "True"))
        done = run(str(script), "--gpus", "1", "--explain")
        assert done.code == 0, done.err
        return done.out.count("dropout mask")

    assert masks() > masks("--hidden-dropout", "0", "--attention-dropout", "0") == 0


SHELL_FORMS = """
: "${LAYERS:=4}"
declare -a SIZES=(
  --per_device_train_batch_size 2
  --gradient_accumulation_steps $STEPS
)
N=2
((N = N * 4)); let STEPS=N/4
case ${SIZE:-1b} in
  8b) MODEL=llama-3.1-8b; LENGTH=4096 ;;
  "1b" | 1B)
    MODEL=llama-3.2-1b
    LENGTH=512 ;;
  *) echo "what size?"; exit 1 ;;
esac
if (( N > 4 )); then BF16=true; else BF16=false; fi
check() { python -c "import torch"; }
run() {
  local model=$1; shift
  for seed in {1,2}; do echo $seed; done
  srun -N $(expr $N / 8) torchrun --nproc_per_node $N train.py --model_name_or_path $model \
    --max_length ${1:-1024} "${SIZES[@]}" --bf16 $BF16 "${@:2}"
}
if check && run "$MODEL" $LENGTH --gradient_checkpointing false; then echo done; fi
"""


def test_cases_functions_and_sums_are_followed(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SHELL_FORMS.replace("$STEPS\n)", "2\n)"))
    options = with_job_file({"job": str(script)}, [])
    wanted = {"model": "llama-3.2-1b", "gpus": 8, "ctx": 512, "bs": 2, "grad_accum": 2}
    assert {key: options.get(key) for key in wanted} == wanted
    assert options["checkpointing"] == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("f() { g $2 $#; }\ng() { echo $1; }\nf 1 2", ["echo 2"]),
        ("f() { echo \"$@\"; }\nf a 'b c'\nf", ["echo a b c", "echo"]),
        ("A=1\n((A+=2)); ((A++)); ((B = A > 3))\necho $A $((A-1))", ["echo 4 3"]),
        ("case $1 in a) X=1 ;; b) X=2 ;; esac\necho $X", ["echo "]),
        ("case ab in a*) X=1 ;; *) X=2 ;; esac\necho $X", ["echo 1"]),
        ("case z in a) python x.py ;& b) python y.py ;; esac\necho end", ["echo end"]),
        ("echo {1..3} {a,b} x{1,2} '{1,2}'", ["echo 1 2 3 a b x{1,2} {1,2}"]),
        ("never() { python x.py; }\ncleanup() { rm y; }; trap cleanup EXIT", None),
        ("f() { f; echo deep; }\nf", None),
        ('C=("a b" "c d")\nfor c in "${C[@]}"; do\n  eval "$c"\ndone', ["a b", "c d"]),
        ('C=("a b" "c d")\nfor c in "${C[@]}"; do $c; done', ["a b", "c d"]),
        ("declare -r A=3 B\nexport -f run\necho $A", ["echo 3"]),
        (
            'A=${A:-"-m verl.trainer"}\nB=$A\nX=$A echo $B "$B"',
            ["echo -m verl.trainer -m verl.trainer"],
        ),
    ],
)
def test_forms_of_bash(text: str, words: list[str] | None) -> None:
    found = [" ".join(word.text for word in one.words) for one in commands(text)]
    assert words is None or found == words


@pytest.mark.parametrize(
    ("line", "options"),
    [
        (
            "python run_clm.py --model_name_or_path gpt2 --dataset_name wikitext --do_train"
            " --per_device_train_batch_size 4",
            {"ctx": 1024, "checkpointing": "none", "precision": "checkpoint", "loss": None},
        ),
        (
            "torchrun --nproc_per_node 2 examples/run_qa.py --model_name_or_path bert-base-uncased"
            " --dataset_name squad --do_train",
            {"task": "question-answering", "ctx": 384, "gpus": 2, "checkpointing": "none"},
        ),
        (
            "python train.py --config_name facebook/esm2_t30_150M_UR50D --bf16 True --max_seq_length"
            " 512 --pad_to_max_length True --per_device_train_batch_size 8",
            {"ctx": 512, "precision": "bf16-amp", "checkpointing": "none", "loss": None},
        ),
        (  # TRL's of today, and a script that TRL's name and keys tell
            "python sft.py --model_name_or_path gpt2 --dataset_name a --max_length 64",
            {"ctx": 64, "checkpointing": "full", "loss": "chunked"},
        ),
        (
            "python sft.py --model_name_or_path gpt2 --dataset_name a --max_seq_length 64",
            {"ctx": 64, "checkpointing": "none", "loss": None},
        ),
    ],
)
def test_the_trainers_own_examples_are_no_trl(line: str, options: dict[str, object]) -> None:
    found = with_job_file({"launch": [line]}, [])
    assert {key: found.get(key) for key in options} == options


def test_megatrons_gated_width_is_rounded_down() -> None:
    """int(4 * 8192 * 2 / 3 / 64) * 64 (megatron/training/arguments.py validate_args)."""
    line = (
        "python pretrain_gpt.py --num-layers 2 --hidden-size 8192 --num-attention-heads 64"
        " --seq-length 64 --micro-batch-size 1 --swiglu --normalization RMSNorm --bf16"
    )
    config = with_job_file({"launch": [line]}, [])["config"]
    assert isinstance(config, dict) and config["intermediate_size"] == 21_824


@pytest.mark.parametrize(("script", "rank"), [("train_qwen_lora.py", 8), ("train_qwen.py", None)])
def test_a_script_that_says_lora_alone_has_pefts_rank(script: str, rank: int | None) -> None:
    words = "--model_name_or_path qwen2.5-1.5b --per_device_train_batch_size 2 --bf16"
    found = with_job_file({"launch": [f"python {script} {words}"]}, [])
    method = "lora" if rank else "full"
    assert (found.get("rank"), found.get("method", "full")) == (rank, method)


@pytest.mark.parametrize(
    ("line", "device"),
    [
        ("export NEURON_CC_FLAGS=--model-type=transformer", "AWS Trainium"),
        ("PJRT_DEVICE=TPU python -m this", "a TPU"),
        ("# NEURON_CC_FLAGS is of no use here", ""),
    ],
)
def test_a_script_of_no_gpu_is_refused_by_its_device(folder: Path, line: str, device: str) -> None:
    (folder / "run.sh").write_text(f"{line}\ntorchrun t.py {LLAMA}\n")
    if not device:
        assert priced(with_job_file({"job": "run.sh"}, []), [])
        return
    with pytest.raises(InputError, match=f"trains on {device} "):
        with_job_file({"job": "run.sh"}, [])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("deepspeed sft.py --model_name_or_path llama-3.2-1b --bf16 --max_length 64", True),
        ("deepspeed --hostfile h sft.py --model_name_or_path llama-3.2-1b --bf16", True),
        ("llamafactory-cli train --model_name_or_path llama-3.2-1b --finetuning_type lora", True),
        ("deepspeed --num_gpus 2 sft.py --model_name_or_path llama-3.2-1b --bf16", False),
        ("python sft.py --model_name_or_path llama-3.2-1b --bf16", False),
    ],
)
@pytest.mark.parametrize("gpus", [{}, {"gpus": 4}])
def test_a_launcher_that_starts_every_gpu_is_said_to_be_priced_on_one(
    line: str, told: bool, gpus: dict[str, object]
) -> None:
    notes: list[str] = []
    with_job_file({"launch": [line], **gpus}, notes)
    assert any("for each GPU that it finds" in note for note in notes) is (told and not gpus)


def test_ms_swift_reads_fsdp_from_a_file(tmp_path: Path) -> None:
    told = {
        "fsdp": "full_shard auto_wrap offload",
        "fsdp_config": {"activation_checkpointing": False},
    }
    (tmp_path / "fsdp.json").write_text(json.dumps(told))
    line = "NPROC_PER_NODE=2 swift sft --model Qwen/Qwen3-0.6B --train_type full --fsdp {}.json\n"
    script = tmp_path / "run.sh"
    script.write_text(line.format("fsdp"))
    options = with_job_file({"job": str(script)}, [])
    assert (options["data_parallel"], options["offload"]) == (["fsdp2"], "optimizer,parameters")
    assert options["checkpointing"] == "full"  # the model's own, on unless said
    script.write_text(line.format("gone"))
    with pytest.raises(InputError, match=r"'gone.json' of fsdp is not there; add --data-parallel"):
        with_job_file({"job": str(script)}, [])


@pytest.mark.parametrize(
    ("line", "is_named"),
    [
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py", True),
        ("CUDA_VISIBLE_DEVICES=1 python train.py", False),
        ("CUDA_VISIBLE_DEVICES=0,1 torchrun --nproc_per_node 2 train.py", False),
    ],
)
def test_one_process_that_sees_several_gpus_is_named(
    tmp_path: Path, line: str, is_named: bool
) -> None:
    """The Trainer runs torch's DataParallel over them (transformers training_args.py n_gpu)."""
    words = "--model_name_or_path gpt2 --per_device_train_batch_size 2 --max_length 64"
    (tmp_path / "run.sh").write_text(f"{line} {words}\n", encoding="utf-8")
    notes: list[str] = []
    e = priced(with_job_file({"job": str(tmp_path / "run.sh")}, notes), notes)[0]
    named = [key.name for key in e.job_keys.of(KeyUse.NOT_PRICED)]
    assert ("visible_in_code" in named) is is_named


def test_torchtunes_shards_of_so_many_ranks_are_named(tmp_path: Path) -> None:
    """`fsdp_reshard_after_forward: 8` is no switch that is on alone."""
    text = (
        "# tune run --nproc_per_node 16 full_finetune_distributed --config job.yaml\n"
        "model:\n  _component_: torchtune.models.llama3_2.llama3_2_1b\n"
        "batch_size: 1\nfsdp_reshard_after_forward: 8\ndata_parallel_shard_dim: 16\n"
    )
    (tmp_path / "job.yaml").write_text(text, encoding="utf-8")
    notes: list[str] = []
    e = priced(with_job_file({"job": str(tmp_path / "job.yaml"), "gpus": 16}, notes), notes)[0]
    named = [key.name for key in e.job_keys.of(KeyUse.NOT_PRICED)]
    assert "fsdp_reshard_after_forward" in named


def test_what_a_comment_cuts_off_a_command_is_refused(tmp_path: Path) -> None:
    """A line of a continued command that is commented out ends it, as in bash: a batch of 8 was
    priced without a word that the file's 4 never reaches the training."""
    path = tmp_path / "run.sh"
    path.write_text(
        "llamafactory-cli train \\\n  --stage sft \\\n  --model_name_or_path llama-160m \\\n"
        "  #--model_name_or_path llama-3-8b \\\n  --per_device_train_batch_size 4 \\\n  --bf16 True\n"
    )
    with pytest.raises(InputError, match=r"of line 1 ends before line 5, .* so --per_device_train"):
        with_job_file({"job": str(path), "gpus": 1}, [])
    path.write_text(path.read_text().replace("  #--model_name_or_path llama-3-8b \\\n", ""))
    assert with_job_file({"job": str(path), "gpus": 1}, [])["bs"] == 4


@pytest.mark.parametrize("form", ["$1", "${1}"])
def test_an_argument_that_nobody_gives_leaves_the_default(tmp_path: Path, form: str) -> None:
    """Qwen2.5-Coder's script asked for --model, which it says itself."""
    path = tmp_path / "run.sh"
    path.write_text(
        f"MODEL={form}\nBS={form}\nMODEL=${{MODEL:-llama-160m}}\n"
        "python train.py --model_name_or_path ${MODEL} --learning_rate 1"
        " --per_device_train_batch_size ${BS:-3}\n"
    )
    found = with_job_file({"job": str(path)}, [])
    assert (found["model"], found["bs"]) == ("llama-160m", 3)
    path.write_text(
        f"BS={form}\npython train.py --model_name_or_path a --per_device_train_batch_size $BS\n"
    )
    with pytest.raises(InputError, match="known only when"):
        with_job_file({"job": str(path)}, [])


@pytest.mark.parametrize(
    ("own", "workload", "columns"),
    [
        ({"mask_token_type": "blank", "mlm_probability": 0.2}, None, None),
        ({"bidirectional": True, "pooling_mode": "mean", "simcse_dropout": 0.3}, "contrastive", 2),
        ({"bidirectional": True, "pooling_mode": "mean"}, "contrastive", 3),
    ],
)
def test_files_of_llm2vec_embed_texts_and_adapt_all_linears(
    own: dict[str, object], workload: str | None, columns: int | None, tmp_path: Path
) -> None:
    """They were priced as causal steps with LoRA on q_proj and v_proj."""
    shared = {"model_name_or_path": "gpt2", "lora_r": 16, "per_device_train_batch_size": 8}
    path = tmp_path / "train.json"
    path.write_text(json.dumps({**shared, "max_seq_length": 128, **own}))
    found = with_job_file({"job": str(path)}, [])
    assert (found.get("workload"), found.get("columns")) == (workload, columns)
    assert found["targets"] == "all-linear"
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys) and not keys.of(KeyUse.UNKNOWN)
    named = [key.name for key in keys.of(KeyUse.NOT_PRICED)]
    assert ("mask_token_type" if workload is None else "bidirectional") in named


def test_retrievers_embed_a_query_and_a_group_of_passages() -> None:
    """FlagEmbedding's lines were priced as a step of the model on single texts."""
    line = (
        "torchrun --nproc_per_node 2 -m FlagEmbedding.finetune.embedder.encoder_only.base"
        " --model_name_or_path BAAI/bge-base-en-v1.5 --train_data a b --train_group_size 8"
        " --query_max_len 64 --passage_max_len 256 --per_device_train_batch_size 4 --fp16"
        " --learning_rate 1e-5 --sentence_pooling_method cls --negatives_cross_device"
    )
    found = with_job_file({"launch": line.split()}, [])
    said = [found.get(key) for key in ("workload", "columns", "ctx", "bs", "gpus", "precision")]
    assert said == ["contrastive", 9, 256, 4, 2, "fp16-amp"]
    keys = found["job_keys"]
    assert isinstance(keys, JobKeys) and not keys.of(KeyUse.UNKNOWN)
    assert [key.name for key in keys.of(KeyUse.NOT_PRICED)] == [
        "passage_max_len",
        "negatives_cross_device",
    ]
    again = with_job_file({"launch": [*line.split(), "--gradient_checkpointing"]}, [])["job_keys"]
    assert isinstance(again, JobKeys)
    assert "train_group_size" in [key.name for key in again.of(KeyUse.NOT_PRICED)]


@pytest.mark.parametrize(
    "program",
    [
        "-m FlagEmbedding.finetune.reranker.encoder_only.base",
        "train.py --query_instruction_for_rerank a",
    ],
)
def test_rerankers_are_refused_by_name(program: str) -> None:
    words = f"torchrun {program} --model_name_or_path BAAI/bge-reranker-base --train_group_size 8"
    with pytest.raises(InputError, match="the trainer 'reranker' of Trainer is not priced"):
        with_job_file({"launch": f"{words} --learning_rate 1e-5".split()}, [])
