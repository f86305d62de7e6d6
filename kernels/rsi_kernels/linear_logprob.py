"""Log-prob of given tokens and entropy of their distributions, from hidden states, without a [N, V] tensor.

The vocabulary is cut into slices and the tokens into chunks; only one [chunk, slice] tile of float32 logits exists at
a time. The backward pass recomputes the logits, slices outside and chunks inside, so that each slice's weight
gradient is summed in float32 and rounded once.

Shape suffixes: N tokens, n tokens of a chunk, D hidden, V vocabulary, v columns of a slice.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import NAMESPACE, local, use_triton, wide_dtype

GPU_TILE_BYTES, GPU_SLICE = 256 << 20, 8192
CPU_TILE_BYTES, CPU_SLICE = 1 << 20, 2048  # fits a core's second-level cache


class LogprobEntropy(NamedTuple):
    """Both float32 (float64 for float64 inputs), in nats, shaped like the targets; 0 at ignored targets."""

    logprob: Tensor
    entropy: Tensor


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: float | Tensor = 1.0,
    *,
    ignore_index: int = -100,
    impl: str = "auto",
) -> LogprobEntropy:
    """Of softmax(hidden @ weight.T / temperature): the log-prob of `target` and the entropy. Both differentiable.

    Args:
        hidden: [..., D], already shifted: the hidden state that *predicts* the target (row t-1 for token t).
        weight: [V, D], the head, of the same dtype. A tied embedding is fine: autograd sums the two gradients.
        target: [...], integers in [0, V), or `ignore_index`: those rows are dropped before the projection, nothing
            of them is read, results and gradients there are 0.
        temperature: above 0; a number, or one a token [...] (no gradient).
        impl: "auto", "triton" or "torch" (`dispatch.use_triton`).

    float32 logits, sums and results whatever the input dtype (float64 for float64); gradients in the inputs' dtypes,
    accumulated in float32. Deterministic. Between forward and backward it keeps 12 bytes a token beside its inputs.
    At most at a time: one tile of logits (256 MiB on a GPU, 1 MiB on a CPU) and its gradient, in backward also
    4 N D bytes (dH in float32) and 4 * 8192 * D. A GPU waits once a direction, for the number of kept tokens.

    Raises:
        ValueError: wrong shapes or dtypes, temperature not above 0, a target outside the vocabulary (CPU), a sharded
            DTensor.

    Source: the gradient of the entropy as in verl's linear cross entropy; slices outside, chunks inside are ours.
    """
    hidden, weight = local(hidden, "hidden"), local(weight, "weight")
    if weight.dim() != 2 or hidden.shape[-1:] != weight.shape[1:] or hidden.shape[:-1] != target.shape:
        shapes = tuple(hidden.shape), tuple(weight.shape), tuple(target.shape)
        raise ValueError(f"hidden must be [..., D], weight [V, D] and target [...], got {shapes}")
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(f"hidden and weight must have one floating dtype, got {hidden.dtype} and {weight.dtype}")
    if target.is_floating_point() or target.dtype == torch.bool:
        raise ValueError(f"target must be integers, got {target.dtype}")
    if isinstance(temperature, Tensor):
        if temperature.shape != target.shape:
            raise ValueError(f"temperature must be a number or {tuple(target.shape)}, got {tuple(temperature.shape)}")
        temperature_N = temperature.detach().reshape(-1).contiguous()
    else:
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, got {temperature}")
        temperature_N = torch.full((1,), temperature, device=hidden.device, dtype=wide_dtype(hidden))
    flat = hidden.reshape(-1, hidden.shape[-1])
    logprob, entropy, _ = _forward(flat, weight, target.reshape(-1).contiguous(), temperature_N, ignore_index, impl)
    return LogprobEntropy(logprob.view(target.shape), entropy.view(target.shape))


@torch.library.custom_op(f"{NAMESPACE}::linear_logprob", mutates_args=())
def _forward(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: Tensor, ignore_index: int, impl: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(logprob, entropy, log of the sum of exponentials), each [N]."""
    if use_triton(impl, hidden):
        from .linear_logprob_triton import accumulate
    else:
        accumulate = _accumulate
    kept = _kept(target, ignore_index)
    h_ND, target_N = (_take(x, kept) for x in (hidden, target))
    scale = _take(temperature, kept) if temperature.numel() == target.numel() else temperature
    if not hidden.is_cuda:
        outside = target_N[(target_N < 0) | (target_N >= weight.shape[0])]
        if outside.numel():
            raise ValueError(f"target {int(outside[0])} is outside the vocabulary of {weight.shape[0]}")
        if not bool((scale > 0).all()):
            raise ValueError(f"temperature must be above 0, got {float(scale.min())}")
    wide = wide_dtype(hidden)
    found = torch.zeros(3, target_N.numel(), device=hidden.device, dtype=wide)
    rows, width = tile(weight.shape[0], hidden.is_cuda)
    for chunk in _cut(target_N.numel(), rows):
        state = torch.zeros(4, chunk.stop - chunk.start, device=hidden.device, dtype=wide)
        state[0] = -torch.inf
        factor = scale[chunk] if scale.numel() > 1 else scale
        for columns in _cut(weight.shape[0], width):
            logits_nv = _matmul(h_ND[chunk], weight[columns].T)
            accumulate(logits_nv, target_N[chunk], factor, columns.start, state)
        peak, total, energy, chosen = state
        found[0, chunk] = chosen - peak - total.log()
        found[1, chunk] = total.log() - energy / total
        found[2, chunk] = peak + total.log()
    if kept is not None:
        found = torch.zeros(3, target.numel(), device=hidden.device, dtype=wide).index_copy_(1, kept, found)
    return found[0].clone(), found[1].clone(), found[2].clone()


