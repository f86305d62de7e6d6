"""The package can be copied as a folder, under another name, into another project, with triton installed or not."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rsi_kernels

PACKAGE = Path(rsi_kernels.__file__).parent
ALONE = """
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
WITHOUT_TRITON = "sys.modules['triton'] = None\nimport importlib.util\nfind = importlib.util.find_spec\n"
WITHOUT_TRITON += "importlib.util.find_spec = lambda name, *rest: None if name == 'triton' else find(name, *rest)\n"
USE = """
from types import SimpleNamespace
batch = SimpleNamespace(
    action=torch.arange(20).view(2, 10) % 3 > 0, turn=torch.arange(20).view(2, 10) // 4,
    rewards=torch.rand(2, 10), values=torch.rand(2, 10), old_logprob=-torch.rand(2, 10), global_action_tokens=13,
    ids=torch.arange(20).view(2, 10) % 7,
)
states = [torch.randn(13, 4, requires_grad=True) for _ in range(2)]
head, value_head = torch.nn.Linear(4, 7, bias=False), torch.nn.Linear(4, 1)
logged = ppo_update(states[0], head, states[1], value_head, batch)
assert all(bool(x.isfinite()) for x in logged.values())
assert all(bool(x.grad.any()) for x in (*states, head.weight, value_head.weight, value_head.bias))
assert not {"rsi", "rsi_kernels", "rsi_sandbox"} & set(sys.modules)
"""


def run(program: str, folder: Path) -> None:
    shutil.copytree(PACKAGE, folder / "embedded")
    done = subprocess.run([sys.executable, "-c", "import sys\n" + program], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stderr


def test_a_copied_folder_works_beside_an_installed_package(tmp_path: Path) -> None:
    run(ALONE, tmp_path)


@pytest.mark.parametrize("before", ["", WITHOUT_TRITON], ids=["triton", "no triton"])
def test_the_example_of_the_readme_runs(tmp_path: Path, before: str) -> None:
    """The advice of `kernels/README.md`, word for word, with the folder's own name for the package's."""
    example = re.search(r"```python\n(.*?)```", (PACKAGE.parent / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert example is not None
    run(before + example[1].replace("from rsi_kernels", "from embedded") + USE, tmp_path)
