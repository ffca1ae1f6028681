"""The pager moves blocks between the device and the places behind it, as the allocator has decided.

It does not know why a block is wanted, nor what its slots hold.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from antiphon.actors.columns import I32, pack, unpack
from antiphon.actors.model import Facts
from antiphon.actors.protocol import (
    COPY,
    SAVE,
    Arrived,
    Configured,
    Find,
    Found,
    Inspect,
    Mount,
    Mounted,
    Page,
    Paged,
    Prepare,
    Prepared,
    Report,
    Store,
    Stored,
)
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.plugin import O, Options, Plugin

KEY = 32  # bytes of a block key
U8 = npt.NDArray[np.uint8]


class BlockAccess(Protocol):
    """Cell service "blocks". Each call queues one stage on the device thread before it returns; stages run in order.

    A block of a group is a row of bytes: [layer][K,V][token][head][width] in the group's stored dtype.
    """

    def read(self, wanted: list[tuple[int, I32]]) -> "asyncio.Future[list[list[U8]]]":
        """Per (table, blocks): an array [blocks, bytes] for each group of the table."""

    def write(self, table: int, blocks: I32, data: list[U8 | None]) -> "asyncio.Future[None]":
        """One array [blocks, bytes] for each group of the table; a group given as None is left alone."""

    def copy(self, table: int, sources: I32, targets: I32) -> "asyncio.Future[None]":
        """All groups of a table, in order: a later source may be an earlier target."""


class Blocks(NamedTuple):
    """Device blocks and the block keys of what they hold, or shall hold."""

    tables: list[int]
    blocks: list[int]
    keys: list[bytes]


class Places(NamedTuple):
    """What ``find`` found: ``present`` [tables, keys] 0 or 1, seconds before the first byte, bytes per second after."""

    present: I32
    latency: float = 0.0
    rate: float = 0.0


class Pager(Plugin[O]):
    """Contract of a ``pager``: keeps blocks somewhere else and brings them back.

    This class itself keeps nothing. ``holds``: there is a place behind the device; ``through``: it wants blocks as soon
    as they are full; ``back``: it wants evicted ones, even if they were written through. The server runs the
    coroutines; one that raises is the actor's failure, so a place that does not answer must not.
    """

    kind: ClassVar[str] = "pager"
    holds: bool = False
    through: bool = False
    back: bool = False

    def mount(self, facts: Facts, pools: Configured) -> None:
        """Learn the pools; before any other call, and again if they change."""

    async def run(self) -> None:
        """What has to be done beside the calls, for as long as the actor lives; started after the first ``mount``."""

    async def find(self, keys: Sequence[bytes]) -> Places:
        """Which blocks could be brought. Must end within a deadline."""
        raise ValueError(f"{self.site.instance} has no tiers, so nothing can be found there")

    def save(self, blocks: Blocks) -> Coroutine[Any, Any, None]:
        """Keep blocks that leave the device. Their reading is queued on the device before this returns."""
        raise ValueError(f"{self.site.instance} has no tiers, so blocks cannot be saved: name a pager that has some")

    async def store(self, blocks: Blocks, stored: Callable[[Sequence[int]], None]) -> None:
        """Write blocks through; call ``stored`` with indexes into ``blocks`` as they have been read, or given up."""
        raise ValueError(f"{self.site.instance} has no tiers, so blocks cannot be stored: name a pager that has some")

    async def load(self, blocks: Blocks, arrived: Callable[[Sequence[int], bool], None]) -> None:
        """Bring blocks; call ``arrived`` with indexes into ``blocks`` as they are there (True) or will not be (False).

        Once a block is told, nothing may write it. Must end within a deadline.
        """
        raise ValueError(f"{self.site.instance} has no tiers, so blocks cannot be loaded: name a pager that has some")

    async def close(self, deadline: float) -> None:
        """Finish what is being kept until ``deadline`` (seconds from now) and let go of everything."""

    def facts(self) -> dict[str, Any]:
        """State worth showing to an operator."""
        return {}


class PagerOptions(Options, frozen=True):
    """The pager actor has no options of its own."""


class PagerActor(Actor[PagerOptions]):
    """Hosts a pager: reads the columns, keeps the order of moves, copies on the device, tells who mounted it."""

    kind = "pager"
    plugs = ("pager",)
    stand_in = "plain"

    def __init__(self, options: PagerOptions, site: ActorSite):
        super().__init__(options, site)
        self.pager: Pager[Any] = site.plugin("pager")
        self.owner = ""  # who sent Mount
        self.running = False
        # Blocks, but for finds.
        self.counts = {"copied": 0, "saves": 0, "stores": 0, "loads": 0, "loads_bad": 0, "finds": 0}

    def facts(self) -> dict[str, Any]:
        """Blocks moved, and what the pager says."""
        return {**self.counts, **self.pager.facts()}

    async def stop(self, deadline: float) -> None:
        """Finish what is being kept."""
        await self.pager.close(deadline)

    def on_prepare(self, message: Prepare) -> Prepared:
        """The pager needs nothing from the step."""
        return Prepared()

    def on_mount(self, message: Mount) -> None:
        """Learn whose blocks are moved."""
        self.owner = self.sender
        self.pager.mount(message.facts, message.pools)
        if not self.running:
            self.running = True
            self.spawn(self.pager.run(), "run")
        self.tell(self.owner, Mounted(self.pager.holds, self.pager.through, self.pager.back))

    def on_page(self, message: Page) -> Paged:
        """Queue moves in the order of the column; what is on the device thread when this returns needs no ticket."""
        moves = unpack(message.moves).reshape(-1, 4)
        ends = [*(np.flatnonzero(np.diff(moves[:, 0])) + 1).tolist(), len(moves)]
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            run = moves[begin:end]
            if not len(run):
                continue
            if run[0, 0] == COPY:
                self._copy(run)
            elif run[0, 0] == SAVE:
                self.counts["saves"] += len(run)
                self.spawn(self.pager.save(blocks_of(run, message.keys)), "save")
            else:
                self.counts["loads"] += len(run)
                self.spawn(self._load(blocks_of(run, message.keys)), "load")
        return Paged(0)

    def on_store(self, message: Store) -> None:
        """Write full blocks through."""
        blocks = blocks_of(unpack(message.moves).reshape(-1, 4), message.keys)
        self.counts["stores"] += len(blocks.keys)
        self.spawn(self._store(blocks), "store")

    def on_find(self, message: Find) -> None:
        """Look where a sequence's blocks are."""
        self.counts["finds"] += 1
        self.spawn(self._find(message.sequence, split(message.keys)), "find")

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())

    async def _find(self, sequence: int, keys: list[bytes]) -> None:
        places = await self.pager.find(keys)
        self.tell(self.owner, Found(sequence, pack(places.present.reshape(-1)), places.latency, places.rate))

    async def _store(self, blocks: Blocks) -> None:
        waiting = set(range(len(blocks.keys)))

        def stored(which: Sequence[int]) -> None:
            if tables_and_blocks := _first_told(blocks, which, waiting):
                self.tell(self.owner, Stored(*tables_and_blocks))

        await self.pager.store(blocks, stored)
        stored(sorted(waiting))

    async def _load(self, blocks: Blocks) -> None:
        waiting = set(range(len(blocks.keys)))

        def arrived(which: Sequence[int], good: bool) -> None:
            before = len(waiting)
            if tables_and_blocks := _first_told(blocks, which, waiting):
                count = before - len(waiting)
                self.counts["loads_bad"] += 0 if good else count
                self.tell(self.owner, Arrived(*tables_and_blocks, pack([int(good)] * count)))

        await self.pager.load(blocks, arrived)
        arrived(sorted(waiting), False)

    def _copy(self, run: I32) -> None:
        try:
            access: BlockAccess = self.site.service("blocks")
        except LookupError as cause:
            raise LookupError(f"{self.site.instance} cannot copy blocks on the device: {cause.args[0]}; "
                              "place the pager in the executor's cell") from cause
        self.counts["copied"] += len(run)
        for table in np.unique(run[:, 1]).tolist():
            pairs = run[run[:, 1] == table][:, 2:]
            self._await(access.copy(table, pairs[:, 0].copy(), pairs[:, 1].copy()))

    def _await(self, copied: "asyncio.Future[None]") -> None:
        """A copy that fails is the actor's own failure: the step would read what was never written."""

        async def done() -> None:
            await copied

        self.spawn(done(), "copy")


def split(keys: bytes) -> list[bytes]:
    """Block keys of a column of keys. Raises ValueError: no multiple of 32 bytes."""
    if len(keys) % KEY:
        raise ValueError(f"{len(keys)} bytes are no column of {KEY}-byte keys")
    return [keys[i:i + KEY] for i in range(0, len(keys), KEY)]


def blocks_of(moves: I32, keys: bytes) -> Blocks:
    """Blocks of moves (what, table, block, number of the key), all SAVE or all LOAD."""
    column = split(keys)
    return Blocks(moves[:, 1].tolist(), moves[:, 2].tolist(), [column[i] for i in moves[:, 3].tolist()])


def _first_told(blocks: Blocks, which: Sequence[int], waiting: set[int]) -> tuple[bytes, bytes] | None:
    """Columns of the blocks among ``which`` that were still ``waiting``, and wait no more."""
    fresh = [i for i in which if i in waiting]
    waiting.difference_update(fresh)
    return (pack([blocks.tables[i] for i in fresh]), pack([blocks.blocks[i] for i in fresh])) if fresh else None
