"""Linear layers of a decoder: fused from a checkpoint's tensors and laid out for the processor.

It does not know which layer it is, nor files.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from antiphon.plugins.models.checkpoint import Checkpoint


class Linear:
    """``x @ weight.T + bias`` with one dtype for all; callable on [N, columns], gives [N, rows].

    A packed weight lies in oneDNN's layout, and the plain one is gone: few rows then cost half of what they cost
    ``functional.linear``, which packs a weight again at every call.
    """

    __slots__ = ("bias", "packed", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, pack: bool = False):
        self.bias = bias
        self.packed = pack and packable(weight.dtype)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """Apply to ``x`` [N, columns] of the weight's dtype."""
        if self.packed:
            made: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return made
        return functional.linear(x, self.weight, self.bias)


def packable(dtype: torch.dtype) -> bool:
    """Say whether oneDNN has a layout of its own for weights of this dtype here."""
    if not torch._C._has_mkldnn:
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def fused(
    checkpoint: Checkpoint,
    parts: Sequence[tuple[str, int]],
    columns: int,
    dtype: torch.dtype,
    *,
    bias: bool = False,
    pack: bool = False,
) -> Linear:
    """Read several matrices [rows, columns], stacked, as one layer; ``parts`` are (name without ending, rows).

    Raises CheckpointError: a tensor is missing or has another shape.
    """
    total = sum(rows for _, rows in parts)
    weight = torch.empty(total, columns, dtype=dtype)
    offset = torch.empty(total, dtype=dtype) if bias else None
    first = 0
    for name, rows in parts:
        checkpoint.require(f"{name}.weight", (rows, columns))
        checkpoint.read(f"{name}.weight", weight[first : first + rows])
        if offset is not None:
            checkpoint.require(f"{name}.bias", (rows,))
            checkpoint.read(f"{name}.bias", offset[first : first + rows])
        first += rows
    return Linear(weight, offset, pack)
