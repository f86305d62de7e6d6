"""Slow, obvious float64 versions of the ops: the oracle of the tests and the baseline of the benchmarks."""

from collections.abc import Sequence


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
