"""Attention on the processor: torch's fused kernel over gathered blocks, planned once a step.

It does not know block selection and block masses, which it refuses.
"""

from typing import Any

import torch
from torch import Tensor

from antiphon.kernels import attention_cpu
from antiphon.kernels.attention import Attended, Mask
from antiphon.plugins.attentions.contract import Attend, Attention
from antiphon.runtime.plugin import Options


class Cpu(Attention[Options]):
    """The default of the torch backend. ``lse`` comes back only where ``want_lse`` asks for it."""

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
        """Do what the contract says; raises NotSupported for ``select`` and ``want_mass``."""
        return attention_cpu.attention(q, kv, tables, row_offsets, positions, mask, select, **options)

    def plan(
        self,
        tables: Tensor,
        row_offsets: Tensor,
        positions: Tensor,
        mask: Mask,
        block_size: int,
        dtype: torch.dtype,
    ) -> Attend:
        """Work out once what the rows read; the layers then only gather and multiply."""
        made = attention_cpu.plan(tables, row_offsets, positions, mask, block_size, dtype)

        def attend(q: Tensor, kv: Tensor, **options: Any) -> Attended:
            return attention_cpu.attend(q, kv, made, attention_cpu.Options(**options))

        return attend
