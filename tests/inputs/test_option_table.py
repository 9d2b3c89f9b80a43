"""Every option of the table means the same as a flag, as a key of a job file, as a Python keyword
and on the page."""

from __future__ import annotations

import inspect
import json
from typing import Any

import napkinmath
import pytest
from napkinmath.base.command_line import METHOD_FLAGS, words
from napkinmath.base.errors import InputError
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser
from napkinmath.config.cluster import Cluster
from napkinmath.config.data_loader import DataLoaderConfig
from napkinmath.config.hardware import Gpu, Hardware
from napkinmath.config.parallel_config import ParallelConfig, ZeroConfig
from napkinmath.config.run_length import RunLength
from napkinmath.config.train_config import (
    AdapterConfig,
    Batch,
    OffloadConfig,
    QuantizationConfig,
    RecomputeConfig,
    TrainConfig,
)
from napkinmath.config.workload_config import Workload
from napkinmath.inputs.asked import model_and_training
from napkinmath.inputs.hardware_options import (
    allocator_text,
    calibration_on,
    cluster_of,
    machines,
)
from napkinmath.inputs.job_file import own_options
from napkinmath.inputs.keywords import read_keywords
from napkinmath.inputs.option_table import BY_KEY, BY_NAME, OPTIONS, SHORTHANDS
from napkinmath.inputs.option_table.option import (
    COUNT,
    DOORS,
    FLAG,
    JOB,
    KEYWORD,
    KINDS,
    ON,
    PAGE,
    SWITCH,
    Option,
)
from napkinmath.serving.requests import options_of

