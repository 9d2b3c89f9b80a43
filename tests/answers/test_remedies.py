"""What would make a step fit: the flags printed, added to the command, do; no smaller set does."""

from __future__ import annotations

import shlex

import pytest
from napkinmath.answers.remedies import LEVELS
from napkinmath.answers.verdict import surely_fits
from napkinmath.base.errors import InputError
from napkinmath.cli.main import main
from napkinmath.estimate import Verdict
from napkinmath.inputs.jobs import priced

COMMANDS = {
    "full on one card": "--model llama-3.1-8b --gpu rtx4090",
    "a large batch": "--model llama-3.1-8b --lora --gpu rtx4090 --bs 8",
    "over two cards": "--model llama-3.1-70b --gpus 2xrtx3090 --ctx 512",
    "packed whole while loading": "--model llama-3.1-70b --qlora --fsdp --gpus 2xrtx3090 --ctx 512",
    "small model, large batch": "--model gpt2 --gpu t4 --bs 64",
    "scores kept": "--model qwen3-0.6b --lora --attention eager --gpu rtx3060-12 --bs 4 --ctx 2048",
    "a batch that may stay": "--model llama-3.1-8b --qlora --gpu rtx4090 --bs 4",
    "experts left as they are": "--model mixtral-8x7b --qlora --gpu a6000",
    "what patched kernels save": "--model mistral-small-24b --qlora --gpu rtx4090 --ctx 4096",
    "patched over two cards": "--model qwen2.5-14b --qlora --ddp --gpus 2xrtx4080 --ctx 8192 --checkpointing full",
    "experts that no patch knows": "--model gpt-oss-20b --lora --gpu rtx4090 --ctx 4096",
    "cannot tell": "--model llama-3.1-8b --gpu h100 --ctx 3600",
}


@pytest.mark.parametrize(
    ("flags", "is_offered"),
    [
        ("--gpus 2xh100 --fsdp", True),
        ("--gpus 2xh100 --ddp", True),
        ("--gpus 2xh100 --zero 3", True),
        ("--gpus 2xh100 --ddp --stack hf-4.45", True),
        ("--gpus 2xh100 --ddp --stack hf-2023", False),  # no use_liger_kernel yet
        ("--gpus 2xh100 --ddp --stack hf-bare", False),  # a loop of one's own
        ("--gpus 4xh100 --fsdp --tp 2", False),  # a rank has a part of the head
        ("--gpus 2xh100 --ddp --workload dpo", False),
    ],
)
def test_liger_is_a_way_out_on_several_gpus_where_the_trainer_runs_it(
    flags: str, is_offered: bool
) -> None:
    options = options_of(shlex.split(f"--model llama-3.1-8b --lora {flags}"))
    config = priced(options, [])[0].config
    liger, unsloth = (
        next(change for level in LEVELS[-1:] for change in level if change.flag == flag)
        for flag in ("--kernels liger", "--kernels unsloth")
    )
    assert (liger.apply(config) is not None) is is_offered
    assert unsloth.apply(config) is None


