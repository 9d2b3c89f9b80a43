"""The GPU campaign tried out on a CPU: every stage runs, a run goes on where one stopped, the
report reads what was written."""

from __future__ import annotations

import errno
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import campaign
import pytest
import torch
from benchmarks.killed_campaign import WORK, raising, recorded_work
from campaign_parts import accuracy, measured
from campaign_parts.cases import all_cases, tiny_cases, tiny_config
from campaign_parts.foreign_rows import flags_of, is_foreign, translated
from campaign_parts.histories import read_histories, replayed
from campaign_parts.kernel_goals import is_finished, kernel_lines
from campaign_parts.ledger import Row, Rows, append_row, compressed_rows, read_rows
from kernel_rows.archive import Archive
from napkinmath.inputs.options import train_config
from napkinmath_profiler.tracing.trace_options import options_from

STAGES = "ceilings,watching,steps,predictions"


def as_program(script: str, *arguments: str) -> str:
    """Run a script of the campaign; what it said where it failed."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, str(Path(campaign.__file__).with_name(script)), *arguments]
    run = subprocess.run(command, env=clean, capture_output=True, text=True, check=False)
    return run.stderr or "failed" if run.returncode else ""


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after one case, its last line cut off, and gone on with. The first one is a
    program of its own, as `make gpu` starts it: with no path but its own."""
    out = tmp_path_factory.mktemp("campaign")
    command = ["--dry-run", "--out", str(out), "--only", "steps", "--cases", "gpt2"]
    command += ["--archive", str(out.with_name("rows.tar.gz"))]
    assert as_program("campaign.py", *command) == ""
    before = (out / "steps.jsonl").read_text()
    with open(out / "steps.jsonl", "a") as file:
        file.write('{"case": "cut off')
    assert campaign.main(["--dry-run", "--out", str(out), "--only", STAGES]) == 0
    assert (out / "steps.jsonl").read_text().startswith(before)
    return out


def test_every_case_is_measured_once_and_marked_as_a_trial(dry_run: Path) -> None:
    rows = read_rows(dry_run / "steps.jsonl")
    assert sorted(row["case"] for row in rows) == sorted(case.name for case in tiny_cases())
    assert {row["status"] for row in rows} == {"measured"} and all(row["trial"] for row in rows)
    for row in rows:
        assert row["memory"]["requested"] <= row["memory"]["allocated"] <= row["memory"]["reserved"]
        assert row["step"]["median_s"] > 0 and row["phases"]["backward"]["median_s"] > 0
        assert sum(row["roles_at_peak"].values()) == row["memory"]["requested"]
    assert json.loads((dry_run / "environment.json").read_text())["trial"] is True


def test_the_archive_is_the_folder_at_its_end(dry_run: Path) -> None:
    with tarfile.open(dry_run.with_name("rows.tar.gz")) as archive:
        names = archive.getnames()
        rows = archive.extractfile("steps.jsonl")
        assert rows is not None
        first = rows.read()
    assert {"environment.json", "stages.jsonl", "report.md"} <= set(names)
    # the run after it, without an archive, went on in the same folder
    assert first and (dry_run / "steps.jsonl").read_bytes().startswith(first)


def test_a_killed_run_leaves_a_whole_archive(tmp_path: Path) -> None:
    """What stood before is there until the new file is whole."""
    folder, file = tmp_path / "rows", tmp_path / "rows.tar.gz"
    folder.mkdir()
    (folder / "steps.jsonl").write_text("one\n")
    archive = Archive(folder, file)
    archive.keep()
    (folder / "steps.jsonl").write_text("two\n")
    archive.keep()  # a moment later: nothing is written
    with mock.patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        archive.keep(at_once=True)
    with tarfile.open(file) as found:
        assert found.getnames() == ["steps.jsonl"]
        kept = found.extractfile("steps.jsonl")
        assert kept is not None and kept.read() == b"one\n"


def test_the_trace_gives_what_was_measured(dry_run: Path) -> None:
    """On a CPU, where the trace makes the CPU's choices, to the byte; the estimate is of a GPU."""
    for result in accuracy.results_of(dry_run):
        assert result.predicted["traced"]["allocated"] == result.measured["memory"]["allocated"], (
            result.measured["case"]
        )
        assert (
            result.predicted["traced"]["requested_by_phase"]
            == result.measured["requested_by_phase"]
        )
        assert (
            abs(
                result.predicted["analytic"]["allocated"] / result.measured["memory"]["allocated"]
                - 1
            )
            < 0.1
        )


