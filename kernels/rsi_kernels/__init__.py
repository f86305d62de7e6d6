"""Ops for training language-model agents, embeddable in any trainer (needs torch; triton for its GPU kernels)."""

from .gated_delta_rule import gated_delta_rule
from .linear_logprob import LogprobEntropy, linear_logprob
from .ppo_loss import PpoLoss, ppo_loss
from .tb_gae import tb_gae
from .value_loss import ValueLoss, value_loss

__all__ = [
    "LogprobEntropy",
    "PpoLoss",
    "ValueLoss",
    "gated_delta_rule",
    "linear_logprob",
    "ppo_loss",
    "tb_gae",
    "value_loss",
]
