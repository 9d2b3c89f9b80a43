"""The flags that every command shares, as rows; a parser takes the groups it needs, and what was given becomes options.

An option is in the namespace only if it was given, under the key of napkinmath.inputs.options.
"""

from __future__ import annotations

import argparse

from napkinmath.errors import InputError, shown, suggest

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from typing import Any, NoReturn

TEXT, SWITCH, ON, REPEAT = "text", "switch", "on", "repeat"

# (flags, kind, metavar, help); the first long flag gives the option's key.
MODEL = (
    (("--model", "-m"), TEXT, "NAME|PATH", "catalogued name, config.json or its folder, or a hub id with --hub"),
    (("--arch",), TEXT, '"L32 h4096 a32 kv8 f14336 v128256"', "bare numbers instead of a model; words: tied gelu mqa learned-pos encoder moe8x2 ..."),
    (("--hub",), ON, "", "fetch the config of a hub id over the network"),
)
METHOD = (
    (("--full",), ("method", "full"), "", "train every parameter (the default)"),
    (("--lora",), ("method", "lora"), "", "LoRA adapters"),
    (("--qlora",), ("method", "qlora"), "", "LoRA over 4-bit weights"),
    (("--method",), ("method", ""), "NAME", "full, lora, qlora, dora, qdora, qalora, ia3, prompt, prefix"),
    (("--rank", "-r"), TEXT, "R", "LoRA rank [16]"),
    (("--alpha",), TEXT, "A", "LoRA scaling numerator; changes no size"),
    (("--targets",), TEXT, "NAMES", "modules that get adapters, comma-separated [all-linear]"),
    (("--dropout",), TEXT, "P", "adapter dropout [0]"),
    (("--adapter-dtype",), TEXT, "DTYPE", "auto, fp32, bf16, fp16 [auto: what PEFT does]"),
    (("--rslora",), SWITCH, "", "rank-stabilised scaling"),
    (("--train-modules",), TEXT, "NAMES", "modules trained whole beside the adapters, e.g. embed_tokens,lm_head"),
    (("--adapters",), TEXT, "N", "adapters resident at once, one trained [1]"),
    (("--virtual-tokens",), TEXT, "N", "tokens of prompt or prefix tuning [20]"),
    (("--freeze",), TEXT, "NAMES", "modules that full fine-tuning leaves untrained"),
)
QUANTIZATION = (
    (("--quant",), TEXT, "FORMAT", "nf4, fp4, int8, gptq-int4, awq-int4, hqq-int4, mxfp4, nvfp4 [QLoRA: nf4]"),
    (("--double-quant",), SWITCH, "", "quantize the scales too [on for nf4 and fp4]"),
    (("--group-size",), TEXT, "N", "weights that share a scale [the format's own]"),
    (("--kbit",), SWITCH, "", "prepare_model_for_kbit_training: norms, embeddings, head in fp32 [on]"),
    (("--keep-modules",), TEXT, "NAMES", "modules left unquantized [lm_head]"),
)
BATCH = (
    (("--bs", "-b", "--micro-batch-size", "--batch-size"), TEXT, "B", "micro-batch per GPU [1]"),
    (("--ctx", "-s", "--sequence-length", "--seq-len"), TEXT, "S", "sequence length; 1k = 1024 [2048]"),
    (("--grad-accum", "--gradient-accumulation-steps"), TEXT, "N", "micro-steps per optimizer step [1]"),
    (("--target-ctx",), TEXT, "S", "decoder length of an encoder-decoder model [the sequence length]"),
    (("--packing",), SWITCH, "", "fill sequences with several samples"),
    (("--lengths",), TEXT, "N,N,...", "a sample of sequence lengths"),
)
STEP = (
    (("--precision",), TEXT, "NAME", "bf16, bf16-amp, bf16-autocast, fp16, fp16-amp, fp32, tf32, fp8, fp8-block [bf16-autocast: the Trainer's bf16=True]"),
    (("--optimizer",), TEXT, "NAME", "adamw, adamw-fused, adamw-foreach, adamw-8bit, paged-adamw-8bit, sgd, lion, muon, ... [the stack's]"),
    (("--optimizer-in-backward",), SWITCH, "", "update each parameter as its gradient is ready"),
    (("--clip",), SWITCH, "", "clip gradients by their norm [on]"),
    (("--checkpointing",), TEXT, "NAME", "none, full, every:K, sqrt, selective, offload [QLoRA: full, else none]"),
    (("--reentrant",), SWITCH, "", "the reentrant form of checkpointing"),
    (("--offload",), TEXT, "NAMES", "optimizer, parameters, activations, checkpoints in host memory"),
    (("--pinned",), SWITCH, "", "page-locked host memory for offloading [on]"),
    (("--attention",), TEXT, "NAME", "auto, eager, sdpa, math, efficient, flash, flash2, cudnn [auto]"),
    (("--loss",), TEXT, "NAME", "hf, chunked, fused [hf]"),
    (("--kernels",), TEXT, "NAME", "hf, liger, unsloth, napkinmath [hf]"),
    (("--stack",), TEXT, "NAME", "library and era that is priced: hf, hf-bare, hf-2024, ... [hf]"),
    (("--eval",), ON, "", "price a model left in eval mode: no dropout, checkpointing inactive"),
    (("--train-mode",), ON, "", "the model is in training mode (the default)"),
    (("--compile",), SWITCH, "", "torch.compile"),
)
HARDWARE = (
    (("--gpu", "-g"), REPEAT, "NAME", "what it should fit on; may be repeated [none: the list of GPUs that fit]"),
    (("--gpus",), TEXT, "N[xTYPE]", "number of GPUs [1]"),
    (("--nodes",), TEXT, "N", "machines [1]"),
    (("--vram",), TEXT, "SIZE", "memory of the GPU: 24, 24GiB, 80GB"),
    (("--mig",), TEXT, "PROFILE", "MIG slice of the GPU, e.g. 3g.40gb"),
    (("--display",), TEXT, "NAME", "what else is on the GPU: none, linux, windows [none]"),
    (("--allocator",), TEXT, "CONF", "as PYTORCH_ALLOC_CONF, e.g. expandable_segments:True"),
    (("--calibration",), TEXT, "FILE", "measured speeds [the one in the cache for that GPU]"),
)
OUTPUT = (
    (("--json",), ON, "", "the documented JSON instead of the report"),
    (("--explain",), ON, "", "every line as formula, numbers, value and source"),
    (("--timeline",), TEXT, "FILE", "memory over one step as .html, .svg or .png"),
    (("--debug",), ON, "", "show a traceback where something fails"),
)
SHARED = (
    ("model", MODEL),
    ("what is trained", METHOD),
    ("quantization of the base", QUANTIZATION),
    ("batch", BATCH),
    ("training step", STEP),
    ("hardware", HARDWARE),
    ("output", OUTPUT),
)
ABSENT = argparse.SUPPRESS


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ours: one line with the nearest flags, raised and not printed."""

    def __init__(self, command: str, description: str, **kwargs: Any) -> None:
        super().__init__(prog=command, description=description, allow_abbrev=False, argument_default=ABSENT, **kwargs)

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument "):
            name, _, problem = message.removeprefix("argument ").partition(": ")
            raise InputError(f"{name}: {problem}; see `{self.prog} --help`")
        raise InputError(f"{message}; see `{self.prog} --help`")

    def known_flags(self) -> list[str]:
        """Every long flag."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def parse_all(self, argv: Sequence[str]) -> dict[str, Any]:
        """Options given on the command line; raises InputError for an unknown one with the nearest."""
        namespace, unknown = self.parse_known_args(list(argv))
        for word in unknown:
            if word.startswith("-") and word != "-":
                name = word.partition("=")[0]
                raise InputError(f"flag {shown(name)} is unknown{suggest(name, self.known_flags())}; see `{self.prog} --help`")
        if unknown:
            raise InputError(f"{shown(unknown[0])} is left over; see `{self.prog} --help`")
        return vars(namespace)


