"""Normalisation of hidden states.

It does not know which layer it serves.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return ``x`` [..., width] over its root mean square, times ``weight`` [width], in the dtype of x.

    The mean of squares is taken in float32; the quotient is rounded to the dtype of x before the weight is applied,
    the order of the Llama implementations. Zhang and Sennrich 2019.
    """
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return weight * scaled.to(x.dtype)
