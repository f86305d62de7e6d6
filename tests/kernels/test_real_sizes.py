"""What shows only with the blocks, chunks and tiles of real use: the other tests make them small.

Most of it needs a GPU: addresses beyond 32 bits, memory, a second card. The interpreter takes the smaller sizes.
"""

import importlib
import re
from pathlib import Path

import pytest
import torch
from rsi_kernels import linear_logprob, ppo_loss, reference, tb_gae_with_moments, value_loss

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
only_on_a_gpu = pytest.mark.skipif(not CUDA, reason="needs a GPU")
head = importlib.import_module("rsi_kernels.linear_logprob")


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE, dtype=dtype)


# The last has more chunks of 4096 than the 256 pairs that are read at a time.
@pytest.mark.parametrize("tokens", [4095, 4097, 9001, pytest.param(1_200_000, marks=only_on_a_gpu)])
def test_tb_gae_in_whole_chunks(tokens):
    action = draw(tokens) > 0
    turn = (draw(tokens, seed=1) > 1.5).long().cumsum(0)
    rewards, values = (draw(tokens, seed=seed).where(action, torch.nan) for seed in (2, 3))
    given = [x[None] for x in (rewards, values, action, turn)]
    ours, again = (tb_gae_with_moments(*given, impl="triton") for _ in range(2))
    for found, right, same in zip(ours, tb_gae_with_moments(*given, impl="torch"), again, strict=True):
        torch.testing.assert_close(found, right, rtol=2e-5, atol=2e-5)
        assert torch.equal(found, same)


@pytest.mark.parametrize(
    ("impl", "tokens", "width", "vocabulary"),
    [
        ("triton", 9, 8, 17_001),
        ("torch", 140, 8, 50_264),  # of GPT-2, padded: no multiple of a slice, and more tokens than a chunk
        ("torch", 3, 8, 151_936),
        ("torch", 3, 8, 248_320),
        pytest.param("triton", 4097, 1024, 17_001, marks=only_on_a_gpu),
    ],
)
def test_linear_logprob_in_whole_tiles_of_half_precision(impl, tokens, width, vocabulary):
    """Logits are never rounded to bfloat16 (which costs 0.01 and more); gradients are, a few times at the most."""
    hidden, weight = draw(tokens, width, dtype=torch.bfloat16), draw(vocabulary, width, dtype=torch.bfloat16)
    target = torch.arange(tokens, device=DEVICE) * 7919 % vocabulary
    leaves = [hidden.requires_grad_(), (weight * (3 / width**0.5)).requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    upstream = [draw(tokens, seed=seed) for seed in (1, 2)]
    found = linear_logprob(*leaves, target, 0.8, impl=impl)
    right = reference.linear_logprob(*exact, target, 0.8)
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-4)
    gradients = torch.autograd.grad(found, leaves, upstream, retain_graph=True)
    again = torch.autograd.grad(found, leaves, upstream)
    oracle = torch.autograd.grad(right, exact, [x.double() for x in upstream])
    for a, b, c in zip(gradients, oracle, again, strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-2 and torch.equal(a, c)


@pytest.mark.parametrize("width", [5120, 8192])
def test_value_loss_in_whole_rows(width):
    hidden = draw(3, width, dtype=torch.bfloat16).requires_grad_()
    leaves = [hidden, (draw(width) / width**0.5).requires_grad_(), draw(1).requires_grad_()]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    old, returns = draw(3, seed=1), 2 * draw(3, seed=2)
    ours = value_loss(*leaves, old, returns, impl="triton")
    wanted = reference.value_loss(*exact, old.double(), returns.double())
    torch.testing.assert_close(ours.loss.double(), wanted[0], rtol=1e-5, atol=1e-5)
    pairs = zip(torch.autograd.grad(ours.loss, leaves), torch.autograd.grad(wanted[0], exact), strict=True)
    for (a, b), tolerance in zip(pairs, (1e-2, 1e-5, 1e-5), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=tolerance, atol=tolerance)


def kernel_sources() -> list[str]:
    return [line for path in Path(head.__file__).parent.glob("*_triton.py") for line in path.read_text().splitlines()]


def test_nothing_is_added_in_an_order_of_its_own_or_tuned_by_timing():
    """Atomics and autotuning give other bits from run to run; `tl.dot` would be TensorFloat-32 by default."""
    assert not [line for line in kernel_sources() if re.search(r"tl\.atomic|autotune|tl\.dot|reverse=True", line)]


def test_every_address_is_computed_in_64_bits():
    """What a program's number is multiplied by may be the length of a row: 32 bits wrap round silently."""
    found = [line for line in kernel_sources() if "tl.program_id" in line]
    assert len(found) >= 6
    assert all(re.search(r"= tl\.program_id\(0\)\.to\(tl\.int64\)$", line) for line in found), found


@only_on_a_gpu
def test_more_than_two_billion_elements():
    width, tokens = 8192, 2**31 // 8192 + 40
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    hidden = torch.zeros(tokens, width, device=DEVICE, dtype=torch.bfloat16)
    hidden[-40:] = draw(40, width, dtype=torch.bfloat16)
    hidden.requires_grad_()
    weight, bias, old, returns = draw(width) / width**0.5, draw(1), torch.zeros(tokens, device=DEVICE), draw(tokens)
    ours = value_loss(hidden, weight, bias, old, returns)
    (gradient,) = torch.autograd.grad(ours.loss, hidden)
    last = hidden[-40:].detach().requires_grad_()
    alone = value_loss(last, weight, bias, old[-40:], returns[-40:])
    torch.testing.assert_close(ours.value[-40:], alone.value)
    torch.testing.assert_close(gradient[-40:], torch.autograd.grad(alone.loss, last)[0])


@only_on_a_gpu
def test_memory_is_what_the_readme_says():
    tokens, width, vocabulary = 16384, 1024, 65536
    leaves = [draw(n, width, dtype=torch.bfloat16).requires_grad_() for n in (tokens, vocabulary)]
    target = torch.zeros(tokens, device=DEVICE, dtype=torch.int64)
    tiles = head.GPU_TILE_BYTES + head.GPU_TILE_BYTES // 2  # float32 logits, and their gradient in bfloat16
    results = 2 * width * (tokens + vocabulary)
    for _ in range(2):  # the first time, workspaces of the matrix products come on top, which stay
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = linear_logprob(*leaves, target)
        forward = torch.cuda.max_memory_allocated() - before
        gradients = torch.autograd.grad(out.logprob.sum() + out.entropy.sum(), leaves)
        backward = torch.cuda.max_memory_allocated() - before
        del out, gradients
    assert forward < head.GPU_TILE_BYTES + (32 << 20)
    assert backward < tiles + results + 4 * width * (tokens + head.GPU_SLICE) + (32 << 20)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_tensors_on_another_card_than_the_current_one():
    x = draw(40).to("cuda:1")
    assert torch.cuda.current_device() == 0
    for ours, wanted in zip(ppo_loss(x, x / 2, x), ppo_loss(x, x / 2, x, impl="torch"), strict=True):
        torch.testing.assert_close(ours, wanted)
