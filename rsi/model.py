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
from rsi.packing import Projections, linear, pack

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Attention of one layer: q_BHTC, k_BKTC, v_BKTC -> out_BTHC."""


def keep_freed_memory() -> bool:
    """Let this process reuse freed memory instead of returning it to the kernel; True where it can.

    glibc hands large freed tensors back at once, and each new one then costs a page fault for every 4 KiB:
    matrix products of 16k tokens were measured at 100 GFLOP/s without this call and 180 with it. Without bins for small
    pieces, which it would join up at every large one that is freed, a step of decoding takes 2 % less; with pages of
    2 MiB for the heap's next 8 GiB (addresses alone until they are used) 4 to 9 % less, since it streams all weights.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    largest_fast, trim_threshold, mmap_threshold, huge_pages = 1, -1, -3, 14  # names of <malloc.h> and <sys/mman.h>
    settings = (mmap_threshold, 1 << 30), (trim_threshold, -1), (largest_fast, 0)
    if not all(libc.mallopt(setting, value) for setting, value in settings):
        return False
    libc.malloc.restype = ctypes.c_void_p
    size, page = 1 << 29, 1 << 21
    pieces = [piece for piece in (libc.malloc(ctypes.c_size_t(size)) for _ in range(16)) if piece]
    for piece in pieces:
        first, end = -(-piece // page) * page, (piece + size) // page * page
        libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), huge_pages)
    for piece in pieces:
        libc.free(ctypes.c_void_p(piece))
    return True


class NormWeights(NamedTuple):
    """A norm's factors [..., D]; its size D and epsilon as tensors, which torch would else make anew at every call."""

    scale: Tensor
    size: Tensor
    eps: Tensor


def norm_weights(scale: Tensor, eps: float) -> NormWeights:
    """What `rms_norm` wants of a norm over the last dimension of `scale`."""
    size, epsilon = (torch.full((), number, device=scale.device) for number in (float(scale.shape[-1]), eps))
    return NormWeights(scale, size, epsilon)


class _RMSNorm(torch.autograd.Function):
    """Takes its input twice: float32 gradients through the product and through the norm are handed back one by one,
    and so added to that of the residual in the order of transformers' (the sum has its bits).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, x_again: Tensor, scale: Tensor, size: Tensor, eps: Tensor) -> Tensor:
        out, inverse = _normalise(x, NormWeights(scale, size, eps))
        ctx.save_for_backward(x, scale, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, Tensor, None, None]:
        x, scale, inverse = ctx.saved_tensors
        grad = grads[0].to(inverse.dtype)
        grad_scale = (grad * (x * inverse)).sum(tuple(range(x.dim() - scale.dim()))).to(scale.dtype)
        grad = grad * scale
        slope = (grad * x).sum(-1, keepdim=True).mul_(-0.5).mul_(inverse.pow(3)).div_(x.shape[-1])
        through_product, through_norm = grad.mul_(inverse), x * slope.mul_(2)
        if x.dtype == inverse.dtype:
            return through_product, through_norm, grad_scale, None, None
        return through_product.add_(through_norm).to(x.dtype), None, grad_scale, None, None


class _SwiGLU(torch.autograd.Function):
    """Keeps its inputs alone, not silu(gate)."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        return torch.ops.aten.silu_backward(grads[0] * up, gate), F.silu(gate).mul_(grads[0])


def _normalise(x: Tensor, norm: NormWeights) -> tuple[Tensor, Tensor]:
    # The order of roundings is transformers'; a sum divided by the size is what torch's mean is.
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    inverse = torch.addcdiv(norm.eps, (wide * wide).sum(-1, keepdim=True), norm.size).rsqrt_()
    # A half factor (Qwen2, Qwen3) multiplies what was rounded, a float32 one (Qwen3.5) what was not.
    return (wide * inverse).to(norm.scale.dtype).mul_(norm.scale).to(x.dtype), inverse


