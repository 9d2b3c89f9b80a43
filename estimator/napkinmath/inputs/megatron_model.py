"""The decoder that Megatron-LM's arguments describe, as a config of the family `megatron`.

Source: Megatron-LM d98e8a64 megatron/training/arguments.py validate_args (widths, kinds of
positions, patterns of layers), training/global_vars.py (the padded vocabulary).
"""

from __future__ import annotations

import re

from napkinmath.base import values
from napkinmath.base.errors import InputError, shown
from napkinmath.catalog.models import find_row
from napkinmath.config.job_keys import Difference
from napkinmath.inputs.megatron_deepspeed import is_engine
from napkinmath.inputs.megatron_mesh import count_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.inputs.foreign import ForeignJob

SIZES = ("num_layers", "hidden_size", "num_attention_heads")
_DEFAULT_VOCABULARY = 50257  # GPT-2's tokenizer, which the published launch scripts use
# Tokenizers whose class says how many words there are.
_VOCABULARIES = {
    "Llama2Tokenizer": 32000,
    "Llama3Tokenizer": 128256,
    "MistralTokenizer": 32000,
    "Qwen2Tokenizer": 151936,
    "TikTokenizer": 2**17,  # core/tokenizers/text/libraries/tiktoken_tokenizer.py
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
}
# A tokenizer's file may say how many: nemotron_2_256k.model has 256,000.
_THOUSANDS = re.compile(r"(?<![a-zA-Z\d])(\d{2,3})k(?![a-zA-Z\d])")
# Megatron's name of a size -> the family's, and what it is where nothing is said.
_LATENT = {
    "q_lora_rank": ("q_lora_rank", None),
    "kv_lora_rank": ("kv_lora_rank", 32),
    "qk_head_dim": ("qk_nope_head_dim", 128),
    "qk_pos_emb_head_dim": ("qk_rope_head_dim", 64),
    "v_head_dim": ("v_head_dim", 128),
}
_MAMBA = ("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups")
_PATTERNS = ("hybrid_layer_pattern", "hybrid_override_pattern")
_OTHERS = (
    *("swiglu", "quick_geglu", "squared_relu", "ffn_hidden_size", "kv_channels", "vocab_size"),
    *("padded_vocab_size", "make_vocab_size_divisible_by", "tokenizer_type", "tokenizer_model"),
    *("group_query_attention", "num_query_groups", "num_key_value_heads", "normalization"),
    *("apply_layernorm_1p", "add_bias_linear", "disable_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "position_embedding_type", "use_rotary_position_embeddings"),
    *("no_position_embedding", "rotary_percent", "rotary_base", "max_position_embeddings"),
    *("untie_embeddings_and_output_weights", "num_experts", "moe_router_topk"),
    *("moe_ffn_hidden_size", "moe_shared_expert_intermediate_size", "moe_shared_expert_gate"),
    *("moe_layer_freq", "moe_latent_size", "multi_latent_attention", *_LATENT, *_MAMBA, *_PATTERNS),
)


def settle_model(job: ForeignJob) -> None:
    """A model is given beside the arguments, so that what they say of its sizes is moot."""
    job.take(*SIZES, *_OTHERS)


def lacks(job: ForeignJob) -> list[str]:
    """The sizes that are not given; a pattern says how many layers there are."""
    patterned = any(job.content.get(name) for name in _PATTERNS)
    return [
        f"--{name.replace('_', '-')}"
        for name in SIZES
        if job.take(name) is None and not (patterned and name == "num_layers")
    ]


def model_config(job: ForeignJob) -> dict[str, object]:
    """The config of the decoder."""
    pattern = _pattern(job)
    if missing := lacks(job):
        raise InputError(
            f"Megatron-LM's arguments lack {', '.join(missing)}; give them, or a model with --model"
        )
    layers, hidden, heads = (count_of(job, name) or len(pattern) for name in SIZES)
    dropouts = dropouts_of(job)
    found: dict[str, object] = {
        "model_type": "megatron",
        "hidden_size": hidden,
        "num_hidden_layers": len(pattern) or layers,
        "num_attention_heads": heads,
        "head_dim": count_of(job, "kv_channels"),
        "vocab_size": _padded_vocabulary(job),
        "tie_word_embeddings": not job.switch("untie_embeddings_and_output_weights"),
        "megatron_hidden_dropout": dropouts["resid_pdrop"],
        "attention_dropout": dropouts["attn_pdrop"],
        "qk_layernorm": job.switch("qk_layernorm"),
        **_activation(job, hidden),
        **_positions(job),
        **_mixture(job),
        **_heads(job, heads),
    }
    if pattern:
        found["hybrid_layer_pattern"] = pattern
        found.update({name: count_of(job, name) for name in _MAMBA})
    else:
        job.take(*_MAMBA)
    # A rank of queries that is said to be none is a full-rank projection.
    return {k: value for k, value in found.items() if value is not None or k == "q_lora_rank"}


def _activation(job: ForeignJob, hidden: int) -> dict[str, object]:
    gated = job.switch("swiglu")
    quick, squared = job.switch("quick_geglu"), job.switch("squared_relu")
    width = 64 * (8 * hidden // 3 // 64) if gated else 4 * hidden
    bias = job.switch("add_bias_linear", default=True) and not job.switch("disable_bias_linear")
    one_plus = job.switch("apply_layernorm_1p")  # LayerNorm's kernel too (zero_centered_gamma)
    kind = str(job.take("normalization") or "LayerNorm")
    if kind not in ("LayerNorm", "RMSNorm"):
        job.refuse("model", f"--normalization {shown(kind)} of Megatron-LM is not read")
    return {
        "gated": gated or quick,
        "activation": "silu"
        if gated
        else "quick_gelu"
        if quick
        else "relu2"
        if squared
        else "gelu",
        "intermediate_size": count_of(job, "ffn_hidden_size") or width,
        "add_bias_linear": bias,
        "normalization": "LayerNorm" if one_plus else kind,
    }


def _positions(job: ForeignJob) -> dict[str, object]:
    kind = str(job.take("position_embedding_type") or "learned_absolute")
    if job.switch("use_rotary_position_embeddings"):
        kind = "rope"
    if job.switch("no_position_embedding") and kind == "learned_absolute":
        kind = "none"
    job.take("rotary_base")
    part = job.take("rotary_percent")
    rows = count_of(job, "max_position_embeddings") or count_of(job, "seq_length")
    return {
        "position_embedding_type": kind,
        "rotary_percent": None if part is None else values.number(part, "--rotary-percent"),
        "max_position_embeddings": rows or 1024,
    }


def _heads(job: ForeignJob, heads: int) -> dict[str, object]:
    """Grouped queries, or one latent row for keys and values."""
    grouped = job.switch("group_query_attention")
    groups = count_of(job, "num_query_groups")
    groups = groups if grouped else count_of(job, "num_key_value_heads")  # Megatron-DeepSpeed's
    if not job.switch("multi_latent_attention"):
        job.take(*_LATENT)
        bias = job.switch("add_qkv_bias")
        return {"num_key_value_heads": groups or heads, "add_qkv_bias": bias}
    latent = {ours: count_of(job, name) or usual for name, (ours, usual) in _LATENT.items()}
    return {"multi_latent_attention": True, "num_key_value_heads": heads, **latent}


def _mixture(job: ForeignJob) -> dict[str, object]:
    given = job.content.get("num_experts")
    if given is not None and is_engine(job) and given not in (1, "1"):
        job.refuse("model", f"--num-experts {shown(given)} of DeepSpeed is not read")
    experts = count_of(job, "num_experts") if given not in (0, "0") else job.take("num_experts")
    chosen = count_of(job, "moe_router_topk")
    each = count_of(job, "moe_ffn_hidden_size")
    shared = count_of(job, "moe_shared_expert_intermediate_size")
    gate, latent = job.switch("moe_shared_expert_gate"), count_of(job, "moe_latent_size")
    every = job.take("moe_layer_freq")
    if not experts or experts == 1:
        return {}
    return {
        "num_experts": experts,
        "moe_router_topk": chosen,
        "moe_ffn_hidden_size": each or count_of(job, "ffn_hidden_size") or _plain_width(job),
        "moe_shared_expert_intermediate_size": shared,
        "moe_shared_expert_gate": gate if shared else None,
        "moe_latent_size": latent,
        "moe_layer_freq": None if every is None else listed_pattern(every, "--moe-layer-freq"),
    }


def _plain_width(job: ForeignJob) -> int:
    hidden = count_of(job, "hidden_size") or 0
    return 64 * (8 * hidden // 3 // 64) if job.switch("swiglu") else 4 * hidden


def listed_pattern(value: object, flag: str) -> object:
    """A whole number, or the list that an expression such as ([0]*3+[1]*11) stands for, which is
    read and never run. Raises InputError where it is neither."""
    import ast

    def of(node: ast.expr) -> list[int] | int:
        if isinstance(node, ast.List):
            return [int(values.whole(of(each)) or 0) for each in node.elts]
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.BinOp):
            left, right = of(node.left), of(node.right)
            if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
                return left + right
            if isinstance(node.op, ast.Mult):
                several, times = (left, right) if isinstance(left, list) else (right, left)
                assert isinstance(several, list) and isinstance(times, int), value
                if len(several) * times <= _LONGEST:
                    return several * times
        raise ValueError(value)

    if not isinstance(value, str):
        return value
    try:
        return of(ast.parse(value.strip().strip("\"'"), mode="eval").body)
    except (AssertionError, SyntaxError, ValueError, RecursionError) as error:
        raise InputError(
            f"{flag} {shown(value)} is no list of 0 and 1; use a number or ([0]*3+[1]*11)"
        ) from error


_LONGEST = 10_000  # layers of a config at most


def _pattern(job: ForeignJob) -> str:
    """The letters of the layers; '|' parts pipeline stages, '/' begins what predicts further
    tokens."""
    name = next((key for key in _PATTERNS if job.content.get(key)), "")
    given = str(job.take(*_PATTERNS) or "")
    whole, further, _ = given.partition("/")
    if further:
        job.leave_out(
            name,
            "layers that predict further tokens",
            memory=Difference.MORE,
            time=Difference.MORE,
        )
    segments, pipeline = whole.count("|") + 1, count_of(job, "pipeline_model_parallel_size") or 1
    if segments > pipeline and segments % pipeline == 0:
        job.give("pp_chunks", segments // pipeline)
    return whole.replace("|", "")


def _padded_vocabulary(job: ForeignJob) -> int:
    """training/global_vars.py _vocab_size_with_padding."""
    size = _vocabulary(job)
    multiple = (count_of(job, "make_vocab_size_divisible_by") or 128) * (
        count_of(job, "tensor_model_parallel_size") or 1
    )
    return -(-size // multiple) * multiple


def _vocabulary(job: ForeignJob) -> int:
    """--vocab-size, or that of the tokenizer where its class or a model's name says it
    (training/tokenizer/tokenizer.py build_tokenizer)."""
    kind, name = str(job.take("tokenizer_type") or ""), str(job.take("tokenizer_model") or "")
    given = count_of(job, "vocab_size") or count_of(job, "padded_vocab_size")
    if given is not None:
        return given
    row = find_row(name) if name and "$" not in name else None
    if row is not None and (size := row["config"].get("vocab_size")):
        job.note(f"--vocab-size not given, {size} is that of {name}")
        return int(size)
    size = _VOCABULARIES.get(kind, _DEFAULT_VOCABULARY)
    whose = kind if kind in _VOCABULARIES else "GPT-2's tokenizer"
    if kind not in _VOCABULARIES and (said := _THOUSANDS.search(name)):
        size, whose = 1000 * int(said[1]), f"as {shown(said[0])} in --tokenizer-model says"
    job.note(f"--vocab-size not given, taken as {size} ({whose})")
    return size


def dropouts_of(job: ForeignJob) -> dict[str, float]:
    """0.1 unless given, as training/arguments.py has it."""
    given = {name: job.take(name) for name in ("hidden_dropout", "attention_dropout")}
    hidden, attention = (
        0.1 if value is None else values.number(value, f"--{name.replace('_', '-')}")
        for name, value in given.items()
    )
    return {"resid_pdrop": hidden, "embd_pdrop": hidden, "attn_pdrop": attention}
