"""Turn-boundary skip-observation generalised advantage estimation (TB-GAE).

Only the tokens that the policy sampled (action tokens) are nodes of the recursion; each keeps its own value
baseline. Discount and trace decay act only where one turn ends and the next begins, so the credit of a turn
depends neither on how many tokens it has nor on how long the observations between turns are.

Shape suffixes: B rows, T tokens, S sequences, N action tokens in row-major order, M turns in the same order.
"""

import math
from array import array
from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import NAMESPACE, traced, use_triton

# What one byte a token says; 0 at observations and padding. "Before" and "after" mean the neighbouring *action* token.
ACTION, BOUNDARY_AFTER, BOUNDARY_BEFORE, SEGMENT_END = 1, 2, 4, 8
LONG = 1 << 16  # elements from which on `_nonzero` gains by words


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
    flag_N = torch.full(nodes.index_N.shape, ACTION, dtype=torch.uint8, device=action.device)
    next_turn = nodes.bounds[1:][nodes.row_goes_on_M]
    flag_N[next_turn - 1] += BOUNDARY_AFTER
    flag_N[next_turn] += BOUNDARY_BEFORE
    flag_N[nodes.row_last] += SEGMENT_END
    flags = torch.zeros(action.shape, dtype=torch.uint8, device=action.device)
    flags.view(-1).scatter_(0, nodes.index_N, flag_N)
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
    constants = [None if x is None else x.detach() for x in (rewards, values, action, turn, flags, bootstrap)]
    arguments = (*constants, cu_seqlens, *(float(x) for x in factors), moments, impl)
    # Nothing here has a gradient, so that without a tracer the op would add only its own cost, a tenth on a CPU.
    return (_op if traced(values) else _compute)(*arguments)  # type: ignore[arg-type]


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

        if flags is None:
            assert action is not None and turn is not None
            flags = flags_from(action, turn, cu_seqlens)
        if bootstrap is not None:
            last = _nonzero(flags & SEGMENT_END)
            rewards = rewards.to(torch.float32).clone(memory_format=torch.contiguous_format)
            _add_bootstrap(rewards.view(-1), last, last, bootstrap, _offsets(values, cu_seqlens), gamma)
        return launch(rewards, values, flags, factors, moments)
    if flags is None:
        assert action is not None and turn is not None
        nodes = _find_nodes(action, turn, cu_seqlens)
    else:
        nodes = _read_nodes(flags)
    advantages = torch.zeros(values.shape, dtype=values.dtype, device=values.device)
    returns = torch.zeros_like(advantages)
    measured = torch.zeros(3 if moments else 0, dtype=torch.float64, device=values.device)
    if nodes.index_N.numel() == 0:
        return advantages, returns, measured
    reward_N = _select(rewards, nodes.index_N).double()
    value_N = _select(values, nodes.index_N).double()
    if bootstrap is not None:
        last = nodes.row_last
        _add_bootstrap(reward_N, last, nodes.index_N[last], bootstrap, _offsets(values, cu_seqlens), gamma)
    by_turn = gamma_token == 1.0 and lambda_token == 1.0
    return_N = (_returns_by_turn if by_turn else _returns_by_token)(reward_N, value_N, nodes, factors)
    advantage_N = return_N - value_N
    total = advantage_N.sum()
    if not math.isfinite(total):  # every reward and value is part of it, and nothing cancels NaN or inf
        raise ValueError(
            "rewards, values and bootstrap must be finite at action tokens; "
            "look for the step at which the critic or the reward became NaN or inf"
        )
    returns.view(-1).scatter_(0, nodes.index_N, return_N.to(values.dtype))
    advantages.view(-1).scatter_(0, nodes.index_N, advantage_N.to(values.dtype))
    if moments:
        mean = total / advantage_N.numel()
        spread = (advantage_N - mean).square().sum()
        measured = torch.stack((torch.full_like(mean, advantage_N.numel()), mean, spread))
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
    bounds: Tensor  # [M+1], where among N each turn begins, and N
    row_goes_on_M: Tensor  # bool: the next turn is of the same row

    @property
    def row_last(self) -> Tensor:
        """Index among N of the last action token of every row that has one."""
        return self.bounds[1:][~self.row_goes_on_M] - 1


