"""Matrix products: weights that share an input, and weights laid out once for many uses where a CPU gains by it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_pointwise = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
# Resolved once: by its name alone every call of 30 microseconds would look for it for two.
_packed_linear = None if _pointwise is None else _pointwise.default


def packs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `pack` has another layout for such weights: bfloat16, on a CPU that oneDNN multiplies it on.

    It needs two operations that torch keeps for its own compiler (2.11 to 2.13 have them); without them, or where the
    CPU has no bfloat16, weights stay as they are. Measured with all products of SmolLM2-135M and 8 rows: 26 ms instead
    of 42 on one thread, 15 to 22 instead of 23 to 26 on two.
    """
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    needed = ("_is_mkldnn_bf16_supported", "_reorder_linear_weight")
    if _packed_linear is None or not all(hasattr(torch.ops.mkldnn, name) for name in needed):
        return False
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def pack(weight: Tensor) -> Tensor:
    """A copy of the matrix for `linear` alone, laid out for many products; itself where `packs` says no."""
    if not packs(weight.device, weight.dtype):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear`; the numbers of a packed weight are those of the weight, in torch 2.13 bit for bit (2.11 adds up many
    rows in another order)."""
    if weight.is_mkldnn:
        assert _packed_linear is not None
        return _packed_linear(x, weight, bias, "none", [], "")
    return F.linear(x, weight, bias)


class Projections(NamedTuple):
    """Matrices that read the same input: apart in training, where the gradients of the input then add up in the order
    of transformers', one packed matrix in decoding, where every product streams its weights anew.

    matrices: [O, D] each. biases: one a matrix, or none at all. sizes: where the output of a joined matrix is cut.
    """

    matrices: tuple[Tensor, ...]
    biases: tuple[Tensor, ...] = ()
    sizes: tuple[int, ...] = ()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        """x [..., D] -> one [..., O] each."""
        biases = self.biases or [None] * len(self.matrices)
        outputs = [linear(x, matrix, bias) for matrix, bias in zip(self.matrices, biases, strict=True)]
        return outputs[0].split_with_sizes(self.sizes, -1) if self.sizes else outputs

    def joined(self, together: int = 1) -> "Projections":
        """The same as one packed matrix (a copy); the first `together` outputs stay one."""
        sizes = [len(matrix) for matrix in self.matrices]
        return Projections(
            (pack(torch.cat(self.matrices)),),
            (torch.cat(self.biases),) if self.biases else (),
            (sum(sizes[:together]), *sizes[together:]),
        )
