"""Which workload a trainer's file asks for: by its own word for it, or by the keys that only one
trainer has."""

from __future__ import annotations

from napkinmath.base.errors import shown
from napkinmath.config.job_keys import Difference
from napkinmath.config.workload_config import WorkloadKind

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_SFT = "sft"
PLAIN_TRAINER = "trainer"
"""What ForeignJob.trained_by says of the Trainer itself, without TRL."""
# A tool's word -> our workload, by the names that --workload has.
WORDS = {
    "sft": _SFT,
    "pt": _SFT,
    "pretrain": _SFT,
    "dpo": "dpo",
    "ipo": "dpo",
    "sigmoid": "dpo",
    "hinge": "dpo",
    "kto_pair": "dpo",
    "gdpo": "grpo",
    "grpo": "grpo",
    "dapo": "dapo",
    "orpo": "orpo",
    "simpo": "simpo",
    "cpo": "simpo",
    "kto": "kto",
    "rm": "reward",
    "reward": "reward",
    "prm": "prm",
    "ppo": "ppo",
    "rloo": "rloo",
    "gkd": "distill",
    "kd": "distill",
    "contrastive": "contrastive",
    "contrastive-cached": "contrastive-cached",
}
EMBEDS = ("contrastive", "contrastive-cached")
"""Workloads of sentence-transformers, whose arguments are the Trainer's with its defaults."""
# Those that a script of somebody's own is called by, in its name or its folder's.
OWN = ("reward", "dpo", "kto", "ppo", "grpo", "orpo")
_SEVERAL, _ROLLED = "its other forwards and models", "what it generates and scores"
# Workloads whose step is at least the model's own, and what of them is not priced (trl 1.16
# experimental/*, axolotl 0.19 core/trainers/ebft).
_BESIDE = {
    **dict.fromkeys(("bco", "tpo", "sdft", "ssd", "gold", "distillation"), _SEVERAL),
    **dict.fromkeys(("sdpo", "onlinedpo", "nashmd", "xpo"), _ROLLED),
    **dict.fromkeys(("asyncgrpo", "ebft"), _ROLLED),
}
# Keys of TRL's configs that only these trainers have, the most telling first.
_TELLING = (
    ("ppo", ("num_ppo_epochs", "kl_coef", "cliprange", "vf_coef")),
    ("rloo", ("normalize_advantages", "reward_clip_range")),
    ("grpo", ("num_generations", "reward_funcs", "epsilon_high", "scale_rewards", "use_vllm")),
    ("kto", ("desirable_weight", "undesirable_weight")),
    ("simpo", ("simpo_gamma", "cpo_alpha")),
    ("gkd", ("teacher_model_name_or_path", "lmbda")),
    ("prm", ("step_separator", "train_on_last_step_only")),
    ("reward", ("center_rewards_coefficient",)),
    (
        "dpo",
        (
            "precompute_ref_log_probs",
            "rpo_alpha",
            "f_divergence_type",
            "reference_free",
            "ld_alpha",
        ),
    ),
)
_BY_PATH = ("dpo", "orpo", "kto", "grpo", "simpo", "reward", "gkd", "ppo", "rloo")


# Where a config of somebody's own script says its method: 'training_type: moe_dpo'.
_SAID_IN = (
    *("training_type", "train_type", "trainer_type", "training_method", "train_method"),
    *("training_stage", "stage", "method", "algorithm", "algo", "trainer"),
)
_NO_METHOD = ("sigmoid", "hinge", "pt", "rm", "kd")  # words of other things too
_SEEN = ("vlm", "vision", "multimodal")


def give_workload(job: ForeignJob, key: str, word: object) -> None:
    """Sets the workload of a tool's word for it. Raises InputError where it is not priced."""
    name = str(word).strip().lower()
    found = WORDS.get(name)
    if found == _SFT:
        return
    plain = name.replace("-", "").replace("_", "")
    if plain in _BESIDE and not job.is_settled("workload"):
        job.leave_out(
            key,
            f"of {shown(word)} the model's own step is priced, without {_BESIDE[plain]}",
            memory=Difference.MORE,
            time=Difference.MORE,
            option="workload",
        )
        return
    if found is None:
        known = ", ".join(sorted(kind.value for kind in WorkloadKind))
        job.refuse(
            "workload",
            f"{key} {shown(word)} of {job.tool} is not priced: its step is another than those of"
            f" --workload {known}; for the model's own step",
        )
        return
    job.give("workload", found)


def told_by_keys(job: ForeignJob) -> str:
    """Which of TRL's trainers reads the file: the one that a script names, else by keys of its own, else, where there are numbers of
    a preference loss, by the words of the path; sft where nothing says another."""
    content = job.content
    if job.trained_by:
        return _SFT if job.trained_by == PLAIN_TRAINER else job.trained_by
    if str(content.get("task_type")).lower() in ("dpo", "pretrain"):  # Firefly's
        return "dpo" if str(job.take("task_type")).lower() == "dpo" else _SFT
    if said := _said(job):
        return said
    for word, keys in _TELLING:
        if any(content.get(key) is not None for key in keys):
            return word
    if content.get("beta") is None and content.get("max_prompt_length") is None:
        return _SFT
    parts = job.path.lower().replace("\\", "/").replace("-", "/").replace("_", "/").split("/")
    found = next((word for word in _BY_PATH if word in parts or f"{word}.yaml" in parts), "dpo")
    if content.get("beta") is None and found == "dpo" and _SFT in parts:
        return _SFT
    key = "max_prompt_length" if content.get("beta") is None else "beta"
    job.note(f"{key} without a trainer's name: taken as {found}; add --workload for another")
    return found


def _said(job: ForeignJob) -> str:
    """The method by the file's own word for it; '' where no key says one."""
    for key in _SAID_IN:
        words = str(job.content.get(key)).lower().replace("-", "_").split("_")
        found = next((w for w in words if w in WORDS and w not in _NO_METHOD), "")
        if not found:
            continue
        job.take(key)
        job.note(f"{key} taken as --workload {WORDS[found]}")
        if any(word in _SEEN for word in words):
            images = "images in the batch are not priced; add --images"
            job.leave_out(key, images, memory=Difference.MORE, time=Difference.MORE)
        return found
    return ""