PARSER = Parser("estimate", "", SHARED)
GRPO: dict[str, Any] = {"workload": "grpo", "gpu": "H100"}
VLLM: dict[str, Any] = {**GRPO, "rollout": "vllm"}
LORA: dict[str, Any] = {"method": "lora"}
QLORA: dict[str, Any] = {"method": "qlora"}
EIGHT: dict[str, Any] = {"gpus": "8xH100"}
FSDP: dict[str, Any] = {**EIGHT, "data_parallel": "fsdp2"}
FSDP1: dict[str, Any] = {**EIGHT, "data_parallel": "fsdp1"}
ZERO3: dict[str, Any] = {**EIGHT, "zero": 3}
# key -> (a value other than the default, options without which it says nothing)
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "model": ("gpt2", {}),
    "arch": ("L2 h64 a4 f128 v100", {}),
    "config": ({"model_type": "gpt2"}, {}),
    "task": ("token-classification", {"model": "gpt2"}),
    "hub": (True, {}),
    "method": ("qlora", {}),
    "rank": (8, LORA),
    "alpha": (32, LORA),
    "targets": ("q_proj,v_proj", LORA),
    "dropout": (0.5, LORA),
    "adapter_dtype": ("bf16", LORA),
    "rslora": (True, LORA),
    "train_modules": ("lm_head", LORA),
    "adapters": (3, LORA),
    "merge": (True, LORA),
    "virtual_tokens": (8, {"method": "prompt"}),
    "freeze": ("embed_tokens", {}),
    "quant": ("fp4", LORA),
    "double_quant": (False, QLORA),
    "quantize_experts": (True, QLORA),
    "group_size": (128, QLORA),
    "kbit": (False, QLORA),
    "quant_compute_dtype": ("fp32", QLORA),
    "quant_storage": ("bf16", QLORA),
    "quant_embeddings": ("int8", QLORA),
    "keep_modules": ("lm_head,q_proj", QLORA),
    "bs": (3, {}),
    "ctx": (64, {}),
    "grad_accum": (2, {}),
    "global_batch": (6, {"bs": 2}),
    "target_ctx": (32, {}),
    "samples": (52_002, {}),
    "epochs": (2.5, {"samples": 100}),
    "max_steps": (500, {}),
    "samples_per_s_per_worker": (40, {}),
    "dataloader_workers": (4, {}),
    "packing": (True, {}),
    "lengths": ("16,64", {}),
    "audio": ("10s", {"model": "wav2vec2-base-960h"}),
    "image": ("640x480", {"model": "qwen2-vl-2b"}),
    "frames": (5, {"model": "wan2.1-t2v-1.3b", "image": "64x64"}),
    "images": (2, {"model": "qwen2-vl-2b"}),
    "min_pixels": (200_000, {"model": "qwen2-vl-2b", "images": 1}),
    "max_pixels": (200_000, {"model": "qwen2-vl-2b", "images": 1}),
    "image_limit": (200_000, {"model": "qwen2-vl-2b", "images": 1}),
    "resident": ("vae", {"model": "sd-1.5"}),
    "precision": ("fp16-amp", {}),
    "optimizer": ("lion", {}),
    "optimizer_in_backward": (True, {}),
    "clip": (False, {}),
    "checkpointing": ("every:2", {}),
    "reentrant": (True, {}),
    "offload": ("optimizer", {}),
    "pinned": (False, {"offload": "optimizer"}),
    "blocks_to_swap": (2, {"model": "wan2.1-t2v-1.3b", "image": "64x64", "method": "lora"}),
    "offload_style": ("torchtune", {"offload": "activations"}),
    "prefetch": (2, {"offload": "activations"}),
    "attention": ("eager", {}),
    "loss": ("chunked", {}),
    "kernels": ("liger", {}),
    "kernel_parts": ("norm,rope", {"kernels": "liger"}),
    "mlp_tiles": ("auto", {}),
    "stack": ("hf-bare", {}),
    "eval": (True, {}),
    "train_mode": (True, {}),
    "compile": (True, {}),
    "workload": ("dpo", {}),
    "columns": ("3", {"workload": "contrastive"}),
    "teacher": ("gpt2", {"workload": "grpo"}),
    "reference": (False, {"workload": "dpo"}),
    "old_logprobs": (True, {"workload": "grpo"}),
    "score_bs": (3, {"workload": "grpo", "rollout": "hf"}),
    "entropy_loss": (True, {"workload": "grpo", "rollout": "hf", "rollout_trainer": "verl"}),
    "reference_at": ("whole", {"workload": "dpo"}),
    "teacher_at": ("apart", {"workload": "grpo", "teacher": "gpt2"}),
    "teacher_topk": (64, {"workload": "distill", "teacher": "gpt2"}),
    "completion": (16, {"workload": "grpo"}),
    "rollout": ("vllm", GRPO),
    "rollout_memory": (0.5, VLLM),
    "rollout_tp": (2, {**VLLM, "rollout_gpus": "2xH100"}),
    "rollout_sleep": (2, VLLM),
    "rollout_gpus": ("2xH100", VLLM),
    "rollout_trainer": ("nemo-rl", GRPO),
    "rollout_sync": ("whole", VLLM),
    "rollout_batches": ("4", VLLM),
    "rollout_bucket": ("512MiB", VLLM),
    "rollout_offload": ("policy", VLLM),
    "rollout_staleness": (1, {**VLLM, "rollout_gpus": "2xH100"}),
    "rollout_group": (8, VLLM),
    "rollout_draft": ("3:0.7", VLLM),
    "eval_bs": (2, {}),
    "generate": (8, {}),
    "gpu": ("T4", {}),
    "vram": ("20GiB", {"gpu": "T4"}),
    "mig": ("3g.40gb", {"gpu": "A100-80"}),
    "power_limit": (300, {"gpu": "A100-80"}),
    "display": ("linux", {"gpu": "T4"}),
    "allocator": ("expandable_segments:True", {}),
    "calibration": ("no such file", {"gpu": "T4"}),
    "allow_stale_calibration": (True, {}),
    "gpus": ("2xT4", {}),
    "nodes": (2, EIGHT),
    "zero": (2, EIGHT),
    "data_parallel": ("fsdp1", EIGHT),
    "tp": (2, EIGHT),
    "sequence_parallel": (False, {**EIGHT, "tp": 2}),
    "tp_comm_overlap": (True, {**EIGHT, "tp": 2, "stack": "megatron"}),
    "pp": (2, EIGHT),
    "pp_schedule": ("gpipe", {**EIGHT, "pp": 2}),
    "pp_chunks": (3, {**EIGHT, "pp": 2, "pp_schedule": "interleaved"}),
    "micro_batches": (4, {**EIGHT, "pp": 2}),
    "cp": (2, EIGHT),
    "cp_kind": ("ulysses", {**EIGHT, "cp": 2}),
    "ep": (2, EIGHT),
    "etp": (1, {**EIGHT, "tp": 2, "ep": 4}),
    "ep_comm_overlap": (True, {**EIGHT, "ep": 2}),
    "ep_all_gather": (True, {**EIGHT, "ep": 2, "stack": "megatron"}),
    "deepep": (True, {**EIGHT, "ep": 2, "stack": "megatron"}),
    "expert_imbalance": (1.5, {**EIGHT, "ep": 2}),
    "expert_capacity": (1.25, {**EIGHT, "ep": 2}),
    "sharding": ("grad-op", FSDP),
    "shard_size": (4, FSDP),
    "reshard": (False, FSDP),
    "wrap": ("none", FSDP),
    "forward_prefetch": (True, FSDP1),
    "backward_prefetch": (False, FSDP1),
    "limit_all_gathers": (False, FSDP1),
    "sharded_dtype": ("bf16", FSDP),
    "reduce_dtype": ("fp32", FSDP),
    "sync_each_batch": (True, FSDP),
    "bucket_mb": (50, EIGHT),
    "bucket_view": (True, EIGHT),
    "hpz": (4, ZERO3),
    "mics": (4, ZERO3),
    "nvme": ("optimizer", {**ZERO3, "offload": "optimizer"}),
    "broadcast_loading": (True, FSDP),
    "full_state_dict": (True, FSDP),
    "network": ("400", {**EIGHT, "nodes": 2}),
    "host_ram": ("64GiB", EIGHT),
    "host": ("cores=8,memory=100GB/s", EIGHT),
}
SAYS_THE_DEFAULT = {"train_mode"}  # it is there to contradict --eval
# Fields that a word within an option's value sets: every:2, selective:linear, --offload parameters.
WITHIN = {
    *("recompute.every", "recompute.keep"),
    *("offload.parameters", "offload.activations", "offload.checkpoints", "offload.embeddings"),
}
RECORDS = {
    "": TrainConfig,
    "adapter": AdapterConfig,
    "quantization": QuantizationConfig,
    "recompute": RecomputeConfig,
    "offload": OffloadConfig,
    "batch": Batch,
    "run": RunLength,
    "loader": DataLoaderConfig,
    "workload": Workload,
    "parallel": ParallelConfig,
    "parallel.zero": ZeroConfig,
    "hardware": Hardware,
    "hardware.gpu": Gpu,
    "cluster": Cluster,
}


