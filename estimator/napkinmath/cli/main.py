"""`estimate`: finds the command, runs it, and turns what goes wrong into one line and an exit code.

Exit codes: 0 fits, or nothing to fit on was named; 1 does not fit; 2 bad input; 3 cannot tell; 130
interrupted.
"""

from __future__ import annotations

import sys

from napkinmath.base.errors import InputError, NapkinError, plain, shown, suggest
from napkinmath.cli.commands import COMMANDS, DEFAULT, PARSERS, START

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TextIO

DEFECT = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130
# What these print is their whole answer, and may be long: they end where nobody reads on.
STREAMING = (["sweep"], ["batch"])
MISSPELT = 0.7  # likeness of words; 'paln' is 0.75 of plan, 'resnet50' 0.53 of generate
EXTRAS = {"napkinmath_profiler": "profiler", "napkinmath_kernels": "kernels"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code and never raises, unless --debug asks for it."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    _settle_output()
    code, stdout, stderr = 0, sys.stdout, sys.stderr
    drawn = None
    if arguments and stderr.isatty():
        from napkinmath.cli.progress import started

        drawn = started(arguments)
    sys.stderr = _Unread(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
    if arguments[:1] not in STREAMING:
        sys.stdout = _Unread(sys.stdout)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough: `estimate sweep ... | head`
        _discard(stdout)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as stop:  # --help
        return stop.code if isinstance(stop.code, int) else 0
    except Exception as error:
        if "--debug" in arguments:
            raise
        return _explained(error)
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        if drawn is not None:
            drawn.end()


def entry() -> None:
    """The console script: main() in a process that is short, so that nothing is collected on the
    way or taken apart at its end."""
    import os

    try:
        _run_and_leave()
    except KeyboardInterrupt:  # before main() looks, or after it
        os._exit(INTERRUPTED)


def _run_and_leave() -> None:
    import gc
    import os

    gc.disable()
    code = main()
    # a command that ran for long may have loaded what has to be ended in order, a profiler has
    # what to say at the end
    if gc.isenabled() or sys.gettrace() or sys.getprofile():
        sys.exit(code)
    sys.stdout.flush()
    os._exit(code)


def _explained(error: Exception) -> int:
    """One line for an error, and its exit code; what is our own mistake says so."""
    if isinstance(error, NapkinError):
        from napkinmath.inputs.option_table.flag_words import in_flags

        return _complain(in_flags(str(error)), error.exit_code)
    if isinstance(error, OSError):
        _discard(sys.stdout)
        return _complain(
            f"{shown(error.filename) + ': ' if error.filename else ''}{error.strerror or error};"
            " check the path and the disk",
            2,
        )
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "numpy":
        return _complain(
            "numpy is missing, which comes with napkinmath and evaluates many configurations at"
            " once: pip install numpy",
            2,
        )
    if isinstance(error, (RecursionError, MemoryError)):
        return _complain(
            "the input is too large or too deeply nested for this machine; make it smaller", 2
        )
    if isinstance(error, ValueError) and "integer string conversion" in str(error):
        return _complain("a number has thousands of digits; write one that a training can have", 2)
    return _complain(
        f"{type(error).__name__}: {error}; this is a defect of napkinmath: run again with --debug"
        " and report the traceback",
        DEFECT,
    )


def _run(arguments: list[str]) -> int:
    if arguments[:1] == ["help"] and not _is_file("help"):
        arguments = [*arguments[1:], "--help"]
    if arguments in ([], ["--version"], ["-V"]):
        return _load("", "napkinmath.cli.version:run" if arguments else START)([]) or 0
    if arguments and not arguments[0].startswith("-"):
        name = arguments[0]
        if name in COMMANDS:
            if _is_file(name):
                raise InputError(
                    f"{shown(name)} is a command and a file here; write ./{name} for the file, or"
                    " run the command from another folder"
                )
            if name in PARSERS and arguments[1:2] in (["--help"], ["-h"]):
                return _load(name, PARSERS[name])().parse(arguments[1:])  # ends after the help
            _collect_again()
            return _load(name, COMMANDS[name][0])(arguments[1:]) or 0
        line = _line_in_quotes(name)
        if line:
            arguments = [*arguments[1:], "--", *line]
        elif _is_near_a_command(name) and not _is_word_of_a_run(name):
            raise InputError(
                f"command {shown(name)} is unknown{suggest(name, list(COMMANDS))}; commands:"
                f" {', '.join(COMMANDS)}, or a job file, or a model of `estimate models`"
            )
    return _load("", DEFAULT)(arguments) or 0


def _collect_again() -> None:
    """Commands other than the estimate may run for long. Records hold each other in cycles, and are
    so many that the collector looks at them seldom."""
    import gc

    if not gc.isenabled():  # a process of its own; a caller's settings are the caller's
        gc.freeze()
        gc.set_threshold(100_000, 20, 100)
    gc.enable()


def _load(name: str, target: str) -> Callable[..., Any]:
    module, _, function = target.partition(":")
    try:
        return getattr(__import__(module, fromlist=[function]), function)
    except ImportError as error:
        missing = (error.name or "").partition(".")[0]
        package = module.partition(".")[0]
        if missing in ("napkinmath", package) and (error.name or "") == module:
            raise InputError(
                f"command {shown(name)} is not part of this installation; see `estimate --help` for"
                " what is"
            ) from None
        if package in EXTRAS:
            from napkinmath.base.installing import pip_install

            raise InputError(
                f"command {shown(name)} needs {missing or package}; install it with:"
                f" {pip_install(EXTRAS[package])}"
            ) from None
        raise
    except AttributeError:
        raise InputError(
            f"command {shown(name)} is not part of this installation; see `estimate --help` for"
            " what is"
        ) from None


def _is_file(name: str) -> bool:
    """Whether a word is a file here, or a folder with a model in it."""
    import os

    return os.path.isfile(name) or os.path.isfile(os.path.join(name, "config.json"))


def _is_near_a_command(name: str) -> bool:
    """Whether a word is rather a misspelt command than a model that nobody knows."""
    import difflib

    return bool(difflib.get_close_matches(name.lower(), list(COMMANDS), n=1, cutoff=MISSPELT))


def _is_word_of_a_run(name: str) -> bool:
    from napkinmath.cli.words import kind

    return bool(kind(name))


def _line_in_quotes(name: str) -> list[str]:
    """The words of a launch line that was given as one word; empty where it is none."""
    import os

    words = name.split()
    if len(words) < 2 or os.path.exists(name):
        return []
    from napkinmath.inputs.scripts.programs import STARTERS

    if not any(word in STARTERS or word.endswith((".py", ".sh")) for word in words):
        return []
    import shlex

    try:
        return shlex.split(name)
    except ValueError as error:
        raise InputError(f"launch line {shown(name)} is not read: {error}; close it") from None


def _complain(message: str, code: int) -> int:
    """One line on standard error, whatever the input held and whatever the terminal can show."""
    line = "estimate: " + plain(" ".join(message.split()))
    try:
        encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=sys.stderr)
    except (OSError, ValueError, AttributeError):
        pass
    return code


def _settle_output() -> None:
    """Gives closed outputs a place to go, and lets a narrow encoding replace what it lacks.

    Without standard error, `print` would put notes among the answers.
    """
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        import os

        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        import os

        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    elif (getattr(sys.stdout, "encoding", None) or "utf-8").lower().replace(
        "-", ""
    ) != "utf8" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]


class _Unread:
    """An output that a reader may close at any time: the answer is worked out all the same, for its
    exit code."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            _discard(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            _discard(self._stream)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)


def _discard(stream: TextIO) -> None:
    """Points an output at nothing, so that the interpreter's last flush does not fail."""
    import contextlib
    import os

    with contextlib.suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
