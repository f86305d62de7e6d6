"""The model against transformers as oracle, for every family, and its hand-written gradients."""

import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tiny_models import FAMILIES, HYBRID, TINY, perturbed

from rsi.architecture import FULL, INITIAL_STD, LINEAR, ModelConfig
from rsi.distributed import copy_of
from rsi.model import Critic, Transformer, keep_freed_memory, norm_weights, rms_norm, rotary, rotate, swiglu


def oracle(actor: Transformer, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    config = transformers.AutoConfig.for_model(**actor.config.to_dict())
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = model.load_state_dict(actor.state_dict(), strict=False)
    assert not unexpected and missing in ([], ["lm_head.weight"])
    model.tie_weights()
    return model


def next_token_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        *FAMILIES.values(),
        *(replace(TINY, num_key_value_heads=heads) for heads in (1, 4)),
        replace(HYBRID, num_attention_heads=4, num_key_value_heads=2, linear_num_key_heads=3),
    ],
)
def test_logits_and_gradients_equal_transformers(tied: bool, config: ModelConfig) -> None:
    actor = perturbed(replace(config, tie_word_embeddings=tied))
    reference = oracle(actor)
    ids = torch.randint(0, 96, (2, 131))  # two chunks of the delta rule and a ragged end
    ours, theirs = actor.logits(actor(ids)), reference(ids).logits
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    next_token_loss(ours, ids).backward()
    next_token_loss(theirs, ids).backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    if not config.hybrid:  # Qwen2 and Qwen3: to the last bit
        assert torch.equal(ours, theirs)
        differing = [name for name, own in actor.named_parameters() if not torch.equal(own.grad, wanted[name])]
        assert not differing
    for name, parameter in actor.named_parameters():
        error = (parameter.grad - wanted[name]).norm() / wanted[name].norm()
        assert error < 1e-4, (name, float(error))


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_are_those_of_transformers(family: str) -> None:
    actor = perturbed(FAMILIES[family]).bfloat16()
    reference = oracle(actor, torch.bfloat16)
    ids = torch.randint(0, 96, (2, 131))
    with torch.no_grad():
        ours, theirs = actor.logits(actor(ids)), reference(ids).logits
    assert ours.dtype == torch.float32 and theirs.dtype == torch.bfloat16
    assert torch.equal(ours, theirs.float())


LENGTHS = (1, 70, 2, 64, 3, 17)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_equal_separate_ones(family: str) -> None:
    """Outputs and gradients, and what stands in one document changes nothing in another."""
    actor = perturbed(FAMILIES[family])
    documents = [torch.randint(0, 96, (1, length)) for length in LENGTHS]
    weights = [torch.randn(1, length, 32) for length in LENGTHS]
    cu_seqlens = torch.tensor([0, *LENGTHS]).cumsum(0)
    packed = actor(torch.cat(documents, 1), cu_seqlens)
    separate = torch.cat([actor(document) for document in documents], 1)
    torch.testing.assert_close(packed, separate, atol=2e-5, rtol=2e-5)
    parameters = [parameter for name, parameter in actor.named_parameters() if "lm_head" not in name]
    gradients = [
        torch.autograd.grad((hidden * torch.cat(weights, 1)).sum(), parameters, retain_graph=True)
        for hidden in (packed, separate)
    ]
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() < 1e-4 * other.norm()
    documents[1] = torch.randint(0, 96, (1, 70))
    changed = actor(torch.cat(documents, 1), cu_seqlens)
    assert torch.equal(changed[:, 71:], packed[:, 71:]) and torch.equal(changed[:, :1], packed[:, :1])
    with pytest.raises(ValueError, match="all documents in one row, got 2 rows"):
        actor(torch.zeros(2, 4, dtype=torch.long), torch.tensor([0, 4]))


@pytest.mark.parametrize("family", FAMILIES)
def test_left_padding_is_a_document_of_its_own(family: str) -> None:
    actor = perturbed(FAMILIES[family])
    rows = [torch.randint(0, 96, (length,)) for length in (40, 7, 33)]
    padded = torch.cat([torch.nn.functional.pad(row, (40 - len(row), 0)) for row in rows])
    borders = torch.tensor([0, *(part for row in rows for part in (40 - len(row), len(row)))]).cumsum(0)
    hidden = actor(padded[None], borders).view(3, 40, -1)
    for row, found in zip(rows, hidden, strict=True):
        torch.testing.assert_close(found[40 - len(row) :], actor(row[None])[0], atol=2e-5, rtol=2e-5)


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

    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, norm_weights(w, 1e-6)), (random(2, 3, 8), random(8)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, norm_weights(w, 1e-6)), (random(2, 3, 4, 6), random(4, 6)))
    cos, sin = (table.double() for table in rotary(torch.arange(3), replace(TINY, head_dim=8)))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), (random(2, 4, 3, 8),))
    assert torch.autograd.gradcheck(swiglu, (random(2, 3, 5), random(2, 3, 5)))


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
    critic = copy_of(actor, Critic)
    ids = torch.randint(0, 96, (2, 30))
    assert torch.equal(critic.model(ids), actor(ids))
    values = critic(ids)
    assert values.shape == (2, 30) and values.dtype == torch.float32
    assert 0 < values.abs().max() < 0.1
    again = copy_of(actor, Critic)
    assert all(torch.equal(a, b) for a, b in zip(critic.parameters(), again.parameters(), strict=True))
    with torch.no_grad():
        critic.model.norm.weight.zero_()
    assert actor.model.norm.weight.abs().max() > 0
    critic.bfloat16().value_head.float()
    assert critic(ids).dtype == torch.float32


