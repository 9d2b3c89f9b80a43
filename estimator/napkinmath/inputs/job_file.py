"""Job files: ours and those of other trainers (_KINDS), each found out by its keys."""

from __future__ import annotations

import os
from functools import partial

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.models import find_row, is_publisher
from napkinmath.config.job_keys import Difference, JobKey, JobKeys, KeyUse
from napkinmath.inputs import toml_text, yaml_text
from napkinmath.inputs.flags_over_files import make_way, with_flags
from napkinmath.inputs.foreign import ForeignJob
from napkinmath.inputs.known_keys import settled
from napkinmath.inputs.marks import MORE_TRAINERS, kind_by_marks, tool_not_read
from napkinmath.inputs.nearby import named_by
from napkinmath.inputs.one_gpu import on_one_gpu
from napkinmath.inputs.option_table import find_option, nearest, spelled_out
from napkinmath.inputs.option_table.option import JOB
from napkinmath.inputs.own_config import own_config
from napkinmath.inputs.scripts.source import Source, is_script, runs_commands
from napkinmath.models import config_file
from napkinmath.models.config_file import quoted

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from napkinmath.inputs.one_run import Reading

WHAT = "job file"
# Keys that only LLaMA-Factory has beside `model_name_or_path`, and 1 beside `model`.
_LLAMA_FACTORY = ("stage", "infer_backend", "export_dir")
_LLAMA_FACTORY_1 = ("model_class", "peft_config", "dist_config", "kernel_config", "init_config")
_KINDS: dict[str, tuple[str, str]] = {
    "torchtune": ("napkinmath.inputs.torchtune", "torchtune"),
    "axolotl": ("napkinmath.inputs.axolotl", "axolotl"),
    "llama-factory": ("napkinmath.inputs.llama_factory", "LLaMA-Factory"),
    "llama-factory-1": ("napkinmath.inputs.llama_factory_v1", "LLaMA-Factory"),
    "trainer": ("napkinmath.inputs.trainer", "Trainer"),
    "deepspeed": ("napkinmath.inputs.deepspeed", "DeepSpeed"),
    "accelerate": ("napkinmath.inputs.accelerate", "accelerate"),
    "megatron": ("napkinmath.inputs.megatron", "Megatron-LM"),
    **{kind: (f"napkinmath.inputs.{row.module}", row.tool) for kind, row in MORE_TRAINERS.items()},
}


# Unknown keys fewer than these may be an own addition to a small file.
_FEW = 4
# Lengths of a script that may be less than it says, and the options that say them.
_BOUNDED_BY = {"max_completion_length": "completion", "max_length": "ctx", "max_seq_length": "ctx"}


def with_job_file(given: Mapping[str, object], notes: list[str]) -> dict[str, object]:
    """The options of the job files, if any were given, under those of the command line."""
    options = dict(given)
    files = {key: options.pop(key) for key in ("job", "deepspeed", "launch") if options.get(key)}
    if not files:
        return options
    paths = [*values.listed(files.get("job", [])), *values.listed(files.get("deepspeed", []))]
    for path in paths:
        if not isinstance(path, str):
            raise InputError(f"{WHAT} {shown(path)} is not a path")
    sources = _sources(files, notes)
    beside = {**_launched(sources), **options}
    every = next((source.tool for source in sources if source.starts_all), "")
    sources = [source.replace(given=beside) for source in sources]
    from_file = _together(sources, notes, options)
    make_way(from_file, options, notes)
    keys = from_file.get("job_keys")
    if isinstance(keys, JobKeys):
        from_file["job_keys"] = settled(keys, options)
        notes += said(from_file["job_keys"])
    merged = on_one_gpu({**from_file, **options}, from_file, notes, every)
    if "model" in from_file and "model" not in options:
        merged["model"] = _named(merged["model"], sources[0].path, notes)
    return with_flags(merged, options)


def _launched(sources: list[Source]) -> dict[str, object]:
    """The GPUs that a launcher starts, which the words of what it starts do not say."""
    found = [s.content for s in sources if s.kind == "own" and s.tool and "gpus" in s.content]
    if not found or len(sources) == 1:
        return {}
    return {key: found[-1][key] for key in ("gpus", "nodes") if key in found[-1]}


