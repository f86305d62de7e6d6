"""Packed weights give the numbers of the weights, and are used where the stated condition holds alone."""

from dataclasses import replace

import pytest
import torch
from tiny_models import HYBRID, TINY, perturbed, sample

from rsi.architecture import ModelConfig
from rsi.packing import linear, pack, packs
from rsi.sampler import Sampler

CPU = torch.device("cpu")


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    weight = torch.randn(48, 32)
    assert pack(weight) is weight and not packs(CPU, torch.float16)
    assert not packs(torch.device("cuda"), torch.bfloat16) and not packs(torch.device("meta"), torch.bfloat16)
    packed = pack(weight.bfloat16())
    assert packed.is_mkldnn == packs(CPU, torch.bfloat16)


def test_where_an_operation_is_missing_weights_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    weight = torch.randn(48, 32).bfloat16()
    assert not packs(CPU, torch.bfloat16) and pack(weight) is weight
    assert linear(weight, weight).shape == (48, 48)


@pytest.mark.parametrize("rows", [(1,), (8, 1), (8,), (32,), (3, 50)])
@pytest.mark.parametrize("sizes", [(96, 32), (576, 1536), (4099, 576)])
def test_products_are_equal(rows: tuple[int, ...], sizes: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*sizes, generator=generator).bfloat16()
    x = torch.randn(*rows, sizes[1], generator=generator).bfloat16()
    bias = torch.randn(sizes[0], generator=generator).bfloat16()
    for added in (None, bias):
        packed, plain = linear(x, pack(weight), added), torch.nn.functional.linear(x, weight, added)
        if torch.__version__ >= "2.13":
            assert torch.equal(packed, plain)
        else:  # the last bit of bfloat16, where float32 sums were rounded otherwise
            torch.testing.assert_close(packed, plain, rtol=2**-7, atol=1e-3)


@pytest.mark.parametrize("config", [replace(TINY, model_type="qwen2", head_dim=8), TINY, HYBRID])
def test_sampling_in_bfloat16_is_the_same_and_follows_the_weights(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = perturbed(config).bfloat16()
    prompts = torch.randint(2, 96, (5, 20), generator=torch.Generator().manual_seed(1)).tolist()
    sampler = Sampler(actor, slots=5, max_len=96)

    def turns(sampler: Sampler) -> list[tuple[list[int], list[float]]]:
        slots = [sampler.open(seed) for seed in range(5)]
        found = sample(sampler, list(zip(slots, prompts, strict=True)), 16, (), 1.0)
        for slot in slots:
            sampler.close(slot)
        return found

    before = turns(sampler)
    assert sampler.head.is_mkldnn == sampler.weights[0].down.is_mkldnn == packs(CPU, torch.bfloat16)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.mul_(1.1)
    after = turns(sampler)
    assert after != before
    monkeypatch.setattr("rsi.packing.packs", lambda device, dtype: False)
    assert after == turns(Sampler(actor, slots=5, max_len=96))
