"""Pipeline schedules, one record each: in which order a rank runs what of its micro-batches, which
stages it holds, and how long it waits.

Seconds are in micro-batches: what one micro-batch takes a rank, forward and backward. Its forward,
the gradients of its inputs and those of its weights take a third each (arXiv 2401.10241).
"""

from __future__ import annotations

from enum import Enum

from napkinmath.base.record import Record

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

FORWARD, BACKWARD = "forward", "backward"
INPUTS, WEIGHTS = "input gradients", "weight gradients"  # the two parts of a backward
Turn = tuple[str, int]  # what runs, and of which of the rank's chunks
Order = list[tuple[int, list[Turn]]]  # (times, turns)

_F, _I, _W = 1 / 3, 1 / 3, 1 / 3
_B = _I + _W
# chunks of a rank: more than a model has layers, and what they take grows with them
MOST_CHUNKS = 512
_TORCH = "torch 2.13 distributed/pipelining/schedules.py "


class PipelineSchedule(str, Enum):
    """In which order a stage runs the forwards and backwards of its micro-batches."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    ZBV = "zbv"
    DUALPIPE = "dualpipe"
    DUALPIPE_V = "dualpipe-v"
    NAIVE = "naive"
    """One stage works at a time, as layers split over devices by accelerate's device_map do."""

    @property
    def record(self) -> Schedule:
        """What is known of it."""
        return SCHEDULES[self.value]


# ---------------------------------------------------------------- which stages a rank holds


def looped(ranks: int, chunks: int, rank: int) -> list[int]:
    """Every chunk is as many stages further on as there are ranks."""
    return list(range(rank, ranks * chunks, ranks))


def folded(ranks: int, chunks: int, rank: int) -> list[int]:
    """Down the ranks and up again: the first rank holds the first stage and the last."""
    return [rank, 2 * ranks - 1 - rank]


def mirrored(ranks: int, chunks: int, rank: int) -> list[int]:
    """A rank holds the stage of its place counted from each end, so two ranks hold each."""
    return [min(rank, ranks - 1 - rank), max(rank, ranks - 1 - rank)]


class Schedule(Record):
    """A row. Functions take the ranks of the pipeline, the chunks of virtual_pipeline_size, and
    the rank or the number of micro-batches."""

    name: str
    meaning: str
    source: str
    order: Callable[[int, int, int, int], Order]
    """(ranks, chunks, rank, micro-batches) to what that rank runs."""
    idle: Callable[[int, int, int], float]
    """(ranks, chunks, micro-batches) to the micro-batches that a rank waits in a step."""
    least_chunks: int = 1
    most_chunks: int = 1
    usual_chunks: int = 1
    """Where a pipeline is asked for and no number of chunks."""
    holds: Callable[[int, int, int], list[int]] = looped
    """(ranks, chunks, rank) to the stages of each chunk that the rank runs."""
    copies: int = 1
    """Ranks that hold each stage: so many copies of its parameters, whose gradients are summed."""
    needs: Callable[[int, int, int], str] = lambda ranks, chunks, count: ""
    """(ranks, chunks, micro-batches) to what is wrong with them; '' where nothing is."""
    is_pipelined: bool = True
    """Stages work at the same time, and exchange tensors of one shape while they do."""
    backward_waits: bool = False
    """No backward begins before the last forward: no gradient is on its way beside a forward."""

    hides_experts: bool = False
    """A forward runs beside a backward, and expert all-to-alls of either beside the other."""

    def num_stages(self, ranks: int, chunks: int) -> int:
        """Parts that the model is cut into."""
        return ranks * len(self.holds(ranks, chunks, 0)) // self.copies


# ---------------------------------------------------------------- orders


def _blocks(*blocks: tuple[int, list[Turn]]) -> Order:
    return [(times, turns) for times, turns in blocks if times > 0 and turns]


def _one_by_one(turns: Iterable[Turn]) -> Order:
    return [(1, [turn]) for turn in turns]


_ONE: list[Turn] = [(FORWARD, 0), (BACKWARD, 0)]


def _ahead(ahead: int, count: int) -> Order:
    """So many forwards at first, then one backward with each, then the backwards left."""
    ahead = min(ahead, count)
    return _blocks((ahead - 1, _ONE[:1]), (count - ahead + 1, _ONE), (ahead - 1, _ONE[1:]))


