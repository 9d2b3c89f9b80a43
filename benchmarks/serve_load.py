"""How the page's server holds up: many users at once, each moving sliders and waiting for the figures.

    python benchmarks/serve_load.py [--users 200] [--moves 6] [--pause 2.0]

Users share some starting points, as people do, and wander from there; a move is one POST to /api/estimate. The server runs in a process
of its own. Prints the median and the 95th percentile of the waiting time; the goal is 300 ms on two cores.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import random
import threading
import time
from typing import Any

STARTS = [
    ("llama-3.1-8b", "qlora", "RTX 4090"),
    ("llama-7b", "qlora", "RTX 4090"),
    ("qwen3-8b", "lora", "A100-SXM4-80GB"),
    ("tinyllama-1.1b", "full", "RTX 3090"),
]


def serve(port: Any) -> None:
    from napkinmath.serving.server import Server

    server = Server(0)
    port.put(server.server_port)
    server.serve_forever()


def user(port: int, seed: int, moves: int, pause: float, waits: list[float], failures: list[str]) -> None:
    chance = random.Random(seed)
    model, method, gpu = STARTS[seed % len(STARTS)]
    bs, ctx = 2, 11.0
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    time.sleep(chance.random() * pause)
    for _ in range(moves):
        bs, ctx = (
            min(16, max(1, bs * chance.choice((1, 2)) // chance.choice((1, 1, 2)))),
            min(14.0, max(9.0, ctx + chance.choice((-1, 0, 1)))),
        )
        body = json.dumps({"model": model, "method": method, "gpu": gpu, "bs": bs, "ctx": round(2**ctx)})
        started = time.perf_counter()
        try:
            connection.request("POST", "/api/estimate", body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                failures.append(str(response.status))
        except OSError as error:
            failures.append(type(error).__name__)
        waits.append(time.perf_counter() - started)
        time.sleep(pause * (0.5 + chance.random()))
    connection.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--moves", type=int, default=6)
    parser.add_argument("--pause", type=float, default=2.0)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    found: Any = context.Queue()
    server = context.Process(target=serve, args=(found,), daemon=True)
    server.start()
    port = found.get()
    waits: list[float] = []
    failures: list[str] = []
    users = [threading.Thread(target=user, args=(port, i, options.moves, options.pause, waits, failures)) for i in range(options.users)]
    started = time.perf_counter()
    for one in users:
        one.start()
    for one in users:
        one.join()
    waits.sort()
    seconds = time.perf_counter() - started
    print(f"{options.users} users, {len(waits)} moves in {seconds:.1f} s ({len(waits) / seconds:.0f}/s), {len(failures)} failed")
    print(
        f"wait: median {1e3 * waits[len(waits) // 2]:.0f} ms, 95th percentile {1e3 * waits[int(0.95 * len(waits))]:.0f} ms, longest {1e3 * waits[-1]:.0f} ms"
    )
    server.terminate()


if __name__ == "__main__":
    main()
