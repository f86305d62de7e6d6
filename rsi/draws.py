"""Random numbers that depend on a seed and a position alone, and the tokens drawn with them.

Shape suffixes: N rows, V vocabulary.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: Sequence[int], first: Sequence[int], count: int) -> Tensor:
    """float64 [len(seeds), count] in [0, 1): the draw of each seed at positions first, first + 1, ...

    Counter based (splitmix64, Steele et al. 2014): a draw depends on seed and position alone.
    """
    state = _mix(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64) + _GAMMA)
    position = np.array(first, dtype=np.uint64)[:, None] + np.arange(1, count + 1, dtype=np.uint64)
    bits = _mix(state[:, None] + position * _GAMMA)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def _mix(value: np.ndarray) -> np.ndarray:
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def draw(
    logits_NV: Tensor, uniform_N: Tensor, temperature: float, top_p: float = 1.0, top_k: int = 0
) -> tuple[Tensor, Tensor]:
    """Token ids [N] by the inverse distribution function of softmax(logits / temperature), and their log-probs.

    top_k (0: off), then top_p (1: off) limit the draw to the likeliest tokens; the log-probs are those of the whole
    distribution, as the trainer computes them. Temperature 0 takes the most likely token, with its log-prob at
    temperature 1. A token of probability 0 in float32 is never chosen, however close `uniform_N` comes to 1.
    """
    probability = (logits_NV / temperature if temperature not in (0, 1) else logits_NV).softmax(-1)
    if temperature > 0:
        cumulative = _truncate(probability, top_p, top_k).cumsum(-1, dtype=torch.float64)
        total = cumulative[:, -1]
        target = torch.minimum(uniform_N * total, torch.nextafter(total, torch.zeros_like(total)))
        chosen = torch.searchsorted(cumulative, target[:, None], right=True)
        # NaN logits find no place; they are reported by the caller, who sees a NaN log-prob.
        chosen = chosen.clamp_(max=logits_NV.shape[1] - 1)
    else:
        chosen = logits_NV.argmax(-1, keepdim=True)
    return chosen[:, 0], probability.gather(1, chosen).log_()[:, 0]


def _truncate(probability_NV: Tensor, top_p: float, top_k: int) -> Tensor:
    if top_k:
        least = probability_NV.topk(min(top_k, probability_NV.shape[1])).values[:, -1:]
        probability_NV = probability_NV.masked_fill(probability_NV < least, 0)
    if top_p < 1:
        ordered = probability_NV.sort(-1, descending=True).values
        before = ordered.cumsum(-1) - ordered
        # The last token that is needed to reach top_p is kept, and all as likely as it.
        last = (before < top_p * ordered.sum(-1, keepdim=True)).sum(-1, keepdim=True) - 1
        probability_NV = probability_NV.masked_fill(probability_NV < ordered.gather(1, last.clamp_(min=0)), 0)
    return probability_NV
