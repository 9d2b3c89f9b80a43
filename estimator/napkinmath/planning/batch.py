"""run_batch: a file of jobs, one JSON object a line, priced in constant memory into one JSON object
a line.

Lines go in chunks: their bad lines to the side file first, then their answers to the output, so
that whatever moment the run is killed at, what is whole in both files tells where to go on. It goes
on at the start of that chunk, and so evaluates exactly what a run without a break would.
"""

from __future__ import annotations

import hashlib
import json
import os

from napkinmath import __version__
from napkinmath.base.errors import InputError, shown
from napkinmath.base.file_lock import try_lock
from napkinmath.base.whole_file import (
    append_whole,
    refusals_named,
    refuse_existing,
    write_whole,
)
from napkinmath.planning.batch_lines import MOST_BYTES, BatchLines, Jobs
from napkinmath.planning.grid import EXACT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import BinaryIO

CHUNK_LINES = 1 << 15
MOST_PIECE = 1 << 24  # bytes of lines held at a time
_FORMAT = 2


class BatchResult:
    """What a run did: lines priced, bad lines of the whole file, lines taken over from the run before,
    notes."""

    __slots__ = ("bad", "notes", "priced", "taken_over")

    def __init__(self) -> None:
        self.priced = self.bad = self.taken_over = 0
        self.notes: list[str] = []