def test_a_hybrid_trains_a_critic() -> None:
    critic = copy_of(perturbed(HYBRID), Critic)
    critic(torch.randint(0, 96, (1, 9))).sum().backward()
    assert all(parameter.grad is not None for parameter in critic.parameters())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "llama"}, "model_type is 'llama': only qwen2, qwen3, qwen3_5_text, qwen3_5 are"),
        ({"model_type": "qwen3", "text_config": TINY.to_dict()}, "model_type is 'qwen3': only"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type is 'linear'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple"),
        ({"head_dim": 15}, "head_dim 15 × partial_rotary_factor 1.0 is odd"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types is"),
        ({"layer_types": [LINEAR, FULL, FULL]}, "layer_types has 'linear_attention', which a qwen3 model has not"),
    ],
)
def test_other_architectures_are_refused(changed: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(TINY.to_dict() | changed)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "qwen3_5_moe_text"}, "model_type is 'qwen3_5_moe_text'"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type is 'sigmoid': only 'swish'"),
        ({"attn_output_gate": False}, "attn_output_gate is False"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn'"),
        ({"linear_num_value_heads": 5}, "linear_num_value_heads 5 is no multiple of linear_num_key_heads 2"),
        ({"layer_types": [LINEAR]}, "for each of the 4 layers"),
    ],
)
@pytest.mark.parametrize("nested", [True, False])
def test_other_hybrids_are_refused(changed: dict, message: str, nested: bool) -> None:
    values = HYBRID.to_dict() | changed
    if nested and "model_type" not in changed:
        values = {"model_type": "qwen3_5", "text_config": values}
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_dict(values)


def test_nested_hybrid_configs_are_read() -> None:
    text = replace(HYBRID, tie_word_embeddings=False, eos_token_id=(3, 4)).to_dict()
    wanted = ModelConfig.from_dict(text)
    assert wanted.rotary_dim == 4 and wanted.stops == (3, 4)
    assert ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": text, "vision_config": {}}) == wanted
    outside = {name: text.pop(name) for name in ("tie_word_embeddings", "eos_token_id")}
    assert ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": text, **outside}) == wanted
    del text["layer_types"], text["rope_parameters"]["partial_rotary_factor"]
    assert ModelConfig.from_dict({"model_type": "qwen3_5", "text_config": text, **outside}) == wanted
    del text["linear_key_head_dim"]
    with pytest.raises(ValueError, match="linear_key_head_dim missing"):
        ModelConfig.from_dict(text)
    for wrong in ("64", 64.0, 0):
        with pytest.raises(ValueError, match=f"hidden_size {wrong!r} .*whole number"):
            ModelConfig.from_dict(HYBRID.to_dict() | {"hidden_size": wrong})


def test_config_round_trip_and_missing_sizes() -> None:
    for config in FAMILIES.values():
        assert ModelConfig.from_dict(config.to_dict()) == config
    for eos in (None, 3, (3, 4)):
        config = replace(TINY, eos_token_id=eos)
        assert ModelConfig.from_dict(config.to_dict()) == config
    old = TINY.to_dict()
    del old["rope_parameters"]
    assert ModelConfig.from_dict(old) == TINY
    for config in FAMILIES.values():
        values = config.to_dict()
        del values["head_dim"]
        theirs = transformers.AutoConfig.for_model(**values)
        wanted = getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
        assert ModelConfig.from_dict(values).head_dim == wanted
    del old["hidden_size"]
    with pytest.raises(ValueError, match="hidden_size missing"):
        ModelConfig.from_dict(old)


def test_freed_memory_is_kept_where_the_library_is_glibc() -> None:
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")


def test_what_is_allocated_after_it_has_huge_pages() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if platform.libc_ver()[0] != "glibc" or not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("no huge pages here")
    code = (
        "import torch; from rsi.model import keep_freed_memory; keep_freed_memory(); x = torch.ones(2**26);"
        "print(*(line.split()[1] for line in open('/proc/self/smaps_rollup') if line.startswith('AnonHugePages')))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(found) * 1024 > 0.9 * 4 * 2**26