def as_flags(given: dict[str, Any]) -> dict[str, object]:
    return PARSER.parse(words(given))


def as_job(given: dict[str, Any]) -> dict[str, object]:
    return own_options(given, "job.yaml")


def on_the_page(given: dict[str, Any]) -> dict[str, object]:
    return options_of(json.dumps(given).encode())


OPTIONS_AT = {FLAG: as_flags, JOB: as_job, PAGE: on_the_page}


def configured(door: str, given: dict[str, Any]) -> tuple[object, ...] | str:
    """Everything that a step is priced from, or the line that refuses it."""
    try:
        if door == KEYWORD:
            asked = read_keywords(None, given)
            return asked.spec, asked.config, asked.hardware, asked.allocator, asked.calibration
        options, notes = OPTIONS_AT[door](given), list[str]()
        spec, config = model_and_training(options, notes)
        (machine,) = machines(options)
        calibration = calibration_on(machine, options, notes)
        return spec, config, cluster_of(machine, options), allocator_text(options), calibration
    except InputError as error:
        return str(error)


def asked_with(option: Option) -> dict[str, Any]:
    value, needed = CASES[option.key]
    model = {} if option.key in ("model", "arch", "config") else {"model": "tinyllama"}
    return {**model, **needed, option.key: value}


def test_every_option_has_a_case() -> None:
    assert set(CASES) == set(BY_KEY)
    assert len(OPTIONS) == len(BY_KEY)


