"""TB-GAE on a GPU: one linear recurrence over all tokens, in chunks, deterministic, with no look-back.

With x[t+1] what flows into token t from the right, g the discount of the edge that leaves it and l the trace of the
edge that enters it::

    action:        G[t] = r[t] + g x[t+1];   x[t] = (1 - l) V[t] + l G[t]
    anything else: x[t] = x[t+1]
    returns = G,  advantages = G - V;  g = 0 at the last action token of a segment

Each token is thus a map x -> a x + b, and a chunk of tokens the composition of its maps. Kernel one stores the
composition of every chunk; kernel two composes those to its right, scans its own chunk again and writes. Rows of one
chunk need kernel two alone. Tokens are read in groups of four, groups in reverse, so that loads stay 128 bits wide and
the scan runs forward (a reversed scan shuffles nine times as much).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dispatch import on_device
from .tb_gae import combine_moments

ACTION, BOUNDARY_AFTER, BOUNDARY_BEFORE = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)
SEGMENT_END = tl.constexpr(8)
CHUNK, PAIRS, WARPS = 4096, 256, 8
SHORT = 1024  # rows below this are read as one packed row: their flags say where they end


@triton.jit
def _compose(a_right, b_right, a_left, b_left):
    """The map of what lies to the left, applied after the map of what lies to its right."""
    return a_right * a_left, b_left + a_left * b_right


@triton.jit
def _read_chunk(
    rewards, values, flags, start, first, tokens, gamma, lam, gamma_token, lambda_token, CHUNK: tl.constexpr
):  # fmt: skip
    """Of a chunk's tokens as [CHUNK / 4, 4], last group first: offset, inside, action, r, V, g, and the map a, b."""
    group = CHUNK // 4 - 1 - tl.arange(0, CHUNK // 4)
    offset = first + group[:, None] * 4 + tl.arange(0, 4)[None, :]
    inside = offset < tokens
    offset += start
    flag = tl.load(flags + offset, mask=inside, other=0).to(tl.int32)
    action = (flag & ACTION) != 0
    # Before any arithmetic: NaN at an observation must not come near it.
    reward = tl.where(action, tl.load(rewards + offset, mask=inside, other=0.0).to(tl.float32), 0.0)
    value = tl.where(action, tl.load(values + offset, mask=inside, other=0.0).to(tl.float32), 0.0)
    discount = tl.where((flag & BOUNDARY_AFTER) != 0, gamma, gamma_token)
    discount = tl.where((flag & SEGMENT_END) != 0, 0.0, discount)
    trace = tl.where((flag & BOUNDARY_BEFORE) != 0, lam, lambda_token)
    a = tl.where(action, trace * discount, 1.0)
    b = (1.0 - trace) * value + trace * reward
    return offset, inside, action, reward, value, discount, a, tl.where(action, b, 0.0)


