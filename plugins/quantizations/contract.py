"""The ``quantization`` contract: how keys and values are stored, and plain storage in another dtype.

It does not know pools, blocks, tables or attention: it is handed numbers to store and stored numbers to read.
"""

from collections.abc import Callable
from typing import ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from antiphon.actors.model import Dtype, KVGroup
from antiphon.kernels.attention import Decode
from antiphon.runtime.plugin import O, Options, Plugin

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Codec(NamedTuple):
    """How one layer's keys and values are written and read."""

    encode: Callable[[Tensor, int], Tensor]  # [N, kv heads, width], part 0 keys or 1 values -> as the pool's slots
    decode: Decode


class Quantization(Plugin[O]):
    """Contract of a ``quantization``. A slot of a head stays one record of fixed size, which may move anywhere.

    ``lossy``: what is read may differ from what was stored.
    """

    kind: ClassVar[str] = "quantization"
    where: ClassVar[frozenset[str]] = frozenset({"device"})
    lossy: ClassVar[bool] = True

    def stored(self, group: KVGroup) -> KVGroup:
        """The group as it lies in memory: stored dtype, bytes of scales, and a name that tells apart what differs.

        Raises ValueError for a group that cannot be stored so.
        """
        raise NotImplementedError

    def codec(self, group: KVGroup, dtype: torch.dtype, magnitudes: Callable[[], Tensor]) -> Codec:
        """How one layer of a stored group is written and read; ``dtype`` is that of computing.

        ``magnitudes()`` gives the expected size of the layer's keys by channel, float32 [kv heads, width].
        """
        raise NotImplementedError


class CastOptions(Options, frozen=True):
    """``dtype`` of the stored numbers."""

    dtype: Dtype


class Cast(Quantization[CastOptions]):
    """Another float dtype than that of computing; it is what the backend's ``kv_dtype`` means."""

    def stored(self, group: KVGroup) -> KVGroup:
        """The group in the other dtype."""
        return msgspec.structs.replace(group, dtype=self.options.dtype)

    def codec(self, group: KVGroup, dtype: torch.dtype, magnitudes: Callable[[], Tensor]) -> Codec:
        """Convert both ways. What is too large for float16 becomes its largest number, as infinity would spread."""
        kept = DTYPES[self.options.dtype]
        most = torch.finfo(kept).max

        def encode(x: Tensor, part: int) -> Tensor:
            return (x.clamp(-most, most) if kept == torch.float16 else x).to(kept)

        def decode(stored: Tensor, part: int) -> Tensor:
            return stored.to(dtype)

        return Codec(encode, decode)
