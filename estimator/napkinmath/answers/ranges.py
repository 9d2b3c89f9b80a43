"""Ranges around the figures: the span in which nine of ten measurements that nobody fitted are
expected.

Allocated bytes follow from the operations, and err by a few per cent. What is reserved beyond them
depends on the order in which blocks of many sizes come and go, so its doubt is a share of the
allocator's cache and of the largest logits, which leave the largest holes. What had to be assumed
widens all of it. `benchmarks/accuracy/held_out_ranges.py` prints the quantiles that the constants come from.
"""

from __future__ import annotations

from napkinmath.answers.figures import Memory, Range, Verdict
from napkinmath.base.record import Record
from napkinmath.ir.ledger import Role
from napkinmath.memory.replay import replay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.train_config import TrainConfig
    from napkinmath.memory.replay import Replay


class Spread(Record):
    """How far measurements lie from a figure: shares of the figure itself, of the cache below it,
    and of cache and logits above it."""

    base: float
    cache_below: float = 0.0
    cache_above: float = 0.0
    rests_on: int = 0
    """How many sources the shares were measured on, where these are few; 0: so many that one more
    would not move them."""

    @property
    def widening(self) -> float:
        """How much farther a source lies that is none of the few: the variance of one more draw
        around the mean of n is 1 + 1/n of that among the n."""
        return (1 + 1 / self.rests_on) ** 0.5 if self.rests_on else 1.0


# From held_out_ranges.py, "all sources". Of allocated the 95th percentile over sources of equal
# weight, rounded up; of reserved and device figures the narrowest spans that hold nine of ten in
# every source of at least ten, and on average over sources; above, 0.3 would do for that, but
# memory that was not expected ends a run. Recorded anew, with sources that were not there, they are
# 0.1, 0.2 and 0, and these hold 80% on average: readings of a driver, to the whole GB in two sources.
ALLOCATED = Spread(base=0.025)
RESERVED = Spread(base=0.025, cache_below=0.3, cache_above=0.5)
# Several GPUs: engines are more and their code differs more. Base and communicators are of the least
# width with which nine of ten lie inside on average over ten sources, and four of five in each
# (held_out_several.py); the shares of the cache are those of one GPU.
RESERVED_ON_SEVERAL = RESERVED.replace(base=0.1)
# Of allocated bytes one source of five needs so much, full training under FSDP1 (Liger-Kernel's).
ALLOCATED_ON_SEVERAL = Spread(base=0.045, rests_on=1)
# What communicators hold less and more than priced, as shares of it: channels, protocols and
# registered buffers follow NCCL's version and the fabric, peer-to-peer ones what is sent.
COMMUNICATORS_BELOW, COMMUNICATORS_ABOVE = 0.5, 1.0
# Rows that routers send: a rank of expert parallelism without a capacity receives what they choose, and
# even shares are priced. No measurement sets the share: five of Megatron-SWIFT's examples (examples/megatron
# at 3602360a5) hold 12 to 36% more on the device than priced.
UNEVEN_EXPERTS = 0.5
# Lengths that change from batch to batch: ms-swift's tables, whose 10th and 90th percentile these
# are, around the mean over orders.
RESERVED_BY_LENGTHS = Spread(base=0.05, cache_below=0.4, cache_above=0.65, rests_on=1)


def allocated_share(world_size: int) -> float:
    """How far allocated bytes may lie from their figure, as a share, on so many GPUs."""
    spread = ALLOCATED if world_size == 1 else ALLOCATED_ON_SEVERAL
    return spread.base * spread.widening


class MemoryDoubt(Record):
    """One thing that is not known, and how many bytes of the device it may take away or add."""

    name: str
    meaning: str
    below: float
    above: float