@_forward.register_fake
def _(hidden, weight, target, *arguments):  # type: ignore[no-untyped-def]
    like = torch.empty(target.shape, device=hidden.device, dtype=wide_dtype(hidden))
    return like, torch.empty_like(like), torch.empty_like(like)


@torch.library.custom_op(f"{NAMESPACE}::linear_logprob_backward", mutates_args=())
def _backward(
    grad_logprob: Tensor | None,
    grad_entropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor,
    entropy: Tensor,
    log_total: Tensor,
    ignore_index: int,
    need_hidden: bool,
    need_weight: bool,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of hidden and weight; an empty tensor for one that is not needed."""
    if use_triton(impl, hidden):
        from .linear_logprob_triton import differentiate
    else:
        differentiate = _differentiate
    kept = _kept(target, ignore_index)
    h_ND, target_N, entropy_N, log_total_N = (_take(x, kept) for x in (hidden, target, entropy, log_total))
    scale = _take(temperature, kept) if temperature.numel() == target.numel() else temperature
    upstream = [None if x is None else _take(x, kept).contiguous() for x in (grad_logprob, grad_entropy)]
    wide = wide_dtype(hidden)
    d_hidden = torch.zeros(h_ND.shape if need_hidden else (0,), device=hidden.device, dtype=wide)
    d_weight = torch.zeros(weight.shape if need_weight else (0,), device=hidden.device, dtype=weight.dtype)
    rows, width = tile(weight.shape[0], hidden.is_cuda)
    for columns in _cut(weight.shape[0], width):
        w_vD = weight[columns]
        d_weight_vD = torch.zeros(w_vD.shape if need_weight else (0,), device=hidden.device, dtype=wide)
        for chunk in _cut(target_N.numel(), rows):
            logits_nv = _matmul(h_ND[chunk], w_vD.T)
            factor = scale[chunk] if scale.numel() > 1 else scale
            parts = [None if x is None else x[chunk] for x in upstream]
            arguments = target_N[chunk], factor, entropy_N[chunk], log_total_N[chunk], columns.start
            grad_nv = differentiate(logits_nv, parts[0], parts[1], *arguments, hidden.dtype)
            if need_weight:
                _add_matmul(d_weight_vD, grad_nv.T, h_ND[chunk])
            if need_hidden:
                _add_matmul(d_hidden[chunk], grad_nv, w_vD)
        if need_weight:
            d_weight[columns] = d_weight_vD.to(weight.dtype)
    if need_hidden and kept is not None:
        return torch.zeros_like(hidden).index_copy_(0, kept, d_hidden.to(hidden.dtype)), d_weight
    return d_hidden.to(hidden.dtype), d_weight


@_backward.register_fake
def _(grad_logprob, grad_entropy, hidden, weight, *arguments):  # type: ignore[no-untyped-def]
    need_hidden, need_weight = arguments[-3:-1]
    d_hidden = torch.empty(hidden.shape if need_hidden else (0,), device=hidden.device, dtype=hidden.dtype)
    return d_hidden, torch.empty(weight.shape if need_weight else (0,), device=hidden.device, dtype=weight.dtype)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    hidden, weight, target, temperature, ctx.ignore_index, ctx.impl = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(hidden, weight, target, temperature, output[1], output[2])


def _grad(ctx, grad_logprob, grad_entropy, _):  # type: ignore[no-untyped-def]
    need_hidden, need_weight = ctx.needs_input_grad[:2]
    if grad_logprob is None and grad_entropy is None:
        return None, None, None, None, None, None
    d_hidden, d_weight = _backward(
        grad_logprob, grad_entropy, *ctx.saved_tensors, ctx.ignore_index, need_hidden, need_weight, ctx.impl
    )
    return d_hidden if need_hidden else None, d_weight if need_weight else None, None, None, None, None


_forward.register_autograd(_grad, setup_context=_setup)


def _accumulate(logits_nv: Tensor, target_n: Tensor, temperature: Tensor, first: int, state: Tensor) -> None:
    """Take one slice into the running maximum m, sum e^(z-m), sum (z-m) e^(z-m) and target logit. Overwrites logits."""
    peak, total, energy, chosen = state
    logits_nv.div_(temperature[:, None])
    inside = (target_n >= first) & (target_n < first + logits_nv.shape[1])
    column_n = torch.where(inside, target_n - first, 0)
    chosen.copy_(torch.where(inside, logits_nv.gather(1, column_n[:, None])[:, 0], chosen))
    top = torch.maximum(peak, logits_nv.amax(1))
    shift = torch.where(peak == -torch.inf, 0.0, peak - top)
    logits_nv.sub_(top[:, None])
    power_nv = logits_nv.exp()
    kept = torch.where(peak == -torch.inf, 0.0, shift.exp())
    energy.copy_((energy + shift * total) * kept + torch.linalg.vecdot(power_nv, logits_nv))
    total.copy_(total * kept + power_nv.sum(1))
    peak.copy_(top)


def _differentiate(
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
    """d(loss)/d(logits) of one tile, in `dtype`: g_logprob (1[y] - p) - g_entropy p (log p + H). Overwrites logits."""
    logits_nv.div_(temperature[:, None]).sub_(log_total_n[:, None])
    if grad_entropy is None:
        assert grad_logprob is not None
        grad_nv = logits_nv.exp_().mul_((-grad_logprob / temperature)[:, None])
    else:
        probability_nv = logits_nv.exp()
        grad_nv = logits_nv.add_(entropy_n[:, None]).mul_((-grad_entropy / temperature)[:, None])
        if grad_logprob is not None:
            grad_nv.sub_((grad_logprob / temperature)[:, None])
        grad_nv.mul_(probability_nv)
    if grad_logprob is not None:
        inside = (target_n >= first) & (target_n < first + logits_nv.shape[1])
        column_n = torch.where(inside, target_n - first, 0)
        grad_nv.scatter_add_(1, column_n[:, None], torch.where(inside, grad_logprob / temperature, 0.0)[:, None])
    return grad_nv.to(dtype)


def _kept(target: Tensor, ignore_index: int) -> Tensor | None:
    """Indices of the rows that count, or None for all."""
    kept = (target != ignore_index).nonzero().squeeze(1)
    return None if kept.numel() == target.numel() else kept


def _take(x: Tensor, kept: Tensor | None) -> Tensor:
    return x if kept is None else x.index_select(0, kept)


def tile(vocabulary: int, cuda: bool) -> tuple[int, int]:
    """(tokens of a chunk, columns of a slice): 4 bytes times both stay within the tile's budget."""
    budget, columns = (GPU_TILE_BYTES, GPU_SLICE) if cuda else (CPU_TILE_BYTES, CPU_SLICE)
    columns = max(1, min(columns, vocabulary))
    return max(1, budget // (4 * columns)), columns


def _cut(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32 (float64 stays), without rounding through the inputs' dtype."""
    if a.dtype == wide_dtype(a):
        return a @ b
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, in the float32 (or float64) of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