def rms_norm(x: Tensor, norm: NormWeights) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019), scaled, in the type of `x`."""
    return _RMSNorm.apply(x, x, *norm) if torch.is_grad_enabled() else _normalise(x, norm)[0]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`x` [..., C] turned by the angles of `rotary` [..., R], made in its type; channel i is paired with i + R/2, those
    from R on stay."""
    size = cos.shape[-1]
    turned = x if size == x.shape[-1] else x[..., :size]
    turned = (turned * cos).add_(turned.roll(size // 2, -1).mul_(sin))
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up (Shazeer 2020)."""
    return _SwiGLU.apply(gate, up) if torch.is_grad_enabled() else F.silu(gate).mul_(up)


def rotary(positions: Tensor, config: ModelConfig, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Rotary embedding (Su et al. 2021) of positions [...]: cosine and sine [..., R], rounded to `dtype` at the end.

    R is the config's `rotary_dim`. The first half of the sines is negative, so that `rotate` needs no sign.
    """
    half = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    angles = positions.float()[..., None] * (1 / config.rope_theta ** (half / config.rotary_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def causal_attention(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor) -> Tensor:
    """Each token attends to itself and the tokens before it in its row; returns out_BTHC."""
    grouped = q_BHTC.shape[1] != k_BKTC.shape[1]
    return F.scaled_dot_product_attention(q_BHTC, k_BKTC, v_BKTC, is_causal=True, enable_gqa=grouped).transpose(1, 2)


def packed_attention(q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, lengths: Sequence[int]) -> Tensor:
    """`causal_attention` within each document of one row, their lengths given; none sees another."""
    documents = (x.split(list(lengths), 2) for x in (q_BHTC, k_BKTC, v_BKTC))
    return torch.cat([causal_attention(q, k, v) for q, k, v in zip(*documents, strict=True)], 1)


class AttentionWeights(NamedTuple):
    """`inputs` projects to query, key, value and, in the hybrid, the output's gate; `norms` are query's and key's."""

    inputs: Projections
    norms: tuple[NormWeights, ...]
    output: Tensor

    def joined(self, heads: Sequence[int]) -> "AttentionWeights":
        """The same for decoding, where query and key, of so many heads, are one tensor."""
        scales = [norm.scale.expand(count, -1) for norm, count in zip(self.norms, heads, strict=False)]
        norms = (self.norms[0]._replace(scale=torch.cat(scales)),) if scales else ()
        return AttentionWeights(self.inputs.joined(together=2), norms, pack(self.output))


class LayerWeights(NamedTuple):
    """The tensors of one layer as the layer's maths wants them."""

    input_norm: NormWeights
    mixer: AttentionWeights | DeltaWeights
    mlp_norm: NormWeights
    gate_up: Projections
    down: Tensor

    def joined(self, config: ModelConfig) -> "LayerWeights":
        """The same, its matrices joined and laid out for decoding (`rsi.packing`)."""
        heads = config.num_attention_heads, config.num_key_value_heads
        mixer = self.mixer.joined() if isinstance(self.mixer, DeltaWeights) else self.mixer.joined(heads)
        return self._replace(mixer=mixer, gate_up=self.gate_up.joined(), down=pack(self.down))


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
    normed = rms_norm(hidden_BTD, weights.input_norm)
    if isinstance(weights.mixer, DeltaWeights):
        mixed = delta_net(weights.mixer, normed, config, mixing.recur)
    else:
        mixed = _attention(weights.mixer, normed, cos_sin, config, mixing.attend)
    hidden_BTD = hidden_BTD + mixed
    gate, up = weights.gate_up(rms_norm(hidden_BTD, weights.mlp_norm))
    return hidden_BTD + linear(swiglu(gate, up), weights.down)


def _attention(
    weights: AttentionWeights, x_BTD: Tensor, cos_sin: tuple[Tensor, Tensor], config: ModelConfig, attend: Attend
) -> Tensor:
    rows, tokens, _ = x_BTD.shape
    parts = [x.view(rows, tokens, -1, config.head_dim) for x in weights.inputs(x_BTD)]
    gate = parts.pop() if config.hybrid else None
    *turned, v = parts  # query and key, where the weights are joined as one
    if weights.norms:
        turned = [rms_norm(x, norm) for x, norm in zip(turned, weights.norms, strict=True)]
    turned = [rotate(x.transpose(1, 2), *cos_sin) for x in turned]
    heads = config.num_attention_heads, config.num_key_value_heads
    q, k = turned if len(turned) == 2 else turned[0].split(heads, 1)
    out = attend(q, k, v.transpose(1, 2)).flatten(2)
    if gate is not None:
        out = out * gate.flatten(2).sigmoid()
    return linear(out, weights.output)


class Norm(nn.Module):
    """A norm's weight; the hybrid's are stored around 0 and used as 1 + weight, in float32."""

    def __init__(self, size: int, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if config.hybrid else torch.ones(size))
        self.config = config

    def weights(self) -> NormWeights:
        scale = 1.0 + self.weight.float() if self.config.hybrid else self.weight
        return norm_weights(scale, self.config.rms_norm_eps)


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
            self.q_norm = Norm(channels, config)
            self.k_norm = Norm(channels, config)

    def weights(self) -> AttentionWeights:
        inputs = (self.q_proj, self.k_proj, self.v_proj)
        matrices = [projection.weight for projection in inputs]
        if self.config.hybrid:
            query, gate = matrices[0].unflatten(0, (self.config.num_attention_heads, 2, -1)).unbind(1)
            matrices = [query.flatten(0, 1), *matrices[1:], gate.flatten(0, 1)]
        biases = tuple(projection.bias for projection in inputs) if self.config.attention_bias else ()
        norms = (self.q_norm.weights(), self.k_norm.weights()) if self.config.qk_norm else ()
        return AttentionWeights(Projections(tuple(matrices), biases), norms, self.o_proj.weight)


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
        self.input_layernorm = Norm(config.hidden_size, config)
        self.post_attention_layernorm = Norm(config.hidden_size, config)

    def weights(self) -> LayerWeights:
        """The parameters as `apply_layer` wants them."""
        mixer = self.linear_attn if hasattr(self, "linear_attn") else self.self_attn
        return LayerWeights(
            self.input_layernorm.weights(),
            mixer.weights(),
            self.post_attention_layernorm.weights(),
            Projections((self.mlp.gate_proj.weight, self.mlp.up_proj.weight)),
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
        self.norm = Norm(config.hidden_size, config)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d):
                nn.init.normal_(module.weight, std=INITIAL_STD)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def layer_weights(self) -> list[LayerWeights]:
        """`Layer.weights` of every layer, joined and packed once for many steps of decoding."""
        return [cast(Layer, layer).weights().joined(self.config) for layer in self.layers]

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
        cos_sin = rotary(position, self.config, hidden_BTD.dtype)
        for layer in self.layers:
            hidden_BTD = layer(hidden_BTD, cos_sin, mixing)
        return rms_norm(hidden_BTD, self.norm.weights())


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
