"""Compiles every shipped kernel configuration for every architecture, without a GPU, and reads the
machine code.

    python benchmarks/kernels/compile_gate.py --table benchmarks/results/compile_gate.csv          # check
    python benchmarks/kernels/compile_gate.py --table benchmarks/results/compile_gate.csv --write    # record

A row per configuration and architecture: registers, stack, spills, shared memory, tensor-core
instructions, access widths, instructions a value, ptxas's warnings of lost speed (C75xx), waits
for a warp group's products, the hottest loop. A row is compiled again when the hash of its
source, options and Triton version is not the recorded one, or with --all. ptxas, cuobjdump and
nvdisasm come inside the Triton wheel. Must run without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import csv
import functools
import hashlib
import importlib
import io
import multiprocessing
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "kernels"), str(ROOT / "benchmarks" / "kernels")]

from machine_code import (  # noqa: E402
    TENSOR_CORE,
    Loop,
    advisories,
    count,
    hottest_loop,
    instructions_of,
)
from napkinmath_kernels import triton_kernels  # noqa: E402
from napkinmath_kernels.triton_kernels.launch import Shipped  # noqa: E402

# : Shared memory a block may use, bytes (CUDA programming guide, compute capabilities; sm_100 as
# sm_90, sm_120 as sm_89).
SHARED_CAP = {80: 166912, 86: 101376, 89: 101376, 90: 232448, 100: 232448, 120: 101376}


@dataclass(frozen=True)
class GateRow:
    """What one cubin is made of. Widths are in bytes a thread moves at once."""

    kernel: str
    architecture: int
    triton: str
    registers: int
    stack_bytes: int
    spills: int
    shared_bytes: int
    tensor_core: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int
    instructions: int
    instructions_per_value: float
    forbidden: int
    source_hash: str
    warpgroup_waits: int = 0
    advisories: str = ""
    loop_instructions: int = 0
    loop_skipped: int = 0
    loop_products: int = 0


def all_shipped() -> Iterator[Shipped]:
    """The configurations that every module under triton_kernels declares."""
    for module in pkgutil.iter_modules(triton_kernels.__path__):
        yield from getattr(
            importlib.import_module(f"{triton_kernels.__name__}.{module.name}"), "shipped", list
        )()


def _texts(kernel: Any) -> list[tuple[str, str]]:
    """(name, text) of a kernel, of the kernels that it calls and of the constants that they read,
    wherever in their files they stand."""
    from triton.runtime.jit import JITFunction

    found: dict[str, str] = {}
    waiting = [kernel]
    while waiting:
        function = waiting.pop()
        found[function.__name__] = _code(function.src)
        for name in function.fn.__code__.co_names:
            value = function.fn.__globals__.get(name)
            if isinstance(value, JITFunction) and value.__name__ not in found:
                waiting.append(value)
            elif type(value).__name__ == "constexpr":
                found[name] = repr(value)
    return sorted(found.items())


@functools.cache
def _code(source: str) -> str:
    """A function's code without comments, docstring and layout, which change no machine code."""
    tree = ast.parse(source)
    body = tree.body[0].body if isinstance(tree.body[0], ast.FunctionDef) else []
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        del body[0]
    return ast.unparse(tree)


def source_hash(config: Shipped, triton_version: str) -> str:
    """Changes when the kernel, anything it calls, its options or Triton changes; not when it moves
    in its file."""
    parts = (
        _texts(config.kernel),
        config.signature(),
        sorted(config.constexprs.items()),
        config.num_warps,
        config.num_stages,
        config.aligned,
        sorted(config.options.items()),
        config.forbidden,
    )
    return hashlib.sha256(f"{parts}{triton_version}".encode()).hexdigest()[:12]