def memory_doubts(e: Estimate) -> tuple[MemoryDoubt, ...]:
    """What widens the device figure, by name; bytes."""
    books, spread = within_device(e), _spread(e)
    value, wider = books.peak_reserved, spread.widening
    cache, base = value - books.peak_allocated, wider * spread.base * value
    fewer, more = _communicators(e)
    found = (
        MemoryDoubt(
            name="operations",
            meaning="versions of libraries keep more or fewer tensors",
            below=base,
            above=base,
        ),
        MemoryDoubt(
            name="cache",
            meaning="blocks may leave fewer holes, or more where large logits come and go",
            below=wider * spread.cache_below * cache,
            above=wider * spread.cache_above * (cache + largest_logits(e)),
        ),
        MemoryDoubt(
            name="communicators",
            meaning="buffers of collectives follow NCCL's version and the links",
            below=fewer,
            above=more,
        ),
        MemoryDoubt(
            name="experts",
            meaning="routers may send one rank more rows than even shares",
            below=0.0,
            above=uneven_experts(e),
        ),
        MemoryDoubt(
            name="named",
            meaning="what is named as not priced takes at most so much more",
            below=0.0,
            above=float(named_bytes(e)),
        ),
    )
    return tuple(doubt for doubt in found if doubt.below or doubt.above)


def _spread(e: Estimate) -> Spread:
    if len(e.replays) > 1:
        return RESERVED_BY_LENGTHS
    return RESERVED_ON_SEVERAL if e.config.parallel.world_size > 1 else RESERVED


def _communicators(e: Estimate) -> tuple[float, float]:
    """Bytes that communicators may hold less and more than priced."""
    held = e.hardware.communicator_bytes if e.hardware is not None else 0
    return COMMUNICATORS_BELOW * held, COMMUNICATORS_ABOVE * held


def named_bytes(e: Estimate, config: TrainConfig | None = None) -> int:
    """What a job file asks for that is not priced takes at most, under this configuration or another
    one."""
    return e.job_keys.more_bytes(config or e.config) if e.job_keys is not None else 0


def uneven_experts(e: Estimate) -> float:
    """Bytes that a rank may hold more where routers send it more rows than even shares, and no
    option says how many."""
    parallel = e.config.parallel
    known = parallel.expert_capacity or parallel.expert_imbalance > 1
    if not parallel.spreads_experts or known:
        return 0.0
    return UNEVEN_EXPERTS * e.breakdown.get(Role.ACTIVATIONS, 0)


def memory_ranges(e: Estimate, doubt: tuple[float, float] = (0.0, 0.0)) -> Memory:
    """Requested, allocated, reserved and device peaks, each with its span.

    `doubt` is what assumptions add below and above, as shares of the figure.
    """
    books = within_device(e)
    context = e.hardware.context_bytes if e.hardware is not None else 0
    below, above = doubt
    allocated = books.peak_allocated
    several = len(e.replays) > 1
    base = allocated_share(e.config.parallel.world_size)
    further, (fewer, more) = uneven_experts(e) + named_bytes(e), _communicators(e)
    reserved = reserved_range(books, largest_logits(e), _spread(e), below, above)
    if several:
        reserved = over_orders(e, reserved, allocated)
    shown = reserved if several else lasting_range(e, books, reserved, below, above)
    return Memory(
        requested=e.peak.nbytes,
        allocated=Range(
            low=allocated * (1 - base - below),
            value=allocated,
            high=allocated * (1 + base + above) + further,
        ),
        reserved=_held_by_device(e, reserved, 0, (0.0, further)),
        device=_held_by_device(e, shown, context, (fewer, more + further)),
    )


def _held_by_device(
    e: Estimate, span: Range, context: int, doubt: tuple[float, float] = (0.0, 0.0)
) -> Range:
    """A span with what lies outside the allocator, which may be less or more by the `doubt`; what
    surely fits never holds more than there is, since a full device makes the allocator return its
    cache."""
    below, above = doubt
    found = Range(
        low=span.low + context - below,
        value=span.value + context,
        high=span.high + context + above,
    )
    if e.hardware is None or e.verdict is not Verdict.FITS:
        return found
    most = e.hardware.usable_bytes + context
    return found.replace(high=max(found.value, min(found.high, float(most))))


