"""`estimate generate MODEL --gpu NAME`: inference on its own, in an engine."""

from __future__ import annotations

import sys

from napkinmath.base import values
from napkinmath.base.errors import InputError, plain, shown
from napkinmath.catalog.cache_formats import FORMATS
from napkinmath.catalog.engines import ENGINES, SERVED_FORMATS, find_served_format
from napkinmath.cli.flag_rows import DEBUG, ON, TEXT
from napkinmath.cli.flags import SHARED
from napkinmath.cli.forms import form_rows
from napkinmath.cli.parser import Parser
from napkinmath.report.formats import Answer, taken

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from napkinmath.answers.generation import Generation
    from napkinmath.answers.generation_config import GenerationConfig
    from napkinmath.cli.flag_rows import Group, Row
    from napkinmath.ir.model_spec import ModelSpec


def _engines() -> str:
    return f"engine: {', '.join(ENGINES)}, or a release as vllm-0.19 [vllm]"


def _formats() -> str:
    return f"how weights are stored: {', '.join(SERVED_FORMATS)}, none [as the checkpoint has them]"


def _cache_formats() -> str:
    return f"how keys and values are stored: {', '.join(FORMATS)} [auto]"


_PROMPT = 1024  # tokens, as in the help
# Beside ours the names of vllm's engine and benchmark flags (engine/arg_utils.py), and generate()'s.
_OWN: tuple[Row, ...] = (
    (("--engine",), TEXT, "NAME", _engines),
    (("--prompt", "--input-len"), TEXT, "N", "tokens of a prompt [1024]"),
    (
        ("--completion", "--max-new-tokens", "--output-len"),
        TEXT,
        "N",
        "tokens that are generated for it [256]",
    ),
    (
        ("--ctx", "--max-model-len"),
        TEXT,
        "N",
        "tokens of a whole sequence: the prompt is what --completion leaves",
    ),
    (
        ("--sequences", "--bs", "--max-num-seqs"),
        TEXT,
        "N",
        "sequences at once [as many as the cache holds]",
    ),
    (("--beams",), TEXT, "N", "sequences that search for one completion, each with a cache [1]"),
    (("--draft",), TEXT, "N:X", "drafted tokens and the share accepted, e.g. 3:0.7"),
    (("--shared-prefix",), TEXT, "N", "first tokens of all prompts that are the same [0]"),
    (("--quant", "--quantization"), TEXT, "FORMAT", _formats),
    (("--dtype",), TEXT, "TYPE", "bf16, fp16 or fp32 [bf16, fp16 on a GPU without]"),
    (("--cache-format", "--kv-cache-dtype"), TEXT, "FORMAT", _cache_formats),
    (("--tp",), TEXT, "N", "tensor-parallel GPUs [1]"),
    (("--gpus",), TEXT, "NxTYPE", "--gpu and --tp in one, e.g. 8xH200"),
    (
        ("--memory-share", "--gpu-memory-utilization"),
        TEXT,
        "X",
        "of the GPU that the engine may take [the engine's default]",
    ),
    (
        ("--prefill-tokens", "--max-num-batched-tokens"),
        TEXT,
        "N",
        "tokens of prompts in one forward [the engine's default]",
    ),
    (("--no-graphs", "--enforce-eager"), ON, "", "without CUDA graphs"),
    (
        ("--graphs-to", "--max-cudagraph-capture-size", "--cuda-graph-max-bs"),
        TEXT,
        "N",
        "tokens of the largest forward that a CUDA graph holds [the engine's default]",
    ),
    (("--graphs-for-decoding",), ON, "", "CUDA graphs hold no forward that reads prompts"),
    (
        ("--receive-every", "--scheduler-recv-interval"),
        TEXT,
        "N",
        "tokens after which SGLang looks for new requests [1]",
    ),
    (("--token-time",), TEXT, "T", "sequences that keep this time between tokens, e.g. 50ms"),
    (("--price",), TEXT, "P", "money for one hour of one GPU, for a million tokens"),
)
_OUTPUT: tuple[Row, ...] = (
    (("--plan",), ON, "", "1, 2, 4 and 8 GPUs, each in every format served there, by their price"),
    (("--explain",), ON, "", "what a token's time goes into, and each layer's cache"),
    *form_rows(json="the answer as JSON"),
    DEBUG,
)
_DESCRIPTION = (
    "Inference on its own: what an engine takes of a GPU, how many sequences its cache holds, time to"
    " the first token and between tokens, and what a million tokens cost."
)


def _groups() -> tuple[Group, ...]:
    kept = {"model", "hardware"}
    return (
        *(group for group in SHARED if group[0] in kept),
        ("serving", _OWN),
        ("output", _OUTPUT),
    )


def run(argv: Sequence[str]) -> int:
    """Prints the answer for every GPU named; returns the exit code."""
    parser = Parser(
        "estimate generate", _DESCRIPTION, _groups(), positional=("name", "MODEL", "the model")
    )
    options = parser.parse(argv)
    form = taken(options)
    explain, plans = (options.pop(key, None) is not None for key in ("explain", "plan"))
    price, token_s = _price(options), _token_s(options)
    from napkinmath.report import generation as report

    found = _answers(options)
    if plans and any(g.clock is None for g in found):
        raise InputError("--plan orders by speed, which is not known of this GPU; name it by --gpu")
    if form is not None:
        texts = [report.generation_json(g, price, token_s, plans=plans) for g in found]
        whole = texts[0] if len(texts) == 1 else "[" + ",\n".join(texts) + "]"
        sheet = report.joined(
            [
                report.plan_sheet(g, price, token_s) if plans else report.sheet_of(g, price)
                for g in found
            ]
        )
        print(form.text(Answer(sheets=lambda: [sheet], json=lambda: whole)))
    else:
        for g in found:
            report.print_generation(g, price=price, token_s=token_s, explain=explain, plans=plans)
    if plans:
        from napkinmath.answers.generation_plan import fitting

        return max(0 if fitting(g) else 1 for g in found)
    return max(g.verdict.exit_code for g in found)