def _sources(files: Mapping[str, object], notes: list[str]) -> list[Source]:
    """What the files name, each once: a script may name several more."""
    found: list[Source] = []
    for path in dict.fromkeys(values.listed(files.get("job", []))):
        source = None if is_script(str(path)) else _source(str(path), notes)
        if source is None or runs_commands(source):
            from napkinmath.inputs.scripts.read_script import sources_of

            found += sources_of(source, str(path), _loader(notes, str(path)))
        else:
            found.append(source)
    if launch := values.listed(files.get("launch", [])):
        from napkinmath.inputs.scripts.launch import sources_of_line

        found += sources_of_line(list(map(str, launch)), _loader(notes, ""))
    if deepspeed := files.get("deepspeed"):
        found = [source for source in found if source.path != deepspeed]
        found.append(_source(str(deepspeed), notes).replace(is_flag=True))
    return [one if one.kind else one.replace(kind=_kind_among(one)) for one in found]


def _loader(notes: list[str], beside: str) -> Callable[[str], Source]:
    """Reads the files that a script names."""
    return lambda path: _source(path, notes, beside)


def _together(
    sources: list[Source], notes: list[str], given: Mapping[str, object]
) -> dict[str, object]:
    """The options of one file, or of several that are one run. Raises InputError for a value of a
    script that has to be asked for."""
    sources = [source for source in sources if not source.starts_all]
    if any(source.computed for source in sources):
        from napkinmath.inputs.scripts.asking import refuse_computed

        refuse_computed([(s, partial(_read_content, s, notes=[])) for s in sources], given)
    if len(sources) == 1 and "explain" not in given:
        return _read_content(sources[0], sources[0].content, notes)
    from napkinmath.inputs.one_run import one_run

    return one_run([_reading(source, notes) for source in sources])


def _reading(source: Source, notes: list[str]) -> Reading:
    """A source's options, and which of its keys says each."""
    from napkinmath.inputs.one_run import Reading
    from napkinmath.inputs.origins import keys_by_option, line_of

    options = _read_content(source, source.content, notes)
    keys = options.get("job_keys")
    priced = {k.name for k in keys.of(KeyUse.PRICED)} if isinstance(keys, JobKeys) else set[str]()
    found = keys_by_option(
        source.content, lambda less: _read_content(source, less, []), options, priced
    )
    assumed = keys.assumed if isinstance(keys, JobKeys) else frozenset[str]()
    said = {
        o: (key, source.lines.get(key) or line_of("" if source.table else source.text, key))
        for o, key in found.items()
        if o not in assumed
    }
    kind = source.kind or kind_of(source.content, source.path)
    return Reading(
        path=source.path,
        kind=kind,
        options=options,
        said=said,
        elsewhere=source.elsewhere,
        is_flag=source.is_flag,
    )


def _named(model: object, job: str, notes: list[str]) -> object:
    """The model that a file names, or, where it names a checkpoint that is not here, the last part
    of its path ('/tmp/Qwen3-8B') that is no folder within a run's."""
    if not isinstance(model, str) or "/" not in model.replace("\\", "/"):
        return model
    from napkinmath.catalog.model_names import name_in_path

    beside = os.path.join(os.path.dirname(job), model)
    if os.path.exists(beside):
        return beside
    last = name_in_path(model)
    is_path = model.startswith(("/", ".", "~")) or model.count("/") != 1
    known = find_row(last) is not None
    if os.path.exists(model) or not known or (not is_path and find_row(model) is not None):
        return model
    if not is_path and is_publisher(model.partition("/")[0]):
        return model  # a hub id: the publisher's own name for other sizes
    notes.append(f"model {shown(model)} is not here: taken as {last}, the last part of its path")
    return last


def read_job(path: str, notes: list[str]) -> dict[str, object]:
    """The options a job file gives; `notes` receives what was assumed and what was ignored."""
    return _together(_sources({"job": path}, notes), notes, {})


