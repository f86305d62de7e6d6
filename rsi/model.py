"""The language model: Qwen2, Qwen3 and the hybrid of Qwen3.5 to 3.8, training and decoding sharing one layer.

Shapes are named in suffixes: B rows, T tokens of a row, N tokens of all rows, D hidden size, H query heads,
K key/value heads, C channels of a head, V vocabulary. Parameter names are those of Hugging Face's
``Qwen…ForCausalLM``, so that `rsi.weights` writes and reads its folders without a table of names.
"""

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rsi.architecture import INITIAL_STD, LINEAR, ModelConfig
from rsi.deltanet import DeltaNet, DeltaWeights, Recur, delta_net, without_state
from rsi.packing import linear, pack

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: q_BTHC, k_BTKC, v_BTKC -> out_BTHC."""


def keep_freed_memory() -> bool:
    """Let this process reuse freed memory instead of returning it to the kernel; True where it can.

    glibc hands large freed tensors back at once, and each new one then costs a page fault for every 4 KiB:
    matrix products of 16k tokens were measured at 100 GFLOP/s without this call and 180 with it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    trim_threshold, mmap_threshold = -1, -3
    return bool(mallopt(mmap_threshold, 1 << 30) and mallopt(trim_threshold, 2**31 - 1))


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, inverse = _normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normalised = x * inverse
        grad_weight = (grads[0] * normalised).flatten(0, -1 - weight.dim()).sum(0)
        grad = grads[0] * weight
        projection = torch.linalg.vecdot(grad.to(normalised.dtype), normalised).unsqueeze(-1)
        grad_x = torch.addcmul(grad, normalised, projection.mul_(-1 / x.shape[-1])).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, -sin), None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        return _gated(gate_up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        out_gate, out_up = out.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grads[0], out=out_up)
        torch.ops.aten.silu_backward.grad_input(grads[0] * up, gate, grad_input=out_gate)
        return out


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype in (torch.bfloat16, torch.float16):
        # In half precision the order of roundings is transformers': logits then equal its bit for bit. A half
        # weight (Qwen2, Qwen3) multiplies what was rounded, a float32 one (Qwen3.5) what was not.
        wide = x.float()
        inverse = wide.pow(2).mean(-1, keepdim=True).add_(eps).rsqrt_()
        return (wide * inverse).to(weight.dtype).mul_(weight).to(x.dtype), inverse
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
    inverse = inverse.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (x * inverse).mul_(weight), inverse


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    other = x.roll(x.shape[-1] // 2, -1)
    if x.dtype in (torch.bfloat16, torch.float16):
        return x * cos + other * sin
    return (x * cos).addcmul_(other, sin)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019), times `weight`, in the type of `x`."""
    return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normalise(x, weight, eps)[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., C] turned by the angles of `rotary` [..., R], channel i paired with i + R/2; those from R on stay."""
    turned = x[..., : cos.shape[-1]]
    turned = _Rotate.apply(turned, cos, sin) if torch.is_grad_enabled() else _turn(turned, cos, sin)
    return turned if cos.shape[-1] == x.shape[-1] else torch.cat((turned, x[..., cos.shape[-1] :]), -1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020) of one tensor that holds both halves: [..., 2F] -> [..., F]."""
    return _SwiGLU.apply(gate_up) if torch.is_grad_enabled() else _gated(gate_up)


def rotary(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021) of positions [...]: cosine and sine, float32 [..., 1, R].

    R is the config's `rotary_dim`. The first half of the sines is negative, so that `rotate` needs no sign.
    """
    half = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None, None] / config.rope_theta ** (half / config.rotary_dim)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def causal_attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor) -> Tensor:
    """Each token attends to itself and the tokens before it in its row; returns out_BTHC."""
    out = F.scaled_dot_product_attention(
        q_BTHC.transpose(1, 2),
        k_BTKC.transpose(1, 2),
        v_BTKC.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_BTHC.shape[2] != k_BTKC.shape[2],
    )
    return out.transpose(1, 2)


def packed_attention(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, lengths: Sequence[int]) -> Tensor:
    """`causal_attention` within each document of one row, their lengths given; none sees another."""
    documents = (x.split(list(lengths), 1) for x in (q_BTHC, k_BTKC, v_BTKC))
    return torch.cat([causal_attention(q, k, v) for q, k, v in zip(*documents, strict=True)], 1)


