"""priced: the estimates that options ask for, one for each GPU they name."""

from __future__ import annotations

from napkinmath.estimate import estimate
from napkinmath.inputs.asked import model_and_training, refuse_idle
from napkinmath.inputs.hardware_options import (
    allocator_text,
    calibration_on,
    cluster_of,
    machines,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

    from napkinmath.answers.estimate import Estimate


def priced(options: Mapping[str, object], notes: list[str]) -> list[Estimate]:
    """One estimate, or one for each GPU named; `notes` receives what was decided for the user.
    Raises InputError."""
    spec, config = model_and_training(options, notes)
    allocator = allocator_text(options)
    found: list[Estimate] = []
    for machine in machines(options):
        calibration = calibration_on(machine, options, notes)
        found.append(
            estimate(
                spec,
                config,
                hardware=cluster_of(machine, options),
                allocator=allocator,
                calibration=calibration,
            )
        )
    refuse_idle(found[0], options)
    return found
