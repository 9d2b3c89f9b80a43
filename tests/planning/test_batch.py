"""`estimate batch`: a line in, a line out; bad lines aside; killed at any byte and taken up, the
output is that of one run."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import napkinmath.planning.batch as batch_module
import napkinmath.planning.batch_lines as batch_lines
import pytest
from cli.runs import run
from napkinmath.base.errors import InputError
from napkinmath.inputs.jobs import priced
from napkinmath.planning.batch import MOST_PIECE, _locked, _pieces, _run_of, run_batch
from napkinmath.planning.batch_lines import MOST_BYTES, BatchLines
from napkinmath.planning.grid import Family

ROOT = Path(__file__).resolve().parents[2]
GOOD = (
    '{"model": "gpt2", "method": "lora", "bs": %d, "ctx": %d, "rank": %d, "gpu": "t4", "id": "%d"}',
    '{"model": "gpt2", "bs": %d, "ctx": %d, "optimizer": "sgd", "grad_accum": 2}',
    '{"model":"gpt2","method":"lora","ctx":%d,"bs":%d}',
)
BAD = (
    "nonsense",
    '{"model": "gpt2", "bs": 0}',
    '{"model": "no such model"}',
    '{"bs": 1}',
    "[1]",
    '{"model": "gpt2", "bs": 1, "bz": 2}',
    '{"model": "gpt2", "rank": 4}',
    "",
    '{"model": "gpt2", "bs": 05}',
    '{"model": "gpt2", "bs": 1.5}',
    '{"model": "gpt2", "quant": "nf4"}',
    '{"a": {',
    "\xff\u2028",
)


def jobs(path: Path, count: int, seed: int = 0) -> None:
    """Lines of three templates with bad ones among them."""
    draw = random.Random(seed)
    lines: list[str] = []
    for number in range(count):
        if draw.random() < 0.06:
            lines.append(draw.choice(BAD))
        else:
            form = draw.choice(GOOD)
            sizes = (draw.randint(1, 40), draw.randint(1, 1000), draw.choice((4, 8, 16)), number)
            lines.append(form % sizes[: form.count("%")])
    path.write_text("\n".join(lines) + draw.choice(("", "\n")), encoding="utf-8")


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_module, "CHUNK_LINES", 64)


@pytest.mark.slow
def test_every_answer_is_that_of_estimate(tmp_path: Path) -> None:
    source, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    jobs(source, 300)
    result = run_batch(str(source), str(out), {})
    lines = source.read_text(encoding="utf-8").split("\n")
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    bad = [json.loads(line) for line in Path(f"{out}.bad.jsonl").read_text().splitlines()]
    assert result.priced == len(answers) and result.bad == len(bad) > 5
    numbers = [answer["line"] for answer in answers]
    assert numbers == sorted(numbers) and set(numbers) | {b["line"] for b in bad} == {
        i for i, line in enumerate(lines, 1) if line.strip()
    }
    for answer in random.Random(1).sample(answers, 40):
        options = json.loads(lines[answer["line"] - 1])
        assert answer.get("id") == options.pop("id", None)
        gpu, one = options.get("gpu"), priced(options, [])[0]
        assert (
            answer["requested_bytes"] == one.peak.nbytes
            and answer["peak_phase"] == next(iter(one.phase_peaks)).value
        )
        assert ("tokens_per_s" in answer) == (gpu is not None)
        if one.time is not None:
            assert answer["tokens_per_s"] == pytest.approx(one.time.tokens_per_s, rel=1e-12)


def test_each_bad_line_has_its_reason(tmp_path: Path) -> None:
    source, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(BAD) + "\n", encoding="utf-8")
    done = run("batch", str(source), "--out", str(out))
    assert done.code == 2 and out.read_text() == ""
    bad = {
        entry["line"]: entry["reason"]
        for entry in map(json.loads, Path(f"{out}.bad.jsonl").read_text().splitlines())
    }
    assert list(bad) == [i for i, line in enumerate(BAD, 1) if line.strip()]
    for line, word in (
        (1, "not valid JSON"),
        (2, "--bs"),
        (3, "no such model"),
        (4, "no model"),
        (5, "object"),
        (6, "bz"),
        (7, "--rank"),
        (9, "not valid JSON"),
        (10, "--bs"),
        (11, "--quant"),
    ):
        assert word in bad[line], bad[line]


def test_flags_hold_where_a_line_says_nothing(tmp_path: Path) -> None:
    source, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    source.write_text(
        '{"bs": 2}\n{"bs": 2, "model": "distilgpt2"}\n{"id": [1], "bs": "2", "ctx": 512.0}\n'
    )
    assert (
        run(
            "batch",
            str(source),
            "--out",
            str(out),
            "--model",
            "gpt2",
            "--ctx",
            "512",
            "--exact",
            "--gpu",
            "t4",
        ).code
        == 0
    )
    first, second, third = map(json.loads, out.read_text().splitlines())
    assert first["requested_bytes"] == third["requested_bytes"] > second[
        "requested_bytes"
    ] and third["id"] == [1]
    assert first["verdict"] == "fits" and first["device_bytes"] > first["allocated_bytes"] > 0


def test_no_line_slips_through_by_what_its_neighbours_hold() -> None:
    """Lines that are JSON only together, keys twice, numbers inside a nested object, an id with an
    escape."""
    lines = [
        b'{"model": "gpt2", "bs": 1}, {"model": "gpt2"}',
        b'{"model": "gpt2", "offload": ["optimizer"',
        b"]}",
        b'{"model": "gpt2", "bs": 1, "bs": 7}',
        (
            b'{"config": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4,'
            b' "intermediate_size": 128, "vocab_size": 99, "num_hidden_layers": 2, "rank": 9},'
            b' "bs": 3}'
        ),
        b'{"model": "gpt2", "bs": 4, "id": "a\\"b"}',
        b'{"model": "gpt2", "bs": 4e1}',
        b'{"model": "gpt2", "bs": -4}',
    ]
    reader = BatchLines({}, [])
    for _ in range(2):  # a template learned must not change the answer
        rejects: dict[int, str] = {}
        groups = list(reader.read(lines, rejects))
        found = {
            place: (b, name)
            for g in groups
            for place, b, name in zip(g.places, g.sizes[0], g.ids, strict=True)
        }
        assert sorted(rejects) == [0, 1, 2, 3, 7] and "'bs' twice" in rejects[3]
        assert found == {4: (3, ""), 5: (4, '"a\\"b"'), 6: (40, "")}


@pytest.mark.parametrize("given", [b"", b'"id": null, '])
def test_lines_that_are_all_unlike_are_not_held_at_once(
    given: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each line is a family with an estimate of its own: a chunk of them took 13 GB."""
    monkeypatch.setattr(batch_lines, "MOST_FAMILIES", 4)
    reader, rejects = BatchLines({}, []), dict[int, str]()
    lines = [b'{%s"arch": "L1 h64 a2 v99", "ctx": %d}' % (given, 8 + i) for i in range(24)]
    lines += [b'{%s"model": "gpt2", "vram": %d}' % (given, 8 + i) for i in range(24)]
    most, places = 0, list[int]()
    for jobs in reader.read(lines, rejects):
        places += jobs.places
        gc.collect()
        most = max(most, sum(isinstance(each, Family) for each in gc.get_objects()))
    assert not rejects and sorted(places) == list(range(len(lines)))
    assert most <= 4 * 4  # in groups, in templates and in the cache, and one that is being made


