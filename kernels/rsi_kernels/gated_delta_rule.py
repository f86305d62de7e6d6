"""The gated delta rule: linear attention whose state forgets (gate) and overwrites (delta) what a key points at.

Plain torch, chunked for training and recurrent for decoding; on a GPU, flash-linear-attention's kernels where that
package is installed, after a check of their gradients on the card at hand.

Shape suffixes: B rows, T tokens, H value heads, K key channels, V value channels, S sequences, N chunks, C tokens
of a chunk.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

CHUNK = 64
Rule = Callable[..., tuple[Tensor, Tensor]]
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # query, key, value, gate, beta


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    *,
    impl: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Outputs of every token and the state after the last one.

    Of every head, with a state S [K, V] that starts at `initial_state` (0 without one)::

        S <- exp(gate[t]) S
        S <- S + beta[t] key[t] (value[t] - S^T key[t])^T
        out[t] = S^T query[t] / sqrt(K)

    Args:
        query, key: [B, T, Hk, K], normalised (or not) by the caller; value head h reads key head h // (H / Hk).
        value: [B, T, H, V].
        gate: [B, T, H], log of the decay, at most 0. beta: [B, T, H], the share that is overwritten, in [0, 1].
        initial_state: [B, H, K, V]; packed [S, H, K, V].
        cu_seqlens: [S+1] offsets of sequences packed in one row (B = 1), or None.
        impl: "torch"; "fla" for flash-linear-attention's kernels (an error where it is not installed); "auto"
            takes "fla" for half-precision CUDA tensors where it is installed: it multiplies in less than float32.

    Returns:
        (out [B, T, H, V] in the dtype of `value`, state like `initial_state` in float32). The torch path computes in
        float32, in float64 if an input is (then its state too), is deterministic and keeps
        4 (5 C + 9 K + 2 V + K V / C) bytes a token and head for its backward pass.

    Raises:
        ValueError: wrong shapes or offsets, an unknown `impl`.

    Source: Gated Delta Networks (arXiv 2412.06464); chunks in the WY form of arXiv 2406.06484.
    """
    if key.dim() != 4 or value.dim() != 4 or query.shape != key.shape or key.shape[:2] != value.shape[:2]:
        shapes = [tuple(x.shape) for x in (query, key, value)]
        raise ValueError(f"query and key must be [B, T, Hk, K] and value [B, T, H, V], got {shapes}")
    if value.shape[2] % key.shape[2]:
        raise ValueError(f"{value.shape[2]} value heads are no multiple of {key.shape[2]} key heads")
    if gate.shape != value.shape[:3] or beta.shape != value.shape[:3]:
        shapes = [tuple(x.shape) for x in (gate, beta)]
        raise ValueError(f"gate and beta must be {tuple(value.shape[:3])}, got {shapes}")
    sequences = value.shape[0]
    if cu_seqlens is not None:
        if value.shape[0] != 1:
            raise ValueError(f"cu_seqlens needs all sequences in one row, got {value.shape[0]} rows")
        if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
            raise ValueError(f"cu_seqlens must be integers [S+1], got shape {tuple(cu_seqlens.shape)}")
        ends = int(cu_seqlens[0]), int(cu_seqlens[-1])
        if ends != (0, value.shape[1]) or bool((cu_seqlens.diff() < 0).any()):
            raise ValueError(f"cu_seqlens must rise from 0 to {value.shape[1]}, got {cu_seqlens.tolist()}")
        sequences = cu_seqlens.numel() - 1
    wanted = (sequences, value.shape[2], key.shape[3], value.shape[3])
    if initial_state is not None and tuple(initial_state.shape) != wanted:
        raise ValueError(f"initial_state must be {wanted}, got {tuple(initial_state.shape)}")
    if impl not in ("auto", "torch", "fla"):
        raise ValueError(f"impl must be auto, torch or fla, got {impl!r}")
    if impl == "auto":
        half = value.dtype in (torch.bfloat16, torch.float16)
        impl = "fla" if half and value.is_cuda and find_spec("fla") is not None else "torch"
    dtype, group = value.dtype, value.shape[2] // key.shape[2]
    wide = torch.promote_types(torch.promote_types(query.dtype, dtype), torch.float32)
    if impl == "torch":  # before the heads are repeated, whose gradients are then summed in `wide`
        query, key, value, gate, beta = (x.to(wide) for x in (query, key, value, gate, beta))
    if group > 1:
        query, key = query.repeat_interleave(group, 2), key.repeat_interleave(group, 2)
    if impl == "fla":
        rule = _flash_linear_attention(value.device)
        return rule(query, key, value, gate, beta, initial_state=initial_state, cu_seqlens=cu_seqlens)
    inputs = query * query.shape[-1] ** -0.5, key, value, gate, beta
    state = value.new_zeros(wanted) if initial_state is None else initial_state.to(wide)
    if cu_seqlens is not None:
        out, state = _packed(inputs, state, cu_seqlens)
    else:
        out, state = recurrent(*inputs, state) if value.shape[1] <= 2 else chunked(*inputs, state)
    return out.to(dtype), state


