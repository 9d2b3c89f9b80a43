"""The wheel carries the three packages with their data files, the type marker and the command."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "estimator" / "napkinmath"
IGNORED = ("__pycache__",)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    pytest.importorskip("hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (file,) = folder.glob("*.whl")
    return zipfile.ZipFile(file)


def test_every_file_of_the_core_is_there(wheel: zipfile.ZipFile) -> None:
    wanted = {
        f"napkinmath/{path.relative_to(CORE)}"
        for path in CORE.rglob("*")
        if path.is_file() and not any(part in IGNORED for part in path.parts)
    }
    assert {
        "napkinmath/py.typed",
        "napkinmath/catalog/models.json",
        "napkinmath/catalog/gpus.json",
        "napkinmath/cli/main.py",
    } <= wanted
    assert wanted <= set(wheel.namelist())


def test_a_wheel_stays_small(wheel: zipfile.ZipFile) -> None:
    assert wheel.filename is not None
    assert Path(wheel.filename).stat().st_size <= 3_200_000  # learned models are a sixth of it


def test_all_three_packages_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    roots = {name.split("/")[0] for name in wheel.namelist()}
    assert {root for root in roots if not root.endswith((".dist-info", ".data"))} == {
        "napkinmath",
        "napkinmath_profiler",
        "napkinmath_kernels",
    }


def test_command_and_light_dependencies(wheel: zipfile.ZipFile) -> None:
    (folder,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert (
        "estimate = napkinmath.cli.main:entry" in wheel.read(f"{folder}/entry_points.txt").decode()
    )
    metadata = wheel.read(f"{folder}/METADATA").decode().splitlines()
    always = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert "Typing :: Typed" in str(metadata) and "Requires-Python: >=3.10" in metadata
    assert sorted(always) == [
        "numpy>=1.23.2",
        "pyyaml>=6",
        "tomli>=2; python_version < '3.11'",
    ]  # numpy for plan, sweep and batch; nothing else loads it
