"""The package can be copied as a folder, under another name, into another project."""

import shutil
import subprocess
import sys
from pathlib import Path

import rsi_kernels

PROGRAM = """
import sys
import torch
from embedded import tb_gae
row = torch.ones(1, 3)
advantages, _ = tb_gae(row, row, row.bool(), torch.zeros(1, 3, dtype=torch.int64))
assert advantages.tolist() == [[2.0, 1.0, 0.0]], advantages
assert not {"rsi", "rsi_kernels", "rsi_sandbox"} & set(sys.modules)
import rsi_kernels
assert torch.equal(rsi_kernels.tb_gae(row, row, row.bool(), torch.zeros(1, 3, dtype=torch.int64))[0], advantages)
assert hasattr(torch.ops.embedded, "tb_gae") and hasattr(torch.ops.rsi_kernels, "tb_gae")
"""


def test_a_copied_folder_works(tmp_path: Path) -> None:
    shutil.copytree(Path(rsi_kernels.__file__).parent, tmp_path / "embedded")
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stderr
