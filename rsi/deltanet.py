"""The gated DeltaNet layer of Qwen3.5 and later: a short convolution, then a recurrent state instead of a cache.

Shapes as in `rsi.model`; here H are value heads, G key heads, K and V channels of a key and a value head, W taps of
the convolution, C its channels. Source: Gated Delta Networks (Yang et al. 2024, arXiv 2412.06464).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from rsi_kernels import gated_delta_rule
from torch import Tensor, nn

from rsi.architecture import ModelConfig
from rsi.packing import Projections, linear, pack

Recur = Callable[[Tensor, Tensor, Tensor, Tensor, ModelConfig], Tensor]
"""Convolution and delta rule of one layer: qkv_BTC, taps_CW, gate_BTH, beta_BTH, config -> out_BTHV."""


class DeltaWeights(NamedTuple):
    """The tensors of one layer; `inputs` projects to query, key and value in one, z, beta and decay."""

    inputs: Projections
    taps: Tensor
    rate: Tensor
    dt_bias: Tensor
    norm: Tensor
    output: Tensor

    def joined(self) -> "DeltaWeights":
        """The same for decoding."""
        return self._replace(inputs=self.inputs.joined(), output=pack(self.output))


class DeltaState(NamedTuple):
    """What a row remembers: the convolution's last W - 1 inputs [B, W-1, C], the float32 memory [B, H, K, V]."""

    inputs: Tensor
    memory: Tensor


class DeltaNet(nn.Module):
    """Holds the layer's parameters under Hugging Face's names; `delta_net` does the maths."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        size, channels, heads = config.hidden_size, config.linear_channels, config.linear_num_value_heads
        values = heads * config.linear_value_head_dim
        self.conv1d = nn.Conv1d(channels, channels, config.linear_conv_kernel_dim, groups=channels, bias=False)
        self.dt_bias = nn.Parameter(torch.ones(heads))
        # Decay rates between 0.01 and 16, as published; away from 0, whose logarithm is no number.
        self.A_log = nn.Parameter(torch.empty(heads).uniform_(0.01, 16).log_())
        self.norm = nn.RMSNorm(config.linear_value_head_dim)  # its weight: `_gated_norm` rounds as transformers does
        self.out_proj = nn.Linear(values, size, bias=False)
        self.in_proj_qkv = nn.Linear(size, channels, bias=False)
        self.in_proj_z = nn.Linear(size, values, bias=False)
        self.in_proj_b = nn.Linear(size, heads, bias=False)
        self.in_proj_a = nn.Linear(size, heads, bias=False)

    @property
    def decay(self) -> list[nn.Parameter]:
        """The parameters that stay in float32 where the passes are in bfloat16 (`rsi.distributed`)."""
        return [self.A_log, self.dt_bias]

    def forward(self) -> Tensor:
        """Rate and bias of the decay, float32 [2, H]. A forward, for FSDP2 to gather what it reads: the rest of the
        parameters are gathered with the layer's, in another type."""
        return torch.stack((-self.A_log.float().exp(), self.dt_bias.float()))

    def weights(self) -> DeltaWeights:
        """The parameters as `delta_net` wants them."""
        inputs = (self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        rate, dt_bias = self()
        return DeltaWeights(
            Projections(tuple(projection.weight for projection in inputs)),
            self.conv1d.weight[:, 0],
            rate,
            dt_bias,
            self.norm.weight,
            self.out_proj.weight,
        )


def delta_net(weights: DeltaWeights, x_BTD: Tensor, config: ModelConfig, recur: Recur) -> Tensor:
    """One layer: x_BTD -> out_BTD. Decay and memory are float32 whatever the type of `x_BTD`."""
    heads, values = config.linear_num_value_heads, config.linear_value_head_dim
    qkv_BTC, z, beta, decay = weights.inputs(x_BTD)
    gate_BTH = weights.rate * F.softplus(decay.float() + weights.dt_bias)
    out_BTHV = recur(qkv_BTC, weights.taps, gate_BTH, beta.sigmoid(), config)
    out_BTHV = _gated_norm(out_BTHV, z.unflatten(-1, (heads, values)), weights.norm, config.rms_norm_eps)
    return linear(out_BTHV.flatten(2), weights.output)


def recur(
    qkv_BTC: Tensor,
    taps_CW: Tensor,
    gate_BTH: Tensor,
    beta_BTH: Tensor,
    config: ModelConfig,
    state: DeltaState | None = None,
    counts: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, DeltaState]:
    """Convolution and delta rule from `state` (or none) on: out_BTHV and the state after the last token.

    counts: tokens of each right-padded row [B]; the padding leaves the state as it was. cu_seqlens: offsets of
    documents packed in one row; convolution and memory are cut at their borders (no state goes in or comes out).
    """
    mixed, inputs = _convolve(qkv_BTC, taps_CW, None if state is None else state.inputs, counts, cu_seqlens)
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    query, key, value = F.silu(mixed).split((keys, keys, mixed.shape[-1] - 2 * keys), dim=-1)
    query, key = (_unit(x.unflatten(-1, (config.linear_num_key_heads, -1))) for x in (query, key))
    value = value.unflatten(-1, (config.linear_num_value_heads, -1))
    if counts is not None:
        # Without decay and without writing, a token of the padding does nothing to the memory.
        is_padding = (torch.arange(qkv_BTC.shape[1], device=counts.device) >= counts[:, None]).unsqueeze(-1)
        gate_BTH, beta_BTH = gate_BTH.masked_fill(is_padding, 0), beta_BTH.masked_fill(is_padding, 0)
    memory = None if state is None else state.memory
    out_BTHV, memory = gated_delta_rule(query, key, value, gate_BTH, beta_BTH, memory, cu_seqlens)
    return out_BTHV, DeltaState(inputs, memory)


def without_state(
    qkv_BTC: Tensor,
    taps_CW: Tensor,
    gate_BTH: Tensor,
    beta_BTH: Tensor,
    config: ModelConfig,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`recur` of rows, or packed documents, that start here and are not continued."""
    return recur(qkv_BTC, taps_CW, gate_BTH, beta_BTH, config, cu_seqlens=cu_seqlens)[0]


def _convolve(
    x_BTC: Tensor, taps_CW: Tensor, before: Tensor | None, counts: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Depthwise causal convolution, and the inputs that the next token's will need."""
    rows, tokens, channels = x_BTC.shape
    reach = taps_CW.shape[1] - 1
    if cu_seqlens is None:
        wide = torch.cat((x_BTC.new_zeros(rows, reach, channels) if before is None else before, x_BTC), 1)
    else:
        # As many zeros before each document as the convolution looks back.
        documents = torch.arange(1, len(cu_seqlens), device=x_BTC.device).repeat_interleave(cu_seqlens.diff())
        place = torch.arange(tokens, device=x_BTC.device) + reach * documents
        wide = x_BTC.new_zeros(1, tokens + reach * (len(cu_seqlens) - 1), channels).index_copy(1, place, x_BTC)
    out = F.conv1d(wide.transpose(1, 2), taps_CW[:, None].to(x_BTC.dtype), groups=channels).transpose(1, 2)
    if cu_seqlens is not None:
        out = out[:, place - reach]
    if counts is None:
        return out, wide[:, wide.shape[1] - reach :]
    last = counts[:, None] + torch.arange(reach, device=counts.device)
    return out, wide[torch.arange(rows, device=counts.device)[:, None], last]


def _unit(x: Tensor) -> Tensor:
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)


def _gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    # Norm before gate; rounded to the input's type between the two, as transformers does.
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return (normed * weight * F.silu(z.to(wide.dtype))).to(x.dtype)