def _interleaved(ranks: int, chunks: int, rank: int, count: int) -> Order:
    """Groups of as many micro-batches as there are ranks pass through chunk after chunk."""
    total = count * chunks
    warmup = min(total, 2 * (ranks - rank - 1) + (chunks - 1) * ranks)

    def chunk(position: int, *, forward: bool) -> int:
        at = position % (ranks * chunks) // ranks
        return at if forward else chunks - 1 - at

    def pairs(start: int, stop: int) -> list[Turn]:
        both = (
            ((FORWARD, chunk(warmup + i, forward=True)), (BACKWARD, chunk(i, forward=False)))
            for i in range(start, stop)
        )
        return [turn for pair in both for turn in pair]

    steady, period = total - warmup, ranks * chunks
    return _blocks(
        *((1, [(FORWARD, chunk(i, forward=True))]) for i in range(warmup)),
        (steady // period, pairs(0, min(period, steady))),
        (1, pairs(steady - steady % period, steady)),
        *((1, [(BACKWARD, chunk(i, forward=False))]) for i in range(steady, total)),
    )


def _full_groups(ranks: int, chunks: int, count: int) -> str:
    if chunks == 1 or count % ranks == 0:
        return ""
    return (
        f"num_micro_batches={count} is not a multiple of pipeline_parallel_size={ranks}, which the"
        f" interleaved schedule needs; use {ranks}, {2 * ranks}, {3 * ranks}, ..."
    )


def _zbv(ranks: int, chunks: int, rank: int, count: int) -> Order:
    """Chunk 0 goes down the ranks and chunk 1 up; weight gradients fill the waits at the end."""
    full = max(2 * ranks - 1, count)  # fewer are run as so many of which the last are left out
    first, second = [(INPUTS, 0), (WEIGHTS, 0)], [(INPUTS, 1), (WEIGHTS, 1)]
    order = _blocks(
        (2 * (ranks - rank) - 1, [(FORWARD, 0)]),
        (rank, [(FORWARD, 1), (FORWARD, 0)]),
        (ranks - rank, [(FORWARD, 1), *second]),
        (full - 2 * ranks + rank + 1, [(FORWARD, 0), *first, (FORWARD, 1), *second]),
        (ranks - rank - 1, [*first, (FORWARD, 1), *second]),
        (rank, [(INPUTS, 0), (INPUTS, 1)]),
        (ranks - rank, first),
        (rank, [(WEIGHTS, 1)]),
        (rank, [(WEIGHTS, 0)]),
    )
    return order if full == count else _one_by_one(_without_later(order, count))


def _without_later(order: Order, count: int) -> list[Turn]:
    """The turns of the first micro-batches alone."""
    done: dict[Turn, int] = {}
    found: list[Turn] = []
    for turn in (turn for times, turns in order for _ in range(times) for turn in turns):
        done[turn] = done.get(turn, 0) + 1
        if done[turn] <= count:
            found.append(turn)
    return found


def _dualpipe_v(ranks: int, chunks: int, rank: int, count: int) -> Order:
    """Micro-batches on their way down the ranks and up again, each forward beside a backward of the
    other direction."""
    later = ranks - rank - 1
    down, up = [(FORWARD, 0), (BACKWARD, 1)], [(FORWARD, 1), (BACKWARD, 0)]
    order = _blocks(
        (2 * later, [(FORWARD, 0)]),
        (rank + 1, [(FORWARD, 0), (FORWARD, 1)]),
        (later, [(INPUTS, 1), (WEIGHTS, 1), (FORWARD, 1)]),
        (count - 2 * ranks + rank + 1, [*down, *up]),
        (later, [(BACKWARD, 1), *up]),
    )
    return order + _one_by_one(_drained(rank + 1, later))


def _drained(own: int, later: int) -> list[Turn]:
    """The end: backwards of both chunks, the second half of them without their weights' gradients,
    which fill the waits after them."""
    turns: list[Turn] = [(BACKWARD, 1 - index % 2) for index in range(own)]
    turns += [(INPUTS, 1 - index % 2) for index in range(own, 2 * own)]
    waiting: list[Turn] = [(WEIGHTS, chunk) for _, chunk in turns[own:]]
    for _ in range(later):
        turns += [waiting.pop(0), (INPUTS, 0)]
        waiting.append((WEIGHTS, 0))
    return turns + waiting


def _two_at_least(ranks: int, chunks: int, count: int) -> str:
    if count >= 2 * ranks:
        return ""
    return (
        f"num_micro_batches={count} is fewer than the {2 * ranks} stages of"
        f" pipeline_parallel_size={ranks}, which the dualpipe-v schedule needs; use {2 * ranks} or"
        " more"
    )


def _dualpipe(ranks: int, chunks: int, rank: int, count: int) -> Order:
    """Half of the micro-batches from each end: half a pipeline's DualPipeV on each of its halves."""
    return _dualpipe_v(ranks // 2, chunks, min(rank, ranks - 1 - rank), count // 2)


def _even_from_both_ends(ranks: int, chunks: int, count: int) -> str:
    if ranks % 2:
        return (
            f"pipeline_parallel_size={ranks} is odd, and the dualpipe schedule runs from both ends;"
            f" use {ranks + 1}"
        )
    if count % 2 == 0 and count >= 2 * ranks:
        return ""
    return (
        f"num_micro_batches={count} is odd or fewer than twice pipeline_parallel_size={ranks}, which"
        f" the dualpipe schedule needs; use {2 * ranks}, {2 * ranks + 2}, ..."
    )


# ---------------------------------------------------------------- rows

_ROWS = (
    Schedule(
        name="gpipe",
        meaning="all forwards, then all backwards",
        source="arXiv 1811.06965; " + _TORCH + "ScheduleGPipe",
        order=lambda ranks, chunks, rank, count: _ahead(count, count),
        idle=lambda ranks, chunks, count: (ranks - 1) * (_F + _B),
        backward_waits=True,
    ),
    Schedule(
        name="1f1b",
        meaning="one forward, one backward",
        source="arXiv 2104.04473; " + _TORCH + "Schedule1F1B",
        order=lambda ranks, chunks, rank, count: _ahead(ranks - rank, count),
        idle=lambda ranks, chunks, count: (ranks - 1) * (_F + _B),
    ),
    Schedule(
        name="interleaved",
        meaning="1f1b over several chunks of layers on each rank",
        source=(
            "arXiv 2104.04473 section 2.2; Megatron-LM core/pipeline_parallel/schedules.py"
            " forward_backward_pipelining_with_interleaving"
        ),
        order=lambda ranks, chunks, rank, count: (
            _interleaved(ranks, chunks, rank, count) if chunks > 1 else _ahead(ranks - rank, count)
        ),
        idle=lambda ranks, chunks, count: (ranks - 1) * (_F + _B) / chunks,
        most_chunks=MOST_CHUNKS,
        usual_chunks=2,
        needs=_full_groups,
    ),
    Schedule(
        name="zero-bubble",
        meaning="ZB-H1: weight gradients fill the waits, with the memory of the first rank on all",
        source="arXiv 2401.10241 section 2.3; github.com/deepseek-ai/DualPipe README (ZB1P)",
        order=lambda ranks, chunks, rank, count: (
            _interleaved(ranks, chunks, rank, count) if chunks > 1 else _ahead(ranks, count)
        ),
        idle=lambda ranks, chunks, count: (ranks - 1) * (_F + _B - 2 * _W) / chunks,
        most_chunks=MOST_CHUNKS,
        needs=_full_groups,
    ),
    Schedule(
        name="zbv",
        meaning="ZB-V: two chunks on a rank, down the ranks and up again",
        source="arXiv 2401.10241 section 6; " + _TORCH + "ScheduleZBVZeroBubble",
        order=_zbv,
        # Ranks begin one after the other, by a chunk's forward, and end so: all wait that long for
        # the slowest, where they meet (a global norm, a reduction).
        idle=lambda ranks, chunks, count: (ranks - 1) * _F / 2,
        least_chunks=2,
        most_chunks=2,
        usual_chunks=2,
        holds=folded,
    ),
    Schedule(
        name="dualpipe",
        meaning="micro-batches from both ends, each forward beside a backward of the other way",
        source="DeepSeek-V3 (arXiv 2412.19437); github.com/deepseek-ai/DualPipe dualpipe.py, README",
        order=_dualpipe,
        # (ranks / 2 - 1) * (F&B + B - 3W), F&B as long as F + B
        idle=lambda ranks, chunks, count: (ranks / 2 - 1) * (_F + _B + _B - 3 * _W),
        holds=mirrored,
        copies=2,
        needs=_even_from_both_ends,
        hides_experts=True,
    ),
    Schedule(
        name="dualpipe-v",
        meaning="DualPipe cut in half: two chunks on a rank, forwards beside backwards",
        source="github.com/deepseek-ai/DualPipe dualpipev.py; " + _TORCH + "ScheduleDualPipeV",
        order=_dualpipe_v,
        # (stages / 2 - 1) * (F&B + B - 3W) of half a rank's layers, F&B as long as F + B
        idle=lambda ranks, chunks, count: (ranks - 1) * (_F + _B + _B - 3 * _W) / 2,
        least_chunks=2,
        most_chunks=2,
        usual_chunks=2,
        holds=folded,
        needs=_two_at_least,
        hides_experts=True,
    ),
    Schedule(
        name="naive",
        meaning="one stage works at a time",
        source="accelerate device_map",
        order=lambda ranks, chunks, rank, count: [(count, _ONE)],
        idle=lambda ranks, chunks, count: (ranks - 1) * count * (_F + _B),
        is_pipelined=False,
    ),
)
SCHEDULES: dict[str, Schedule] = {row.name: row for row in _ROWS}
IN_CHUNKS = ", ".join(row.name for row in _ROWS if row.usual_chunks > 1)
