"""What Slurm says of a job: its `#SBATCH` lines as the variables that it sets, and srun's tasks."""

from __future__ import annotations

from napkinmath.inputs.scripts.shell_words import Word

GPUS_ON_NODE = "SLURM_GPUSGPUS_ON_NODE"
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
    for number, line in enumerate(text.splitlines()[:400], start=1):
        if not line.startswith("#SBATCH"):
            continue
        for names, pattern in _SBATCH:
            given = re.search(pattern, line)
            if given is not None:
                found |= {name: Word(given[1], number) for name in names}
    nodes, each = (found.get(name) for name in ("SLURM_NNODES", "SLURM_NTASKS_PER_NODE"))
    if nodes is not None and each is not None:
        total = str(int(nodes.text) * int(each.text))
        found["SLURM_NTASKS"] = found["SLURM_NPROCS"] = Word(total, each.line)
    return found
