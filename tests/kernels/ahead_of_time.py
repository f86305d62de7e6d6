"""Compile every Triton kernel, through its real launcher, for GPUs that are not here, and look at what came out.

A program of its own: it must not run in Triton's interpreter. `test_ahead_of_time.py` runs it once a target; by hand,
`python tests/kernels/ahead_of_time.py sm_90` prints the table. `triton.compile` itself checks neither that a kernel's
shared memory fits its target nor that registers suffice.
"""

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from rsi_kernels import dispatch, linear_logprob, losses_triton, ppo_loss, tb_gae, tb_gae_triton, value_loss
from rsi_kernels.tb_gae import flags_from, tb_gae_with_moments
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_LIMIT = {"sm_80": 166912, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
LENGTHS = [*range(1, 34), 63, 64, 65, 127, 128, 255, 256, 1000, 1024, 4095, 4096, 4097, 6000, 8192, 9000, 12288, 16384]


class CompileOnly(DriverBase):
    """Stands where a GPU's driver would; one device index a target, since compiled kernels are cached by it."""

    def __init__(self, target: str) -> None:
        self.target, self.index = TARGETS[target], list(TARGETS).index(target)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_device(self) -> int:
        return self.index

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def map_python_to_cpp_type(self, ty: str) -> str:
        return ty

    def get_benchmarker(self) -> Callable[..., list[float]]:
        raise AssertionError("no kernel here is tuned by timing")


@contextlib.contextmanager
def compiling(target: str) -> Iterator[list[tuple[str, Any]]]:
    """Launches compile and do not run; yields the list of (kernel name, compiled kernel), one a launch."""
    launches: list[tuple[str, Any]] = []
    run = JITFunction.run

    def warm_up(self: JITFunction, *arguments: Any, grid: Any, warmup: bool = False, **options: Any) -> Any:
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        launches.append((self.fn.__name__, kernel))
        return kernel

    JITFunction.run = warm_up
    driver.set_active(CompileOnly(target))
    dispatch.compile_only = True
    try:
        yield launches
    finally:
        JITFunction.run = run
        driver._active = None
        dispatch.compile_only = False


def resources(kernel: Any) -> dict[str, int]:
    """Shared bytes, registers and spilled words of a compiled kernel."""
    found = {"shared": kernel.metadata.shared, "warps": kernel.metadata.num_warps}
    if "cubin" in kernel.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
            text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = dict(re.findall(r"(REG|STACK):(\d+)", text))
        return found | {"registers": int(used["REG"]), "spilled": int(used["STACK"]) // 4}

    def number(key: str) -> int:
        match = re.search(rf"\.{key}:\s+(\d+)", kernel.asm["amdgcn"])
        assert match is not None, key
        return int(match.group(1))

    return found | {"registers": number("vgpr_count"), "spilled": number("vgpr_spill_count")}


def wide_loads(kernel: Any) -> int:
    """Loads from global memory of 128 bits a thread (two or four registers of 32 on AMD)."""
    if "ptx" in kernel.asm:
        return len(re.findall(r"ld\.global[.\w:]*\.v4\.b32|ld\.global[.\w:]*\.v2\.b64", kernel.asm["ptx"]))
    return len(re.findall(r"(global|buffer)_load_dwordx4", kernel.asm["amdgcn"]))


def gae(tokens: int, rows: int = 2, dtype: torch.dtype = torch.float32, moments: bool = False) -> None:
    action = torch.ones(rows, tokens, dtype=torch.bool)
    flags = flags_from(action, torch.zeros(rows, tokens, dtype=torch.int64))
    values = torch.zeros(rows, tokens, dtype=dtype)
    (tb_gae_with_moments if moments else tb_gae)(values, values, flags=flags, impl="triton")


def policy(tokens: int, dtype: torch.dtype = torch.float32, **options: Any) -> None:
    x = torch.zeros(tokens, dtype=dtype)
    ppo_loss(x, x, x, impl="triton", **options)


def value(tokens: int, width: int, dtype: torch.dtype, masked: bool = True) -> None:
    x = torch.zeros(tokens)
    mask = torch.ones(tokens, dtype=torch.bool) if masked else None
    value_loss(torch.zeros(tokens, width, dtype=dtype), torch.zeros(width), torch.zeros(1), x, x, mask, impl="triton")


def head(tokens: int, vocabulary: int, dtype: torch.dtype, use: int = 3, per_token: bool = False) -> None:
    """`use`: 1 the log-prob's gradient, 2 the entropy's, 3 both."""
    hidden, weight = (torch.zeros(n, 16, dtype=dtype, requires_grad=True) for n in (tokens, vocabulary))
    target = torch.zeros(tokens, dtype=torch.int64)
    temperature = torch.ones(tokens) if per_token else 0.7
    out = linear_logprob(hidden, weight, target, temperature, impl="triton")
    sum(x.sum() for k, x in enumerate(out) if use >> k & 1).backward()


def launch_everything() -> None:
    """Every kernel with every option, aligned and not, one token, half and full precision."""
    for tokens in (1, 16, 4097, 8192, 9001):
        for dtype in (torch.float32, torch.bfloat16):
            gae(tokens, dtype=dtype)
            policy(tokens, dtype)
    gae(8192, moments=True)
    gae(1000, rows=1)
    x = torch.zeros(2048)
    for kind in ("k1", "k2", "k3"):
        policy(2048, mask=x.bool(), dual_clip=3.0, importance_weight=x, reference_logprob=x, kl_kind=kind)
    for width in (1, 896, 5120, 8192):
        value(33, width, torch.float32)
        value(32, width, torch.bfloat16, masked=False)
    for vocabulary in (1, 151, 1024):
        for use in (1, 2, 3):
            head(17, vocabulary, torch.float32 if use == 2 else torch.bfloat16, use, per_token=use == 3)
    head(1, 1024, torch.bfloat16)


def launch_beyond_32_bits() -> None:
    """Sizes that need 64 bits are other binaries; the launchers alone, on tensors without memory."""
    x = torch.empty(2**31 + 16, device="meta")
    losses_triton.ppo_loss((x, x, x, x.bool(), x, x), (0.2, 0.2, 3.0, 0.1, "k3"))
    losses_triton.value_loss(x[:, None], x[:1], x[:1], x, x, None, 0.2)
    tb_gae_triton.launch(x[None], x[None], x[None].to(torch.uint8), (0.99, 0.95, 1.0, 1.0), False)


def variants(launch: Callable[[int], None], target: str) -> dict[str, int]:
    """How many binaries each kernel needs over all LENGTHS."""
    with compiling(target) as launches:
        for tokens in LENGTHS:
            launch(tokens)
    kernels: dict[str, set[int]] = {}
    for name, kernel in launches:
        kernels.setdefault(name, set()).add(id(kernel))
    return {name: len(found) for name, found in kernels.items()}


def main(target: str) -> None:
    with compiling(target) as launches:
        launch_everything()
        launch_beyond_32_bits()
    rows = {}
    for name, kernel in launches:
        text = kernel.asm["ptx"] if "ptx" in kernel.asm else kernel.asm["amdgcn"]
        found = resources(kernel) | {"wide_loads": wide_loads(kernel), "float64": "f64" in text}
        rows[id(kernel)] = {"kernel": name, "signature": str(kernel.src.signature), **found}
    counts = variants(gae, target) | variants(policy, target) | variants(lambda n: value(n, 64, torch.float32), target)
    counts |= variants(lambda n: head(n, 300, torch.bfloat16), target)
    print(f"{target}, triton {triton.__version__}")
    for row in rows.values():
        print("  " + "  ".join(f"{key} {item}" for key, item in row.items() if key != "signature"))
    print(
        json.dumps(
            {"target": target, "limit": SHARED_LIMIT[target], "kernels": list(rows.values()), "variants": counts}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])
