"""Families: one mapping each from a Hugging Face config to a ModelSpec; the only place that asks
for a model type."""

from __future__ import annotations

from napkinmath.base.errors import InputError, shown, suggest
from napkinmath.models.stored_weights import stored_type
from napkinmath.models.tasks import for_task, named_task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.models.families.config import Config

# model_type -> "module:function"; imported when asked for, so that one estimate loads one family.
FAMILIES: dict[str, str] = {
    "llama": "llama:llama",
    "gemma": "gemma:gemma",
    "gemma2": "gemma:gemma2",
    "gemma3_text": "gemma:gemma3_text",
    "starcoder2": "dense_variants:starcoder2",
    "olmo": "olmo:olmo",
    "olmo2": "olmo:olmo2",
    "olmo3": "olmo:olmo3",
    "olmo_hybrid": "olmo:olmo_hybrid",
    "exaone4": "dense_variants:exaone4",
    "smollm3": "dense_variants:smollm3",
    "arcee": "dense_variants:arcee",
    "nemotron": "dense_variants:nemotron",
    "apertus": "dense_variants:apertus",
    "helium": "dense_variants:helium",
    "hunyuan_v1_dense": "dense_variants:hunyuan",
    "glm": "dense_variants:glm",
    "glm4": "dense_variants:glm4",
    "glm4v_text": "dense_variants:glm4v_text",
    "glm_ocr_text": "dense_variants:glm_ocr_text",
    "cohere": "cohere:cohere",
    "cohere2": "cohere:cohere2",
    "phi3": "packed:phi3",
    "persimmon": "packed:persimmon",
    "gpt_neox": "packed:gpt_neox",
    "gpt2": "packed:gpt2",
    "gpt_bigcode": "packed:gpt_bigcode",
    "gpt_neo": "gpt:gpt_neo",
    "megatron": "megatron:megatron",
    "gptj": "gpt:gptj",
    "codegen": "gpt:codegen",
    "opt": "opt:opt",
    "xglm": "opt:xglm",
    "biogpt": "opt:biogpt",
    "bloom": "alibi:bloom",
    "mpt": "alibi:mpt",
    "falcon": "alibi:falcon",
    "phi": "dense_variants:phi",
    "stablelm": "dense_variants:stablelm",
    "seed_oss": "llama_kin:seed_oss",
    "ernie4_5": "llama_kin:ernie4_5",
    "paddleocr_vl_text": "llama_kin:paddleocr_vl_text",
    "cwm": "llama_kin:cwm",
    "ministral3": "llama_kin:ministral3",
    "jais2": "llama_kin:jais2",
    "youtu": "llama_kin:youtu",
    "minicpm3": "llama_kin:minicpm3",
    "vaultgemma": "gemma:vaultgemma",
    "gemma3n": "gemma3n:gemma3n",
    "gemma3n_text": "gemma3n:gemma3n_text",
    "gemma4": "gemma4:gemma4",
    "gemma4_text": "gemma4:gemma4_text",
    "gemma4_unified": "gemma4:gemma4_unified",
    "gemma4_unified_text": "gemma4:gemma4_unified_text",
    "muse_glimmer": "muse:muse_glimmer",
    "mistral": "llama:mistral",
    "ministral": "llama:ministral",
    "qwen2": "llama:qwen2",
    "qwen3": "llama:qwen3",
    "granite": "llama:granite",
    "internlm3": "llama:internlm3",
    "qwen": "remote_code:qwen",
    "baichuan": "remote_code:baichuan",
    "internlm": "remote_code:internlm",
    "internlm2": "remote_code:internlm2",
    "chatglm": "remote_code:chatglm",
    "minicpm": "remote_code:minicpm",
    "orion": "remote_code:orion",
    "exaone": "remote_kin:exaone",
    "mimo": "remote_kin:mimo",
    "nemotron-nas": "remote_kin:nemotron_nas",
    "bailing_moe": "remote_kin:bailing_moe",
    "sarvam_moe": "remote_kin:bailing_moe",
    "albert": "albert:albert",
    "bert": "bert:bert",
    "roberta": "bert:roberta",
    "xlm-roberta": "bert:roberta",
    "camembert": "bert:roberta",
    "distilbert": "bert:distilbert",
    "modernbert": "modernbert:modernbert",
    "deberta-v2": "deberta:deberta_v2",
    "bart": "bart:bart",
    "mbart": "bart:mbart",
    "plbart": "bart:plbart",
    "pegasus": "bart:pegasus",
    "m2m_100": "bart:m2m_100",
    "marian": "bart:marian",
    "blenderbot": "bart:blenderbot",
    "blenderbot-small": "bart:blenderbot_small",
    "whisper": "whisper:whisper",
    "wav2vec2": "wav2vec2:wav2vec2",
    "hubert": "wav2vec2:wav2vec2",
    "unispeech": "wav2vec2:wav2vec2",
    "unispeech-sat": "wav2vec2:wav2vec2",
    "data2vec-audio": "wav2vec2:data2vec_audio",
    "wavlm": "wav2vec2:wavlm",
    "t5": "t5:t5",
    "mt5": "t5:mt5",
    "umt5": "t5:umt5",
    "llava": "vision_language:llava",
    "video_llava": "video_llava:video_llava",
    "llava_next": "tiled_vision:llava_next",
    "llava_next_video": "tiled_vision:llava_next",
    "llava_onevision": "tiled_vision:llava_onevision",
    "idefics3": "tiled_vision:idefics3",
    "smolvlm": "tiled_vision:idefics3",
    "internvl": "tiled_vision:internvl",
    "qianfan_ocr": "tiled_vision:qianfan_ocr",
    "mistral3": "vision_language:mistral3",
    "gemma3": "vision_language:gemma3",
    "paligemma": "vision_language:paligemma",
    "blip-2": "blip:blip_2",
    "qwen2_vl": "qwen_vl:qwen2_vl",
    "qwen2_5_vl": "qwen_vl:qwen2_5_vl",
    "qwen3_vl": "qwen_vl:qwen3_vl",
    "qwen3_vl_moe": "qwen_vl:qwen3_vl_moe",
    "cosmos3_omni": "qwen_vl:qwen3_vl",
    "aya_vision": "cohere_vision:aya_vision",
    "deepseek_vl": "vision_language:deepseek_vl",
    "exaone4_5": "qwen_vl:exaone4_5",
    "paddleocr_vl": "ocr_vision:paddleocr_vl",
    "lighton_ocr": "ocr_vision:lighton_ocr",
    "video_llama_3": "ocr_vision:video_llama_3",
    "lfm2_vl": "lfm2_vision:lfm2_vl",
    "cohere2_vision": "cohere_vision:cohere2_vision",
    "kimi_k25": "kimi_vision:kimi_k25",
    "glm4v": "glm_vision:glm4v",
    "glmga": "glm_vision:glm4v",
    "glm_ocr": "glm_vision:glm_ocr",
    "glm46v": "glm_vision:glm4v",
    "glm4v_moe": "glm_vision:glm4v",
    "glm4v_moe_text": "moe:glm4v_moe_text",
    "qwen2_5_omni": "omni:qwen2_5_omni",
    "qwen2_5_omni_thinker": "omni:qwen2_5_omni_thinker",
    "qwen3_omni_moe": "omni:qwen3_omni_moe",
    "qwen3_omni_moe_thinker": "omni:qwen3_omni_moe_thinker",
    "qwen3_vl_moe_text": "moe:qwen3_vl_moe_text",
    "mllama": "mllama:mllama",
    "mllama_text_model": "mllama:mllama_text",
    "llama4": "llama4:llama4",
    "llama4_text": "llama4:llama4_text",
    "mamba": "mamba:mamba",
    "qwen3_next": "qwen_hybrid:qwen3_next",
    "qwen3_5": "qwen_hybrid:qwen3_5",
    "qwen3_5_text": "qwen_hybrid:qwen3_5_text",
    "qwen3_5_moe": "qwen_hybrid:qwen3_5",
    "qwen3_5_moe_text": "qwen_hybrid:qwen3_5_moe_text",
    "jamba": "hybrids:jamba",
    "granitemoehybrid": "hybrids:granitemoehybrid",
    "nemotron_h": "hybrids:nemotron_h",
    "bamba": "hybrids:bamba",
    "zamba2": "zamba2:zamba2",
    "falcon_h1": "hybrids:falcon_h1",
    "lfm2": "hybrids:lfm2",
    "mamba2": "mamba:mamba2",
    "falcon_mamba": "mamba:falcon_mamba",
    "vit": "vit:vit",
    "resnet": "convnets:resnet",
    "convnext": "convnets:convnext",
    "convnextv2": "convnets:convnextv2",
    "deepseek_v2": "deepseek:deepseek_v2",
    "deepseek_v3": "deepseek:deepseek_v3",
    "kimi_k2": "deepseek:deepseek_v3",  # whose architecture its config names
    "deepseek_v32": "deepseek:deepseek_v32",
    "glm_moe_dsa": "deepseek:glm_moe_dsa",
    "gpt_oss": "gpt_oss:gpt_oss",
    "mixtral": "moe:mixtral",
    "qwen2_moe": "moe:qwen2_moe",
    "qwen3_moe": "moe:qwen3_moe",
    "olmoe": "moe:olmoe",
    "granitemoe": "moe:granitemoe",
    "phimoe": "moe:phimoe",
    "glm4_moe": "moe:glm4_moe",
    "minimax": "minimax:minimax",
    "minimax_m2": "moe:minimax_m2",
    "deepseek": "moe:deepseek_moe",
    "glm4_moe_lite": "moe_kin:glm4_moe_lite",
    "mistral4": "moe_kin:mistral4",
    "dots1": "moe_kin:dots1",
    "solar_open": "moe_kin:solar_open",
    "ernie4_5_moe": "moe_kin:ernie4_5_moe",
    "flex_olmo": "moe_kin:flex_olmo",
    "hunyuan_v1_moe": "moe_kin:hunyuan_v1_moe",
    "granitemoeshared": "moe_kin:granitemoeshared",
    # classes of diffusers, whose configs name the class and no model type
    "UNet2DConditionModel": "unet:unet",
    "FluxTransformer2DModel": "flux:flux",
    "SD3Transformer2DModel": "sd3:sd3",
    "WanTransformer3DModel": "wan:wan",
    "QwenImageTransformer2DModel": "qwen_image:qwen_image",
}


