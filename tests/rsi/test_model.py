"""The model against transformers' Qwen3 as oracle, and its hand-written gradients against finite differences."""

import platform
from dataclasses import replace

import pytest
import torch
import transformers

from rsi.model import INITIAL_STD, Critic, ModelConfig, Transformer, keep_freed_memory, rms_norm, rotary, rotate, swiglu

TINY = ModelConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_theta=1e4,
    max_position_embeddings=256,
)


def perturbed(config: ModelConfig, seed: int = 0) -> Transformer:
    """A model of which no parameter, the norms included, has a value that would hide a mistake."""
    torch.manual_seed(seed)
    actor = Transformer(config)
    with torch.no_grad():
        for parameter in actor.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return actor


def oracle(actor: Transformer) -> transformers.Qwen3ForCausalLM:
    config = transformers.Qwen3Config(**actor.config.to_dict())
    model = transformers.Qwen3ForCausalLM(config)
    missing, unexpected = model.load_state_dict(actor.state_dict(), strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    model.tie_weights()
    return model


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_logits_and_gradients_equal_transformers(tied: bool, kv_heads: int) -> None:
    actor = perturbed(replace(TINY, tie_word_embeddings=tied, num_key_value_heads=kv_heads))
    reference = oracle(actor)
    ids = torch.randint(0, 96, (3, 70))
    ours, theirs = actor.logits(actor(ids)), reference(ids).logits
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    next_token_loss(ours, ids).backward()
    next_token_loss(theirs, ids).backward()
    wanted = dict(reference.named_parameters())
    for name, parameter in actor.named_parameters():
        error = (parameter.grad - wanted[name].grad).norm() / wanted[name].grad.norm()
        assert error < 1e-4, (name, float(error))


def test_the_comparison_notices_a_wrong_rope_theta() -> None:
    actor = perturbed(TINY)
    other = Transformer(replace(TINY, rope_theta=1e6))
    other.load_state_dict(actor.state_dict())
    ids = torch.randint(0, 96, (1, 70))
    assert (actor.logits(actor(ids)) - other.logits(other(ids))).abs().max() > 1e-3


def test_right_padding_changes_nothing() -> None:
    actor = perturbed(TINY)
    ids = torch.randint(0, 96, (2, 40))
    padded = torch.cat((ids, torch.zeros(2, 24, dtype=torch.long)), 1)
    torch.testing.assert_close(actor(padded)[:, :40], actor(ids), atol=1e-5, rtol=1e-5)


def test_without_a_graph_the_same_numbers() -> None:
    actor = perturbed(TINY)
    ids = torch.randint(0, 96, (2, 40))
    with torch.no_grad():
        plain = actor(ids)
    assert torch.equal(actor(ids), plain)


def test_gradients_of_the_fused_functions() -> None:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (random(2, 3, 8), random(8)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6), (random(2, 3, 4, 6), random(4, 6)))
    cos, sin = (table.double() for table in rotary(torch.arange(3), replace(TINY, head_dim=8)))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (random(2, 3, 4, 8),))
    assert torch.autograd.gradcheck(swiglu, (random(2, 3, 10),))


def test_bfloat16_follows_transformers() -> None:
    actor = perturbed(TINY)
    reference = oracle(actor).bfloat16()
    actor = actor.bfloat16()
    ids = torch.randint(0, 96, (2, 50))
    with torch.no_grad():
        ours = actor.logits(actor(ids)).log_softmax(-1)
        theirs = reference(ids).logits.float().log_softmax(-1)
    assert ours.dtype == torch.float32
    assert (ours - theirs).abs().mean() < 2e-2


def test_a_new_model_is_drawn_from_the_global_generator() -> None:
    torch.manual_seed(5)
    first = Transformer(TINY).state_dict()
    torch.manual_seed(5)
    second = Transformer(TINY).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert abs(first["model.embed_tokens.weight"].std() / INITIAL_STD - 1) < 0.1
    assert (first["model.layers.0.self_attn.q_norm.weight"] == 1).all()


def test_critic_starts_from_the_actor_with_values_near_zero() -> None:
    actor = perturbed(TINY)
    critic = Critic.from_actor(actor)
    ids = torch.randint(0, 96, (2, 30))
    assert torch.equal(critic.model(ids), actor(ids))
    values = critic(ids)
    assert values.shape == (2, 30) and values.dtype == torch.float32
    assert 0 < values.abs().max() < 0.1
    again = Critic.from_actor(actor)
    assert all(torch.equal(a, b) for a, b in zip(critic.parameters(), again.parameters(), strict=True))
    with torch.no_grad():
        critic.model.norm.weight.zero_()
    assert actor.model.norm.weight.abs().max() > 0
    critic.bfloat16().value_head.float()
    assert critic(ids).dtype == torch.float32


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama': only 'qwen3'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type is 'linear'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
    ],
)
def test_other_architectures_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(TINY.to_dict() | changed)


def test_config_round_trip_and_missing_sizes() -> None:
    for eos in (None, 3, (3, 4)):
        config = replace(TINY, eos_token_id=eos)
        assert ModelConfig.from_dict(config.to_dict()) == config
    old = TINY.to_dict()
    del old["rope_parameters"]
    assert ModelConfig.from_dict(old) == TINY
    del old["hidden_size"]
    with pytest.raises(ValueError, match="hidden_size missing"):
        ModelConfig.from_dict(old)


def test_freed_memory_is_kept_where_the_library_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
