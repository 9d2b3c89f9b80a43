"""Files of AutoTrain (autotrain-advanced) for language models, encoders with decoders, and classifiers of
text and images, and the words of `autotrain llm`.

Keys and defaults: huggingface/autotrain-advanced src/autotrain/parser.py and trainers/*/params.py
at b5c98fbe3aab; what they do: trainers/clm/utils.py configure_training_args, get_model,
trainers/clm/train_clm_*.py, trainers/{text_classification,seq2seq,image_classification,
image_regression}/__main__.py. Its requirements name
transformers 4.48 and TRL 0.13, whose from_pretrained makes fp32 weights.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.foreign import precision_of
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.rows import Row, read_rows
from napkinmath.inputs.trained_by import give_workload
from napkinmath.models.tasks import ANSWERS, IMAGES, SEQ2SEQ, SEQUENCE, TOKENS

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

_FILE, _LINE = "params.", ""
_HEADS = {
    **dict.fromkeys(("text_classification", "text_multi_class_classification"), SEQUENCE),
    **dict.fromkeys(("text_binary_classification", "text_regression"), SEQUENCE),
    **dict.fromkeys(("text_single_column_regression", "text_scoring"), SEQUENCE),
    **dict.fromkeys(("token_classification", "text_token_classification"), TOKENS),
    **dict.fromkeys(("extractive_qa", "ext_qa", "extractive_question_answering"), ANSWERS),
    "text_extractive_question_answering": ANSWERS,
}
_PICTURES = (
    *("image_classification", "image_binary_classification", "image_multi_class_classification"),
    *("image_regression", "image_single_column_regression", "image_scoring"),
)
# Texts that a trainer of embeddings takes from a sample.
_EMBEDS = {"pair": 2, "qa": 2, "triplet": 3, "pair_class": 2, "pair_score": 2}
_EMBEDDING = ("sentence_transformers_", "st_")
_PLAIN = ("default", "generic", "sft")
_LONGEST_BLOCK = 1024
"""Of a block that nobody gives, whatever the tokenizer allows (configure_block_size)."""


def read(job: ForeignJob) -> dict[str, object]:
    """Options of a file, or of a line's words."""
    job.flatten()
    at = _FILE if "task" in job.content else _LINE
    task = str(job.take("task") or "llm").lower().replace("-", "_").replace(":", "_")
    kind, _, trainer = task.partition("_")
    trainer = str(job.take("trainer", f"{_FILE}trainer") or trainer or "default").lower()
    if not task.startswith(_EMBEDDING):
        job.give("stack", "trl-0.14")
    job.give("model", job.take("base_model", "model"))
    read_rows(
        job,
        [
            Row("grad_accum", f"{at}gradient_accumulation", 4 if kind == "llm" else 1),
            Row("optimizer", f"{at}optimizer", "adamw_torch"),
        ],
    )
    most = job.take(f"{at}max_grad_norm")
    job.give("clip", not is_off(1.0 if most is None else most))
    if kind == "llm":
        _read_language(job, at, trainer)
    elif task in _HEADS:
        job.give("task", _HEADS[task])
        read_rows(job, [Row("bs", f"{at}batch_size", 8), Row("ctx", f"{at}max_seq_length", 128)])
        job.give("method", "full")
        job.give("checkpointing", "none")
        _read_precision(job, at, quantized=False, adapter=False)
    elif task in _PICTURES:
        job.give("task", IMAGES)
        read_rows(job, [Row("bs", f"{at}batch_size", 8)])
        job.give("method", "full")
        job.give("checkpointing", "none")
        _read_precision(job, at, quantized=False, adapter=False)
    elif task == "seq2seq":
        _read_seq2seq(job, at)
    elif task.startswith(_EMBEDDING):
        _read_embeddings(job, at, task.removeprefix(_EMBEDDING[0]).removeprefix(_EMBEDDING[1]))
    else:
        raise InputError(
            f"task {shown(task)} of AutoTrain is not read; give the same with flags"
            " (`estimate --help`)"
        )
    return job.finish()


def _read_seq2seq(job: ForeignJob, at: str) -> None:
    """Whole weights, or adapters on a base that is packed in 8 bits unless the file says otherwise.
    Raises InputError for 4 bits, with which it ends."""
    job.give("task", SEQ2SEQ)
    read_rows(
        job,
        [
            Row("bs", f"{at}batch_size", 2),
            Row("ctx", f"{at}max_seq_length", 128),
            Row("target_ctx", f"{at}max_target_length", 128),
        ],
    )
    adapter = job.switch(f"{at}peft", f"{at}use_peft")
    bits = str(job.take(f"{at}quantization") or "int8").lower() if adapter else ""
    if bits == "int4":
        raise InputError("AutoTrain's seq2seq ends with quantization int4; use int8 or none")
    _read_adapter(job, at, adapter=adapter)
    job.give("quant", "int8" if bits == "int8" else None)
    job.give("checkpointing", "full" if bits == "int8" else "none")
    _read_precision(job, at, quantized=bits == "int8", adapter=adapter)
    key = "data.valid_split" if "data.valid_split" in job.content else f"{at}valid_split"
    if not is_off(job.content.get(key)):
        job.leave_out(
            key,
            "evaluations generate answers for twice the batch, which is not priced",
            memory=Difference.MORE,
        )


