"""A file that shards its model and does not say over how many GPUs, as a run on one."""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.config.job_keys import Difference, JobKey, JobKeys, KeyUse
from napkinmath.inputs.options import PARALLEL_OPTIONS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_HALVES = ("bf16", "fp16")


def on_one_gpu(
    options: dict[str, object],
    from_file: Mapping[str, object],
    notes: list[str],
    launcher: str = "",
) -> dict[str, object]:
    """Without the sharding of a file that does not say over how many GPUs: one GPU holds less of
    it, so the answer is what it holds at most. The `launcher` starts a process for each GPU that it
    finds."""
    sharded = [
        key for key in PARALLEL_OPTIONS if key in from_file and options[key] is from_file[key]
    ]
    sharded += ["zero_options"] if "zero_options" in from_file else []
    keys = options.get("job_keys")
    if "gpus" in options or not isinstance(keys, JobKeys):
        return options
    if not sharded:
        if launcher:
            notes.append(
                f"{launcher} starts a process for each GPU that it finds: one is priced; add"
                " --gpus N"
            )
        return options
    notes.append(
        f"{keys.tool}: the file shards the model over GPUs and does not say how many: one GPU is"
        " priced, which holds all of it; add --gpus N"
    )
    sharding = JobKey(
        name="sharding",
        use=KeyUse.NOT_PRICED,
        why="the file does not say how many GPUs share the model; add --gpus N",
        memory=Difference.LESS,
        time=Difference.EITHER,
        zero_stage=_zero_stage(from_file, sharded),
    )
    alone = "parameters" in str(options.get("offload")) and options.get("data_parallel") == [
        "zero3"
    ]
    kept = ("data_parallel", "zero_options") if alone else ()  # stage 3 of one rank
    found = {key: options[key] for key in options if key not in sharded or key in kept}
    word = from_file.get("precision")
    full = "sharded_dtype" in sharded and from_file["sharded_dtype"] == "fp32"
    if full and word in _HALVES and options["precision"] is word:  # a cast of fp32 weights
        found["precision"] = f"{word}-amp"
    return found | {"job_keys": keys.replace(keys=(*keys.keys, sharding))}


def _zero_stage(options: Mapping[str, object], sharded: list[str]) -> int:
    """What ranks share at most under the options of a file; 0 where a mesh divides the step too."""
    if any(key in sharded for key in ("tp", "pp", "cp", "ep")):
        return 0
    kinds = values.listed(options.get("data_parallel") or options.get("zero") or [])
    kind = str(kinds[0]) if len(kinds) == 1 else ""
    if kind.startswith("fsdp"):
        return 2 if "grad-op" in str(options.get("sharding", "")) else 3
    return int(kind[-1]) if kind.removeprefix("zero") in ("1", "2", "3") else 0
