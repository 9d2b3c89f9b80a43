"""A Python script's training as the keys of a Trainer's file, for the one reader of those."""

from __future__ import annotations

from napkinmath.base.errors import InputError
from napkinmath.inputs.known_keys import known_keys
from napkinmath.inputs.pins import pinned_in
from napkinmath.inputs.scripts.embedding_scripts import EMBEDDING_TRAINER, embeddings_of
from napkinmath.inputs.scripts.older_trl import read_release
from napkinmath.inputs.scripts.python_adapters import (
    ADAPTS,
    UNSLOTH,
    is_adapters,
    read_adapter,
    read_quantization,
)
from napkinmath.inputs.scripts.python_frozen import read_beside_trainer
from napkinmath.inputs.scripts.python_keys import LENGTHS, ScriptKeys
from napkinmath.inputs.scripts.python_lightning import GPUS, read_lightning
from napkinmath.inputs.scripts.python_loops import engine_config, one_of, read_loop, stack_of
from napkinmath.inputs.scripts.python_models import is_new_model, own_size
from napkinmath.inputs.scripts.python_process import read_process, read_vocabulary
from napkinmath.inputs.scripts.python_refusals import no_trainer
from napkinmath.inputs.scripts.python_run import Training, Walk
from napkinmath.inputs.scripts.python_text import tree_of
from napkinmath.inputs.scripts.python_trainers import read_own_trainer, trained_by_of
from napkinmath.inputs.scripts.python_values import Made, Unknown
from napkinmath.inputs.scripts.source import Source
from napkinmath.inputs.scripts.usual_names import USUAL
from napkinmath.inputs.trained_by import PLAIN_TRAINER, WORDS
from napkinmath.models.config_file import quoted
from napkinmath.models.tasks import ANSWERS, ENDINGS, IMAGES, MASKED, SEQUENCE, TOKENS, VIDEOS

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ast
    from collections.abc import Mapping
    from typing import Any

TABLE = "scripts"
# A model's or adapter's argument -> the key of a Trainer's file.
_OF_MODEL = {
    "model_name": "model_name_or_path",
    "dtype": "dtype",
    "torch_dtype": "torch_dtype",
    "attn_implementation": "attn_implementation",
    "use_flash_attention_2": "use_flash_attention_2",
    "load_in_4bit": "load_in_4bit",
    "load_in_8bit": "load_in_8bit",
    "gradient_checkpointing": "gradient_checkpointing",
    "gradient_checkpointing_kwargs": "gradient_checkpointing_kwargs",
    "torch_compile": "torch_compile",
    "max_seq_length": "max_seq_length",
    "fast_inference": "use_vllm",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
}
# What a trainer takes beside its arguments that is a key of them too, in one release or another.
_OF_TRAINER = (
    *("max_seq_length", "max_length", "max_prompt_length", "max_completion_length", "packing"),
    *("beta", "loss_type", "precompute_ref_log_probs", "dataset_text_field", "reward_weights"),
)
# Packages whose scripts build a training of functions, and what they are called.
_BUILDS = {
    "olmo_core": "OLMo-core",
    "nemo.collections": "NeMo",
    "megatron.bridge": "Megatron-Bridge",
}
_OF_LOADING = (
    *("quantization_config", "peft", "unsloth", "fast_embedding", "config", "full_finetuning"),
    "tokenizer_vocabulary",
)
_HEADS = (SEQUENCE, TOKENS, ANSWERS, MASKED, IMAGES, VIDEOS)


def sources_of_python(text: str, path: str) -> list[Source]:
    """The one training of a script, and the GPUs it asks for. Raises InputError where it trains nothing, or not in a way
    that is read."""
    tree = tree_of(text, path)
    return sources_of_walk(walked(tree, path, {}), tree, text, path)


def walked(tree: ast.Module, path: str, told: Mapping[str, object]) -> Walk:
    """What a script's statements make, its parsers being `told` the words of a launch line."""
    walk = Walk(told, path)
    try:
        walk.walk(tree)
    except RecursionError:
        error = f"script {quoted(path)} is nested too deeply; give the part that trains"
        raise InputError(error) from None
    return walk


