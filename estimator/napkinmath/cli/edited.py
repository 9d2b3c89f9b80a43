"""The user's own command line with other flags in the place of those that they replace: in whatever
spelling those were given."""

from __future__ import annotations

from napkinmath.inputs.option_table import rivals

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from napkinmath.cli.parser import Parser, Words


_WRITTEN = ("timeline", "force")  # a file that is there by now, and leave to replace it


class CommandLine:
    """A command line that was typed."""

    __slots__ = ("argv", "parser")

    def __init__(self, parser: Parser, argv: Sequence[str]) -> None:
        self.parser, self.argv = parser, tuple(argv)

    def with_flags(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """(its words with these flags, what those replace: '--bs 8')."""
        said = _said(self.parser.pieces(words))
        kept: list[str] = []
        behind: list[str] = []  # from `--` on: no flags of ours
        replaced: list[str] = []
        for piece in self.parser.pieces(self.argv):
            if piece.words[0] == "--":
                behind += piece.words
            elif piece.key in _WRITTEN:
                continue
            elif piece.key in said:
                replaced.append(" ".join(piece.words))
            else:
                kept += piece.words
        return [*kept, *words, *behind], replaced

    def over(self, flags: Sequence[str], gpu: str = "") -> tuple[str, str]:
        """(the command with these flags on one of the GPUs that it names, what they replace in it);
        both empty where the flags are only to be added."""
        words = [word for flag in flags for word in flag.split()]
        replaced = self.with_flags(words)[1]
        if not replaced:
            return "", ""
        from napkinmath.base.command_line import posix

        whole = self.with_flags([*words, *(("--gpu", gpu) if gpu else ())])[0]
        return " ".join(["estimate", *map(posix, whole)]), ", ".join(replaced)


def _said(pieces: Iterable[Words]) -> set[str]:
    """The options of flags, and those that decide the same (--global-batch and --grad-accum)."""
    keys = {piece.key for piece in pieces if piece.key}
    return keys.union(*(rivals(key) for key in keys))
