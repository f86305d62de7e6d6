"""Ops for training language-model agents, embeddable in any trainer (needs torch alone)."""

from .tb_gae import tb_gae

__all__ = ["tb_gae"]
