"""Does it fit: on the hardware named, and on every catalogued GPU."""

from __future__ import annotations

from napkinmath.answers.figures import Fit, Verdict
from napkinmath.answers.ranges import allocated_share, headroom_bytes, named_bytes
from napkinmath.catalog.gpus import load_gpus
from napkinmath.config.hardware import Hardware
from napkinmath.config.job_keys import Difference
from napkinmath.ir.ledger import Role
from napkinmath.memory.replay import replay

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.job_keys import JobKeys

# The least limit that a replay passes is at most 0.3% above what could not have been returned (8B
# in 16 bits; seven steps of five models tried).
CLOSE = 0.01
# What ranks share from each stage of ZeRO on (Rajbhandari et al. 2020, section 5).
_SHARED = {
    1: (Role.OPTIMIZER, Role.MASTER),
    2: (Role.GRADIENTS,),
    3: (Role.WEIGHTS, Role.QUANTIZATION, Role.ADAPTERS),
}
_OF_ACTIVATIONS = (Role.ACTIVATIONS, Role.ACTIVATION_GRADIENTS, Role.WORKSPACE, Role.SLACK)


def room_for(hardware: Hardware, world_size: int = 1, *, sure: bool) -> int:
    """Bytes that the allocator may reserve so that a step surely fits, or, not `sure`, beyond which
    it surely does not: what the device offers, less the doubt about allocated bytes."""
    (low, high), share = hardware.usable_range, allocated_share(world_size)
    return int(low / (1 + share) if sure else high / (1 - share))


def verdict_on(e: Estimate, hardware: Hardware) -> Verdict:
    """Fits, does not, or the range straddles what the device offers.

    The allocator returns cached segments before it gives up, so what must fit is not its peak
    reservation but the replay under the device's limit; that is tried with the range's upper end,
    then with its lower end.
    """
    return _verdict(e, hardware, passes)


def as_priced(verdict: Verdict, keys: JobKeys | None) -> Verdict:
    """A verdict over what is priced, where a job file's other keys leave it standing; else
    unknown."""
    against = {Verdict.FITS: Difference.MORE, Verdict.DOES_NOT_FIT: Difference.LESS}.get(verdict)
    undecided = keys is not None and against in keys.changes("memory")
    return Verdict.UNKNOWN if undecided else verdict


def open_verdict(e: Estimate, hardware: Hardware, verdict: Verdict) -> Verdict:
    """`as_priced`, and decided where what no key can save is alone too much, or where the machine's
    own memory is too small; open where that is nearly full."""
    host = host_verdict(e)
    if host is Verdict.DOES_NOT_FIT:
        return host
    less = e.job_keys.less if e.job_keys is not None else None
    if verdict is Verdict.DOES_NOT_FIT and less is not None:
        stage, of_activations = less
        saved = [role for level in range(1, stage + 1) for role in _SHARED[level]]
        saved += _OF_ACTIVATIONS if of_activations else ()
        alone = sum(e.breakdown.values()) - sum(e.breakdown.get(role, 0) for role in saved)
        if alone > room_for(hardware, e.config.parallel.world_size, sure=False):
            return verdict
    found = as_priced(verdict, e.job_keys)
    return host if found is Verdict.FITS else found


def host_verdict(e: Estimate) -> Verdict:
    """Whether the memory of a machine, where it is known, takes its processes. The last tenth is open:
    caches of files, buffers of loaders and of Ray are not priced."""
    if e.cluster is None or not e.cluster.host_bytes:
        return Verdict.FITS
    used = e.host_memory.used
    if used > 1:
        return Verdict.DOES_NOT_FIT
    return Verdict.UNKNOWN if used > 0.9 else Verdict.FITS


def _verdict(e: Estimate, hardware: Hardware, fits: Callable[[Estimate, int], bool]) -> Verdict:
    ranks = e.config.parallel.world_size
    if fits(e, room_for(hardware, ranks, sure=True) - named_bytes(e)):
        return Verdict.FITS
    may_fit = fits(e, room_for(hardware, ranks, sure=False))
    return Verdict.UNKNOWN if may_fit else Verdict.DOES_NOT_FIT


def surely_fits(e: Estimate) -> bool:
    """Whether the verdict is `fits`, for configurations of which many do not: a replay under the
    limit ends where it fails, and what may fit all the same is not asked."""
    hardware = e.hardware
    if hardware is not None and not e.lengths_change:
        limit = room_for(hardware, e.config.parallel.world_size, sure=True) - named_bytes(e)
        found = replay(e.timeline, e.settings.replace(limit_bytes=limit))
        if found.out_of_memory:
            return False
        collects = e.settings.garbage_collection_threshold > 0
        if not (found.num_retries or collects):  # never at the limit: the books without one
            e.__dict__.setdefault("replays", [found])
    return e.verdict is Verdict.FITS


def _passes_quickly(e: Estimate, limit: int) -> bool:
    """`passes`, without another replay where what could not have been returned is far from the
    limit."""
    unreturnable = e.replay.peak_unreturnable
    if abs(limit - unreturnable) > CLOSE * unreturnable:
        return limit >= unreturnable
    return passes(e, limit)


def passes(e: Estimate, limit: int) -> bool:
    """Whether the replay goes through with so many bytes to reserve."""
    if limit >= e.replay.peak_reserved:
        return True
    if limit < e.replay.peak_allocated:
        return False
    return not replay(e.timeline, e.settings.replace(limit_bytes=limit)).out_of_memory


def fits_on(e: Estimate) -> tuple[Fit, ...]:
    """Every catalogued GPU, from small to large, but those that come with a laptop; none where an
    engine takes a share of the one named."""
    found: list[Fit] = []
    known: dict[int, bool] = {}

    def fits(e: Estimate, limit: int) -> bool:
        # what fits so much fits more, and what does not fits no less
        found = next(
            (fit for at, fit in known.items() if (limit >= at if fit else limit <= at)), None
        )
        if found is None:
            found = known[limit] = _passes_quickly(e, limit)
        return found

    if e.config.workload.has_engine and not e.config.workload.rollout_gpus:
        return ()
    for gpu in sorted(load_gpus(), key=lambda g: (g.memory_bytes, g.name)):
        if gpu.is_laptop:
            continue
        hardware = Hardware(gpu=gpu, memory_bytes=gpu.memory_bytes)
        is_own = hardware == e.hardware
        found.append(
            Fit(
                gpu=gpu.name,
                capacity_bytes=gpu.memory_bytes,
                headroom_bytes=headroom_bytes(e) if is_own else _headroom_on(e, hardware),
                verdict=open_verdict(
                    e,
                    hardware,
                    e.priced_verdict if is_own else _verdict(e, hardware, fits),
                ),
            )
        )
    return tuple(found)


def _headroom_on(e: Estimate, hardware: Hardware) -> int | None:
    """Bytes that the device figure leaves of a GPU; None where the step fills it up to its limit,
    which takes a replay of its own."""
    reserved = e.replay.peak_reserved
    if e.replay.peak_allocated <= hardware.usable_bytes < reserved or len(e.replays) > 1:
        return None
    return hardware.memory_bytes - reserved - hardware.context_bytes