def _source(path: str, notes: list[str], beside: str = "") -> Source:
    """A file's keys, and whose it is; one that a script names may lie beside the script."""
    path = named_by(path, beside, notes)
    if os.path.isdir(path):
        return Source(path=path, content={}, kind="model config")
    twice: list[str] = []
    content, text = _load(path, twice)
    kind = kind_of(content, path)
    if (own := own_config(content, kind, path)) is not None:
        return own.replace(text=text)
    if kind == "own" and twice:
        raise InputError(f"{twice[0]}; keep one")
    if kind != "model config":
        notes += [f"{sentence}: the last one is taken" for sentence in twice]
    return Source(path=path, content=content, kind=kind, text=text)


def _kind_among(source: Source) -> str:
    """Whose keys a script gives, among the readers that may have them."""
    known = [kind for kind in source.kinds if kind in _KINDS]
    keys = {**source.content, **dict.fromkeys(source.computed, "")}
    kind = kind_of(keys, source.path) if known else ""
    if kind in known:
        return kind
    if len(known) == 1 and source.kinds == tuple(known):
        return known[0]
    named = shown(", ".join(list(keys)[:4])) if keys else "none"
    raise InputError(
        f"{source.path}: the words of {shown(source.tool)} ({named}) are not read; give the same with flags"
        " (`estimate --help`)"
    )


def _read_content(
    source: Source, content: Mapping[str, object], notes: list[str]
) -> dict[str, object]:
    """The options of a mapping with a source's reader."""
    kind, path = source.kind, source.path
    if kind == "model config":
        return {"model": path}
    if kind == "own":
        return own_options(content, path)
    if kind != "trainer":  # whose own way of loading is another
        content = {key: value for key, value in content.items() if key != "loaded_by_script"}
    module, tool = _KINDS[kind]
    read: Callable[[ForeignJob], dict[str, object]] = __import__(module, fromlist=["read"]).read
    notes.append(f"{quoted(path)} read as a job file of {tool}")
    notes += source.notes
    table = source.table or module.rpartition(".")[2]
    job = ForeignJob(
        tool, content, notes, keys=table, path=path, text=source.text, given=source.given
    )
    job.trained_by, job.program, job.code = source.trained_by, source.tool, source.code
    for key, computed in source.bounded.items():
        job.leave_out(
            key,
            f"it comes from {computed.source} and is priced as the most it can be,"
            f" {shown(content.get(key))}",
            memory=Difference.LESS,
            time=Difference.LESS,
            option=_BOUNDED_BY.get(key, ""),
        )
    found = read(job)
    if not (source.tool or source.table or job.is_settled("model")):  # whose sizes are moot then
        _refuse_others(found.get("job_keys"), path)
    return found


def _refuse_others(keys: object, path: str) -> None:
    """A file that shares a key with a tool's and has mostly other keys is not that tool's: what it
    says would fall away."""
    assert isinstance(keys, JobKeys)
    unknown = [key.name for key in keys.of(KeyUse.UNKNOWN)]
    if len(unknown) < _FEW or 2 * len(unknown) <= len(keys.keys):
        return
    raise InputError(
        f"{WHAT} {quoted(path)} has keys of {keys.tool}'s files, but most of its keys are none of"
        f" them ({', '.join(unknown[:4])}, ...); give what it says with flags (`estimate --help`)"
    )


def _shown(key: JobKey) -> str:
    near = key.why if key.use is KeyUse.UNKNOWN else ""
    return f"{key.name} ({near.rstrip('?')}?)" if near else key.name


def said(keys: object) -> list[str]:
    """The keys that an answer leaves out, a line for each use; noise stays out of sight."""
    assert isinstance(keys, JobKeys)
    lines = (
        (KeyUse.NOT_PRICED, "not priced"),
        (KeyUse.UNKNOWN, "unknown, and left out"),
    )
    return [
        f"{keys.tool}: {words}: {', '.join(map(_shown, found))}"
        for use, words in lines
        if (found := keys.of(use))
    ]