def compile_for(config: Shipped, architecture: int) -> tuple[Any, str]:
    """(Triton's compiled kernel for one architecture, what ptxas said); never from Triton's cache,
    which keeps no warnings."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(
        fn=config.kernel,
        signature=config.signature(),
        constexprs=dict(config.constexprs),
        attrs={(position,): [["tt.divisibility", 16]] for position in config.aligned_positions()},
    )
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, **config.options}
    log = io.StringIO()
    with (
        knobs.compilation.scope(),
        knobs.nvidia.scope(),
        contextlib.redirect_stdout(log),
    ):
        knobs.compilation.always_compile = True
        knobs.nvidia.dump_ptxas_log = True
        kernel = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return kernel, log.getvalue()


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def disassemble(cubin: bytes) -> str:
    """Resource usage and instructions of a cubin, as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [_tool("cuobjdump"), "--dump-resource-usage", "-sass", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout


def measure(config: Shipped, architecture: int, triton_version: str) -> GateRow:
    """Compiles one configuration for one architecture and counts."""
    compiled, log = compile_for(config, architecture)
    text = disassemble(compiled.asm["cubin"])
    instructions = instructions_of(text)
    loop = (hottest_loop(instructions) if config.has_dot else None) or Loop(0, 0, 0)
    usage = {key: int(value) for key, value in re.findall(r"\b(REG|STACK):(\d+)", text)}
    loads, stores = count(instructions, r"LDG(STS)?\."), count(instructions, r"STG\.")
    wide_loads = count(instructions, r"LDG(STS)?\..*128") + count(instructions, "UTMALDG|UBLKCP")
    wide_stores = count(instructions, r"STG\..*128") + count(instructions, "UTMASTG")
    per_value = (
        len(instructions) * config.num_warps * 32 / config.values_per_program
        if config.values_per_program
        else 0.0
    )
    return GateRow(
        config.name,
        architecture,
        triton_version,
        usage["REG"],
        usage["STACK"],
        count(instructions, "LDL|STL"),
        compiled.metadata.shared,
        count(instructions, TENSOR_CORE.pattern),
        wide_loads,
        max(0, loads - wide_loads),
        wide_stores,
        max(0, stores - wide_stores),
        len(instructions),
        round(per_value, 2),
        count(instructions, config.forbidden) if config.forbidden else 0,
        source_hash(config, triton_version),
        count(instructions, "WARPGROUP"),
        advisories(log),
        loop.instructions,
        loop.skipped,
        loop.products,
    )


def faults(row: GateRow, config: Shipped) -> list[str]:
    """What a row breaks of the rules that every shipped configuration is held to."""
    found = []
    if row.spills > config.most_spills or (row.stack_bytes and not row.spills):
        found.append(f"spills: {row.stack_bytes} B of stack, {row.spills} local accesses")
    if row.advisories:
        found.append(f"ptxas warns of lost speed: {row.advisories}")
    if row.warpgroup_waits > row.tensor_core:
        found.append(f"{row.warpgroup_waits} waits for {row.tensor_core} products of warp groups")
    if row.shared_bytes > SHARED_CAP[row.architecture]:
        found.append(f"{row.shared_bytes} B of shared memory, cap {SHARED_CAP[row.architecture]}")
    if config.has_dot and not row.tensor_core:
        found.append("a dot without tensor-core instructions")
    if (config.has_wide_loads and not row.wide_loads) or (
        config.has_wide_stores and not row.wide_stores
    ):
        found.append(f"16-byte accesses: {row.wide_loads} loads, {row.wide_stores} stores")
    if (
        config.max_instructions_per_value
        and row.instructions_per_value > config.max_instructions_per_value
    ):
        found.append(
            f"{row.instructions_per_value} instructions a value, at most"
            f" {config.max_instructions_per_value}"
        )
    if row.forbidden:
        found.append(f"{row.forbidden} instructions that match {config.forbidden!r}")
    return [f"{row.kernel} sm_{row.architecture}: {fault}" for fault in found]


def _from_text(record: dict[str, str]) -> GateRow:
    kinds = {f.name: {"int": int, "float": float}.get(str(f.type), str) for f in fields(GateRow)}
    return GateRow(**{name: kinds[name](value or kinds[name]()) for name, value in record.items()})


def read_table(path: Path) -> dict[tuple[str, int, str], GateRow]:
    """Recorded rows by (kernel, architecture, Triton version); empty if there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        rows = [_from_text(record) for record in csv.DictReader(file)]
    return {(row.kernel, row.architecture, row.triton): row for row in rows}


def write_table(path: Path, rows: list[GateRow]) -> None:
    """Writes rows sorted, so that a change shows as a small diff."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(GateRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            asdict(row)
            for row in sorted(rows, key=lambda row: (row.triton, row.kernel, row.architecture))
        )


