"""What trains in these tests trains on the CPU, GPU or not: its numbers are compared bit for bit.

`test_distributed` alone asks for the GPUs, by name.
"""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def without_gpus() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        yield
