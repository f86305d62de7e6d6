"""A real checkpoint through the loop: SmolLM2-135M, one task a suite, one rsr round and one rpr step.

    python bench/real_model.py --threads 2

Success is not expected; every part must work: base evaluation, discovery, runbooks, re-execution (where anything was
solved), critic warm-up, calibration and one joint PPO step, folders out. Where nothing was kept, rsr has nothing to
train on: one supervised update is then made here, on an attempt of the run. The log-prob gap between sampler and
trainer must stay under 1e-3 in float32. The last line is one JSON object.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import smollm2
import torch

from rsi import ppo
from rsi.batch import collate
from rsi.chat import Chat
from rsi.trajectory import Trajectory, read
from rsi.weights import load_actor, load_critic, load_tokenizer

GAP = 1e-3
OPTIONS = (
    "--stage rpr1 --train-tasks 1 --evaluate.tasks 1 --evaluate.no-greedy --rsr.tasks 1 --rsr.executions 1 "
    "--rpr.steps 1 1 --rpr.attempts 4 --rpr.warmup-batch 1 --rpr.calibration-steps 1 --rpr.critic-only-epochs 1 "
    "--rpr.actor-lr 1e-6 --rpr.critic-lr 1e-5 --rpr.kl-coefficient 0 --rollout.slots 8 --rollout.prompt-style full "
    "--rollout.max-length 1024 --rollout.max-turns 3 --rollout.max-turn-tokens 48 --name real"
).split()


def run(runs: Path, threads: int) -> float:
    """The stages base, rsr1 and rpr1 as a user starts them; seconds."""
    command = [sys.executable, "-m", "rsi.train", "--init", str(smollm2.folder()), "--runs", str(runs), *OPTIONS]
    begun = time.perf_counter()
    subprocess.run([*command, "--threads", str(threads), "--rollout.threads", str(threads)], check=True)
    return time.perf_counter() - begun


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def supervised_update(folder: Path, record: Trajectory) -> tuple[float, float]:
    """Loss of one attempt before and after a step on it."""
    actor = load_actor(folder)
    chat = Chat(load_tokenizer(folder), actor.config)
    batch = collate([record], [0], chat.pad)
    optimizer = torch.optim.AdamW(actor.parameters(), 1e-5, weight_decay=0.0)
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        loss, _ = ppo.supervised_loss(ppo.action_logprobs(actor, batch)[0], None, batch.action_count)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses[0], losses[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as runs:
        seconds = run(Path(runs), arguments.threads)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
        folder = Path(runs) / "real"
        found = metrics(folder)
        gaps = [line["rollout/logprob_gap_max"] for line in found if "rollout/logprob_gap_max" in line]
        joint = [line for line in found if "actor/pg_loss" in line]
        attempts = [record for path in sorted(folder.glob("trajectories/*/*.jsonl")) for record in read(path)]
        actor = folder / "stages" / "2-rpr1" / "actor"
        load_critic(actor.with_name("critic"))
        before, after = supervised_update(actor, max(attempts, key=lambda record: sum(record.action)))
    problems = {
        f"the log-prob gap is {max(gaps, default=float('nan'))}": not gaps or not max(gaps) < GAP,
        f"{len(joint)} joint steps were logged": len(joint) != 1,
        f"the supervised loss went from {before} to {after}": not after < before,
        "the machine failed attempts": any(record.end == "infra_error" for record in attempts),
    }
    result = {
        "model": "smollm2-135m",
        "seconds": seconds,
        "peak_gb": peak / 1e9,
        "attempts": len(attempts),
        "strict": sum(record.strict for record in attempts),
        "logprob_gap_max": max(gaps, default=None),
        "supervised_loss": [before, after],
        "threads": arguments.threads,
    }
    print(json.dumps(result))
    failed = [problem for problem, holds in problems.items() if holds]
    if failed:
        raise SystemExit("; ".join(failed))


if __name__ == "__main__":
    main()
