"""`ppo_loss` and `value_loss` against autograd through their formulas in float64, in torch and in Triton."""

import math

import pytest
import torch
from rsi_kernels import ppo_loss, reference, value_loss
from rsi_kernels.ppo_loss import kl_estimate
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["torch", "triton"]
LENGTHS = [0, 1, 15, 16, 17, 1023, 1025, 2050]
FULL = {"dual_clip": 1.5, "kl_coefficient": 0.3, "clip_low": 0.1, "clip_high": 0.3}


def numbers(tokens: int, count: int, dtype=torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed * 10_000 + tokens)
    return [torch.randn(tokens, generator=generator, dtype=torch.float64).to(DEVICE, dtype) for _ in range(count)]


def policy_inputs(tokens: int, kind: str | None = None, dtype=torch.float32):
    """logprob, old, advantage, and the options; a third of the tokens masked and poisoned."""
    logprob, old, advantage, weight, ref, chance = numbers(tokens, 6, dtype)
    options = {"mask": chance > -0.4}
    if kind is not None:
        options |= FULL | {"importance_weight": weight.abs(), "reference_logprob": ref, "kl_kind": kind}
    for index, x in enumerate((logprob, old, advantage, weight, ref)):
        x[chance <= -0.4] = (math.nan, math.inf, -math.inf, math.nan, math.inf)[index]
    if kind is not None:
        options["importance_weight"] = weight.abs()
    return logprob.requires_grad_(), old, advantage, options


def close(ours: Tensor, wanted: Tensor, tolerance: float) -> None:
    size = float(wanted.detach().abs().max()) if wanted.numel() else 1.0
    torch.testing.assert_close(
        ours.detach().double(), wanted.detach().double(), rtol=0, atol=tolerance * max(size, 1.0)
    )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kind", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("tokens", LENGTHS)
def test_policy_loss_equals_float64(impl, kind, tokens):
    logprob, old, advantage, options = policy_inputs(tokens, kind)
    exact = logprob.detach().double().requires_grad_()
    wide = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in options.items()}
    ours = ppo_loss(logprob, old, advantage, **options, impl=impl)
    wanted = reference.ppo_loss(exact, old.double(), advantage.double(), **wide)
    for found, right in zip(ours, wanted, strict=True):
        close(found, right, 1e-5)
    assert float(ours.clipped) == float(wanted[2]) and not ours.surrogate.requires_grad
    (up,) = numbers(tokens, 1, seed=3)
    found, right = (torch.autograd.grad(x, y, up.to(x.dtype))[0] for x, y in ((ours.loss, logprob), (wanted[0], exact)))
    close(found, right, 1e-5)
    assert not found[~options["mask"]].any()