def whole_run(folder: Path, count: int) -> tuple[Path, bytes, bytes]:
    source, out = folder / "jobs.jsonl", folder / "whole.jsonl"
    jobs(source, count, seed=3)
    run_batch(str(source), str(out), {})
    return source, out.read_bytes(), Path(f"{out}.bad.jsonl").read_bytes()


@pytest.mark.slow
def test_cut_at_random_bytes_and_taken_up_it_is_one_run(tmp_path: Path) -> None:
    source, answers, bad = whole_run(tmp_path, 500)
    draw = random.Random(5)
    ran_again = 0
    for number in range(60):
        out = tmp_path / f"cut{number}.jsonl"
        cut = 0 if number == 0 else draw.randrange(len(answers) + 1)
        later = (
            draw.random() < 0.5
        )  # bad lines are written before the answers of their chunk: cut there, no answer of it is out
        lines = answers[:cut].count(b"\n")
        last = json.loads(answers[:cut].splitlines()[lines - 1])["line"] if lines else 0
        before = [
            entry
            for entry in bad.splitlines(keepends=True)
            if (json.loads(entry)["line"] - 1) // 64 <= (last - 1) // 64
        ]
        kept = b"".join(before) + (
            bad[len(b"".join(before)) :][: draw.randrange(200)] if later else b""
        )
        out.write_bytes(answers[:cut])
        Path(f"{out}.bad.jsonl").write_bytes(kept)
        begin_state(source, out)
        result = run_batch(str(source), str(out), {})
        ran_again += not result.taken_over and last > 64
        assert out.read_bytes() == answers and Path(f"{out}.bad.jsonl").read_bytes() == bad
        assert not os.path.exists(f"{out}.state")
    assert not ran_again


