"""Turn-boundary skip-observation generalised advantage estimation (TB-GAE).

Only the tokens that the policy sampled (action tokens) are nodes of the recursion; each keeps its own value
baseline. Discount and trace decay act only where one turn ends and the next begins, so the credit of a turn
depends neither on how many tokens it has nor on how long the observations between turns are.

Shape suffixes: B rows, T tokens, S sequences, N action tokens in row-major order, M turns in the same order.
"""

import math
from array import array
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import NAMESPACE, traced, use_triton

# What one byte a token says; 0 at observations and padding. "Before" and "after" mean the neighbouring *action* token.
ACTION, BOUNDARY_AFTER, BOUNDARY_BEFORE, SEGMENT_END = 1, 2, 4, 8
NEW_TURN, NEW_ROW = 1, SEGMENT_END


def flags_from(action: Tensor, turn: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    """One uint8 a token, shaped like `action`, of the bits above: what `tb_gae` needs to know about turns.

    A collator can make them once, on the CPU, for every use of a batch. Arguments as for `tb_gae`::

        action  0  1  1  0  1  0        turn  -1  0  0 -1  1 -1
        flags   0  1  3  0 13  0        (13 = action, boundary before it, last action of its row)

    Raises:
        ValueError: wrong shapes or dtypes, offsets that do not cover all tokens, turns that decrease within a row.
    """
    _check_layout({"action": action, "turn": turn}, cu_seqlens)
    nodes = _find_nodes(action, turn, cu_seqlens)
    starts_N, ends_N = nodes.marks[:-1], nodes.marks[1:]
    flag_N = ACTION + BOUNDARY_AFTER * (ends_N == NEW_TURN) + BOUNDARY_BEFORE * (starts_N == NEW_TURN)
    flag_N += SEGMENT_END * (ends_N == NEW_ROW)
    flags = torch.zeros(action.shape, dtype=torch.uint8, device=action.device)
    flags.view(-1).scatter_(0, nodes.index_N, flag_N.to(torch.uint8))
    return flags


def tb_gae(
    rewards: Tensor,
    values: Tensor,
    action: Tensor | None = None,
    turn: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    gamma_token: float = 1.0,
    lambda_token: float = 1.0,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    flags: Tensor | None = None,
    impl: str = "auto",
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
        flags: same shape, uint8 of `flags_from`, in place of `action` and `turn`; a GPU then never waits.
        impl: "auto", "triton" or "torch" (`dispatch.use_triton`).

    Returns:
        (advantages, returns), shaped like `values` and in its dtype. No gradient. Deterministic. The torch path
        accumulates in float64 over the action tokens alone (about 100 bytes each); the Triton kernels in float32,
        reading 9 bytes a token (rows above 4096 tokens twice, mostly from the cache) and writing 8.

    Raises:
        ValueError: wrong shapes, factors outside [0, 1], decreasing turns, or (torch path) a reward, value or
            bootstrap that is not finite at an action token.

    Source: Terminal-RSI (arXiv 2610.22192). With both inner factors 1 the recursion telescopes: return[i] =
    rewards from i to the end of its turn + gamma * ((1 - lam) * V + lam * return) at the first action token
    of the next turn, so that only turns are sequential.
    """
    factors = (gamma, lam, gamma_token, lambda_token)
    advantages, returns, _ = _run(rewards, values, action, turn, factors, bootstrap, cu_seqlens, flags, False, impl)
    return advantages, returns


def tb_gae_with_moments(
    rewards: Tensor,
    values: Tensor,
    action: Tensor | None = None,
    turn: Tensor | None = None,
    gamma: float = 0.99,
    lam: float = 0.95,
    gamma_token: float = 1.0,
    lambda_token: float = 1.0,
    bootstrap: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    flags: Tensor | None = None,
    impl: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """`tb_gae` and, from the same pass, float64 [3] of the advantages: count, mean, sum of squared deviations.

    To whiten over all ranks: gather everyone's three numbers, `combine_moments`, and apply (A - mean) / std where the
    policy loss reads A.
    """
    factors = (gamma, lam, gamma_token, lambda_token)
    return _run(rewards, values, action, turn, factors, bootstrap, cu_seqlens, flags, True, impl)


def combine_moments(moments: Tensor) -> Tensor:
    """[R, 3] of (count, mean, sum of squared deviations) of disjoint parts to [3] of the whole; float64.

    Source: Chan, Golub and LeVeque 1983; the deviations are taken about the common mean, never as E[x^2] - E[x]^2.
    """
    count, mean, squares = moments.double().unbind(-1)
    total = count.sum()
    centre = (count * mean).sum() / total.clamp(min=1)
    return torch.stack((total, centre, (squares + count * (mean - centre).square()).sum()))


def _run(
    rewards: Tensor,
    values: Tensor,
    action: Tensor | None,
    turn: Tensor | None,
    factors: tuple[float, float, float, float],
    bootstrap: Tensor | None,
    cu_seqlens: Tensor | None,
    flags: Tensor | None,
    moments: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    given = {"rewards": rewards, "values": values, "action": action, "turn": turn, "flags": flags}
    if (flags is None) != (action is not None and turn is not None):
        raise ValueError(f"give either action and turn, or flags; got {[k for k, x in given.items() if x is not None]}")
    _check_layout({name: x for name, x in given.items() if x is not None}, cu_seqlens)
    if not values.is_floating_point():
        raise ValueError(f"values must be floating point, got {values.dtype}; the results take its dtype")
    if flags is not None and flags.dtype != torch.uint8:
        raise ValueError(f"flags must be the uint8 of `flags_from`, got {flags.dtype}")
    for name, factor in zip(("gamma", "lam", "gamma_token", "lambda_token"), factors, strict=True):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"{name} must be within [0, 1], got {factor}")
    rows = values.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if bootstrap is not None and tuple(bootstrap.shape) != (rows,):
        raise ValueError(f"bootstrap must be one value a row, [{rows}], got {tuple(bootstrap.shape)}")
    arguments = (rewards, values, action, turn, flags, bootstrap)
    options = (cu_seqlens, *(float(x) for x in factors), moments, impl)
    if traced(values):
        return _op(*(None if x is None else x.detach() for x in arguments), *options)
    # Nothing here has a gradient, so that the dispatcher would add only its own cost, a tenth on a CPU.
    return _compute(*arguments, *options)  # type: ignore[arg-type]


def _compute(
    rewards: Tensor,
    values: Tensor,
    action: Tensor | None,
    turn: Tensor | None,
    flags: Tensor | None,
    bootstrap: Tensor | None,
    cu_seqlens: Tensor | None,
    gamma: float,
    lam: float,
    gamma_token: float,
    lambda_token: float,
    moments: bool,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(advantages, returns, moments [3] or [0])."""
    factors = (gamma, lam, gamma_token, lambda_token)
    if use_triton(impl, values):
        from .tb_gae_triton import launch

        with torch.no_grad():
            if flags is None:
                assert action is not None and turn is not None
                flags = flags_from(action, turn, cu_seqlens)
            if bootstrap is not None:
                last = _nonzero(flags & SEGMENT_END)
                rewards = rewards.to(torch.float32).clone(memory_format=torch.contiguous_format)
                _add_bootstrap(rewards.view(-1), last, last, bootstrap, _offsets(values, cu_seqlens), gamma)
            return launch(rewards, values, flags, factors, moments)
    advantages, returns = values.new_zeros(values.shape), values.new_zeros(values.shape)
    measured = values.new_zeros(3 if moments else 0, dtype=torch.float64)
    with torch.inference_mode():  # a tenth faster; its own tensors must not get out, so the results are from before
        if flags is None:
            assert action is not None and turn is not None
            nodes = _find_nodes(action, turn, cu_seqlens)
        else:
            nodes = _read_nodes(flags)
        if nodes.index_N.numel():
            reward_N = _select(rewards, nodes.index_N).double()
            value_N = _select(values, nodes.index_N).double()
            if bootstrap is not None:
                last = nodes.row_bounds[1:] - 1
                _add_bootstrap(reward_N, last, nodes.index_N[last], bootstrap, _offsets(values, cu_seqlens), gamma)
            by_turn = gamma_token == 1.0 and lambda_token == 1.0
            return_N = (_returns_by_turn if by_turn else _returns_by_token)(reward_N, value_N, nodes, factors)
            returns.view(-1).scatter_(0, nodes.index_N, return_N.to(values.dtype))
            advantage_N = return_N.sub_(value_N)
            total = advantage_N.sum()
            if not math.isfinite(total):  # every reward and value is part of it, and nothing cancels NaN or inf
                raise ValueError(
                    "rewards, values and bootstrap must be finite at action tokens; "
                    "look for the step at which the critic or the reward became NaN or inf"
                )
            advantages.view(-1).scatter_(0, nodes.index_N, advantage_N.to(values.dtype))
            if moments:
                mean = total / advantage_N.numel()
                measured[0] = advantage_N.numel()
                measured[1] = mean
                measured[2] = (advantage_N - mean).square().sum()
    return advantages, returns, measured


_op = torch.library.custom_op(f"{NAMESPACE}::tb_gae", _compute, mutates_args=())


@_op.register_fake
def _(rewards, values, *arguments):  # type: ignore[no-untyped-def]
    advantages = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    measured = torch.empty(3 if arguments[-2] else 0, dtype=torch.float64, device=values.device)
    return advantages, torch.empty_like(advantages), measured


class _Nodes(NamedTuple):
    """The N action tokens, and the M turns that they fall into."""

    index_N: Tensor  # flat token index
    marks: Tensor  # int8 [N+1], what begins at an action token: 0 nothing, NEW_TURN or NEW_ROW; NEW_ROW at the end
    bounds: Tensor  # [M+1], where among N each turn begins, and N
    kinds: list[int]  # [M+1], `marks` there

    @property
    def row_bounds(self) -> Tensor:
        """Where among N each row that has action tokens begins, and N."""
        return _nonzero(self.marks == NEW_ROW)


def _find_nodes(action: Tensor, turn: Tensor, cu_seqlens: Tensor | None) -> _Nodes:
    if turn.is_floating_point() or turn.dtype == torch.bool:
        raise ValueError(f"turn must be an integer tensor, got {turn.dtype}")
    offsets_S = _offsets(action, cu_seqlens)
    index_N = _nonzero(action)
    turn_N = _select(turn, index_N)
    marks = turn_N.new_zeros(turn_N.numel() + 1, dtype=torch.int8)
    torch.ne(turn_N[1:], turn_N[:-1], out=marks[1:-1])
    marks.index_fill_(0, torch.searchsorted(index_N, offsets_S), NEW_ROW)
    nodes = _nodes(index_N, marks)
    turns = turn_N.index_select(0, nodes.bounds[:-1]).tolist()
    for node, (turn_before, turn_here) in enumerate(pairwise(turns), 1):
        if turn_here < turn_before and nodes.kinds[node] != NEW_ROW:
            raise ValueError(
                f"turn decreases to {turn_here} at flat token {int(index_N[nodes.bounds[node]])}; "
                "number the turns of a row in the order they were sampled"
            )
    return nodes


def _read_nodes(flags: Tensor) -> _Nodes:
    index_N = _nonzero(flags)
    marks = flags.new_full((index_N.numel() + 1,), NEW_ROW, dtype=torch.int8)
    torch.bitwise_and(_select(flags, index_N), BOUNDARY_AFTER | SEGMENT_END, out=marks[1:])
    return _nodes(index_N, marks)


def _nodes(index_N: Tensor, marks: Tensor) -> _Nodes:
    bounds = _nonzero(marks)
    return _Nodes(index_N, marks, bounds, marks.index_select(0, bounds).tolist())


def _add_bootstrap(
    reward: Tensor, last: Tensor, token: Tensor, bootstrap: Tensor, offsets_S: Tensor, gamma: float
) -> None:
    """Reached with g = gamma and never traced further, a bootstrap value acts exactly as part of the last reward."""
    segment = torch.searchsorted(offsets_S, token, right=True) - 1
    reward[last] += gamma * bootstrap[segment].to(reward.dtype)


def _returns_by_turn(
    reward_N: Tensor, value_N: Tensor, nodes: _Nodes, factors: tuple[float, float, float, float]
) -> Tensor:
    """return[i] = (rewards up to the end of i's turn + what follows it) - rewards before i, all counted from 0."""
    gamma, lam, _, _ = factors
    before = reward_N.new_zeros(reward_N.numel() + 1)
    torch.cumsum(reward_N, 0, out=before[1:])
    through_M = before.index_select(0, nodes.bounds).tolist()
    first_value_M = value_N.take(nodes.bounds - value_N.numel()).tolist()  # from the end: at N stands the first
    from_value, from_return = gamma * (1.0 - lam), gamma * lam
    shared, total = array("d"), 0.0
    for kind, through, next_value in zip(nodes.kinds[:0:-1], through_M[:0:-1], first_value_M[:0:-1], strict=True):
        total = through if kind == NEW_ROW else through + from_value * next_value + from_return * (total - through)
        shared.append(total)
    shared.reverse()
    shared_M = torch.frombuffer(shared, dtype=torch.float64).to(reward_N.device)
    shared_N = shared_M.repeat_interleave(nodes.bounds.diff(), output_size=reward_N.numel())
    return shared_N.sub_(before[:-1])


def _returns_by_token(
    reward_N: Tensor, value_N: Tensor, nodes: _Nodes, factors: tuple[float, float, float, float]
) -> Tensor:
    gamma, lam, gamma_token, lambda_token = factors
    row_bounds = nodes.row_bounds
    discount_N = torch.full_like(value_N, gamma_token)
    discount_N[nodes.bounds[1:] - 1] = gamma
    trace_N = torch.full_like(value_N, gamma_token * lambda_token)
    trace_N[nodes.bounds[1:] - 1] = gamma * lam
    trace_N[row_bounds[1:] - 1] = 0.0
    next_value_N = value_N.roll(-1)
    next_value_N[row_bounds[1:] - 1] = 0.0
    advantage_N = reward_N + discount_N * next_value_N - value_N
    # A[i] = delta[i] + trace[i] A[i+1] in log2(longest row) vector steps: traces are 0 where rows end.
    longest, span = int(row_bounds.diff().max()), 1
    while span < longest:
        advantage_N[:-span] += trace_N[:-span] * advantage_N[span:]
        trace_N[:-span] = trace_N[:-span] * trace_N[span:]
        span *= 2
    return advantage_N + value_N


def _nonzero(x: Tensor) -> Tensor:
    """Flat indices of the nonzero elements."""
    return x.reshape(-1).nonzero().squeeze(1)


def _select(x: Tensor, index: Tensor) -> Tensor:
    """Elements by flat index."""
    return x.reshape(-1).index_select(0, index)


def _offsets(like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """int64 [S+1] flat offsets of the rows, checked where they were given."""
    if cu_seqlens is None:
        return torch.arange(0, like.numel() + 1, max(like.shape[1], 1), device=like.device)
    offsets = cu_seqlens.tolist()
    if offsets[0] != 0 or offsets[-1] != like.numel() or offsets != sorted(offsets):
        raise ValueError(f"cu_seqlens must rise from 0 to {like.numel()}, got {offsets}")
    return cu_seqlens.to(torch.int64)


def _check_layout(given: dict[str, Tensor], cu_seqlens: Tensor | None) -> None:
    """All of one shape, [B, T], or [T] with offsets."""
    wanted = 2 if cu_seqlens is None else 1
    shapes = [x.shape for x in given.values()]
    if any(shape != shapes[0] for shape in shapes) or len(shapes[0]) != wanted:
        layout = "[B, T] without cu_seqlens" if wanted == 2 else "[T] with cu_seqlens"
        raise ValueError(f"{', '.join(given)} must all be {layout}; got {[tuple(shape) for shape in shapes]}")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point()):
        raise ValueError(f"cu_seqlens must be integers [S+1], got shape {tuple(cu_seqlens.shape)}")