class AttentionWeights(NamedTuple):
    """`inputs` joins the projections to query, key, value and, in the hybrid, the output's gate."""

    inputs: Tensor
    bias: Tensor | None
    qk_norm: Tensor | None
    output: Tensor


class LayerWeights(NamedTuple):
    """The tensors of one layer as the layer's maths wants them."""

    input_norm: Tensor
    mixer: AttentionWeights | DeltaWeights
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor

    def packed(self) -> "LayerWeights":
        """The same, its matrices laid out for decoding (`rsi.packing`)."""
        mixer = self.mixer._replace(inputs=pack(self.mixer.inputs), output=pack(self.mixer.output))
        return self._replace(mixer=mixer, gate_up=pack(self.gate_up), down=pack(self.down))


class Mixing(NamedTuple):
    """How tokens see those before them: where training and the sampler, which keeps a state, differ."""

    attend: Attend = causal_attention
    recur: Recur = without_state


def apply_layer(
    weights: LayerWeights,
    hidden_BTD: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    config: ModelConfig,
    mixing: Mixing,
) -> Tensor:
    """One layer, the only place that defines its maths: hidden_BTD -> hidden_BTD."""
    normed = rms_norm(hidden_BTD, weights.input_norm, config.rms_norm_eps)
    if isinstance(weights.mixer, DeltaWeights):
        mixed = delta_net(weights.mixer, normed, config, mixing.recur)
    else:
        mixed = _attention(weights.mixer, normed, cos_sin, config, mixing.attend)
    hidden_BTD = hidden_BTD + mixed
    gate_up = linear(rms_norm(hidden_BTD, weights.mlp_norm, config.rms_norm_eps), weights.gate_up)
    return hidden_BTD + linear(swiglu(gate_up), weights.down)


def _attention(
    weights: AttentionWeights, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], config: ModelConfig, attend: Attend
) -> Tensor:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    gates = heads if config.hybrid else 0
    joined = linear(x_BTD, weights.inputs, weights.bias).unflatten(-1, (-1, config.head_dim))
    qk, v, gate = joined.split((heads + kv_heads, kv_heads, gates), dim=2)
    if weights.qk_norm is not None:
        qk = rms_norm(qk, weights.qk_norm, config.rms_norm_eps)
    q, k = rotate(qk, *cos_sin).split((heads, kv_heads), dim=2)
    out = attend(q, k, v).flatten(2)
    if config.hybrid:
        out = out * gate.flatten(2).sigmoid()
    return linear(out, weights.output)


class Norm(nn.Module):
    """A norm's weight; `centred` ones are stored around 0 and used as 1 + weight, in float32."""

    def __init__(self, size: int, centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if centred else torch.ones(size))
        self.centred = centred

    @property
    def scale(self) -> Tensor:
        return 1.0 + self.weight.float() if self.centred else self.weight


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, channels, bias = config.hidden_size, config.head_dim, config.attention_bias
        self.config = config
        # In the hybrid every head's rows of q_proj are its query's, then its gate's.
        query = config.num_attention_heads * channels * (2 if config.hybrid else 1)
        self.q_proj = nn.Linear(size, query, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * channels, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * channels, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * channels, size, bias=False)
        if config.qk_norm:
            self.q_norm = Norm(channels, config.hybrid)
            self.k_norm = Norm(channels, config.hybrid)

    def weights(self) -> AttentionWeights:
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        parts = [self.q_proj.weight, self.k_proj.weight, self.v_proj.weight]
        if self.config.hybrid:
            query, gate = self.q_proj.weight.unflatten(0, (heads, 2, -1)).unbind(1)
            parts = [query.flatten(0, 1), *parts[1:], gate.flatten(0, 1)]
        bias = norm = None
        if self.config.attention_bias:
            bias = torch.cat((self.q_proj.bias, self.k_proj.bias, self.v_proj.bias))
        if self.config.qk_norm:
            norm = torch.cat((self.q_norm.scale.expand(heads, -1), self.k_norm.scale.expand(kv_heads, -1)))
        return AttentionWeights(torch.cat(parts), bias, norm, self.o_proj.weight)


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class Layer(nn.Module):
    """Holds one layer's parameters under Hugging Face's names; `apply_layer` does the maths."""

    def __init__(self, config: ModelConfig, kind: str) -> None:
        super().__init__()
        self.config = config
        if kind == LINEAR:
            self.linear_attn = DeltaNet(config)
        else:
            self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = Norm(config.hidden_size, config.hybrid)
        self.post_attention_layernorm = Norm(config.hidden_size, config.hybrid)

    def weights(self) -> LayerWeights:
        """The parameters, those that share an input joined (a copy of them, inside the graph)."""
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        return LayerWeights(
            self.input_layernorm.scale,
            mixer.weights(),
            self.post_attention_layernorm.scale,
            torch.cat((self.mlp.gate_proj.weight, self.mlp.up_proj.weight)),
            self.mlp.down_proj.weight,
        )

    def forward(self, hidden_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], mixing: Mixing) -> Tensor:
        return apply_layer(self.weights(), hidden_BTD, cos_sin, self.config, mixing)


