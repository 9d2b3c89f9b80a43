"""config.json files: those of the catalogue with some places changed, or of another family."""

from __future__ import annotations

from random import Random
from typing import Any

from napkinmath.catalog.models import load_rows

from fuzz_doors.door import Case, Door
from fuzz_doors.draw import as_json, changed_tree, often, tree
from fuzz_doors.flags import form
from fuzz_doors.vocabulary import with_known_keys

_SIZES = ("num_hidden_layers", "num_layers", "n_layer", "num_decoder_layers")


def make(rng: Random) -> Case:
    """A config of the catalogue, fewer of its layers, and up to four changes."""
    config: Any = dict(rng.choice(load_rows())["config"])
    for key in _SIZES:
        if isinstance(config.get(key), int) and "layer_types" not in config:
            config[key] = min(config[key], rng.choice((1, 2, 5, 1000)))
    if rng.random() < 0.12:
        config["model_type"] = rng.choice(load_rows())["config"]["model_type"]
    if rng.random() < 0.08:
        config = {**rng.choice(load_rows())["config"], **config}
    for _ in range(rng.choice((0, 1, 1, 1, 2, 4))):
        config = changed_tree(rng, config)
    if rng.random() < 0.15:
        config = with_known_keys(rng, config, "models")
    if rng.random() < 0.01:
        config = tree(rng)
    argv = ["--model", "@config.json", "--ctx", rng.choice(("1", "16", "500", "2048"))]
    argv += [*often(rng, 0.25, rng.choice(("--lora", "--qlora"))), *form(rng)]
    return Case(tuple(argv), (("config.json", as_json(rng, config)),))


DOOR = Door("config.json", make)
