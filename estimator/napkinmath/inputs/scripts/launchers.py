"""What comes before a script's own words in a launch line: processes, machines, accelerate's file.

Flags: torch 2.12 distributed/run.py get_args_parser; accelerate 1.14 commands/launch.py
launch_command_parser; DeepSpeed 0.19 launcher/runner.py parse_args.
"""

from __future__ import annotations

from typing import NamedTuple

from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.scripts.slurm import GPUS_ON_NODE
from napkinmath.inputs.scripts.source import Computed, Source
from napkinmath.inputs.scripts.words import Arguments, arguments, value_of
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from napkinmath.inputs.scripts.shell_words import Command, Word

    Load = Callable[[str], Source]

_MODULE = frozenset({"m", "module"})
_TORCH = _MODULE | frozenset(
    ["standalone", "no_python", "run_path", "use_env", "virtual_local_rank", "signals_to_handle"]
)
_DEEPSPEED = _MODULE | frozenset(
    [
        "no_python",
        "no_local_rank",
        "no_ssh",
        "no_ssh_check",
        "force_multi",
        "save_pid",
        "bind_cores_to_rank",
        "elastic_training",
    ]
)
_ACCELERATE = _MODULE | frozenset(
    [
        "cpu",
        "multi_gpu",
        "tpu",
        "ipex",
        "use_fsdp",
        "use_deepspeed",
        "use_megatron_lm",
        "use_parallelism_config",
        "use_xpu",
        "use_mps_device",
        "mps",
        "quiet",
        "q",
        "no_python",
        "same_network",
        "debug",
        "standalone",
        "tpu_use_cluster",
        "tpu_use_sudo",
        "no_tpu_cluster",
        "downcast_bf16",
        "enable_cpu_affinity",
        "dynamo_use_fullgraph",
        "dynamo_use_dynamic",
        "dynamo_use_regional_compilation",
    ]
)
_COMPOSER = frozenset(["v", "verbose", "c", "command_mode"]) | _MODULE
_PYTHON = frozenset(["u", "O", "OO", "B", "s", "S", "I", "E", "i", "v", "x"]) | {"m"}
# accelerate's flag -> section of its file that has the same key.
_IN_DEEPSPEED = (
    *("zero_stage", "offload_optimizer_device", "offload_param_device", "gradient_clipping"),
    *("gradient_accumulation_steps", "deepspeed_config_file", "zero3_init_flag"),
)


class Launched(NamedTuple):
    """A script or module, its own words, and what its launcher says."""

    target: str
    is_module: bool
    words: list[Word]
    sources: list[Source]
    line: int


def launched(
    words: list[Word], path: str, load: Load, settings: Mapping[str, Word]
) -> Launched | None:
    """What `torchrun ...`, `accelerate launch ...`, `deepspeed ...` or `python ...` starts with
    the shell's settings; None where it starts nothing."""
    name = base_name(words[0].text)
    rest = words[1:]
    if name in ("python", "python3", "python2") or name.startswith("python3."):
        found = _split(rest, _PYTHON, short=True)
        module = {
            "torch.distributed.run": "torchrun",
            "torch.distributed.launch": "torchrun",
            "accelerate.commands.launch": "accelerate",
            "deepspeed.launcher.runner": "deepspeed",
        }.get(found.target if found and found.is_module else "")
        if found is None or module is None:
            return None if found is None else _with(found, [])
        again = words[0]._replace(text=module)
        more = [words[0]._replace(text="launch")] if module == "accelerate" else []
        return launched([again, *more, *found.words], path, load, settings)
    if name == "torchrun":
        found = _split(rest, _TORCH)
        return None if found is None else _with(found, _torch_processes(found, path))
    if name == "composer":  # composer/cli/launcher.py: as many processes as GPUs, unless -n
        found = _split(rest, _COMPOSER)
        return None if found is None else _with(found, _composer_processes(found, path))
    if name == "deepspeed":
        found = _split(rest, _DEEPSPEED)
        return None if found is None else _with(found, _deepspeed_processes(found, path, settings))
    if name == "accelerate" and rest and rest[0].text == "launch":
        found = _split(rest[1:], _ACCELERATE)
        return None if found is None else _with(found, _of_accelerate(found, path, load, settings))
    return None


def base_name(text: str) -> str:
    """The last part of a path, with slashes of either kind."""
    return text.replace("\\", "/").rpartition("/")[2]


class _Split(NamedTuple):
    given: Arguments
    target: str
    is_module: bool
    words: list[Word]
    line: int


def _split(words: list[Word], switches: frozenset[str], *, short: bool = False) -> _Split | None:
    """A launcher's flags, each with one value, up to the script; None where no script follows."""
    at, flags, is_module = 0, list[tuple[str, list["Word"]]](), False
    while at < len(words) and words[at].text.startswith("-"):
        word = words[at]
        name, equals, value = word.text.lstrip("-").partition("=")
        key = name.replace("-", "_")
        at += 1
        if key in _MODULE:
            is_module = True
        if equals:
            flags.append((key, [word._replace(text=value)]))
        elif key in switches or (short and len(key) > 1):
            flags.append((key, []))
        elif at < len(words):
            flags.append((key, [words[at]]))
            at += 1
    if at >= len(words):
        return None
    given = Arguments()
    for key, value_words in flags:
        given.set(key, value_words)
    return _Split(given, words[at].text, is_module, words[at + 1 :], words[at].line)


