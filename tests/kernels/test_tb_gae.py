"""TB-GAE against its recursion, and every property that follows from its definition."""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rsi_kernels import combine_moments, flags_from, tb_gae, tb_gae_triton, tb_gae_with_moments
from rsi_kernels.reference import tb_gae_row
from torch import Tensor

PROPERTY = settings(deadline=None, max_examples=60, derandomize=True)
FACTOR = st.one_of(st.just(0.0), st.just(1.0), st.floats(0.0, 1.0))
NUMBER = st.floats(-10.0, 10.0, width=32)
FACTORS = ("gamma", "lam", "gamma_token", "lambda_token")


@dataclass
class Batch:
    """Padded [B, T] inputs; observation positions hold whatever `fill` says."""

    rewards: Tensor
    values: Tensor
    action: Tensor
    turn: Tensor

    def run(self, *factors: float, **options: object) -> tuple[Tensor, Tensor]:
        return tb_gae(self.rewards, self.values, self.action, self.turn, *factors, **options)  # type: ignore[arg-type]


# A row is a list of turns (turn number, [(reward, value), ...]); observations are added when it is laid out.
TURN = st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=6)
ROW = st.lists(st.tuples(st.integers(1, 3), TURN), max_size=5)
ROWS = st.lists(ROW, max_size=4)


def lay_out(rows: list, gaps: list[int], fill: float, dtype: torch.dtype = torch.float64) -> Batch:
    """Put `gaps[i % len]` observation tokens before the i-th action token and after the last one of a row."""
    laid, spent = [], 0
    for row in rows:
        tokens, number = [], -1
        for skip, nodes in row:
            number += skip
            for reward, value in nodes:
                tokens += [(fill, fill, 0, -1)] * gaps[spent % len(gaps)] + [(reward, value, 1, number)]
                spent += 1
        laid.append(tokens + [(fill, fill, 0, -1)] * gaps[spent % len(gaps)])
    width = max((len(tokens) for tokens in laid), default=0)
    laid = [tokens + [(fill, fill, 0, -1)] * (width - len(tokens)) for tokens in laid]
    table = torch.tensor(laid, dtype=torch.float64).reshape(len(rows), width, 4)
    rewards, values, action, turn = table.unbind(-1)
    return Batch(rewards.to(dtype), values.to(dtype), action.bool(), turn.long())


def expected(batch: Batch, *factors: float, bootstrap: Tensor | None = None) -> tuple[Tensor, Tensor]:
    pairs = []
    for row in range(batch.values.shape[0]):
        fields = (x[row].tolist() for x in (batch.rewards, batch.values, batch.action, batch.turn))
        last_value = 0.0 if bootstrap is None else float(bootstrap[row])
        pairs.append(tb_gae_row(*fields, *factors, bootstrap=last_value))
    shape = batch.values.shape
    tables = [torch.tensor([pair[k] for pair in pairs], dtype=torch.float64).reshape(shape) for k in (0, 1)]
    return tables[0], tables[1]


@PROPERTY
@given(ROWS, st.lists(st.integers(0, 4), min_size=1, max_size=5), FACTOR, FACTOR, FACTOR, FACTOR, st.booleans())
def test_equals_the_recursion(rows, gaps, gamma, lam, gamma_token, lambda_token, inner):
    batch = lay_out(rows, gaps, fill=math.nan)
    factors = (gamma, lam, gamma_token, lambda_token) if inner else (gamma, lam, 1.0, 1.0)
    for ours, oracle in zip(batch.run(*factors), expected(batch, *factors), strict=True):
        torch.testing.assert_close(ours, oracle, rtol=1e-10, atol=1e-10)


@PROPERTY
@given(ROWS, st.data(), FACTOR, FACTOR, st.sampled_from([1.0, 0.7]))
def test_bootstrap_is_the_value_after_the_last_token(rows, data, gamma, lam, gamma_token):
    batch = lay_out(rows, [1], fill=math.inf)
    bootstrap = torch.tensor(data.draw(st.lists(NUMBER, min_size=len(rows), max_size=len(rows)))).double()
    factors = (gamma, lam, gamma_token, 1.0)
    oracle = expected(batch, *factors, bootstrap=bootstrap)
    for row, filled in enumerate(batch.action.any(1).tolist()):
        if not filled:
            bootstrap[row] = math.nan
    for ours, wanted in zip(batch.run(*factors, bootstrap=bootstrap), oracle, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-10)


