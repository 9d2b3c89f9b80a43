"""Launch lines, in a shell script or pasted, as the sources they name: the launcher's processes,
the files it is given, and the words of the script that it starts."""

from __future__ import annotations

import os

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.inputs.megatron import is_arguments
from napkinmath.inputs.picture_scripts import picture_sources, trains_pictures
from napkinmath.inputs.retrieval import RERANKER, reads_pairs
from napkinmath.inputs.scripts import launchers, swift
from napkinmath.inputs.scripts.beside import (
    is_own,
    launched_python,
    never_trains,
    script_beside,
    trains,
)
from napkinmath.inputs.scripts.documents import with_documents
from napkinmath.inputs.scripts.hf_examples import as_example
from napkinmath.inputs.scripts.launchers import run_on
from napkinmath.inputs.scripts.litgpt_words import name_litgpts
from napkinmath.inputs.scripts.megatron_words import megatron_source
from napkinmath.inputs.scripts.olmo_core_words import olmo_core_sources
from napkinmath.inputs.scripts.programs import HYDRA, MODULES, PROGRAMS, STARTERS, Program
from napkinmath.inputs.scripts.shell import commands
from napkinmath.inputs.scripts.shell_files import ShellFiles
from napkinmath.inputs.scripts.shell_folders import entered, in_folder
from napkinmath.inputs.scripts.shell_words import Command, Word, quoted_line
from napkinmath.inputs.scripts.slurm import gpus_of_srun
from napkinmath.inputs.scripts.source import PASTED, Source, allocator_of
from napkinmath.inputs.scripts.usual_names import by_alpaca_lora, by_usual_names
from napkinmath.inputs.scripts.words import CONFIGS, Arguments, arguments, overridden
from napkinmath.inputs.trained_by import OWN, PLAIN_TRAINER, WORDS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.scripts.launchers import Launched, Load

_FILES = (".yaml", ".yml", ".json", ".toml")


_SUBMITTER = "mason.py"
_PLAIN = ("python", "python3")
_SAYS = ("echo", "printf", "pkill", "pgrep", "which", "pip", "pip3")
_NO_TRAINING = ("generation", "generate", "inference", "infer", "eval", "evaluate", "predict")
_TRAINING = ("train", "training", "finetune", "finetuning", "pretrain", "sft", "tune", "trainer")


def sources_of_script(text: str, path: str, load: Load) -> list[Source]:
    """The sources of the one training that a shell script launches. Raises InputError where it
    launches none, or two that differ."""
    found, run = list[tuple[int, list[Source]]](), list["Command"]()
    for runs in (False, True):  # the files that it runs, where it launches nothing itself
        if not found and (not runs or _runs_others(run)):
            run = commands(text, ShellFiles(path, runs=runs))
            found = _launches(run, path, load)
    if not found:
        raise launchers.no_training(path, run, STARTERS)
    if len(found) > 1:
        lines = ", ".join(str(line) for line, _ in found)
        raise InputError(
            f"{shown(path)} launches {len(found)} trainings, on lines {lines}; give one of them"
            " after `--`"
        )
    return found[0][1]


def _launches(run: list[Command], path: str, load: Load) -> list[tuple[int, list[Source]]]:
    """(line, sources) of each training that the commands launch."""
    found: list[tuple[int, list[Source]]] = []
    folder = ""
    for command in run:
        if found and command.words[0].text.startswith("--"):
            launchers.refuse_cut_off(found[-1][0], command, path)
        if command.words[0].text in ("cd", "pushd"):
            folder = entered(folder, command)
        sources = _run_of(in_folder(command, folder, path), path, load, pasted=False)
        if sources and not any(run_on(sources) == run_on(other) for _, other in found):
            found.append((command.words[0].line, sources))
    return found


def _runs_others(run: list[Command]) -> bool:
    """Whether a script runs other ones."""
    names = [word.text for command in run for word in command.words[:2]]
    return any(name.endswith((".sh", ".bash", ".slurm", ".sbatch")) for name in names)


def sources_of_line(words: list[str], load: Load) -> list[Source]:
    """The sources of a launch line's words. Raises InputError where it launches no training."""
    found = commands(quoted_line(words) if len(words) > 1 else words[0])
    for command in found:
        if sources := _run_of(command, PASTED, load, pasted=True):
            return sources
    raise launchers.no_training(" ".join(words), found, STARTERS)


