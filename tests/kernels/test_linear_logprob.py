"""`linear_logprob` against all logits in float64, in torch and in Triton, over tiles, masks, dtypes and strides."""

import importlib

import pytest
import torch
from rsi_kernels import linear_logprob, reference
from torch import Tensor

module = importlib.import_module("rsi_kernels.linear_logprob")
kernels = importlib.import_module("rsi_kernels.linear_logprob_triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["torch", "triton"]


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Slices of 48 columns (kernel blocks of 32) and chunks of 7 tokens, so that small inputs need many."""
    for name, value in (("SLICE", 48), ("TILE_BYTES", 4 * 48 * 7)):
        monkeypatch.setattr(module, f"CPU_{name}", value)
        monkeypatch.setattr(module, f"GPU_{name}", value)
    monkeypatch.setattr(kernels, "BLOCK", 32)


def draw(tokens: int, vocabulary: int, width: int = 6, scale: float = 1.0, dtype=torch.float32, ignored: float = 0.0):
    generator = torch.Generator().manual_seed(tokens * 1000 + vocabulary)
    hidden = torch.randn(tokens, width, generator=generator) * scale
    weight = torch.randn(vocabulary, width, generator=generator)
    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    target[torch.rand(tokens, generator=generator) < ignored] = -100
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in (hidden, weight)]
    return *leaves, target.to(DEVICE)


def upstream(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    found = torch.randn(2, tokens, generator=generator).to(DEVICE)
    return found[0], found[1]


def compare(hidden, weight, target, temperature=1.0, impl="torch", rtol=2e-5, grad_rtol=2e-5):
    """Values and gradients, relative to each tensor's largest number, against float64."""
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    scale = temperature.double() if isinstance(temperature, Tensor) else temperature
    up = upstream(target.numel())
    ours = linear_logprob(hidden, weight, target, temperature, impl=impl)
    wanted = reference.linear_logprob(*exact, target, scale)
    gradients = torch.autograd.grad(ours, (hidden, weight), [x.to(ours[0].dtype) for x in up])
    oracle = torch.autograd.grad(wanted, exact, [x.double() for x in up])
    assert all(x.dtype == torch.float32 for x in ours)
    assert [x.dtype for x in gradients] == [hidden.dtype, weight.dtype]
    pairs = [*zip(ours, wanted, [rtol] * 2, strict=True), *zip(gradients, oracle, [grad_rtol] * 2, strict=True)]
    for found, right, tolerance in pairs:
        size = float(right.detach().abs().max()) if right.numel() else 1.0
        torch.testing.assert_close(found.double(), right, rtol=0.0, atol=tolerance * max(size, 1e-3))
    return ours, gradients


@pytest.mark.parametrize("tokens", [0, 1, 6, 7, 15, 16, 17])
@pytest.mark.parametrize("vocabulary", [1, 15, 48, 127, 129])
def test_torch_equals_float64(tokens, vocabulary):
    compare(*draw(tokens, vocabulary), 0.7, "torch")


@pytest.mark.parametrize(
    ("tokens", "vocabulary"), [(0, 9), (1, 1), (1, 129), (7, 15), (8, 48), (15, 127), (16, 49), (17, 33)]
)
def test_triton_equals_float64(tokens, vocabulary):
    compare(*draw(tokens, vocabulary), 0.7, "triton")


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shift", [-300.0, 0.0, 300.0])
def test_peaked_and_all_negative_logits(impl, shift):
    """Padding columns, or a maximum that starts at 0, would show (verl issue 2899)."""
    hidden, weight, target = draw(9, 129, scale=9.0)
    with torch.no_grad():
        hidden[:, 0], weight[:, 0] = 1.0, shift
    compare(hidden, weight, target, 1.0, impl, rtol=1e-4, grad_rtol=4e-3 if shift else 1e-4)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_have_float32_logits(impl, dtype):
    """Rounding the logits would cost 0.01 to 0.05; the gradients' own dtype rounds them once."""
    compare(*draw(9, 129, scale=3.0, dtype=dtype), 0.9, impl, rtol=2e-5, grad_rtol=2e-2)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_temperature_a_token(impl):
    hidden, weight, target = draw(11, 60, ignored=0.3)
    temperature = torch.linspace(0.3, 2.0, 11, device=DEVICE)
    compare(hidden, weight, target, temperature, impl)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("kept", ["none", "one", "half"])
def test_ignored_rows_are_never_read(impl, kept):
    hidden, weight, target = draw(13, 60)
    drop = {"none": torch.ones(13), "one": (torch.arange(13) != 9), "half": torch.arange(13) % 2}[kept].bool()
    target[drop.to(DEVICE)] = -100
    compare(hidden, weight, target, 1.0, impl)
    poisoned = hidden.detach().clone()
    poisoned[drop.to(DEVICE)] = float("nan")
    poisoned.requires_grad_()
    clean, dirty = (linear_logprob(x, weight, target, 0.5, impl=impl) for x in (hidden, poisoned))
    assert torch.equal(clean.logprob, dirty.logprob) and torch.equal(clean.entropy, dirty.entropy)
    one, other = (
        torch.autograd.grad(out, (x, weight), upstream(13)) for out, x in ((clean, hidden), (dirty, poisoned))
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert not other[0][drop.to(DEVICE)].any() and not dirty.logprob[drop.to(DEVICE)].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("tokens", [1, 2])
def test_the_temperature_of_an_ignored_row_is_not_read(impl, tokens):
    hidden, weight, target = draw(tokens, 60)
    target[0] = -100
    temperature = torch.tensor([0.0, 0.7], device=DEVICE)[:tokens]
    compare(hidden, weight, target, torch.where(temperature > 0, temperature, 1.0), impl)
    found = linear_logprob(hidden, weight, target, temperature, impl=impl)
    assert torch.equal(found.logprob, linear_logprob(hidden, weight, target, 0.7, impl=impl).logprob)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("use", [(True, False), (False, True)])
def test_one_output_unused_and_one_input_frozen(impl, use):
    hidden, weight, target = draw(9, 60)
    whole = [linear_logprob(hidden, weight, target, impl=impl), reference.linear_logprob(hidden, weight, target)]
    ours, wanted = (next(x for x, used in zip(pair, use, strict=True) if used) for pair in whole)
    up = upstream(9)[0]
    for frozen in ((hidden,), (weight,), (hidden, weight)):
        found = torch.autograd.grad(ours, frozen, up, retain_graph=True)
        right = torch.autograd.grad(wanted, frozen, up, retain_graph=True)
        for a, b in zip(found, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    for part, frozen in enumerate(((hidden, weight.detach()), (hidden.detach(), weight))):
        out = linear_logprob(*frozen, target, impl=impl)
        (found,) = torch.autograd.grad(out[use.index(True)], (hidden, weight)[part], up)
        right = torch.autograd.grad(ours, (hidden, weight)[part], up, retain_graph=True)[0]
        assert torch.equal(found, right)


@pytest.mark.parametrize("impl", IMPLS)
def test_leading_dimensions_and_tied_weights(impl):
    """[B, T, D], and a head that is also the embedding: the two gradients add up."""
    _, weight, target = draw(12, 30)
    ids = torch.randint(0, 30, (3, 4), device=DEVICE)
    found = []
    for head in (linear_logprob, reference.linear_logprob):
        options = {"impl": impl} if head is linear_logprob else {}
        logprob, _ = head(weight[ids].tanh(), weight, target.view(3, 4), **options)
        assert logprob.shape == (3, 4)
        found.append(torch.autograd.grad(logprob.square().sum(), weight)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_gradcheck():
    """The torch path in float64, and the oracle itself."""
    hidden, weight, target = draw(9, 53, width=3, dtype=torch.float64, ignored=0.3)
    for head in (linear_logprob, reference.linear_logprob):
        assert torch.autograd.gradcheck(lambda h, w, head=head: tuple(head(h, w, target, 0.6)), (hidden, weight))


def test_equals_torch_linear_cross_entropy():
    oracle = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if oracle is None:
        pytest.skip("this torch has no linear_cross_entropy")
    hidden, weight, target = (x.detach().cpu() for x in draw(40, 129, width=16, ignored=0.2))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    ours = -linear_logprob(hidden, weight, target).logprob
    theirs = oracle(hidden, weight, target, reduction="none", ignore_index=-100)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    up = upstream(40)[0].cpu()
    gradients = (torch.autograd.grad(x, (hidden, weight), up) for x in (ours, theirs))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLS if DEVICE == "cuda" else ["torch"])
def test_the_error_of_the_gradients_does_not_grow_with_chunks_and_slices(impl, monkeypatch):
    """Sums in bfloat16 would lose 1 to 2 % over a hundred chunks (Liger issue 512), and over slices (verl)."""
    hidden, weight, target = draw(210, 20, width=8, dtype=torch.bfloat16)
    errors = []
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    right = torch.autograd.grad(reference.linear_logprob(*exact, target)[0].sum(), exact)
    for tokens, columns in ((210, 20), (3, 20), (210, 1)):
        for device in ("CPU", "GPU"):
            monkeypatch.setattr(module, f"{device}_TILE_BYTES", 4 * columns * tokens)
            monkeypatch.setattr(module, f"{device}_SLICE", columns)
        found = torch.autograd.grad(linear_logprob(hidden, weight, target, impl=impl).logprob.sum(), (hidden, weight))
        errors.append([float((a.double() - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)])
    for whole, *split in zip(*errors, strict=True):
        assert whole < 5e-3 and max(split) < 1.2 * whole + 1e-4


@pytest.mark.parametrize("vocabulary", [1, 1000, 8192, 50264, 248320])
def test_tiles_stay_within_their_budget(vocabulary, monkeypatch):
    monkeypatch.undo()
    for cuda, budget in ((True, module.GPU_TILE_BYTES), (False, module.CPU_TILE_BYTES)):
        tokens, columns = module.tile(vocabulary, cuda)
        assert tokens >= 1 and 1 <= columns <= vocabulary and 4 * tokens * columns <= budget
        assert 4 * (tokens + 1) * columns > budget


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(4, 7)}, r"weight \[V, D\]"),
        ({"weight": torch.zeros(9, 6, dtype=torch.float64)}, "one floating dtype"),
        ({"target": torch.zeros(4)}, "integers"),
        ({"target": torch.tensor([0, 9, 1, 2])}, "target 9 is outside the vocabulary of 9"),
        ({"target": torch.tensor([0, -1, 1, 2])}, "target -1 is outside"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"temperature": torch.tensor([1.0, -1.0, 1.0, 1.0])}, "temperature must be above 0"),
        ({"temperature": torch.ones(3)}, "temperature must be a number or"),
        ({"impl": "cuda"}, "impl must be auto, triton or torch"),
    ],
)
def test_mistakes_are_named(change, message):
    good = {"hidden": torch.zeros(4, 6), "weight": torch.zeros(9, 6), "target": torch.zeros(4, dtype=torch.int64)}
    linear_logprob(**good)
    with pytest.raises(ValueError, match=message):
        linear_logprob(**{**good, **change})
