"""Launch lines and TOML files of kohya-ss/musubi-tuner: LoRA of Wan and Qwen-Image.

Options and what they do: kohya-ss/musubi-tuner training/parser_common.py, training/trainer_base.py,
wan_train_network.py, qwen_image_train_network.py, networks/lora.py, dataset/config_utils.py at
30c658c4f4b0.
"""

from __future__ import annotations

from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.picture_scripts import (
    MUSUBI,
    SCRIPT,
    adapted,
    one_level,
    read_datasets,
    script_of,
)
from napkinmath.inputs.rows import Row, read_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

# training/trainer_base.py get_optimizer, in lower case.
_OPTIMIZERS: dict[str, object] = {
    "adamw": "adamw-foreach",
    "adamw8bit": "adamw-8bit",
    "adafactor": "adafactor",
    "lion8bit": "lion-8bit",
    "pagedadamw8bit": "paged-adamw-8bit",
    "prodigy": "prodigy",
}
_TASKS = {  # wan/configs/__init__.py WAN_CONFIGS
    "t2v-14B": "wan2.1-t2v-14b",
    "t2v-1.3B": "wan2.1-t2v-1.3b",
    "t2i-14B": "wan2.1-t2v-14b",
    "i2v-14B": "wan2.1-i2v-14b",
    "t2v-A14B": "wan2.2-t2v-a14b",
    "i2v-A14B": "wan2.2-i2v-a14b",
}
_SIDES = "960x544"  # BaseDatasetParams.resolution


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a launch line or of a file."""
    if SCRIPT not in job.content:
        job.content = one_level(job.content)
    script = script_of(MUSUBI, _script(job))
    job.give("stack", "sd-scripts")
    _read_model(job, script.model)
    job.give("method", "lora" if script.adapts else "full")
    if script.adapts:
        _read_network(job)
    read_datasets(job, default=_SIDES)
    name = str(job.take("optimizer_type") or "adamw").lower().rpartition(".")[2]
    if name not in _OPTIMIZERS:
        job.refuse("optimizer", f"optimizer_type {shown(name)} of musubi-tuner is not modelled")
    job.give("optimizer", _OPTIMIZERS.get(name))
    job.give("optimizer_in_backward", job.switch("fused_backward_pass") or None)
    read_rows(job, [Row("grad_accum", "gradient_accumulation_steps")])
    again, on_host = job.switch("gradient_checkpointing"), False
    on_host = job.switch("gradient_checkpointing_cpu_offload") and again
    job.give("checkpointing", "offload" if on_host else "full" if again else "none")
    _read_precision(job, adapts=script.adapts)
    read_rows(job, [Row("blocks_to_swap", "blocks_to_swap")])
    clip = job.take("max_grad_norm")
    job.give("clip", not is_off(1.0 if clip is None else clip))
    job.note(
        "its own modules are priced as diffusers': the same weights and checkpoints, other"
        " temporaries of one block"
    )
    return job.finish()


def _script(job: ForeignJob) -> str:
    """The script's name; of a file alone what its network module says."""
    said = job.take(SCRIPT)
    if said is not None:
        return str(said)
    module = str(job.content.get("network_module") or "")
    found = f"{module.rpartition('lora_')[2]}_train_network"
    if found not in MUSUBI:
        job.refuse("model", f"network_module {shown(module)} of {job.tool} has no rules")
        return "wan_train_network"
    job.note(f"read as of {found}.py")
    return found


def _read_model(job: ForeignJob, usual: str) -> None:
    """The model of a task or of the script; the file of weights says nothing of it."""
    task = job.take("task")
    if task is None and usual.startswith("wan"):
        task = "t2v-14B"  # --task's default
    name = usual if task is None else _TASKS.get(str(task))
    for key in ("edit", "edit_plus"):
        if job.switch(key):
            name = None
    version = str(job.take("model_version") or "original")
    if version != "original" or name is None:
        said = version if version != "original" else task or "Qwen-Image-Edit"
        job.refuse("model", f"{shown(said)} of musubi-tuner has no rules")
        return
    job.give("model", name)
    timed_once = job.switch("force_v2_1_time_embedding")
    if name.startswith("wan2.2") and not timed_once:
        job.leave_out(
            "task",
            "the time is embedded for each token (--force_v2_1_time_embedding is off), and is"
            " priced once for each video",
            memory=Difference.MORE,
            time=Difference.MORE,
        )


def _read_network(job: ForeignJob) -> None:
    module = str(job.take("network_module") or "networks.lora_wan").rpartition("networks.")[2]
    if not module.startswith("lora"):
        job.leave_out(
            "network_module",
            f"{module} is priced as LoRA",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )
    read_rows(job, (Row("rank", "network_dim", 4), Row("alpha", "network_alpha")))
    read_rows(job, [Row("dropout", "network_dropout")])
    job.give("targets", list(adapted(str(job.options.get("model") or ""))))
    job.give("adapter_dtype", "fp32")
    if job.take("network_args"):
        job.leave_out(
            "network_args",
            "adapters on some modules alone, or of other ranks, are not priced",
            memory=Difference.EITHER,
            time=Difference.EITHER,
        )


def _read_precision(job: ForeignJob, *, adapts: bool) -> None:
    """Weights are in the type of the file, bf16 for all that is published, under autocast;
    fp8_scaled leaves all but the blocks' linears in bf16."""
    word = str(job.take("mixed_precision") or "no").lower()
    narrow = job.switch("fp8_base")
    scaled = job.switch("fp8_scaled")
    if job.switch("full_bf16"):
        job.give("precision", "bf16-autocast")
        return
    half = word if word in ("bf16", "fp16") else ""
    if narrow and adapts:
        job.give("precision", f"{half or 'bf16'}-fp8-base")
        if scaled:
            job.note("fp8_scaled: weights beside the blocks' linears are priced in FP8 too")
    elif half:
        job.give("precision", f"{half}-autocast")
    else:
        job.give("precision", "bf16")
