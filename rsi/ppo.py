"""PPO as pure functions over the action tokens of a micro-batch.

Every loss is a sum over action tokens divided by one `normaliser`: the number of action tokens of the whole
optimizer step, over all micro-batches and ranks (divided by the number of ranks where gradients are averaged
over them). How a step is split into micro-batches therefore changes nothing beyond rounding. Metrics are sums
too; `average_metrics` adds them up and divides once. Shape suffixes: N action tokens, V vocabulary.
"""

from collections.abc import Iterable, Mapping

import torch
from rsi_kernels import clipped_error, linear_logprob, ppo_loss
from rsi_kernels.ppo_loss import LOG_RATIO_LIMIT
from torch import Tensor

from rsi.batch import MicroBatch, gather_predictors
from rsi.model import Critic, Transformer

Metrics = dict[str, Tensor]


def action_logprobs(model: Transformer, batch: MicroBatch, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob of every action token and entropy of the distribution it came from, both float32 [N], in nats.

    Only the hidden states that predict an action token are projected (`rsi_kernels.linear_logprob`). The
    distribution is softmax(logits / temperature), the sampler's.
    """
    hidden_ND = gather_predictors(model(batch.ids_T[None], batch.cu_seqlens)[0], batch)
    logprob_N, entropy_N = linear_logprob(hidden_ND, model.head_weight, batch.target_N, temperature)
    return logprob_N.float(), entropy_N.float()


def action_values(critic: Critic, batch: MicroBatch) -> Tensor:
    """V(state before each action token), float32 [N]: the critic's output at the token before it."""
    return gather_predictors(critic(batch.ids_T[None], batch.cu_seqlens)[0], batch).float()


def policy_loss(
    logprob: Tensor,
    old_logprob: Tensor,
    advantage: Tensor,
    mask: Tensor | None,
    normaliser: float,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    *,
    importance_weight: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_bonus: float = 0.0,
    reference_logprob: Tensor | None = None,
    kl_coefficient: float = 0.0,
    kl_kind: str = "k2",
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate: sum of max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)) / normaliser.

    Args:
        logprob, old_logprob, advantage: [N] (any one shape); advantages and old log-probs are held constant.
        mask: same shape, nonzero = counts; None = all count. Nothing at a masked slot is read.
        normaliser: action tokens of the whole optimizer step (see the module's docstring).
        dual_clip: c > 1 bounds the loss of a negative advantage at -c * A.
        importance_weight: factor on each token's loss, held constant (`importance_weights`).
        entropy, entropy_bonus: bonus * entropy is subtracted; the entropy is reported at any bonus.
        reference_logprob, kl_coefficient, kl_kind: coefficient * KL estimate k1, k2 or k3 is added
            (`rsi_kernels.ppo_loss`, which computes all but the entropy).

    Returns:
        (loss, metrics); metrics are sums over tokens under verl's names, for `average_metrics`. A token
        counts as clipped where the clipped branch is strictly the larger, so a tie keeps its gradient.

    Source: Schulman et al. 2017 (arXiv 1707.06347); dual clip: Ye et al. 2020 (arXiv 1912.09729).
    """
    found = ppo_loss(
        logprob, old_logprob, advantage, mask, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip,
        importance_weight=importance_weight, reference_logprob=reference_logprob, kl_coefficient=kl_coefficient,
        kl_kind=kl_kind,
    )  # fmt: skip
    total = found.loss.sum()
    metrics = {
        "actor/pg_loss": found.surrogate,
        "actor/pg_clipfrac": found.clipped,
        "actor/ppo_kl": found.approximate_kl,
    }
    if dual_clip is not None:
        metrics["actor/pg_clipfrac_lower"] = found.clipped_lower
    if reference_logprob is not None:
        metrics["actor/kl_loss"] = found.reference_kl
    if entropy is not None:
        entropy_sum = _masked(entropy, mask).sum()
        metrics["actor/entropy"] = entropy_sum.detach()
        if entropy_bonus:
            total = total - entropy_bonus * entropy_sum
    elif entropy_bonus:
        raise ValueError(f"an entropy bonus of {entropy_bonus} needs `entropy`")
    return total / (normaliser or 1), metrics


def importance_weights(old_logprob: Tensor, sampler_logprob: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated token weights min(exp(old - sampler), cap): the trainer's over the sampler's probability."""
    if not cap > 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    log_ratio = (old_logprob - sampler_logprob).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return log_ratio.exp().clamp(max=cap)


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, mask: Tensor | None, normaliser: float, clip: float = 0.2
) -> tuple[Tensor, Metrics]:
    """Half the larger of the clipped and unclipped squared error, summed, over `normaliser`.

    The clipped prediction stays within `clip` (`math.inf` for none) of `old_value`, the value before the
    step's updates. All tensors [N] (any one shape); gradients flow through `value` alone; `mask` as in
    `policy_loss`. Metrics are sums over tokens.
    """
    value = _masked(value, mask)
    errors, is_clipped = clipped_error(value, _masked(old_value, mask).detach(), _masked(returns, mask).detach(), clip)
    total = errors.sum()
    metrics = {
        "critic/vf_loss": total.detach(),
        "critic/vf_clipfrac": is_clipped.sum(),
        "critic/values/mean": value.detach().sum(),
    }
    return total / (normaliser or 1), metrics


def supervised_loss(logprob: Tensor, mask: Tensor | None, normaliser: float) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the action tokens, summed, over `normaliser`."""
    total = -_masked(logprob, mask).sum()
    return total / (normaliser or 1), {"actor/sft_loss": total.detach()}


def average_metrics(micro_batches: Iterable[Mapping[str, Tensor]], normaliser: float) -> dict[str, float]:
    """Add up the metric sums of an optimizer step's micro-batches and divide once by its action tokens."""
    sums: dict[str, float] = {}
    for metrics in micro_batches:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return {name: value / (normaliser or 1) for name, value in sums.items()}


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor | None = None) -> float:
    """1 - Var[returns - values] / Var[returns] over the action tokens of a whole batch.

    1 = perfect, 0 = as good as a constant, below 0 = worse. NaN where the returns do not vary.
    """
    if mask is not None:
        values, returns = values[mask != 0], returns[mask != 0]
    values, returns = values.detach().double(), returns.detach().double()
    spread = returns.var(correction=0) if returns.numel() else returns.new_zeros(())
    if not spread > 0:
        return float("nan")
    return float(1.0 - (returns - values).var(correction=0) / spread)


def whiten(advantage_N: Tensor, everywhere_M: Tensor | None = None, epsilon: float = 1e-8) -> Tensor:
    """Zero mean and unit variance over `everywhere_M`: all action tokens of a step, on every rank (None: these)."""
    wide_M = (advantage_N if everywhere_M is None else everywhere_M).double()
    if wide_M.numel() == 0:
        return advantage_N
    mean, deviation = wide_M.mean(), (wide_M.var(correction=0) + epsilon).sqrt()
    return ((advantage_N.double() - float(mean)) / float(deviation)).to(advantage_N.dtype)


def _masked(value: Tensor, mask: Tensor | None) -> Tensor:
    return value if mask is None else torch.where(mask != 0, value, 0.0)
