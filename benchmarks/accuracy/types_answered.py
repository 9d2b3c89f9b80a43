"""How many model types of the installed transformers the analytic path answers, by task.

    python benchmarks/accuracy/types_answered.py [--task TASK] [--write]

Of each type: the sizes of the catalog's first model of it, else its class's defaults, under the
architecture that transformers' mapping of the task names. A type counts as answered where the whole
step is recorded without a refusal. Of the others it is said where transformers itself refuses to
build the class from these sizes. `--write` writes benchmarks/results/cpu/types_answered.json.
"""

from __future__ import annotations

import argparse
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from learned_agreement import config_of
from napkinmath.base.errors import NapkinError
from napkinmath.catalog.stacks import STACKS
from napkinmath.config.train_config import Batch, TrainConfig
from napkinmath.lowering.policy import Policy
from napkinmath.lowering.record import record_runs
from napkinmath.models.families import FAMILIES, read_config
from napkinmath_profiler.tracing.learning.config_fields import full_config
from napkinmath_profiler.tracing.learning.layer_fields import shortened
from napkinmath_profiler.tracing.meta_model import build_model, config_from
from transformers.models.auto import modeling_auto

RESULT = Path(__file__).resolve().parents[1] / "results" / "cpu" / "types_answered.json"
UNBUILT = "transformers does not build it from its defaults"
MAPPINGS: dict[str, Any] = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "sequence-classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "seq2seq-lm": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked-lm": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "ctc": modeling_auto.MODEL_FOR_CTC_MAPPING_NAMES,
    "speech-seq2seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "audio-classification": modeling_auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES,
    "image-classification": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    "image-text-to-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
WITH_IMAGES = "image-text-to-text"
"""Of which it is also counted how many are answered with an image, not on text alone."""


def answer(model_type: str, architecture: str) -> str:
    """'family' or 'learned', else why it is not answered."""
    try:
        config = full_config(config_of(model_type))
    except Exception as error:  # whatever its class raises of its own defaults
        return f"{UNBUILT}: {_line(error)}"
    config["architectures"] = [architecture]
    policy = Policy(TrainConfig(micro_batch_size=2, sequence_length=128), STACKS["hf-bare"])
    try:
        record_runs(read_config(config), policy)
    except NapkinError as error:
        return _refused_by_the_class(config) or _line(error)
    return "family" if model_type in FAMILIES else "learned"


def _refused_by_the_class(config: Mapping[str, Any]) -> str:
    """Why transformers builds no model of a config, even on meta; '' where it does."""
    found = ""
    for sizes in (shortened(config), config):  # some classes tie layers that a short one lacks
        try:
            build_model(config_from(sizes), dtype="bf16", attn_implementation="eager")
        except Exception as error:  # whatever a class raises
            found = f"{UNBUILT}: {_line(error)}"
        else:
            return ""
    return found


def _line(error: Exception) -> str:
    return str(error).splitlines()[0][:160] if str(error) else type(error).__name__


def counted(task: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    """A task's types by how they are answered, and the reason of each that is not."""
    found: dict[str, str] = {}
    for model_type, names in mapping.items():
        found[model_type] = answer(model_type, names if isinstance(names, str) else names[0])
        if task == WITH_IMAGES and model_type in FAMILIES and reads_images(model_type):
            found[model_type] = "family"  # also where a text alone is refused, as BLIP-2 refuses it
    ways = [how for how in found.values() if how in ("family", "learned")]
    return {
        "task": task,
        "types": len(found),
        "build": sum(not how.startswith(UNBUILT) for how in found.values()),
        "by a family": ways.count("family"),
        "learned": ways.count("learned"),
        **({"with images": sum(map(reads_images, found))} if task == WITH_IMAGES else {}),
        "not answered": {k: how for k, how in sorted(found.items()) if how not in ways},
    }


def reads_images(model_type: str) -> bool:
    """Whether a batch with an image is answered."""
    try:
        spec = read_config(full_config(config_of(model_type)))
        if spec.pictures is None:
            return False
        batch = Batch(images=1)
        length = spec.pictures.of(batch).places + 1
        config = TrainConfig(micro_batch_size=2, sequence_length=length, batch=batch)
        record_runs(spec, Policy(config, STACKS["hf-bare"]))
    except Exception:  # whatever its class raises of its own defaults
        return False
    return True


def main() -> None:
    """Prints one line a task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--task", action="append", choices=MAPPINGS, help="others stay [all]")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    named = options.task or MAPPINGS
    tasks = [counted(task, mapping) for task, mapping in MAPPINGS.items() if task in named]
    for one in tasks:
        answered = one["by a family"] + one["learned"]
        print(
            f"{one['task']:25} {answered} of {one['types']} types, {one['build']} of which build:"
            f" {one['by a family']} by a family, {one['learned']} learned"
        )
    if options.write:
        kept = {one["task"]: one for one in json.loads(RESULT.read_text(encoding="utf-8"))}
        kept |= {one["task"]: one for one in tasks}
        found = [kept[task] for task in MAPPINGS if task in kept]
        RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
