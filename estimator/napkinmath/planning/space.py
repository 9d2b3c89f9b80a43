"""What may be run: the options given, the values tried for those left open, and which of their
combinations make sense."""

from __future__ import annotations

from enum import Enum
from itertools import product

from napkinmath.base import values as read
from napkinmath.base.command_line import flags
from napkinmath.base.errors import InputError
from napkinmath.base.record import Record
from napkinmath.catalog.kernels import KERNEL_SETS
from napkinmath.inputs.asked import training_of
from napkinmath.models.tasks import PICTURED
from napkinmath.planning.sweep import Sweeper

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence
    from typing import Any

    from napkinmath.calibration.calibration import Calibration
    from napkinmath.config.hardware import Hardware
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.ir.model_spec import ModelSpec
    from napkinmath.planning.sweep import Sweeper
    from napkinmath.timing.efficiency import Efficiency


SAME_SPEED = (
    0.005  # speeds closer than this count as equal: fewer changes, then less memory, decide
)


class Goal(str, Enum):
    """What is best."""

    TOKENS = "tokens/s"
    CONTEXT = "context"
    BATCH = "batch"
    CHEAPEST = "cheapest"
    FEWEST_CHANGES = "fewest-changes"


class Machine(Record):
    """A GPU to run on: its speeds, the calibration that they are of, and what an hour of it costs
    (None: not known)."""

    hardware: Hardware
    efficiency: Efficiency | None = None
    calibration: Calibration | None = None
    price_per_hour: float | None = None


def machine_of(
    hardware: Hardware, calibration: Calibration | None = None, price: float | None = None
) -> Machine:
    """A GPU with the speeds that were measured on it, if any were. Raises InputError for speeds that
    its datasheet rules out."""
    return Machine(
        hardware=hardware,
        efficiency=None if calibration is None else calibration.efficiency(hardware.gpu),
        calibration=calibration,
        price_per_hour=price,
    )


class Space(Record):
    """What may be run: `base` holds the options that are given, `knobs` the values of each option
    left open, the first being the default.

    `batches`, `lengths` and `ranks` are tried with each combination; the first batch and the first
    rank are the defaults.
    """

    spec: ModelSpec
    machines: tuple[Machine, ...]
    base: tuple[tuple[str, object], ...]
    knobs: tuple[tuple[str, tuple[object, ...]], ...]
    batches: tuple[int, ...] = (1,)
    lengths: tuple[int, ...] = (2048,)
    ranks: tuple[int, ...] = (16,)
    allocator: str = ""


class Combination:
    """One combination of knobs on one machine, with its cells priced as arrays."""

    __slots__ = ("changes", "config", "machine", "options", "requested", "speed", "sweeper")

    def __init__(
        self,
        options: dict[str, object],
        changes: tuple[str, ...],
        config: TrainConfig,
        machine: Machine,
        sweeper: Sweeper,
    ) -> None:
        self.options, self.changes, self.config, self.machine, self.sweeper = (
            options,
            changes,
            config,
            machine,
            sweeper,
        )
        self.requested: Any = None
        self.speed: Any = None


EXPERTS_PACKED = ("quantize_experts", (None, True))  # of QLoRA, where a model has experts

# Values that are tried for an option nobody gave; None leaves it to its default.
OPEN_KNOBS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("method", ("full", "lora", "qlora")),
    EXPERTS_PACKED,
    ("precision", (None, "bf16-amp", "fp16-amp", "fp16-autocast")),
    ("checkpointing", (None, "none", "full", "selective")),
    ("optimizer", (None, "adamw-8bit", "paged-adamw-8bit", "adafactor")),
    ("optimizer_in_backward", (None, True)),
    ("loss", (None, "chunked")),
    ("kernels", (None, "liger")),
)


# Tried only where nothing else fits.
OFFLOADS = ("optimizer", "optimizer,parameters")
_ADAPTERS_KERNELS = "unsloth"  # patch a model with adapters and no other


BATCHES = (*range(1, 33), *range(36, 65, 4), *range(72, 129, 8), 160, 192, 224, 256)


LENGTHS = (
    *range(256, 8193, 256),
    *range(9216, 32769, 1024),
    *range(36864, 131073, 4096),
    *range(147456, 1048577, 16384),
)


def open_space(
    spec: ModelSpec,
    machines: Sequence[Machine],
    given: Mapping[str, Sequence[object]],
    goal: Goal,
    *,
    allocator: str = "",
) -> Space:
    """The space around options of which some are given: one value stays, several are tried, none
    leaves the knob to OPEN_KNOBS.

    For the fewest changes a value given is where to start from, and every knob may turn.
    """
    if goal is Goal.CONTEXT and spec.task in PICTURED:
        raise InputError(
            f"--goal context: {spec.name} reads {PICTURED[spec.task]} and has no context; leave it out"
        )
    if goal is Goal.CONTEXT and given.get("lengths"):
        raise InputError("--lengths says how long sequences are; leave it or --goal context out")
    fewest = goal is Goal.FEWEST_CHANGES
    base: dict[str, object] = {}
    knobs: dict[str, tuple[object, ...]] = {}
    for name, known in OPEN_KNOBS:
        asked = tuple(given.get(name, ()))
        if not (asked or concerns(spec, name)):
            continue
        if fewest:
            knobs[name] = tuple(dict.fromkeys((*asked, *known)))
        elif len(asked) > 1 or not asked:
            knobs[name] = asked or known
        else:
            base[name] = asked[0]
    for name, asked in given.items():
        if name in knobs or name in base or name in ("bs", "ctx", "rank"):
            continue
        if len(asked) > 1:
            knobs[name] = tuple(asked)
        else:
            base[name] = asked[0]
    sizes = {
        name: tuple(read.count(value, f"--{name}") for value in given.get(name, ()))
        for name in ("bs", "ctx", "rank")
    }
    default_batches = BATCHES if goal is not Goal.CONTEXT else (1,)
    return Space(
        spec=spec,
        machines=tuple(machines),
        base=tuple(base.items()),
        knobs=tuple(knobs.items()),
        batches=(
            tuple(dict.fromkeys((*sizes["bs"], *BATCHES)))
            if fewest
            else sizes["bs"] or default_batches
        ),
        lengths=sizes["ctx"] or (_lengths(spec) if goal is Goal.CONTEXT else (2048,)),
        ranks=sizes["rank"] or (16,),
        allocator=allocator,
    )


