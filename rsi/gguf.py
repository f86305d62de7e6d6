"""GGUF files of the llama type, as some packages carry them, turned into Hugging Face folders.

A llama without biases is a Qwen2 whose biases are 0, and is written as one. Needs the optional package ``gguf``.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from rsi.architecture import ModelConfig
from rsi.chat import END, PAD
from rsi.weights import WeightsError, write_folder

NAMES = {
    "token_embd": "model.embed_tokens.weight",
    "output_norm": "model.norm.weight",
    "output": "lm_head.weight",
    "attn_norm": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj.weight",
    "attn_k": "self_attn.k_proj.weight",
    "attn_v": "self_attn.v_proj.weight",
    "attn_output": "self_attn.o_proj.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "ffn_gate": "mlp.gate_proj.weight",
    "ffn_up": "mlp.up_proj.weight",
    "ffn_down": "mlp.down_proj.weight",
}
CONTROL, USER_DEFINED = 3, 4  # gguf's token types that become added tokens


def convert(file: Path, folder: Path) -> None:
    """Write `file`, de-quantised to float32, as the model folder `folder`.

    Raises WeightsError for another architecture, tokenizer or tensor, naming it.
    """
    try:
        from gguf import GGUFReader
        from gguf.quants import dequantize
    except ModuleNotFoundError:
        raise WeightsError("reading GGUF needs the package gguf: pip install 'terminal-rsi[gguf]'") from None
    if not file.is_file():
        raise WeightsError(f"{file} is missing: give a GGUF file")
    if folder.exists():
        raise WeightsError(f"{folder} exists: choose another folder")
    reader = GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith(WANTED)}
    arrays = {
        tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()) for tensor in reader.tensors
    }
    config = _config(file, fields, tied="output.weight" not in arrays)
    tensors: dict[str, Tensor] = {}
    for name, tensor in arrays.items():
        tensors |= _renamed(file, name, tensor, config)
    write_folder(folder, tensors, config, _tokenizer(file, fields), fields.get("tokenizer.chat_template"))


WANTED = ("general.architecture", "llama.", "tokenizer.")


def _config(file: Path, fields: dict[str, Any], tied: bool) -> ModelConfig:
    if fields.get("general.architecture") != "llama":
        raise WeightsError(f"{file}: architecture is {fields.get('general.architecture')!r}: only 'llama' is supported")
    scaling = [name for name in fields if name.startswith("llama.rope.scaling") or name.startswith("llama.expert")]
    if scaling:
        raise WeightsError(f"{file}: has {scaling[0]}, which is not supported")
    heads, size = fields["llama.attention.head_count"], fields["llama.embedding_length"]
    head_dim = size // heads
    if fields.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise WeightsError(f"{file}: rotates {fields['llama.rope.dimension_count']} of {head_dim} channels: all must")
    return ModelConfig(
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=size,
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields.get("llama.attention.head_count_kv", heads),
        head_dim=head_dim,
        # Stored as float32: 7 digits give back what was meant.
        rms_norm_eps=float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.7g}"),
        rope_theta=float(fields.get("llama.rope.freq_base", 1e4)),
        tie_word_embeddings=tied,
        max_position_embeddings=fields["llama.context_length"],
        model_type="qwen2",
        eos_token_id=int(fields["tokenizer.ggml.eos_token_id"]),
    )


def _renamed(file: Path, name: str, tensor: Tensor, config: ModelConfig) -> dict[str, Tensor]:
    """One tensor under Hugging Face's name; a projection that has a bias in Qwen2 brings one of zeros."""
    stem, kind = name.removeprefix("blk.").removesuffix(".weight"), name.rpartition(".")[2]
    layer, _, stem = stem.rpartition(".")
    if stem not in NAMES or kind != "weight" or (layer and not layer.isdecimal()):
        raise WeightsError(f"{file}: {name} is no tensor of a llama without biases")
    wanted = f"model.layers.{layer}.{NAMES[stem]}" if layer else NAMES[stem]
    if stem in ("attn_q", "attn_k"):
        # GGUF pairs neighbouring channels for the rotation, Hugging Face the two halves of a head.
        heads = config.num_attention_heads if stem == "attn_q" else config.num_key_value_heads
        tensor = tensor.unflatten(0, (heads, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
    found = {wanted: tensor.contiguous()}
    if stem in ("attn_q", "attn_k", "attn_v"):
        found[wanted.replace(".weight", ".bias")] = torch.zeros(len(tensor))
    return found


def _tokenizer(file: Path, fields: dict[str, Any]) -> Tokenizer:
    model, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise WeightsError(f"{file}: its tokenizer is {model!r} with {pre!r}: only 'gpt2' with 'smollm' is supported")
    tokens = fields["tokenizer.ggml.tokens"]
    kinds = fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    missing = [token for token in (END, PAD) if token not in tokens]
    if missing:
        raise WeightsError(f"{file}: its vocabulary has no {', '.join(missing)}")
    tokenizer = Tokenizer(models.BPE({token: place for place, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((CONTROL, True), (USER_DEFINED, False)):
        added = [token for token, found in zip(tokens, kinds, strict=True) if found == kind]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in added])
    return tokenizer
