"""Options as a command to paste: every word is quoted for the shell that will read it, whatever text
an option holds."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.base.values import listed

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Quote = Callable[[str], str]

METHOD_FLAGS = ("full", "lora", "qlora")  # values of --method with a flag of their own
# PowerShell takes typographic quotation marks for ' as well, and a bare 2k or a,b for its own values.
_SINGLE_QUOTES = "'\u2018\u2019\u201a\u201b"
_PLAIN_FOR_POWERSHELL = r"(?:--)?[A-Za-z_][A-Za-z0-9_-]*|[0-9]+"
_PLAIN = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789@%+=:,./-_")


def posix(word: str) -> str:
    """A word for a POSIX shell; the library that quotes is loaded for a word that needs it."""
    if word and _PLAIN.issuperset(word):
        return word
    import shlex

    return shlex.quote(word)


def powershell(word: str) -> str:
    """A word for PowerShell: in single quotes, those inside doubled. Raises InputError for a double
    quote or a backslash, at which PowerShell before 7.3 splits what it hands to a program."""
    import re

    if re.fullmatch(_PLAIN_FOR_POWERSHELL, word):
        return word
    if '"' in word or "\\" in word:
        raise InputError(
            f"{shown(word)} has a double quote or a backslash, which PowerShell does not hand over"
            " whole; leave it out, or take the command for a POSIX shell"
        )
    return "'" + re.sub(f"([{_SINGLE_QUOTES}])", r"\1\1", word) + "'"


SHELLS: dict[str, Quote] = {"posix": posix, "powershell": powershell}


def words(options: Mapping[str, object]) -> list[str]:
    """The flags that give these options, unquoted."""
    return [
        word
        for name, value in options.items()
        for one in listed(value)
        for word in _flag(name, one)
    ]


def flags(options: Mapping[str, object], quote: Quote = posix) -> str:
    """The same as text for a shell."""
    return " ".join(quote(word) for word in words(options))


def command(options: Mapping[str, object], quote: Quote = posix) -> str:
    """The command that prices these options."""
    return " ".join(["estimate", *(quote(word) for word in words(options))])


def python_call(options: Mapping[str, object]) -> str:
    """The call of `napkinmath.estimate` that prices these options, as a short program; a `config`
    is read from config.json."""
    given = {name: value for name, value in options.items() if name not in ("model", "config")}
    lines = ["from napkinmath import estimate", ""]
    first = repr(options["model"]) if "model" in options else ""
    if "config" in options:
        first = repr("./config.json")
    arguments = [*([first] if first else []), *(f"{k}={_literal(v)}" for k, v in given.items())]
    lines += ["e = estimate(", *(f"    {argument}," for argument in arguments), ")", "print(e)"]
    return "\n".join(lines) + "\n"


def _literal(value: object) -> str:
    """A value in Python: whole numbers as such, whatever form a request gave them."""
    if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 16:
        return value.lstrip("0") or "0"
    return repr(value)


def _flag(name: str, value: object) -> list[str]:
    if name == "method" and value in METHOD_FLAGS:
        return [f"--{value}"]
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    text = str(value)
    # A value that looks like a flag stays with its own.
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