def kind_of(content: Mapping[str, object], path: str) -> str:
    """Whose job file this is: a key of _KINDS, 'own' or 'model config'."""
    if any(
        values.is_mapping(value) and "_component_" in values.mapping(value, WHAT)
        for value in content.values()
    ):
        return "torchtune"
    if "megatron_arguments" in content:
        from napkinmath.inputs.megatron import kind_of_arguments

        return kind_of_arguments(content)
    if tool := tool_not_read(content):
        raise InputError(
            f"{WHAT} {quoted(path)} is {tool}, which is not read; give what it says with flags"
            " (`estimate --help`)"
        )
    if (found := kind_by_marks(content)) is not None:
        return found
    if "model" in content and any(key in content for key in _LLAMA_FACTORY_1):
        return "llama-factory-1"
    if "base_model" in content:
        return "axolotl"
    if (
        "finetuning_type" in content
        or "cutoff_len" in content
        or ("model_name_or_path" in content and any(key in content for key in _LLAMA_FACTORY))
    ):
        return "llama-factory"
    if "train_micro_batch_size_per_gpu" in content or "zero_optimization" in content:
        return "deepspeed"
    if "compute_environment" in content or "distributed_type" in content:
        return "accelerate"
    if "peft_type" in content:
        raise InputError(
            f"{WHAT} {quoted(path)} is an adapter's config; give its base with --model and --lora"
            f" --rank {shown(content.get('r', 16))}"
        )
    if (
        "model_name_or_path" in content
        or any(key.startswith(("per_device_", "per_gpu_")) for key in content)
        or "optim" in content
    ):
        return "trainer"
    if "model_type" in content and "model" not in content:
        return "model config"
    return "own"


def _load(path: str, twice: list[str]) -> tuple[dict[str, object], str]:
    """(the file's mapping, from JSON, TOML or YAML; its text)."""
    text = config_file.read_text(path, what=WHAT)
    if not text.strip():
        raise InputError(f"{WHAT} {quoted(path)} is empty; write e.g. model: llama-7b")
    is_yaml = not path.endswith((".json", ".toml"))
    if is_yaml and ("--" in text or "MODEL_ARGS:" in text):
        from napkinmath.inputs.megatron import arguments, arguments_of_yaml, is_arguments

        if "MODEL_ARGS:" in text:
            loaded = yaml_text.load(text, path, what=WHAT, twice=twice)
            return arguments_of_yaml(loaded, quoted(path)), text
        if is_arguments(text):
            return arguments(text), text
    if path.endswith(".json"):
        value = config_file.parse(text, path, what=WHAT)
    elif path.endswith(".toml"):
        value = toml_text.load(text, path, what=WHAT)
    else:
        value = yaml_text.load(text, path, what=WHAT, twice=twice)
    if not values.is_mapping(value):
        raise InputError(
            f"{WHAT} {quoted(path)} holds {shown(value, limit=40)} at its top level, not keys and"
            " values; write e.g. model: llama-7b"
        )
    return values.mapping(value, WHAT), text


def own_options(said: Mapping[str, object], path: str) -> dict[str, object]:
    """Our own file: every key is an option, with dashes or underscores, or a trainer's word that
    means the same; others are refused."""
    options: dict[str, object] = {}
    content = spelled_out(said)
    renamed = {key: (key, value) for key, value in content.items()}
    strange = [key for key in content if find_option(key) is None]
    if strange:
        from napkinmath.inputs.option_table.trainers_words import as_option

        renamed |= {key: as_option(key, content[key]) for key in strange}
        strange = [key for key in strange if find_option(renamed[key][0]) is None]
    sections = [key for key in ("model", "data") if values.is_mapping(content.get(key))]
    if sections or 2 * len(strange) > max(2, len(content)):
        raise InputError(
            f"{WHAT} {quoted(path)} is of no tool whose files are read: its keys are"
            f" {shown(', '.join((strange or sections)[:4]))}; give what it says with flags (`estimate --help`)"
        )
    for given, (name, value) in renamed.items():
        option = find_option(name)
        if option is None or not option.is_at(JOB):
            from napkinmath.inputs.option_table.trainers_words import doubt

            raise InputError(
                f"{WHAT} {quoted(path)} has the unknown key {shown(given)}"
                f"{doubt(given) or nearest(given, JOB)}; keys are the flags of `estimate --help`"
            )
        key = option.key
        if key in options:
            raise InputError(
                f"{WHAT} {quoted(path)} gives {key} twice, again as {shown(given)}; keep one"
            )
        if value is not None:
            options[key] = "none" if value is False and key in ("quant", "offload") else value
    return options