def sources_of_walk(walk: Walk, tree: ast.Module, text: str, path: str) -> list[Source]:
    """The one training of a script that was walked. Raises InputError as sources_of_python."""
    steps = walk.optimizers or engine_config(walk)
    if not walk.trainings and walk.has_backward and not _builds(text) and steps:
        return _sources_of_loop(walk, tree, text, path)
    training, notes = _chosen(walk, path, text)
    notes += [
        f"the script reads {quoted(file)}"
        for file in dict.fromkeys((*walk.files.read, *walk.imported))
    ]
    trainer = training.trainer
    notes += [
        f"{one.name} on line {one.line} is given to nothing: priced without it"
        for one in walk.adapters[-1:]
        if not one.passed
    ]
    keys = ScriptKeys()
    if trainer.kind == "lightning":
        if walk.models:
            _read_model(keys, walk.models[-1], walk)
        else:
            module = Unknown(source="the module", line=trainer.line)
            keys.set("model_name_or_path", module, trainer.line)
        read_lightning(keys, trainer, walk.loaders)
        trained_by = PLAIN_TRAINER
    else:
        embeds = trainer.name == EMBEDDING_TRAINER
        trained_by = "" if embeds else trained_by_of(trainer, path)
        _read_trainer(keys, trainer, walk)
        if embeds:
            trained_by = embeddings_of(keys, trainer, notes)
        read_own_trainer(keys, trainer, trained_by)
        read_beside_trainer(keys, trainer, walk.tree_with(training.node), walk.dead)
        if line := walk.images_at():
            keys.set("images_in_code", True, line)
        _bound_parts(keys)
        if trained_by == PLAIN_TRAINER:
            _read_cuts(keys, walk, tree, notes)
    read_process(keys, walk.process)
    keys.forget_lines(path)
    others = [*_gpus(keys, path), *_allocator(walk, path)]
    return [*others, _source(keys, path, text, trained_by, notes)]


def _source(keys: ScriptKeys, path: str, text: str, trained_by: str, notes: list[str]) -> Source:
    if "loaded_by_unsloth" in keys.content and (pin := pinned_in(text, "transformers")):
        keys.set("transformers_pin", pin, 0)
    return Source(
        path=path,
        kind="trainer",
        content=keys.content,
        lines=keys.lines,
        computed=keys.computed,
        bounded=keys.bounded,
        trained_by=trained_by,
        text="" if "unsloth" in text else text,  # which patches the trainer of any release
        table=TABLE,
        notes=tuple(notes),
    )


def _builds(text: str) -> str:
    """The package of functions that the script builds its training of; '' for none."""
    return next((tool for tool in _BUILDS if f"from {tool}." in text), "")


def _sources_of_loop(walk: Walk, tree: ast.Module, text: str, path: str) -> list[Source]:
    """The training of a script that has a loop of its own. Raises InputError as read_loop."""
    models = one_of(walk.models, tree)
    keys, notes = read_loop(walk, models, tree, path), list[str]()
    model = models[0].latest()
    _read_model(keys, model, walk)
    given_on = [one for one in walk.adapters if one.passed]
    if given_on and model.keys.get("peft") is None:
        read_adapter(keys, given_on[-1], given_on[-1].line)
    _read_cuts(keys, walk, tree, notes)
    notes.append(
        "a loop of the script's own is priced as transformers' model and torch's optimizer"
    )
    own = Source(path=path, kind="own", content={"stack": stack_of(walk, tree)})
    read_process(keys, walk.process)
    keys.forget_lines(path)
    if config := engine_config(walk):
        line = walk.engines[-1].line
        lines = dict.fromkeys(config, line)
        engine = Source(path=path, kind="deepspeed", content=config, lines=lines)
        return [
            own,
            engine,
            *_allocator(walk, path),
            _source(keys, path, text, PLAIN_TRAINER, notes),
        ]
    return [own, *_allocator(walk, path), _source(keys, path, text, PLAIN_TRAINER, notes)]


def _allocator(walk: Walk, path: str) -> list[Source]:
    if walk.process.allocator is None:
        return []
    word, line = walk.process.allocator
    return [Source(path=path, kind="own", content={"allocator": word}, lines={"allocator": line})]


