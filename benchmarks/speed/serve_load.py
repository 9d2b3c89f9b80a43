"""How the page's server holds up: many users at once, each moving sliders and waiting for what the
page then asks.

    python benchmarks/speed/serve_load.py [--users 200] [--moves 6] [--pause 4] [--own-pause 12] [--rounds 5] [--out FILE]

A move is one POST to /api/estimate: what the sliders wait for. Half a second after it, where the
user has not moved again, the page asks for the command, the details and the limits, and drops what
it still waits for at the next move; so do these users. "shared": everybody starts from one of some
popular models and moves along the page's slider positions, so that answers are met again. "own": no
two moves of any two users are alike, and every answer is priced anew: two cores price some 40 a
second, which is what bounds the users. The server is `estimate serve` with its defaults, in
processes of its own; this program uses one more. "alone" is one user whose moves are all new. The
goals: a 95th percentile of 300 ms on two cores, and 100 ms for one who is alone.

"together": all users ask at the same moment, each on a connection of its own, for the page's script
and then for an estimate, in turns against one server. Its estimates are met again after an unmeasured
round, those of "together_new" are priced anew. `estimate_over_file` is the ratio of the 95th
percentiles; the goal is 5 for "together". "together_new" is bound by the processors' pricing, and what
would wait longer than the server's limit is refused with 503: refusals are counted in `failures`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

STARTS = [
    ("llama-3.1-8b", "qlora", "RTX 4090"),
    ("llama-7b", "qlora", "RTX 4090"),
    ("qwen3-8b", "lora", "A100-SXM4-80GB"),
    ("tinyllama-1.1b", "full", "RTX 3090"),
]
QUIET_S = 0.5  # as the page waits before it asks for more
FOLLOWING = ("command", "details", "limits")
Waits = dict[str, list[float]]


async def post(port: int, path: str, options: dict[str, Any]) -> int:
    """The status of one answer on a connection of its own."""
    body = json.dumps(options).encode()
    head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return await request(port, f"POST /api/{path}", head, body)


async def request(port: int, what: str, head: str = "", body: bytes = b"") -> int:
    """The status of one request on a connection of its own."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        rest = f" HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n{head}\r\n"
        writer.write((what + rest).encode() + body)
        answer = await reader.read(-1)
        return int(answer.split(b" ", 2)[1])
    finally:
        writer.close()