def options_of(words: list[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    at = 0
    while at < len(words):
        name = words[at].removeprefix("--").replace("-", "_")
        if name in ("lora", "qlora"):
            found["method"] = name
        elif at + 1 < len(words) and not words[at + 1].startswith("--"):
            found[name] = words[at + 1]
            at += 1
        else:
            found[name] = True
        at += 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_flags_printed_are_enough(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    words = COMMANDS[name].split()
    assert main(words) in (1, 3)
    said = capsys.readouterr().out.splitlines()
    line = next(x for x in said if x.startswith("  enough"))
    flags = line.removeprefix("  enough").split("   leaves")[0].split()
    whole = [x.split("estimate ", 1)[1] for x in said if x.startswith("  that is")]
    assert main(shlex.split(whole[0]) if whole else [*words, *flags]) == 0
    left = line.split("leaves ")[1].split(" GiB")[0]
    assert f"{left} GiB to spare" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_no_single_change_of_its_kind_is_enough_where_several_are_said(name: str) -> None:
    options = options_of(COMMANDS[name].split())
    if "gpu" in options:
        options["gpu"] = [options["gpu"]]
    e = priced(options, [])[0]
    assert e.remedy is not None
    if len(e.remedy.flags) == 1:
        return
    level = next(level for level in LEVELS if any(_names(c.flag, e.remedy.flags) for c in level))
    for candidate in level:
        config = candidate.apply(e.config)
        if config is None:
            continue
        try:
            other = e.under(config, e.compared(config)[1])
        except InputError:
            continue
        assert other.verdict is not Verdict.FITS, candidate.flag


def _names(flag: str, flags: tuple[str, ...]) -> bool:
    return any(found.split()[0] == flag.split()[0] for found in flags)


def test_nothing_is_advised_where_it_fits_or_nothing_helps(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert priced({"model": "gpt2", "gpu": ["h100"]}, [])[0].remedy is None
    assert priced({"model": "gpt2"}, [])[0].remedy is None
    assert main(["--model", "llama-3.1-405b", "--gpu", "rtx4090"]) == 1
    assert "no set of the changes known is enough" in capsys.readouterr().out


@pytest.mark.parametrize(("kind", "offered"), [("sft", True), ("dpo", True), ("orpo", False)])
def test_a_loss_in_chunks_is_offered_where_a_trainer_has_it(kind: str, offered: bool) -> None:
    e = priced({"model": "gpt2", "workload": kind, "loss": "hf", "bs": 8, "gpu": "t4"}, [])[0]
    assert any(change.flag == "--loss chunked" for change in e.changes) == offered


def test_an_engine_is_offered_what_it_has() -> None:
    options = {"model": "llama-2-70b", "gpus": "256xa100", "tp": 8, "ctx": 4096}
    options |= {"stack": "megatron", "checkpointing": "selective", "grad_accum": 8}
    e = priced(options, [])[0]
    assert e.remedy is not None and e.remedy.flags == ("--zero 1",)
    assert not any("8bit" in change.flag for change in e.changes)


def test_adapters_offered_for_a_denoiser_save_what_their_flags_save() -> None:
    """Its trainers keep fp32 weights where all are trained, and adapt modules of their own choice."""
    given: dict[str, object] = {"model": "sd-1.5", "gpu": ["rtx3060-12"]}
    e = priced(given, [])[0]
    offered = next(change for change in e.changes if change.flag.startswith("--lora"))
    other = priced({**given, **options_of(offered.flag.split())}, [])[0]
    assert e.peak.nbytes - other.peak.nbytes == offered.saved_bytes


def test_what_is_tried_under_the_limit_first_has_the_verdict_and_the_books_of_the_estimate() -> (
    None
):
    """Also where the step fills the device up, and where segments are returned by age."""
    verdicts: set[Verdict] = set()
    for allocator in (
        "backend:native",
        "garbage_collection_threshold:0.6",
        "expandable_segments:True",
    ):
        for batch in (1, 8, 9, 10, 11, 12, 16):
            options: dict[str, object] = {"model": "gpt2", "gpu": ["t4"], "vram": "8GiB"}
            options |= {"bs": batch, "ctx": 512, "allocator": allocator}
            plain, tried = priced(options, [])[0], priced(options, [])[0]
            verdicts.add(plain.verdict)
            assert surely_fits(tried) is (plain.verdict is Verdict.FITS)
            assert tried.replay == plain.replay and tried.verdict is plain.verdict
    assert {Verdict.FITS, Verdict.DOES_NOT_FIT} <= verdicts


def test_packed_experts_come_before_host_memory() -> None:
    """Packing the rest alone widens them, so neither change lowered the peak by itself."""
    (e,) = priced({"model": "gpt-oss-120b", "method": "lora", "gpu": "h100"}, [])
    assert e.remedy is not None
    assert e.remedy.flags == ("--qlora --quantize-experts --checkpointing full",)
    assert e.remedy.speed_ratio is not None and e.remedy.speed_ratio > 0.3


def test_a_remedy_that_leaves_a_tenth_of_the_speed_is_the_last() -> None:
    """transformers generates under FSDP with every weight gathered for each token (4% of the
    speed)."""
    options = {"model": "qwen2.5-7b", "workload": "grpo", "gpus": "4xl40s"}
    (e,) = priced(options, [])
    assert e.remedy is not None and e.remedy.speed_ratio is not None
    assert e.remedy.speed_ratio > 0.1 and "--fsdp" not in e.remedy.flags


@pytest.mark.parametrize(
    ("stack", "flag"),
    [
        ("hf", "--fsdp"),
        ("torchtitan", "--fsdp"),
        ("hf-4.45", "--data-parallel fsdp1"),
        ("deepspeed", "--zero 3"),
        ("nanotron", "--zero 1"),
        ("torchtune", "--fsdp"),
    ],
)
def test_shards_are_offered_as_the_trainer_has_them(stack: str, flag: str) -> None:
    """The mesh that a remedy makes is one that the stack's trainer runs."""
    options = {"model": "llama-3.1-8b", "gpus": "8xh100", "stack": stack, "ddp": True}
    (e,) = priced(options, [])
    assert e.remedy is not None
    offered = {change.flag for change in e.changes} | set(e.remedy.flags)
    assert flag in offered
    others = {"--fsdp", "--data-parallel fsdp1", "--zero 3"} - {flag}
    assert not offered & others


@pytest.mark.parametrize(
    ("options", "offered"),
    [
        ({"kernels": "axolotl"}, True),  # of adapters alone
        ({"kernels": "axolotl", "kernel_parts": "loss,qkv"}, False),
        ({"kernels": "liger"}, False),
        ({"kernels": "liger", "kernel_parts": "norm"}, True),
    ],
)
def test_a_loss_in_chunks_is_offered_beside_kernels_without_a_loss(
    options: dict[str, object], offered: bool
) -> None:
    given = {"model": "qwen2.5-0.5b", "method": "lora", "bs": 8, "gpu": ["t4"], **options}
    e = priced(given, [])[0]
    assert any(change.flag == "--loss chunked" for change in e.changes) == offered
