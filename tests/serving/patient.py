"""A server whose answers end by what they take of a processor alone: a machine that does much else is
not what is tested."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from napkinmath.serving import workers
from napkinmath.serving.server import Server

PATIENCE_S = 300  # for the turn and the clock of an answer


@contextmanager
def patient_server() -> Iterator[Server]:
    """Runs on a free port until it is left."""
    running = Server(0)
    for lane in (running.workers.quick, running.workers.later, running.workers.long):
        lane._wait = PATIENCE_S
    threading.Thread(target=running.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(workers, "SLOWDOWN", PATIENCE_S / workers.SECONDS_TO_MOVE)
        yield running
    running.shutdown()
    running.server_close()
