"""The language model: Qwen3's dense architecture, written so that training and decoding share one layer.

Shapes are named in suffixes: B rows, T tokens of a row, N tokens of all rows, D hidden size, H query heads,
K key/value heads, C channels of a head, V vocabulary. Parameter names are those of Hugging Face's
``Qwen3ForCausalLM``, so that `rsi.weights` writes and reads its folders without a table of names.
"""

import ctypes
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INITIAL_STD = 0.02

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: q_BTHC, k_BTKC, v_BTKC -> out_BTHC."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a Qwen3 model, under the names of its ``config.json``."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 4096
    model_type: str = "qwen3"
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}: choose sizes that divide"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embeddings need an even size")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The config of a parsed ``config.json``, written by this package or by transformers (4 or 5).

        Raises ValueError, naming what was found and what is supported, for another architecture.
        """
        rope = (values.get("rope_parameters") or {}) | (values.get("rope_scaling") or {})
        supported = {
            "model_type": (values.get("model_type"), "qwen3"),
            "hidden_act": (values.get("hidden_act", "silu"), "silu"),
            "attention_bias": (bool(values.get("attention_bias")), False),
            "use_sliding_window": (bool(values.get("use_sliding_window")), False),
            "rope_type": (rope.get("type") or rope.get("rope_type", "default"), "default"),
            "quantization_config": (values.get("quantization_config"), None),
        }
        for name, (found, wanted) in supported.items():
            if found != wanted:
                raise ValueError(f"{name} is {found!r}: only {wanted!r} is supported")
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
        missing = [name for name in sizes if name not in values]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing from the model's config")
        heads = values["num_attention_heads"]
        eos = values.get("eos_token_id")
        return cls(
            **{name: values[name] for name in sizes},
            num_key_value_heads=values.get("num_key_value_heads", heads),
            head_dim=values.get("head_dim") or values["hidden_size"] // heads,
            rms_norm_eps=values.get("rms_norm_eps", 1e-6),
            rope_theta=float(rope.get("rope_theta", values.get("rope_theta", 1e4))),
            tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
            max_position_embeddings=values.get("max_position_embeddings", 4096),
            eos_token_id=tuple(eos) if isinstance(eos, list) else eos,
        )

    def to_dict(self) -> dict[str, Any]:
        """The values of ``config.json``, readable by transformers 4 (``rope_theta``) and 5 (``rope_parameters``)."""
        eos = self.eos_token_id
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "initializer_range": INITIAL_STD,
            "eos_token_id": list(eos) if isinstance(eos, tuple) else eos,
        }


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
        out_gate.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        return out


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    # Qwen3 normalises in float32 and rounds before it multiplies by the weight.
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
    inverse = inverse.mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return (wide * inverse).to(x.dtype).mul_(weight), inverse


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), sin)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019), times `weight`."""
    return _RMSNorm.apply(x, weight, eps) if torch.is_grad_enabled() else _normalise(x, weight, eps)[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., C] turned by the angles of `rotary`, in the layout that pairs channel i with i + C/2."""
    return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _turn(x, cos, sin)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020) of one tensor that holds both halves: [..., 2F] -> [..., F]."""
    return _SwiGLU.apply(gate_up) if torch.is_grad_enabled() else _gated(gate_up)


def rotary(positions: Tensor, config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021) of positions [...]: cosine and sine, float32 [..., 1, C].

    The first half of the sines is negative, so that `rotate` needs no sign.
    """
    half = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None, None] / config.rope_theta ** (half / config.head_dim)
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


class LayerWeights(NamedTuple):
    """The tensors of one layer as the layer's maths wants them: projections of one input side by side."""

    input_norm: Tensor
    qkv: Tensor
    qk_norm: Tensor
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


