"""The two element-wise halves of `linear_logprob` on a GPU; the matrix products around them are cuBLAS's.

One program a token, a loop over the slice's columns: any width, no atomics. Same signatures as the torch versions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_device

BLOCK, WARPS = 2048, 8


@triton.jit(do_not_specialize=["temperature_stride", "tokens", "first"])
def _accumulate_kernel(
    logits, target, temperature, temperature_stride, state, tokens, columns, first, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(temperature + row * temperature_stride).to(tl.float32)
    wanted = tl.load(target + row).to(tl.int64) - first
    peak = tl.load(state + row)
    total = tl.load(state + tokens + row)
    energy = tl.load(state + 2 * tokens + row)
    if (wanted >= 0) & (wanted < columns):
        chosen = tl.load(logits + row * columns + wanted).to(tl.float32) / factor
        tl.store(state + 3 * tokens + row, chosen)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(logits + row * columns + column, mask=inside, other=float("-inf")).to(tl.float32) / factor
        top = tl.maximum(peak, tl.max(z, 0))
        # The first block meets peak = -inf, whose differences would be NaN.
        shift = tl.where(peak == float("-inf"), 0.0, peak - top)
        power = tl.exp(z - top)
        energy = (energy + shift * total) * tl.exp(shift) + tl.sum(power * tl.where(inside, z - top, 0.0), 0)
        total = total * tl.exp(shift) + tl.sum(power, 0)
        peak = top
    tl.store(state + row, peak)
    tl.store(state + tokens + row, total)
    tl.store(state + 2 * tokens + row, energy)


@triton.jit(do_not_specialize=["temperature_stride", "first"])
def _differentiate_kernel(
    logits, grad_logprob, grad_entropy, target, temperature, temperature_stride, entropy, log_total, out,
    columns, first, HAS_LOGPROB: tl.constexpr, HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(temperature + row * temperature_stride).to(tl.float32)
    wanted = tl.load(target + row).to(tl.int64) - first
    level = tl.load(log_total + row)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        z = tl.load(logits + row * columns + column, mask=inside, other=0.0).to(tl.float32) / factor
        log_probability = tl.where(inside, z - level, 0.0)
        probability = tl.exp(log_probability)
        grad = tl.zeros([BLOCK], tl.float32)
        if HAS_LOGPROB:
            upstream = tl.load(grad_logprob + row).to(tl.float32)
            grad += upstream * (tl.where(column == wanted, 1.0, 0.0) - probability)
        if HAS_ENTROPY:
            upstream_entropy = tl.load(grad_entropy + row).to(tl.float32)
            inner = log_probability + tl.load(entropy + row)
            grad -= upstream_entropy * probability * inner
        tl.store(out + row * columns + column, (grad / factor).to(out.dtype.element_ty), mask=inside)


def accumulate(logits_nv: Tensor, target_n: Tensor, temperature: Tensor, first: int, state: Tensor) -> None:
    """See `linear_logprob._accumulate`; leaves the logits as they are."""
    tokens, columns = logits_nv.shape
    stride = int(temperature.numel() > 1)
    with on_device(logits_nv):
        _accumulate_kernel[(tokens,)](
            logits_nv, target_n, temperature, stride, state, tokens, columns, first, BLOCK=BLOCK, num_warps=WARPS
        )


def differentiate(
    logits_nv: Tensor,
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    target_n: Tensor,
    temperature: Tensor,
    entropy_n: Tensor,
    log_total_n: Tensor,
    first: int,
    dtype: torch.dtype,
) -> Tensor:
    """See `linear_logprob._differentiate`; leaves the logits as they are."""
    tokens, columns = logits_nv.shape
    grad_nv = torch.empty(tokens, columns, device=logits_nv.device, dtype=dtype)
    with on_device(logits_nv):
        _differentiate_kernel[(tokens,)](
            logits_nv, grad_logprob, grad_entropy, target_n, temperature, int(temperature.numel() > 1), entropy_n,
            log_total_n, grad_nv, columns, first,
            HAS_LOGPROB=grad_logprob is not None, HAS_ENTROPY=grad_entropy is not None, BLOCK=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return grad_nv