def _run_of(command: Command, path: str, load: Load, *, pasted: bool) -> list[Source]:
    """The sources of what a command launches, and what its environment asks of PyTorch's
    allocator."""
    found = _sources_of(command, path, load, pasted=pasted)
    found = [with_documents(source, command.documents) for source in found]
    word = allocator_of(command.settings)
    if not found or word is None:
        return found
    given = Arguments()
    given.set("allocator", [word])
    return [*found, _source(Program("", ("own",)), given, {}, path).replace(kind="own")]


def _sources_of(command: Command, path: str, load: Load, *, pasted: bool) -> list[Source]:
    words = command.words
    names = [launchers.base_name(word.text) for word in words]
    if names[0] == "srun":
        settings = gpus_of_srun(words[1 : _target_at(names)], command.settings)
        command = command._replace(settings=settings)
    if _SUBMITTER in names and "--" in names:
        return _submitted(command, path, load, pasted=pasted)
    if names[0] in _SAYS:
        return []
    at = _target_at(names)
    if at is None:
        return []
    if names[at] not in STARTERS:
        python = Word("python", words[at].line)
        words, names = [*words[:at], python, *words[at:]], [*names[:at], "python", *names[at:]]
    if names[at] in PROGRAMS:
        return _of_program(PROGRAMS[names[at]], command, words[at + 1 :], path, load)
    found = launchers.launched(words[at:], path, load, command.settings)
    if found is None:
        return []
    if not found.sources and launchers.base_name(words[0].text) == "srun":
        tasks = launchers.tasks(words[1:at], command.settings, path)
        found = found._replace(sources=tasks)
    strict, program, own_verb = pasted or names[at] not in _PLAIN, None, ""
    _, in_folder, own = found.target.rpartition("openrlhf/cli/")
    module = f"openrlhf.{own.removesuffix('.py')}" if in_folder else found.target
    if found.is_module or in_folder:
        program = MODULES.get(module.partition(".")[0])
        own_verb = module.rpartition(".")[2]
    elif own_verb := swift.verb_of(found.target):
        program = PROGRAMS[swift.program_of(found.target)]
    elif (started := launchers.base_name(found.target)) in PROGRAMS:  # torchrun "$(which swift)"
        tool, words = PROGRAMS[started], found.words
        made = _of_program(tool, command, words, path, load, started=found.sources)
        return [*found.sources, *made] if made else []
    if any(word.text.lstrip("+").startswith("actor_rollout_ref.") for word in found.words):
        # a script of verl's, or of what is built on it
        return _of_program(HYDRA, command, found.words, path, load)
    if program is not None:
        if program.verbs and own_verb not in (*program.verbs, "cli", "launcher"):
            return []
        word = Word(program.verbs[0] if program.verbs else "", found.line)
        text = own_verb if own_verb in program.verbs else word.text
        inner = [word._replace(text=text), *found.words]
        inner = inner if program.verbs else found.words
        made = _of_program(program, command, inner, path, load, started=found.sources)
        if made and own_verb.startswith("train_"):
            made[-1] = made[-1].replace(trained_by=own_verb.removeprefix("train_"))
        return [*found.sources, *made] if made else []
    if is_arguments(quoted_line([word.text for word in found.words])):
        return [megatron_source(found, command, path)]
    if trains_pictures(found.target, found.words):
        file, given = _file_of(arguments(found.words), load)
        return picture_sources(found, given, file, path, load)
    made = olmo_core_sources(found, path)
    made = _of_words(found, path, load, strict=strict) if made is None else made
    seen = launchers.visible_gpus(command.settings) or 1
    alone = not found.sources and names[at] in _PLAIN
    if made and seen > 1 and alone and "trainer" in (made[-1].kind, *made[-1].kinds):
        made[-1] = made[-1].replace(content={**made[-1].content, "visible_in_code": seen})
    return [*found.sources, *made] if made else []


def _target_at(names: list[str]) -> int | None:
    """Where a launcher, or a script that is started by its name, stands in a command."""
    return next((i for i, _ in enumerate(names) if _starts(names, i)), None)


def _starts(names: list[str], at: int) -> bool:
    """Whether a launcher stands at a place, or a script that `uv run` or its own name starts."""
    name = names[at]
    return name in STARTERS or (name.endswith(".py") and (at == 0 or "uv" in names[:at]))


