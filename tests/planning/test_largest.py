"""The largest sizes: what every door prints fits when it is run, and one more does not."""

from __future__ import annotations

from typing import Any

import pytest
from napkinmath.base.units import GIB, MIB
from napkinmath.config.train_config import Batch, TrainConfig
from napkinmath.estimate import Verdict, estimate
from napkinmath.inputs.jobs import priced
from napkinmath.planning import bound_steps, search
from napkinmath.planning.bound_steps import Trial
from napkinmath.planning.search import (
    Reach,
    _Search,
    largest_batch,
    longest_context,
    reached,
    reaches,
)
from napkinmath.report.json_report import as_mapping
from napkinmath.report.largest import largest_sizes, largest_text
from napkinmath.report.words import headline, rate


def holds(options: dict[str, object], reach: Reach) -> bool:
    """Whether the size fits when it is run by its own flag, and one more does not."""

    def fits(size: int) -> bool:
        flag = {"batch": "bs", "context": "ctx"}[reach.what]
        return priced({**options, flag: str(size)}, [])[0].verdict is Verdict.FITS

    below = not reach.size or fits(reach.size)
    return below and (reach.size == reach.most or not fits(reach.size + 1))


def command(line: str) -> dict[str, object]:
    """The options of 'gpt2 --method lora ...' without the model's own flag."""
    words = line.replace("--", "").split()
    options: dict[str, object] = dict(zip(words[1::2], words[2::2], strict=True))
    return {**options, "model": words[0], "gpu": [options.get("gpu", "t4")]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "gpt2 --method full --ctx 512 --vram 4GiB",
        "gpt2 --method lora --ctx 300 --bs 3 --vram 3GiB --attention eager",
        "pythia-70m --method full --vram 2GiB --loss chunked",
        "qwen3-0.6b --method qlora --vram 6GiB --checkpointing full",
        "tinyllama --method lora --vram 4GiB",
        "smollm2-135m --method full --vram 4GiB --workload dpo",
        "smollm2-135m --method full --vram 3GiB --allocator expandable_segments:True",
        "t5-small --method full --vram 3GiB --ctx 256",
        "bert-base --method full --vram 3GiB --ctx 128",
        "gemma-3-270m --method lora --vram 3GiB",
        "vit-base --method full --vram 3GiB --bs 8",
    ],
)
def test_what_is_printed_fits_and_one_more_does_not(line: str) -> None:
    options = command(line)
    found = reaches(priced(options, [])[0])
    assert found and any(reach.size for reach in found)
    assert all(holds(options, reach) for reach in found), found


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [
        "llama-7b --method qlora --bs 4 --gpu a100-80",
        "llama-3.1-8b --method full --gpu h100",
        "llama-3.1-8b --method qlora --gpu rtx4090 --loss chunked",
        "qwen3-30b-a3b --method lora --gpu h200",
        "gemma-2-9b --method lora --gpu a100-80",
        "llama-3.2-1b --method lora --gpu t4",
        "llama-3.1-8b --method qlora --gpu rtx3090 --optimizer paged-adamw-8bit",
        "mistral-7b --method qlora --gpu rtx4090 --kernels liger",
        "qwen2.5-7b --method lora --gpu a100-40 --checkpointing full",
        "llama-3.1-8b --method full --gpu mi300x --checkpointing full --optimizer adafactor",
        "phi-3-mini --method full --gpu a100-80 --precision bf16",
        "falcon-mamba-7b --method lora --gpu h100",
    ],
)
def test_what_is_printed_holds_for_large_models(line: str) -> None:
    options = command(line)
    assert all(holds(options, reach) for reach in reaches(priced(options, [])[0]))


def test_the_longest_sound_is_printed_as_its_flag_takes_it() -> None:
    options: dict[str, object] = {"model": "wav2vec2-base-960h", "audio": "5", "gpu": ["t4"]}
    words = largest_sizes(priced(options, [])[0])[1]
    seconds = words.partition("--audio ")[2].partition(")")[0]
    printed = priced({**options, "audio": seconds}, [])[0]
    longer = (f"{float(seconds) + 0.02 * step:.2f}" for step in range(1, 4))
    after = (priced({**options, "audio": x}, [])[0] for x in longer)
    # the convolutions round, so that 20 ms can give no position more
    one_more = next(e for e in after if e.config.sequence_length > printed.config.sequence_length)
    assert printed.verdict is Verdict.FITS is not one_more.verdict


