"""Flags and keywords as trainers write them mean the same here, or say what to write."""

from __future__ import annotations

import pytest
from cli.runs import run
from napkinmath import estimate
from napkinmath.base.errors import InputError
from napkinmath.cli.flags import SHARED
from napkinmath.cli.parser import Parser
from napkinmath.inputs.job_file import own_options
from napkinmath.inputs.option_table import BY_KEY, SHORTHANDS
from napkinmath.inputs.option_table import trainers_words as words

PARSER = Parser("estimate", "", SHARED)
SAME = [
    ("--lora --lora_r 8 --lora-alpha 16", "--lora --rank 8 --alpha 16"),
    ("--per_device_train_batch_size=2 --gas 4", "--bs 2 --grad-accum 4"),
    ("--max-seq-length 512 --optim adamw_8bit", "--ctx 512 --optimizer adamw_8bit"),
    ("--load_in_4bit --lora", "--quant nf4 --lora"),
    ("--load_in_4bit False --lora", "--lora"),
    ("--bf16 True --use_liger_kernel", "--precision bf16-autocast --kernels liger"),
    ("--gradient_checkpointing --packing true", "--checkpointing full --packing"),
    ("--gradient_checkpointing True --packing false", "--checkpointing True --no-packing"),
    ("--no-compile false", "--compile"),
    ("--reference off --compile yes", "--no-reference --compile"),
    ("--zero3 --tensor-model-parallel-size 2", "--zero 3 --tp 2"),
    ("--gc --vram-gb 24", "--checkpointing full --vram 24"),
    ("--no-gradient-checkpointing --bs 2", "--checkpointing none --bs 2"),
    ("--flash-attn --ctx 64", "--attention flash --ctx 64"),
]


@pytest.mark.parametrize(("theirs", "ours"), SAME)
def test_a_trainer_s_words_are_read_as_ours(theirs: str, ours: str) -> None:
    assert PARSER.parse(theirs.split()) == PARSER.parse(ours.split())


def test_every_word_leads_to_a_flag_and_hides_none() -> None:
    own = {name for _, rows in SHARED for row in rows for name in row[0]}
    targets = [*words.SAME, *(written.split()[0] for written in words.ALONE.values())]
    assert set(targets) <= own
    theirs = [*words._OURS, *words.ALONE, *words.UNSURE]
    assert len(theirs) == len(set(theirs))
    assert not {f"--{word}" for word in theirs} & own
    for flag in targets:
        key = flag.removeprefix("--").replace("-", "_")
        assert key in BY_KEY or key in SHORTHANDS


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--sp 2", "--cp N --cp-kind ulysses"),
        ("--learning-rate 1e-4", "neither memory nor time"),
        ("--mixed-precision bf16", "bf16-autocast"),
        ("--config x.yaml", "`estimate FILE`"),
        ("--params 7b", "write --model NAME"),
        ("--inference", "`estimate generate`"),
        ("--lora-q 8", "is unknown; did you mean"),
    ],
)
def test_what_may_mean_two_things_is_refused_with_the_way_out(typed: str, said: str) -> None:
    done = run("--model", "gpt2", *typed.split())
    assert done.code == 2
    assert said in done.err


def test_keywords_of_trainers() -> None:
    theirs = estimate(
        "llama-3.2-1b",
        method="lora",
        lora_r=8,
        per_device_train_batch_size=2,
        max_seq_length=256,
        load_in_4bit=True,
        bf16=True,
        use_liger_kernel=False,
    )
    ours = estimate(
        "llama-3.2-1b", method="qlora", rank=8, bs=2, ctx=256, precision="bf16-autocast"
    )
    assert theirs.config == ours.config
    with pytest.raises(InputError, match="given twice, again as lora_r"):
        estimate("llama-3.2-1b", method="lora", rank=8, lora_r=4)


@pytest.mark.parametrize("key", ["lora_dropout", "lora-r", "max_seq_length", "use_lora", "bf16"])
def test_a_key_of_our_own_file_is_read_as_the_keyword_is(key: str) -> None:
    value = {"lora_dropout": 0.1, "lora-r": 8, "max_seq_length": 64}.get(key, True)
    name, ours = words.as_option(key, value)
    assert own_options({"model": "gpt2", key: value}, "job.yaml") == {"model": "gpt2", name: ours}
    assert name in BY_KEY


def test_a_file_may_be_all_in_trainers_words_and_says_nothing_twice() -> None:
    said = {"model": "gpt2", "use_lora": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.1}
    assert set(own_options(said, "job.yaml")) == {"model", "method", "rank", "alpha", "dropout"}
    with pytest.raises(InputError, match="gives rank twice"):
        own_options({**said, "rank": 8}, "job.yaml")
    with pytest.raises(InputError, match="'lr': a rate changes neither memory nor time"):
        own_options({**said, "lr": 1e-4}, "job.yaml")
    with pytest.raises(InputError, match="of no tool whose files are read"):
        own_options({"output_dir": "x", "data": "y", "seed": 1, "lora_r": 8}, "job.yaml")
