"""The flags that every command shares, as rows grouped under titles; cli/parser.py reads them.

A row is (flags, kind, metavar, help); its first flag gives the option's key in
napkinmath.inputs.options. A kind is TEXT (one value), REPEAT (a value each time), ON (no value),
SWITCH (--flag and --no-flag), or (key, value): a flag that is one value of another option.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypeAlias

    Row: TypeAlias = tuple[tuple[str, ...], str | tuple[str, str], str, str]
    Group: TypeAlias = tuple[str, tuple[Row, ...]]

TEXT, REPEAT, ON, SWITCH = "text", "repeat", "on", "switch"

MODEL: tuple[Row, ...] = (
    (
        ("--model", "-m"),
        TEXT,
        "NAME|PATH",
        "catalogued name, config.json or its folder, or a hub id with --hub",
    ),
    (
        ("--arch",),
        TEXT,
        '"L32 h4096 a32 kv8 f14336 v128256"',
        "bare numbers instead of a model; words: tied gelu mqa learned-pos encoder moe8x2 ...",
    ),
    (("--hub",), ON, "", "fetch the config of a hub id over the network"),
)
METHOD: tuple[Row, ...] = (
    (("--full",), ("method", "full"), "", "train every parameter (the default)"),
    (("--lora",), ("method", "lora"), "", "LoRA adapters"),
    (("--qlora",), ("method", "qlora"), "", "LoRA over 4-bit weights"),
    (("--method",), REPEAT, "NAME", "full, lora, qlora, dora, qdora, qalora, ia3, prompt, prefix"),
    (("--rank", "-r"), TEXT, "R", "LoRA rank [16]"),
    (("--alpha",), TEXT, "A", "LoRA scaling numerator; changes no size"),
    (("--targets",), TEXT, "NAMES", "modules that get adapters, comma-separated [all-linear]"),
    (("--dropout",), TEXT, "P", "adapter dropout [0]"),
    (("--adapter-dtype",), TEXT, "DTYPE", "auto, fp32, bf16, fp16 [auto: what PEFT does]"),
    (("--rslora",), SWITCH, "", "rank-stabilised scaling"),
    (
        ("--train-modules",),
        TEXT,
        "NAMES",
        "modules trained whole beside the adapters, e.g. embed_tokens,lm_head",
    ),
    (("--adapters",), TEXT, "N", "adapters resident at once, one trained [1]"),
    (("--virtual-tokens",), TEXT, "N", "tokens of prompt or prefix tuning [20]"),
    (("--freeze",), TEXT, "NAMES", "modules that full fine-tuning leaves untrained"),
)
QUANTIZATION: tuple[Row, ...] = (
    (
        ("--quant",),
        TEXT,
        "FORMAT",
        "nf4, fp4, int8, gptq-int4, awq-int4, hqq-int4, mxfp4, nvfp4 [QLoRA: nf4]",
    ),
    (("--double-quant",), SWITCH, "", "quantize the scales too [on for nf4 and fp4]"),
    (("--group-size",), TEXT, "N", "weights that share a scale [the format's own]"),
    (
        ("--kbit",),
        SWITCH,
        "",
        "prepare_model_for_kbit_training: norms, embeddings, head in fp32 [on]",
    ),
    (
        ("--quant-compute-dtype",),
        TEXT,
        "TYPE",
        "type of products with quantized weights: auto, fp32, bf16, fp16 [auto]",
    ),
    (
        ("--quant-storage",),
        TEXT,
        "TYPE",
        (
            "type that holds packed 4-bit weights: auto, uint8, bf16, fp16, fp32 [auto: one that"
            " can be sharded]"
        ),
    ),
    (("--keep-modules",), TEXT, "NAMES", "modules left unquantized [lm_head]"),
)
BATCH: tuple[Row, ...] = (
    (("--bs", "-b", "--micro-batch-size", "--batch-size"), TEXT, "B", "micro-batch per GPU [1]"),
    (
        ("--ctx", "-s", "--sequence-length", "--seq-len"),
        TEXT,
        "S",
        "sequence length; 1k = 1024 [2048]",
    ),
    (
        ("--grad-accum", "--gradient-accumulation-steps"),
        TEXT,
        "N",
        "micro-steps per optimizer step [1]",
    ),
    (
        ("--global-batch", "--global-batch-size"),
        TEXT,
        "N",
        "samples per optimizer step over all GPUs, instead of --grad-accum",
    ),
    (
        ("--target-ctx",),
        TEXT,
        "S",
        "decoder length of an encoder-decoder model [the sequence length]",
    ),
    (("--packing",), SWITCH, "", "fill sequences with several samples"),
    (("--lengths",), TEXT, "N,N,...|FILE", "a sample of sequence lengths, or a file of them"),
    (("--images",), TEXT, "N", "images in each sequence of a vision-language model [1]"),
)
STEP: tuple[Row, ...] = (
    (
        ("--precision",),
        TEXT,
        "NAME",
        (
            "bf16, bf16-amp, bf16-autocast, fp16, fp16-amp, fp16-autocast, fp32, tf32, fp8, fp8-block"
            " [bf16-autocast: the Trainer's bf16=True]"
        ),
    ),
    (
        ("--optimizer",),
        TEXT,
        "NAME",
        (
            "adamw, adamw-fused, adamw-foreach, adamw-8bit, paged-adamw-8bit, sgd, lion, muon, ..."
            " [the stack's]"
        ),
    ),
    (("--optimizer-in-backward",), SWITCH, "", "update each parameter as its gradient is ready"),
    (("--clip",), SWITCH, "", "clip gradients by their norm [on]"),
    (
        ("--checkpointing",),
        TEXT,
        "NAME",
        "none, full, every:K, interleaved:K, sqrt, selective, offload [QLoRA: full, else none]",
    ),
    (("--reentrant",), SWITCH, "", "the reentrant form of checkpointing"),
    (
        ("--offload",),
        TEXT,
        "NAMES",
        "optimizer, parameters, activations, checkpoints in host memory",
    ),
    (("--pinned",), SWITCH, "", "page-locked host memory for offloading [on]"),
    (("--offload-style",), TEXT, "NAME", "whose activation offloading [trl]"),
    (("--prefetch",), TEXT, "N", "layers whose offloaded weights are on their way ahead [1]"),
    (
        ("--attention",),
        TEXT,
        "NAME",
        "auto, eager, sdpa, math, efficient, flash, flash1, flash2, cudnn [auto]",
    ),
    (("--loss",), TEXT, "NAME", "hf, chunked, fused [hf]"),
    (("--kernels",), TEXT, "NAME", "hf, liger, unsloth, napkinmath [hf]"),
    (("--stack",), TEXT, "NAME", "library and era that is priced: hf, hf-bare, hf-2024, ... [hf]"),
    (
        ("--eval",),
        ON,
        "",
        (
            "price a model left in eval mode, as loading leaves it: checkpointing inactive, no"
            " dropout but the adapters'"
        ),
    ),
    (("--train-mode",), ON, "", "the model is in training mode (the default)"),
    (("--compile",), SWITCH, "", "torch.compile"),
)
WORKLOAD: tuple[Row, ...] = (
    (
        ("--workload",),
        TEXT,
        "NAME",
        "sft, dpo, distill, reward, grpo, ppo; --bs counts pairs of dpo and reward [sft]",
    ),
    (
        ("--teacher",),
        TEXT,
        "MODEL",
        "the model that teaches (distill) or scores rollouts (grpo, ppo)",
    ),
    (
        ("--reference",),
        SWITCH,
        "",
        "the reference's forward in the step (dpo, grpo, ppo) [on]; off: precomputed, or beta 0",
    ),
    (("--completion",), TEXT, "N", "tokens that a rollout generates [half the sequence]"),
    (
        ("--eval-bs",),
        TEXT,
        "B",
        "evaluate so many sequences at once in the middle of training [no evaluation]",
    ),
    (("--generate",), TEXT, "N", "generate N tokens for a batch in the middle of training [none]"),
)
PARALLEL: tuple[Row, ...] = (
    (("--gpus",), TEXT, "N[xTYPE]", "GPUs in all, e.g. 8xA100-80 [1]"),
    (("--nodes",), TEXT, "N", "machines they are in [as few as take 8 each]"),
    (
        ("--ddp",),
        ("data_parallel", "ddp"),
        "",
        "DistributedDataParallel (the default of several GPUs)",
    ),
    (("--fsdp",), ("data_parallel", "fsdp2"), "", "FSDP 2 (fully_shard)"),
    (("--zero",), TEXT, "N", "DeepSpeed ZeRO stage 1, 2 or 3"),
    (("--data-parallel",), REPEAT, "NAME", "dp, ddp, zero1, zero2, zero3, fsdp1, fsdp2"),
    (("--tp",), TEXT, "N", "tensor-parallel ranks [1]"),
    (
        ("--sequence-parallel",),
        SWITCH,
        "",
        "norms and dropout on a part of the sequence [on where --tp is above 1]",
    ),
    (("--pp",), TEXT, "N", "pipeline stages [1]"),
    (("--pp-schedule",), TEXT, "NAME", "gpipe, 1f1b, interleaved, zero-bubble [1f1b]"),
    (("--pp-chunks",), TEXT, "N", "model chunks on each pipeline rank [interleaved: 2, else 1]"),
    (("--micro-batches",), TEXT, "N", "micro-batches in a pipelined step [--grad-accum]"),
    (("--cp",), TEXT, "N", "context-parallel ranks [1]"),
    (("--cp-kind",), TEXT, "NAME", "ring, ulysses [ring]"),
    (("--ep",), TEXT, "N", "expert-parallel ranks [1]"),
    (
        ("--expert-imbalance",),
        TEXT,
        "X",
        "tokens of the busiest expert-parallel rank over the mean [1]",
    ),
    (
        ("--expert-capacity",),
        TEXT,
        "X",
        "capacity factor: tokens beyond X times the mean are dropped [none]",
    ),
    (("--sharding",), TEXT, "NAME", "FSDP: full, grad-op, hybrid, hybrid-grad-op, no-shard [full]"),
    (("--shard-size",), TEXT, "N", "ranks that hold one copy together [all; hybrid: a node]"),
    (
        ("--reshard",),
        SWITCH,
        "",
        "FSDP: drop gathered parameters after the forward [as --sharding]",
    ),
    (("--wrap",), TEXT, "NAME", "FSDP units: carved, layer, none [FSDP 2: carved, FSDP 1: layer]"),
    (
        ("--forward-prefetch",),
        SWITCH,
        "",
        "FSDP 1: gather the next unit before the current one runs",
    ),
    (
        ("--backward-prefetch",),
        SWITCH,
        "",
        "FSDP 1: gather the next unit before the current one's backward [on]",
    ),
    (("--limit-all-gathers",), SWITCH, "", "FSDP 1: at most two units gathered at a time [on]"),
    (
        ("--sharded-dtype",),
        TEXT,
        "TYPE",
        "type of trained sharded parameters: auto, fp32, bf16, fp16 [auto: what the library does]",
    ),
    (
        ("--reduce-dtype",),
        TEXT,
        "TYPE",
        "type in which gradients are reduced: auto, fp32, bf16, fp16 [auto: that of computation]",
    ),
    (
        ("--sync-each-batch",),
        SWITCH,
        "",
        "reduce gradients in every micro-step, not in the last one only",
    ),
    (("--bucket-mb",), TEXT, "MIB", "DDP's bucket_cap_mb [25]"),
    (("--bucket-view",), SWITCH, "", "DDP's gradient_as_bucket_view"),
    (
        ("--hpz",),
        TEXT,
        "N",
        "ZeRO++: ranks that keep a second copy of the parameters among them [1]",
    ),
    (("--mics",), TEXT, "N", "MiCS: ranks that share one copy, instead of all"),
    (("--nvme",), TEXT, "NAMES", "what of the offloaded lies on NVMe: optimizer, parameters"),
    (
        ("--broadcast-loading",),
        SWITCH,
        "",
        "one rank of a node reads the checkpoint and broadcasts it",
    ),
    (
        ("--full-state-dict",),
        SWITCH,
        "",
        "checkpoints are gathered on rank 0 instead of saved in shards",
    ),
    (("--network",), TEXT, "NAME", "link between nodes, or its Gbit/s per GPU"),
    (("--host-ram",), TEXT, "SIZE", "memory of one machine: 512, 2TiB"),
)
HARDWARE: tuple[Row, ...] = (
    (
        ("--gpu", "-g"),
        REPEAT,
        "NAME",
        "what it should fit on; may be repeated [none: the list of GPUs that fit]",
    ),
    (("--vram",), TEXT, "SIZE", "memory of the GPU: 24, 24GiB, 80GB"),
    (("--mig",), TEXT, "PROFILE", "MIG slice of the GPU, e.g. 3g.40gb"),
    (("--display",), TEXT, "NAME", "what else is on the GPU: none, linux, windows [none]"),
    (("--allocator",), TEXT, "CONF", "as PYTORCH_ALLOC_CONF, e.g. expandable_segments:True"),
    (("--calibration",), TEXT, "FILE", "measured speeds [the one in the cache for that GPU]"),
    (("--allow-stale-calibration",), ON, "", "use a calibration of another driver, torch or GPU"),
)
DEBUG: Row = (("--debug",), ON, "", "show a traceback where something fails")
OUTPUT: tuple[Row, ...] = (
    (("--json",), ON, "", "the documented JSON instead of the report"),
    (("--explain",), ON, "", "every line as formula, numbers, value and source"),
    (("--timeline",), TEXT, "FILE", "memory over one step as .html, .svg or .png"),
    (
        ("--export",),
        TEXT,
        "KIND",
        "the configuration for another tool instead: hf, axolotl, torchtune, accelerate, deepspeed",
    ),
    DEBUG,
)
SHARED: tuple[Group, ...] = (
    ("model", MODEL),
    ("what is trained", METHOD),
    ("quantization of the base", QUANTIZATION),
    ("batch", BATCH),
    ("training step", STEP),
    ("workload", WORKLOAD),
    ("hardware", HARDWARE),
    ("many GPUs", PARALLEL),
    ("output", OUTPUT),
)