@PROPERTY
@given(
    ROWS,
    st.lists(st.integers(0, 3), min_size=1, max_size=5),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e30]),
    FACTOR,
    FACTOR,
    st.sampled_from([1.0, 0.9]),
)
def test_observations_change_nothing(rows, gaps, other_gaps, planted, gamma, lam, gamma_token):
    """Inserted, deleted, changed or poisoned: the action tokens' numbers are bit-identical."""
    plain = lay_out(rows, gaps, fill=0.0, dtype=torch.float32)
    poisoned = lay_out(rows, other_gaps, fill=planted, dtype=torch.float32)
    poisoned.turn[~poisoned.action] = 10**6
    for one, other in zip(plain.run(gamma, lam, gamma_token), poisoned.run(gamma, lam, gamma_token), strict=True):
        assert torch.equal(one[plain.action], other[poisoned.action])
        assert not one[~plain.action].any() and not other[~poisoned.action].any()


@PROPERTY
@given(ROWS)
def test_without_decay_it_is_rewards_to_go_minus_value(rows):
    batch = lay_out(rows, [2], fill=5.0)
    to_go = (batch.rewards * batch.action).flip(1).cumsum(1).flip(1)
    advantages, returns = batch.run(1.0, 1.0)
    torch.testing.assert_close(advantages, (to_go - batch.values) * batch.action)
    torch.testing.assert_close(returns, to_go * batch.action)


@PROPERTY
@given(TURN, FACTOR, FACTOR)
def test_one_turn_is_monte_carlo_at_any_decay(nodes, gamma, lam):
    batch = lay_out([[(1, nodes)]], [0, 3], fill=math.nan)
    advantages, _ = batch.run(gamma, lam)
    rewards, values = torch.tensor(nodes, dtype=torch.float64).unbind(-1)
    torch.testing.assert_close(advantages[batch.action], rewards.flip(0).cumsum(0).flip(0) - values)


@PROPERTY
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), FACTOR, FACTOR, NUMBER)
def test_exact_critic_gives_zero_everywhere(lengths, gamma, lam, reward):
    rows = []
    for index, length in enumerate(lengths):
        value = gamma ** (len(lengths) - 1 - index) * reward
        rows.append((1, [(0.0, value)] * length))
    rows[-1][1][-1] = (reward, rows[-1][1][-1][1])
    advantages, _ = lay_out([rows], [3, 0], fill=math.nan).run(gamma, lam)
    torch.testing.assert_close(advantages, torch.zeros_like(advantages), rtol=0.0, atol=1e-12)


def test_constant_value_is_exact_only_without_discount():
    row = [(1, [(0.0, 1.0)] * 3), (1, [(0.0, 1.0), (1.0, 1.0)])]
    batch = lay_out([row], [2], fill=0.0)
    assert not batch.run(1.0, 0.9)[0].any()
    advantages = batch.run(0.9, 0.9)[0][batch.action]
    torch.testing.assert_close(advantages, torch.tensor([-0.1, -0.1, -0.1, 0.0, 0.0]).double())


@PROPERTY
@given(ROWS, FACTOR, FACTOR)
def test_closed_form_over_turns(rows, gamma, lam):
    batch = lay_out(rows, [1, 0], fill=math.nan)
    _, returns = batch.run(gamma, lam)
    for row, row_turns in enumerate(rows):
        ours = iter(returns[row][batch.action[row]].tolist())
        starts = [0]
        for _, nodes in row_turns:
            starts.append(starts[-1] + len(nodes))
        row_returns = returns[row][batch.action[row]].tolist()
        for k, (_, nodes) in enumerate(row_turns):
            after = 0.0
            if k + 1 < len(row_turns):
                next_value = row_turns[k + 1][1][0][1]
                after = gamma * ((1 - lam) * next_value + lam * row_returns[starts[k + 1]])
            for i in range(len(nodes)):
                assert next(ours) == pytest.approx(sum(r for r, _ in nodes[i:]) + after, rel=1e-9, abs=1e-9)