def _submitted(command: Command, path: str, load: Load, *, pasted: bool) -> list[Source]:
    """What open-instruct's mason.py submits: `mason.py --num_nodes N --gpus M -- LAUNCH LINE`. Its
    machines replace the processes that accelerate is given; those of a policy in reinforcement are
    in its own words."""
    words = command.words
    names = [launchers.base_name(word.text) for word in words]
    at = len(names) - names[::-1].index("--")
    plain = [word._replace(text=word.text.removeprefix("&&")) for word in words[at:]]
    inner = _sources_of(command._replace(words=plain), path, load, pasted=pasted)
    if not inner or inner[-1].trained_by == "grpo":
        return inner
    given = arguments(words[names.index(_SUBMITTER) + 1 : at - 1])
    each, nodes = given.content.get("gpus"), given.content.get("num_nodes")
    machines = launchers.processes(path, _SUBMITTER, each, nodes, words[0].line)
    return [*inner, *machines]


# ---------------------------------------------------------------- programs


def _of_program(
    program: Program,
    command: Command,
    words: list[Word],
    path: str,
    load: Load,
    *,
    started: list[Source] | None = None,
) -> list[Source]:
    """The sources of `PROGRAM VERB ...`, whose processes a launcher has `started`; none for a verb
    that trains nothing."""
    verb = ""
    if program.verbs:
        if not words or words[0].text not in program.verbs:
            return []
        verb, words = words[0].text, words[1:]
    if program.tool == "torchtune":
        return _of_torchtune(words, path, load)
    if program.hydra:
        made = overridden({}, words)
        return [_source(program, made, _hydra_file(made, load), path)]
    given = arguments(words)
    file, given = _file_of(given, load)
    base: Mapping[str, object] = {} if file is None else file.content
    sources = _processes_of(program, command, given, path, words)
    if program.tool in ("ms-swift", "Megatron-SWIFT"):
        swift.name_pixels(given, command)
    if program.tool == "ms-swift":
        swift.name_command(given, base, verb)
        swift.name_visible(given, command, started or [])
        program = program._replace(kinds=swift.kinds_of(given, base))
    if program.tool == "litgpt":
        name_litgpts(given, base, verb)
    if program.tool != "TRL":
        return [*sources, _source(program, given, base, path)]
    return [*sources, _source(program, given, base, path).replace(trained_by=verb)]


def _hydra_file(made: Arguments, load: Load) -> Mapping[str, object]:
    """The keys of the file that `--config-path` and `--config-name` say. Where it is not here, what
    they say is left to the reader, who knows the tool's own files."""
    folder, name = (made.content.get(f"config-{part}") for part in ("path", "name"))
    if not isinstance(folder, str) or not isinstance(name, str):
        return {}
    try:
        found = load(f"{folder}/{name.removesuffix('.yaml')}.yaml").content
    except InputError:
        return {}
    for part in ("path", "name"):
        del made.content[f"config-{part}"]
    return found


def _merged(base: Mapping[str, object], given: Mapping[str, object]) -> dict[str, object]:
    """A file's keys with those of a line over them, section by section."""
    found = dict(base)
    for key, value in given.items():
        below = found.get(key)
        if values.is_mapping(value) and values.is_mapping(below):
            found[key] = _merged(values.mapping(below, key), values.mapping(value, key))
        else:
            found[key] = value
    return found


def _source(program: Program, given: Arguments, base: Mapping[str, object], path: str) -> Source:
    content = _merged({k: v for k, v in base.items() if k not in given.computed}, given.content)
    return Source(
        path=path,
        content=content,
        tool=program.tool,
        kinds=program.kinds,
        lines=given.lines,
        elsewhere=given.elsewhere,
        computed=given.computed,
    )


def _processes_of(
    program: Program, command: Command, given: Arguments, path: str, words: list[Word]
) -> list[Source]:
    """How many processes a program starts by itself: LLaMA-Factory one for each GPU it sees
    (launcher.py), ms-swift NPROC_PER_NODE (cli/utils.py), axolotl those of its flags."""
    settings, line = command.settings, words[0].line if words else 0
    each, made = launchers.number_of(settings, "NPROC_PER_NODE")
    nodes, nodes_made = launchers.number_of(settings, "NNODES")
    if program.tool == "LLaMA-Factory" and each is None and made is None:
        each = launchers.gpus_found(settings)
        if each is None:
            return [launchers.every_gpu(path, program.tool)]
    elif program.tool in ("axolotl", "TRL"):
        each, made = (
            given.content.pop("num_processes", None),
            given.computed.pop("num_processes", None),
        )
        nodes, nodes_made = given.content.pop("num_machines", None), None
    return launchers.processes(path, program.tool, each, nodes, line, made or nodes_made)


