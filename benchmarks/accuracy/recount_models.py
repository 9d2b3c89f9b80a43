"""Count the parameters of every model of the catalog by building it with `transformers` on the meta
device.

Run `python benchmarks/accuracy/recount_models.py` to check the whole catalog, with names to check only
those, and with `--write` to put the counts found into the catalog file (rows whose class
`transformers` lacks keep their recorded count). Needs the `[profiler]` extra (torch, transformers);
no weights are downloaded or allocated.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

CATALOG = (
    Path(__file__).resolve().parents[2] / "estimator" / "napkinmath" / "catalog" / "models.json"
)

Row = dict[str, Any]


def read_catalog(path: Path = CATALOG) -> list[Row]:
    """Rows of the model catalog, in file order."""
    return json.loads(path.read_text(encoding="utf-8"))


def write_catalog(rows: list[Row], path: Path = CATALOG) -> None:
    """Write the catalog with one row a line, so that a diff shows the models that changed."""
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def build_on_meta(row: Row) -> Any:
    """The row's model, of the `transformers` class that the row names, with weights that hold no
    storage."""
    import torch
    import transformers
    from transformers import initialization

    config = transformers.AutoConfig.for_model(**row["config"])
    with torch.device("meta"), initialization.no_init_weights():
        model = getattr(transformers, row["class"])(config)
    model.tie_weights()  # initialization would have done it
    return model


def lacks_timm(row: Row) -> bool:
    """Whether a tower of the model is built by timm, which is not installed."""
    import importlib.util

    builds = row["config"].get("vision_config", {}).get("model_type") == "gemma3n_vision"
    return builds and importlib.util.find_spec("timm") is None


def count_parameters(row: Row) -> int:
    """Number of parameters of the row's model, tied weights once; `ValueError` when the row names
    no class."""
    if row["class"] is None:
        raise ValueError(
            f"{row['name']}: transformers has no class for model_type"
            f" {row['config']['model_type']!r}"
        )
    return sum(parameter.numel() for parameter in build_on_meta(row).parameters())


def main(arguments: list[str] | None = None) -> int:
    """Print each count with the time it took; 1 when one differs from the catalog and is not
    written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="models to count (default: all)")
    parser.add_argument("--write", action="store_true", help="put the counts into the catalog")
    options = parser.parse_args(arguments)
    rows = read_catalog()
    differing = 0
    for row in rows:
        unasked = options.names and row["name"] not in options.names
        if row["class"] is None or unasked or lacks_timm(row):
            continue
        start = time.perf_counter()
        counted = count_parameters(row)
        differs = counted != row["parameters"]
        differing += differs
        print(
            f"{row['name']:40} {counted:>17,} {time.perf_counter() - start:6.2f}"
            f" s{'  was ' + str(row['parameters']) if differs else ''}"
        )
        row["parameters"] = counted
    if options.write:
        write_catalog(rows)
    return int(differing > 0 and not options.write)


if __name__ == "__main__":
    sys.exit(main())
