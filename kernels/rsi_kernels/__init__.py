"""Ops for training language-model agents, embeddable in any trainer (needs torch; triton for its GPU kernels)."""

from .gated_delta_rule import gated_delta_rule
from .linear_logprob import LogprobEntropy, linear_logprob
from .ppo_loss import PpoLoss, ppo_loss
from .tb_gae import combine_moments, flags_from, tb_gae, tb_gae_with_moments
from .value_loss import ValueLoss, clipped_error, value_loss

__all__ = [
    "LogprobEntropy",
    "PpoLoss",
    "ValueLoss",
    "clipped_error",
    "combine_moments",
    "flags_from",
    "gated_delta_rule",
    "linear_logprob",
    "ppo_loss",
    "tb_gae",
    "tb_gae_with_moments",
    "value_loss",
]
