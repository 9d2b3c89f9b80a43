"""The model that options name: a catalogued name or path, bare numbers, a config inside a job file,
or a hub id."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.models import stored_format
from napkinmath.config.workload_config import RULES, Head
from napkinmath.inputs.option_table import MODEL_WAYS
from napkinmath.models.families import read_config
from napkinmath.models.read import config_in, read_model
from napkinmath.models.stored_weights import StoredWeights, stored_weights
from napkinmath.models.tasks import FEATURES

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.ir.model_spec import ModelSpec


def model_spec(options: Mapping[str, object], notes: list[str]) -> ModelSpec:
    """Reads the model; exactly one of --model, --arch and a job file's config must say which."""
    ways = [key for key in MODEL_WAYS if key in options]
    if not ways:
        raise InputError(
            "no model was named; give --model NAME (list: `estimate models`), --arch, or a job file"
        )
    if len(ways) > 1:
        raise InputError(
            f"--{ways[0]} {shown(options[ways[0]])} and --{ways[1]} {shown(options[ways[1]])} both"
            " name the model; give one of them"
        )
    task = task_asked(options)
    if ways[0] == "arch":
        return _from_arch(options, notes, task)
    if ways[0] == "config":
        spec = read_model(values.mapping(options["config"], "config"), task=task)
        return _noted(spec, config_storage(options), notes)
    name = values.text(options["model"], "--model")
    if values.switch(options.get("hub", False), "--hub"):
        from napkinmath.inputs.hub import fetch_config

        config = fetch_config(name)
        stored = stored_weights(config)
        if stored.format and not stored_format(name) and "quant" not in options:
            notes.append(
                f"{name} stores its weights in {stored.format} and plain ones are priced: --quant"
                f" {stored.format}"
            )
        spec = read_config(config, name=name, source=f"{name} on the hub", task=task)
        return _noted(spec, stored, notes)

    spec = read_model(name, task=task)
    last = name.rstrip("/").rpartition("/")[2].lower()
    if spec.name.lower() != last and config_in(name) is None:
        notes.append(f"model {shown(name)} taken as {spec.name} of the catalog{_storage(name)}")
    return _noted(spec, config_storage(options), notes)


def task_asked(options: Mapping[str, object]) -> str:
    """The task that options name; '' where the model's own head is meant."""
    return values.text(options["task"], "--task") if "task" in options else _embeds(options)


def _embeds(options: Mapping[str, object]) -> str:
    """The task of a workload that trains embeddings; '' for another."""
    word = options.get("workload")
    kinds = [kind.value for kind, rule in RULES.items() if rule.head is Head.EMBEDDINGS]
    return FEATURES if word in kinds else ""


def _noted(spec: ModelSpec, stored: StoredWeights | None, notes: list[str]) -> ModelSpec:
    """Notes what loading does to stored weights."""
    if stored is not None and stored.widened:
        notes.append(f"the {stored.widened} weights of {spec.name} are widened for training")
    return spec


def config_storage(options: Mapping[str, object]) -> StoredWeights | None:
    """How the weights are stored by the config that options bring; None where they name a model, or
    the hub's config is not at hand."""
    if "config" in options:
        return stored_weights(values.mapping(options["config"], "config"))
    config = None if "hub" in options else config_in(options.get("model"))
    return None if config is None else stored_weights(config)


def _storage(name: str) -> str:
    """How the named weights are stored, as a note says it; '' where they are plain."""

    found = stored_format(name)
    if found:
        return f", weights stored in {found}"
    if "fp8" in name.lower():
        return "; its FP8 weights are widened for training"
    return ""


def _from_arch(options: Mapping[str, object], notes: list[str], task: str) -> ModelSpec:
    from napkinmath.models.arch_string import read_arch

    if "hub" in options:
        raise InputError(
            f"--hub has no meaning with --arch {shown(options['arch'])}; leave one of them out"
        )
    text = values.text(options["arch"], "--arch")
    context = values.count(options.get("ctx", 2048), "--ctx")
    config = read_arch(text, notes, positions=context)
    spec = read_config(config, name=" ".join(text.split()), source="--arch", task=task)
    return spec.replace(stored_type="")  # numbers have no checkpoint
