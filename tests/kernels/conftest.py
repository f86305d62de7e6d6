"""Kernels run on the GPU where there is one, else in Triton's interpreter; unwritten memory is NaN in every test here.

The interpreter checks arithmetic, addressing and masks; not races, alignment, bfloat16 arithmetic or speed.
"""

import os
import sys

import pytest
import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules, "triton reads TRITON_INTERPRET once, when it is first imported"
    os.environ["TRITON_INTERPRET"] = "1"

# Some GPU containers turn TensorFloat-32 on from outside; the tests' tolerances are float32's.
torch.set_float32_matmul_precision("highest")

# `with torch.device(...)` lists torch's constructors once, at its first use: before one of them is replaced below.
with torch.device("cpu"):
    torch.empty(0)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` and its kin give NaN, so that whatever a kernel does not write, or should not read, shows up."""

    def poison(make):  # type: ignore[no-untyped-def]
        def poisoned(*arguments, **options):  # type: ignore[no-untyped-def]
            made = make(*arguments, **options)
            if made.is_floating_point() and not torch.compiler.is_compiling():
                made.fill_(float("nan"))
            return made

        return poisoned

    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poison(getattr(owner, name)))