class Load:
    """What all users together waited for."""

    def __init__(self, port: int, *, own: bool) -> None:
        self.port, self.own = port, own
        self.waits: Waits = {name: [] for name in ("file", "estimate", *FOLLOWING)}
        self.failures: dict[str, int] = {}
        self.dropped = 0
        self.lengths = itertools.count(1024)

    async def asked(self, path: str, options: dict[str, Any]) -> None:
        await self.waited(path, post(self.port, path, options))

    async def waited(self, path: str, answer: Coroutine[Any, Any, int]) -> None:
        started = time.perf_counter()
        try:
            status = str(await answer)
        except (OSError, IndexError, ValueError) as error:
            status = type(error).__name__
        self.waits[path].append(time.perf_counter() - started)
        if status != "200":
            self.failures[status] = self.failures.get(status, 0) + 1

    async def follow(self, options: dict[str, Any]) -> None:
        try:
            await asyncio.sleep(QUIET_S)
            for path in FOLLOWING:
                await self.asked(path, options)
        except asyncio.CancelledError:
            self.dropped += 1

    async def user(self, seed: int, moves: int, pause: float) -> None:
        chance = random.Random(seed)
        model, method, gpu = STARTS[seed % len(STARTS)]
        bs, ctx, following = 2.0, 11.0, None
        await asyncio.sleep(chance.random() * pause)
        for _ in range(moves):
            bs = min(3.0, max(0.0, bs + chance.choice((-1, 0, 1))))
            ctx = min(13.0, max(9.0, ctx + chance.choice((-0.5, -0.25, 0.25, 0.5))))
            length = next(self.lengths) if self.own else round(2**ctx / 32) * 32
            options = {
                "model": model,
                "method": method,
                "gpu": gpu,
                "bs": round(2**bs),
                "ctx": length,
            }
            if following is not None:
                following.cancel()
            await self.asked("estimate", options)
            following = asyncio.create_task(self.follow(options))
            await asyncio.sleep(pause * (0.5 + chance.random()))
        if following is not None:
            following.cancel()

    async def everybody(self, users: int, moves: int, pause: float) -> float:
        started = time.perf_counter()
        await asyncio.gather(*(self.user(i, moves, pause) for i in range(users)))
        return time.perf_counter() - started

    async def together(self, users: int, rounds: int) -> None:
        """Everybody at once, in turns for a file and for an estimate."""
        for turn in range(rounds + 1):
            if turn == 1:  # the first was to get warm
                self.waits = {"file": [], "estimate": []}
            file = (self.waited("file", request(self.port, "GET /page.js")) for _ in range(users))
            await asyncio.gather(*file)
            await asyncio.gather(*(self.asked("estimate", self.met(i)) for i in range(users)))

    def met(self, user: int) -> dict[str, Any]:
        """Options that somebody asked for before, or, where users are on their own, nobody."""
        model, method, gpu = STARTS[user % len(STARTS)]
        length = next(self.lengths) if self.own else 1024 + 512 * (user // len(STARTS) % 4)
        return {"model": model, "method": method, "gpu": gpu, "bs": 2, "ctx": length}

    def compared(self) -> dict[str, Any]:
        """Both waits of `together`, and the estimate's over the file's."""
        found = {path: quantiles(self.waits[path]) for path in ("file", "estimate")}
        ratio = found["estimate"]["p95_ms"] / found["file"]["p95_ms"]
        return {"failures": self.failures, **found, "estimate_over_file": round(ratio, 2)}

    def summary(self, seconds: float) -> dict[str, Any]:
        return {
            "moves_per_s": round(len(self.waits["estimate"]) / seconds, 1),
            "failures": self.failures,
            "follow_ups_dropped": self.dropped,
            **{path: quantiles(self.waits[path]) for path in ("estimate", *FOLLOWING)},
        }


def quantiles(waits: list[float]) -> dict[str, Any]:
    """Milliseconds of the middle, of 95 of 100 and of all; the count alone where none came."""
    if not waits:
        return {"count": 0}
    ordered = sorted(waits)
    picked = {
        "median_ms": ordered[len(ordered) // 2],
        "p95_ms": ordered[int(0.95 * len(ordered))],
        "longest_ms": ordered[-1],
    }
    return {"count": len(waits), **{name: round(1e3 * value, 1) for name, value in picked.items()}}


@contextmanager
def served() -> Iterator[int]:
    """The port of a fresh server."""
    command = [sys.executable, "-m", "napkinmath", "serve", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().partition("127.0.0.1:")[2].partition("/")[0])
        time.sleep(2)  # its workers start
        try:
            yield port
        finally:
            server.terminate()


def measured(users: int, moves: int, pause: float, *, own: bool) -> dict[str, Any]:
    """One run of users who move and pause."""
    with served() as port:
        load = Load(port, own=own)
        return load.summary(asyncio.run(load.everybody(users, moves, pause)))


def measured_together(users: int, rounds: int, *, own: bool) -> dict[str, Any]:
    """One run of users who ask at the same moment."""
    with served() as port:
        load = Load(port, own=own)
        asyncio.run(load.together(users, rounds))
        return load.compared()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--moves", type=int, default=6)
    parser.add_argument(
        "--pause", type=float, default=4.0, help="mean seconds between a user's moves, shared"
    )
    parser.add_argument("--own-pause", type=float, default=12.0, help="the same, own")
    parser.add_argument("--rounds", type=int, default=5, help="of all users at once")
    parser.add_argument("--out")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_before": os.getloadavg()[0],
        "users": options.users,
        "moves_each": options.moves,
    }
    result["alone"] = {"mean_pause_s": 0.5, **measured(1, 40, 0.5, own=True)}
    for name, pause in (("shared", options.pause), ("own", options.own_pause)):
        result[name] = {
            "mean_pause_s": pause,
            **measured(options.users, options.moves, pause, own=name == "own"),
        }
    for name in ("together", "together_new"):
        result[name] = measured_together(options.users, options.rounds, own=name != "together")
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        with open(options.out, "w", encoding="utf-8") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
