"""One tiny model a family, no parameter of which has a value that would hide a mistake, and rounds of sampling."""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from rsi.architecture import FULL, LINEAR, ModelConfig
from rsi.model import Transformer
from rsi.sampler import Sampler, Turn

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
HYBRID = replace(
    TINY,
    model_type="qwen3_5",
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL),
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
)
FAMILIES = {"qwen2": replace(TINY, model_type="qwen2", head_dim=8), "qwen3": TINY, "qwen3_5": HYBRID}


def perturbed(config: ModelConfig, seed: int = 0) -> Transformer:
    """Norms and biases included. The hybrid's memory is made to last: its output is normalised, and where all but
    one token is forgotten, some heads' outputs are almost 0, and rounding errors grow a thousandfold."""
    torch.manual_seed(seed)
    actor = Transformer(config)
    with torch.no_grad():
        for name, parameter in actor.named_parameters():
            parameter.add_((0.1 if config.hybrid else 0.2) * torch.randn_like(parameter))
            if name.endswith("A_log"):
                parameter.sub_(3.0)
    return actor


def sample(
    sampler: Sampler,
    requests: Sequence[tuple[int, Sequence[int]]],
    max_tokens: int,
    stops: Collection[int],
    temperature: float,
) -> list[Turn]:
    """One turn for each (slot, new ids), in their order: all begin together, the last to end ends the round."""
    turns: dict[int, Turn] = {}
    for slot, new_ids in requests:
        sampler.submit(slot, new_ids, max_tokens)
    while sampler.busy:
        turns |= sampler.advance(stops, temperature)
    return [turns[slot] for slot, _ in requests]