class Once(argparse.Action):
    """Stores a value and refuses a second, different one."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        value = self.const if self.nargs == 0 else values
        given = getattr(namespace, self.dest, value)
        if given != value:
            raise InputError(f"{option_string} is given twice, as {shown(given)} and {shown(value)}; give one, or use `estimate sweep`")
        setattr(namespace, self.dest, value)


class Switch(Once):
    """--flag and --no-flag."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option_string: str | None = None) -> None:
        value = not (option_string or "").startswith("--no-")
        if getattr(namespace, self.dest, value) != value:
            name = self.dest.replace("_", "-")
            raise InputError(f"--{name} and --no-{name} contradict each other; give one of them")
        setattr(namespace, self.dest, value)


def add_flags(parser: argparse.ArgumentParser, groups: Iterable[tuple[str, tuple[Any, ...]]] = SHARED) -> None:
    """Adds groups of flags to a parser."""
    for title, rows in groups:
        group = parser.add_argument_group(title)
        for flags, kind, metavar, text in rows:
            key = flags[0].removeprefix("--").replace("-", "_")
            if kind == TEXT:
                group.add_argument(*flags, dest=key, action=Once, metavar=metavar, help=text)
            elif kind == ON:
                group.add_argument(*flags, dest=key, action=Once, nargs=0, const=True, help=text)
            elif kind == SWITCH:
                group.add_argument(*flags, "--no-" + flags[0].removeprefix("--"), dest=key, action=Switch, nargs=0, help=text)
            elif kind == REPEAT:
                group.add_argument(*flags, dest=key, action="append", metavar=metavar, help=text)
            elif kind[1]:
                group.add_argument(*flags, dest=kind[0], action="append_const", const=kind[1], help=text)
            else:
                group.add_argument(*flags, dest=kind[0], action="append", metavar=metavar, help=text)