@PROPERTY
@given(ROWS, FACTOR, FACTOR)
def test_equal_pairs_are_plain_skip_observation_gae(rows, gamma, lam):
    """One factor an action transition, gaps free: written here over the action tokens alone."""
    batch = lay_out(rows, [0, 2], fill=math.nan)
    advantages, _ = batch.run(gamma, lam, gamma, lam)
    for row in range(len(rows)):
        keep = batch.action[row]
        reward, value = batch.rewards[row][keep].tolist(), batch.values[row][keep].tolist()
        carried, plain = 0.0, []
        for i in reversed(range(len(value))):
            delta = reward[i] + gamma * (value[i + 1] if i + 1 < len(value) else 0.0) - value[i]
            carried = delta + gamma * lam * carried
            plain.append(carried)
        torch.testing.assert_close(advantages[row][keep], torch.tensor(plain[::-1]).double())


@PROPERTY
@given(st.lists(st.tuples(NUMBER, NUMBER), min_size=1, max_size=12), FACTOR, FACTOR)
def test_every_token_an_action_is_token_gae(nodes, gamma, lam):
    """lambda = 0 checks itself: one-step errors; otherwise the textbook sum of (gamma lambda)^k delta."""
    rewards, values = torch.tensor([nodes], dtype=torch.float64).unbind(-1)
    turn = torch.arange(len(nodes))[None] // 3
    action = torch.ones_like(turn)
    advantages, _ = tb_gae(rewards, values, action, turn, gamma, lam, gamma, lam)
    delta = rewards + gamma * torch.cat([values[:, 1:], torch.zeros(1, 1).double()], 1) - values
    power = torch.arange(len(nodes))
    lag = power[None] - power[:, None]
    weight = torch.where(lag >= 0, (gamma * lam) ** lag.clamp(min=0).double(), 0.0)
    torch.testing.assert_close(advantages, delta @ weight.T)


@PROPERTY
@given(ROWS, FACTOR, FACTOR, st.sampled_from([1.0, 0.8]), st.sampled_from([torch.int32, torch.int64]))
def test_packed_equals_padded(rows, gamma, lam, gamma_token, offset_dtype):
    batch = lay_out(rows, [1, 2], fill=math.nan, dtype=torch.float32)
    width = batch.action.shape[1]
    lengths = []
    for b, row in enumerate(batch.action.tolist()):
        used = max((t + 1 for t in range(width) if row[t]), default=0)
        lengths.append(min(used + b % 2, width))
    offsets = torch.tensor([0, *lengths]).cumsum(0).to(offset_dtype)

    def pack(x: Tensor) -> Tensor:
        return torch.cat([x[b, :length] for b, length in enumerate(lengths)] or [x.new_zeros(0)])

    bootstrap = torch.arange(len(rows)).float()
    packed = tb_gae(
        *(pack(x) for x in (batch.rewards, batch.values, batch.action, batch.turn)),
        gamma, lam, gamma_token, bootstrap=bootstrap, cu_seqlens=offsets,
    )  # fmt: skip
    for ours, padded in zip(packed, batch.run(gamma, lam, gamma_token, bootstrap=bootstrap), strict=True):
        assert torch.equal(ours, pack(padded))


