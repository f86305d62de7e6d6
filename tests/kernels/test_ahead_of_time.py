"""What every kernel becomes on GPUs that are not here: it fits, does not spill, and reads 128 bits at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# How many arrays each reads as long as its loop; each of them 128 bits a thread where alignment allows.
KERNELS = {
    "_aggregate_kernel": 2, "_apply_kernel": 2, "_accumulate_kernel": 1, "_differentiate_kernel": 1, "_ppo_kernel": 3,
    "_value_kernel": 2,
}  # fmt: skip
TILED = {"_accumulate_kernel", "_differentiate_kernel"}  # never see more than a tile, whose size fits in 32 bits


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_compiles_within_the_target(target):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("ahead_of_time.py")), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert {row["kernel"] for row in report["kernels"]} == set(KERNELS)
    for row in report["kernels"]:
        assert row["shared"] <= report["limit"] and row["spilled"] == 0 and not row["float64"], row
        assert row["warps"] * (64 if target.startswith("gfx") else 32) <= 1024, row  # threads of a block
    for name, arrays in KERNELS.items():
        assert max(row["wide_loads"] for row in report["kernels"] if row["kernel"] == name) >= arrays, name
        assert any("'i64'" in row["signature"] for row in report["kernels"] if row["kernel"] == name) or name in TILED
    assert set(report["variants"]) == set(KERNELS) and max(report["variants"].values()) <= 4, report["variants"]
