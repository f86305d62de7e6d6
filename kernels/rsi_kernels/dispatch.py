"""Which implementation runs, under which name ops are registered, and what every Triton launch needs."""

import os
import warnings
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# A copied folder registers under its own name, so that it and an installed package can be loaded together.
NAMESPACE = __name__.rpartition(".")[0].replace(".", "_") or "rsi_kernels"

# The ahead-of-time compile check runs the launchers on CPU tensors, with a driver that only compiles.
compile_only = False


def use_triton(impl: str, tensor: Tensor) -> bool:
    """Whether `impl` ("auto", "triton" or "torch") means the Triton kernels for an op on `tensor`.

    "auto" takes them for CUDA tensors where triton is installed, float64 apart, which is for the torch path.

    Raises:
        ValueError: an unknown `impl`, or "triton" where it cannot run.
    """
    if impl == "torch":
        return False
    if impl not in ("auto", "triton"):
        raise ValueError(f"impl must be auto, triton or torch, got {impl!r}")
    if impl == "auto":
        return tensor.is_cuda and tensor.dtype != torch.float64 and _has_triton()
    if tensor.dtype == torch.float64:
        raise ValueError('the Triton kernels compute in float32; use impl="torch" for float64')
    if find_spec("triton") is None:
        raise ValueError('impl="triton" needs the package triton; install it, or use impl="torch"')
    if not (tensor.is_cuda or compile_only or os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(f'impl="triton" needs CUDA tensors, got one on {tensor.device}; use impl="auto" or "torch"')
    return True


def traced(tensor: Tensor) -> bool:
    """Whether someone records ops (torch.compile, export, fake and meta tensors, any dispatch mode)."""
    recording = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return recording or tensor.is_meta or type(tensor) not in (Tensor, torch.nn.Parameter)


def wide_dtype(x: Tensor) -> torch.dtype:
    """What an op computes and sums in: float32, float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Around every launch: Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def local(tensor: Tensor, name: str) -> Tensor:
    """A replicated DTensor's own copy, with the gradient of this rank's tokens; plain tensors as they are.

    Raises:
        ValueError: a sharded DTensor, of which this rank has only a part.
    """
    if not hasattr(tensor, "placements"):
        return tensor
    if not all(placement.is_replicate() for placement in tensor.placements):
        raise ValueError(
            f"{name} is a DTensor with placements {tensor.placements}; this op needs all of it: call it inside the "
            "forward of the FSDP module that owns it, or pass full_tensor(), for a gradient that is summed over ranks "
            "full_tensor(grad_placements=[Partial()])"
        )
    whole: Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return whole


@cache
def _has_triton() -> bool:
    if find_spec("triton") is None:
        warnings.warn("triton is not installed: rsi_kernels runs its torch implementations", stacklevel=3)
        return False
    return True
