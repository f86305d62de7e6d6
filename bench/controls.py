"""Controls: what must not learn does not.

    python bench/controls.py --seeds 0 1 2

Starts from the base and rsr1 stages of finished runs of the main job (`runs/tiny-<seed>`) and prints
1. learning rate 0: rpr1's evaluation is rsr1's, outcome for outcome, and the log-prob gap stays where it was;
2. advantages 0: rpr1's actor weights are rsr1's, bit for bit;
3. rewards shuffled among a step's attempts: rpr1's paired difference, over the seeds, is not above 0.
The last line is one JSON object.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rsi.evaluate import normal_interval

Outcomes = dict[str, dict[str, list[float]]]


def rpr1(runs: Path, seed: int, label: str, *options: str) -> Path:
    """Run stage rpr1 with `options` from a copy of the seed's base and rsr1 stages; returns the run folder."""
    source, folder = runs / f"tiny-{seed}", runs / f"control-{label}-{seed}"
    if not (folder / "stages" / "1-rsr1").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source / "tasks", folder / "tasks")
        for stage in ("0-base", "1-rsr1"):
            shutil.copytree(source / "stages" / stage, folder / "stages" / stage)
    command = [sys.executable, "-m", "rsi.train", "--stage", "rpr1", "--seed", str(seed)]
    subprocess.run([*command, "--runs", str(runs), "--name", folder.name, *options], check=True)
    return folder


def outcomes(folder: Path, stage: str) -> Outcomes:
    found: Outcomes = json.loads((folder / "stages" / stage / "evaluation.json").read_text(encoding="utf-8"))
    return found


def weights(folder: Path, stage: str) -> str:
    digest: str = json.loads((folder / "stages" / stage / "stage.json").read_text(encoding="utf-8"))["actor_sha256"]
    return digest


def gaps(folder: Path) -> list[float]:
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [found["rollout/logprob_gap"] for found in map(json.loads, lines) if "rollout/logprob_gap" in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    arguments = parser.parse_args()
    runs, first = arguments.runs, arguments.seeds[0]
    short = ("--rpr.steps", "4")
    still = rpr1(runs, first, "lr0", "--rpr.actor-lr", "0", *short)
    same = outcomes(still, "1-rsr1") == outcomes(still, "2-rpr1")
    gap = gaps(still)
    zero = rpr1(runs, first, "zero", "--rpr.control", "zero_advantages", *short)
    unchanged = weights(zero, "1-rsr1") == weights(zero, "2-rpr1")
    paired: dict[str, list[list[float]]] = {}
    for seed in arguments.seeds:
        folder = rpr1(runs, seed, "shuffled", "--rpr.control", "shuffled_rewards")
        before, after = outcomes(folder, "1-rsr1"), outcomes(folder, "2-rpr1")
        for suite, of in after.items():
            differences = [now - then for now, then in zip(of["strict"], before[suite]["strict"], strict=True)]
            paired.setdefault(suite, []).append(differences)
    # The seeds share their evaluation tasks: average a task over the seeds first.
    strata = [[sum(task) / len(task) for task in zip(*of, strict=True)] for of in paired.values()]
    low, high = normal_interval(strata)
    result: dict[str, Any] = {
        "learning_rate_0_same_evaluation": same,
        "learning_rate_0_logprob_gap": [min(gap), max(gap)],
        "zero_advantages_same_weights": unchanged,
        "shuffled_rewards_difference_ci95": [low, high],
    }
    print(f"learning rate 0     evaluation identical: {same}; log-prob gap {min(gap):.2e} to {max(gap):.2e}")
    print(f"zero advantages     weights identical: {unchanged}")
    print(f"shuffled rewards    rpr1 - rsr1 in points, 95 %: [{100 * low:+.1f}, {100 * high:+.1f}]")
    print(json.dumps(result))
    if not (same and unchanged and low <= 0):
        raise SystemExit("a control failed")


if __name__ == "__main__":
    main()