def test_every_door_says_the_same_limits() -> None:
    options = command("gpt2 --method full --ctx 512 --vram 4GiB")
    e = priced(options, [])[0]
    batch, context = (reach.size for reach in reaches(e))
    assert largest_batch(e).fits == batch and longest_context(e).fits == context
    assert as_mapping(e)["largest"] == {
        "batch": batch,
        "context": context,
        "uneven": [],
        "ended_early": [],
    }
    assert largest_sizes(e) == [
        f"batch up to {batch:,} at 512",
        f"context up to {context:,} at batch 1",
    ]


def test_where_the_allocator_is_uneven_the_lowest_failing_size_bounds() -> None:
    """Sizes that fit below a failing one and again above it: what is found is below it."""

    class Uneven(_Search):
        def _try(self, size: int) -> Trial:
            fits = size <= 90 or 97 <= size <= 100
            return Trial(fits=fits, left=(100 - size or 1) * MIB)

        _slope = 32 * MIB

    e = priced(command("gpt2 --method full --ctx 512 --vram 4GiB"), [])[0]
    search = Uneven(e, "context", None, sure=True)
    search.low, search.high, search._tried = 0, 1025, {}
    found = search.reach()
    assert found.size == 90 and found.uneven
    assert largest_text(e, found) == "context up to 90 at batch 1 (some larger ones fit too)"


