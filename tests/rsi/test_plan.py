"""The plan of a dry run: counts from a model without storage, memory that a real backward pass confirms."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import FAMILIES, HYBRID, TINY, perturbed, sample
from torch.utils._pytree import tree_leaves

from rsi.architecture import FULL, LINEAR, PUBLISHED, ModelConfig
from rsi.config import UserError, parse
from rsi.model import Critic, Layer, Mixing, Transformer, rotary
from rsi.plan import (
    build,
    check,
    check_here,
    kept_bytes,
    limit,
    lines,
    memory,
    model_config,
    need,
    parameters_by_part,
    sampler_memory,
    saved_bytes,
)
from rsi.sampler import Sampler
from rsi.stages import schedule


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


@pytest.mark.parametrize("kind", [FULL, LINEAR])
@pytest.mark.parametrize("tokens", [192, 5184])
def test_saved_bytes_of_any_length(kind: str, tokens: int) -> None:
    wide = replace(HYBRID, intermediate_size=4096)  # weights as large as what the tokens keep
    counted = saved_bytes(wide, kind, tokens, torch.bfloat16)
    assert kept_bytes(wide, kind, tokens, torch.bfloat16) == pytest.approx(counted, rel=0.01)


def test_memory_follows_ranks_and_tokens() -> None:
    actor = Transformer(replace(HYBRID, vocab_size=1000))
    config = parse(["--rollout.max-length", "64", "--micro-batch-tokens", "64"])
    count = sum(parameter.numel() for parameter in actor.parameters())
    one, four = memory(actor, config), memory(actor, replace(config, ranks=4))
    assert (one.resident, one.gathered) == (16 * count, 0)
    assert 4 * count <= four.resident < 1.1 * 4 * count and four.gathered > 0
    longer = memory(actor, replace(config, micro_batch_tokens=128))
    assert longer.head == 2 * one.head and one.activations < longer.activations < 2.2 * one.activations
    assert memory(actor, replace(config, recompute=True)).activations < one.activations
    assert memory(actor, replace(config, precision="bfloat16")).activations < 0.9 * one.activations
    assert memory(actor, replace(config, rollout=replace(config.rollout, max_length=128))) == longer


def test_what_a_rank_samples_with() -> None:
    actor = Transformer(TINY)
    config = parse(["--rollout.max-length", "62", "--rollout.slots", "16", "--rpr.kl-coefficient", "0"])
    count, (_, joined, caches) = sum(p.numel() for p in actor.parameters()), sampler_memory(actor, config).values()
    assert caches == 3 * 16 * 64 * 2 * (2 * 16) * 4  # layers, rows, positions, keys and values, channels, bytes
    # Query, key, value; their norms; gate and up; two numbers for each of three norms.
    assert joined == 4 * 3 * (128 * 32 + 6 * 16 + 2 * 64 * 32 + 2 * 3)
    base, rsr1, rpr1 = schedule(config)[:3]
    found = need(actor, Critic(TINY), config, [base, rsr1, rpr1])
    assert found.sampling == found.resident + joined + caches and found.training > found.resident > 32 * count * 0.8
    assert need(actor, Critic(TINY), config, [base, rsr1]).resident == 16 * count
    evaluated = need(actor, Critic(TINY), config, [base])
    assert evaluated.training == evaluated.resident == 4 * count
    two = replace(config, ranks=2, rollout=replace(config.rollout, slots=32))
    assert list(sampler_memory(actor, two).values()) == [4 * count, joined, caches]
    assert need(actor, Critic(TINY), replace(two, offload=True), [rpr1]).resident == 0


@pytest.mark.parametrize("config", FAMILIES.values())
def test_the_weights_that_the_sampler_copies(config: ModelConfig) -> None:
    """Beside the actor's: those that one has after its first turn, whichever are joined or packed."""
    for precision in ("float32", "bfloat16"):
        actor = perturbed(config).to(getattr(torch, precision))
        sampler = Sampler(actor, 1, 40)
        sample(sampler, [(sampler.open(0), [2])], 1, (), 1.0)
        own = {parameter.untyped_storage().data_ptr() for parameter in actor.parameters()}
        made = [t for t in tree_leaves([sampler.weights, sampler.head]) if isinstance(t, torch.Tensor)]
        copied = [t for t in made if t.is_mkldnn or t.untyped_storage().data_ptr() not in own]
        _, joined, _ = sampler_memory(actor, parse(["--precision", precision])).values()
        assert sum(tensor.numel() * tensor.element_size() for tensor in copied) == pytest.approx(joined, rel=0.02)


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = [sys.executable, "-m", "rsi.train", "--preset", "smoke", "--runs", str(tmp_path)]
    for dry in ([], ["--dry-run"]):
        done = subprocess.run([*train, "--rank-gib", "0.001", *dry], capture_output=True, text=True, check=False)
        (line,) = done.stderr.splitlines()
        assert done.returncode == 2 and line.startswith("rsi: error: a rank needs 0.") and "has 0.00" in line
        assert bool(dry) == ("rank GiB" in done.stdout) and not list(tmp_path.iterdir())
    one, two = (parse(["--ranks", ranks, "--dry-run"]) for ranks in "12")
    alone = limit(one)
    assert alone and 0.1 < alone < 1e5 and limit(two) is None and limit(replace(two, rank_gib=80)) == 80
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    halved = limit(two)
    assert halved == pytest.approx(alone / 2, rel=0.2) and limit(one) is None


