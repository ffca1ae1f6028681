"""The cell service "blocks": reads, writes and copies whole KV blocks as stages of the device thread.

It does not know why a block moves, where its bytes come from or go to, nor how a backend stores them.
"""

import asyncio
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from antiphon.actors.columns import I32
from antiphon.actors.device import Device

if TYPE_CHECKING:
    from antiphon.actors.executor import Backend, Pools

U8 = npt.NDArray[np.uint8]


class BlockAccess:
    """Blocks as flat records, one array [n, bytes] a KV group of their table.

    Futures belong to the calling loop. Stages run in order, with steps too: what is read here is read before any
    step that is queued later writes it. Arrays handed in must not change before their future is done. A future fails
    with ValueError, and nothing is touched, if a block or an array does not fit the pools.
    """

    def __init__(self, device: Device, backend: "Backend[Any]"):
        self.pools: Pools | None = None  # known once the executor is told to load
        self._device = device
        self._backend = backend

    def read(self, wanted: list[tuple[int, I32]]) -> "asyncio.Future[list[list[U8]]]":
        """Copies of blocks, per pair (table, numbers of blocks)."""

        def stage() -> list[list[U8]]:
            for table, blocks in wanted:
                self._check(table, blocks)
            return [self._backend.read(table, blocks) for table, blocks in wanted]

        return self._device.submit(stage, "read")

    def write(self, table: int, blocks: I32, data: "list[U8 | None]") -> "asyncio.Future[None]":
        """Write blocks; a group given as None is left alone."""

        def stage() -> None:
            self._check(table, blocks)
            assert self.pools is not None
            groups = self.pools.groups[table]
            if len(data) != len(groups):
                raise ValueError(f"{len(data)} arrays for the {len(groups)} KV groups of table {table}")
            for group, array in zip(groups, data, strict=True):
                shape = (len(blocks), group.slot_bytes() * self.pools.block_size)
                if array is not None and (array.dtype != np.uint8 or array.shape != shape):
                    raise ValueError(
                        f"blocks of KV group {group.name!r} are uint8 {shape}, found {array.dtype} {array.shape}"
                    )
            self._backend.write(table, blocks, data)

        return self._device.submit(stage, "write")

    def copy(self, table: int, sources: I32, targets: I32) -> "asyncio.Future[None]":
        """Copy blocks in order, all groups of the table."""

        def stage() -> None:
            self._check(table, sources)
            self._check(table, targets)
            if len(sources) != len(targets):
                raise ValueError(f"{len(sources)} blocks cannot be copied to {len(targets)}")
            self._backend.copy(table, sources, targets)

        return self._device.submit(stage, "copy")

    def _check(self, table: int, blocks: I32) -> None:
        if self.pools is None:
            raise ValueError("there are no pools yet: the executor has not been told to load")
        if not 0 <= table < len(self.pools.blocks):
            raise ValueError(f"there is no block table {table}; there are {len(self.pools.blocks)}")
        count = self.pools.blocks[table]
        if len(blocks) and not (int(blocks.min()) >= 0 and int(blocks.max()) < count):
            raise ValueError(f"table {table} has blocks 0 to {count - 1}, found {int(blocks.min())} to "
                             f"{int(blocks.max())}")