@PROPERTY
@given(ROWS, FACTOR, FACTOR, st.integers(1, 7))
def test_splitting_a_turn_leaves_the_others_alone(rows, gamma, lam, extra):
    """Only turns count: repeating a turn's last, unrewarded token changes no other turn."""
    rows = [row for row in rows if len(row) >= 2]
    longer = [[(skip, [(0.0, nodes[0][1])] * (extra if k == 1 else 0) + nodes) for k, (skip, nodes) in enumerate(row)]
              for row in rows]  # fmt: skip
    one, other = lay_out(rows, [1], fill=0.0), lay_out(longer, [1], fill=0.0)
    for ours, theirs in zip(one.run(gamma, lam), other.run(gamma, lam), strict=True):
        for b, row in enumerate(rows):
            keep = len(row[0][1])
            torch.testing.assert_close(ours[b][one.action[b]][:keep], theirs[b][other.action[b]][:keep])


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (3, 0), (3, 5)])
def test_nothing_to_do(shape, impl):
    zeros = torch.zeros(shape, device=DEVICE)
    given = zeros * math.nan, zeros * math.nan, zeros.bool(), zeros.long()
    bootstrap = torch.full(shape[:1], math.nan, device=DEVICE)
    *results, moments = tb_gae_with_moments(*given, bootstrap=bootstrap, impl=impl)
    assert moments.tolist() == [0.0, 0.0, 0.0]
    for result in results:
        assert result.shape == shape and not result.any()


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_packed_nothing_to_do(impl):
    empty, offsets = torch.zeros(0, device=DEVICE), torch.tensor([0, 0, 0], device=DEVICE)
    advantages, _ = tb_gae(empty, empty, empty.bool(), empty.long(), cu_seqlens=offsets, impl=impl)
    assert advantages.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("action_dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_takes_the_dtype_of_values_and_accumulates_in_float64(dtype, action_dtype):
    """10,000 rewards of 0.1: a float32 running sum would be off by more than a rounding of the result."""
    tokens = 10_000
    rewards = torch.full((1, tokens), 0.1, dtype=torch.float64)
    turn = torch.arange(tokens, dtype=torch.int32)[None] // 100
    action = torch.ones(1, tokens, dtype=action_dtype)
    advantages, returns = tb_gae(rewards, torch.zeros(1, tokens, dtype=dtype), action, turn, 1.0, 1.0)
    assert advantages.dtype == returns.dtype == dtype
    tolerance = tokens * 2**-53 if dtype == torch.float64 else 0.0
    torch.testing.assert_close(returns[0, 0], torch.tensor(1000.0, dtype=dtype), rtol=tolerance, atol=0.0)


def test_non_contiguous_inputs_and_no_gradient():
    batch = lay_out([[(1, [(1.0, 2.0)] * 3), (2, [(0.5, -1.0)] * 2)]] * 3, [1, 2], fill=0.0)
    turned = [x.T.contiguous().T for x in (batch.rewards, batch.values, batch.action, batch.turn)]
    assert not turned[1].is_contiguous()
    bootstrap = torch.ones(3).requires_grad_()
    for x in turned[:2]:
        x.requires_grad_()
    for impl, dtype in (("torch", torch.float64), ("triton", torch.float32)):
        given = [x.detach().to(DEVICE, dtype).requires_grad_() for x in turned[:2]]
        found = tb_gae(*given, *(x.to(DEVICE) for x in turned[2:]), bootstrap=bootstrap.to(DEVICE), impl=impl)
        assert not any(x.requires_grad for x in found)
    advantages, _ = tb_gae(*turned)
    assert not advantages.requires_grad
    assert torch.equal(advantages, batch.run()[0])


def good() -> dict[str, object]:
    return {
        "rewards": torch.zeros(2, 4),
        "values": torch.zeros(2, 4),
        "action": torch.ones(2, 4, dtype=torch.bool),
        "turn": torch.tensor([[3, 3, 4, 9], [0, 1, 1, 2]]),
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turn": torch.tensor([[0, 1, 2, 2], [0, 2, 1, 3]])}, "turn decreases to 1 at flat token 6"),
        ({"turn": torch.zeros(2, 4)}, "integer"),
        ({"values": torch.zeros(2, 4, dtype=torch.int64)}, "floating point"),
        ({"rewards": torch.zeros(2, 3)}, r"\[B, T\]"),
        ({"gamma": 1.5}, r"gamma must be within \[0, 1\], got 1.5"),
        ({"lam": -0.1}, "lam must"),
        ({"lambda_token": float("nan")}, "lambda_token must"),
        ({"values": torch.tensor([[0.0, math.nan, 0, 0], [0, 0, 0, 0]])}, "finite"),
        ({"rewards": torch.tensor([[0.0, 0, 0, math.inf], [0, 0, 0, 0]])}, "finite"),
        ({"bootstrap": torch.tensor([0.0, math.nan])}, "finite"),
        ({"bootstrap": torch.zeros(3)}, r"one value a row, \[2\]"),
        ({"cu_seqlens": torch.tensor([0, 4])}, r"\[T\] with cu_seqlens"),
    ],
)
def test_mistakes_are_named(change, message):
    tb_gae(**good())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        tb_gae(**{**good(), **change})  # type: ignore[arg-type]


