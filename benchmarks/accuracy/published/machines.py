"""Machines that sources describe elsewhere than in their tables: GPUs of a node, the network
between nodes, the lanes of a card.

Read where the source is known; a source read blind has what such machines usually have. Each row
has the file that says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from published.rows import Row, Unreadable


@dataclass(frozen=True)
class Machine:
    """What a source says of its nodes; what is left empty it does not say."""

    pattern: str
    """Regular expression on "source | model | gpu | method | number of GPUs", lower case."""
    evidence: str
    gpus_per_node: int = 0
    network: str = ""
    """As `--network` takes it."""
    pcie: str = ""
    """Generation and lanes of a card's slot, as "3x8"."""


MACHINES: tuple[Machine, ...] = (
    Machine(
        pattern=r"bigscience.*a100",
        gpus_per_node=8,
        network="4x omni-path",
        evidence=(
            "bigscience train/tr11-176B-ml/README.md, jz/hpc-specs.md: 8 GPUs per node, 4 OmniPath"
            " links"
        ),
    ),
    Machine(
        pattern=r"qwenlm/qwen\b.*qwen-7b.*\| lora \| 4$",
        gpus_per_node=2,
        evidence=(
            "QwenLM/Qwen README.md, Profiling of Memory and Speed: 'two servers, each containing"
            " two A100-SXM4-80G GPUs'; rows 'LoRA (multinode)'"
        ),
    ),
    Machine(
        pattern=r"fsdp_qlora.*3090",
        pcie="3x8",
        evidence=(
            "AnswerDotAI/fsdp_qlora benchmarks_03_2024.md: 'an older motherboard and slow PCI"
            " lanes'; boards before PCIe 4 share 16 lanes between two cards"
        ),
    ),
)


ONE_GPU, ONE_NODE, MANY_NODES = "one GPU", "one node", "many nodes"
_USUAL_NODE = 8


def place_of(row: Row, *, blind: bool) -> str:
    """Where a run was: on one GPU, on one node (at most eight GPUs, unless its source says that
    they stood in several machines), or on many; on one where the cell cannot be read."""
    try:
        count = row.whole("n_gpus", 1)
    except Unreadable:
        count = 1
    if count == 1:
        return ONE_GPU
    machine = machine_of(row, blind=blind)
    each = (machine.gpus_per_node if machine else 0) or _USUAL_NODE
    return ONE_NODE if count <= each else MANY_NODES


def machine_of(row: Row, *, blind: bool) -> Machine | None:
    """The machine that the row's source describes, or None."""
    if blind:
        return None
    text = " | ".join(
        (
            row.words("source"),
            row.words("model"),
            row.words("gpu"),
            row.words("method"),
            row["n_gpus"].strip(),
        )
    )
    return next((machine for machine in MACHINES if re.search(machine.pattern, text)), None)


@dataclass(frozen=True)
class Supplement:
    """Cells that a table leaves empty and its source fills elsewhere."""

    pattern: str
    """Regular expression on "source | model | architecture | gpu", lower case."""
    cells: tuple[tuple[str, str], ...]
    evidence: str
    replaces: tuple[str, ...] = ()
    """Columns whose cell says less than the source: the family of a card that is not the usual."""


SUPPLEMENTS: tuple[Supplement, ...] = (
    Supplement(
        pattern=r"pytorch/ao.*\| h100$",
        cells=(("gpu", "H100-SXM HBM2e 96GB 500W"), ("gpu_mem_gb", "96")),
        replaces=("gpu", "gpu_mem_gb"),
        evidence=(
            "pytorch/ao torchao/testing/training/roofline_utils.py gpu_name_to_specs: '2.4 TB per"
            " second, custom to Meta's H100 variant', which torchtitan benchmarks/README.md gives"
            " 500 W"
        ),
    ),
    Supplement(
        pattern=r"dao-ailab/flash-attention: training/readme.*gpt3-1\.3b",
        cells=(
            ("micro_batch", "8"),
            ("arch", "gpt2 L24 h2048 a16 ffn8192 V50264 fused-gelu"),
            ("sharding", "zero1"),
        ),
        evidence=(
            "flash-attention training/configs/experiment/pile/gpt3xl-flash.yaml (24 layers of 2048,"
            " 16 heads, batch_size 8 on 80 GB, DDPStrategyZero1), gpt3s-flash.yaml (fused_mlp,"
            " fused_dropout_add_ln, pad_vocab_size_multiple 8)"
        ),
    ),
    Supplement(
        pattern=r"bigscience.*\bh14400 a\?",
        cells=(("arch", "a96"),),
        evidence=(
            "bigscience train/tr11-176B-ml/chronicles-prequel.md, Best TFLOPs: '200B model: TP=8,"
            " PP=10, NLAYERS=80, NHIDDEN=14400, NHEADS=96'"
        ),
    ),
    Supplement(
        pattern=r"bigscience.*\bh1[234]\d\d\d a\?",
        cells=(("arch", "a64"),),
        evidence=(
            "bigscience train/tr11-176B-ml/chronicles-prequel.md, Final round comparison: 'all"
            " NHEADS=64 (above too)'"
        ),
    ),
)


def supplemented(row: Row, *, blind: bool) -> Row:
    """The row with what its source says elsewhere; a cell that says something is left alone, but
    for question marks in an architecture."""
    if blind:
        return row
    text = " | ".join(row.words(column) for column in ("source", "model", "arch", "gpu"))
    found = next((s for s in SUPPLEMENTS if re.search(s.pattern, text)), None)
    if found is None:
        return row
    cells = dict(row.cells)
    for column, value in found.cells:
        if "?" in cells.get(column, "") and re.fullmatch(r"[a-z]\d+", value):
            cells[column] = cells[column].replace(f"{value[0]}?", value)
        elif not row.states(column) or "?" in cells.get(column, "") or column in found.replaces:
            cells[column] = value
    return Row(cells)
