"""Transfers of blocks between the device and tiers, from the allocator's side: which blocks they hold, and until when.

It does not know how the pager moves bytes. A block whose transfer is late is quarantined: it stays held until the
pager answers, however long that takes, for who still writes or reads it must not meet a new owner.
"""

from typing import NamedTuple

from antiphon.actors.cache import Entry
from antiphon.actors.index import Index
from antiphon.actors.ledger import HOLE, QUARANTINE, TRANSFER, Hold


class Transfer(NamedTuple):
    """One block on its way: the hold and the place in it, what the block holds, the sequence that waits (-1: none)."""

    hold: int
    place: int
    entry: Entry
    sequence: int


Block = tuple[int, int]  # table, block


class Transfers:
    """Loads into blocks and write-through stores out of them, each with a hold of its own beside any sequence's."""

    def __init__(self, index: Index):
        self.index, self.ledger = index, index.ledger
        self.loads: dict[Block, Transfer] = {}
        self.stores: dict[Block, Transfer] = {}
        self._left: dict[int, int] = {}  # blocks that a hold still has
        self.counters = {"loads_good": 0, "loads_bad": 0, "loads_late": 0, "stores": 0, "stores_late": 0}

    def load(self, owner: str, sequence: int, blocks: list[tuple[int, int, Entry]], deadline: float) -> None:
        """Blocks (table, block, what is to come) will be written by the pager."""
        self._begin(self.loads, owner, sequence, blocks, deadline)

    def store(self, owner: str, blocks: list[tuple[int, int, Entry]], deadline: float) -> None:
        """Blocks will be read by the pager."""
        self._begin(self.stores, owner, -1, blocks, deadline)
        self.counters["stores"] += len(blocks)

    def _begin(self, transfers: dict[Block, Transfer], owner: str, sequence: int,
               blocks: list[tuple[int, int, Entry]], deadline: float) -> None:
        key = self.ledger.number()
        hold = Hold(owner, TRANSFER, len(self.ledger.total), deadline)
        self.ledger.open(key, hold)
        self._left[key] = len(blocks)
        for table, block, entry in blocks:
            transfers[table, block] = Transfer(key, len(hold.blocks[table]), entry, sequence)
            self.ledger.share(key, table, block)

    def arrived(self, table: int, block: int, good: bool) -> Transfer | None:
        """A load has ended; a good block is in the index from now on. None: nobody waits for such a block."""
        load = self.loads.pop((table, block), None)
        if load is None:
            return None
        self.counters["loads_good" if good else "loads_bad"] += 1
        if good and (entry := self.index.put(table, block, load.entry)) is not None:
            entry.stored |= 1 << table
        self._end(table, load)
        return load

    def stored(self, table: int, block: int) -> None:
        """The pager has read a block, or given it up: then a tier lacks it, which costs a hit and nothing else."""
        store = self.stores.pop((table, block), None)
        if store is not None:
            store.entry.stored |= 1 << table
            self._end(table, store)

    def storing(self, table: int) -> int:
        """Blocks of a table that stores hold."""
        return sum(t == table for t, _ in self.stores)

    def expire(self, now: float) -> set[int]:
        """Quarantine what is late; the sequences that wait for it."""
        late = {key for key, hold in self.ledger.holds.items()
                if key < 0 and hold.reason == TRANSFER and hold.deadline is not None and hold.deadline <= now}
        for key in late:
            hold = self.ledger.holds[key]
            hold.reason, hold.deadline = QUARANTINE, None
        waiting = {load.sequence for load in self.loads.values() if load.hold in late}
        self.counters["loads_late"] += sum(load.hold in late for load in self.loads.values())
        self.counters["stores_late"] += sum(store.hold in late for store in self.stores.values())
        return waiting

    def _end(self, table: int, transfer: Transfer) -> None:
        self.ledger.exchange(transfer.hold, table, transfer.place, HOLE)
        self._left[transfer.hold] -= 1
        if not self._left[transfer.hold]:
            del self._left[transfer.hold]
            self.ledger.close(transfer.hold)
