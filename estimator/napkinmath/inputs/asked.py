"""What options ask for, before it is priced: the model and the training, and afterwards whether
everything that was asked for means something there."""

from __future__ import annotations

from napkinmath.answers.images import images_of
from napkinmath.base.errors import InputError, shown
from napkinmath.config.train_config import RecomputeKind, TrainConfig
from napkinmath.inputs.model_options import model_spec
from napkinmath.inputs.options import train_config
from napkinmath.lowering.choices import as_loaded
from napkinmath.lowering.recompute import INPUTS, kept_ops
from napkinmath.models.tasks import PICTURED

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.train_config import AdapterConfig
    from napkinmath.ir.model_spec import ModelSpec

USUAL_LENGTH = TrainConfig().sequence_length
_KEPT = ("sdpa", "linear", "o_proj")  # what is worth keeping, and is named alike in many models


def model_and_training(
    options: Mapping[str, object], notes: list[str], model: ModelSpec | None = None
) -> tuple[ModelSpec, TrainConfig]:
    """The model (`model`, where it is read already) and the training that options say; `notes`
    receives what was decided for the user. Raises InputError."""
    config = train_config(options)
    spec = model_spec(options, notes) if model is None else model
    canvas = spec.canvas
    if canvas is not None:
        from napkinmath.inputs.denoisers import settled
        from napkinmath.inputs.resident import with_resident
        from napkinmath.lowering.swapped_blocks import with_swapped

        config = settled(spec, canvas, config, options, notes)
        return with_swapped(with_resident(spec, canvas, config, options), canvas, config), config
    if "resident" in options:
        raise InputError(
            f"--resident {shown(options['resident'])} is for denoisers, and {spec.name} makes no"
            " pictures; leave it out"
        )
    for key in ("blocks_to_swap", "frames"):
        if key in options:
            raise InputError(
                f"--{key.replace('_', '-')} {shown(options[key])} is for denoisers, and"
                f" {spec.name} makes no pictures; leave it out"
            )
    config = as_loaded(spec.stored_type, spec.family, config, options)
    if config.precision.value.endswith("fp8-base"):
        from napkinmath.inputs.denoisers import refuse_of_text

        refuse_of_text(spec, config)
    if spec.sound is not None or "audio" in options:
        from napkinmath.inputs.sounds import steps_asked

        steps = steps_asked(spec, options, notes)
        config = config if steps is None else config.replace(sequence_length=steps)
    workload = config.workload
    if "completion" in options and not workload.rolls_out:
        notes.append(
            f"--completion {options['completion']} has no effect: {workload.kind.value} generates"
            " no rollouts"
        )
    if spec.task in PICTURED:
        return _with_images(spec, config, options, notes)
    longest = spec.longest_sequence
    if (
        "ctx" not in options
        and isinstance(config.sequence_length, int)
        and 0 < longest < config.sequence_length
    ):
        notes.append(f"--ctx {longest}: {spec.name} has learned positions for no more")
        config = config.replace(sequence_length=longest)
    return spec, config


def _with_images(
    spec: ModelSpec, config: TrainConfig, options: Mapping[str, object], notes: list[str]
) -> tuple[ModelSpec, TrainConfig]:
    """A model of images alone, built for those that are asked for."""
    from napkinmath.models.image_models import resized, tokens_of

    if config.batch.images > 1:
        raise InputError(
            f"--images {config.batch.images}: {spec.name} reads {PICTURED[spec.task]} one at a time; give --bs"
        )
    if config.batch.image_size:
        width, height = config.batch.image_size
        spec = resized(spec, width, height)
    if "ctx" in options:
        notes.append(no_context(spec))
    batch = config.batch.replace(images=0, image_size=())
    # what counts as tokens is the patches of an image, or the image where it is no sequence
    return spec, config.replace(batch=batch, sequence_length=max(tokens_of(spec), 1))


def training_of(spec: ModelSpec, options: Mapping[str, object]) -> TrainConfig:
    """The training of one candidate of a search, whose model `for_search` settled; of images alone
    their size is the model's."""
    config = as_loaded(spec.stored_type, spec.family, train_config(options), options)
    if spec.task not in PICTURED:
        return config
    return config.replace(batch=config.batch.replace(images=0, image_size=()))