@pytest.mark.parametrize("impl", IMPLS)
def test_ties_keep_their_gradient(impl):
    """Ratios exactly 1, just inside, at and just beyond both bounds; A = 0; the dual clip's bound."""
    ratio = torch.tensor([1.0, 1.25, 0.75, 1.25 * 1.001, 0.75 / 1.001, 2.0, 2.0, 1.0], dtype=torch.float32)
    advantage = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, 0.0])
    # exp and log are inexact, and Triton's exp is not torch's: the bounds are made from the op's own ratios.
    logprob = ratio.log().to(DEVICE).requires_grad_()
    zeros = torch.zeros(8, device=DEVICE)
    free = ppo_loss(logprob, zeros, zeros - 1, clip_low=0.99, clip_high=9.0, impl=impl)
    exact = free.loss.tolist()
    options = {"clip_low": 1.0 - exact[2], "clip_high": exact[1] - 1.0}
    loss = ppo_loss(logprob, zeros, advantage.to(DEVICE), **options, dual_clip=3.0, impl=impl)
    (gradient,) = torch.autograd.grad(loss.loss.sum(), logprob)
    assert [bool(x) for x in gradient] == [True, True, True, False, False, True, True, False]
    assert float(loss.clipped) == 2 and float(loss.clipped_lower) == 0
    tight = ppo_loss(logprob, zeros, advantage.to(DEVICE), dual_clip=1.5, impl=impl)
    assert float(tight.clipped_lower) == 2
    assert [bool(x) for x in torch.autograd.grad(tight.loss.sum(), logprob)[0][5:7]] == [False, False]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_value_at_the_edge_of_its_band_keeps_its_gradient(impl):
    """Moved by less than, by exactly, and by more than the clip; the last towards the return and away from it."""
    hidden = torch.tensor([[0.125], [0.25], [-0.25], [0.5], [0.5]], device=DEVICE).requires_grad_()
    zeros, one = torch.zeros(5, device=DEVICE), torch.ones(1, device=DEVICE)
    returns = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0], device=DEVICE)
    found = value_loss(hidden, one, zeros[:1], zeros, returns, clip=0.25, impl=impl)
    assert float(found.clipped) == 1
    (gradient,) = torch.autograd.grad(found.loss, hidden)
    assert gradient[:, 0].tolist() == [-0.875, -0.75, -1.25, 0.0, 1.5]


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_changes_nothing(impl):
    """Columns added to a batch, masked and poisoned, leave every loss, sum and gradient as they were."""
    rows = [torch.randn(3, 5, generator=torch.Generator().manual_seed(k)).to(DEVICE) for k in range(5)]
    hidden, head = torch.randn(3, 5, 4, device=DEVICE), torch.ones(4, device=DEVICE)
    wide = [torch.nn.functional.pad(x, (0, 2), value=math.nan) for x in rows]
    found = []
    for x, states in ((rows, hidden), (wide, torch.nn.functional.pad(hidden, (0, 0, 0, 2), value=math.nan))):
        mask = torch.arange(x[0].shape[1], device=DEVICE).expand(3, -1) < 5
        leaves = [x[0].clone().requires_grad_(), states.clone().requires_grad_()]
        policy = ppo_loss(leaves[0], *x[1:3], mask, dual_clip=2.0, impl=impl)
        critic = value_loss(leaves[1], head, head[:1], *x[3:], mask, impl=impl)
        gradients = torch.autograd.grad(policy.loss.sum() + critic.loss, leaves)
        found.append([*policy[1:], critic.loss, critic.clipped, *(g[:, :5] for g in (policy.loss, *gradients))])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
def test_extreme_ratios_stay_finite(impl):
    logprob = torch.tensor([90.0, -90.0], device=DEVICE, requires_grad=True)
    old, advantage = -logprob.detach(), torch.tensor([-1.0, 1.0], device=DEVICE)
    for kind in ("k1", "k2", "k3"):
        found = ppo_loss(
            logprob, old, advantage, reference_logprob=old, kl_coefficient=1.0, kl_kind=kind, impl=impl
        )  # fmt: skip
        assert all(x.isfinite().all() for x in (*found, *torch.autograd.grad(found.loss.sum(), logprob)))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs(impl, dtype):
    logprob, old, advantage, options = policy_inputs(100, "k2", dtype)
    wide = {k: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for k, x in options.items()}
    exact = logprob.detach().double().requires_grad_()
    ours = ppo_loss(logprob, old, advantage, **options, impl=impl)
    wanted = reference.ppo_loss(exact, old.double(), advantage.double(), **wide)
    close(ours.loss, wanted[0], 1e-5)
    assert ours.loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(ours.loss.sum(), logprob)
    assert gradient.dtype == dtype
    close(gradient, torch.autograd.grad(wanted[0].sum(), exact)[0], 1e-2)


def value_inputs(tokens: int, width: int, dtype=torch.float32, masked: bool = True):
    (flat,) = numbers(tokens * width, 1, dtype)
    hidden = flat.view(tokens, width)
    (weight,) = numbers(width, 1, torch.promote_types(dtype, torch.float32), seed=1)
    old, returns, chance = numbers(tokens, 3, torch.promote_types(dtype, torch.float32), seed=2)
    mask = (chance > -0.4) if masked else None
    if mask is not None:
        hidden[~mask], old[~mask], returns[~mask] = math.nan, math.inf, -math.inf
    bias = torch.full((1,), 0.1, device=DEVICE, dtype=weight.dtype)
    return [x.requires_grad_() for x in (hidden, weight, bias)], (old, returns, mask)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("width", [1, 6, 130, 600])
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17])
@pytest.mark.parametrize("clip", [0.2, math.inf])
def test_value_loss_equals_float64(impl, width, tokens, clip):
    leaves, (old, returns, mask) = value_inputs(tokens, width)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ours = value_loss(*leaves, old, returns, mask, clip, impl=impl)
    wanted = reference.value_loss(*exact, old.double(), returns.double(), mask, clip)
    for found, right in zip(ours, wanted, strict=True):
        close(found, right, 1e-5)
    found = torch.autograd.grad(ours.loss * 1.7, leaves)
    for a, b in zip(found, torch.autograd.grad(wanted[0] * 1.7, exact), strict=True):
        close(a, b, 1e-5)
    assert not found[0][~mask].any() and not ours.value.requires_grad