def test_the_kept_history_replays_to_the_measured_figures(dry_run: Path) -> None:
    measured = {row["case"]: row for row in read_rows(dry_run / "steps.jsonl")}
    histories = list(read_histories(dry_run))
    assert [history.case for history in histories] == [
        case.name for case in tiny_cases() if case.history
    ]
    for history in histories:
        found, memory = replayed(history), measured[history.case]["memory"]
        assert (found.allocated, found.reserved) == (memory["allocated"], memory["reserved"])


def test_the_report_says_that_nothing_was_measured_on_a_gpu(dry_run: Path) -> None:
    text = (dry_run / "report.md").read_text()
    assert "say nothing about a GPU" in text
    assert f"| allocated | traced | {len(tiny_cases())} | 0.00% | 0.00% |" in text
    assert "| step time | calibrated | 0 | not measured |" in text
    assert all(
        (dry_run / name).read_bytes().startswith(b"\x89PNG")
        for name in ("accuracy.png", "histories.png")
    )
    assert as_program("report.py", str(dry_run)) == ""


def test_a_spent_budget_ends_the_run_and_names_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps stop being begun, no prediction is made after the deadline, and a machine without
    matplotlib gets its tables."""
    monkeypatch.setattr(accuracy, "find_spec", lambda _: None)
    assert (
        campaign.main(
            ["--dry-run", "--out", str(tmp_path), "--only", "steps", "--cases", "tinyllama"]
        )
        == 0
    )
    assert (
        campaign.main(
            ["--dry-run", "--out", str(tmp_path), "--only", "steps,predictions", "--budget", "0"]
        )
        == 0
    )
    assert (
        len(read_rows(tmp_path / "steps.jsonl")) == 1
        and not (tmp_path / "predictions.jsonl").exists()
    )
    text = (tmp_path / "report.md").read_text()
    assert "1 cases have no predictions yet" in text and "No pictures: matplotlib" in text
    assert not (tmp_path / "accuracy.png").exists()


def test_programs_of_their_own_end_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs is ended while there is time to say so: where a command may take 600 s, a run
    of 540 must not."""
    limits: list[float] = []
    monkeypatch.setattr(
        campaign, "run_command", lambda _command, limit_s, _log: limits.append(limit_s) or "done"
    )
    monkeypatch.setattr(campaign, "last_line", lambda _: "hung")
    for left in (500.0, 10.0, -5.0):
        run = campaign.Campaign(
            tmp_path, torch.device("cpu"), time.monotonic() + left, 540.0, tiny=False
        )
        assert not campaign.attempt(run, "calibration", campaign.calibrate)
        assert limits[-1] <= max(0.0, left) + campaign.GRACE_S
    assert max(limits) > 100  # with time left they have more than their share


def test_a_second_run_measures_nothing_again(dry_run: Path) -> None:
    before = {
        name: (dry_run / name).read_bytes()
        for name in ("steps.jsonl", "predictions.jsonl", "ceilings.json", "watch.json")
    }
    assert campaign.main(["--dry-run", "--out", str(dry_run), "--only", STAGES]) == 0
    assert before == {name: (dry_run / name).read_bytes() for name in before}


FAULTS = {
    "kill": None,  # in a program of its own
    "exception": RuntimeError("no kernel image is available"),
    "out of memory": torch.OutOfMemoryError("CUDA out of memory"),
}