def test_options_have_known_fields_of_known_types() -> None:
    for option in OPTIONS:
        assert vars(option).keys() <= Option.__annotations__.keys(), option.key
        assert option.kind in KINDS and option.help and option.sets, option.key


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.key)
def test_an_option_means_the_same_at_every_door(option: Option) -> None:
    if option.key in ("hub", "config"):
        pytest.skip("hub asks the network; a config is given to job files alone")
    given = asked_with(option)
    made = {door: configured(door, given) for door in DOORS if option.is_at(door)}
    first = made[JOB]
    assert all(found == first for found in made.values()), made
    if option.key == "calibration":
        assert isinstance(first, str) and "no such file" in first
    else:
        assert not isinstance(first, str), first


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.key)
def test_an_option_changes_what_it_says_it_sets(option: Option) -> None:
    """The record that `sets` names differs from the one without the option."""
    if option.key in SAYS_THE_DEFAULT | {"hub", "config", "calibration", "allow_stale_calibration"}:
        pytest.skip("nothing but the file, the network or a contradiction shows it")
    given = asked_with(option)
    if option.sets.startswith("estimate.") and option.key != "allocator":
        assert not isinstance(configured(JOB, given), str)
        return
    without = {key: value for key, value in given.items() if key != option.key}
    with_it, plain = configured(JOB, given), configured(JOB, without)
    assert not isinstance(with_it, str) and not isinstance(plain, str), (with_it, plain)
    assert with_it != plain
    if part(option) in RECORDS and option.sets.partition(".")[0] not in ("hardware", "cluster"):
        changed = [
            field for field in TrainConfig.__record_fields__ if differs(field, with_it[1], plain[1])
        ]
        assert option.sets.partition(".")[0] in changed


def differs(field: str, one: object, other: object) -> bool:
    return getattr(one, field) != getattr(other, field)


def part(option: Option) -> str:
    return option.sets.rpartition(".")[0]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.key)
def test_an_option_sets_a_field_that_is_there(option: Option) -> None:
    record, field = part(option), option.sets.rpartition(".")[2]
    if record == "estimate":
        assert field in inspect.signature(napkinmath.estimate).parameters
    else:
        assert field in RECORDS[record].__record_fields__


def test_every_field_of_a_step_is_set_by_an_option_or_a_file() -> None:
    """DeepSpeed's own file sets what of ZeRO has no flag."""
    settable = {option.sets for option in OPTIONS}
    for record, kind in RECORDS.items():
        if record in ("parallel.zero", "hardware", "hardware.gpu", "cluster"):
            continue
        for field in kind.__record_fields__:
            path = f"{record}.{field}".lstrip(".")
            assert path in settable or path in RECORDS or path in WITHIN, path


def test_doors_that_lack_an_option_have_a_reason() -> None:
    for option in OPTIONS:
        assert set(option.away) <= set(DOORS) and all(len(why) > 10 for why in option.away.values())
        assert option.is_at(JOB), "a job file takes every option"


def test_names_are_told_apart() -> None:
    names = [n for o in OPTIONS for n in (o.key, *o.aliases, *(n for n, _, _ in o.shorthands))]
    assert len(names) == len(set(names))
    assert set(METHOD_FLAGS) == {n for n, (key, _) in SHORTHANDS.items() if key == "method"}


@pytest.mark.parametrize("name", sorted(set(BY_NAME) - set(BY_KEY)))
def test_an_alias_is_its_option_as_flag_and_key(name: str) -> None:
    option = BY_NAME[name]
    value = CASES[option.key][0]
    flag = "--" + name.replace("_", "-")
    typed = [flag] if option.kind in (SWITCH, ON) else [flag, str(value)]
    assert set(PARSER.parse(typed)) == {option.key} == set(own_options({name: value}, "job.yaml"))


