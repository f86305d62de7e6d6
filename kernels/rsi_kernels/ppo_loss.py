"""PPO's policy loss of every token, its derivative and what one logs about it, in one pass over the tokens."""

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import NAMESPACE, use_triton, wide_dtype

LOG_RATIO_LIMIT = 20.0  # log-ratios are held within +-20, so that their exponentials stay finite
KL_KINDS = ("k1", "k2", "k3")


class PpoLoss(NamedTuple):
    """`loss` [N] has the gradient; the rest are sums over unmasked tokens, without one.

    A token counts as clipped where the clipped branch is strictly the larger.
    """

    loss: Tensor  # [N], importance weight and KL term included, 0 at masked tokens
    surrogate: Tensor  # importance-weighted clipped surrogate, without the KL term
    clipped: Tensor  # number of tokens
    clipped_lower: Tensor  # number of tokens that the dual clip bounds
    approximate_kl: Tensor  # of old - new log-probs
    reference_kl: Tensor  # of the estimate that `kl_kind` names, without its coefficient


def ppo_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor | None = None,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    importance_weight: Tensor | None = None,
    reference_logprob: Tensor | None = None,
    kl_coefficient: float = 0.0,
    kl_kind: str = "k2",
    impl: str = "auto",
) -> PpoLoss:
    """Clipped surrogate of every token, with optional dual clip, importance weight and KL to a reference::

        ratio = exp(logprob - old_logprob)
        loss  = max(-A ratio, -A clamp(ratio, 1 - clip_low, 1 + clip_high))
        loss  = min(loss, -A dual_clip)                       where A < 0, with a dual clip
        loss  = importance_weight loss + kl_coefficient kl(logprob - reference_logprob)
        k1 = x,  k2 = x^2 / 2,  k3 = exp(-x) - 1 + x          of the log-ratio x

    At a tie the unclipped branch keeps its gradient. As a loss only k2 has the gradient of the KL: k1's is zero in
    expectation, k3's is biased (arXiv 2506.09477).

    Args:
        logprob: [N] (any one shape); the only input with a gradient.
        old_logprob, advantage, importance_weight, reference_logprob: same shape, held constant.
        mask: same shape, nonzero = counts; None = all count. Nothing at a masked token is read.

    float32 arithmetic and results (float64 for float64 `logprob`), deterministic. Reads 13 to 21 bytes a token and
    writes 8; keeps 4 a token (the derivative) for backward. Divide by the step's *global* token count yourself.

    Raises:
        ValueError: shapes that differ, clips out of range, a KL coefficient without a reference, unknown `kl_kind`.

    Source: Schulman et al. 2017 (arXiv 1707.06347); dual clip: Ye et al. 2020 (arXiv 1912.09729).
    """
    for name, x in (
        ("old_logprob", old_logprob),
        ("advantage", advantage),
        ("mask", mask),
        ("importance_weight", importance_weight),
        ("reference_logprob", reference_logprob),
    ):
        if x is not None and x.shape != logprob.shape:
            raise ValueError(f"{name} must be shaped like logprob, {tuple(logprob.shape)}, got {tuple(x.shape)}")
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    if not 0 <= clip_low < 1 or not clip_high >= 0:
        raise ValueError(f"clip_low must be in [0, 1), clip_high at least 0; got {clip_low}, {clip_high}")
    if kl_kind not in KL_KINDS:
        raise ValueError(f"kl_kind must be k1, k2 or k3, got {kl_kind!r}")
    if kl_coefficient and reference_logprob is None:
        raise ValueError(f"a KL coefficient of {kl_coefficient} needs `reference_logprob`")
    others = (old_logprob, advantage, None if mask is None else mask != 0, importance_weight, reference_logprob)
    flat = [None if x is None else x.detach().reshape(-1) for x in others]
    factors = (float(clip_low), float(clip_high), float(dual_clip or 0.0), float(kl_coefficient))
    loss, _, sums = _op(logprob.reshape(-1), *flat, *factors, kl_kind, impl)
    return PpoLoss(loss.view(logprob.shape), *sums.detach().unbind())


@torch.library.custom_op(f"{NAMESPACE}::ppo_loss", mutates_args=())
def _op(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    importance_weight: Tensor | None,
    reference_logprob: Tensor | None,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    kl_coefficient: float,
    kl_kind: str,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss [N], its derivative [N], sums [5] in the order of `PpoLoss`); a dual clip of 0 is none."""
    if use_triton(impl, logprob):
        from .losses_triton import ppo_loss as launch

        inputs = (logprob, old_logprob, advantage, mask, importance_weight, reference_logprob)
        return launch(inputs, (clip_low, clip_high, dual_clip, kl_coefficient, kl_kind))
    wide = wide_dtype(logprob)

    def read(x: Tensor) -> Tensor:
        return x.to(wide) if mask is None else torch.where(mask, x, 0.0).to(wide)

    def limit(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
        return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT), log_ratio.abs() <= LOG_RATIO_LIMIT

    new, advantage = read(logprob), read(advantage)
    log_ratio, moves = limit(new - read(old_logprob))
    ratio = log_ratio.exp()
    loss = -advantage * ratio
    derivative = torch.where(moves, loss, 0.0)
    held = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = held > loss
    loss, derivative = torch.where(clipped, held, loss), torch.where(clipped, 0.0, derivative)
    bounded = torch.zeros_like(clipped)
    if dual_clip:
        bound = -advantage * dual_clip
        bounded = (advantage < 0) & (loss > bound)
        loss, derivative = torch.where(bounded, bound, loss), torch.where(bounded, 0.0, derivative)
    if importance_weight is not None:
        loss, derivative = loss * read(importance_weight), derivative * read(importance_weight)
    sums = [loss.sum(), clipped.sum(), bounded.sum(), -log_ratio.sum(), loss.new_zeros(())]
    if reference_logprob is not None:
        away, moves = limit(new - read(reference_logprob))
        estimate, slope = kl_estimate(away, kl_kind)
        loss = loss + kl_coefficient * estimate
        moves = moves if mask is None else moves & mask  # k1's slope is 1 whatever the inputs
        derivative = derivative + torch.where(moves, kl_coefficient * slope, 0.0)
        sums[4] = estimate.sum()
    return loss, derivative, torch.stack([x.to(wide) for x in sums])


@_op.register_fake
def _(logprob, *arguments):  # type: ignore[no-untyped-def]
    loss = torch.empty(logprob.shape, dtype=wide_dtype(logprob), device=logprob.device)
    return loss, torch.empty_like(loss), loss.new_empty(5)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.dtype = inputs[0].dtype
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(output[1])


def _grad(ctx, grad_loss, *_):  # type: ignore[no-untyped-def]
    (derivative,) = ctx.saved_tensors
    return (grad_loss * derivative).to(ctx.dtype), *[None] * 11


_op.register_autograd(_grad, setup_context=_setup)


def kl_estimate(log_ratio: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The estimate k1, k2 or k3 of KL(policy || reference) from log(policy / reference), and its derivative."""
    if kind not in KL_KINDS:
        raise ValueError(f"kl_kind must be k1, k2 or k3, got {kind!r}")
    if kind == "k1":
        return log_ratio, torch.ones_like(log_ratio)
    if kind == "k2":
        return 0.5 * log_ratio.square(), log_ratio
    inverse = (-log_ratio).exp()
    return inverse - 1.0 + log_ratio, 1.0 - inverse
