"""`estimate check JOB ... [flags]`: a gate for CI and SLURM: one line a job and GPU, and an exit
code."""

from __future__ import annotations

import sys

from napkinmath.answers.ranges import headroom_bytes
from napkinmath.base import values
from napkinmath.base.errors import InputError, plain
from napkinmath.base.progress import counted
from napkinmath.base.units import GIB
from napkinmath.cli.flag_rows import DEBUG, ON, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.forms import form_rows
from napkinmath.cli.parser import Parser
from napkinmath.report.formats import Answer, Sheet, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from napkinmath.answers.estimate import Estimate
    from napkinmath.cli.flag_rows import Row

_OWN: tuple[Row, ...] = (
    (
        ("--min-headroom",),
        TEXT,
        "SIZE",
        "memory that has to be left on the device, e.g. 2GiB [none]",
    ),
    (("--lenient",), ON, "", "exit 0 also where the answer is 'cannot tell'"),
    *form_rows(json="one JSON object a job and GPU, a line each"),
    DEBUG,
)
_DESCRIPTION = (
    "Fail a build, or a SLURM job before it queues, that would run out of memory. Put `estimate"
    " check job.yaml --gpu a100-80 || exit 1` before srun. Without --gpu the GPUs of this machine"
    " are taken."
)


def run(argv: Sequence[str]) -> int:
    """Prints the verdicts; returns 0 where all fit, 1 where one does not, else 3 where one has
    no answer."""
    groups = (*((name, rows) for name, rows in SHARED if name != "output"), ("check", _OWN))
    options = Parser(
        "estimate check",
        _DESCRIPTION,
        groups,
        positional=("job", "MODEL|JOB...", "a model, or job files of any kind"),
    ).parse(argv)
    jobs = options.pop("job", None)
    form = taken(options)
    headroom, lenient = options.pop("min_headroom", None), options.pop("lenient", None)
    options.pop("debug", None)

    room = values.size(headroom, "--min-headroom") if headroom is not None else 0
    found: list[tuple[object, Estimate, int]] = []
    asked = values.listed(jobs) if jobs is not None else [None]
    for job in counted(asked, "jobs", len(asked)):
        for e in _estimates(job, dict(options)):
            code = _code(e, room, lenient=lenient is not None)
            found.append((job, e, code))
            if form is None:
                print(_line(job, e, code, room))
    if form is not None:
        lines = lambda: "\n".join(_as_json(*row) for row in found)  # noqa: E731
        print(form.text(Answer(sheets=lambda: [_sheet(found, room)], json=lines)))
    codes = {code for _, _, code in found}
    return 1 if 1 in codes else max(codes)


def _estimates(job: object, options: dict[str, object]) -> list[Estimate]:
    from napkinmath.cli.estimate_command import make_estimates

    notes: list[str] = []
    found = make_estimates({**options, "job": job} if job is not None else options, notes)
    if found[0].hardware is None:
        from napkinmath.calibration.local_machine import gpu_names

        here = list(dict.fromkeys(gpu_names()))
        if not here:
            raise InputError(
                "no GPU was named and this machine has none that its driver lists; add --gpu NAME"
            )
        notes.append(f"checked on the GPUs of this machine: {', '.join(here)}")
        found = make_estimates(
            {**options, "gpu": here, **({"job": job} if job is not None else {})}, []
        )
    for note in notes:
        print(f"note: {plain(note)}", file=sys.stderr)
    return found


def _code(e: Estimate, room: int, *, lenient: bool) -> int:
    code = e.verdict.exit_code
    if code == 3 and lenient:
        code = 0
    return 1 if code == 0 and room and (headroom_bytes(e) or 0) < room else code


def _sheet(found: list[tuple[object, Estimate, int]], room: int) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for job, e, code in found:
        assert e.hardware is not None
        device = e.memory.device
        figures = (device.value, device.low, device.high, e.hardware.memory_bytes)
        names = (str(job or e.spec.name), e.hardware.gpu.name, _verdict(e, code, room))
        rows.append((*names, *(f"{nbytes / GIB:.1f}" for nbytes in figures)))
    numbers = ("device GiB", "least", "most", "of GiB")
    return Sheet(heads=("job", "GPU", "verdict", *numbers), rows=tuple(rows), right=numbers)


def _verdict(e: Estimate, code: int, room: int) -> str:
    if code == 1 and e.verdict.exit_code != 1:
        return f"fits, but leaves less than {room / GIB:.1f} GiB"
    return e.verdict.value


def _line(job: object, e: Estimate, code: int, room: int) -> str:
    assert e.hardware is not None
    what = _verdict(e, code, room)
    device = e.memory.device
    figures = (
        f"{device.value / GIB:.1f} GiB ({device.low / GIB:.1f}-{device.high / GIB:.1f}) of"
        f" {e.hardware.memory_bytes / GIB:.1f}"
    )
    help_line = ""
    if code == 1 and e.changes:  # said as what it is: whether it is enough, the report tells
        most = e.changes[0]
        help_line = f"; {most.flag} saves {most.saved_bytes / GIB:.1f} GiB"
    return f"{job or e.spec.name} on {e.hardware.gpu.name}: {what}, {figures}{help_line}"


def _as_json(job: object, e: Estimate, code: int) -> str:
    import json

    from napkinmath.planning.grid import figures

    assert e.hardware is not None
    return json.dumps(
        {
            "job": job,
            "model": e.spec.name,
            "gpu": e.hardware.gpu.name,
            "exit_code": code,
            **figures(e),
        }
    )