def _with(found: _Split, sources: list[Source]) -> Launched:
    return Launched(found.target, found.is_module, found.words, sources, found.line)


def processes(
    path: str, tool: str, each: object, nodes: object, line: int, made: Computed | None = None
) -> list[Source]:
    """So many processes on so many machines as a source; none where the launcher does not say."""
    if made is not None:
        gpus = Source(path=path, kind="own", tool=tool, content={}, computed={"gpus": made})
        return [gpus]
    if type(each) is not int or each < 1:  # 'auto', 'gpu': as many as there are
        return []
    machines = nodes if type(nodes) is int and nodes > 0 else 1
    content: dict[str, object] = {"gpus": each * machines}
    if machines > 1:
        content["nodes"] = machines
    lines = dict.fromkeys(content, line)
    return [Source(path=path, kind="own", tool=tool, content=content, lines=lines)]


def run_on(sources: list[Source]) -> tuple[list[Source], int]:
    """What is launched and on how many GPUs, whoever says how many: branches that start one run in
    two ways launch it once."""
    gpus, rest = 1, list[Source]()
    for source in sources:
        content = dict(source.content)
        for key in ("gpus", "num_processes"):
            if isinstance(number := content.pop(key, None), int):
                gpus = number
        if content or source.computed or source.kind != "own":
            rest.append(source.replace(content=content, lines={}))
    return rest, gpus


