"""What Slurm says of a job: its `#SBATCH` lines as the variables that it sets, and srun's tasks."""

from __future__ import annotations

from napkinmath.inputs.scripts.shell_words import Word

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

GPUS_ON_NODE = "SLURM_GPUS_ON_NODE"
# All GPUs of a job, over which `--gpus` spreads its nodes.
_ALL_GPUS = r"(?:-{2}gpus[= ]|-G ?)(?:[\w-]+:)?(\d{1,6})\b"
_SBATCH = (
    (("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), r"(?:-{2}nodes[= ]|-N ?)(\d{1,6})\b"),
    (("SLURM_NTASKS_PER_NODE",), r"-{2}n?tasks-per-node[= ](\d{1,6})\b"),
    ((GPUS_ON_NODE, "SLURM_GPUS_PER_NODE"), r"-{2}gpus-per-node[= ](?:[\w-]+:)?(\d{1,6})\b"),
    ((GPUS_ON_NODE,), r"-{2}gres[= ]gpu(?::[\w-]+)?:(\d{1,6})\b"),
)


def slurm_variables(text: str) -> dict[str, Word]:
    """What Slurm sets for the job that a script's `#SBATCH` lines ask for (sbatch(1), output
    environment variables)."""
    import re

    found: dict[str, Word] = {}
    total: Word | None = None
    for number, line in enumerate(text.splitlines()[:400], start=1):
        if not line.startswith("#SBATCH"):
            continue
        for names, pattern in _SBATCH:
            given = re.search(pattern, line)
            if given is not None:
                found |= {name: Word(given[1], number) for name in names}
        if (given := re.search(_ALL_GPUS, line)) is not None:
            total = Word(given[1], number)
    nodes, each = (found.get(name) for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE"))
    if total is not None and GPUS_ON_NODE not in found:
        machines = int(nodes.text) if nodes is not None else 1
        on_node = total._replace(text=str(max(1, int(total.text) // max(1, machines))))
        found |= {GPUS_ON_NODE: on_node, "SLURM_GPUS": total}
    if nodes is not None and each is not None:
        tasks = str(int(nodes.text) * int(each.text))
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = Word(tasks, each.line)
    return found


def gpus_of_srun(words: list[Word], settings: Mapping[str, Word]) -> dict[str, Word]:
    """The settings of what `srun` starts, with the GPUs of a node that its own flags say."""
    line = " ".join(word.text for word in words)
    said = slurm_variables(f"#SBATCH {line}")
    on_node = said.get(GPUS_ON_NODE)
    if on_node is None or not words:
        return dict(settings)
    return {**settings, GPUS_ON_NODE: on_node._replace(line=words[0].line)}
