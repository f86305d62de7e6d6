"""PPO as pure functions over the action tokens of a micro-batch.

Every loss is a sum over action tokens divided by one `normaliser`: the number of action tokens of the whole
optimizer step, over all micro-batches and ranks (divided by the number of ranks where gradients are averaged
over them). How a step is split into micro-batches therefore changes nothing beyond rounding. Metrics are sums
too; `average_metrics` adds them up and divides once. Shape suffixes: N action tokens, V vocabulary.
"""

from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from rsi.batch import MicroBatch, gather_predictors

LOG_RATIO_LIMIT = 20.0
Metrics = dict[str, Tensor]
KlKind = Literal["k1", "k2", "k3"]


class Actor(Protocol):
    def __call__(self, ids_BT: Tensor) -> Tensor: ...  # hidden_BTD
    def logits(self, hidden_ND: Tensor) -> Tensor: ...  # float32 logits_NV


class ValueModel(Protocol):
    def __call__(self, ids_BT: Tensor) -> Tensor: ...  # values_BT of the states after each token


class _Logprob(torch.autograd.Function):
    """Log-prob of the target and entropy, keeping one [N, V] tensor for the backward pass instead of four."""

    @staticmethod
    def forward(ctx, logits_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
        logprobs_NV = logits_NV.log_softmax(-1)
        entropy_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logprobs_NV, target_N, entropy_N)
        return logprobs_NV.gather(-1, target_N[:, None]).squeeze(-1), entropy_N

    @staticmethod
    def backward(ctx, grad_logprob_N: Tensor | None, grad_entropy_N: Tensor | None):  # type: ignore[no-untyped-def]
        logprobs_NV, target_N, entropy_N = ctx.saved_tensors
        probability_NV = logprobs_NV.exp()
        grad_NV = torch.zeros_like(probability_NV)
        if grad_entropy_N is not None:
            grad_NV = probability_NV * (logprobs_NV + entropy_N[:, None]) * -grad_entropy_N[:, None]
        if grad_logprob_N is not None:
            grad_NV = grad_NV.addcmul_(probability_NV, grad_logprob_N[:, None], value=-1.0)
            grad_NV.scatter_add_(-1, target_N[:, None], grad_logprob_N[:, None])
        return grad_NV, None


def action_logprobs(
    model: Actor, batch: MicroBatch, temperature: float = 1.0, max_logits: int = 1 << 22
) -> tuple[Tensor, Tensor]:
    """Log-prob of every action token and entropy of the distribution it came from, both float32 [N], in nats.

    Only the hidden states that predict an action token are projected, in slices of at most `max_logits`
    logits. The distribution is softmax(logits / temperature), the sampler's.
    """
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0, got {temperature}")
    hidden_ND = gather_predictors(model(batch.ids_BT), batch)
    vocabulary = model.logits(hidden_ND[:0]).shape[-1]
    rows = max(1, max_logits // vocabulary)
    logprobs, entropies = [], []
    for hidden_nD, target_n in zip(hidden_ND.split(rows), batch.target_N.split(rows), strict=True):
        logits_nV = model.logits(hidden_nD)
        if temperature != 1.0:
            logits_nV = logits_nV / temperature
        logprob_n, entropy_n = _Logprob.apply(logits_nV, target_n)
        logprobs.append(logprob_n)
        entropies.append(entropy_n)
    return torch.cat(logprobs).float(), torch.cat(entropies).float()


def action_values(critic: ValueModel, batch: MicroBatch) -> Tensor:
    """V(state before each action token), float32 [N]: the critic's output at the token before it."""
    return gather_predictors(critic(batch.ids_BT), batch).float()


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
    kl_kind: KlKind = "k2",
) -> tuple[Tensor, Metrics]:
    """Clipped surrogate: sum of max(-A * ratio, -A * clip(ratio, 1 - clip_low, 1 + clip_high)) / normaliser.

    Args:
        logprob, old_logprob, advantage: [N] (any one shape); advantages and old log-probs are held constant.
        mask: same shape, nonzero = counts; None = all count. Nothing at a masked slot is read.
        normaliser: action tokens of the whole optimizer step (see the module's docstring).
        dual_clip: c > 1 bounds the loss of a negative advantage at -c * A.
        importance_weight: factor on each token's loss, held constant (`importance_weights`).
        entropy, entropy_bonus: bonus * entropy is subtracted; the entropy is reported at any bonus.
        reference_logprob, kl_coefficient, kl_kind: coefficient * `kl_estimate` is added.

    Returns:
        (loss, metrics); metrics are sums over tokens under verl's names, for `average_metrics`. A token
        counts as clipped where the clipped branch is strictly the larger, so a tie keeps its gradient.

    Source: Schulman et al. 2017 (arXiv 1707.06347); dual clip: Ye et al. 2020 (arXiv 1912.09729).
    """
    logprob = _masked(logprob, mask)
    log_ratio = _limit(logprob - _masked(old_logprob, mask).detach())
    loss, metrics = _surrogate(log_ratio, _masked(advantage, mask).detach(), clip_low, clip_high, dual_clip)
    if importance_weight is not None:
        loss = loss * _masked(importance_weight, mask).detach()
    total = loss.sum()
    metrics["actor/pg_loss"] = total.detach()
    if entropy is not None:
        entropy_sum = _masked(entropy, mask).sum()
        metrics["actor/entropy"] = entropy_sum.detach()
        if entropy_bonus:
            total = total - entropy_bonus * entropy_sum
    elif entropy_bonus:
        raise ValueError(f"an entropy bonus of {entropy_bonus} needs `entropy`")
    if reference_logprob is not None:
        kl_sum = kl_estimate(logprob, _masked(reference_logprob, mask), kl_kind).sum()
        metrics["actor/kl_loss"] = kl_sum.detach()
        if kl_coefficient:
            total = total + kl_coefficient * kl_sum
    elif kl_coefficient:
        raise ValueError(f"a KL coefficient of {kl_coefficient} needs `reference_logprob`")
    return total / max(normaliser, 1), metrics


