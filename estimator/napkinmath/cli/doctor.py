"""`estimate doctor`: versions, GPUs, calibrations, and what is missing with the line that installs
it."""

from __future__ import annotations

import sys

from napkinmath.base.installing import pip_install
from napkinmath.base.record import Record
from napkinmath.cli.flag_rows import DEBUG, ON
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_PARSER = Parser(
    "estimate doctor",
    "What is installed, what works here, and what is missing.",
    (("output", ((("--json",), ON, "", "the findings as JSON"), DEBUG)),),
)
# package -> (what needs it, the line that installs it)
_WANTED = {
    "yaml": ("job files in YAML", "pip install pyyaml", "PyYAML"),
    "numpy": ("sweep, batch, plan", "pip install numpy", "numpy"),
    "matplotlib": ("PNG and plots", pip_install("plots"), "matplotlib"),
    "pandas": ("DataFrames", pip_install("plots"), "pandas"),
    "pyarrow": ("Parquet", "pip install pyarrow", "pyarrow"),
    "rich": ("the profiler's tables", "pip install rich", "rich"),
    "torch": ("trace, measure, calibrate", pip_install("profiler"), "torch"),
    "transformers": ("trace, measure", pip_install("profiler"), "transformers"),
    "peft": ("tracing adapters", pip_install("profiler"), "peft"),
    "bitsandbytes": (
        "tracing 4- and 8-bit weights",
        pip_install("profiler"),
        "bitsandbytes",
    ),
    "accelerate": ("tracing the Trainer", pip_install("profiler"), "accelerate"),
    "triton": ("the training kernels", pip_install("kernels"), "triton"),
}


class Check(Record):
    """One line: what was looked at, what was found, whether it is in order, and the line that mends
    it."""

    what: str
    found: str
    good: bool = True
    way_out: str = ""


def run(argv: Sequence[str]) -> int:
    """Prints the findings; missing extras are no failure."""
    options = _PARSER.parse(argv)
    found = [*_versions(), *_packages(), *_gpus()]
    if "json" in options:
        import json

        print(json.dumps([dict(finding.items()) for finding in found], indent=1))
        return 0
    width = max(len(finding.what) for finding in found)
    for finding in found:
        mark = "ok" if finding.good else "--"
        print(
            f"{mark}  {finding.what:<{width}} "
            f" {finding.found}{f'; {finding.way_out}' if finding.way_out else ''}"
        )
    return 0


def _versions() -> list[Check]:
    import platform

    from napkinmath import __version__
    from napkinmath.catalog.gpus import load_gpus

    return [
        Check(what="napkinmath", found=f"{__version__} in {_folder()}"),
        Check(
            what="Python",
            found=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
            good=sys.version_info >= (3, 10),
            way_out="" if sys.version_info >= (3, 10) else "napkinmath needs 3.10 or newer",
        ),
        Check(what="catalog", found=f"{len(load_gpus())} GPUs, {_num_models()} models"),
    ]


def _folder() -> str:
    import os

    import napkinmath

    return os.path.dirname(napkinmath.__file__)


def _num_models() -> int:
    from napkinmath.catalog.models import CATALOG

    with open(CATALOG, encoding="utf-8") as file:
        return sum(1 for line in file if '"name"' in line)


def _packages() -> list[Check]:
    """Each optional package with its version; looked up without loading it."""
    from importlib.metadata import PackageNotFoundError, version
    from importlib.util import find_spec

    found: list[Check] = []
    for module, (purpose, line, distribution) in _WANTED.items():
        if find_spec(module) is None:
            found.append(
                Check(
                    what=distribution,
                    found=f"missing, needed for {purpose}",
                    good=False,
                    way_out=line,
                )
            )
            continue
        try:
            number = version(distribution)
        except PackageNotFoundError:
            number = "of unknown version"
        found.append(Check(what=distribution, found=f"{number}, for {purpose}"))
    return found


def _gpus() -> list[Check]:
    from napkinmath.calibration.local_machine import driver_version, gpu_names

    names = gpu_names()
    if not names:
        return [
            Check(
                what="GPU",
                found="none that the NVIDIA driver lists: estimates need none, measurements do",
                good=False,
                way_out="name one with --gpu",
            )
        ]
    found = [Check(what="driver", found=driver_version() or "of unknown version")]
    return found + [
        finding for name in dict.fromkeys(names) for finding in _gpu(name, names.count(name))
    ]


def _gpu(name: str, count: int) -> list[Check]:
    from napkinmath.base.errors import InputError
    from napkinmath.calibration.calibration import cached_calibration, load_calibration, staleness
    from napkinmath.catalog.gpus import find_gpu

    label = f"{count} x {name}" if count > 1 else name
    try:
        gpu = find_gpu(name)
    except InputError:
        return [
            Check(
                what="GPU",
                found=f"{label}, not in the catalog",
                good=False,
                way_out="estimate calibrate describes it",
            )
        ]
    path = cached_calibration(gpu)
    if path is None:
        return [
            Check(
                what="GPU",
                found=f"{label}, speeds from its datasheet",
                good=False,
                way_out="measure it: estimate calibrate",
            )
        ]
    stale = staleness(load_calibration(path), gpu)
    return [
        Check(
            what="GPU",
            found=f"{label}, calibrated in {path}",
            good=not stale,
            way_out=f"stale ({'; '.join(stale)}): estimate calibrate" if stale else "",
        )
    ]