OWN_CODE = ("remote_code", "remote_kin")
"""Families whose classes come with the weights: their names follow no rule."""
SHORTEST_MISSPELT = 4
"""Letters of a type below which every other one is near."""

# Libraries with modelling code of their own for many architectures (ModelCode.library).
MODELLING: dict[str, str] = {
    "litgpt": "litgpt:litgpt",
}


def is_learned(model_type: object) -> bool:
    """Whether a learned form of this model type, or of its towers beside a text, ships with the
    catalog or was kept here."""
    from napkinmath.catalog.learned_forms import is_known
    from napkinmath.catalog.learned_towers import has_towers

    return is_known(model_type) or has_towers(model_type)


def read_config(
    config: Mapping[str, object],
    *,
    name: str = "",
    source: str = "",
    modelling: str = "",
    task: str = "",
) -> ModelSpec:
    """The model that a `config.json` describes; raises InputError naming what is missing,
    contradictory or unknown.

    `modelling`: the library whose classes run it, where they are not transformers' (a row of
    MODELLING). `task`: which head it ends in, where `architectures` does not say.
    """
    if task:
        config = for_task(config, task)
    spec = _mapped(config, name, source, modelling, task)
    return spec.replace(stored_type=stored_type(config))


def _mapped(
    config: Mapping[str, object], name: str, source: str, modelling: str, task: str
) -> ModelSpec:
    """What the family of a config makes of it."""
    from napkinmath.models.families.config import Config

    model_type = config.get("model_type", config.get("_class_name"))
    row = MODELLING[modelling] if modelling else FAMILIES.get(str(model_type))
    if row is None and is_learned(model_type):
        from napkinmath.catalog.learned_towers import has_towers

        row = "on_text:on_text" if has_towers(model_type) else None
    if row is None and is_learned(model_type):
        from napkinmath.models.learned import read_learned

        own = name or str(config.get("_name_or_path") or model_type)
        return read_learned(config, name=own, source=source)
    if row is None:
        near = (
            _near_types(str(model_type).lower())
            if model_type
            else '; add it, e.g. "model_type": "llama"'
        )
        raise InputError(
            f"model_type {shown(model_type)} is not one of the {len(FAMILIES)} families"
            f" known{near}; `estimate learn PATH` learns one from the transformers that you have,"
            " `estimate trace --model PATH` runs it once"
        )
    module, _, function = row.partition(":")
    mapping = getattr(
        __import__(f"napkinmath.models.families.{module}", fromlist=[function]), function
    )
    c = Config(config, name or str(config.get("_name_or_path") or model_type), source)
    spec: ModelSpec = mapping(c)
    if modelling or module in OWN_CODE:
        own = spec.stages[-1].part.task
        if task and own and task != own:
            raise InputError(
                f"--task {shown(task)} has no rules for {shown(c.name)}, whose classes are not"
                f" transformers'; leave it out ({own})"
            )
        return spec
    from napkinmath.catalog.attention_support import REFUSED_ATTENTION, SDPA_SINCE

    return _under_named_task(spec, c).replace(
        refused_attention=REFUSED_ATTENTION.get(str(model_type), ()),
        sdpa_since=SDPA_SINCE.get(str(model_type), (0, 0)),
    )


def _near_types(given: str) -> str:
    """'; did you mean llama?' for a misspelt type: names of its first letter and its version's
    digits, else another model is as near as the one that was meant."""
    from napkinmath.catalog.learned_forms import shipped_types

    def digits(name: str) -> str:
        return "".join(filter(str.isdigit, name))

    known = [
        n for n in (*FAMILIES, *shipped_types()) if (n[0], digits(n)) == (given[0], digits(given))
    ]
    return suggest(given, known, cutoff=0.75) if len(given) >= SHORTEST_MISSPELT else ""


def _under_named_task(spec: ModelSpec, c: Config) -> ModelSpec:
    """The model with the head that its architecture's name says."""
    named, own = c.names("architectures"), spec.stages[-1].part.task
    task = named_task(named[0], own) if named and own else own
    if task == own:
        return spec
    from napkinmath.catalog.learned_forms import forms_of

    if any(form["task"] == task for form in forms_of(str(c.values["model_type"]))):
        from napkinmath.models.learned import read_learned

        return read_learned(c.values, name=c.name, source=c.source)
    from napkinmath.models.other_heads import under_task

    return under_task(spec, c, task)
