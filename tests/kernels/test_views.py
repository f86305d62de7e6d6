"""Every op on views of larger tensors, with upstream gradients that are views too, and backward more than once.

A kernel that trusts a stride it has not looked at reads a neighbour, which here is NaN or a wrong number.
"""

import pytest
import torch
from rsi_kernels import gated_delta_rule, linear_logprob, ppo_loss, tb_gae_with_moments, value_loss
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def transposed(x: Tensor) -> Tensor:
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def every_second(x: Tensor) -> Tensor:
    return torch.stack((x, poison(x)), -1)[..., 0]


def shifted(x: Tensor) -> Tensor:
    """Starts one element into its memory, so that no address is aligned, and has a gap after every row."""
    edge = poison(x)[..., :1]
    return torch.cat((edge, x, edge), -1)[..., 1:-1]


def expanded(x: Tensor) -> Tensor:
    """Every row the first one, at stride 0."""
    return x[:1].expand(x.shape)


VIEWS = [transposed, every_second, shifted, expanded]


def poison(x: Tensor) -> Tensor:
    return torch.full_like(x, float("nan")) if x.is_floating_point() else torch.ones_like(x)


def draw(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator).to(DEVICE)


def linear(impl):  # type: ignore[no-untyped-def]
    target = torch.tensor([3, -100, 0, 8, 1, 3, 5], device=DEVICE)
    inputs = [draw(7, 5), draw(9, 5), target, draw(7).exp()]
    return lambda *x: tuple(linear_logprob(*x, impl=impl)), inputs, 2


def policy(impl):  # type: ignore[no-untyped-def]
    def run(logprob, old, advantage, mask, weight, reference):  # type: ignore[no-untyped-def]
        options = {"dual_clip": 2.0, "kl_coefficient": 0.3, "kl_kind": "k3", "impl": impl}
        found = ppo_loss(
            logprob, old, advantage, mask, importance_weight=weight, reference_logprob=reference, **options
        )
        return tuple(found)

    return run, [draw(7), draw(7) / 2, draw(7) * 3, draw(7) > -0.5, draw(7).exp(), draw(7) / 4], 1


def critic(impl):  # type: ignore[no-untyped-def]
    inputs = [draw(7, 5), draw(5), draw(1), draw(7) / 2, draw(7) * 2, draw(7) > -0.5]
    return lambda *x: tuple(value_loss(*x, impl=impl)), inputs, 3


def gae(impl):  # type: ignore[no-untyped-def]
    turn = torch.tensor([0, 0, 1, 1, 1, 4], device=DEVICE).repeat(3, 1)
    return lambda *x: tb_gae_with_moments(*x, impl=impl), [draw(3, 6), draw(3, 6) * 2, draw(3, 6) > -0.5, turn], 0


def delta(impl):  # type: ignore[no-untyped-def]
    inputs = [
        draw(2, 6, 2, 4) / 2,
        draw(2, 6, 2, 4) / 2,
        draw(2, 6, 4, 3),
        -draw(2, 6, 4).abs(),
        draw(2, 6, 4).sigmoid(),
    ]
    return lambda *x: gated_delta_rule(*x, impl=impl), [*inputs, draw(2, 4, 4, 3)], 6


OPS = [(op, impl) for op in (linear, policy, critic, gae) for impl in ("torch", "triton")] + [(delta, "torch")]


def leaves_of(inputs: list[Tensor], count: int) -> list[Tensor]:
    return [x.detach().requires_grad_() if k < count else x for k, x in enumerate(inputs)]


def results(run, inputs, count, view=None):  # type: ignore[no-untyped-def]
    """Outputs, and gradients under random upstream gradients, as `view` shows both."""
    inputs = leaves_of(inputs, count)
    out = run(*inputs)
    moving = [x for x in out if x.requires_grad]
    upstream = [draw(*x.shape) if view is None or not x.dim() else view(draw(*x.shape)) for x in moving]
    return [*out, *(torch.autograd.grad(moving, inputs[:count], upstream) if moving else ())]


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize(("op", "impl"), OPS)
def test_inputs_that_are_views(op, impl, view):
    run, inputs, count = op(impl)
    seen = [view(x) for x in inputs]
    for x, y in zip(seen, inputs, strict=True):
        assert view is expanded or torch.equal(x, y)
    copies = [x.clone(memory_format=torch.contiguous_format) for x in seen]
    for ours, wanted in zip(results(run, seen, count), results(run, copies, count), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("view", VIEWS[1:])
@pytest.mark.parametrize(("op", "impl"), [(op, impl) for op, impl in OPS if op is not gae])
def test_upstream_gradients_that_are_views(op, impl, view):
    run, inputs, count = op(impl)

    def copied(x: Tensor) -> Tensor:
        return view(x).clone(memory_format=torch.contiguous_format)

    for ours, wanted in zip(results(run, inputs, count, view), results(run, inputs, count, copied), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("op", "impl"), OPS)
def test_a_second_backward_and_a_second_call_give_the_same_bits(op, impl):
    run, inputs, count = op(impl)
    inputs = leaves_of(inputs, count)
    before = [x.detach().clone() for x in inputs]
    out, again = run(*inputs), run(*inputs)
    assert all(torch.equal(a, b) for a, b in zip(out, again, strict=True))
    moving = [k for k, x in enumerate(out) if x.requires_grad]
    if moving:
        upstream = [draw(*out[k].shape) for k in moving]
        calls = [(out, upstream), (out, [7 * x for x in upstream]), (out, upstream), (again, upstream)]
        first, _, third, other = (
            torch.autograd.grad([source[k] for k in moving], inputs[:count], up, retain_graph=True)
            for source, up in calls
        )
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(first, third, other, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before, inputs, strict=True))  # inputs are never written


@pytest.mark.skipif(DEVICE == "cuda", reason="cuBLAS then wants a variable set before the process starts")
@pytest.mark.parametrize(("op", "impl"), OPS)
def test_runs_where_torch_allows_only_deterministic_operations(op, impl):
    torch.use_deterministic_algorithms(True)
    try:
        results(*op(impl))
    finally:
        torch.use_deterministic_algorithms(False)
