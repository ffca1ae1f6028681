"""The ``attention`` contract: how rows attend to paged KV.

It does not know layers, models or how a path computes; shapes and masks are those of ``antiphon.kernels.attention``.
"""

from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from antiphon.kernels.attention import Attended, Mask
from antiphon.runtime.plugin import O, Plugin

Attend: TypeAlias = Callable[..., Attended]
"""``attend(q, kv, **options)``: one layer's attention, with the keyword options of ``attention``."""


class Attention(Plugin[O]):
    """Contract of an ``attention``: ``attention`` is required; ``plan`` is for paths that prepare a step once."""

    kind: ClassVar[str] = "attention"
    where: ClassVar[frozenset[str]] = frozenset({"device"})

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
        """Attend from N rows to one layer's KV: shapes, options and errors as ``antiphon.kernels.attention.attention``.

        Raises NotSupported for what this path cannot do.
        """
        raise NotImplementedError

    def plan(
        self,
        tables: Tensor,
        row_offsets: Tensor,
        positions: Tensor,
        mask: Mask,
        block_size: int,
        dtype: torch.dtype,
    ) -> Attend:
        """Prepare what all layers of one step share that read these tables under this mask.

        ``block_size`` is that of the pools, ``dtype`` that of q. Here nothing is prepared.
        """

        def attend(q: Tensor, kv: Tensor, **options: Any) -> Attended:
            return self.attention(q, kv, tables, row_offsets, positions, mask, **options)

        return attend