@triton.jit
def _split(x, CHUNK: tl.constexpr):
    """The four columns of [CHUNK / 4, 4]."""
    even, odd = tl.split(tl.reshape(x, [CHUNK // 4, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit(do_not_specialize=["chunks"])
def _aggregate_kernel(
    rewards, values, flags, pairs, tokens, chunks, gamma, lam, gamma_token, lambda_token, CHUNK: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // chunks, program % chunks
    _, _, _, _, _, _, a, b = _read_chunk(
        rewards, values, flags, row * tokens, chunk * CHUNK, tokens, gamma, lam, gamma_token, lambda_token, CHUNK
    )
    a0, a1, a2, a3 = _split(a, CHUNK)
    b0, b1, b2, b3 = _split(b, CHUNK)
    a, b = tl.associative_scan((a0 * a1 * a2 * a3, b0 + a0 * (b1 + a1 * (b2 + a2 * b3))), 0, _compose)
    last = tl.arange(0, CHUNK // 4) == CHUNK // 4 - 1
    tl.store(pairs + program * 2, tl.sum(tl.where(last, a, 0.0), 0))
    tl.store(pairs + program * 2 + 1, tl.sum(tl.where(last, b, 0.0), 0))


@triton.jit(do_not_specialize=["chunks"])
def _apply_kernel(
    rewards, values, flags, pairs, advantages, returns, moments, tokens, chunks,
    gamma, lam, gamma_token, lambda_token, MOMENTS: tl.constexpr, CHUNK: tl.constexpr, PAIRS: tl.constexpr
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    row, chunk = program // chunks, program % chunks
    lane = tl.arange(0, PAIRS)
    carry = 0.0
    for start in range(0, chunks - 1 - chunk, PAIRS):
        other = chunks - 1 - start - lane
        right = other > chunk
        a = tl.load(pairs + (row * chunks + other) * 2, mask=right, other=1.0)
        b = tl.load(pairs + (row * chunks + other) * 2 + 1, mask=right, other=0.0)
        a, b = tl.associative_scan((a, b), 0, _compose)
        last = lane == PAIRS - 1
        carry = tl.sum(tl.where(last, b, 0.0), 0) + tl.sum(tl.where(last, a, 0.0), 0) * carry
    offset, inside, action, reward, value, discount, a, b = _read_chunk(
        rewards, values, flags, row * tokens, chunk * CHUNK, tokens, gamma, lam, gamma_token, lambda_token, CHUNK
    )
    a0, a1, a2, a3 = _split(a, CHUNK)
    b0, b1, b2, b3 = _split(b, CHUNK)
    scanned_a, scanned_b = tl.associative_scan(
        (a0 * a1 * a2 * a3, b0 + a0 * (b1 + a1 * (b2 + a2 * b3))), 0, _compose
    )  # fmt: skip
    left = scanned_b + scanned_a * carry  # x at the left edge of every group
    group = tl.arange(0, CHUNK // 4)
    x4 = tl.where(group == 0, carry, tl.gather(left, tl.maximum(group - 1, 0), 0))
    x3 = b3 + a3 * x4
    x2 = b2 + a2 * x3
    x1 = b1 + a1 * x2
    following = tl.reshape(tl.join(tl.join(x1, x3), tl.join(x2, x4)), [CHUNK // 4, 4])
    gain = reward + discount * following
    advantage = tl.where(action, gain - value, 0.0)
    tl.store(advantages + offset, advantage.to(advantages.dtype.element_ty), mask=inside)
    tl.store(returns + offset, tl.where(action, gain, 0.0).to(returns.dtype.element_ty), mask=inside)
    if MOMENTS:
        count = tl.sum(tl.sum(action.to(tl.float32), 1), 0)
        mean = tl.sum(tl.sum(advantage, 1), 0) / tl.maximum(count, 1.0)
        apart = tl.where(action, advantage - mean, 0.0)
        tl.store(moments + program * 3, count)
        tl.store(moments + program * 3 + 1, mean)
        tl.store(moments + program * 3 + 2, tl.sum(tl.sum(apart * apart, 1), 0))


def launch(
    rewards: Tensor, values: Tensor, flags: Tensor, factors: tuple[float, float, float, float], with_moments: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `tb_gae._op`; [B, T] or, packed, [T]. Two launches at most."""
    rewards, values, flags = rewards.contiguous(), values.contiguous(), flags.contiguous()
    advantages = torch.empty(values.shape, device=values.device, dtype=values.dtype)
    returns = torch.empty_like(advantages)
    rows, tokens = (1, values.numel()) if values.dim() == 1 or values.shape[-1] < SHORT else values.shape
    chunks = triton.cdiv(tokens, CHUNK)
    moments = torch.zeros(rows * chunks if with_moments else 0, 3, device=values.device, dtype=torch.float32)
    pairs = torch.empty(rows * chunks, 2, device=values.device, dtype=torch.float32)
    if values.numel():
        grid = (rows * chunks,)
        with on_device(values):
            if chunks > 1:
                _aggregate_kernel[grid](
                    rewards, values, flags, pairs, tokens, chunks, *factors, CHUNK=CHUNK, num_warps=WARPS
                )
            _apply_kernel[grid](
                rewards, values, flags, pairs, advantages, returns, moments, tokens, chunks, *factors,
                MOMENTS=with_moments, CHUNK=CHUNK, PAIRS=PAIRS, num_warps=WARPS,
            )  # fmt: skip
    empty = torch.zeros(0, device=values.device, dtype=torch.float64)
    return advantages, returns, combine_moments(moments) if with_moments else empty