def _surrogate(
    log_ratio_N: Tensor, advantage_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[Tensor, Metrics]:
    if dual_clip is not None and not dual_clip > 1:
        raise ValueError(f"dual_clip must be above 1, got {dual_clip}")
    if not 0 <= clip_low < 1 or not clip_high >= 0:
        raise ValueError(f"clip_low must be in [0, 1), clip_high at least 0; got {clip_low}, {clip_high}")
    ratio_N = log_ratio_N.exp()
    plain_N = -advantage_N * ratio_N
    clipped_N = -advantage_N * ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high)
    is_clipped_N = clipped_N > plain_N
    loss_N = torch.where(is_clipped_N, clipped_N, plain_N)
    metrics = {"actor/pg_clipfrac": is_clipped_N.sum(), "actor/ppo_kl": -log_ratio_N.detach().sum()}
    if dual_clip is not None:
        bound_N = -advantage_N * dual_clip
        is_bounded_N = (advantage_N < 0) & (loss_N > bound_N)
        loss_N = torch.where(is_bounded_N, bound_N, loss_N)
        metrics["actor/pg_clipfrac_lower"] = is_bounded_N.sum()
    return loss_N, metrics


def kl_estimate(logprob: Tensor, reference_logprob: Tensor, kind: KlKind) -> Tensor:
    """Per-token estimate of KL(policy || reference) from the policy's own samples; log-ratios within +-20.

    k1 = log ratio; k2 = half its square; k3 = exp(-log ratio) - 1 + log ratio. As a loss only k2 has the
    gradient of the KL: k1's is zero in expectation, and k3's is biased (arXiv 2506.09477).
    """
    log_ratio = _limit(logprob - reference_logprob.detach())
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        return (-log_ratio).exp() - 1.0 + log_ratio
    raise ValueError(f"kl_kind must be k1, k2 or k3, got {kind!r}")


def importance_weights(old_logprob: Tensor, sampler_logprob: Tensor, cap: float = 2.0) -> Tensor:
    """Truncated token weights min(exp(old - sampler), cap): the trainer's over the sampler's probability."""
    if not cap > 0:
        raise ValueError(f"cap must be above 0, got {cap}")
    return _limit(old_logprob - sampler_logprob).detach().exp().clamp(max=cap)


def value_loss(
    value: Tensor,
    old_value: Tensor,
    returns: Tensor,
    mask: Tensor | None,
    normaliser: float,
    clip: float = 0.2,
) -> tuple[Tensor, Metrics]:
    """Half the larger of the clipped and unclipped squared error, summed, over `normaliser`.

    The clipped prediction stays within `clip` (`math.inf` for none) of `old_value`, the value before the
    step's updates. All tensors [N] (any one shape); gradients flow through `value` alone; `mask` as in
    `policy_loss`. Metrics are sums over tokens.
    """
    if not clip > 0:
        raise ValueError(f"the value clip must be above 0 (math.inf for none), got {clip}")
    value = _masked(value, mask)
    old_value = _masked(old_value, mask).detach()
    returns = _masked(returns, mask).detach()
    plain = (value - returns).square()
    clipped = (old_value + (value - old_value).clamp(-clip, clip) - returns).square()
    is_clipped = clipped > plain
    total = 0.5 * torch.where(is_clipped, clipped, plain).sum()
    metrics = {
        "critic/vf_loss": total.detach(),
        "critic/vf_clipfrac": is_clipped.sum(),
        "critic/values/mean": value.detach().sum(),
    }
    return total / max(normaliser, 1), metrics


def supervised_loss(logprob: Tensor, mask: Tensor | None, normaliser: float) -> tuple[Tensor, Metrics]:
    """Negative log-likelihood of the action tokens, summed, over `normaliser`."""
    total = -_masked(logprob, mask).sum()
    return total / max(normaliser, 1), {"actor/sft_loss": total.detach()}


def average_metrics(micro_batches: Iterable[Mapping[str, Tensor]], normaliser: float) -> dict[str, float]:
    """Add up the metric sums of an optimizer step's micro-batches and divide once by its action tokens."""
    sums: dict[str, float] = {}
    for metrics in micro_batches:
        for name, value in metrics.items():
            sums[name] = sums.get(name, 0.0) + float(value)
    return {name: value / max(normaliser, 1) for name, value in sums.items()}


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


def _limit(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