def _find_nodes(action: Tensor, turn: Tensor, cu_seqlens: Tensor | None) -> _Nodes:
    if turn.is_floating_point() or turn.dtype == torch.bool:
        raise ValueError(f"turn must be an integer tensor, got {turn.dtype}")
    offsets_S = _offsets(action, cu_seqlens)
    index_N = _nonzero(action)
    turn_N = _select(turn, index_N)
    inside_row, new_row = 1, 2  # where a turn can start
    starts = torch.zeros(index_N.numel() + 1, dtype=torch.uint8, device=action.device)
    torch.ne(turn_N[1:], turn_N[:-1], out=starts[1:-1])
    starts[torch.searchsorted(index_N, offsets_S)] = new_row
    bounds = _nonzero(starts)
    turn_M, row_goes_on_M = turn_N[bounds[:-1]], starts[bounds[1:]] == inside_row
    backwards = (turn_M[1:] < turn_M[:-1]) & row_goes_on_M[:-1]
    if backwards.any():
        later = int(backwards.nonzero()[0]) + 1
        raise ValueError(
            f"turn decreases to {int(turn_M[later])} at flat token {int(index_N[bounds[later]])}; "
            "number the turns of a row in the order they were sampled"
        )
    return _Nodes(index_N, bounds, row_goes_on_M)


def _read_nodes(flags: Tensor) -> _Nodes:
    index_N = _nonzero(flags)
    end_N = _select(flags, index_N).bitwise_and_(BOUNDARY_AFTER | SEGMENT_END)
    last_M = _nonzero(end_N)
    bounds = torch.cat((last_M.new_zeros(1), last_M + 1))
    return _Nodes(index_N, bounds, end_N[last_M] == BOUNDARY_AFTER)


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
    through_M, first_value_M = before[nodes.bounds[1:]], value_N[nodes.bounds[:-1]]
    from_value, from_return = gamma * (1.0 - lam), gamma * lam
    shared, total, next_value = array("d"), 0.0, 0.0
    turns = (reversed(x.tolist()) for x in (through_M, first_value_M, nodes.row_goes_on_M))
    for through, first_value, row_goes_on in zip(*turns, strict=True):
        total = through + from_value * next_value + from_return * (total - through) if row_goes_on else through
        next_value = first_value
        shared.append(total)
    shared.reverse()
    shared_M = torch.frombuffer(shared, dtype=torch.float64).to(reward_N.device)
    shared_N = shared_M.repeat_interleave(nodes.bounds.diff(), output_size=reward_N.numel())
    return shared_N.sub_(before[:-1])


def _returns_by_token(
    reward_N: Tensor, value_N: Tensor, nodes: _Nodes, factors: tuple[float, float, float, float]
) -> Tensor:
    gamma, lam, gamma_token, lambda_token = factors
    turn_last_M, row_last = nodes.bounds[1:] - 1, nodes.row_last
    discount_N = torch.full_like(value_N, gamma_token)
    discount_N[turn_last_M] = gamma
    trace_N = torch.full_like(value_N, gamma_token * lambda_token)
    trace_N[turn_last_M] = gamma * lam
    trace_N[row_last] = 0.0
    next_value_N = torch.zeros_like(value_N)
    next_value_N[:-1] = value_N[1:]
    next_value_N[row_last] = 0.0
    delta_N = reward_N + discount_N * next_value_N - value_N
    longest = int(row_last.diff(prepend=row_last.new_full((1,), -1)).max())
    return _scan_backward(trace_N, delta_N, longest) + value_N


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


def _nonzero(x: Tensor) -> Tensor:
    """Flat indices of the nonzero elements. Many bytes are looked at eight at a time: most words are all 0."""
    flat = x.reshape(-1)
    if flat.is_cuda or flat.element_size() > 1 or flat.numel() < LONG:
        return flat.nonzero().squeeze(1)
    if flat.numel() % 8 or flat.storage_offset() % 8 or not flat.is_contiguous():
        flat = torch.cat((flat, flat.new_zeros(-flat.numel() % 8)))
    filled = flat.view(torch.int64).nonzero()
    inside = flat.view(-1, 8).index_select(0, filled.squeeze(1)) != 0
    return (8 * filled + torch.arange(8)).masked_select(inside)


def _select(x: Tensor, index: Tensor) -> Tensor:
    """Elements by flat index."""
    return x.reshape(-1).index_select(0, index)


def _offsets(like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """int64 [S+1] flat offsets of the rows, checked where they were given."""
    if cu_seqlens is None:
        rows, tokens = like.shape
        return torch.arange(rows + 1, device=like.device) * tokens
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != like.numel() or bool((cu_seqlens.diff() < 0).any()):
        raise ValueError(f"cu_seqlens must rise from 0 to {like.numel()}, got {cu_seqlens.tolist()}")
    return cu_seqlens.to(torch.int64)


def _check_layout(given: dict[str, Tensor], cu_seqlens: Tensor | None) -> None:
    """All of one shape, [B, T], or [T] with offsets."""
    wanted = 2 if cu_seqlens is None else 1
    shapes = {name: tuple(x.shape) for name, x in given.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != wanted for shape in shapes.values()):
        layout = "[B, T] without cu_seqlens" if wanted == 2 else "[T] with cu_seqlens"
        raise ValueError(f"{', '.join(shapes)} must all be {layout}; got {list(shapes.values())}")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point()):
        raise ValueError(f"cu_seqlens must be integers [S+1], got shape {tuple(cu_seqlens.shape)}")