@pytest.mark.parametrize("impl", IMPLS)
def test_value_loss_over_many_programs(impl, monkeypatch):
    from rsi_kernels import losses_triton

    monkeypatch.setattr(losses_triton, "VALUE_PROGRAMS", 3)
    leaves, (old, returns, mask) = value_inputs(10, 20)
    ours = value_loss(*leaves, old, returns, mask, impl=impl)
    wanted = reference.value_loss(*leaves, old, returns, mask)
    found, right = (torch.autograd.grad(x, leaves) for x in (ours.loss, wanted[0]))
    for a, b in zip((ours.loss, *found), (wanted[0], *right), strict=True):
        close(a, b, 1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_half_hidden_states_and_a_float32_head(impl):
    leaves, (old, returns, mask) = value_inputs(17, 40, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    ours = value_loss(*leaves, old, returns, mask, impl=impl)
    wanted = reference.value_loss(*exact, old.double(), returns.double(), mask)
    close(ours.loss, wanted[0], 1e-5)
    found, right = torch.autograd.grad(ours.loss, leaves), torch.autograd.grad(wanted[0], exact)
    assert [x.dtype for x in found] == [torch.bfloat16, torch.float32, torch.float32]
    for a, b, tolerance in zip(found, right, (1e-2, 1e-5, 1e-5), strict=True):
        close(a, b, tolerance)


@pytest.mark.parametrize("impl", IMPLS)
def test_frozen_trunk_and_frozen_head(impl):
    (hidden, weight, bias), (old, returns, mask) = value_inputs(9, 6)
    whole = value_loss(hidden, weight, bias, old, returns, mask, impl=impl)
    first = torch.autograd.grad(whole.loss, (hidden, weight, bias))
    head = value_loss(hidden.detach(), weight, bias, old, returns, mask, impl=impl).loss
    assert all(torch.equal(a, b) for a, b in zip(first[1:], torch.autograd.grad(head, (weight, bias)), strict=True))
    trunk = value_loss(hidden, weight.detach(), bias.detach(), old, returns, mask, impl=impl).loss
    assert torch.equal(first[0], torch.autograd.grad(trunk, hidden)[0])


@pytest.mark.parametrize("impl", IMPLS)
def test_leading_dimensions_and_the_shapes_of_a_linear_layer(impl):
    (hidden, weight, bias), (old, returns, mask) = value_inputs(12, 6)
    wanted = value_loss(hidden, weight, bias, old, returns, mask, impl=impl)
    fold = [x.view(3, 4) for x in (old, returns, mask)]
    folded = value_loss(hidden.view(3, 4, 6), weight.view(1, -1), bias.view(()), *fold, impl=impl)
    assert folded.value.shape == (3, 4) and torch.equal(folded.loss, wanted.loss)
    logprob, old, advantage, options = policy_inputs(12)
    plain = ppo_loss(logprob, old, advantage, **options, impl=impl).loss
    fold = [x.view(3, 4) for x in (logprob, old, advantage, options["mask"])]
    assert torch.equal(ppo_loss(*fold, impl=impl).loss, plain.view(3, 4))


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kept", [None, 0, 9, 16])
def test_no_token_and_one_token_that_counts(impl, kept):
    mask = torch.arange(17, device=DEVICE) == (-1 if kept is None else kept)
    logprob, old, advantage, _ = policy_inputs(17)
    leaves, (old_value, returns, _) = value_inputs(17, 6)
    with torch.no_grad():
        for x, start in (
            (logprob, 0.1),
            (old, 0.2),
            (advantage, -2.0),
            (leaves[0], 0.3),
            (old_value, 0.4),
            (returns, 3.0),
        ):
            x.fill_(math.nan)[mask] = start
    exact = [x.detach().double().requires_grad_() for x in (logprob, *leaves)]
    ours = ppo_loss(logprob, old, advantage, mask, impl=impl)
    wanted = reference.ppo_loss(exact[0], old.double(), advantage.double(), mask)
    critic = value_loss(*leaves, old_value, returns, mask, impl=impl)
    right = reference.value_loss(*exact[1:], old_value.double(), returns.double(), mask)
    for found, expected in zip((*ours, *critic), (*wanted, *right), strict=True):
        close(found, expected, 1e-6)
    found = torch.autograd.grad(ours.loss.sum() + critic.loss, (logprob, *leaves))
    for a, b in zip(found, torch.autograd.grad(wanted[0].sum() + right[0], exact), strict=True):
        close(a, b, 1e-6)


def test_kl_estimators_by_enumeration():
    """All are unbiased in value except k2 (close, near 0); as losses, only k2 has the KL's gradient."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    other = (logits.detach() + 0.3 * torch.randn(6, generator=generator, dtype=torch.float64)).log_softmax(-1)
    logprob = logits.log_softmax(-1)
    probability = logprob.exp().detach()
    true = (logprob.exp() * (logprob - other)).sum()
    (wanted,) = torch.autograd.grad(true, logits, retain_graph=True)
    found = {}
    for kind in ("k1", "k2", "k3"):
        estimate = (probability * kl_estimate(logprob - other, kind)[0]).sum()
        (gradient,) = torch.autograd.grad(estimate, logits, retain_graph=True)
        slope = kl_estimate((logprob - other).detach(), kind)[1]
        torch.testing.assert_close(
            gradient, torch.autograd.grad((probability * slope * logprob).sum(), logits, retain_graph=True)[0]
        )
        found[kind] = (float(estimate.detach()), gradient)
    assert found["k1"][0] == pytest.approx(float(true.detach())) and found["k3"][0] == pytest.approx(
        float(true.detach())
    )
    torch.testing.assert_close(found["k2"][1], wanted)
    assert found["k1"][1].abs().max() < 1e-12
    assert (found["k3"][1] - wanted).abs().max() > 1e-3
    with pytest.raises(ValueError, match="'k4'"):
        kl_estimate(logprob - other, "k4")


def test_gradcheck():
    logprob, old, advantage, options = policy_inputs(40, "k3", torch.float64)
    for loss in (ppo_loss, reference.ppo_loss):
        assert torch.autograd.gradcheck(lambda x, loss=loss: loss(x, old, advantage, **options)[0], (logprob,))
    leaves, constants = value_inputs(9, 4, torch.float64)
    for loss in (value_loss, reference.value_loss):
        assert torch.autograd.gradcheck(lambda *x, loss=loss: loss(*x, *constants)[0], leaves)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantage": torch.zeros(3)}, r"advantage must be shaped like logprob, \(4,\)"),
        ({"mask": torch.zeros(4, 1)}, "mask must be shaped"),
        ({"dual_clip": 1.0}, "dual_clip must be above 1"),
        ({"clip_low": 1.0}, "clip_low must be in"),
        ({"clip_high": -0.1}, "clip_high at least 0"),
        ({"kl_kind": "k4"}, "kl_kind must be k1, k2 or k3, got 'k4'"),
        ({"kl_coefficient": 0.1}, "needs `reference_logprob`"),
    ],
)
def test_mistakes_are_named(change, message):
    good = {"logprob": torch.zeros(4), "old_logprob": torch.zeros(4), "advantage": torch.zeros(4)}
    ppo_loss(**good)
    with pytest.raises(ValueError, match=message):
        ppo_loss(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(5)}, "bias a single number"),
        ({"returns": torch.zeros(3)}, r"returns must be \(4,\)"),
        ({"clip": 0.0}, "clip must be above 0"),
    ],
)
def test_value_mistakes_are_named(change, message):
    good = {"hidden": torch.zeros(4, 6), "weight": torch.zeros(6), "bias": torch.zeros(1)}
    good |= {"old_value": torch.zeros(4), "returns": torch.zeros(4)}
    value_loss(**good)
    with pytest.raises(ValueError, match=message):
        value_loss(**{**good, **change})