def _read_embeddings(job: ForeignJob, at: str, trainer: str) -> None:
    """Texts of a sample through one encoder each (trainers/sent_transformers/__main__.py). CoSENT and
    softmax losses compare pairs in as many values as the contrastive one, or fewer."""
    if trainer not in _EMBEDS:
        raise InputError(
            f"trainer {shown(trainer)} of AutoTrain's sentence-transformers is unknown; use"
            f" {', '.join(_EMBEDS)}"
        )
    job.note("transformers 5 is priced, whose encoders run as those that AutoTrain names (4.48)")
    job.give("workload", "contrastive")
    job.give("columns", _EMBEDS[trainer])
    read_rows(job, [Row("bs", f"{at}batch_size", 8), Row("ctx", f"{at}max_seq_length", 128)])
    if "ctx" not in job.given:
        job.note(
            "max_seq_length is priced as the length of each text; AutoTrain does not hand it to the"
            " model, which cuts texts at its own: give --ctx what they have"
        )
    job.give("checkpointing", "none")
    _read_precision(job, at, quantized=False, adapter=False)


def _read_language(job: ForeignJob, at: str, trainer: str) -> None:
    if trainer not in _PLAIN:
        give_workload(job, "trainer", trainer)
    read_rows(job, [Row("bs", f"{at}batch_size", 2)])
    block = job.take(f"{at}block_size")
    if block in (None, -1):
        job.assume("ctx", _LONGEST_BLOCK, "AutoTrain's block_size")
    else:
        job.give("ctx", values.count(block, "block_size"))
    adapter = job.switch(f"{at}peft", f"{at}use_peft")
    bits = str(job.take(f"{at}quantization") or "int4").lower() if adapter else ""
    quantized = bits in ("int4", "int8")
    patched = job.switch(f"{at}unsloth", f"{at}use_unsloth") and trainer in _PLAIN
    _read_adapter(job, at, adapter=adapter)
    if quantized:
        job.give("quant", "nf4" if bits == "int4" else "int8")
        job.give("double_quant", patched if bits == "int4" else None)
    if patched and adapter:
        job.give("kernels", "unsloth")
        job.by_unsloth = True
    again = not job.switch(f"{at}disable_gradient_checkpointing")
    job.give("checkpointing", "offload" if patched and adapter else "full" if again else "none")
    job.give("reentrant", quantized if again and not patched else None)
    flash = job.switch(f"{at}use_flash_attention_2")
    job.give("attention", "flash2" if flash else None)
    _read_precision(job, at, quantized=quantized, adapter=adapter)
    _read_ranks(job, at)


def _read_adapter(job: ForeignJob, at: str, *, adapter: bool) -> None:
    job.give("method", "lora" if adapter else "full")
    if not adapter:
        return
    read_rows(
        job,
        [
            Row("rank", f"{at}lora_r", 16),
            Row("alpha", f"{at}lora_alpha", 32),
            Row("dropout", f"{at}lora_dropout", 0.05),
        ],
    )
    named = str(job.take(f"{at}target_modules") or "all-linear")
    names = [name.strip() for name in named.split(",")]
    job.give("targets", names[0] if len(names) == 1 else names)


def _read_precision(job: ForeignJob, at: str, *, quantized: bool, adapter: bool) -> None:
    kind = str(job.take(f"{at}mixed_precision") or "").lower()
    job.give(
        "precision",
        precision_of(
            job,
            bf16=kind == "bf16",
            fp16=kind == "fp16",
            tf32=False,
            weights="float32",
            quantized=quantized,
            adapter=adapter,
        ),
    )


def _read_ranks(job: ForeignJob, at: str) -> None:
    """Every GPU that there is trains, which `--gpus` says: by DDP, or ZeRO 3."""
    kind = job.take(f"{at}distributed_backend")
    if kind == "deepspeed" and "gpus" in job.given:
        job.give("data_parallel", ["zero3"])
    elif kind == "deepspeed":
        job.leave_out(
            f"{at}distributed_backend",
            "several GPUs share the model by ZeRO 3; add --gpus",
            memory=Difference.LESS,
            time=Difference.MORE,
            option="gpus",
        )