def run_batch(
    source: str,
    out: str,
    given: Mapping[str, object],
    *,
    exact: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> BatchResult:
    """Prices every line of `source` into `out`; bad lines go with their reason to `out`.bad.jsonl.

    A run that was killed is taken up by the same call; `force` starts again. `progress` gets bytes
    read and lines done. Raises InputError where the output belongs to another run, or where one
    writes it at this moment.
    """
    result = BatchResult()
    state, bad = out + ".state", out + ".bad.jsonl"
    _refuse_paths(source, out, bad, state)
    reader = BatchLines(given, result.notes)
    with open(source, "rb") as lines, _locked(out) as answers:
        wanted = _run_of(lines, given, exact=exact)  # after the lock: who finds it hashes nothing
        resumed = _is_resumable(out, state, wanted, force=force)
        if not resumed:  # emptied first: a state says that what is there is of this run
            answers.truncate(0)
            write_whole(state, json.dumps(wanted), force=True)
        with open(bad, "r+b" if resumed and os.path.exists(bad) else "wb") as rejects:
            done, result.bad = _take_up(lines, answers, rejects) if resumed else (0, 0)
            result.taken_over = done
            while True:
                count, good, wrong = _price_chunk(lines, done, reader, exact=exact)
                if not count:
                    break
                _append(rejects, wrong)
                _append(answers, good)
                done += count
                result.priced, result.bad = result.priced + len(good), result.bad + len(wrong)
                if progress is not None:
                    progress(lines.tell(), done)
            os.fsync(rejects.fileno())
            os.fsync(answers.fileno())
        if not os.path.getsize(bad):
            os.unlink(bad)
        os.unlink(state)  # under the lock: the next run must not find a state that is going
    return result


def _refuse_paths(source: str, out: str, *beside: str) -> None:
    """Raises InputError for jobs that cannot be read twice, and for outputs that cannot be."""
    if source == "-" or (os.path.exists(source) and not os.path.isfile(source)):
        raise InputError(
            f"{shown(source)} is no regular file, and a run could not be taken up; write the jobs to"
            " a file first"
        )
    for written in (out, *beside):
        refuse_existing(written, force=True, what="--out")
        if os.path.exists(written) and os.path.samefile(source, written):
            raise InputError(
                f"{shown(written)} would be written over the jobs that are read; name another --out"
            )


def _run_of(lines: BinaryIO, given: Mapping[str, object], *, exact: bool) -> dict[str, object]:
    """What must be the same for a run to be taken up: the jobs themselves, the flags, the
    program."""
    digest = hashlib.sha256()
    while piece := lines.read(MOST_PIECE):
        digest.update(piece)
    lines.seek(0)
    return {
        "format": _FORMAT,
        "version": __version__,
        "exact": exact,
        "input": os.path.abspath(lines.name),
        "input_sha256": digest.hexdigest(),
        "flags": dict(given),
    }


def _locked(out: str) -> BinaryIO:
    """The output, open and left as it is, with no other run writing it; closing ends that."""
    with refusals_named(out, what="--out"):
        file = open(out, "r+b", opener=_open_or_make)  # noqa: SIM115
    try:
        free = try_lock(file)
    except BaseException:
        file.close()
        raise
    if free:
        return file
    file.close()
    raise InputError(
        f"--out {shown(out)} is being written by another run; wait for it, or name another file"
    )


def _open_or_make(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CREAT, 0o666)


def _append(file: BinaryIO, lines: list[str]) -> None:
    """Adds whole lines; where the disk refuses them, the run can go on later from what is there."""
    try:
        append_whole(file, "".join(lines).encode())
    except OSError as error:
        raise InputError(
            f"{shown(file.name)} cannot be written: {error.strerror or error}; make room and run the"
            " same command again, which goes on from here"
        ) from error


def _is_resumable(out: str, state: str, wanted: dict[str, object], *, force: bool) -> bool:
    """Whether an earlier run of the same jobs left its output; InputError where the output is of
    another run, or whole."""
    bad = out + ".bad.jsonl"
    if force or not (os.path.getsize(out) or os.path.exists(bad)):
        return False  # nothing was written: the lock made the file, or a run ended before its state
    if not os.path.exists(state):
        out = out if os.path.getsize(out) else bad
        raise InputError(
            f"output {shown(out)} exists; add --force to replace it, or name another file"
        )
    try:
        with open(state, encoding="utf-8") as file:
            left = json.load(file)
    except ValueError:
        return False  # a run of an older version, killed while it was written: nothing was priced
    if left != json.loads(json.dumps(wanted)):
        raise InputError(
            f"--out {shown(out)} was begun with other jobs or flags; add --force to start again, or"
            " name another file"
        )
    return True


def _take(lines: BinaryIO, count: int) -> Iterator[bytes]:
    """So many lines; of one that is longer than any job only the beginning, which is refused."""
    for _ in range(count):
        line = lines.readline(MOST_BYTES + 2)
        if not line:
            return
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = lines.readline(MOST_BYTES)
        yield line


def _pieces(lines: BinaryIO) -> Iterator[list[bytes]]:
    """The next chunk in pieces that hold few bytes, however long its lines are."""
    piece: list[bytes] = []
    held = 0
    for line in _take(lines, CHUNK_LINES):
        piece.append(line)
        held += len(line)
        if held >= MOST_PIECE:
            yield piece
            piece, held = [], 0
    if piece:
        yield piece


# ---------------------------------------------------------------- going on


def _take_up(lines: BinaryIO, answers: BinaryIO, rejects: BinaryIO) -> tuple[int, int]:
    """Cuts both outputs back to whole chunks and skips the input to there; (lines that are done,
    bad ones among them)."""
    ends = _whole_chunks(answers), _whole_chunks(rejects)
    last = _last_line(answers)
    chunk = (
        (last - 1) // CHUNK_LINES if last else 0
    )  # the chunk of the last answer may not be whole
    counted = [
        _cut(file, found, chunk) for file, found in zip((answers, rejects), ends, strict=True)
    ]
    jobs = sum(1 for line in _take(lines, chunk * CHUNK_LINES) if line.strip())
    if sum(counted) != jobs:  # something was lost that was on the disk: begin again
        for file in (lines, answers, rejects):
            file.seek(0)
        answers.truncate()
        rejects.truncate()
        return 0, 0
    return chunk * CHUNK_LINES, counted[1]


def _whole_chunks(file: BinaryIO) -> dict[int, tuple[int, int]]:
    """chunk -> (offset at which its entries start, entries before them); a line that is not whole
    ends the file."""
    found: dict[int, tuple[int, int]] = {}
    file.seek(0)
    offset = count = 0
    for line in file:
        number = _line_number(line)
        if number is None:
            break
        found.setdefault((number - 1) // CHUNK_LINES, (offset, count))
        offset += len(line)
        count += 1
    found[-1] = (offset, count)
    return found


def _last_line(answers: BinaryIO) -> int:
    """The line number of the last whole answer; 0 where there is none."""
    answers.seek(0)
    last = 0
    for line in answers:
        number = _line_number(line)
        if number is None:
            break
        last = number
    return last


def _cut(file: BinaryIO, ends: dict[int, tuple[int, int]], chunk: int) -> int:
    """Truncates before the first entry of a chunk or of a later one; returns the entries left."""
    offset, count = min((place for key, place in ends.items() if key >= chunk), default=ends[-1])
    file.seek(offset)
    file.truncate()
    return count


def _line_number(line: bytes) -> int | None:
    """17 of b'{"line": 17, ...}\\n'; None for a line that was cut."""
    if not line.startswith(b'{"line": ') or not line.endswith(b"}\n"):
        return None
    digits = line[9 : line.find(b",")]
    return int(digits) if digits.isdigit() else None


# ---------------------------------------------------------------- a chunk


def _price_chunk(
    lines: BinaryIO, done: int, reader: BatchLines, *, exact: bool
) -> tuple[int, list[str], list[str]]:
    """(lines, answers, rejections) of the next chunk."""
    count = 0
    answers: list[str] = []
    rejects: list[str] = []
    for piece in _pieces(lines):
        good, wrong = _price(piece, done + count, reader, exact=exact)
        answers += good
        rejects += wrong
        count += len(piece)
    return count, answers, rejects


def _price(
    chunk: list[bytes], done: int, reader: BatchLines, *, exact: bool
) -> tuple[list[str], list[str]]:
    """(answers, rejections) of consecutive lines, each in the order of the lines; empty lines give
    neither."""
    answers: list[str] = [""] * len(chunk)
    rejects: dict[int, str] = {}
    for jobs in reader.read(chunk, rejects):
        if exact:
            _answer_exactly(jobs, done, answers, rejects)
        else:
            _answer(jobs, done, answers)
    wrong = [
        json.dumps(
            {
                "line": done + index + 1,
                "reason": " ".join(reason.split()),
                "text": chunk[index][:200].decode("utf-8", "replace").rstrip("\n"),
            }
        )
        + "\n"
        for index, reason in sorted(rejects.items())
    ]
    return [answer for answer in answers if answer], wrong


def _answer(jobs: Jobs, done: int, answers: list[str]) -> None:
    """The answers of one family's jobs, put in their places."""
    rows = jobs.family.quickly(*jobs.sizes)
    said: dict[tuple[str, str | None], str] = {}
    for place, name, (requested, phase, seconds, speed, verdict) in zip(
        jobs.places, jobs.ids, rows, strict=True
    ):
        words = said.get((phase, verdict))
        if words is None:
            words = said[phase, verdict] = (
                f'"peak_phase": "{phase}", "verdict": {json.dumps(verdict)}'
            )
        own = f'"id": {name}, ' if name else ""
        time = "" if seconds is None else f', "seconds": {seconds!r}, "tokens_per_s": {speed!r}'
        answers[place] = (
            f'{{"line": {done + place + 1}, {own}"requested_bytes": {requested}, {words}{time}}}\n'
        )


def _answer_exactly(jobs: Jobs, done: int, answers: list[str], rejects: dict[int, str]) -> None:
    for place, name, *sizes in zip(jobs.places, jobs.ids, *jobs.sizes, strict=True):
        try:
            found = jobs.family.exactly(*sizes)
        except InputError as error:
            rejects[place] = str(error)
            continue
        own = {"id": json.loads(name)} if name else {}
        answers[place] = (
            json.dumps({"line": done + place + 1, **own, **{key: found[key] for key in EXACT}})
            + "\n"
        )
