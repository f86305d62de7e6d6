"""The critic's scalar head and its clipped squared error in one pass over the hidden states."""

from typing import NamedTuple

import torch
from torch import Tensor

from .dispatch import NAMESPACE, local, use_triton, wide_dtype

MAX_HIDDEN = 8192  # the kernel holds one row in registers; twice this spills


class ValueLoss(NamedTuple):
    """`loss` has the gradient; the others have none."""

    loss: Tensor  # sum over unmasked tokens
    value: Tensor  # [N], 0 at masked tokens
    clipped: Tensor  # number of tokens at which the clipped error is strictly the larger


def clipped_error(value: Tensor, old_value: Tensor, returns: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Half the larger of the plain and the clipped squared error, any one shape, and where the clipped one is it.

    The clipped prediction stays within `clip` (`math.inf` for none) of `old_value`, the value before the step's
    updates. At a tie the plain error keeps its gradient; where the clipped error is the larger, it has none.
    """
    if not clip > 0:
        raise ValueError(f"the value clip must be above 0 (math.inf for none), got {clip}")
    moved = value - old_value
    plain = (value - returns).square()
    held = (old_value + moved.clamp(-clip, clip) - returns).square()
    clipped = (held > plain) & (moved.abs() > clip)  # within the band the two differ by rounding alone
    return 0.5 * torch.where(clipped, held, plain), clipped


def value_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    old_value: Tensor,
    returns: Tensor,
    mask: Tensor | None = None,
    clip: float = 0.2,
    *,
    impl: str = "auto",
) -> ValueLoss:
    """Sum over tokens of `clipped_error` of the value hidden @ weight + bias.

    Args:
        hidden: [..., D], already shifted: the hidden state *before* the token. D at most 8192 with "triton".
        weight: [D] (or [1, D], as nn.Linear has it), bias: [] or [1], both usually float32.
        old_value, returns: [...], held constant. mask: [...], nonzero = counts. Nothing at a masked token is read.

    float32 arithmetic and results (float64 for float64 `hidden`), deterministic: per-program sums in a fixed order.
    The gradient of the head is made in the same pass and kept (D floats), with N for the gradient of `hidden`,
    which needs no second look at it; on a GPU 512 D floats while it runs. Divide by the global token count yourself.

    Raises:
        ValueError: wrong shapes, a clip not above 0, a sharded DTensor.
    """
    hidden, weight, bias = local(hidden, "hidden"), local(weight, "weight"), local(bias, "bias")
    shape = hidden.shape[:-1]
    if weight.numel() != hidden.shape[-1] or bias.numel() != 1:
        shapes = tuple(hidden.shape), tuple(weight.shape), tuple(bias.shape)
        raise ValueError(f"hidden must be [..., D], weight [D] and bias a single number, got {shapes}")
    for name, x in (("old_value", old_value), ("returns", returns), ("mask", mask)):
        if x is not None and x.shape != shape:
            raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(x.shape)}")
    if not clip > 0:
        raise ValueError(f"the value clip must be above 0 (math.inf for none), got {clip}")
    if hidden.shape[-1] > MAX_HIDDEN:
        if impl == "triton":
            raise ValueError(f'the kernel holds rows of at most {MAX_HIDDEN}, got {hidden.shape[-1]}; use impl="torch"')
        impl = "torch"
    keep = None if mask is None else (mask != 0).reshape(-1)
    flat = hidden.reshape(-1, hidden.shape[-1])
    constants = old_value.detach().reshape(-1), returns.detach().reshape(-1)
    found = _op(flat, weight.reshape(-1), bias.reshape(1), *constants, keep, float(clip), impl)
    return ValueLoss(found[0], found[1].detach().view(shape), found[2].detach())


@torch.library.custom_op(f"{NAMESPACE}::value_loss", mutates_args=())
def _op(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    old_value: Tensor,
    returns: Tensor,
    mask: Tensor | None,
    clip: float,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(loss [], value [N], clipped [], d loss / d value [N], d loss / d weight [D])."""
    if use_triton(impl, hidden):
        from .losses_triton import value_loss as launch

        return launch(hidden, weight, bias, old_value, returns, mask, clip)
    wide = wide_dtype(hidden)
    if mask is not None:
        hidden = torch.where(mask[:, None], hidden, 0.0)
        old_value, returns = torch.where(mask, old_value, 0.0), torch.where(mask, returns, 0.0)
    value = hidden.to(wide) @ weight.to(wide) + bias.to(wide)
    old_value, returns = old_value.to(wide), returns.to(wide)
    if mask is not None:
        value = torch.where(mask, value, 0.0)
    loss, clipped = clipped_error(value, old_value, returns, clip)
    d_value = torch.where(clipped, 0.0, value - returns)
    return loss.sum(), value, clipped.sum().to(wide), d_value, d_value @ hidden.to(wide)


@_op.register_fake
def _(hidden, weight, *arguments):  # type: ignore[no-untyped-def]
    value = torch.empty(hidden.shape[0], dtype=wide_dtype(hidden), device=hidden.device)
    return value.new_empty(()), value, value.new_empty(()), torch.empty_like(value), value.new_empty(weight.shape)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    hidden, weight, bias = inputs[:3]
    ctx.dtypes = hidden.dtype, weight.dtype, bias.dtype
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(weight, output[3], output[4])


def _grad(ctx, grad_loss, *_):  # type: ignore[no-untyped-def]
    weight, d_value, d_weight = ctx.saved_tensors
    need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
    d_hidden = d_head = d_bias = None
    if need_hidden:
        d_hidden = ((grad_loss * d_value)[:, None] * weight.to(d_value.dtype)).to(ctx.dtypes[0])
    if need_weight:
        d_head = (grad_loss * d_weight).to(ctx.dtypes[1])
    if need_bias:
        d_bias = (grad_loss * d_value.sum()).reshape(1).to(ctx.dtypes[2])
    return d_hidden, d_head, d_bias, *[None] * 5


_op.register_autograd(_grad, setup_context=_setup)