class Trunk(nn.Module):
    """Embedding, layers and final norm: what actor and critic have in common."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, kind) for kind in config.kinds)
        self.norm = Norm(config.hidden_size, config.hybrid)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def layer_weights(self) -> list[LayerWeights]:
        """`Layer.weights` of every layer, joined and packed once for many steps of decoding."""
        return [cast(Layer, layer).weights().packed() for layer in self.layers]

    def final_norm(self, hidden: Tensor) -> Tensor:
        """The norm between the last layer and the head."""
        return rms_norm(hidden, self.norm.scale, self.config.rms_norm_eps)

    def forward(self, ids_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm, [B, T, D].

        Rows start at position 0; right padding needs no mask. With `cu_seqlens` (int64, offsets 0 … T of the
        documents packed in one row, B = 1) every document starts at position 0 and sees itself alone. Padding
        anywhere else is packed as a document of its own.
        """
        position = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        mixing = Mixing()
        if cu_seqlens is not None:
            if ids_BT.shape[0] != 1:
                raise ValueError(f"cu_seqlens needs all documents in one row, got {ids_BT.shape[0]} rows")
            lengths = cu_seqlens.diff()
            position = position - cu_seqlens[:-1].repeat_interleave(lengths)
            mixing = Mixing(
                partial(packed_attention, lengths=lengths.tolist()),
                partial(without_state, cu_seqlens=cu_seqlens),
            )
        hidden_BTD = self.embed_tokens(ids_BT)
        cos_sin = rotary(position, self.config)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, cos_sin, mixing)
        return self.final_norm(hidden_BTD)


class Transformer(nn.Module):
    """The actor: a causal language model with Hugging Face's parameter names.

    New weights are drawn from torch's global generator: normal(0, 0.02), norms 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            nn.init.normal_(self.lm_head.weight, std=INITIAL_STD)

    def forward(self, ids_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """Hidden states [B, T, D] (see `Trunk.forward`); the one at t predicts the token at t + 1."""
        return self.model(ids_BT, cu_seqlens)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """float32 logits [N, V]. Gather the positions you need first: the head costs as much as a layer."""
        return F.linear(hidden_ND, self.head_weight).float()

    @property
    def head_weight(self) -> Tensor:
        """The output matrix [V, D]: the embedding itself where the two are tied."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight


class Critic(nn.Module):
    """A value model: the actor's architecture with a float32 scalar head that starts near 0."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        self.value_head = nn.Linear(config.hidden_size, 1)
        with torch.no_grad():
            for name, start in self.first_head(config).items():
                self.get_parameter(name).copy_(start)

    @staticmethod
    def first_head(config: ModelConfig) -> dict[str, Tensor]:
        """The value head of every new critic, by the parameters' names."""
        generator = torch.Generator().manual_seed(0)
        weight = 1e-3 * torch.randn(1, config.hidden_size, generator=generator, device="cpu")
        return {"value_head.weight": weight, "value_head.bias": torch.zeros(1, device="cpu")}

    def forward(self, ids_BT: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        """float32 values [B, T]: at t the value of the state after token t, before token t + 1 is sampled."""
        hidden_BTD = self.model(ids_BT, cu_seqlens)
        return self.value_head(hidden_BTD.float())[..., 0]
