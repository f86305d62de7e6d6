"""The gated delta rule: chunked = recurrent = transformers', packed = padded, states hand over, gradients right."""

import itertools
from functools import partial

import pytest
import torch
from rsi_kernels import gated_delta_rule
from rsi_kernels.gated_delta_rule import check_gradients, chunked, recurrent
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(rows: int, tokens: int, heads: int = 2, key_heads: int = 2, dtype=torch.float64, channels=(5, 3)):
    """query, key, value, gate, beta with 5 key and 3 value channels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=generator, dtype=torch.float64)

    query, key = (normalize(normal(key_heads, channels[0]), dim=-1) for _ in range(2))
    inputs = query, key, normal(heads, channels[1]), logsigmoid(2 * normal(heads)), normal(heads).sigmoid()
    return [x.to(DEVICE, dtype).requires_grad_() for x in inputs]


def draw_state(rows: int, heads: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, heads, 5, 3, generator=generator, dtype=torch.float64).to(DEVICE).requires_grad_()


def by_definition(query, key, value, gate, beta, state):
    """Scalar loops over rows, tokens and heads."""
    out = torch.zeros_like(value)
    group = value.shape[2] // key.shape[2]
    state = state.clone()
    for b in range(value.shape[0]):
        for t in range(value.shape[1]):
            for h in range(value.shape[2]):
                q, k = query[b, t, h // group] / query.shape[-1] ** 0.5, key[b, t, h // group]
                held = state[b, h] * gate[b, t, h].exp()
                state[b, h] = held + beta[b, t, h] * torch.outer(k, value[b, t, h] - k @ held)
                out[b, t, h] = q @ state[b, h]
    return out, state


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_equals_its_definition(key_heads):
    with torch.no_grad():
        inputs = draw(2, 70, heads=4, key_heads=key_heads)
        state = draw_state(2, 4)
        for ours, wanted in zip(gated_delta_rule(*inputs, state), by_definition(*inputs, state), strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("tokens", LENGTHS)
def test_chunked_equals_recurrent_with_gradients(tokens):
    inputs = draw(2, tokens)
    state = draw_state(2)
    found = []
    for rule in (chunked, recurrent):
        out, final = rule(*inputs, state)
        upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype).to(DEVICE)
        gradients = torch.autograd.grad((out * upstream).sum() + final.square().sum(), [*inputs, state])
        found.append([out, final, *gradients])
    for ours, wanted in zip(*found, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-11)


def test_gradcheck():
    inputs = draw(1, 9, heads=2, key_heads=1)
    state = draw_state(1)
    assert torch.autograd.gradcheck(gated_delta_rule, (*inputs, state))
    for rule in (recurrent, partial(chunked, chunk=4)):
        assert torch.autograd.gradcheck(rule, (*draw(1, 7), state))


def test_packed_equals_each_sequence_alone():
    lengths = [70, 0, 1, 17]
    inputs = draw(1, sum(lengths))
    offsets = torch.tensor([0, *lengths], device=DEVICE).cumsum(0)
    state = draw_state(4)
    out, final = gated_delta_rule(*inputs, state, offsets)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, inputs, upstream)
    for s, (start, stop) in enumerate(itertools.pairwise(offsets.tolist())):
        piece = [x[:, start:stop].detach().requires_grad_() for x in inputs]
        wanted, wanted_final = gated_delta_rule(*piece, state[s : s + 1])
        torch.testing.assert_close(out[:, start:stop], wanted)
        torch.testing.assert_close(final[s : s + 1], wanted_final)
        if stop > start:
            alone = torch.autograd.grad(wanted, piece, upstream[:, start:stop])
            for ours, theirs in zip(gradients, alone, strict=True):
                torch.testing.assert_close(ours[:, start:stop], theirs)


def test_state_hands_over_between_calls():
    """A prompt at once, then one token at a time: what the sampler does."""
    inputs = [x.detach() for x in draw(2, 90, dtype=torch.float32)]
    whole, final = gated_delta_rule(*inputs)
    out, state = gated_delta_rule(*(x[:, :80] for x in inputs))
    pieces = [out]
    for t in range(80, 90):
        out, state = gated_delta_rule(*(x[:, t : t + 1] for x in inputs), state)
        pieces.append(out)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-6)


def test_strong_decay_stays_finite():
    inputs = draw(1, 130, dtype=torch.float32)
    inputs[3] = torch.full_like(inputs[3], -40.0).requires_grad_()
    out, _ = gated_delta_rule(*inputs)
    assert all(torch.isfinite(x).all() for x in (out, *torch.autograd.grad(out.sum(), inputs)))


def test_equals_transformers():
    oracle = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5").torch_chunk_gated_delta_rule
    inputs = draw(2, 100, heads=4, key_heads=2, dtype=torch.float32)
    query, key, value, gate, beta = inputs
    wanted, wanted_state = oracle(query, key, value, g=gate, beta=beta, output_final_state=True)
    out, state = gated_delta_rule(*inputs)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, wanted_state, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(out)
    gradients = (torch.autograd.grad(x, inputs, upstream) for x in (out, wanted))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_dtypes_and_nothing_to_do():
    inputs = [x.detach().bfloat16() for x in draw(1, 20)]
    out, state = gated_delta_rule(*inputs, impl="torch")
    assert out.dtype == torch.bfloat16 and state.dtype == torch.float32
    for rows, tokens in ((0, 4), (2, 0)):
        out, state = gated_delta_rule(*draw(rows, tokens))
        assert out.shape == (rows, tokens, 2, 3) and not state.any()


def test_gradient_check_lets_only_a_right_rule_pass():
    def right(*inputs, **options):
        return gated_delta_rule(*inputs, **options, impl="torch")

    check_gradients(right, torch.device("cpu"))

    def ungated(query, key, value, gate, beta, **options):
        return right(query, key, value, gate * 0.9, beta, **options)

    def stale_gradient(query, key, *rest, **options):
        return right(query, key.detach() + 0.9 * (key - key.detach()), *rest, **options)

    for wrong, name in ((ungated, "out"), (stale_gradient, "d key")):
        with pytest.raises(RuntimeError, match=f"wrong on cpu: {name} is off"):
            check_gradients(wrong, torch.device("cpu"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="wraps kernels that need a GPU")
def test_flash_linear_attention_passes_the_check_on_this_card():
    pytest.importorskip("fla")
    inputs = [x.detach() for x in draw(1, 100, heads=4, dtype=torch.bfloat16, channels=(64, 128))]
    for ours, wanted in zip(gated_delta_rule(*inputs), gated_delta_rule(*inputs, impl="torch"), strict=True):
        torch.testing.assert_close(ours.float(), wanted.float(), rtol=0.05, atol=0.02)
    whole, exact = ([x.to(dtype) for x in inputs] for dtype in (torch.float32, torch.float64))
    for ours, wanted in zip(gated_delta_rule(*whole), gated_delta_rule(*exact), strict=True):
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-4, atol=1e-5)  # float32 is not fla's TF32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({2: torch.zeros(1, 4, 3, 3)}, "3 value heads are no multiple of 2"),
        ({3: torch.zeros(1, 4)}, "gate and beta must be"),
        ({0: torch.zeros(1, 4, 2, 6)}, "query and key must be"),
    ],
)
def test_mistakes_are_named(change, message):
    inputs = draw(1, 4)
    for index, wrong in change.items():
        inputs[index] = wrong
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(*inputs)


def test_mistaken_options_are_named():
    inputs = draw(1, 4)
    with pytest.raises(ValueError, match="impl must be"):
        gated_delta_rule(*inputs, impl="triton")
    with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to 4"):
        gated_delta_rule(*inputs, None, torch.tensor([0, 5], device=DEVICE))
    with pytest.raises(ValueError, match="initial_state must be"):
        gated_delta_rule(*inputs, torch.zeros(2, 2, 5, 3))