def headroom(e: Estimate) -> Range | None:
    """Bytes of the device that the step leaves: its memory less the device figure; negative where
    it is too small, None where no device is named."""
    if e.hardware is None:
        return None
    capacity, device = e.hardware.memory_bytes, e.memory.device
    return Range(
        low=capacity - device.high, value=capacity - device.value, high=capacity - device.low
    )


def headroom_bytes(e: Estimate) -> int | None:
    """The middle of the headroom, in whole bytes."""
    found = headroom(e)
    return None if found is None else int(found.value)


def returnable_bytes(e: Estimate) -> int:
    """What the allocator holds beside tensors at its highest, and could give back: its cache."""
    return max(0, int(e.memory.reserved.value - e.memory.allocated.value))


def returned_bytes(e: Estimate) -> int:
    """What a full device made the allocator give back: reserved for a moment, and not lasting."""
    outside = e.hardware.context_bytes if e.hardware is not None else 0
    return max(0, int(e.memory.reserved.value + outside - e.memory.device.value))


def reserved_range(books: Replay, logits: int, spread: Spread, below: float, above: float) -> Range:
    """The span of reserved bytes: the cache that was predicted may be half there, or grow by as
    much as logits leave behind."""
    value, wider = books.peak_reserved, spread.widening
    cache = value - books.peak_allocated
    base, left = wider * spread.base, cache + logits
    return Range(
        low=max(value * (1 - base - below) - wider * spread.cache_below * cache, 0.0),
        value=value,
        high=value * (1 + base + above) + wider * spread.cache_above * left,
    )


def lasting_range(e: Estimate, books: Replay, reserved: Range, below: float, above: float) -> Range:
    """What nvidia-smi shows when polled: a device that fills up makes the allocator return its
    cache, and the height before that is over in a moment.

    What lasts is held at the end of the steady step. The moment itself may still be caught, so the
    span reaches up to it.
    """
    if not books.num_retries:
        return reserved
    held = books.replace(peak_reserved=max(books.end_reserved, books.peak_allocated))
    found = reserved_range(held, largest_logits(e), _spread(e), below, above)
    return found.replace(high=max(found.high, float(books.peak_reserved)))


def largest_logits(e: Estimate) -> int:
    """Bytes of the largest tensor of logits and loss; the head's weight is not one."""
    return max((t.nbytes for t in e.timeline.tensors if t.role is Role.LOGITS), default=0)


def over_orders(e: Estimate, span: Range, allocated: int) -> Range:
    """The mean over the orders of lengths that were replayed, as far as the device lets them, and
    the span widened to all of them.

    Orders round what they allocate differently; the mean is never below what the one shown has
    `allocated`.
    """
    found = within_orders(e)
    value = max(sum(found) // len(found), allocated)  # whole bytes, as in --json
    shift = value - span.value
    return Range(
        low=min(span.low + shift, found[0]), value=value, high=max(span.high + shift, found[-1])
    )


def within_orders(e: Estimate) -> list[int]:
    """What each order of lengths reserved, least first; a full device gives no more than it has."""
    ceiling = e.hardware.usable_bytes if e.hardware is not None else None
    return [
        r.peak_reserved if ceiling is None else min(r.peak_reserved, max(ceiling, r.peak_allocated))
        for r in e.replays
    ]


def within_device(e: Estimate) -> Replay:
    """The replay under what the device offers, where the free-running one would reserve more and
    the step goes through all the same.

    A full device makes the allocator return its cached segments and try again, so that reservation
    never shows more than there is.
    """
    free, hardware = e.replay, e.hardware
    if hardware is None or free.peak_reserved <= hardware.usable_bytes or free.out_of_memory:
        return free
    if free.peak_allocated > hardware.usable_bytes:
        return free
    limited = replay(e.timeline, e.settings.replace(limit_bytes=hardware.usable_bytes))
    return free if limited.out_of_memory else limited
