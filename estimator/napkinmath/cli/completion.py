"""`estimate completion bash|zsh|fish`: a completion script made from the same flag tables that the
commands are parsed with."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown
from napkinmath.cli.commands import COMMANDS, DEFAULT
from napkinmath.cli.parser import Parser

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

SHELLS = ("bash", "zsh", "fish")
_PARSER = Parser(
    "estimate completion",
    'Print a completion script. bash: eval "$(estimate completion bash)" in ~/.bashrc; zsh: the'
    " same in ~/.zshrc after compinit; fish: estimate completion fish >"
    " ~/.config/fish/completions/estimate.fish",
    (),
    positional=("shell", "SHELL", "bash, zsh or fish"),
)
_NAMES = ("--model", "-m", "--gpu", "-g")


def run(argv: Sequence[str]) -> int:
    """Prints the script of a shell."""
    shell = _PARSER.parse(argv).get("shell")
    if shell not in SHELLS:
        raise InputError(f"shell {shown(shell)} is unknown; use bash, zsh or fish")
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[str(shell)](flags_by_command()))
    return 0


def flags_by_command() -> dict[str, dict[str, str]]:
    """command -> flag -> its meaning, of every command that is installed; '' is the estimate
    itself."""
    from importlib.util import find_spec

    found = {"": _flags("")}
    for name, (target, _) in COMMANDS.items():
        module = target.partition(":")[0]
        if module.startswith("napkinmath.") and find_spec(module) is not None:
            found[name] = _flags(name)
    return found


def late_commands() -> tuple[str, ...]:
    """Commands of the other packages: they import torch, so their flags are asked for at the first
    Tab and not in every new shell."""
    return tuple(
        name for name, (target, _) in COMMANDS.items() if not target.startswith("napkinmath.")
    )


def _flags(command: str) -> dict[str, str]:
    """The flags that a command's help lists, which is made from its table."""
    import contextlib
    import io

    module, _, function = (COMMANDS[command][0] if command else DEFAULT).partition(":")
    run = getattr(__import__(module, fromlist=[function]), function)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        run(["--help", "all"])
    found: dict[str, str] = {}
    waiting: list[str] = []
    for line in out.getvalue().splitlines():
        stripped = line.strip()
        if line.startswith("  -"):
            names, _, meaning = stripped.partition("  ")
            waiting = [word.split()[0] for word in names.split(", ") if word.startswith("-")]
            found |= dict.fromkeys(waiting, meaning.strip())
        elif waiting and line.startswith(" " * 20) and stripped:
            for name in waiting:
                found[name] = found[name] or stripped
            waiting = []
    return found


def choices() -> dict[str, tuple[str, ...]]:
    """flag -> its values, for the flags with a fixed list of them."""
    from napkinmath.exports import KINDS
    from napkinmath.inputs.option_table import OPTIONS
    from napkinmath.planning.space import Goal

    own = {"--goal": tuple(g.value for g in Goal), "--export": tuple(KINDS)}
    return own | {
        option.flag: tuple(name for name in option.named_choices() if ":" not in name)
        for option in OPTIONS
        if option.named_choices()
    }


def _bash(flags: dict[str, dict[str, str]]) -> str:
    commands = " ".join([*(name for name in flags if name), *late_commands()])
    cases = "\n".join(
        f'    {name}) words="{" ".join(found)}" ;;' for name, found in flags.items() if name
    )
    values = "\n".join(
        f'    {flag}) COMPREPLY=($(compgen -W "{" ".join(known)}" -- "$current")); return ;;'
        for flag, known in choices().items()
    )
    return f"""# bash completion of estimate: eval "$(estimate completion bash)"
_estimate() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" command="${{COMP_WORDS[1]}}" words
  case "$before" in
    --model|-m) COMPREPLY=($(compgen -W "$(estimate models 2>/dev/null | tail -n +2 | cut -f1)" -- "$current")); return ;;
    --gpu|-g) local IFS=$'\\n'; COMPREPLY=($(compgen -W "$(estimate gpus 2>/dev/null | tail -n +2 | cut -f1 | tr 'A-Z ' 'a-z-')" -- "$current")); return ;;
{values}
  esac
  case "$command" in
{cases}
    {"|".join(late_commands())})
      local kept="_estimate_flags_$command"
      eval "words=\\${{$kept-}}"
      if [[ -z "$words" ]]; then
        words="$(estimate "$command" --help 2>/dev/null | grep -E '^  +-' | grep -oE -- '--[a-z][a-z0-9-]*' | sort -u | tr '\\n' ' ')"
        eval "$kept=\\$words"
      fi ;;
    *) words="{" ".join(flags[""])}" ;;
  esac
  if [[ $COMP_CWORD -eq 1 ]]; then
    words="$words {commands}"
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  if [[ "$current" != -* ]]; then
    COMPREPLY+=($(compgen -f -X '!*.@(yaml|yml|json|jsonl)' -- "$current"))
  fi
}}
complete -o filenames -F _estimate estimate"""


def _zsh(flags: dict[str, dict[str, str]]) -> str:
    return "autoload -U +X bashcompinit && bashcompinit\n" + _bash(flags)


def _fish(flags: dict[str, dict[str, str]]) -> str:
    lines = [
        "# fish completion of estimate: estimate completion fish >"
        " ~/.config/fish/completions/estimate.fish"
    ]
    names = " ".join([*(name for name in flags if name), *late_commands()])
    lines.append(f"complete -c estimate -n '__fish_is_first_token' -a '{names}'")
    known = choices()
    for command, found in flags.items():
        where = (
            f"'__fish_seen_subcommand_from {command}'"
            if command
            else f"'not __fish_seen_subcommand_from {names}'"
        )
        for flag, meaning in found.items():
            if not flag.startswith("--"):
                continue
            values = f" -x -a '{' '.join(known[flag])}'" if flag in known else ""
            values = (
                " -x -a '(estimate models 2>/dev/null | tail -n +2 | cut -f1)'"
                if flag == "--model"
                else values
            )
            values = (
                ' -x -a \'(estimate gpus 2>/dev/null | tail -n +2 | cut -f1 | tr "A-Z " "a-z-")\''
                if flag == "--gpu"
                else values
            )
            text = meaning.replace("'", "")
            lines.append(f"complete -c estimate -n {where} -l {flag[2:]}{values} -d '{text}'")
    for command in late_commands():
        where = f"'__fish_seen_subcommand_from {command}'"
        lines.append(
            f'complete -c estimate -n {where} -a "(estimate {command} --help 2>/dev/null | string'
            " match -ra -- '--[a-z][a-z0-9-]*' | sort -u)\""
        )
    return "\n".join(lines)
