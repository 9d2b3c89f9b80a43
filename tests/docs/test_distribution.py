"""What others run without reading it first: the GitHub Action, the pre-commit hook, the manual page
and the citation."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import napkinmath
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
JOBS = ROOT / "tests" / "cli" / "jobs"


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def environment(folder: Path) -> dict[str, str]:
    """The command `estimate` of this checkout, first on the path."""
    command = folder / "estimate"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m napkinmath "$@"\n')
    command.chmod(0o755)
    rooms = os.pathsep.join(str(ROOT / room) for room in ("estimator", "profiler", "kernels"))
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": rooms}


@pytest.mark.parametrize(
    ("job", "gpu", "code"),
    [("qlora", "a100-80", 0), ("full", "rtx4090", 1), ("qlora", "no-such", 2)],
)
def test_the_actions_step_gives_the_verdict_as_summary_and_code(
    job: str, gpu: str, code: int, tmp_path: Path
) -> None:
    steps = read("action.yml")["runs"]["steps"]
    (check,) = [step for step in steps if step.get("id") == "check"]
    given = {"JOBS": str(JOBS / f"axolotl_{job}.yaml"), "GPU": gpu, "FLAGS": "--min-headroom 1GiB"}
    assert {f"${{{{ inputs.{name} }}}}" for name in ("jobs", "gpu", "flags")} == set(
        check["env"].values()
    ), "inputs reach the shell as variables, never as its text"
    assert "${{" not in check["run"]
    files = {name: tmp_path / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", check["run"]],
        env={**environment(tmp_path), **given, **{k: str(v) for k, v in files.items()}},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    assert files["GITHUB_OUTPUT"].read_text() == f"exit-code={code}\n"
    summary = files["GITHUB_STEP_SUMMARY"].read_text()
    assert summary.startswith(f"### estimate check on {gpu}\n")
    assert ("| job " in summary) == (code != 2)


def test_the_hook_runs_the_check_on_the_files_that_it_is_given(tmp_path: Path) -> None:
    (hook,) = read(".pre-commit-hooks.yaml")
    assert hook["language"] == "python" and re.compile(hook["files"]).search("train.yaml") is None
    entry = [*shlex.split(hook["entry"]), "--gpu", "a100-80", str(JOBS / "axolotl_qlora.yaml")]
    done = subprocess.run(entry, env=environment(tmp_path), capture_output=True, text=True)
    assert done.returncode == 0 and "fits" in done.stdout


def test_the_manual_page_is_that_of_the_tables() -> None:
    # a process of its own: other tests add stacks to this one's catalogue
    command = [sys.executable, str(ROOT / "docs" / "generate_man.py"), "--check"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT / "estimator")})
    assert done.returncode == 0, "run python docs/generate_man.py"


def test_one_version_everywhere() -> None:
    version = napkinmath.__version__
    assert read("CITATION.cff")["version"] == version
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
