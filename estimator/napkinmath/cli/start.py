"""What `estimate` says when nothing is asked, and its help in one screen."""

from __future__ import annotations

from importlib.util import find_spec

from napkinmath.cli.commands import COMMANDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 80
EXAMPLES = (
    ("estimate llama-7b --qlora --gpu rtx4090", "does it fit, and why"),
    ("estimate job.yaml --gpu l4", "the same for a job file"),
    ("estimate plan --model llama-3.1-8b --gpu rtx4090", "what to run on this GPU"),
    ("estimate models qwen", "which models are known"),
    ("estimate serve --open", "all of it in a browser"),
)
_FLAGS = (
    ("--gpu NAME", "a GPU of `estimate gpus`; --gpus 8xH100 for several"),
    ("--lora, --qlora", "what is trained; without either every parameter"),
    ("--bs N, --ctx N", "samples per GPU and micro-step; tokens in each"),
    ("--optimizer, --precision", "as the training script names them"),
    ("--workload NAME", "sft, dpo, grpo, ppo, reward and others"),
    ("--checkpointing full", "recompute activations in the backward"),
    ("--fsdp, --zero 3, --tp N", "how several GPUs share the step"),
    ("--explain", "every figure as a formula"),
    ("--json, --timeline FILE", "the answer for machines; a picture of the step"),
)


def run(argv: Sequence[str]) -> int:
    """Prints a start for somebody who asked nothing; `argv` is empty."""
    print("What does one training step cost in memory and time?\n")
    print("\n".join(_two_columns(EXAMPLES)))
    print("\nmore: estimate --help")
    return 0


def short_help() -> str:
    """Usage, examples, the flags asked for most and the commands that are there: one screen."""
    return "\n".join(
        [
            "usage: estimate MODEL|JOB.yaml [flags]    or: estimate COMMAND [flags]",
            "",
            *_two_columns(EXAMPLES),
            "",
            *_two_columns(_FLAGS),
            "",
            "commands (estimate COMMAND --help):",
            *_wrapped(_installed()),
            "",
            "exit codes: 0 fits or no GPU given, 1 does not, 2 bad input, 3 cannot tell",
            "every flag: estimate --help all",
        ]
    )


def _installed() -> list[str]:
    def is_there(target: str) -> bool:
        module = target.partition(":")[0]
        return bool(find_spec(module.partition(".")[0]) and find_spec(module))

    return [name for name, (target, _) in COMMANDS.items() if is_there(target)]


def _two_columns(rows: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(left) for left, _ in rows)
    return [f"  {left:<{width}}  {right}" for left, right in rows]


def _wrapped(names: Sequence[str]) -> list[str]:
    lines = [" "]
    for name in names:
        if len(lines[-1]) + len(name) + 1 > WIDTH:
            lines.append(" ")
        lines[-1] += f" {name}"
    return lines