def test_every_preset_has_a_plan(tmp_path: Path) -> None:
    for preset, model in (("tiny", "embedded"), ("qwen3-0.6b", "hub:Qwen/Qwen3-0.6B")):
        config = parse(["--preset", preset, "--ranks", "2", "--dry-run", "--runs", str(tmp_path)])
        plan = dict(lines(config, *build(model_config(config)), schedule(config)))
        assert plan["model"].startswith(model) and "a rank of 2" in plan["critic GiB"]
        assert "compared with what a rank has where that is given: --rank-gib" in plan["rank GiB"]
        assert plan["stages"] == "base, rsr1, rpr1, rsr2, rpr2" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("preset", "ranks", "gib", "options"),
    [
        ("qwen3-0.6b", 1, 78, []),
        ("qwen3-8b", 8, 138, []),
        ("qwen3-8b", 8, 78, ["--offload", "--rollout.slots", "64"]),
        ("qwen3.8-27b", 64, 175, []),
        ("qwen3.8-27b", 64, 138, ["--offload"]),
    ],
)
def test_presets_fit_the_gpus_they_name(preset: str, ranks: int, gib: float, options: list[str]) -> None:
    config = parse(["--preset", preset, "--ranks", str(ranks), "--dry-run", *options])
    check(need(*build(model_config(config)), config, schedule(config)), gib)


def test_published_learning_rates() -> None:
    rpr = parse(["--preset", "qwen3.8-27b"]).rpr
    assert (rpr.actor_lr, rpr.actor_lr_later, rpr.critic_lr, rpr.calibration_steps) == (5e-7, 1e-7, 1.5e-5, 4)


def test_a_checkpoints_folder_names_its_model(tmp_path: Path) -> None:
    from test_chat import TOKENIZER

    from rsi.weights import save_model

    save_model(tmp_path / "model", perturbed(replace(HYBRID, max_position_embeddings=512)), TOKENIZER)
    assert model_config(parse(["--init", str(tmp_path / "model")])).kinds == HYBRID.kinds
    with pytest.raises(UserError, match=r"--init nowhere: .*config\.json is missing"):
        model_config(parse(["--init", "nowhere"]))
    with pytest.raises(UserError, match=r"--rollout\.max-length 513: the model has 512 positions"):
        model_config(parse(["--init", str(tmp_path / "model"), "--rollout.max-length", "513"]))
    with pytest.raises(UserError, match="hub:a/b: its sizes are not known"):
        model_config(parse(["--init", "hub:a/b", "--dry-run"]))
    with pytest.raises(UserError, match="--model: num_attention_heads 3 is no multiple of num_key_value_heads 2"):
        model_config(parse(["--model.heads", "3"]))


def test_a_checkpoint_that_cannot_chat_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    from test_chat import TOKENIZER

    from rsi.weights import save_model

    save_model(tmp_path / "model", perturbed(replace(HYBRID, max_position_embeddings=512)), TOKENIZER)
    config = parse(["--init", str(tmp_path / "model"), "--runs", str(tmp_path / "runs")])
    check_here(config, schedule(config))
    path = tmp_path / "model" / "tokenizer.json"
    text = path.read_text()
    for damaged, message in ((text.replace("<|im_end|>", "<end>"), "no token <|im_end|>"), (text[:99], "damaged")):
        path.write_text(damaged)
        with pytest.raises(UserError, match=re.escape(message)):
            check_here(config, schedule(config))
    path.write_text(text)
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"model\.safetensors: .* damaged"):
        check_here(config, schedule(config))
    path.unlink()
    with pytest.raises(UserError, match=r"tokenizer\.json is missing"):
        check_here(config, schedule(config))
    assert not config.runs.exists()
