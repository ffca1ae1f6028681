"""The reference attention: plain torch, float32 accumulation, every option of the contract.

It does not know how to be quick.
"""

from typing import Any

from torch import Tensor

from antiphon.kernels.attention import Attended, Mask, attention
from antiphon.plugins.attentions.contract import Attention
from antiphon.runtime.plugin import Options


class Reference(Attention[Options]):
    """What every other attention plugin is compared with."""

    def attention(
        self,
        q: Tensor,
        kv: Tensor,
        tables: Tensor,
        row_offsets: Tensor,
        positions: Tensor,
        mask: Mask,
        select: Tensor | None = None,
        **options: Any,
    ) -> Attended:
        """Do what the contract says, one sequence after the other."""
        return attention(q, kv, tables, row_offsets, positions, mask, select, **options)
