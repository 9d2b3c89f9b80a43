"""What was asked for and changes no figure of this step, with the reason."""

from __future__ import annotations

from napkinmath.answers.figures import Finding
from napkinmath.base.record import Record
from napkinmath.config.parallel_config import DataParallel

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from napkinmath.answers.estimate import Estimate
    from napkinmath.config.train_config import TrainConfig

_AHEAD = (
    "FSDP 1 gathers a unit while the one before it runs, which is priced with it and without it"
)
_LIMITED = (
    "it is priced as with the limit; without it the host decides how many units are gathered ahead,"
    " so memory may be higher by as many"
)


class Switch(Record):
    """A switch, its value where nothing is said, and why another one may change nothing."""

    flag: str
    default: object
    value: Callable[[TrainConfig], object]
    reset: Callable[[TrainConfig], TrainConfig]
    why: Callable[[TrainConfig], str]


def _parallel(field: str, default: bool, flag: str, why: str) -> Switch:
    def reason(config: TrainConfig) -> str:
        kind = config.parallel.data_parallel
        return why if kind is DataParallel.FSDP1 else f"it is FSDP 1's, and this is {kind.value}"

    return Switch(
        flag=flag,
        default=default,
        value=lambda c: getattr(c.parallel, field),
        reset=lambda c: c.replace(parallel=c.parallel.replace(**{field: default})),
        why=reason,
    )


SWITCHES = (
    _parallel("forward_prefetch", False, "--forward-prefetch", _AHEAD),
    _parallel("backward_prefetch", True, "--no-backward-prefetch", _AHEAD),
    _parallel("limit_all_gathers", True, "--no-limit-all-gathers", _LIMITED),
    Switch(
        flag="--prefetch",
        default=1,
        value=lambda c: c.offload.prefetch,
        reset=lambda c: c.replace(offload=c.offload.replace(prefetch=1)),
        why=lambda c: (
            "no other layer's weights fit in between"
            if c.offload.parameters
            else "it is about weights in host memory: --offload parameters"
        ),
    ),
    Switch(
        flag="--compile",
        default=False,
        value=lambda c: c.compile,
        # torch's overlap of tensor ranks is a pass of the compiler, and not there without it
        reset=lambda c: c.replace(compile=False, parallel=c.parallel.replace(tensor_overlap=None)),
        why=lambda c: "nothing that this model runs is priced as fused",
    ),
)


def idle_switches(e: Estimate) -> list[Finding]:
    """A finding for every switch that is set and leaves peak and time as they are without it, and
    for epochs of a dataset whose rows are not said (a trainer's file never says them)."""
    config, found = e.config, list[Finding]()
    for switch in SWITCHES:
        if switch.value(config) == switch.default or not _is_idle(e, switch.reset(config)):
            continue
        text = f"{switch.flag} changes no figure of this step: {switch.why(config)}"
        found.append(Finding(text=text))
    if e.job_keys is None and config.run.epochs != 1 and not config.run.samples:
        found.append(Finding(text="--epochs says nothing of the run without --samples"))
    return found


def _is_idle(e: Estimate, other: TrainConfig) -> bool:
    saved, ranks = e.compared(other)
    if saved:
        return False
    plain = e.under(other, ranks)
    times = [x.time.seconds if x.time is not None else None for x in (e, plain)]
    return times[0] == times[1]