def _measured(place: tuple[int, int]) -> GateRow:
    """The row of the n-th shipped configuration on an architecture, in a worker."""
    import triton

    number, architecture = place
    return measure(list(all_shipped())[number], architecture, triton.__version__)


def measure_all(places: list[tuple[int, int]], jobs: int) -> Iterator[GateRow]:
    """Rows of (number of a configuration, architecture), in order, by as many processes."""
    if jobs < 2 or len(places) < 2:
        yield from map(_measured, places)
        return
    with concurrent.futures.ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("fork")
    ) as workers:
        yield from workers.map(_measured, places)


def run_gate(
    recorded: dict[tuple[str, int, str], GateRow],
    *,
    recompile: bool,
    only: str,
    architectures: set[int],
    jobs: int = 1,
) -> tuple[list[GateRow], list[str], int]:
    """(rows of this Triton version, faults, how many were compiled)."""
    import triton

    version = triton.__version__
    shipped = list(all_shipped())
    wanted = [
        (number, architecture)
        for number, config in enumerate(shipped)
        for architecture in config.architectures
        if only in config.name and architecture in architectures
    ]
    known = {place: recorded.get((shipped[place[0]].name, place[1], version)) for place in wanted}
    hashes = {number: source_hash(shipped[number], version) for number, _ in wanted}
    stale = [
        place
        for place, row in known.items()
        if row is None or recompile or row.source_hash != hashes[place[0]]
    ]
    found = dict(known)
    broken: list[str] = []
    for place, row in zip(stale, measure_all(stale, jobs), strict=True):
        before, found[place] = known[place], row
        print("\n".join(faults(row, shipped[place[0]])) or ".", file=sys.stderr, flush=True)
        if before is not None and recompile and before != row:
            broken.append(f"{row.kernel} sm_{place[1]}: compiled to {row}, recorded {before}")
    rows = [row for row in found.values() if row is not None]
    for (number, _), row in found.items():
        broken += faults(row, shipped[number]) if row is not None else []
    return rows, broken, len(stale)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 if every configuration keeps the rules and the table is current, else 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument(
        "--write", action="store_true", help="record the rows of this Triton version"
    )
    parser.add_argument("--all", action="store_true", help="compile again even what is unchanged")
    parser.add_argument("--only", default="", help="substring of the kernel's name")
    parser.add_argument("--jobs", type=int, default=1, help="processes that compile")
    parser.add_argument("--arch", type=int, nargs="*", default=sorted(SHARED_CAP))
    options = parser.parse_args(arguments)
    import triton

    recorded = read_table(options.table)
    rows, broken, compiled = run_gate(
        recorded,
        recompile=options.all,
        only=options.only,
        architectures=set(options.arch),
        jobs=options.jobs,
    )
    fresh = {(row.kernel, row.architecture, row.triton): row for row in rows}
    everything = not options.only and options.arch == sorted(SHARED_CAP)
    if options.write:
        kept = {
            key: row
            for key, row in recorded.items()
            if not everything or key[2] != triton.__version__
        }
        write_table(options.table, list((kept | fresh).values()))
    else:
        broken += [
            f"{key[0]} sm_{key[1]}: changed since it was recorded; run with --write"
            for key, row in fresh.items()
            if recorded.get(key) != row
        ]
        stale = [
            key
            for key in recorded
            if everything and key[2] == triton.__version__ and key not in fresh
        ]
        broken += [
            f"{key[0]} sm_{key[1]}: recorded, but no longer shipped; run with --write"
            for key in stale
        ]
    print(
        "\n".join(broken)
        if broken
        else (
            f"{len(rows)} configurations keep the rules, {compiled} compiled with triton"
            f" {triton.__version__}"
        )
    )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
