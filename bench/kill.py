"""Kill a run again and again, at random moments, and see that it ends as if nothing had happened.

    python bench/kill.py --preset smoke --kills 50
    python bench/kill.py --preset smoke --kills 50 --ranks 2

Starts the same command until it finishes, each time killing (SIGKILL) one rank or all of them after a random
while, and begins another run when one is done, until there were enough kills. Every finished run must equal an
uninterrupted one in stage records, metrics, attempts and weights, the clock's values apart, and leave no process
behind. The last line is one JSON object; the exit code is 1 where anything differs or a run fails.
"""

import argparse
import contextlib
import ctypes
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from rich.progress import track

PR_SET_CHILD_SUBREAPER = 36
DEATH = 120  # seconds that torchrun has to end after one of its ranks


def command(arguments: argparse.Namespace, name: str) -> list[str]:
    """The run as a user starts it."""
    run = ["-m", "rsi.train", "--preset", arguments.preset, "--runs", str(arguments.runs), "--name", name]
    run += ["--save-every", "2"]
    if arguments.ranks == 1:
        return [sys.executable, *run]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    return [sys.executable, *launch, *run]


def descendants(root: int) -> list[int]:
    """Every live process below `root`, parents first."""
    children: dict[int, list[int]] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(status.parent.name))
    found = list(children.get(root, ()))
    for process in found:
        found += children.get(process, ())
    return found


def trainers(root: int) -> list[int]:
    """The processes below and including `root` that train."""
    found = []
    for process in [root, *descendants(root)]:
        try:
            words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"rsi.train" in words and b"torch.distributed.run" not in words:
            found.append(process)
    return found


def kill_once(arguments: argparse.Namespace, name: str, moment: float | None) -> bool:
    """Start the run and kill it after `moment` seconds (None: never); whether there was still something to kill."""
    process = subprocess.Popen(
        command(arguments, name), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        if process.wait(moment):
            raise RuntimeError(f"{name} failed with {process.returncode} without having been killed: see its log.txt")
        return False
    except subprocess.TimeoutExpired:
        ranks, rng = trainers(process.pid), random.Random(moment)
    for victim in [rng.choice(ranks)] if rng.random() < 0.5 and ranks else [process.pid, *ranks]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
    process.wait(DEATH)
    return True


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run leaves and that must not depend on when it was killed."""
    stages = json.loads((folder / "stages.json").read_text(encoding="utf-8"))
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    attempts: dict[str, list[str]] = {}
    for path in sorted((folder / "trajectories").rglob("*.jsonl")):
        kind = f"{path.parent.name}/{path.name.partition('.')[0]}"
        for line in path.read_text(encoding="utf-8").splitlines():
            record = {name: value for name, value in json.loads(line).items() if name != "seconds"}
            attempts.setdefault(kind, []).append(json.dumps(record))
    others = [*(folder / "runbooks").glob("*"), *(folder / "stages").glob("*/kept.jsonl")]
    others += (folder / "stages").glob("*/evaluation.json")
    kept = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(others)}
    for name, text in kept.items():
        kept[name] = re.sub(r'"seconds":[^,}]*', "", text)
    return {
        "files": kept,
        "stages": [{name: value for name, value in record.items() if name != "seconds"} for record in stages],
        "metrics": [{name: value for name, value in step.items() if "timing_s" not in name} for step in steps],
        "attempts": {kind: sorted(lines) for kind, lines in attempts.items()},
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [name for name in expected if found[name] != expected[name]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="smoke")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--between", type=float, nargs=2, help="seconds before a kill; default: 6, and a third of a run, at least 30"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/kill"))
    parser.add_argument("--reference", type=Path, help="a finished run of the same command, never killed")
    arguments = parser.parse_args()
    reference = arguments.reference or arguments.runs / "reference"
    for old in arguments.runs.glob("killed-*"):
        shutil.rmtree(old)
    if not arguments.reference:
        shutil.rmtree(reference, ignore_errors=True)
        subprocess.run(command(arguments, "reference"), check=True, stdout=subprocess.DEVNULL)
    expected, begun = outcome(reference), time.monotonic()
    seconds = sum(stage["seconds"] for stage in json.loads((reference / "stages.json").read_text(encoding="utf-8")))
    between, rng = arguments.between or (6.0, max(30.0, seconds / 3)), random.Random(arguments.seed)
    moments = [rng.uniform(*between) for _ in range(arguments.kills)]
    # What outlives its parent becomes this process's child, so that nothing left behind is overlooked.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    kills, finished, wrong = 0, 0, Counter[str]()
    try:
        for moment in track([*moments, None], "kills", disable=not sys.stdout.isatty()):
            while not kill_once(arguments, name := f"killed-{finished}", moment):
                wrong.update(differences(outcome(arguments.runs / name), expected))
                finished += 1
                if moment is None:
                    break
            else:
                kills += 1
    except (RuntimeError, subprocess.TimeoutExpired) as problem:
        wrong[str(problem)] += 1
    deadline = time.monotonic() + 10
    while (left := descendants(os.getpid())) and time.monotonic() < deadline:
        time.sleep(0.1)
    result = {
        "preset": arguments.preset, "ranks": arguments.ranks, "kills": kills, "runs": finished,
        "different": dict(wrong), "processes_left": len(left), "seconds": round(time.monotonic() - begun),
    }  # fmt: skip
    print(json.dumps(result))
    raise SystemExit(bool(wrong or left))


if __name__ == "__main__":
    main()