@pytest.mark.parametrize("name", SHORTHANDS)
def test_a_shorthand_is_its_value_as_flag_key_and_keyword(name: str) -> None:
    key, value = SHORTHANDS[name]
    rest: dict[str, Any] = EIGHT if key == "data_parallel" else {}
    long = read_keywords("gpt2", {**rest, key: value}).config
    assert read_keywords("gpt2", {**rest, name: True}).config == long
    assert own_options({"model": "gpt2", name: True}, "job.yaml")[key] == [value]
    assert own_options({"model": "gpt2", name: "no"}, "job.yaml") == {"model": "gpt2"}
    with pytest.raises(InputError, match=name):
        own_options({"model": "gpt2", name: "perhaps"}, "job.yaml")
    assert PARSER.parse(["--" + name])[key] in (value, [value])


def test_two_methods_are_refused_in_flags_that_are_there() -> None:
    said = {"method": ["qlora", "dora"]}
    with pytest.raises(InputError, match=r"^--qlora --method dora exclude each other"):
        model_and_training({"model": "gpt2", **said}, [])
    for name in ("qlora", "dora"):  # a LoRA of its kind
        both, alone = ({"model": "gpt2", "method": x} for x in (["lora", name], name))
        assert model_and_training(both, [])[1] == model_and_training(alone, [])[1]


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.key)
def test_help_names_every_choice(option: Option) -> None:
    if option.named_choices():
        assert "{choices}" in option.help
    assert "{" not in option.meaning()
    assert all(name in option.meaning() for name in option.named_choices())


@pytest.mark.parametrize("option", [o for o in OPTIONS if o.named_choices()], ids=lambda o: o.key)
def test_every_choice_of_the_help_is_understood(option: Option) -> None:
    for name in option.named_choices():
        given = {**asked_with(option), option.key: name.replace(":K", ":2")}
        made = configured(JOB, given)
        assert not isinstance(made, str) or "unknown" not in made, made


@pytest.mark.parametrize("option", OPTIONS, ids=lambda o: o.key)
def test_a_misspelt_name_is_suggested_at_every_door(option: Option) -> None:
    wrong = option.key + "x"
    if wrong in BY_NAME or len(option.key) < 3:
        return
    lines = {
        FLAG: lambda: PARSER.parse([f"--{wrong.replace('_', '-')}", "1"]),
        JOB: lambda: own_options({wrong: 1}, "job.yaml"),
        KEYWORD: lambda: napkinmath.estimate("gpt2", **{wrong: 1}),
        PAGE: lambda: options_of(json.dumps({wrong: 1}).encode()),
    }
    for door, ask in lines.items():
        if option.is_at(door):
            name = option.flag if door == FLAG else option.key
            with pytest.raises(InputError, match="did you mean") as caught:
                ask()
            assert name in str(caught.value), (door, caught.value)


def test_counts_may_run_over_a_range() -> None:
    from napkinmath.inputs.several import several

    for option in OPTIONS:
        if option.kind == COUNT:
            assert several(option.key, "2..8") == [2, 4, 8], option.key


def test_python_keywords_are_priced_as_the_flags_are() -> None:
    told = napkinmath.estimate("gpt2", method="lora", bs=2, ctx=64, gpu="L4", grad_accum=2)
    fields = napkinmath.estimate(
        "gpt2",
        adapter=AdapterConfig(),
        micro_batch_size=2,
        sequence_length=64,
        gradient_accumulation_steps=2,
        hardware="L4",
    )
    assert told.config == fields.config and told.peak.nbytes == fields.peak.nbytes
    assert told.memory.device.value == fields.memory.device.value


@pytest.mark.parametrize(
    ("keywords", "line"),
    [
        ({"rank": 4, "adapter": AdapterConfig()}, "both say adapter"),
        ({"config": TrainConfig(), "bs": 2}, "config="),
        ({"gpu": ["T4", "L4"]}, "names 2 GPUs"),
        ({"gpu": "T4", "hardware": "T4"}, "both name the GPU"),
        ({"bs": 2, "batch_size": 3}, "given twice"),
        ({"precision": "bf17"}, "did you mean bf16"),
    ],
)
def test_keywords_that_contradict_each_other(keywords: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        napkinmath.estimate("gpt2", **keywords)
