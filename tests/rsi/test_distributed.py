"""Several processes: the same training as in one, whatever the layout."""

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


def layout(out: Path, ranks: int, tied: str, tokens: int) -> dict[str, Any]:
    out.mkdir()
    done = torchrun(ranks, str(PROGRAMS / "layout.py"), str(out), tied, str(tokens))
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = torch.load(out / "result.pt", weights_only=True)
    return found


@pytest.mark.parametrize("tied", ["tied", "untied"])
def test_ranks_and_micro_batches_change_nothing(tmp_path: Path, tied: str) -> None:
    one = layout(tmp_path / "one", 1, tied, 512)
    # 64 tokens: most attempts are a micro-batch of their own, and some are longer than that.
    layouts = (("split", 1, 64), ("two", 2, 512), ("three", 3, 100_000)) if tied == "tied" else (("two", 2, 64),)
    for name, ranks, tokens in layouts:
        other = layout(tmp_path / name, ranks, tied, tokens)
        for network in ("actor", "critic"):
            pairs = [(one[network][key], other[network][key]) for key in one[network]]
            assert len(pairs) > 10 and one[network].keys() == other[network].keys()
            for before, after in pairs:
                assert torch.linalg.vector_norm(before - after) <= 1e-5 * torch.linalg.vector_norm(before), name
            whole = [torch.cat([pair[side].flatten() for pair in pairs]).double() for side in (0, 1)]
            assert torch.linalg.vector_norm(whole[0] - whole[1]) <= 1e-6 * torch.linalg.vector_norm(whole[0]), name
        for before, after in zip(one["metrics"], other["metrics"], strict=True):
            assert before.keys() == after.keys()
            for key in before:
                assert after[key] == pytest.approx(before[key], rel=1e-4, abs=1e-6), (name, key)
