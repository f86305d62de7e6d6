"""Ops for training language-model agents, embeddable in any trainer (needs torch alone)."""

from .gated_delta_rule import gated_delta_rule
from .tb_gae import tb_gae

__all__ = ["gated_delta_rule", "tb_gae"]