def _price(options: dict[str, object]) -> float | None:
    given = options.pop("price", None)
    return None if given is None else values.price(given, "--price")


def _token_s(options: dict[str, object]) -> float | None:
    given = options.pop("token_time", None)
    if given is None:
        return None
    text = str(given).strip().lower()
    for unit, factor in (("ms", 1e-3), ("s", 1.0)):
        if text.endswith(unit) and not text.removesuffix(unit)[-1:].isalpha():
            return factor * values.number(text.removesuffix(unit), "--token-time", low=0, high=1e6)
    raise InputError(f"--token-time {shown(given)} is not in s or ms; write e.g. 50ms")


def _answers(options: dict[str, object]) -> list[Generation]:
    from napkinmath.answers.generation import Generation
    from napkinmath.inputs.hardware_options import machines
    from napkinmath.inputs.model_options import model_spec

    word = options.pop("name", None)
    if word is not None:
        if "model" in options:
            raise InputError(f"{shown(word)} and --model both name the model; give one of them")
        options["model"] = word
    notes: list[str] = []
    _one_engine(options)
    spec = model_spec(options, notes)
    config = _config(options, spec.longest_sequence)
    _refuse_too_long(spec, config)
    found = [Generation(spec, config, machine) for machine in machines(options) if machine]
    if not found:
        raise InputError("no GPU was named; add --gpu NAME (list: `estimate gpus`)")
    for note in notes:
        if "for training" not in note:  # what a training makes of stored weights
            print(f"note: {plain(note)}", file=sys.stderr)
    return found


def _refuse_too_long(spec: ModelSpec, config: GenerationConfig) -> None:
    """Raises InputError where a sequence is longer than the model has learned positions for."""
    longest, whole = spec.longest_sequence, config.prompt + config.completion
    if 0 < longest < whole:
        raise InputError(
            f"{spec.name} has learned positions for {longest:,} tokens, a prompt of {config.prompt:,}"
            f" and a completion of {config.completion:,} are {whole:,}; ask for fewer"
        )


def _one_engine(options: dict[str, object]) -> None:
    """--gpus 8xH200 is --gpu H200 --tp 8: the GPUs of one engine. Raises InputError where --tp says
    another number."""
    if "gpus" not in options:
        return
    from napkinmath.inputs.parallel_options import number_and_type

    number, _ = number_and_type(options)
    ranks = values.count(options.setdefault("tp", number), "--tp")
    if ranks != number:
        raise InputError(
            f"--gpus {shown(options['gpus'])} with --tp {ranks}: an engine is one tensor-parallel"
            f" group; give --tp {number}, or the GPUs of one engine alone"
        )


def _stored(options: Mapping[str, object]) -> str:
    """The format of the weights: as asked, else as the checkpoint has them; '' for 16 bits."""
    from napkinmath.catalog.models import served_format
    from napkinmath.inputs.model_options import config_storage

    given = str(options.get("quant", "")).lower()
    if given == "none":
        return ""
    if given:
        return find_served_format(given).name
    stored = config_storage(options)
    if stored is not None:
        widened = stored.widened.lower()
        return stored.format or (f"{widened}-block" if stored.blocks else widened)
    return served_format(str(options["model"])) if "model" in options else ""


def _prompt(options: Mapping[str, object], completion: int, longest: int) -> int:
    """Tokens of a prompt: as given, or what --ctx leaves beside the completion. Where nothing is
    given, no more than the learned positions of a model (`longest`, 0 without) leave."""
    if "ctx" not in options:
        if "prompt" in options:
            return values.count(options["prompt"], "--prompt")
        return min(_PROMPT, longest - completion) if longest > completion else _PROMPT
    if "prompt" in options:
        raise InputError(
            f"--ctx {shown(options['ctx'])} and --prompt {shown(options['prompt'])} both say how long"
            " prompts are; give one of them"
        )
    whole = values.count(options["ctx"], "--ctx")
    if whole <= completion:
        raise InputError(
            f"--ctx {whole} leaves no prompt beside --completion {completion}; give more than"
            f" {completion}"
        )
    return whole - completion


def _config(options: Mapping[str, object], longest: int) -> GenerationConfig:
    from napkinmath.answers.generation_config import GenerationConfig

    def count(key: str, default: int) -> int:
        flag = "--" + key.replace("_", "-")
        return values.count(options[key], flag) if key in options else default

    share, completion = options.get("memory_share", 0.0), count("completion", 256)
    dtype = str(options.get("dtype", "")).lower()
    if dtype not in ("bf16", "fp16", "fp32") and "dtype" in options:
        raise InputError(f"--dtype {shown(dtype)} is unknown; use bf16, fp16 or fp32")
    return GenerationConfig(
        engine=str(options.get("engine", "vllm")),
        prompt=_prompt(options, completion, longest),
        completion=completion,
        sequences=count("sequences", 0),
        prefill_tokens=count("prefill_tokens", 0),
        memory_share=values.number(share, "--memory-share", low=0.0, high=1.0),
        quantization=_stored(options),
        cache_format=str(options.get("cache_format", "auto")),
        dtype=dtype,
        ranks=count("tp", 1),
        graphs="no_graphs" not in options,
        graphs_to=count("graphs_to", 0),
        graphs_decode="graphs_for_decoding" in options,
        receive_every=count("receive_every", 1),
        beams=count("beams", 1),
        shared_prefix=count("shared_prefix", 0),
        draft=values.draft(options["draft"], "--draft") if "draft" in options else None,
    )