@pytest.mark.parametrize("factors", [(0.9, 0.8), (0.0, 0.0), (0.9, 0.8, 0.7, 0.6), (1.0, 0.0, 0.0, 1.0)])
@pytest.mark.parametrize("planted", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_found_anywhere(planted, factors):
    """Even where a factor of 0 would leave it out of the result, and wherever else its opposite stands."""
    for name in ("rewards", "values", "bootstrap"):
        given = good() | {"bootstrap": torch.zeros(2)}
        for place in range(given[name].numel()):  # type: ignore[attr-defined]
            wrong = torch.zeros_like(given[name])  # type: ignore[arg-type]
            wrong.view(-1)[place] = planted
            with pytest.raises(ValueError, match="finite"):
                tb_gae(**given | {name: wrong}, **dict(zip(FACTORS, factors, strict=False)))  # type: ignore[arg-type]
    opposite = torch.full((2, 4), planted)
    opposite[0] *= -1
    with pytest.raises(ValueError, match="finite"):
        tb_gae(**good() | {"rewards": opposite})  # type: ignore[arg-type]


@pytest.mark.parametrize("offsets", [[1, 8], [0, 7], [0, 5, 3, 8], [0, 9]])
def test_packed_offsets_must_cover_all_tokens(offsets):
    flat = {name: value.reshape(-1) for name, value in good().items()}  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 8"):
        tb_gae(**flat, cu_seqlens=torch.tensor(offsets))


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks of 32 tokens, 2 pairs at a time, rows below 40 tokens packed: few tokens then take every path."""
    for name, value in (("CHUNK", 32), ("PAIRS", 2), ("SHORT", 40)):
        monkeypatch.setattr(tb_gae_triton, name, value)


def random_batch(rows: int, tokens: int, density: float = 0.5, scale: float = 1.0) -> Batch:
    """Random turns, observations poisoned; turn numbers there mean nothing and may change anywhere in a gap."""
    generator = torch.Generator().manual_seed(rows * 10_000 + tokens)
    action = torch.rand(rows, tokens, generator=generator) < density
    turn = (torch.rand(rows, tokens, generator=generator) < 0.2).long().cumsum(1)
    rewards, values = (scale * torch.randn(rows, tokens, generator=generator) for _ in range(2))
    rewards[~action], values[~action] = math.nan, math.inf
    return Batch(*(x.to(DEVICE) for x in (rewards, values, action, turn)))


def test_flags_by_hand():
    action = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 0, 0, 1, 0, 1], [0, 0, 0, 0, 0, 0]])
    turn = torch.tensor([[-1, 0, 0, 5, 1, -1], [0, 1, 2, 2, 2, 2], [0, 1, 2, 3, 4, 5]])
    wanted = [[0, 1, 3, 0, 13, 0], [3, 0, 0, 5, 0, 9], [0] * 6]
    assert flags_from(action, turn).tolist() == wanted
    packed = flags_from(action.reshape(-1), turn.reshape(-1), torch.tensor([0, 6, 12, 18]))
    assert packed.view(3, 6).tolist() == wanted and packed.dtype == torch.uint8


@PROPERTY
@given(ROWS, st.lists(st.integers(0, 9), min_size=1, max_size=5), FACTOR, FACTOR, FACTOR, FACTOR)
def test_flags_say_all_that_turns_say(rows, gaps, gamma, lam, gamma_token, lambda_token):
    batch = lay_out(rows, gaps, fill=math.nan)
    flags = flags_from(batch.action, batch.turn)
    bootstrap = torch.arange(len(rows)).double()
    for factors in ((gamma, lam), (gamma, lam, gamma_token, lambda_token)):
        given = tb_gae(batch.rewards, batch.values, None, None, *factors, bootstrap=bootstrap, flags=flags)
        for ours, wanted in zip(given, batch.run(*factors, bootstrap=bootstrap), strict=True):
            assert torch.equal(ours, wanted)


def test_results_are_ordinary_tensors():
    """Computed in inference mode, whose tensors could not be saved for a backward pass."""
    batch = random_batch(2, 9)
    for bootstrap in (None, torch.ones(2, device=DEVICE)):
        given = (batch.rewards, batch.values, batch.action, batch.turn)
        for found in tb_gae_with_moments(*given, bootstrap=bootstrap):
            assert not found.is_inference()
            scale = torch.ones((), device=DEVICE, requires_grad=True)
            assert torch.autograd.grad((scale.to(found.dtype) * found).sum(), scale)


@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 33, 65, 130])
@pytest.mark.parametrize("factors", [(0.99, 0.95), (1.0, 1.0), (0.9, 0.8, 0.7, 0.6)])
def test_triton_equals_torch(tokens, factors, small_chunks):
    """Up to 5 chunks a row, so that the carry needs several reads of pairs."""
    batch = random_batch(3, tokens)
    batch.action[1] = False
    given = (batch.rewards, batch.values, batch.action, batch.turn, *factors)
    bootstrap = torch.tensor([1.0, math.nan, -2.0], device=DEVICE)
    for extra in ({}, {"bootstrap": bootstrap}):
        ours = tb_gae_with_moments(*given, **extra, impl="triton")
        wanted = tb_gae_with_moments(*given, **extra, impl="torch")
        for found, right in zip(ours, wanted, strict=True):
            assert found.dtype == right.dtype and not found.requires_grad
            torch.testing.assert_close(found, right, rtol=2e-5, atol=2e-5)
        assert not ours[0][~batch.action].any() and not ours[1][~batch.action].any()
    again = tb_gae_with_moments(*given, **extra, impl="triton")
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


@pytest.mark.parametrize("kept", [0, 40, 99])
def test_triton_with_a_single_action_token(kept, small_chunks):
    batch = random_batch(1, 100, density=0.0)
    batch.action[0, kept] = True
    batch.rewards[0, kept], batch.values[0, kept] = 2.0, 0.5
    advantages, returns = batch.run(0.9, 0.9, impl="triton")
    assert advantages[0].tolist() == [1.5 if t == kept else 0.0 for t in range(100)]
    assert returns[0, kept] == 2.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_half_inputs(dtype, small_chunks):
    batch = random_batch(2, 70)
    batch.values = batch.values.to(dtype)
    ours, wanted = batch.run(impl="triton"), batch.run(impl="torch")
    for found, right in zip(ours, wanted, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, right, rtol=1e-2, atol=1e-2)


def test_triton_padded_equals_packed_and_padding_changes_nothing(small_chunks):
    batch = random_batch(4, 50)
    offsets = torch.arange(5, device=DEVICE) * 50
    flat = Batch(*(x.reshape(-1) for x in vars(batch).values()))
    wide = Batch(*(torch.nn.functional.pad(x, (0, 27)) for x in vars(batch).values()))
    turned = Batch(*(x.T.contiguous().T for x in vars(batch).values()))
    padded = batch.run(impl="triton")
    for other in (flat.run(impl="triton", cu_seqlens=offsets), wide.run(impl="triton"), turned.run(impl="triton")):
        for found, right in zip(other, padded, strict=True):
            found = found.view(4, -1)[:, :50]
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)


def test_large_values_and_no_discount_keep_their_precision(small_chunks):
    """|V| near 100: the values cancel inside the recurrence and not, rounded, at its end."""
    batch = random_batch(1, 600, density=1.0, scale=100.0)
    ours, wanted = batch.run(1.0, 1.0, impl="triton"), batch.run(1.0, 1.0, impl="torch")
    size = float(wanted[1].abs().max())
    assert float((ours[0] - wanted[0]).abs().max()) < 3e-7 * size


def test_moments_combine_over_parts():
    parts = [torch.randn(n, dtype=torch.float64) * 3 + 100 for n in (1, 5, 400)] + [torch.zeros(0).double()]
    table = [[len(x), float(x.mean()) if len(x) else 0.0, float((x - x.mean()).square().sum())] for x in parts]
    count, mean, squares = combine_moments(torch.tensor(table, dtype=torch.float64)).tolist()
    whole = torch.cat(parts)
    assert count == 406 and mean == pytest.approx(float(whole.mean()))
    assert squares == pytest.approx(float((whole - whole.mean()).square().sum()))
    assert combine_moments(torch.zeros(0, 3)).tolist() == [0.0, 0.0, 0.0]


def test_flags_mistakes_are_named():
    x = torch.zeros(2, 4)
    flags = torch.zeros(2, 4, dtype=torch.uint8)
    for wrong in ({}, {"action": x}, {"turn": x.long()}, {"action": x, "turn": x.long(), "flags": flags}):
        with pytest.raises(ValueError, match="give either action and turn, or flags"):
            tb_gae(x, x, **wrong)
    with pytest.raises(ValueError, match="uint8"):
        tb_gae(x, x, flags=x)
    with pytest.raises(ValueError, match="float64"):
        tb_gae(x.double(), x.double(), flags=flags, impl="triton")
