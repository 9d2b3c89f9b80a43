"""A script's sources: of a shell script, a Python file or a notebook."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError
from napkinmath.inputs.marks import kind_by_marks
from napkinmath.inputs.megatron import arguments, is_arguments, kind_of_arguments
from napkinmath.inputs.scripts.containers import gpu_of_yaml, shell_of_file, shell_of_yaml
from napkinmath.inputs.scripts.launch import sources_of_script
from napkinmath.inputs.scripts.slurm import GPUS_ON_NODE, slurm_variables
from napkinmath.inputs.scripts.source import PYTHON, Source
from napkinmath.models.config_file import quoted, read_text

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.scripts.launchers import Load


# What torchrun would be told -> what Slurm says of it.
_MACHINES = {
    "nnodes": ("SLURM_NNODES",),
    "nproc_per_node": (GPUS_ON_NODE, "SLURM_NTASKS_PER_NODE"),
}

# Words of a shell script -> the device on which it trains, of which there are no rules.
_OTHER_DEVICES = {
    "NEURON_": "AWS Trainium",
    "neuron_parallel_compile": "AWS Trainium",
    "PJRT_DEVICE=TPU": "a TPU",
    "HABANA_": "Intel Gaudi",
    "gaudi_spawn.py": "Intel Gaudi",
}


def sources_of(source: Source | None, path: str, load: Load) -> list[Source]:
    """The sources of a script, or of the training that YAML runs (a task's or a workflow's; the
    YAML itself where it runs nothing). Raises InputError."""
    if source is None:
        return sources_of_file(path, load)
    text = shell_of_yaml(source.content, source.text)
    if not text:
        return [source]
    gpu = gpu_of_yaml(source.content)
    own = [source.replace(content={"gpu": gpu}, text="")] if gpu else []
    if not values.is_mapping(source.content.get("parameters")):
        return [*sources_of_script(text, source.path, load), *own]
    found = sources_of_script(text, source.path, lambda name: _mounted(source, name, load))
    return [*found, *_computed_on(source, found), *own]


def _mounted(source: Source, name: str, load: Load) -> Source:
    """MosaicML's platform writes `parameters` of a run's YAML to a file for its command
    (docs.mosaicml.com training/yaml_schema)."""
    if name != "/mnt/config/parameters.yaml":
        return load(name)
    given = values.mapping(source.content["parameters"], "parameters")
    return source.replace(content=given, kind=kind_by_marks(given) or "own")


def _computed_on(source: Source, found: list[Source]) -> list[Source]:
    """The GPUs that its `compute` asks for, where no launcher says a number."""
    asked = source.content.get("compute", source.content)
    gpus = values.mapping(asked, "compute").get("gpus") if values.is_mapping(asked) else None
    if type(gpus) is not int or any("gpus" in one.content for one in found):
        return []
    return [source.replace(content={"gpus": gpus}, text="")]


def sources_of_file(path: str, load: Load) -> list[Source]:
    """The sources that a script names or is. Raises InputError."""
    text = read_text(path, what="script")
    if not text.strip():
        raise InputError(f"script {quoted(path)} is empty; give the script that trains")
    if path.lower().endswith(PYTHON):
        return _of_python(text, path, load)
    text = shell_of_file(text, path)
    _refuse_other_devices(text, path)
    if not is_arguments(text):
        return sources_of_script(text, path, load)
    try:
        sources = sources_of_script(text, path, load)
    except InputError:
        sources = []  # arguments alone, which another script sources
    if any(source.kind in ("megatron", "slime") for source in sources):
        return sources
    found = arguments(text)
    machines = slurm_variables(text)
    for name, variables in _MACHINES.items():
        given = next((machines[word].text for word in variables if word in machines), None)
        if given is not None:
            found.setdefault(name, int(given))
    return [Source(path=path, content=found, kind=kind_of_arguments(found), text=text)]


def _of_python(text: str, path: str, load: Load) -> list[Source]:
    """The sources of a Python file or notebook; of a notebook whose code trains nothing those of
    its commands."""
    from napkinmath.inputs.scripts.python_job import sources_of_python

    try:
        return sources_of_python(text, path)
    except InputError:
        if not path.lower().endswith(".ipynb") or not (found := _launched_in(text, path, load)):
            raise
        return found


def _launched_in(text: str, path: str, load: Load) -> list[Source]:
    """The sources of the one training that a notebook's commands launch; none where they launch
    none."""
    from napkinmath.inputs.scripts.python_text import shell_of_cells

    commands = shell_of_cells(text, path)
    try:
        return [
            one.replace(code=one.code or path) for one in sources_of_script(commands, path, load)
        ]
    except InputError as error:
        if " trainings, on lines " not in str(error):
            return []
        raise


def _refuse_other_devices(text: str, path: str) -> None:
    """Raises for a script of a device that is no GPU; comments count for nothing."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    for word, device in _OTHER_DEVICES.items():
        if any(word in line for line in lines):
            raise InputError(
                f"script {quoted(path)} trains on {device} ({word}), for which there are no rules;"
                " give the model and the flags of a run on GPUs"
            )