def _gpus(keys: ScriptKeys, path: str) -> list[Source]:
    count, computed = keys.content.pop(GPUS, None), keys.computed.pop(GPUS, None)
    if computed is not None:
        return [Source(path=path, kind="own", content={}, computed={"gpus": computed})]
    lines = {"gpus": keys.lines.pop(GPUS, 0)}
    return (
        []
        if count is None
        else [Source(path=path, kind="own", content={"gpus": count}, lines=lines)]
    )


def _chosen(walk: Walk, path: str, text: str) -> tuple[Training, list[str]]:
    """The training that is priced, the last one of several, and what is said of the others."""
    if not walk.trainings:
        raise no_trainer(walk, path, _BUILDS.get(_builds(text), ""))
    last = walk.trainings[-1]
    notes = [
        f"{one.trainer.name} on line {one.trainer.line} is not priced: the last trainer of the"
        f" script is, {last.trainer.name}"
        for one in walk.trainings[:-1]
        if one.trainer.name != last.trainer.name
    ]
    return last, notes


def _bound_parts(keys: ScriptKeys) -> None:
    """A prompt or completion that a run works out: both take what the model may at most."""
    whole = next((key for key in ("max_length", "max_seq_length") if key in keys.content), None)
    for key in ("max_prompt_length", "max_completion_length"):
        if key in keys.computed and whole is not None:
            keys.bounded[whole] = keys.computed.pop(key)


def _read_cuts(keys: ScriptKeys, walk: Walk, tree: ast.Module, notes: list[str]) -> None:
    """The Trainer cuts nothing: a tokenizer that cuts says how long sequences are, unless the line
    names the tokenizer's own length."""
    cuts, said = walk.cuts(tree), "model_max_length" in walk.told
    if cuts and not said and not {*LENGTHS} & {*keys.content, *keys.computed}:
        longest = max(cuts)
        keys.set("max_length", longest, cuts[longest])
        if len(cuts) > 1:
            notes.append(f"several lengths are cut to: the longest is taken, {longest}")


def _read_trainer(keys: ScriptKeys, trainer: Made, walk: Walk) -> None:
    model, args = trainer.keys.get("model"), trainer.keys.get("args")
    if isinstance(model, Made) and model.kind == "model":
        _read_model(keys, model, walk)
    elif isinstance(model, str):
        keys.set("model_name_or_path", model, trainer.lines.get("model", trainer.line))
    else:
        _guess_model(keys, walk, trainer, model)
    length = keys.content.get("max_seq_length")
    if isinstance(args, Made):
        _take_arguments(keys, args, walk)
    elif args is not None:
        source = args.source if isinstance(args, Unknown) else "args"
        keys.set(
            "per_device_train_batch_size", Unknown(source=source, line=trainer.line), trainer.line
        )
    _keep_checkpointing(keys, model)
    for name in _OF_TRAINER:
        if trainer.keys.get(name) is not None:
            keys.set(name, trainer.keys[name], trainer.lines.get(name, trainer.line))
    if keys.content.get("max_length", length) is None and length is not None:
        keys.set("max_length", length, keys.lines.get("max_seq_length", trainer.line))
    adapter = trainer.keys.get("peft_config")
    if adapter is not None:
        read_adapter(keys, adapter, trainer.line)
    elif "use_peft" not in {*keys.content, *keys.computed} and (
        "peft_config" in trainer.keys or any(not one.passed for one in walk.adapters[-1:])
    ):
        keys.set("use_peft", False, trainer.line)  # whatever rank the line's words name
    teacher = trainer.keys.get("teacher_model")
    if teacher is not None:
        name = teacher.keys.get("model_name") if isinstance(teacher, Made) else teacher
        keys.set("teacher_model_name_or_path", name, trainer.line)
    unsloth = isinstance(model, Made) and model.keys.get("unsloth")
    own = trainer.name.lower().removesuffix("trainer")
    if not unsloth:
        read_release(keys, trainer)
    if isinstance(args, Made) and args.name.endswith("TrainingArguments") and own in WORDS:
        # TRL makes its own of them, their defaults included (trainer/sft_trainer.py __init__)
        for name in () if unsloth else ("bf16", "gradient_checkpointing"):
            if name not in {*keys.content, *keys.computed}:
                keys.set(name, False, args.line)
    if unsloth and not {"bf16", "fp16"} & {*keys.content, *keys.computed}:
        keys.set("bf16", True, trainer.line)  # unsloth's patched arguments follow the weights