def tasks(words: list[Word], settings: Mapping[str, Word], path: str) -> list[Source]:
    """srun's tasks, one process each: by its own flags, else by those of the job; none where
    neither says how many."""
    given = arguments(words)
    each, each_made = _first(given, "ntasks_per_node")
    nodes, nodes_made = _first(given, "nodes", "N")
    total, total_made = _first(given, "ntasks", "n")
    line = words[0].line if words else 0
    made = each_made or nodes_made or total_made
    if each is None and total is None and made is None:
        each, made = number_of(settings, "SLURM_NTASKS_PER_NODE")
    if nodes is None and made is None:
        nodes, made = number_of(settings, "SLURM_NNODES")
    if total is not None and type(nodes) is int and type(total) is int:
        each = max(1, total // nodes)
    return processes(path, "srun", each if each is not None else total, nodes, line, made)


def _first(given: Arguments, *keys: str) -> tuple[object, Computed | None]:
    for key in keys:
        if key in given.content or key in given.computed:
            return given.content.get(key), given.computed.get(key)
    return None, None


def _torch_processes(found: _Split, path: str) -> list[Source]:
    each, each_made = _first(found.given, "nproc_per_node")
    nodes, nodes_made = _first(found.given, "nnodes")
    if isinstance(nodes, str) and ":" in nodes:  # '1:4': as few as the run needs
        nodes = value_of(nodes.partition(":")[0])
    each = 1 if each is None and each_made is None else each
    return processes(path, "torchrun", each, nodes, found.line, each_made or nodes_made)


def _composer_processes(found: _Split, path: str) -> list[Source]:
    each, each_made = _first(found.given, "n", "nproc")
    world, world_made = _first(found.given, "world_size")
    number = world if world is not None else each
    return processes(path, "composer", number, 1, found.line, each_made or world_made)


def _deepspeed_processes(found: _Split, path: str, settings: Mapping[str, Word]) -> list[Source]:
    """Those of its flags, else one for each GPU of this machine that the shell leaves visible
    (launcher/runner.py main)."""
    each, each_made = _first(found.given, "num_gpus")
    nodes, nodes_made = _first(found.given, "num_nodes")
    included = found.given.content.get("include", found.given.content.get("i"))
    if each is None and isinstance(included, str) and ":" in included:
        hosts = [host.partition(":")[2].split(",") for host in included.split("@")]
        each, nodes = len(hosts[0]), len(hosts)
        if any(len(host) != each for host in hosts):
            source = f"hosts of several sizes in --include {shown(included)}"
            each_made = Computed(source=source, line=found.line)
    if each is None and each_made is None and "hostfile" not in found.given.content:
        each = gpus_found(settings)
    started = processes(path, "deepspeed", each, nodes, found.line, each_made or nodes_made)
    return started or [every_gpu(path, "deepspeed")]


def every_gpu(path: str, tool: str) -> Source:
    """That a tool starts a process for each GPU of a machine that nothing describes."""
    return Source(path=path, kind="own", tool=tool, content={}, starts_all=True)


def _of_accelerate(
    found: _Split, path: str, load: Load, settings: Mapping[str, Word]
) -> list[Source]:
    """What `accelerate launch` starts: as many processes as its file and flags say, else one for
    each GPU that it finds (commands/launch.py _validate_launch_command)."""
    on_gpus = not {"cpu", "tpu", "use_mps_device", "mps", "ipex"} & {*found.given.content}
    made = _accelerate_file(found, path, load)
    if not on_gpus or any({"num_processes"} & {*s.content, *s.computed} for s in made):
        return made
    each = gpus_found(settings)
    if each is None:
        return [*made, every_gpu(path, "accelerate")]
    base = made[0] if made else Source(path=path, kind="accelerate", content={})
    nodes = base.content.get("num_machines", 1)
    number = each * nodes if isinstance(nodes, int) and nodes > 0 else each
    content = {"distributed_type": "MULTI_GPU" if number > 1 else "NO", **base.content}
    return [base.replace(content={**content, "num_processes": number})]


def _accelerate_file(found: _Split, path: str, load: Load) -> list[Source]:
    """accelerate's file with the flags of `accelerate launch` over it."""
    given = found.given
    file = given.content.pop("config_file", None)
    made = given.computed.pop("config_file", None)
    if made is not None:
        raise InputError(
            f"--config_file comes from {made.source}, which no line says; give accelerate's file"
            " beside the script"
        )
    base = Source(path=path, kind="accelerate", content={}) if file is None else load(str(file))
    if base.kind != "accelerate":
        raise InputError(f"--config_file {shown(file)} is no file of accelerate; check the path")
    content: dict[str, object] = dict(base.content)
    for key, value in given.content.items():
        _set_accelerate(content, key, value)
    computed = {
        key: it
        for key, it in given.computed.items()
        if key in ("num_processes", "num_machines", "mixed_precision")
    }
    if file is None and not content and not computed:
        return []
    for key in computed:
        content.pop(key, None)
    return [base.replace(content=content, computed=computed)]


def _set_accelerate(content: dict[str, object], key: str, value: object) -> None:
    """Puts a flag of `accelerate launch` where its file has it."""
    kinds = {"multi_gpu": "MULTI_GPU", "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED"}
    if key in kinds:
        content["distributed_type"] = kinds[key]
        return
    if key == "gpu_ids" and isinstance(value, (str, int)) and str(value) != "all":
        content.setdefault("num_processes", len(str(value).split(",")))
        return
    section = (
        "fsdp_config"
        if key.startswith("fsdp_")
        else "parallelism_config"
        if key.startswith("parallelism_config_")
        else "deepspeed_config"
        if key in _IN_DEEPSPEED
        else ""
    )
    if not section:
        if key in ("num_processes", "num_machines", "mixed_precision"):
            content[key] = value
        return
    inner = content.get(section)
    known: Mapping[str, object] = inner if isinstance(inner, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    content[section] = {**known, key: value}


def refuse_cut_off(line: int, command: Command, path: str) -> None:
    """Raises InputError for words behind the end of a launch: a comment or an empty line among its
    continued lines ends a command, and what follows never reaches the training."""
    names = [word.text for word in command.words if word.text.startswith("--")]
    raise InputError(
        f"{quoted(path)}: the command of line {line} ends before line {command.words[0].line}, as a"
        f" comment or an empty line among its lines makes it do, so {names[0]} and what follows does"
        " not reach the training; take that line out"
    )


def no_training(what: str, run: list[Command], starters: tuple[str, ...]) -> InputError:
    """What is said of a script or line that launches no training: the scripts that it runs may."""
    others = [
        name
        for command in run
        if base_name(command.words[0].text) in ("bash", "sh", "source", ".")
        for name in [word.text for word in command.words[1:2]]
        if name.endswith((".sh", ".slurm", ".sbatch"))
    ]
    if others:
        named = " and ".join(shown(base_name(name)) for name in dict.fromkeys(others[:3]))
        return InputError(f"{shown(what)} launches no training itself; it runs {named}: give that")
    return InputError(
        f"{shown(what)} launches no training that is read; known launchers: {', '.join(starters)}"
    )


def visible_gpus(settings: Mapping[str, Word]) -> int | None:
    """GPUs that CUDA_VISIBLE_DEVICES leaves; None where it is not set."""
    word = settings.get("CUDA_VISIBLE_DEVICES")
    if word is None or word.source or not word.text.strip():
        return None
    return len(word.text.split(","))


def gpus_found(settings: Mapping[str, Word]) -> int | None:
    """GPUs of a machine by what the shell leaves visible, else by Slurm; None where neither says."""
    visible = visible_gpus(settings)
    on_node = number_of(settings, GPUS_ON_NODE)[0]
    return visible if visible is not None or not isinstance(on_node, int) else on_node


def number_of(settings: Mapping[str, Word], name: str) -> tuple[object, Computed | None]:
    """A setting's value, and where it comes from if that is no text."""
    word = settings.get(name)
    if word is None:
        return None, None
    made = Computed(source=word.source, line=word.line) if word.source else None
    return value_of(word.text), made


__all__ = ("Launched", "Load", "arguments", "launched", "number_of", "processes", "visible_gpus")
