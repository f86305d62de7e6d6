"""Family dense reward (FDR) and success-prioritised reward (SPR): one number for a whole attempt.

Source: Terminal-RSI (arXiv 2610.22192), with the count-over-fixed-scale form of T1 (arXiv 2609.11042).
"""

from collections.abc import Mapping, Sequence

import numpy
import torch
from torch import Tensor

FAMILY_MINIMUM = 20
PERCENTILE = 90.0


def family_scale(checks_by_family: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """S_f of every family: the checklist size that counts as full progress, fixed before a run.

    `checks_by_family` has the checklist size of every training task of a family (0 = no per-check report, not
    counted). S_f is their 90th percentile (linear interpolation); with fewer than 20 tasks, the largest.
    A family whose tasks say no size gets 0: an attempt's own checklist is its scale.

    >>> family_scale({"sort_file": [1, 4, 2]})
    {'sort_file': 4.0}
    """
    scale = {}
    for family, sizes in checks_by_family.items():
        if any(size < 0 for size in sizes):
            raise ValueError(f"family {family!r}: a checklist size is negative: {min(sizes)}")
        reported = [size for size in sizes if size > 0]
        if not reported:
            scale[family] = 0.0
        elif len(reported) < FAMILY_MINIMUM:
            scale[family] = float(max(reported))
        else:
            scale[family] = float(numpy.percentile(reported, PERCENTILE))
    return scale


def fdr(passed: int, total: int, scale: float, strict: bool, cap: float = 1.0) -> float:
    """min(passed / scale, cap); without a per-check report (total 0): 1 if strict else 0.

    `scale` is S_f of the attempt's family, 0: `total`. At cap 1 the result is in [0, 1].
    """
    if not 0 <= passed <= total:
        raise ValueError(f"passed checks must be between 0 and total, got {passed} of {total}")
    if not scale >= 0 or not cap > 0:
        raise ValueError(f"scale must be at least 0 and cap above 0, got scale {scale}, cap {cap}")
    if total == 0:
        return float(strict)
    return min(passed / (scale or total), cap)


def spr(
    passed: int, total: int, scale: float, strict: bool, bonus: float = 0.0, partial: float = 0.5, cap: float = 1.0
) -> float:
    """Strict success: 1 + bonus. Anything else: partial * min(FDR, 1), so always below 1."""
    if bonus < 0 or not 0 <= partial < 1:
        raise ValueError(f"bonus must be at least 0 and partial within [0, 1), got {bonus} and {partial}")
    progress = fdr(passed, total, scale, strict, cap)
    return 1.0 + bonus if strict else partial * min(progress, 1.0)


def terminal_rewards(action_T: Tensor, cu_seqlens: Tensor, reward_S: Tensor) -> Tensor:
    """[T] rewards with each packed trajectory's reward on its last action token, whatever follows it; float32.

    A trajectory without action tokens gets none: there is no decision to credit. `cu_seqlens` [S + 1] as in `tb_gae`.
    """
    if reward_S.shape != (cu_seqlens.numel() - 1,):
        raise ValueError(f"one reward a trajectory is needed: [{cu_seqlens.numel() - 1}], got {tuple(reward_S.shape)}")
    index_N = action_T.nonzero().squeeze(1)
    edge_S = torch.searchsorted(index_N, cu_seqlens)
    acts_S = edge_S.diff() > 0
    placed_T = torch.zeros(action_T.shape, device=action_T.device)
    placed_T[index_N[edge_S[1:][acts_S] - 1]] = reward_S[acts_S].to(torch.float32)
    return placed_T
