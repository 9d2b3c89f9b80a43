"""Source: keys and values found somewhere, before their reader is called."""

from __future__ import annotations

from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.scripts.shell_words import Word

PASTED = "the launch line"
SHELL = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".job", ".pbs", ".lsf")
PYTHON = (".py", ".ipynb")
# Names of files of other programs that hold commands, and keys at the top of YAML that does.
MAKE, DOCKER = ("makefile", "gnumakefile"), ("dockerfile", "containerfile")
HOLDS_COMMANDS = (".mk", ".dockerfile", ".md")
_RUNS = frozenset(["run", "commands", "command", "jobs", "services", "spec", "steps", "script"])
# What a training reads from its environment: the launcher's, PyTorch's, and qwen_vl_utils' sizes.
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
PIXELS = (
    *("MIN_PIXELS", "MAX_PIXELS", "IMAGE_MIN_TOKEN_NUM", "IMAGE_MAX_TOKEN_NUM"),
    *("VIDEO_MIN_PIXELS", "VIDEO_MAX_PIXELS", "VIDEO_MAX_TOKEN_NUM", "FPS", "FPS_MAX_FRAMES"),
)
EXPORTED = (
    *("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES", "FORCE_TORCHRUN"),
    *("SLURM_NNODES", "SLURM_NTASKS_PER_NODE", "SLURM_GPUS_ON_NODE", "GPUS_PER_NODE", "NUM_NODES"),
    *ALLOCATOR,
    *PIXELS,
)


def allocator_of(settings: Mapping[str, Word]) -> Word | None:
    """What an environment asks of PyTorch's allocator; an empty value asks nothing."""
    given = (settings[name] for name in ALLOCATOR if name in settings)
    return next((word for word in given if word.text or word.source), None)


def is_script(path: str) -> bool:
    """Whether a path is a script's, or of a file that holds commands, by its name."""
    name = path.lower().replace("\\", "/").rpartition("/")[2]
    return name.endswith((*SHELL, *PYTHON, *HOLDS_COMMANDS)) or name.startswith((*MAKE, *DOCKER))


class Computed(Record):
    """A value that is known only when the script runs."""

    source: str
    """'$BS', 'args.bs'."""
    line: int = 0


class Source(Record):
    """The keys of one file, or of one part of a script."""

    path: str
    content: Mapping[str, object]
    kind: str = ""
    """Whose keys these are; '' where the keys themselves tell."""
    tool: str = ""
    """What a script calls itself, where its reader's name would say less."""
    kinds: tuple[str, ...] = ()
    """Readers among which the keys decide; () for any."""
    text: str = ""
    lines: Mapping[str, int] = {}
    elsewhere: Mapping[str, str] = {}
    """Keys that another file says -> its path."""
    computed: Mapping[str, Computed] = {}
    """Keys whose values are known only when the script runs."""
    bounded: Mapping[str, Computed] = {}
    """Keys whose values are at most what the content says."""
    trained_by: str = ""
    """The trainer that a script names: 'dpo', 'sft'; 'trainer' for the Trainer itself."""
    code: str = ""
    """The path of the Python code that was read with a launch line's words."""
    given: Mapping[str, object] = {}
    """Options beside the file, which win over it."""
    table: str = ""
    """The table of known keys, where it is not the reader's own."""
    notes: tuple[str, ...] = ()
    is_flag: bool = False
    starts_all: bool = False
    """Its `tool` starts a process for each GPU that it finds, and nothing says how many."""


def runs_commands(source: Source) -> bool:
    """Whether a file that no reader knows is YAML of a scheduler, a container or a workflow."""
    return source.kind == "own" and bool(_RUNS & {*source.content})