def _lengths(spec: ModelSpec) -> tuple[int, ...]:
    """Contexts that are tried: none beyond a model's learned positions, and those themselves."""
    longest = spec.longest_sequence
    if not longest:
        return LENGTHS
    return (*(length for length in LENGTHS if length < longest), longest)


def concerns(spec: ModelSpec, name: str) -> bool:
    """Whether a knob could change anything of a model."""
    return name != EXPERTS_PACKED[0] or bool(dict(spec.symbols).get("e"))


def packs_without_bits(options: Mapping[str, object], given: Container[str]) -> bool:
    """Whether experts would be packed, which nobody asked for, beside weights that are not."""
    name = EXPERTS_PACKED[0]
    return name not in given and bool(options.get(name)) and options.get("method") != "qlora"


def wider(space: Space) -> Iterator[tuple[str, Space]]:
    """Spaces with what is tried where nothing fits, one after the other, each with the words that
    say so: another trainer's kernels, then host memory, however slow. What is given stays."""
    given = dict(space.base)
    kernels = dict(space.knobs).get("kernels", ())
    adapts = given.get("method") != "full" and given.get("workload", "sft") == "sft"
    if kernels and adapts and space.spec.family in KERNEL_SETS[_ADAPTERS_KERNELS].families:
        more = (*kernels, _ADAPTERS_KERNELS)
        knobs = tuple((name, more if name == "kernels" else of) for name, of in space.knobs)
        yield (
            "nothing fits with the kernels of Trainers: unsloth's are tried too",
            space.replace(knobs=knobs),
        )
    if "offload" not in given and "offload" not in dict(space.knobs):
        yield (
            "nothing fits the GPU alone: host memory is tried too (--offload)",
            space.replace(knobs=(*space.knobs, ("offload", OFFLOADS))),
        )


def combinations_of(space: Space) -> Iterator[Combination]:
    """Every combination of knobs that does not contradict itself, on every machine; equal
    configurations once. Raises InputError, the first refusal, where every one is refused."""
    names = [name for name, _ in space.knobs]
    seen: set[tuple[str, TrainConfig]] = set()
    refused: InputError | None = None
    for machine in space.machines:
        for values in product(*(values for _, values in space.knobs)):
            options = {
                **dict(space.base),
                **{
                    name: value
                    for name, value in zip(names, values, strict=True)
                    if value is not None
                },
            }
            if pointless(options, dict(space.base)):
                continue
            if options.get("optimizer_in_backward"):
                options.setdefault("clip", False)  # no gradients are left to clip
            try:
                config = training_of(space.spec, options)
            except InputError as error:
                refused = refused or error
                continue
            key = (machine.hardware.gpu.name, config)
            if key in seen or not (
                _runs(config, machine.hardware, given="precision" in dict(space.base))
                and takes_loss(config, options, dict(space.base))
            ):
                continue
            seen.add(key)
            changes = tuple(
                flags({name: value})
                for (name, known), value in zip(space.knobs, values, strict=True)
                if value != known[0]
            )
            yield Combination(
                options,
                changes,
                config,
                machine,
                Sweeper(space.spec, config, machine.hardware, machine.efficiency),
            )
    if refused is not None and not seen:
        raise refused


def pointless(options: Mapping[str, object], given: Mapping[str, object]) -> bool:
    """Whether options that nobody gave make no sense together: fp32 masters of a frozen base, a
    second fused loss."""
    full = options.get("method", "full") == "full"
    if packs_without_bits(options, given):
        return True
    if (
        not full
        and "precision" not in given
        and options.get("precision") in ("bf16-amp", "fp16-amp")
    ):
        return True
    if full and "precision" not in given and options.get("precision") == "fp16-autocast":
        return True
    if not full and "optimizer_in_backward" not in given and options.get("optimizer_in_backward"):
        return True  # adapters' gradients are too few to matter
    if (
        not full
        and "optimizer" not in given
        and options.get("optimizer") not in (None, "adamw-8bit")
    ):
        return True
    if full and "kernels" not in given and options.get("kernels") == _ADAPTERS_KERNELS:
        return True
    return (
        "loss" not in given
        and "kernels" not in given
        and "loss" in options
        and "kernels" in options
    )


def takes_loss(
    config: TrainConfig, options: Mapping[str, object], given: Mapping[str, object]
) -> bool:
    """Whether the workload's trainers have the loss that nobody gave."""
    tried = "loss" in options and "loss" not in given
    return not tried or config.workload.rule.takes_chunked_loss


def _runs(config: TrainConfig, hardware: Hardware, *, given: bool) -> bool:
    """Whether the GPU computes in the configuration's type: bf16 where it has it, else fp16, unless
    the precision was given."""
    if given or not hardware.gpu.dense_flops:
        return True
    return not config.precision.value.startswith(
        "fp16" if hardware.gpu.supports("bf16") else "bf16"
    )
