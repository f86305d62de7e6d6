"""Slow, obvious versions of the ops: the oracle of the tests and the baseline of the benchmarks.

Plain torch (TB-GAE: plain Python), any device, differentiable by autograd, in the dtype of the inputs: give float64 for
an oracle. The gated delta rule's is `gated_delta_rule.recurrent`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def linear_logprob(
    hidden: Tensor, weight: Tensor, target: Tensor, temperature: float | Tensor = 1.0, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """(logprob, entropy) of `linear_logprob`, with all logits [N, V] in memory."""
    keep = target != ignore_index
    hidden = torch.where(keep[..., None], hidden, 0.0)
    scale = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    logprobs = (torch.nn.functional.linear(hidden, weight) / scale).log_softmax(-1)
    chosen = logprobs.gather(-1, torch.where(keep, target, 0)[..., None]).squeeze(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return torch.where(keep, chosen, 0.0), torch.where(keep, entropy, 0.0)


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
) -> tuple[Tensor, ...]:
    """The fields of `PpoLoss`, in their order."""
    keep = torch.ones_like(logprob, dtype=torch.bool) if mask is None else mask != 0
    logprob, old_logprob, advantage = (torch.where(keep, x, 0.0) for x in (logprob, old_logprob, advantage))
    log_ratio = (logprob - old_logprob).clamp(-20.0, 20.0)
    ratio = log_ratio.exp()
    plain, held = -advantage * ratio, -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    clipped = held > plain
    loss = torch.where(clipped, held, plain)
    bounded = torch.zeros_like(clipped)
    if dual_clip is not None:
        bounded = (advantage < 0) & (loss > -advantage * dual_clip)
        loss = torch.where(bounded, -advantage * dual_clip, loss)
    if importance_weight is not None:
        loss = loss * torch.where(keep, importance_weight, 0.0)
    surrogate, estimate = loss.sum(), torch.zeros_like(loss)
    if reference_logprob is not None:
        away = (logprob - torch.where(keep, reference_logprob, 0.0)).clamp(-20.0, 20.0)
        estimate = {"k1": away, "k2": 0.5 * away.square(), "k3": (-away).exp() - 1.0 + away}[kl_kind]
    loss = loss + kl_coefficient * estimate
    return loss, surrogate, clipped.sum(), bounded.sum(), -log_ratio.sum(), estimate.sum()


def value_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    old_value: Tensor,
    returns: Tensor,
    mask: Tensor | None = None,
    clip: float = 0.2,
) -> tuple[Tensor, Tensor, Tensor]:
    """The fields of `ValueLoss`, in their order."""
    keep = torch.ones_like(returns, dtype=torch.bool) if mask is None else mask != 0
    hidden = torch.where(keep[..., None], hidden, 0.0)
    value = torch.nn.functional.linear(hidden, weight.reshape(1, -1), bias.reshape(1)).squeeze(-1)
    value, old_value, returns = (torch.where(keep, x, 0.0) for x in (value, old_value, returns))
    held = old_value + (value - old_value).clamp(-clip, clip)
    errors = 0.5 * torch.stack(((value - returns).square(), (held - returns).square()))
    clipped = (errors[1] > errors[0]) & ((value - old_value).abs() > clip)
    return torch.where(clipped, errors[1], errors[0]).sum(), value, clipped.sum()


def tb_gae_row(
    rewards: Sequence[float],
    values: Sequence[float],
    action: Sequence[int],
    turn: Sequence[int],
    gamma: float = 0.99,
    lam: float = 0.95,
    gamma_token: float = 1.0,
    lambda_token: float = 1.0,
    bootstrap: float = 0.0,
) -> tuple[list[float], list[float]]:
    """TB-GAE of one row by its recursion, token by token from the end, in Python's float64.

    All sequences have length T; see `tb_gae` for their meaning. Returns (advantages, returns), each of length
    T and 0 where `action` is 0.
    """
    advantages, returns = [0.0] * len(action), [0.0] * len(action)
    nodes = [t for t in range(len(action)) if action[t]]
    next_advantage, next_value, next_turn = 0.0, bootstrap, None
    for t in reversed(nodes):
        same_turn = turn[t] == next_turn
        discount, trace = (gamma_token, lambda_token) if same_turn else (gamma, lam)
        delta = rewards[t] + discount * next_value - values[t]
        advantages[t] = delta + discount * trace * next_advantage
        returns[t] = advantages[t] + values[t]
        next_advantage, next_value, next_turn = advantages[t], values[t], turn[t]
    return advantages, returns