@pytest.mark.parametrize("limit", [0, 1, 2, 3, 7, 64, 99, 1000])
def test_the_search_finds_any_limit_in_few_trials(limit: int) -> None:
    class Even(_Search):
        def _try(self, size: int) -> Trial:
            return Trial(fits=size <= limit, left=(limit - size) * GIB + GIB // 3)

        _slope = GIB

    e = priced(command("gpt2 --method full --ctx 512 --vram 4GiB"), [])[0]
    search = Even(e, "context", None, sure=True)
    search.low, search.high, search._tried = 0, 1025, {}
    assert search.reach().size == limit
    assert len(search._tried) < 20 and max(search._tried) <= 1024


def test_where_the_model_ends_before_the_memory_nothing_below_is_tried() -> None:
    e = priced(command("gpt2 --method full --bs 1 --ctx 1024 --vram 24GiB"), [])[0]
    search = _Search(e, "context", None, sure=True)
    assert search.reach().size == 1024
    assert set(search._tried) == {1024}


MOST_REPLAYS = 16  # of both limits; 23 to 26 where a trial moved on by the request that failed


@pytest.mark.parametrize("workload", ["kto", "grpo"])
def test_limits_that_tiles_make_uneven_take_few_replays(
    workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = command(f"llama-2-7b --gpu h100 --method lora --workload {workload} --bs 2")
    e = priced({**options, "ctx": "1024"}, [])[0]
    counts: list[int] = []
    played = bound_steps.replayed

    def counted(*given: Any) -> Any:
        counts.append(1)
        return played(*given)

    monkeypatch.setattr(bound_steps, "replayed", counted)
    batch, context = reached(e)
    assert (batch.size, context.uneven) == (9, False)
    assert 0 < len(counts) <= MOST_REPLAYS


def test_limits_on_several_gpus_hold() -> None:
    """The page asks for them too: each is that of the rank that needs most."""
    options = command("gpt2 --gpus 2xT4 --zero 3 --ctx 512")
    del options["gpu"]
    for reach in reached(priced(options, [])[0]):
        assert reach.size and holds(options, reach), reach


def test_nothing_is_said_without_a_gpu_or_with_several_lengths() -> None:
    assert reaches(estimate("gpt2")) == ()
    assert largest_sizes(estimate("gpt2")) == []
    varied = TrainConfig(batch=Batch(lengths=(10, 20)))
    assert reaches(estimate("gpt2", varied, hardware="T4")) == ()


def test_a_model_of_images_has_no_sequence_length() -> None:
    e = estimate("vit-base", TrainConfig(micro_batch_size=8), hardware="T4")
    assert headline(e)[1] == "batch 8 images"
    assert rate(e).endswith("images/s")
    assert len(largest_sizes(e)) == 1
    assert [reach.what for reach in reached(e)] == ["batch"]
    assert not any("context" in text for text in e.assumptions)


def test_padded_batches_are_said_to_be() -> None:
    e = estimate("gpt2", TrainConfig(batch=Batch(lengths=(100, 5000)), sequence_length=1024))
    assert headline(e)[1] == "batch 1, padded to the longest of each (100-1024 tokens)"


def test_a_search_whose_trials_take_seconds_ends_early_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = command("gpt2 --method full --ctx 512 --vram 4GiB")
    whole = {reach.what: reach for reach in reaches(priced(options, [])[0])}
    assert not any(reach.ended_early for reach in whole.values())
    e = priced(options, [])[0]
    monkeypatch.setattr(search, "MOST_EVENTS", 2 * e.replay.num_events)  # of one trial more
    found = {reach.what: reach for reach in reaches(e)}
    assert sum(reach.ended_early for reach in found.values()) >= 1
    for what, reach in found.items():
        assert reach.size <= whole[what].size < reach.failing
        fits = not reach.size or holds_alone(options, what, reach.size)
        assert fits and reach.ended_early is (
            f"{what} {reach.size:,} or more" in largest_text(e, reach)
        )
    early = [what for what, reach in found.items() if reach.ended_early]
    assert as_mapping(e)["largest"]["ended_early"] == early
    assert largest_batch(e).fits == whole["batch"].size  # who asks for it waits


def holds_alone(options: dict[str, object], what: str, size: int) -> bool:
    """Whether the size fits when it is run by its own flag."""
    flag = {"batch": "bs", "context": "ctx"}[what]
    return priced({**options, flag: str(size)}, [])[0].verdict is Verdict.FITS


def test_a_size_that_does_not_fit_and_was_not_searched_is_no_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "MOST_EVENTS", 0)
    e = priced(command("gpt2 --method full --ctx 512 --bs 16 --vram 4GiB"), [])[0]
    batch = next(reach for reach in reaches(e) if reach.what == "batch")
    assert batch == Reach(what="batch", size=0, most=batch.most, failing=batch.failing)
    assert batch.ended_early and largest_text(e, batch).startswith("batch not found at 512 (below ")
    assert as_mapping(e)["largest"]["batch"] is None


ORDER = (Verdict.DOES_NOT_FIT, Verdict.UNKNOWN, Verdict.FITS)
NEAR = (0.6, 0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1, 1.2, 1.7)  # of what the device holds
MACHINES: tuple[dict[str, Any], ...] = (
    {"gpu": "rtx4090", "allocator": "garbage_collection_threshold:0.6", "bs": 3, "ctx": 700},
    {"gpu": "h100", "method": "qlora", "allocator": "roundup_power2_divisions:4", "ctx": 900},
    {"gpu": "l4", "optimizer": "paged-adamw-8bit", "display": "windows", "bs": 2},
    {"gpu": "a100-80", "method": "lora", "workload": "grpo", "rollout": "vllm", "bs": 48},
    {"gpus": "2xl40s", "data_parallel": "zero3", "workload": "dpo", "ctx": 512},
)


@pytest.mark.slow
@pytest.mark.parametrize("options", MACHINES)
def test_more_memory_never_takes_an_answer_back(options: dict[str, Any]) -> None:
    """Whatever the allocator's pool is rounded to."""
    device = estimate("smollm2-135m", **options).memory.device.value
    found = [
        estimate("smollm2-135m", **options, vram=f"{device * part / 2**30:.3f}GiB").verdict
        for part in NEAR
    ]
    places = [ORDER.index(verdict) for verdict in found]
    assert places == sorted(places)
    assert found[0] is Verdict.DOES_NOT_FIT and found[-1] is Verdict.FITS