def test_lost_rejections_mean_another_start(tmp_path: Path) -> None:
    source, answers, bad = whole_run(tmp_path, 400)
    out = tmp_path / "lost.jsonl"
    out.write_bytes(answers[: len(answers) * 3 // 4])
    Path(f"{out}.bad.jsonl").write_bytes(bad[:10])
    begin_state(source, out)
    assert run_batch(str(source), str(out), {}).taken_over == 0
    assert out.read_bytes() == answers and Path(f"{out}.bad.jsonl").read_bytes() == bad


def begin_state(source: Path, out: Path) -> None:
    """The state file that a run of this source leaves behind when it is killed."""
    with open(source, "rb") as lines:
        wanted = _run_of(lines, {}, exact=False)
    Path(f"{out}.state").write_text(json.dumps(wanted))


@pytest.mark.slow
def test_killed_for_real_and_taken_up(tmp_path: Path) -> None:
    source, out, once = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl", tmp_path / "once.jsonl"
    with open(source, "w") as file:
        for number in range(150_000):
            file.write(GOOD[0] % (number % 40 + 1, number % 999 + 1, 8, number) + "\n")
    command = [
        sys.executable,
        "-c",
        "from napkinmath.cli.main import entry; entry()",
        "batch",
        str(source),
        "--out",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "estimator")}
    process = subprocess.Popen([*command, str(out)], env=environment, stdout=subprocess.DEVNULL)
    for _ in range(600):
        time.sleep(0.02)
        if out.exists() and out.stat().st_size > 100_000:
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    subprocess.run([*command, str(out)], env=environment, check=True, stdout=subprocess.DEVNULL)
    subprocess.run([*command, str(once)], env=environment, check=True, stdout=subprocess.DEVNULL)
    assert out.read_bytes() == once.read_bytes()


def test_output_of_other_jobs_is_not_touched(tmp_path: Path) -> None:
    source, answers, _ = whole_run(tmp_path, 100)
    whole = tmp_path / "whole.jsonl"
    with pytest.raises(InputError, match="exists"):
        run_batch(str(source), str(whole), {})
    begin_state(source, whole)
    with pytest.raises(InputError, match="other jobs or flags"):
        run_batch(str(source), str(whole), {"gpu": ["t4"]})
    assert whole.read_bytes() == answers
    shutil.copy(whole, tmp_path / "copy.jsonl")
    run_batch(str(source), str(whole), {"gpu": "t4"}, force=True)
    assert whole.read_bytes() != answers


@pytest.mark.parametrize("out", ["jobs.jsonl", "link.jsonl"])
def test_the_jobs_themselves_are_never_written_over(out: str, tmp_path: Path) -> None:
    source = tmp_path / "jobs.jsonl"
    source.write_text('{"model": "gpt2"}\n')
    (tmp_path / "link.jsonl").symlink_to(source)
    with pytest.raises(InputError, match="written over"):
        run_batch(str(source), str(tmp_path / out), {}, force=True)
    assert source.read_text() == '{"model": "gpt2"}\n'


@pytest.mark.parametrize("suffix", [".bad.jsonl", ".state"])
def test_nor_by_what_a_run_writes_beside_its_output(suffix: str, tmp_path: Path) -> None:
    source = tmp_path / f"answers{suffix}"
    source.write_text('{"model": "gpt2"}\n')
    with pytest.raises(InputError, match="written over"):
        run_batch(str(source), str(tmp_path / "answers"), {}, force=True)
    assert source.read_text() == '{"model": "gpt2"}\n' and not (tmp_path / "answers").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """The most memory of a run over eight times the lines is within 30 MB of the shorter run's."""
    code = (
        "import resource, sys; from napkinmath.planning.batch import run_batch;"
        " run_batch(sys.argv[1], sys.argv[2], {});"
        " print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    peaks: list[int] = []
    for count in (40_000, 320_000):
        source = tmp_path / f"{count}.jsonl"
        with open(source, "w") as file:
            file.writelines(GOOD[2] % (i % 997 + 1, i % 37 + 1) + "\n" for i in range(count))
        done = subprocess.run(
            [sys.executable, "-c", code, str(source), f"{source}.out"],
            env={**os.environ, "PYTHONPATH": str(ROOT / "estimator")},
            check=True,
            capture_output=True,
            text=True,
        )
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 30_000, peaks


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("by", ["name", "link"])
def test_a_second_run_on_one_output_is_refused(by: str, force: bool, tmp_path: Path) -> None:
    source, answers, bad = whole_run(tmp_path, 300)
    out, link = tmp_path / "out.jsonl", tmp_path / "link.jsonl"
    link.symlink_to(out)
    second = ["batch", str(source), "--out", str(out if by == "name" else link)]
    codes: list[tuple[int, str]] = []

    def meanwhile(read: int, lines: int) -> None:
        done = run(*second, *(["--force"] if force else []))
        codes.append((done.code, done.err))

    run_batch(str(source), str(out), {}, progress=meanwhile)
    assert len(codes) == 5
    assert all(c == 2 and e.count("\n") == 1 and "another run" in e for c, e in codes), codes
    assert out.read_bytes() == answers and Path(f"{out}.bad.jsonl").read_bytes() == bad
    run_batch(str(source), str(out), {}, force=True)  # the lock ended with the run
    assert out.read_bytes() == answers


def test_jobs_that_changed_are_no_resumed_run(tmp_path: Path) -> None:
    """Of the same path and size: the answers there are of other jobs."""
    source, answers, _ = whole_run(tmp_path, 40)
    out = tmp_path / "half.jsonl"
    out.write_bytes(answers[: len(answers) // 2])
    begin_state(source, out)
    text = source.read_bytes()
    changed = text[:-3] + bytes([text[-3] ^ 1]) + text[-2:]
    assert changed != text and len(changed) == len(text)
    source.write_bytes(changed)
    with pytest.raises(InputError, match="other jobs or flags"):
        run_batch(str(source), str(out), {})


def test_a_chunk_holds_few_bytes_however_long_its_lines(tmp_path: Path) -> None:
    file = tmp_path / "long.jsonl"
    job = b'{"model": "gpt2", "note": "' + b"x" * (1 << 19) + b'"}\n'
    file.write_bytes(job * 40 + b"y" * (5 << 20) + b"\n" + job)
    with open(file, "rb") as lines:
        sizes = [[len(line) for line in piece] for piece in _pieces(lines)]
    assert sum(map(len, sizes)) == 42 and len(sizes) > 1
    assert max(map(sum, sizes)) <= MOST_PIECE + MOST_BYTES + 2
    assert max(map(max, sizes)) <= MOST_BYTES + 2


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/stdin")
def test_a_pipe_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    fifo = tmp_path / "jobs"
    os.mkfifo(fifo)
    for source in (str(fifo), "-"):
        with pytest.raises(InputError, match="no regular file"):
            run_batch(source, str(out), {})
    assert not out.exists()


def test_a_second_run_does_not_read_its_jobs_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _, _ = whole_run(tmp_path, 10)
    out = str(tmp_path / "out.jsonl")

    def hashed(*_: object, **__: object) -> None:
        raise AssertionError("the jobs were read")

    with _locked(out):
        monkeypatch.setattr("napkinmath.planning.batch._run_of", hashed)
        with pytest.raises(InputError, match="another run"):
            run_batch(str(source), out, {})


def test_a_context_changes_nothing_for_images_and_is_no_second_length_of_a_sound(
    tmp_path: Path,
) -> None:
    source, out = tmp_path / "jobs.jsonl", tmp_path / "out.jsonl"
    images = '{"model": "resnet-50", "method": "full", "bs": 16, "gpu": "h100"%s}\n'
    sound = '{"model": "wav2vec2-base-960h", "method": "full", "audio": 10, "ctx": 128}\n'
    source.write_text(images % "" + images % ', "ctx": 128' + sound)
    result = run_batch(str(source), str(out), {})
    first, second = ({**json.loads(line), "line": 0} for line in out.read_text().splitlines())
    assert first == second
    assert (result.priced, result.bad) == (2, 1)
    assert "give one of them" in (tmp_path / "out.jsonl.bad.jsonl").read_text()
    assert any("--ctx has no effect" in note for note in result.notes)
