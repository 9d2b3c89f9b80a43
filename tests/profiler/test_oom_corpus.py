"""Out-of-memory messages that people pasted into public issues, each with the figures that a person
reads in it (`oom_corpus.json`); and the logs that such messages come in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from napkinmath.base.errors import InputError
from napkinmath.base.units import GIB, KIB, MIB, format_bytes
from napkinmath_profiler.cli import oom
from napkinmath_profiler.snapshot.oom_message import OutOfMemoryMessage, read_messages

CORPUS = json.loads(Path(__file__).with_name("oom_corpus.json").read_text(encoding="utf-8"))
BYTES = {"bytes": 1, "KiB": KIB, "MiB": MIB, "GiB": GIB, "MB": MIB, "GB": GIB}
NAMES = {
    "requested": "tried",
    "total": "capacity",
    "free": "free",
    "allocated": "allocated",
    "reserved": "reserved",
    "private": "private_pools",
    "process": "this_process",
    "others": "other_processes",
    "limit": "limit",
    "beside": "beside",
}
FOREIGN = {
    "tensorflow": "TensorFlow's",
    "jax": "JAX's",
    "vllm": "vLLM's",
    "bitsandbytes": "bitsandbytes'",
    "nvml": "on a MIG slice",
    "host": "about the host's memory",
}
OURS = [case for case in CORPUS if case["kind"] not in FOREIGN]
OTHERS = [case for case in CORPUS if case["kind"] in FOREIGN]
PLAIN = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total"
    " capacity of 80.00 GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process"
    " has 79.00 GiB memory in use. Of the allocated memory 70.00 GiB is allocated by PyTorch, and"
    " 8.00 GiB is reserved by PyTorch but unallocated."
)


def size(text: str) -> int:
    """Bytes of '1.50 GiB + 3.00 MiB'."""
    parts = (part.split() for part in text.split("+"))
    return sum(round(float(number) * BYTES[unit]) for number, unit in parts)


def name_of(case: dict[str, Any]) -> str:
    return case["url"].split("/", 3)[-1]


@pytest.mark.parametrize("case", OURS, ids=name_of)
def test_a_real_message_is_read_as_a_person_reads_it(case: dict[str, Any]) -> None:
    (read,) = read_messages(case["message"])
    expected = dict(case["expect"])
    rank = expected.pop("rank", None)
    assert read.kind == case["kind"] and read.rank == (None if rank is None else int(rank))
    for name, field in NAMES.items():
        nothing = 0 if name == "others" else None
        wanted = size(expected[name]) if name in expected else nothing
        assert getattr(read, field) == wanted, name
    assert oom.explain(read)[0].startswith("asked for")


@pytest.mark.parametrize("case", OTHERS, ids=name_of)
def test_a_message_of_another_program_is_named(case: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=FOREIGN[case["kind"]]):
        read_messages(case["message"])


def test_the_corpus_is_of_many_kinds_and_years() -> None:
    assert len(OURS) >= 60
    assert {case["kind"] for case in OURS} == {"cuda", "cuda-async", "hip", "xpu", "mps", "npu"}
    years = {case["date"][:4] for case in OURS if "date" in case}
    assert years >= {str(year) for year in range(2019, 2027)}


def in_container(text: str) -> str:
    return text.replace("Including non-PyTorch memory, this process", "Process 17")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "\x1b[31m\x1b[1m" + text.replace("GiB", "GiB\x1b[0m"),
        lambda text: json.dumps({"log": f"step 3\n{text}\n"}),
        lambda text: json.dumps({"log": "\x1b[31m" + text + "\x1b[0m"}),
        lambda text: " 3%|▎  | 3/100 [00:02<01:04, 1.5it/s]\r" + text,
        lambda text: f"2026-01-12 10:20:36,123 ERROR [core.py:396] {text}",
        lambda text: f"(EngineCore pid=518) ERROR 07-29 21:48:54 [core.py:1141] {text}",
        lambda text: text.replace(". ", ".\n"),
        lambda text: text.replace(". ", ".\n2026-01-12T10:20:36.123Z [worker] "),
        lambda text: text.replace(" memory", "\n> memory"),
        in_container,
    ],
)
def test_what_a_log_does_to_a_message_changes_no_figure(change: Any) -> None:
    assert read_messages(change(PLAIN)) == read_messages(PLAIN)


def test_each_rank_of_a_log_is_read_once() -> None:
    lines = []
    for rank in (5, 0, 3):
        frame = f'[rank{rank}]:   File "train.py", line 3, in main\n'
        lines.append(f"{frame}[rank{rank}]: {PLAIN.replace('GPU 3', f'GPU {rank}')}")
    log = "\n".join([*lines, *lines])
    assert [(read.rank, read.gpu) for read in read_messages(log)] == [(0, 0), (3, 3), (5, 5)]


def test_the_runs_own_process_is_not_another_one() -> None:
    (read,) = read_messages(in_container(PLAIN))
    assert (read.this_process, read.other_processes) == (79 * GIB, 0)
    assert "another process" not in "\n".join(oom.explain(read))
    with_another = in_container(PLAIN).replace(
        "Of the", "Process 4 has 512.00 MiB memory in use. Of the"
    )
    (read,) = read_messages(with_another.replace("1.00 GiB is free", "300.00 MiB is free"))
    assert (read.this_process, read.other_processes) == (79 * GIB, 512 * MIB)


def test_a_figure_that_the_driver_does_not_have_is_none() -> None:
    text = PLAIN.replace("has 79.00 GiB", "has 17179869184.00 GiB")
    for form in (text, in_container(text)):
        (read,) = read_messages(form)
        assert (read.this_process, read.other_processes) == (None, 0)


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("1.00 GiB is free", "81.00 GiB is free", "free 81.0 GiB"),
        ("this process has 79.00", "this process has 79.80", "in use and free 80.8 GiB"),
        ("Of the", "Process 4 has 9.00 GiB memory in use. Of the", "in use and free 89.0 GiB"),
    ],
)
def test_figures_that_contradict_one_another_are_refused(
    before: str, after: str, says: str
) -> None:
    with pytest.raises(InputError, match=f"contradicts itself: {says} is more than the capacity"):
        read_messages(PLAIN.replace(before, after))


def test_more_allocated_than_reserved_is_refused() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 1.00 GiB (GPU 0; 15.00 GiB total capacity; 9.00 GiB"
        " already allocated; 1.00 GiB free; 8.00 GiB reserved in total by PyTorch)"
    )
    with pytest.raises(InputError, match=r"allocated 9\.00 GiB is more than PyTorch reserved"):
        read_messages(text)


def verdict(read: OutOfMemoryMessage) -> str:
    return oom.explain(read)[-1]


def test_verdicts_say_what_the_figures_say() -> None:
    def of(before: str, after: str) -> str:
        return verdict(read_messages(PLAIN.replace(before, after))[0])

    assert "fragmentation: enough is cached" in verdict(read_messages(PLAIN)[0])
    assert "fragmentation: cached and free are enough" in of("8.00 GiB is res", "1.50 GiB is res")
    assert "refused one piece" in of("allocate 2.00 GiB", "allocate 2.00 MiB")
    spilled = next(case for case in OURS if case["url"].endswith("iPASSR/issues/9"))
    assert "host's memory" in "\n".join(oom.explain(read_messages(spilled["message"])[0]))
    apple = next(case for case in OURS if case["url"].endswith("ComfyUI/issues/8984"))
    pools = [case for case in OURS if "private" in case["expect"]]
    assert len(pools) >= 2
    for case in pools:
        said = oom.explain(read_messages(case["message"])[0])
        kept = format_bytes(size(case["expect"]["private"]))
        assert f"keep for themselves {kept}" in "\n".join(said)
        if size(case["expect"]["private"]) >= size(case["expect"]["requested"]):
            assert "capture fewer or smaller CUDA graphs" in said[-1]
    assert "3.40 GiB too little" in verdict(read_messages(apple["message"])[0])
    ascend = next(case for case in OURS if case["url"].endswith("vllm-ascend/issues/5020"))
    (read,) = read_messages(ascend["message"].replace("58.73", "58.20"))
    assert "PYTORCH_NPU_ALLOC_CONF" in verdict(read)


@pytest.mark.parametrize("cut", ["Tried to allocate", "Tried to allocate 2."])
def test_a_message_cut_before_its_size_is_not_taken_for_the_hosts(cut: str) -> None:
    with pytest.raises(InputError, match="paste the whole error line"):
        read_messages(PLAIN.partition(cut)[0] + cut)


@pytest.mark.parametrize(
    "text",
    [
        "slurmstepd: error: Detected 1 oom_kill event in StepId=123.batch.",
        "Reason: OOMKilled",
        "[12.5] Out of memory: Killed process 4321 (python) total-vm:92345678kB",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8.00 GiB",
    ],
)
def test_a_process_that_the_system_ended_lacked_memory_of_the_host(text: str) -> None:
    with pytest.raises(InputError, match="about the host's memory"):
        read_messages(text)


def test_a_size_copied_from_a_page_has_its_blank() -> None:
    for blank in ("\xa0", "&nbsp;"):
        assert read_messages(PLAIN.replace(" GiB", f"{blank}GiB")) == read_messages(PLAIN)


def test_a_gpu_without_memory_is_refused() -> None:
    text = (
        "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 0 bytes of"
        " which 0 bytes is free."
    )
    with pytest.raises(InputError, match="capacity of 0 bytes"):
        read_messages(text)
