"""KV in 8 bits: integers with a scale per token and head, keys on request with a factor per channel too.

It does not know where they are stored.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
import torch
from torch import Tensor

from antiphon.actors.model import KVGroup
from antiphon.plugins.quantizations.contract import Codec, Quantization
from antiphon.runtime.plugin import Options

# The range of float32, and exact in every dtype of computing but for extremes. Its 8 bits cost nothing: numbers are
# rounded to multiples of the scale as it is stored, and the largest lies at 127.5 of them at most.
SCALE = torch.bfloat16
MOST = 127
_TINY = torch.finfo(SCALE).tiny
_LARGE = torch.finfo(SCALE).max / 128  # infinities come back as large numbers


class Int8Options(Options, frozen=True):
    """``keys`` "token": as values are; "channel": first divided by what the weights say of each channel's size."""

    keys: Literal["token", "channel"] = "token"


class Int8(Quantization[Int8Options]):
    """Lossy: symmetric 8-bit integers with a bfloat16 scale per token and head.

    Some channels of keys are tens of times larger than others at every token (KIVI, Liu et al. 2024), so that a scale
    for all channels rounds the small ones away. Factors per channel even them out; here they follow from the weights
    and do not change, so a slot can still be written, moved and dropped alone.
    """

    def stored(self, group: KVGroup) -> KVGroup:
        """A byte a number and two for the scale. Raises ValueError for heads of odd width."""
        if group.width % 2:
            raise ValueError(f"int8 stores heads of even width, KV group {group.name!r} has {group.width}")
        return msgspec.structs.replace(
            group, dtype="int8", quantization=f"int8-{self.options.keys}", scale_bytes=SCALE.itemsize
        )

    def codec(self, group: KVGroup, dtype: torch.dtype, magnitudes: Callable[[], Tensor]) -> Codec:
        """Encode in float32; decode in the dtype of computing."""
        factors: Tensor | None = None
        inverse = torch.empty(0)
        if self.options.keys == "channel":
            found = magnitudes()
            factors = found.clamp(min=float(found.max()) * 1e-3 + _TINY).to(dtype)
            inverse = 1 / factors.float()

        def encode(x: Tensor, part: int) -> Tensor:
            x = x.float()
            return pack(x * inverse if factors is not None and part == 0 else x)

        def decode(packed: Tensor, part: int) -> Tensor:
            x = unpack(packed, dtype)
            return x.mul_(factors) if factors is not None and part == 0 else x

        return Codec(encode, decode)


def pack(x: Tensor) -> Tensor:
    """Float32 [..., width] -> int8 [..., width + 2]: integers, then their scale's bytes."""
    width = x.shape[-1]
    scales = (x.abs().amax(dim=-1, keepdim=True) / MOST).clamp_(max=_LARGE).to(SCALE)
    out = torch.empty(*x.shape[:-1], width + SCALE.itemsize, dtype=torch.int8)
    out[..., :width] = (x / scales.float().clamp_(min=_TINY)).round_().clamp_(-MOST, MOST)
    out[..., width:] = scales.view(torch.int8)
    return out


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """Int8 [..., width + 2] as ``pack`` made it -> [..., width]."""
    width = packed.shape[-1] - SCALE.itemsize
    scales = packed[..., width:].view(SCALE)
    return packed[..., :width].to(dtype).mul_(scales.to(dtype))
