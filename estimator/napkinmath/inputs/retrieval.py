"""Retrievers in the words of FlagEmbedding, tevatron and those made from them: a query and a group of
passages make a sample of a contrastive loss; a reranker reads both together. LLM2Vec's files embed
two texts or three.

Source: FlagOpen/FlagEmbedding abc/finetune/embedder/AbsArguments.py, AbsDataset.py, AbsModeling.py; texttron/tevatron
retriever/arguments.py, modeling/encoder.py; McGill-NLP/llm2vec experiments/run_simcse.py, run_supervised.py, run_mntp.py.
"""

from __future__ import annotations

from napkinmath.base import values
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.known_keys import is_off
from napkinmath.inputs.trained_by import PLAIN_TRAINER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.inputs.foreign import ForeignJob

_GROUPS = ("train_group_size", "train_n_passages")
_QUERY, _PASSAGE = ("query_max_len", "q_max_len"), ("passage_max_len", "p_max_len")
_RERANKS = ("query_instruction_for_rerank", "rerank_max_len")
_CHUNKED = ("grad_cache", "sub_batch_size")
_LONGEST_QUERY, _LONGEST_PASSAGE = 32, 128  # both tools' defaults
RERANKER = "reranker"
_LLM2VEC = ("mask_token_type", "simcse_dropout", "pooling_mode")
"""LLM2Vec's own arguments; its scripts adapt all linears."""
_NO_COST = (
    *("peft_model_name_or_path", "loss_scale", "stop_after_n_steps", "dataset_file_path"),
    *("pooling_mode", "data_collator_type", "mlm_probability"),
)


def reads_pairs(target: str, keys: Mapping[str, object]) -> bool:
    """Whether a program trains a reranker, by its path and the words that it is given."""
    grouped = any(key in keys for key in _GROUPS)
    return grouped and ("rerank" in target.lower() or any(key in keys for key in _RERANKS))


def retrieval_of(job: ForeignJob) -> str:
    """The workload of a file that groups passages by queries, with its texts and their length; ''
    for another file."""
    group = job.take(*_GROUPS)
    if group is None:
        return _of_llm2vec(job) if is_llm2vec(job) else ""
    job.trained_by = job.trained_by or PLAIN_TRAINER
    if job.trained_by == RERANKER or reads_pairs("", job.content):
        return RERANKER
    key = next(name for name in _GROUPS if name in job.content)
    passages = values.count(group, key)
    job.give("columns", 1 + passages)
    query = values.count(job.take(*_QUERY) or _LONGEST_QUERY, _QUERY[0])
    passage = values.count(job.take(*_PASSAGE) or _LONGEST_PASSAGE, _PASSAGE[0])
    job.give("ctx", max(query, passage))
    job.note(f"a query and {passages} passages of up to {max(query, passage)} tokens are a sample")
    job.leave_out(
        next((name for name in _PASSAGE if name in job.content), key),
        f"queries of {query} and passages of {passage} tokens, the most they may have, are priced as"
        " long as the longer; a batch is padded to its longest text: give --ctx",
        memory=Difference.LESS,
        time=Difference.LESS,
        option="ctx",
    )
    _name_order(job, key)
    return "contrastive"


def is_llm2vec(job: ForeignJob) -> bool:
    """Whether a file is for one of LLM2Vec's scripts."""
    own = any(key in job.content for key in _LLM2VEC)
    return own and any(key in job.content for key in ("bidirectional", "mask_token_type"))


def _of_llm2vec(job: ForeignJob) -> str:
    """Masked tokens, which keep the model's loss; or a text with itself, or with a passage and one
    that is no answer."""
    for key in _NO_COST:
        job.take(key)
    simcse = job.take("simcse_dropout")
    masked = job.take("mask_token_type") is not None
    if masked or not is_off(job.take("bidirectional")):
        key = "mask_token_type" if masked else "bidirectional"
        why = "attention looks both ways, and is priced as looking back alone"
        job.leave_out(key, why, time=Difference.MORE)
    if masked:
        return ""
    job.trained_by = job.trained_by or PLAIN_TRAINER
    job.give("columns", 3 if simcse is None else 2)
    return "contrastive"


def _name_order(job: ForeignJob, key: str) -> None:
    """How the texts of a batch are put through the model otherwise than is priced."""
    if not is_off(job.content.get("gradient_checkpointing")):
        job.leave_out(
            key,
            "all passages of a batch are recomputed at once, and priced as one forward for each of a"
            " group",
            memory=Difference.MORE,
        )
    for name in _CHUNKED:
        if name in job.content and job.content[name] != -1 and not is_off(job.content[name]):
            job.leave_out(name, "texts are embedded in pieces", memory=Difference.LESS)