@pytest.fixture
def as_recorded(dry_run: Path, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Each stage's work answered from the dry run's files; how often each did it."""
    done: Counter[str] = Counter()
    for stage, answer in recorded_work(dry_run, done).items():
        monkeypatch.setattr(campaign, WORK[stage], answer)
    monkeypatch.setattr(accuracy, "find_spec", lambda _: None)  # no pictures each time
    return done


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("stage", WORK)
def test_a_fault_in_any_stage_costs_no_other(
    stage: str,
    fault: str,
    dry_run: Path,
    tmp_path: Path,
    as_recorded: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was measured is on the disk, the report says what is missing and why, and the same
    command completes the folder without doing anything twice."""
    command = ["--dry-run", "--out", str(tmp_path)]
    if error := FAULTS[fault]:
        with monkeypatch.context() as patched:
            patched.setattr(campaign, WORK[stage], raising(error))
            campaign.main(command)
    else:
        program = str(Path(__file__).with_name("killed_campaign.py"))
        ended = subprocess.run(
            [sys.executable, program, str(dry_run), str(tmp_path), stage],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert ended.returncode == -signal.SIGKILL
        accuracy.write_report(tmp_path, tmp_path, pictures=False, made=False)
    states = {row["case"]: row["status"] for row in read_rows(tmp_path / "stages.jsonl")}
    others = [name for name, status in states.items() if status == "done"]
    before = list(WORK)[: list(WORK).index(stage)]
    assert others == (before if fault == "kill" else [name for name in WORK if name != stage])
    report = (tmp_path / "report.md").read_text()
    said = {"kill": "was cut off", "exception": "no kernel image", "out of memory": "out of mem"}
    (line,) = [line for line in report.splitlines() if line.startswith(f"- stage {stage} ")]
    assert said[fault] in line
    first = Counter(as_recorded)
    assert campaign.main(command) == 0
    assert {row["case"]: row["status"] for row in read_rows(tmp_path / "stages.jsonl")} == (
        dict.fromkeys(WORK, "done")
    )
    again = as_recorded - first
    if fault != "kill":
        assert set(again) == {stage} | ({"predictions"} if stage == "steps" else set())
    cases = [row["case"] for row in read_rows(tmp_path / "predictions.jsonl")]
    assert sorted(cases) == sorted(case.name for case in tiny_cases())
    assert "- stage " not in (tmp_path / "report.md").read_text()


def test_a_stage_that_breaks_the_gpus_context_leaves_the_rest_to_a_new_process(
    tmp_path: Path, as_recorded: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign, "watch_overhead", raising(RuntimeError("no kernel image")))
    monkeypatch.setattr(campaign, "is_lost", lambda _: True)
    started: list[list[str]] = []
    monkeypatch.setattr(
        campaign, "go_on_anew", lambda run, names, *_: started.append(names) or "steps: done"
    )
    campaign.main(["--dry-run", "--out", str(tmp_path)])
    assert started == [("steps", "predictions")] and not as_recorded["steps"]


def test_what_is_left_out_gives_its_time_to_the_rest(tmp_path: Path) -> None:
    def share(*names: str) -> float:
        run = campaign.Campaign(tmp_path, torch.device("cpu"), 0.0, 540.0, False, names)
        return run.share_s("steps")

    assert share("steps") == 540.0 and share("ceilings") == 0.0
    assert 540.0 > share("ceilings", "steps") > share(*campaign.SHARES) > 300.0
    assert sum(campaign.SHARES.values()) == pytest.approx(1.0)


def test_a_stage_that_does_not_exist_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        campaign.main(["--dry-run", "--out", str(tmp_path), "--only", "stepz"])
    assert exit.value.code == 2 and "no stage stepz" in capsys.readouterr().err


def test_a_case_that_breaks_the_gpus_context_is_left_to_a_new_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an illegal access every call fails: the cases left are not each written down as failed,
    and the culprit is not tried again."""

    class CompilationError(Exception):
        """A compiler's error is no RuntimeError."""

    def fail(*_: object) -> None:
        raise CompilationError("an illegal memory access was encountered")

    monkeypatch.setattr(measured, "measure_step", fail)
    monkeypatch.setattr(measured, "is_lost", lambda _: True)
    started: list[list[str]] = []
    monkeypatch.setattr(
        campaign, "run_command", lambda command, *_: started.append(command) or "steps: done"
    )
    campaign.main(["--dry-run", "--out", str(tmp_path), "--only", "steps"])
    rows = read_rows(tmp_path / "steps.jsonl")
    assert [row["status"] for row in rows] == [measured.LOST] and "CompilationError" in rows[0][
        "reason"
    ]
    assert len(started) == 1 and "steps" in started[0] and campaign.RETRIED == ("failed",)


def test_a_gpu_that_answers_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    assert not measured.is_lost(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert measured.is_lost(torch.device("cuda:0"))


def test_kernels_stand_in_the_report_and_are_begun_again_where_they_were_stopped(
    tmp_path: Path,
) -> None:
    rows: list[Row] = [
        {
            "op": "rope",
            "shape": "check",
            "contestant": "napkinmath",
            "status": "wrong",
            "relative_error": 0.5,
        },
        {
            "op": "swiglu",
            "shape": "8x8",
            "contestant": "goal",
            "goal": ">= 0.80 of copy bandwidth",
            "status": "met",
            "value": 0.91,
        },
        {
            "op": "swiglu",
            "shape": "8x8",
            "contestant": "goal",
            "goal": ">= 1.0x Liger",
            "status": "not measured",
            "reason": "liger did not run",
        },
    ]
    path = tmp_path / "kernels.jsonl"
    path.write_text("".join(json.dumps({"device": "Some GPU", **row}) + "\n" for row in rows))
    text = "\n".join(kernel_lines(tmp_path))
    assert "Some GPU" in text and "rope check (napkinmath): wrong relative error 0.5" in text
    assert (
        "| swiglu | 8x8 | >= 0.80 of copy bandwidth | 0.910 | met |" in text
        and "not measured: liger did not run" in text
    )
    assert not is_finished(path)
    path.write_text(path.read_text() + json.dumps({"op": "finished", "status": "info"}) + "\n")
    assert is_finished(path) and kernel_lines(tmp_path / "elsewhere") == []


def test_a_full_disk_ends_the_run_with_what_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second row finds no room: the first is whole, the message says what to do, and the same
    command goes on."""
    add = Rows.add

    def full(rows: Rows, row: Row) -> Row:
        if rows.rows:
            with open(rows.path, "a") as file:
                file.write('{"case": "half a')
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return add(rows, row)

    monkeypatch.setattr(Rows, "add", full)
    command = ["--dry-run", "--out", str(tmp_path), "--only", "steps", "--cases", "l"]
    assert campaign.main(command) == 1
    assert "the disk is full" in capsys.readouterr().err
    first = [row["case"] for row in read_rows(tmp_path / "steps.jsonl")]
    assert len(first) == 1
    monkeypatch.setattr(Rows, "add", add)
    assert campaign.main(command) == 0
    names = [row["case"] for row in read_rows(tmp_path / "steps.jsonl")]
    assert names[0] == first[0] and len(names) == len(set(names)) == sum(
        "l" in case.name for case in tiny_cases()
    )


def test_a_history_cut_off_costs_no_other(tmp_path: Path) -> None:
    """Killed while a history was written: what was there before and what a later run appends are
    read."""
    path = tmp_path / "events.jsonl.gz"
    for name in "abc":
        append_row(path, {"case": name, "filler": list(range(5000))})
        if name == "b":
            path.write_bytes(path.read_bytes()[:-4000])
    assert [row["case"] for row in compressed_rows(path)] == ["a", "c"]
    assert list(compressed_rows(tmp_path / "none.gz")) == []


def test_doubtful_cases_are_named(tmp_path: Path) -> None:
    wide = {**FOREIGN, "whole_step": {"median_s": 0.25, "p10_s": 0.24, "p90_s": 0.37, "runs": 5}}
    (tmp_path / "steps.jsonl").write_text(
        json.dumps(FOREIGN) + "\n" + json.dumps({**wide, "batch": 1}) + "\n"
    )
    lines = accuracy.doubtful_lines(tmp_path)
    assert (
        lines[0].startswith("1 measured case")
        and "batch=1" in lines[1]
        and "spread of 52%" in lines[1]
    )


def test_the_campaign_covers_what_it_should() -> None:
    cases = all_cases()
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) >= 40
    assert len({case.model for case in cases}) == 6
    assert [case.weight for case in cases] == sorted(case.weight for case in cases)
    assert sum(case.history for case in cases) >= 12
    flags = [case.flags for case in cases]
    assert {f["method"] for f in flags} == {"full", "lora", "qlora"}
    assert max(f["ctx"] for f in flags) == 32768
    for key, values in (
        ("attention", {"eager", "sdpa"}),
        ("checkpointing", {"none", "full"}),
        ("kernels", {"napkinmath"}),
        ("precision", {"bf16", "bf16-amp"}),
    ):
        assert values <= {f.get(key) for f in flags}
    for found in flags:
        options_from(train_config(found))  # each is a step that can be run and traced
    assert all(tiny_config(case)["model_type"] for case in tiny_cases())


def test_no_gpu_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert campaign.main(["--out", str(tmp_path)]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_rows_are_read_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"case": "a", "status": "failed"}\n{"case": "b"')
    rows = Rows(path)
    assert rows.names() == {"a"} and rows.names("measured") == set()
    rows.add({"case": "b", "status": "measured"})
    assert Rows(path).names("measured") == {"b"}


ADDS_ROWS = """
import sys
from pathlib import Path
from campaign_parts.ledger import Rows, append_row, compressed_rows
path, cases = Path(sys.argv[1]), int(sys.argv[2])
rows, packed = Rows(path), path.with_suffix(".gz")
kept = {row["case"] for row in compressed_rows(packed)}
for number in range(cases):
    row = {"case": str(number), "status": "measured", "of": "x" * (number * 7919 % 90001)}
    if row["case"] not in kept:
        append_row(packed, row)
    if row["case"] not in rows.names("measured"):
        rows.add(row)
"""


@pytest.mark.slow
def test_kills_at_random_moments_lose_no_row_and_double_none(tmp_path: Path) -> None:
    """What goes on where an earlier run was killed ends with each case once, whole."""
    rng, path, cases, kills = random.Random(14), tmp_path / "rows.jsonl", 250, 0
    argv = [sys.executable, "-c", ADDS_ROWS, str(path), str(cases)]
    folder = Path(campaign.__file__).parent
    paths = os.pathsep.join([str(folder), str(folder.parents[1] / "estimator")])
    path.touch()
    while True:
        upto = path.stat().st_size + rng.randrange(1, 1_000_000)
        process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": paths})
        while process.poll() is None and path.stat().st_size < upto:
            time.sleep(0)
        if process.poll() is not None:
            assert process.returncode == 0
            break
        process.kill()
        process.wait()
        kills += 1
    assert kills >= 5
    for found in (Rows(path).rows, list(compressed_rows(path.with_suffix(".gz")))):
        assert [row["case"] for row in found] == [str(number) for number in range(cases)]
        assert all(len(row["of"]) == int(row["case"]) * 7919 % 90001 for row in found)


PHASE = {
    "peak_allocated": 3 << 30,
    "peak_reserved": 4 << 30,
    "device_used": 5 << 30,
    "seconds": 0.1,
}
FOREIGN = {
    "model": "tinyllama",
    "layers": 22,
    "method": "lora",
    "checkpointing": True,
    "attention": "sdpa",
    "batch": 2,
    "context": 1024,
    "optimizer": "foreach",
    "autocast": False,
    "train": True,
    "dropout": 0.0,
    "reentrant": False,
    "device": "cuda",
    "small": False,
    "before": {"allocated": 1 << 20, "reserved": 2 << 20},
    "step0": [{"phase": p, **PHASE} for p in ("forward", "backward", "step", "zero_grad")],
    "step1": [
        {"phase": p, **PHASE, "peak_allocated": (3 << 30) + 512}
        for p in ("forward", "backward", "step", "zero_grad")
    ],
    "whole_step": {"median_s": 0.25, "p10_s": 0.24, "p90_s": 0.27, "runs": 5},
    "tokens_per_s": 8192.0,
}


def test_rows_of_the_other_recorder_are_read() -> None:
    assert is_foreign(FOREIGN) and not is_foreign(
        {"case": "x", "options": {}, "status": "measured"}
    )
    row = translated(FOREIGN)
    assert row["status"] == "measured" and row["memory"]["allocated"] == (3 << 30) + 512 - (1 << 20)
    config = train_config(row["options"])
    assert (
        config.adapter is not None
        and config.adapter.targets == ("q_proj", "v_proj")
        and config.micro_batch_size == 2
    )
    assert translated({**FOREIGN, "oom": "CUDA out of memory"})["status"] == "out of memory"
    quantized = train_config(
        flags_of(
            {
                **FOREIGN,
                "method": "qlora-kbit",
                "train": False,
                "autocast": True,
                "quant": "fp4",
                "double_quant": False,
            }
        )
    )
    assert (
        quantized.quantization is not None
        and quantized.quantization.kbit_preparation
        and not quantized.quantization.double_quant
    )
    assert quantized.precision.value == "bf16-autocast" and not quantized.training_mode


def test_the_other_recorders_folder_gives_a_report(tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(
        json.dumps({"gpu": "NVIDIA H200", "versions": {"torch": "2.11.0"}})
    )
    (tmp_path / "steps.jsonl").write_text(json.dumps(FOREIGN) + "\n")
    found = accuracy.write_report(tmp_path, tmp_path / "out", pictures=False, traced=False)
    assert len(found) == 1 and found[0].predicted["analytic"]["step_s"] > 0
    error = (
        found[0].predicted["analytic"]["allocated"] / found[0].measured["memory"]["allocated"] - 1
    )
    assert f"{error:+.1%}" in (tmp_path / "out" / "report.md").read_text()


def test_what_is_not_installed_is_said_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "OPTIONAL_PACKAGES", {"json": "nothing", "no_such": "no goals"})
    assert campaign.main(["--dry-run", "--out", str(tmp_path), "--only", "ceilings"]) == 1
    assert "no_such is not installed: no goals" in capsys.readouterr().out.splitlines()[0]
    kept = json.loads((tmp_path / "environment.json").read_text())["missing"]
    assert kept == {"no_such": "no goals"}
