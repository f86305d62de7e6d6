"""Turn-boundary skip-observation generalised advantage estimation (TB-GAE).

Only the tokens that the policy sampled (action tokens) are nodes of the recursion; each keeps its own value
baseline. Discount and trace decay act only where one turn ends and the next begins, so the credit of a turn
depends neither on how many tokens it has nor on how long the observations between turns are.

Shape suffixes: B rows, T tokens, S sequences, N action tokens in row-major order, M turns in the same order.
"""

from typing import NamedTuple

import torch
from torch import Tensor


def tb_gae(
    rewards: Tensor,
    values: Tensor,
    action: Tensor,
    turn: Tensor,
    gamma: float = 0.99,
    lam: float = 0.95,
    gamma_token: float = 1.0,
    lambda_token: float = 1.0,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns of every action token; exactly zero at all other tokens.

    Over the action tokens i = 1..n of a row, with turn k(i)::

        same turn next:  g = gamma_token,  l = lambda_token      (both 1 by default)
        next turn next:  g = gamma,        l = lam
        last token:      V[n+1] = bootstrap (0 without one), reached with g = gamma
        delta[i]  = rewards[i] + g * V[i+1] - V[i]
        A[i]      = delta[i] + g * l * A[i+1]
        return[i] = A[i] + V[i]

    Equal pairs (gamma_token, lambda_token) = (gamma, lam) give plain skip-observation GAE; with every token
    an action as well, ordinary token GAE.

    Args:
        rewards, values: [B, T] (or packed [T]). values[t] = V(state before token t was sampled), that is, the
            critic's output at token t-1. Whatever stands at non-action tokens (NaN included) is never read.
        action: same shape, nonzero = sampled by the policy.
        turn: same shape, integer; must not decrease from one action token of a row to the next (gaps are
            fine); not read at other tokens.
        gamma, lam, gamma_token, lambda_token: in [0, 1].
        bootstrap: [B] (packed: [S]) value of the state after the last action token, or None for 0.
        cu_seqlens: [S+1] offsets of the packed sequences (0 first, T last), or None for padded input.

    Returns:
        (advantages, returns), shaped like `values` and in its dtype, accumulated in float64. No gradient.

    Raises:
        ValueError: wrong shapes, factors outside [0, 1], decreasing turns, or a reward, value or bootstrap
            that is not finite at an action token.

    Source: Terminal-RSI (arXiv 2610.22192). With both inner factors 1 the recursion telescopes: return[i] =
    rewards from i to the end of its turn + gamma * ((1 - lam) * V + lam * return) at the first action token
    of the next turn, so that only turns are sequential.
    """
    _check_arguments(rewards, values, action, turn, (gamma, lam, gamma_token, lambda_token), cu_seqlens)
    with torch.no_grad():
        offsets_S = cu_seqlens if cu_seqlens is not None else _padded_offsets(values)
        index_N = action.reshape(-1).nonzero().squeeze(1)
        advantages = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
        returns = torch.zeros_like(advantages)
        layout = _find_turns(index_N, turn, offsets_S)
        bootstrap_S = _row_bootstrap(bootstrap, offsets_S, layout, rewards)
        if index_N.numel() == 0:
            return advantages, returns
        reward_N = rewards.reshape(-1).index_select(0, index_N).double()
        value_N = values.reshape(-1).index_select(0, index_N).double()
        if not torch.isfinite(reward_N.sum() + value_N.sum() + bootstrap_S.sum()):
            raise ValueError(
                "rewards, values and bootstrap must be finite at action tokens; "
                "look for the step at which the critic or the reward became NaN or inf"
            )
        if gamma_token == 1.0 and lambda_token == 1.0:
            return_N = _returns_by_turn(reward_N, value_N, bootstrap_S, layout, gamma, lam)
        else:
            factors = (gamma, lam, gamma_token, lambda_token)
            return_N = _returns_by_token(reward_N, value_N, bootstrap_S, layout, factors)
        returns.view(-1).index_copy_(0, index_N, return_N.to(values.dtype))
        advantages.view(-1).index_copy_(0, index_N, (return_N - value_N).to(values.dtype))
    return advantages, returns


class _Layout(NamedTuple):
    """Where turns and rows end among the N action tokens."""

    row_last: Tensor  # index among N of the last action token of every row that has one
    row_filled_S: Tensor  # bool, which rows have one
    turn_last_M: Tensor  # index among N of every turn's last action token
    turn_first_M: Tensor
    longest_row: int  # action tokens of the row with the most


def _check_arguments(
    rewards: Tensor,
    values: Tensor,
    action: Tensor,
    turn: Tensor,
    factors: tuple[float, ...],
    cu_seqlens: Tensor | None,
) -> None:
    wanted = 2 if cu_seqlens is None else 1
    shapes = [tuple(x.shape) for x in (rewards, values, action, turn)]
    if values.dim() != wanted or len(set(shapes)) != 1:
        layout = "[B, T] without cu_seqlens" if wanted == 2 else "[T] with cu_seqlens"
        raise ValueError(f"rewards, values, action and turn must all be {layout}; got {shapes}")
    if not values.is_floating_point():
        raise ValueError(f"values must be floating point, got {values.dtype}; the results take its dtype")
    if turn.is_floating_point() or turn.dtype == torch.bool:
        raise ValueError(f"turn must be an integer tensor, got {turn.dtype}")
    for name, factor in zip(("gamma", "lam", "gamma_token", "lambda_token"), factors, strict=True):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} must be within [0, 1], got {factor}")
    if cu_seqlens is not None:
        tokens = values.shape[0]
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
            raise ValueError(f"cu_seqlens must be integers [S+1], got shape {tuple(cu_seqlens.shape)}")
        if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != tokens or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to {tokens}, got {cu_seqlens.tolist()}")


def _padded_offsets(values: Tensor) -> Tensor:
    rows, tokens = values.shape
    return torch.arange(rows + 1, device=values.device) * tokens


def _find_turns(index_N: Tensor, turn: Tensor, offsets_S: Tensor) -> _Layout:
    edge_S = torch.searchsorted(index_N, offsets_S.to(index_N.dtype))
    length_S = edge_S.diff()
    row_filled_S = length_S > 0
    row_last = edge_S[1:][row_filled_S] - 1
    longest_row = int(length_S.max()) if length_S.numel() else 0
    turn_N = turn.reshape(-1).index_select(0, index_N)
    change = turn_N.diff().nonzero().squeeze(1)
    backwards = change[turn_N[change + 1] < turn_N[change]]
    backwards = backwards[torch.isin(backwards, row_last, invert=True)]
    if backwards.numel():
        token = int(index_N[backwards[0] + 1])
        raise ValueError(
            f"turn decreases to {int(turn_N[backwards[0] + 1])} at flat token {token}; "
            "number the turns of a row in the order they were sampled"
        )
    turn_last_M = torch.cat([change, row_last]).unique()
    turn_first_M = torch.cat([torch.zeros_like(row_last[:1]), turn_last_M[:-1] + 1])
    return _Layout(row_last, row_filled_S, turn_last_M, turn_first_M, longest_row)


def _row_bootstrap(bootstrap: Tensor | None, offsets_S: Tensor, layout: _Layout, like: Tensor) -> Tensor:
    """float64 bootstrap of the rows that have an action token, in row order."""
    rows = offsets_S.numel() - 1
    if bootstrap is None:
        return torch.zeros(layout.row_last.numel(), dtype=torch.float64, device=like.device)
    if tuple(bootstrap.shape) != (rows,):
        raise ValueError(f"bootstrap must be one value a row, [{rows}], got {tuple(bootstrap.shape)}")
    return bootstrap[layout.row_filled_S].double()


def _returns_by_turn(
    reward_N: Tensor, value_N: Tensor, bootstrap_S: Tensor, layout: _Layout, gamma: float, lam: float
) -> Tensor:
    first_M, last_M = layout.turn_first_M, layout.turn_last_M
    through_N = reward_N.cumsum(0)
    before_N = through_N - reward_N
    row_end_M = torch.searchsorted(last_M, layout.row_last)
    following_M = torch.zeros_like(value_N[last_M])
    following_M[:-1] = gamma * (1.0 - lam) * value_N[first_M[1:]]
    following_M[row_end_M] = gamma * bootstrap_S
    trace_M = torch.full_like(following_M, gamma * lam)
    trace_M[row_end_M] = 0.0
    first_return_M = through_N[last_M] - before_N[first_M] + following_M
    turns = int(row_end_M.diff(prepend=row_end_M.new_full((1,), -1)).max())
    first_return_M = _scan_backward(trace_M, first_return_M, turns)
    # What a turn's tokens share: everything that comes after the turn's own rewards.
    following_M[:-1] += trace_M[:-1] * first_return_M[1:]
    shared_N = (through_N[last_M] + following_M).repeat_interleave(last_M - first_M + 1)
    return shared_N - before_N


def _returns_by_token(
    reward_N: Tensor,
    value_N: Tensor,
    bootstrap_S: Tensor,
    layout: _Layout,
    factors: tuple[float, float, float, float],
) -> Tensor:
    gamma, lam, gamma_token, lambda_token = factors
    discount_N = torch.full_like(value_N, gamma_token)
    discount_N[layout.turn_last_M] = gamma
    trace_N = torch.full_like(value_N, gamma_token * lambda_token)
    trace_N[layout.turn_last_M] = gamma * lam
    trace_N[layout.row_last] = 0.0
    next_value_N = torch.zeros_like(value_N)
    next_value_N[:-1] = value_N[1:]
    next_value_N[layout.row_last] = bootstrap_S
    delta_N = reward_N + discount_N * next_value_N - value_N
    return _scan_backward(trace_N, delta_N, layout.longest_row) + value_N


def _scan_backward(factor: Tensor, term: Tensor, longest: int) -> Tensor:
    """Solve y[i] = term[i] + factor[i] * y[i+1] in log2(longest) vector steps.

    factor is 0 at the last element of every segment, of which none has more than `longest` elements.
    """
    reach, total = factor.clone(), term.clone()
    span = 1
    while span < longest:
        total[:-span] += reach[:-span] * total[span:]
        reach[:-span] = reach[:-span] * reach[span:]
        span *= 2
    return total
