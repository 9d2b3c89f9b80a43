"""What the words of a model's name say: how its weights are stored, what was tuned, and what is no
model that can be trained.

A name is its last part in lower case, split into words at every punctuation mark. All rules are
about words, so that a new fine-tune needs no row.
"""

from __future__ import annotations

import re

from napkinmath.catalog.name_words import (
    BITS,
    RESHAPED,
    SCORED,
    STORAGE,
    STORAGE_DETAIL,
    TUNED,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_DATE = re.compile(r"2[3-6](0[1-9]|1[0-2])")  # 2507: July 2025
_STORED_WORDS = frozenset(word for words, _ in STORAGE for word in words) | STORAGE_DETAIL
_SIZE = re.compile(r"[ae]?\d+[bm]|\d+x\d+[bm]")
# Folders within a run's own: transformers' checkpoint-500, verl's global_step_9/actor/huggingface.
_CHECKPOINT = re.compile(
    r"(checkpoint|ckpt|step|global_step|epoch|iter)[-_]?\d+([-_]?(hf|merged))?"
    r"|final|last|best|latest|hf|huggingface|merged|merge|actor|model|final_model|final_checkpoint"
    r"|(checkpoint|model)[-_](final|last|best|merged)",
    re.IGNORECASE,
)

_GGUF = "is a GGUF file for llama.cpp, which no trainer loads; give the model it was made of"
_OTHER_FORMAT = (
    "is stored for an inference engine, which no trainer loads; give the model it was made of"
)
# peft 0.21 tuners/lora/aqlm.py, eetq.py, hqq.py, torchao.py train adapters over these.
_UNPRICED_FORMAT = (
    "is stored in a format that is not priced; give the model it was made of, with --quant"
)
_ADAPTER = "is an adapter, not a model; give its base model and --lora with its rank"
_DRAFT = "is a draft head of speculative decoding, not a model of its own; give its config.json"
_REWARD = (
    "is a reward model of a base that the catalog does not find in its name; give its config.json,"
    " or --model BASE --task sequence-classification"
)
_STEPS = (
    "is a process reward model, whose head is its repository's own; give --model BASE --task"
    " token-classification, as TRL trains one"
)
_TOKENIZER = "is a tokenizer; give a model"
_CLOSED = "has no public weights; give a model that can be downloaded"
_PICTURES = (
    "makes pictures by diffusion, and the catalog has few such models (sd-1.5, sd-2.1, sdxl,"
    " sd3-medium, sd3.5-medium, sd3.5-large, flux.1-dev, flux.1-schnell, qwen-image,"
    " wan2.1-t2v-14b and its kin); give one of them, or the config.json of a UNet2DConditionModel,"
    " FluxTransformer2DModel, SD3Transformer2DModel, QwenImageTransformer2DModel or"
    " WanTransformer3DModel"
)
_SOUND = "is a codec or encoder of sound; give a transformer over tokens"
_FRAMES = (
    "reads frames of sound codes beside text, which no rule and no trace has inputs for; give its"
    " backbone (csm-1b: llama-3.2-1b)"
)
_REMOTE = (
    "runs modelling code of its own repository, for which there are no rules; give its sizes by"
    " --arch"
)
_UNSOURCED = (
    "is known by name only: the catalog has no sizes of it from a public source; give its"
    " config.json"
)
_ADAPTERS = ("lora", "qlora", "loras", "adapter", "adapters", "peft")
_REFUSED: tuple[tuple[str, str], ...] = (
    (r"(gguf|ggml|q\d k [msl]|q\d [01k])", _GGUF),
    (r"(onnx|openvino|coreml|litert|tflite|exl2|exl3|mlx|tensorrt|trtllm)", _OTHER_FORMAT),
    (r"(int4|int8|fp16|fp8|nf4|mxfp4) (\w+ )?ov", _OTHER_FORMAT),  # llava's "ov" is OneVision
    (r"(aqlm(?! (pv )?2bit 1x16)|eetq|hqq|torchao)", _UNPRICED_FORMAT),
    (r"(quip|vptq|spqr|w4a16|w8a8|w8a16|w4a8|w4afp8)", _OTHER_FORMAT),
    (rf"(?!.* merged)(.* )?({'|'.join(_ADAPTERS)})", _ADAPTER),
    (r"^eagle2( 5)? \d+b", _REMOTE),  # NVIDIA's models of that name see pictures
    (r"(eagle|eagle2|eagle3|medusa|draft|drafter|dflash|dspark|speculator)", _DRAFT),
    (r"(gemma 4|muse glimmer) .*assistant", _DRAFT),
    (r"(prm|orm)", _STEPS),
    (r"(reward|rm)", _REWARD),
    (r"tokenizer", _TOKENIZER),
    (r"^(text |chatgpt )?(gpt 3 5|gpt 4|gpt 4o|gpt 4 1|gpt 5|claude|gemini|davinci)", _CLOSED),
    (r"^o[134] mini", _CLOSED),
    (r"(flux|stable diffusion|sdxl|wan2|wan 2|ltx|hunyuanvideo|qwen image|z image)", _PICTURES),
    (r"(fastpitch|hifigan|parakeet|canary|sortformer|titanet|bark|codec)", _SOUND),
    (r"(snac|xcodec|xcodec2|tacotron|vits|kokoro|parler|encodec)", _SOUND),
    (r"phi 3( 5)? (vision|small)", _REMOTE),
    (
        r"(moss vl|minicpm (v|o)|keye vl|ovis2?|ovis2 5|dots ocr|deepseek (ocr|vl2)|molmo 7b)",
        _REMOTE,
    ),
    (
        r"(yuan2|telechat2|hymba|bagel|emu3|replit code|btlm|intern s1|kimi (vl|k3))",
        _REMOTE,
    ),
    (r"(nemotron (flash|labs diffusion|parse)|mplug owl\d*)", _REMOTE),
    (r"(nemotron nano( \d+b)?( v\d)? vl|llava onevision 1 5|step3 vl)", _REMOTE),
    (r"(mimo vl 7b|step 3 5|llada|xverse|minicpm[45])", _REMOTE),
    (r"(qwen2 5 omni 3b|nano omni)", _UNSOURCED),
    (r"diffusiongemma", _UNSOURCED),
    (r"(qwen3 8 2|k exaone 2|laguna s|hy mt2|inkling|north micro)", _UNSOURCED),
    (r"(glm (4 5v|4 6v|ocr)|dbrx|qwen3 (asr|tts))", _UNSOURCED),
    (r"^(florence 2|blip2|idefics[23]|janus|molmo2|molmoweb|kosmos 2|got ocr|ovis2 6)", _UNSOURCED),
    (r"^(t5gemma 2|aya vision|c4ai aya vision|command a (vision|plus)|tiny aya)", _UNSOURCED),
    (r"^(granite (docling|speech|vision|4 1)|hunyuanocr|trinity large|siglip2|dinov3)", _UNSOURCED),
    (r"^(hyperclovax seed|a x [34]|nanbeige4|apriel 1|leanstral|vaultgemma|sam[23])", _UNSOURCED),
    (r"llasa (3b|8b)", _UNSOURCED),
    (r"csm", _FRAMES),
)


_FORMATS = re.compile(
    r"(?:^|(?<= ))(gguf|ggml|q\d k [msl]|q\d [01k]|iq\d \w+|i1|imatrix|onnx|openvino|coreml|litert|tflite"
    r"|exl2|exl3|mlx|tensorrt|trtllm|(?:int4|int8|fp16|fp8|nf4|mxfp4)(?: \w+)? ov|aqlm|eetq|hqq|torchao"
    r"|quip|vptq|spqr|quantized|w4a16|w8a8|w8a16|w4a8|w4afp8|qat)(?= |$)"
)
"""What names a file for an engine, or how it was made."""


def words_of(name: str) -> list[str]:
    """'unsloth/Llama-3.1_8B' -> ['llama', '3', '1', '8b']."""
    last = name.strip().rstrip("/\\").replace("\\", "/").rpartition("/")[2].lower()
    return "".join(c if c.isalnum() else " " for c in last).split()


def refusal(name: str) -> str:
    """Why a name can be none of a model that is trained, in words that follow it; '' if it can."""
    words = words_of(name)
    text = " ".join(words)
    if name.lower().startswith("mlx-community/") and _STORED_WORDS & set(words):
        return _OTHER_FORMAT
    for pattern, reason in _REFUSED:
        if re.search(rf"(^| ){pattern}($| )", text):
            return reason
    return ""


def without_format(name: str) -> str:
    """The name of what an engine's file was made of; '' where the name is of no such file."""
    if refusal(name) not in (_GGUF, _OTHER_FORMAT, _UNPRICED_FORMAT):
        return ""
    return "-".join(bare(_FORMATS.sub("", " ".join(words_of(name))).split()))


def without_checkpoint(name: str) -> str:
    """The path of the run whose folder a checkpoint lies in, or the hub id whose snapshot a cache
    keeps there; '' where the last folder is none of these."""
    run, _, folder = name.strip().rstrip("/").rpartition("/")
    if _CHECKPOINT.fullmatch(folder):
        return run
    cached, _, kept = run.rpartition("/")
    place = cached.rpartition("/")[2]
    if kept != "snapshots" or not place.startswith("models--"):
        return ""
    return place.removeprefix("models--").replace("--", "/")


def name_in_path(path: str) -> str:
    """The last part of a path that is no folder within a run's own."""
    found = path.replace("\\", "/").strip().rstrip("/")
    while run := without_checkpoint(found):
        found = run
    return found.rpartition("/")[2]


def without_score(name: str) -> tuple[str, int]:
    """(the name of a reward model or a classifier without the word that says so, the labels of its
    head). ('', 0) where no word does, where it scores each step, or where it is not trained as
    such."""
    words = words_of(name)
    kept = [word for word in words if word not in SCORED]
    if len(kept) == len(words) or not kept or refusal("-".join(kept)):
        return "", 0
    owner, labels = name.rpartition("/")[0], min(SCORED.get(word, 2) for word in words)
    return (f"{owner}/{'-'.join(kept)}" if owner else "-".join(kept)), labels


def without_adapter(name: str) -> str:
    """The name of an adapter without the word that says so, which may be that of its base; '' where
    no word does."""
    if refusal(name) != _ADAPTER:
        return ""
    owner, _, last = name.rpartition("/")
    kept = [word for word in last.split("-") if word.lower() not in _ADAPTERS]
    return f"{owner}/{'-'.join(kept)}" if owner else "-".join(kept)


def sizes(name: str) -> list[str]:
    """The words of a name that say how large a model is: ['7b'], ['0.6b'], ['30b', 'a3b']."""
    last = name.lower().rpartition("/")[2]
    return re.findall(r"(?<![a-z\d.])(?:a|\d+x)?\d+(?:\.\d+)?[bm](?![a-z\d])", last)


def storage(words: list[str], *, of: str = "") -> str | None:
    """The quantized format that the words mean; '' for FP8, which trainers widen, None where the
    weights are plain or the words leave the format open. `of`: the model that they are written
    about, whose publisher may have one format for bare bits."""
    given = set(words)
    if "unquantized" in given or "dequantized" in given:
        return None
    for needed, found in STORAGE:
        if needed <= given:
            return found
    for start, formats in BITS:
        if of.startswith(start):
            return next((formats[word] for word in words if word in formats), None)
    return None


def is_open(words: list[str], *, of: str) -> bool:
    """Whether the words say bits without the format that stores them, which `of` has not either."""
    return bool({"int4", "int8", "4bits", "8bits"} & set(words)) and storage(words, of=of) is None


def bare(words: list[str]) -> list[str]:
    """The words without those that say how the weights are stored."""
    return [word for word in words if word not in _STORED_WORDS]


def plain(words: list[str]) -> str:
    """The words without those of a tuning and of storage, wherever they stand, as one key; dates
    stay, since they may distinguish generations."""
    return "-".join(word for word in bare(words) if word not in TUNED)


def pieces(words: list[str]) -> list[str]:
    """The letters and numbers of the words that no tuning is: ['gemma4', 'e4b'] and ['gemma', '4',
    'e4b'] are alike in them."""
    return re.findall(r"[a-z]+|\d+", plain(words))


def shorter(words: list[str]) -> Iterator[list[str]]:
    """The words, then without 'meta' in front, then with every last word of a tuning taken off."""
    while words:
        yield words
        if words[0] == "meta":
            yield words[1:]
        if not _is_tuning(words[-1]):
            return
        words = words[:-1]


def spans(words: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """(a run of words, the words around it), longest first, where the rest names no other shape:
    what a fine-tune of some model may be called."""
    count = len(words)
    for length in range(count - 1, 1, -1):
        for start in range(count - length + 1):
            run, rest = words[start : start + length], words[:start] + words[start + length :]
            if not any(_is_reshaping(word) for word in rest):
                yield run, rest


def licensed(words: list[str]) -> Iterator[tuple[list[str], list[str]]]:
    """(Llama 3's family, version and size, the words between and behind): a model made from one has
    'Llama 3' in front of its name (Llama 3 Community License 1.b), and its own words before the
    size."""
    if words[:2] != ["llama", "3"] and words[:1] != ["llama3"]:
        return
    end = next((i for i, word in enumerate(words[1:], 1) if not word.isdecimal()), len(words))
    for at in range(end, len(words)):
        rest = words[end:at] + words[at + 1 :]
        if _SIZE.fullmatch(words[at]) and not any(_is_reshaping(word) for word in rest):
            yield [*words[:end], words[at]], rest


def tuned_from(words: list[str]) -> list[str]:
    """What stands before the word 'finetuned'; nothing where it does not stand."""
    at = next((i for i, word in enumerate(words) if word in ("finetuned", "finetune")), 0)
    return words[:at]


def all_tunings(words: list[str]) -> bool:
    """Whether each word only says how a checkpoint was tuned."""
    return all(_is_tuning(word) for word in words)


def _is_tuning(word: str) -> bool:
    return word in TUNED or _DATE.fullmatch(word) is not None


def is_versioned(name: str) -> bool:
    """Whether a catalogued name has a size and a version beside it: 'qwen2.5-7b', not 'qwen-7b',
    which three generations were called."""
    rest, sizes = re.subn(r"(?<![\w.])\d+(\.\d+)?[bm](?!\w)", "", name.lower())
    return sizes > 0 and any(c.isdecimal() for c in rest)


def _is_reshaping(word: str) -> bool:
    return word in RESHAPED or _SIZE.fullmatch(word) is not None
