"""What every kernel becomes on GPUs that are not here: it fits, does not spill, and reads 128 bits at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KERNELS = {
    "_aggregate_kernel", "_apply_kernel", "_accumulate_kernel", "_differentiate_kernel", "_ppo_kernel", "_value_kernel",
}  # fmt: skip


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_every_kernel_compiles_within_the_target(target):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("ahead_of_time.py")), target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert {row["kernel"] for row in report["kernels"]} == KERNELS
    for row in report["kernels"]:
        assert row["shared"] <= report["limit"] and row["spilled"] == 0 and not row["float64"], row
    for name in KERNELS:
        assert any(row["wide_loads"] for row in report["kernels"] if row["kernel"] == name), name
    assert set(report["variants"]) == KERNELS and max(report["variants"].values()) <= 4, report["variants"]
