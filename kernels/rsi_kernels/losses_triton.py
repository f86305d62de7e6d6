"""The Triton kernels of `ppo_loss` and `value_loss`; each program's sums are added up by torch, in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_device
from .ppo_loss import KL_KINDS, LOG_RATIO_LIMIT

BLOCK, VALUE_PROGRAMS = 1024, 512


@triton.jit
def _read(pointer, offset, keep):
    return tl.load(pointer + offset, mask=keep, other=0.0).to(tl.float32)


@triton.jit
def _ppo_kernel(
    logprob, old_logprob, advantage, mask, weight, reference, loss_out, derivative_out, sums, tokens,
    clip_low, clip_high, dual_clip, kl_coefficient, LIMIT: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_DUAL: tl.constexpr, KL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    offset = program * BLOCK + tl.arange(0, BLOCK)
    keep = offset < tokens
    if HAS_MASK:
        keep = keep & (tl.load(mask + offset, mask=keep, other=0) != 0)
    new, gain = _read(logprob, offset, keep), _read(advantage, offset, keep)
    apart = new - _read(old_logprob, offset, keep)
    log_ratio = tl.minimum(tl.maximum(apart, -LIMIT), LIMIT)
    ratio = tl.exp(log_ratio)
    loss = -gain * ratio
    derivative = tl.where(tl.abs(apart) <= LIMIT, loss, 0.0)
    held = -gain * tl.minimum(tl.maximum(ratio, 1.0 - clip_low), 1.0 + clip_high)
    clipped = held > loss
    loss, derivative = tl.where(clipped, held, loss), tl.where(clipped, 0.0, derivative)
    bounded = tl.zeros([BLOCK], tl.int32)
    if HAS_DUAL:
        bound = -gain * dual_clip
        over = (gain < 0) & (loss > bound)
        loss, derivative = tl.where(over, bound, loss), tl.where(over, 0.0, derivative)
        bounded = over.to(tl.int32)
    if HAS_WEIGHT:
        factor = _read(weight, offset, keep)
        loss, derivative = loss * factor, derivative * factor
    tl.store(sums + program * 5, tl.sum(loss, 0))
    tl.store(sums + program * 5 + 1, tl.sum(clipped.to(tl.int32), 0).to(tl.float32))
    tl.store(sums + program * 5 + 2, tl.sum(bounded, 0).to(tl.float32))
    tl.store(sums + program * 5 + 3, -tl.sum(log_ratio, 0))
    if KL > 0:
        apart = new - _read(reference, offset, keep)
        away = tl.minimum(tl.maximum(apart, -LIMIT), LIMIT)
        estimate, slope = away, tl.full([BLOCK], 1.0, tl.float32)
        if KL == 2:
            estimate, slope = 0.5 * away * away, away
        if KL == 3:
            inverse = tl.exp(-away)
            estimate, slope = inverse - 1.0 + away, 1.0 - inverse
        loss += kl_coefficient * estimate
        derivative += tl.where((tl.abs(apart) <= LIMIT) & keep, kl_coefficient * slope, 0.0)
        tl.store(sums + program * 5 + 4, tl.sum(estimate, 0))
    inside = offset < tokens
    tl.store(loss_out + offset, loss, mask=inside)
    tl.store(derivative_out + offset, derivative, mask=inside)


def ppo_loss(
    inputs: tuple[Tensor | None, ...], factors: tuple[float, float, float, float, str]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `ppo_loss._op`."""
    logprob, old_logprob, advantage, mask, weight, reference = (None if x is None else x.contiguous() for x in inputs)
    assert logprob is not None
    *numbers, kl_kind = factors
    tokens = logprob.numel()
    programs = triton.cdiv(tokens, BLOCK)
    loss = torch.empty(tokens, device=logprob.device, dtype=torch.float32)
    derivative = torch.empty_like(loss)
    sums = torch.zeros(programs, 5, device=logprob.device, dtype=torch.float32)
    if tokens:
        with on_device(logprob):
            _ppo_kernel[(programs,)](
                logprob, old_logprob, advantage, mask, weight, reference, loss, derivative, sums, tokens, *numbers,
                LIMIT=LOG_RATIO_LIMIT, HAS_MASK=mask is not None, HAS_WEIGHT=weight is not None,
                HAS_DUAL=bool(numbers[2]), KL=0 if reference is None else KL_KINDS.index(kl_kind) + 1,
                BLOCK=BLOCK, num_warps=4,
            )  # fmt: skip
    return loss, derivative, sums.sum(0)


@triton.jit(do_not_specialize=["tokens", "rows"])
def _value_kernel(
    hidden, weight, bias, old_value, returns, mask, value_out, d_value_out, sums, d_weight,
    tokens, rows, width, clip, HAS_MASK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    head = _read(weight, column, inside)
    offset = tl.load(bias).to(tl.float32)
    d_head = tl.zeros([BLOCK], tl.float32)
    total, count = 0.0, 0.0
    for row in range(program * rows, tl.minimum((program + 1) * rows, tokens)):
        keep = row >= 0
        if HAS_MASK:
            keep = tl.load(mask + row) != 0
        state = _read(hidden, row * width + column, inside & keep)
        value = tl.where(keep, tl.sum(state * head, 0) + offset, 0.0)
        before, wanted = _read(old_value, row, keep), _read(returns, row, keep)
        moved = value - before
        plain = (value - wanted) * (value - wanted)
        error = before + tl.minimum(tl.maximum(moved, -clip), clip) - wanted
        clipped = (error * error > plain) & (tl.abs(moved) > clip)
        d_value = tl.where(clipped, 0.0, value - wanted)
        total += 0.5 * tl.where(clipped, error * error, plain)
        count += tl.where(clipped, 1.0, 0.0)
        d_head += d_value * state
        tl.store(value_out + row, value)
        tl.store(d_value_out + row, d_value)
    tl.store(sums + program * 2, total)
    tl.store(sums + program * 2 + 1, count)
    tl.store(d_weight + program * width + column, d_head, mask=inside)


def value_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    old_value: Tensor,
    returns: Tensor,
    mask: Tensor | None,
    clip: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """See `value_loss._op`."""
    hidden, weight, old_value, returns = (x.contiguous() for x in (hidden, weight, old_value, returns))
    mask = None if mask is None else mask.contiguous()
    tokens, width = hidden.shape
    block = max(triton.next_power_of_2(width), 128)
    rows = max(1, triton.cdiv(tokens, VALUE_PROGRAMS))
    programs = triton.cdiv(tokens, rows)
    value = torch.empty(tokens, device=hidden.device, dtype=torch.float32)
    d_value = torch.empty_like(value)
    sums = torch.zeros(programs, 2, device=hidden.device, dtype=torch.float32)
    d_weight = torch.zeros(programs, width, device=hidden.device, dtype=torch.float32)
    if tokens:
        with on_device(hidden):
            _value_kernel[(programs,)](
                hidden, weight, bias, old_value, returns, mask, value, d_value, sums, d_weight,
                tokens, rows, width, clip, HAS_MASK=mask is not None, BLOCK=block,
                num_warps=min(16, max(1, block // 512)),
            )  # fmt: skip
    loss, clipped = sums.sum(0).unbind()
    return loss.clone(), value, clipped.clone(), d_value, d_weight.sum(0)
