"""Several processes: the same training as in one, whatever the layout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

PROGRAMS = Path(__file__).parent / "programs"


def torchrun(ranks: int, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program on `ranks` processes of this machine."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*launch, *command], capture_output=True, text=True, check=False, timeout=280, env=os.environ | environment
    )


def layout(out: Path, ranks: int, tied: str, *options: str) -> dict[str, Any]:
    out.mkdir()
    done = torchrun(ranks, str(PROGRAMS / "layout.py"), str(out), tied, *options)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = torch.load(out / "result.pt", weights_only=True)
    return found


# Of 64 tokens most attempts are a micro-batch of their own, and some are longer than that.
SPLIT, ALL = ("--micro-batch-tokens", "64"), ("--micro-batch-tokens", "100000")


@pytest.mark.parametrize(
    ("tied", "layouts"),
    [
        ("tied", [(1, *SPLIT, "--recompute"), (2, *SPLIT), (3, *ALL)]),
        ("untied", [(2, "--recompute", "--offload")]),
    ],
)
def test_ranks_and_micro_batches_change_nothing(tmp_path: Path, tied: str, layouts: list[tuple[int, str]]) -> None:
    one = layout(tmp_path / "one", 1, tied)
    for number, (ranks, *options) in enumerate(layouts):
        other = layout(tmp_path / str(number), ranks, tied, *options)
        for network in ("actor", "critic"):
            pairs = [(one[network][key], other[network][key]) for key in one[network]]
            assert len(pairs) > 10 and one[network].keys() == other[network].keys()
            for before, after in pairs:
                assert torch.linalg.vector_norm(before - after) <= 1e-5 * torch.linalg.vector_norm(before), number
            whole = [torch.cat([pair[side].flatten() for pair in pairs]).double() for side in (0, 1)]
            assert torch.linalg.vector_norm(whole[0] - whole[1]) <= 1e-6 * torch.linalg.vector_norm(whole[0]), number
        for before, after in zip(one["metrics"], other["metrics"], strict=True):
            assert before.keys() == after.keys()
            for key in before:
                assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-6), (number, key)


def test_the_command_runs_on_two_ranks_with_more_attempts_than_slots(tmp_path: Path) -> None:
    options = ["--preset", "smoke", "--runs", str(tmp_path), "--pretrain.steps", "20", "--rollout.slots", "4"]
    options += ["--rpr.steps", "1", "--rpr.attempts", "6", "--train-tasks", "8", "--rsr.tasks", "4"]
    done = torchrun(2, "-m", "rsi.train", *options, "--stage", "rpr1", "--evaluate.tasks", "3")
    assert done.returncode == 0, done.stderr
    records = json.loads((tmp_path / "smoke-0" / "stages.json").read_text())
    assert [record["stage"] for record in records] == ["base", "rsr1", "rpr1"]
    attempts = sorted((tmp_path / "smoke-0" / "trajectories" / "base").glob("evaluation.*.jsonl"))
    assert [path.name for path in attempts] == ["evaluation.0.jsonl", "evaluation.1.jsonl"]
    assert sum(len(path.read_text().splitlines()) for path in attempts) == 12
    again = torchrun(2, "-m", "rsi.train", *options, "--rpr.gamma", "0.5")
    assert again.returncode == 1 and again.stderr.count("holds a run with another configuration") == 1