def _take_arguments(keys: ScriptKeys, args: Made, walk: Walk) -> None:
    """The trainer's arguments. What a class of the script's own adds to them only the script reads:
    where calls that put an adapter on are read, they say whether there is one, and an attribute that
    is read nowhere is named."""
    plain = Made("args", args.name, args.line)
    own = {key for key in args.own if is_adapters(key)} if walk.calls_any(ADAPTS) else set[str]()
    kept = {*USUAL, *LENGTHS, "model_max_length", *known_keys("transformers").known}
    read = (args.own - kept) & walk.attributes() if args.own else set[str]()
    plain.keys = {key: value for key, value in args.keys.items() if key not in own | read}
    plain.lines = args.lines
    keys.take(plain, {"model_init_kwargs": "model_init_kwargs"})
    if own and "use_peft" not in {*keys.content, *keys.computed}:
        keys.set("use_peft", False, args.line)


def _keep_checkpointing(keys: ScriptKeys, model: Any) -> None:
    """Checkpointing that a model's method turned on: no argument of the Trainer turns it off."""
    name = "gradient_checkpointing"
    if not isinstance(model, Made) or model.keys.get("unsloth") or model.keys.get(name) is not True:
        return
    if keys.content.get(name) is False:
        keys.set(name, True, model.lines.get(name, model.line))


def _guess_model(keys: ScriptKeys, walk: Walk, trainer: Made, given: Any) -> None:
    """A trainer whose model is not followed: the only model of the script, or it is asked for."""
    names = {str(m.keys.get("model_name")): m for m in walk.models}
    if len(names) == 1 and not is_new_model(given):
        found = next(iter(names.values()))
        _read_model(keys, found, walk)
        given_on = [one for one in walk.adapters if one.passed]
        if given_on and found.keys.get("peft") is None:  # nor is what wraps the model
            read_adapter(keys, given_on[-1], trainer.line)
        return
    source = given.source if isinstance(given, Unknown) else "the script"
    keys.set("model_name_or_path", Unknown(source=source, line=trainer.line), trainer.line)


def _read_model(keys: ScriptKeys, model: Made, walk: Walk) -> None:
    keys.set("loaded_by_script", True, model.line)
    if model.keys.get("unsloth"):
        keys.set("loaded_by_unsloth", True, model.line)
    if model.keys.get("unsloth") or model.keys.get("fast_embedding"):
        keys.set("halves_by_gpu", True, model.line)
    adapter = model.keys.get("peft")
    plain = Made("model", model.name, model.line)
    plain.keys = {
        key: value
        for key, value in model.keys.items()
        if key not in _OF_LOADING and (key in _OF_MODEL or key in known_keys(TABLE).known)
    }
    plain.lines = model.lines
    keys.take(plain, _OF_MODEL)
    heads = (task for task in _HEADS if model.name.endswith(ENDINGS[task]))
    if (head := next(heads, None)) is not None:
        keys.set("model_task", head, model.line)
    read_quantization(keys, model)
    if model.name in UNSLOTH:
        if isinstance(adapter, Made):  # its kernels are priced with adapters
            keys.set("use_unsloth", True, model.line)
        if keys.content.get("load_in_4bit"):
            keys.set("bnb_4bit_quant_type", "nf4", model.line)
            keys.set("bnb_4bit_use_double_quant", True, model.line)
    if adapter is not None:
        read_adapter(keys, adapter, model.line)
    if size := own_size(model):
        given = Unknown(source=f"a config with a {size} of the script's own", line=model.line)
        keys.set("model_name_or_path", given, model.line)
    if model.name.startswith("AutoLigerKernel"):
        keys.set("use_liger_kernel", True, model.line)
    read_vocabulary(keys, model, walk.process)