def recurrent(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition itself, token by token; all of one dtype, as many key as value heads, the query scaled."""
    out = []
    for t in range(value.shape[1]):
        state_BHKV = state_BHKV * gate[:, t, :, None, None].exp()
        held_BHV = torch.einsum("bhkv,bhk->bhv", state_BHKV, key[:, t])
        error_BHV = (value[:, t] - held_BHV) * beta[:, t, :, None]
        state_BHKV = state_BHKV + key[:, t, :, :, None] * error_BHV[:, :, None, :]
        out.append(torch.einsum("bhkv,bhk->bhv", state_BHKV, query[:, t]))
    return torch.stack(out, 1) if out else torch.zeros_like(value), state_BHKV


def chunked(
    query: Tensor, key: Tensor, value: Tensor, gate: Tensor, beta: Tensor, state_BHKV: Tensor, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """As `recurrent`, with matrix products inside chunks; only the chunks are sequential."""
    tokens = value.shape[1]
    if tokens == 0:
        return torch.zeros_like(value), state_BHKV
    chunk = min(chunk, tokens)
    q_BHNCK, k_BHNCK, v_BHNCV, gate_BHNC, beta_BHNC = (
        _chunks(x, chunk) for x in (query, key, value, gate, beta.unsqueeze(-1))
    )
    decay_BHNC = gate_BHNC.cumsum(-1)
    within = decay_BHNC[..., :, None] - decay_BHNC[..., None, :]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=value.device).triu(1)
    within_BHNCC = within.masked_fill(later, -torch.inf).exp()  # exp after the mask: above the diagonal it overflows
    entry_BHNC = decay_BHNC.exp().unsqueeze(-1)
    # Row i of (1 + A) says how token i's error depends on the errors before it in its chunk.
    weighted = k_BHNCK * beta_BHNC
    dependence = (weighted @ k_BHNCK.mT * within_BHNCC).tril(-1)
    right = torch.cat((v_BHNCV * beta_BHNC, weighted * entry_BHNC), -1)
    solved = torch.linalg.solve_triangular(dependence, right, upper=False, unitriangular=True)
    error_BHNCV, reads_BHNCK = solved.split((value.shape[-1], key.shape[-1]), -1)
    attend_BHNCC = q_BHNCK @ k_BHNCK.mT * within_BHNCC
    query_entry = q_BHNCK * entry_BHNC
    total_BHN = decay_BHNC[..., -1:]
    key_exit = k_BHNCK * (total_BHN - decay_BHNC).exp().unsqueeze(-1)
    kept = total_BHN.exp().unsqueeze(-1)
    out = []
    # Unbound, not indexed: the gradient of an index is a whole tensor of zeros, one for each chunk.
    chunks = (x.unbind(2) for x in (error_BHNCV, reads_BHNCK, query_entry, attend_BHNCC, kept, key_exit))
    for error_BHCV, reads_BHCK, query_BHCK, attend_BHCC, keep, key_BHCK in zip(*chunks, strict=True):
        written_BHCV = error_BHCV - reads_BHCK @ state_BHKV
        out.append(query_BHCK @ state_BHKV + attend_BHCC @ written_BHCV)
        state_BHKV = state_BHKV * keep + key_BHCK.mT @ written_BHCV
    return torch.cat(out, 2)[:, :, :tokens].transpose(1, 2), state_BHKV


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """[B, T, H, ...] -> [B, H, N, C, ...]; the tokens that fill the last chunk are 0, and so write nothing."""
    x = x.transpose(1, 2)
    missing = -x.shape[2] % chunk
    if missing:
        x = torch.cat((x, x.new_zeros(*x.shape[:2], missing, *x.shape[3:])), 2)
    return x.unflatten(2, (-1, chunk))


def _packed(inputs: Inputs, state: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """One row a sequence, padded with tokens that write nothing, and back; chunks of all sequences run together."""
    lengths = cu_seqlens.diff()
    sequence_T = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths)
    column_T = torch.arange(sequence_T.numel(), device=lengths.device) - cu_seqlens[:-1][sequence_T]
    rows, width = lengths.numel(), int(lengths.max()) if lengths.numel() else 0

    def pad(x: Tensor) -> Tensor:
        return x.new_zeros(rows, width, *x.shape[2:]).index_put((sequence_T, column_T), x[0])

    query, key, value, gate, beta = inputs
    out, state = chunked(pad(query), pad(key), pad(value), pad(gate), pad(beta), state)
    return out[sequence_T, column_T].unsqueeze(0), state


@cache
def _flash_linear_attention(device: torch.device) -> Rule:
    """flash-linear-attention's op under our signature, once its gradients have been found right on `device`.

    Several of its versions were miscompiled by some triton on some cards (its issues 984 and 913), silently.
    """
    chunk_gated_delta_rule = import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    rule: Rule = partial(chunk_gated_delta_rule, output_final_state=True)
    check_gradients(rule, device)
    return rule


def check_gradients(rule: Rule, device: torch.device, tolerance: float = 0.02) -> None:
    """Compare `rule` in bfloat16, forward and backward, with the torch path in float32 on the same inputs.

    `rule` is called as `gated_delta_rule` is, with as many key as value heads: two lengths (whole chunks and a ragged
    end) and a packed row, at 128 channels.

    Raises:
        RuntimeError: an output or gradient is off by more than `tolerance` of its root mean square.
    """
    generator = torch.Generator().manual_seed(0)
    for tokens, offsets in ((128, None), (333, None), (333, [0, 70, 200, 333])):
        shapes = ((1, tokens, 2, 128), (1, tokens, 2, 128), (1, tokens, 2, 128), (1, tokens, 2), (1, tokens, 2))
        raw = [torch.randn(shape, generator=generator) for shape in shapes]
        raw[0], raw[1] = (torch.nn.functional.normalize(x, dim=-1) for x in raw[:2])
        raw[3], raw[4] = torch.nn.functional.logsigmoid(raw[3] + 2), raw[4].sigmoid()
        raw = [x.bfloat16().float() if k != 3 else x for k, x in enumerate(raw)]
        upstream = torch.randn(shapes[2], generator=generator).bfloat16().to(device)
        packed = None if offsets is None else torch.tensor(offsets, device=device)
        found = []
        for dtype in (torch.bfloat16, torch.float32):
            inputs = [x.to(device, torch.float32 if k == 3 else dtype).requires_grad_() for k, x in enumerate(raw)]
            call = rule if dtype == torch.bfloat16 else partial(gated_delta_rule, impl="torch")
            out, state = call(*inputs, initial_state=None, cu_seqlens=packed)
            gradients = torch.autograd.grad(out, inputs, upstream.to(out.dtype))
            found.append([x.detach().double() for x in (out, state, *gradients)])
        names = ("out", "state", "d query", "d key", "d value", "d gate", "d beta")
        for name, theirs, ours in zip(names, *found, strict=True):
            error = float((theirs - ours).square().mean().sqrt() / ours.square().mean().sqrt())
            if not error <= tolerance:
                raise RuntimeError(
                    f"flash-linear-attention's gated delta rule is wrong on {device}: {name} is off by {error:.3g} of "
                    f'its size at {tokens} tokens (at most {tolerance}); another triton may help, or impl="torch"'
                )