def apply_layer(
    weights: LayerWeights,
    hidden_BTD: Tensor,
    cos_sin: tuple[Tensor, Tensor],
    config: ModelConfig,
    attend: Attend = causal_attention,
) -> Tensor:
    """One Qwen3 layer, the only place that defines its maths: hidden_BTD -> hidden_BTD.

    `attend` is where training and the sampler differ: the latter keeps keys and values between calls.
    """
    heads, kv_heads, eps = config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps
    qkv = F.linear(rms_norm(hidden_BTD, weights.input_norm, eps), weights.qkv)
    qkv = qkv.unflatten(-1, (heads + 2 * kv_heads, config.head_dim))
    qk, v = qkv.split((heads + kv_heads, kv_heads), dim=2)
    qk = rotate(rms_norm(qk, weights.qk_norm, eps), *cos_sin)
    q, k = qk.split((heads, kv_heads), dim=2)
    hidden_BTD = hidden_BTD + F.linear(attend(q, k, v).flatten(2), weights.output)
    gate_up = F.linear(rms_norm(hidden_BTD, weights.mlp_norm, eps), weights.gate_up)
    return hidden_BTD + F.linear(swiglu(gate_up), weights.down)


class _Norm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, channels = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(size, config.num_attention_heads * channels, bias=False)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * channels, bias=False)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * channels, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * channels, size, bias=False)
        self.q_norm = _Norm(channels)
        self.k_norm = _Norm(channels)


class _MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class Layer(nn.Module):
    """Holds one layer's parameters under Hugging Face's names; `apply_layer` does the maths."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = _Norm(config.hidden_size)
        self.post_attention_layernorm = _Norm(config.hidden_size)

    def weights(self) -> LayerWeights:
        """The parameters, those that share an input joined (a copy of them, inside the graph)."""
        attention, mlp = self.self_attn, self.mlp
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        return LayerWeights(
            self.input_layernorm.weight,
            torch.cat((attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight)),
            torch.cat((attention.q_norm.weight.expand(heads, -1), attention.k_norm.weight.expand(kv_heads, -1))),
            attention.o_proj.weight,
            self.post_attention_layernorm.weight,
            torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight)),
            mlp.down_proj.weight,
        )

    def forward(self, hidden_BTD: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        return apply_layer(self.weights(), hidden_BTD, cos_sin, self.config)


class Trunk(nn.Module):
    """Embedding, layers and final norm: what actor and critic have in common."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)

    def layer_weights(self) -> list[LayerWeights]:
        """`Layer.weights` of every layer, joined once for many steps of decoding."""
        return [cast(Layer, layer).weights() for layer in self.layers]

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Hidden states after the final norm, [B, T, D]. Rows start at position 0; right padding needs no mask."""
        hidden_BTD = self.embed_tokens(ids_BT)
        cos_sin = rotary(torch.arange(ids_BT.shape[1], device=ids_BT.device), self.config)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, cos_sin)
        return rms_norm(hidden_BTD, self.norm.weight, self.config.rms_norm_eps)


class Transformer(nn.Module):
    """The actor: a causal language model with Hugging Face's Qwen3 parameter names.

    New weights are drawn from torch's global generator: normal(0, 0.02), norms 1.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            nn.init.normal_(self.lm_head.weight, std=INITIAL_STD)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Hidden states [B, T, D] of right-padded rows; the hidden state at t predicts the token at t + 1."""
        return self.model(ids_BT)

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
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            self.value_head.weight.copy_(1e-3 * torch.randn(1, config.hidden_size, generator=generator))
            self.value_head.bias.zero_()

    @classmethod
    def from_actor(cls, actor: Transformer) -> "Critic":
        """A critic whose trunk is a copy of the actor's; the same actor always gives the same critic."""
        critic = cls(actor.config).to(actor.head_weight.device)
        critic.model.load_state_dict(actor.model.state_dict())
        return critic

    def forward(self, ids_BT: Tensor) -> Tensor:
        """float32 values [B, T]: at t the value of the state after token t, before token t + 1 is sampled."""
        hidden_BTD = self.model(ids_BT)
        return self.value_head(hidden_BTD.float())[..., 0]