def _of_torchtune(words: list[Word], path: str, load: Load) -> list[Source]:
    """`tune run [torchrun's flags] RECIPE --config FILE key=value ...`."""
    found = launchers.launched([Word("torchrun", 0), *words], path, load, {})
    if found is None:
        return []
    program = PROGRAMS["tune"]
    at = next((i for i, w in enumerate(found.words) if w.text == "--config"), None)
    name = found.words[at + 1].text if at is not None and at + 1 < len(found.words) else ""
    if not name.endswith(_FILES):
        raise InputError(
            f"tune run {found.target} --config {shown(name)} is a config inside torchtune; write"
            " it out with `tune cp`, and give the file"
        )
    assert at is not None
    base = load(name)
    rest = [*found.words[:at], *found.words[at + 2 :]]
    made = overridden(dict(base.content), rest)
    return [*found.sources, _source(program, made, {}, base.path).replace(text=base.text)]


# ---------------------------------------------------------------- scripts


def _file_of(given: Arguments, load: Load) -> tuple[Source | None, Arguments]:
    """The file that a script is given, as `--config FILE` or as its first word, and the other
    words."""
    for key in CONFIGS:
        named = given.content.get(key)
        if isinstance(named, str) and named.endswith(_FILES):
            del given.content[key]
            more = overridden({}, given.free)
            given.content |= more.content
            given.computed |= more.computed
            return load(named), given
    for word in given.free:
        if word.text.endswith(_FILES):
            given.free.remove(word)
            more = overridden({}, given.free)  # LLaMA-Factory's `train FILE key=value`
            given.content |= more.content
            given.computed |= more.computed
            return load(word.text), given
    return None, given


def _of_words(found: Launched, path: str, load: Load, *, strict: bool) -> list[Source]:
    """The words of a launched script; none where they are nothing of a trainer's, unless
    `strict`."""
    module = f"{found.target.replace('.', '/')}.py"
    target, given = module if found.is_module else found.target, arguments(found.words)
    file, given = _file_of(given, load)
    stem = os.path.basename(target).rpartition(".")[0].lower().replace("-", "_").split("_")
    if any(word in _NO_TRAINING for word in stem) and not any(w in _TRAINING for w in stem):
        return []
    beside = "" if path == PASTED else path
    read = file is None and (is_own(given) or "base_model" in given.content)
    python = script_beside(target, beside) if read else ""
    if python and (made := launched_python(given, python, path)):
        return made
    gpus = [n for s in found.sources if isinstance(n := s.content.get("gpus"), int)]
    alpaca = by_alpaca_lora(given, max(gpus, default=1)) if file is None else []
    own_words = file is None and is_own(given)
    told = alpaca + (by_usual_names(given, "_".join(stem)) if own_words else [])
    if given.content.get("deepspeed", own_words) is True and "deepspeed_config" in given.content:
        given.content["deepspeed"] = given.content.pop("deepspeed_config")
    kinds = ("trainer", "llama-factory", "axolotl", "open-instruct")
    if file is not None and file.kind not in ("own", "model config", *kinds):
        kinds = (file.kind,)
    program = Program(os.path.basename(target), kinds)
    source = _source(program, given, {} if file is None else file.content, path)
    has_file = file is not None and kinds == (file.kind,)
    if file is not None and has_file:  # what it names lies beside it
        source = source.replace(path=file.path, text=file.text)
    if not strict and not has_file and not trains(source):
        return []
    if not strict and file is not None and never_trains(script_beside(target, beside)):
        return []
    if reads_pairs(target, source.content):
        return [source.replace(trained_by=RERANKER)]
    named = next((word for word in stem if word in WORDS), "")
    if given.is_loop and WORDS.get(named, "sft") == "sft":  # TRL's defaults are not the loop's
        named = PLAIN_TRAINER
    if not told:
        return [as_example(source.replace(trained_by=named), target)]
    folders = os.path.dirname(path).lower().replace("-", "_").replace("/", "_").split("_")
    parts = [*folders[::-1], *stem]
    own = next((word for word in parts if word in OWN), None)
    content = source.content if own is None else {**source.content, "own_trainer": own}
    notes = (f"{os.path.basename(target)}: {', '.join(told)}",)
    return [source.replace(content=content, trained_by=PLAIN_TRAINER, notes=notes)]