def for_search(
    spec: ModelSpec, given: Mapping[str, Sequence[object]], notes: list[str]
) -> tuple[ModelSpec, dict[str, Sequence[object]]]:
    """The model and the options of a search, with the context that one estimate takes where none is
    given; `notes` receives what was decided for the user. Raises InputError."""
    found = dict(given)
    pictures = tuple(found.get("image", ()))
    if spec.task in PICTURED and len(pictures) > 1:
        raise InputError(
            f"--image {shown(','.join(map(str, pictures)))}: a search is of images of one size; give"
            " one"
        )
    sounds = found.get("audio", ()) if spec.sound is not None and not spec.sound.seconds else ()
    settled, lengths = spec, list[object]()
    for sound in sounds or (None,):
        names = ("ctx", "image", "images")
        first = {name: found[name][0] for name in names if found.get(name)}
        if sound is not None:
            first["audio"] = sound
        settled, config = model_and_training(first, notes, spec)
        lengths.append(config.sequence_length)
    if sounds:  # said by the context from here on
        del found["audio"]
    if spec.task in PICTURED or (not found.get("ctx") and lengths != [USUAL_LENGTH]):
        found["ctx"] = lengths
    return settled, found


def no_context(spec: ModelSpec) -> str:
    """What is said of a context that is given for a model of images alone."""
    return (
        f"--ctx has no effect: {spec.name} reads {PICTURED[spec.task]}, and its sequence is their"
        " patches; --image says how large images are"
    )


def refuse_idle(e: Estimate, options: Mapping[str, object]) -> None:
    """Raises where something was asked for that this model lacks, or nothing of it is trained."""
    _refuse_untrained(e)
    _refuse_absent(e, options)


def _refuse_absent(e: Estimate, options: Mapping[str, object]) -> None:
    """Raises where something was asked for that this model lacks."""
    if e.config.batch.images and e.spec.canvas is None:
        _refuse_images(e, options)
    quantization = e.config.quantization
    if quantization is not None and quantization.experts and not dict(e.spec.symbols).get("e"):
        raise InputError(
            f"--quantize-experts packs experts, and {e.spec.name} has none; leave it out"
        )
    if e.config.recompute.kind is RecomputeKind.SELECTIVE and e.step.policy.recomputes:
        _refuse_nothing_kept(e)


def _refuse_images(e: Estimate, options: Mapping[str, object]) -> None:
    """Raises where the model reads no images, or a sequence has no room for its own."""
    if e.spec.pictures is None:
        key = "images" if "images" in options else "image"
        why = (
            "has a tower for which there are no rules; leave it out for a batch of text"
            if e.spec.has_idle_tower
            else "reads no images; leave it out"
        )
        raise InputError(f"--{key} {shown(options.get(key, ''))}: {e.spec.name} {why}")
    account = images_of(e)
    if account is not None and account.places > account.length:
        raise InputError(
            f"{account.described} take{account.verb} {account.places:,} tokens of a sequence of"
            f" {account.length:,}; use --ctx {account.places + 1} or more, fewer images, or"
            " --max-pixels"
        )


def _refuse_nothing_kept(e: Estimate) -> None:
    """Raises where selective checkpointing names no operation of the model; the hint names those
    that it has."""
    blocks = [run.block.ops for run in e.step.runs if run.stage.checkpointed]

    def is_there(*names: str) -> bool:
        return any(kept_ops(ops, names) for ops in blocks)

    keep = e.config.recompute.keep
    if INPUTS in keep or is_there(*keep):
        return
    others = [f"--checkpointing selective:{name}" for name in _KEPT if is_there(name)]
    raise InputError(
        f"selective checkpointing keeps {shown(', '.join(keep))}, which {e.spec.name} does not run"
        f" here; use {' or '.join([*others, '--checkpointing full'])}"
    )


def _adapts(e: Estimate, adapter: AdapterConfig) -> bool:
    """Whether an adapter is trained where modules are named for it; what is trained beside it may
    be all that is left."""
    named = adapter.targets and adapter.targets != ("all-linear",)
    return not named or any("adapter" in w.kind for run in e.step.runs for w in run.trained)


def _refuse_untrained(e: Estimate) -> None:
    """Raises where the names given leave nothing that is trained."""
    adapter = e.config.adapter
    if e.num_trained and (adapter is None or _adapts(e, adapter)):
        return
    if adapter is None:
        raise InputError(
            f"--freeze {shown(','.join(e.config.frozen))} leaves nothing of {e.spec.name} to train;"
            " freeze less"
        )
    if adapter.targets == ("all-linear",):
        raise InputError(
            f"--method {adapter.kind.value} leaves nothing of {e.spec.name} to train; use --lora,"
            " or --full"
        )
    names = shown(",".join(adapter.targets))
    linears = [w for run in e.step.runs for w in run.block.weights if w.kind == "linear"]
    own = list(dict.fromkeys(w.path.rpartition(".")[0].rpartition(".")[2] for w in linears))
    raise InputError(
        f"--targets {names} matches no module of {e.spec.name}; use all-linear"
        + (f", or names such as {','.join(own[:2])}" if own else "")
    )
