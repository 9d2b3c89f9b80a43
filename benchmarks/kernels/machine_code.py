"""What a disassembled kernel is made of: instructions by name, its hottest loop, what ptxas
warned of."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Instructions that run on tensor cores: Ampere and Ada HMMA, Hopper HGMMA, Blackwell UTC*MMA
#: (HMMA where the tile is small).
TENSOR_CORE = re.compile(r"(HMMA|HGMMA|UTC\w*MMA)\b")
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*)")
_TARGET = re.compile(r"\b0x([0-9a-f]+)\b")
#: ptxas says of what costs speed: (C7515) wgmma is serialized, and its kin.
_ADVISORY = re.compile(r"\bC75\d\d\b")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction; `target` is where a branch goes, or -1."""

    address: int
    name: str
    target: int = -1


@dataclass(frozen=True)
class Loop:
    """The innermost loop with most tensor-core instructions: how many instructions one turn
    issues, without those that a forward branch skips in a turn that needs no mask."""

    instructions: int
    skipped: int
    products: int


def instructions_of(text: str) -> list[Instruction]:
    """The instructions of a `cuobjdump -sass` listing, without padding."""
    found = []
    for line in text.splitlines():
        match = _LINE.match(line)
        if match and not match[2].startswith("NOP"):
            branches = match[2].split(".")[0] == "BRA"
            target = _TARGET.search(match[3]) if branches else None
            found.append(
                Instruction(int(match[1], 16), match[2], int(target[1], 16) if target else -1)
            )
    return found


def count(instructions: Sequence[Instruction], pattern: str) -> int:
    """How many names begin with the pattern."""
    return sum(1 for one in instructions if re.match(pattern, one.name))


def hottest_loop(instructions: Sequence[Instruction]) -> Loop | None:
    """The loop where a kernel with products spends its time; None without one."""
    best: tuple[int, int, list[Instruction]] | None = None
    for end in instructions:
        if 0 <= end.target < end.address:
            body = [one for one in instructions if end.target <= one.address <= end.address]
            products = count(body, TENSOR_CORE.pattern)
            if products and (best is None or (products, -len(body)) > best[:2]):
                best = products, -len(body), body
    if best is None:
        return None
    return Loop(len(best[2]), _skipped(best[2]), best[0])


def _skipped(body: Sequence[Instruction]) -> int:
    """Instructions between a branch and its target further down, where no product lies between."""
    spans = (
        [one for one in body if start.address < one.address < start.target]
        for start in body
        if start.address < start.target <= body[-1].address
    )
    return max((len(span) for span in spans if not count(span, TENSOR_CORE.pattern)), default=0)


def advisories(log: str) -> str:
    """The numbers of ptxas's performance warnings, in order, or an empty string."""
    return " ".join(sorted(set(_ADVISORY.findall(log))))
