"""The plan of a dry run: counts from a model without storage, memory that a real backward pass confirms."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, HYBRID, perturbed

from rsi.architecture import FULL, LINEAR, PUBLISHED, ModelConfig
from rsi.config import UserError, parse
from rsi.model import Layer, Mixing, Transformer, rotary
from rsi.plan import build, lines, memory, model_config, parameters_by_part, saved_bytes


def test_published_models_have_their_published_sizes() -> None:
    """Parameters as the checkpoints' cards and weight files state them."""
    for name, billions in (("Qwen/Qwen3-0.6B", 0.596), ("Qwen/Qwen3-8B", 8.19), ("Qwen/Qwen3.8-27B", 26.896)):
        actor, critic = build(PUBLISHED[name])
        counts = parameters_by_part(actor)
        assert sum(counts.values()) / 1e9 == pytest.approx(billions, rel=1e-3)
        assert len(list(actor.parameters())) == {"Qwen/Qwen3.8-27B": 851, "Qwen/Qwen3-8B": 399}.get(name, 310)
        head = counts.get("output head", 0)
        assert sum(parameters_by_part(critic).values()) == sum(counts.values()) - head + actor.config.hidden_size + 1
        assert all(parameter.is_meta for parameter in actor.parameters())


@pytest.mark.parametrize(("config", "kind"), [(FAMILIES["qwen2"], FULL), (HYBRID, FULL), (HYBRID, LINEAR)])
def test_saved_bytes_are_those_of_a_real_pass(config: ModelConfig, kind: str) -> None:
    torch.manual_seed(0)
    layer, found = Layer(config, kind), {}
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    held = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        held.append(tensor)
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(torch.randn(1, 96, 32, requires_grad=True), rotary(torch.arange(96), config), Mixing())
    real = sum(count for place, count in found.items() if place not in weights)
    assert saved_bytes(config, kind, 96) == pytest.approx(real, rel=0.02)


def test_memory_follows_ranks_and_tokens() -> None:
    actor = Transformer(replace(HYBRID, vocab_size=1000))
    one, four = memory(actor, 1, 64), memory(actor, 4, 64)
    count = sum(parameter.numel() for parameter in actor.parameters())
    assert (one.weights, one.gradients, one.optimizer, one.gathered) == (4 * count, 4 * count, 8 * count, 0)
    assert count <= four.weights < 1.1 * count and four.gathered > 0
    longer = memory(actor, 1, 128)
    assert longer.logits == 2 * one.logits == 4 * 128 * 1000
    assert one.recomputed < one.activations < longer.activations < 2.2 * one.activations


def test_every_preset_has_a_plan(tmp_path: Path) -> None:
    for preset, model in (("tiny", "embedded"), ("qwen3-0.6b", "hub:Qwen/Qwen3-0.6B")):
        plan = dict(lines(parse(["--preset", preset, "--ranks", "2", "--runs", str(tmp_path)])))
        assert plan["model"].startswith(model) and "a rank of 2" in plan["critic GiB"]
        assert plan["stages"] == "base, rsr1, rpr1, rsr2, rpr2" and not list(tmp_path.iterdir())


def test_published_learning_rates() -> None:
    rpr = parse(["--preset", "qwen3.8-27b"]).rpr
    assert (rpr.actor_lr, rpr.actor_lr_later, rpr.critic_lr, rpr.calibration_steps) == (5e-7, 1e-7, 1.5e-5, 4)


def test_a_checkpoints_folder_names_its_model(tmp_path: Path) -> None:
    from test_chat import TOKENIZER

    from rsi.weights import save_model

    save_model(tmp_path / "model", perturbed(HYBRID), TOKENIZER)
    assert model_config(parse(["--init", str(tmp_path / "model")])).kinds == HYBRID.kinds
    with pytest.raises(UserError, match=r"--init nowhere: .*config\.json is missing"):
        model_config(parse(["--init", "nowhere"]))
    with pytest.raises(UserError, match="hub:a/b: its sizes are not known"):
        model_config(parse(["--init", "hub:a/b"]))
