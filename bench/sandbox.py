"""Speed of both sandbox backends: one command, one trial, and verified trials a minute at the best concurrency.

    python bench/sandbox.py [--backends docker local] [--seconds 15] [--suite core|swr]

A trial is: start, the oracle's solution, protected verification, teardown. Every trial must be judged solved, or
nothing is printed. The busy share of the machine's cores tells what bounds the rate. The last line is JSON.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rsi_sandbox import Backend, SandboxError, Task, load_task, open_backend, verify

from rsi.tiny.tasks import draw, write_task

LEVELS = {"docker": (1, 2, 4, 8, 12), "local": (1, 2, 4, 8)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", choices=sorted(LEVELS), default=sorted(LEVELS))
    parser.add_argument("--seconds", type=float, default=15.0, help="measured at each concurrency")
    parser.add_argument("--suite", choices=("core", "swr"), default="core", help="whose tests run (swr runs scripts)")
    options = parser.parse_args()
    figures: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        family = {"core": "order", "swr": "fields"}[options.suite]
        spec = draw(family, options.suite, random.Random(0), "train")
        write_task(spec, Path(folder) / "task")
        task = load_task(Path(folder) / "task")
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before; task {task.name}")
        for kind in options.backends:
            try:
                backend = open_backend(kind, "bench", starts=4 if kind == "docker" else 2)
            except SandboxError as error:
                print(f"{kind}: not measured: {error}")
                continue
            with backend:
                figures[kind] = measure(backend, task, spec.solution, options.seconds)
    print(json.dumps(figures))


def measure(backend: Backend, task: Task, solution: str, seconds: float) -> dict[str, float]:
    """Figures of one backend."""

    def trial() -> float:
        begun = time.perf_counter()
        sandbox = backend.start(task)
        sandbox.run(solution)
        assert verify(backend, task, sandbox).strict, "the oracle must pass"
        return time.perf_counter() - begun

    trial()
    with backend.start(task) as sandbox:
        builtin = statistics.median(timed(lambda: sandbox.run("true")) for _ in range(200))
        forked = statistics.median(timed(lambda: sandbox.run("/bin/ls")) for _ in range(200))
    alone = statistics.median(trial() for _ in range(15))
    print(f"{backend.kind}: a builtin {1000 * builtin:.2f} ms, a program {1000 * forked:.2f} ms, a trial {alone:.3f} s")
    rates = {}
    for level in LEVELS[backend.kind]:
        begun, busy = time.monotonic(), busy_seconds()
        with ThreadPoolExecutor(level) as pool:
            done = sum(pool.map(lambda end: repeat(trial, end), [begun + seconds] * level))
        rate = rates[level] = 60 * done / (time.monotonic() - begun)
        share = (busy_seconds() - busy) / (time.monotonic() - begun) / (os.cpu_count() or 1)
        cost = (busy_seconds() - busy) / done
        print(f"  {level:2} at once: {rate:6.0f} a minute; cores {share:4.0%} busy, {1000 * cost:.0f} ms of them each")
    return {
        "command_ms": round(1000 * forked, 2),
        "trial_s": round(alone, 3),
        "trials_per_min": round(max(rates.values()), 1),
        "best_concurrency": max(rates, key=lambda level: rates[level]),
    }


def repeat(action: Callable[[], object], deadline: float) -> int:
    """How often the action was done until the deadline."""
    count = 0
    while time.monotonic() < deadline:
        action()
        count += 1
    return count


def timed(action: Callable[[], object]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def busy_seconds() -> float:
    """Seconds all cores together have worked since boot."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / 100


if __name__ == "__main__":
    main()
