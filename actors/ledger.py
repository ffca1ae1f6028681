"""The ledger of KV blocks: every block is free, active, cached, in transfer or quarantined, every hold has an owner.

It does not know which tokens a block holds; a ``Keeper`` says which blocks are worth keeping when nobody holds them.
"""

import itertools
import time
from typing import NamedTuple, Protocol

import numpy as np

HOLE = -1  # at an index of a hold whose block was given back: a window has moved past it
TRANSFER, QUARANTINE = "transfer", "quarantine"  # reasons of holds that no sequence has


class Hold:
    """Blocks that one owner keeps, per table, in order. ``deadline`` (monotonic seconds) None: as long as it lives."""

    __slots__ = ("blocks", "deadline", "owner", "reason", "since")

    def __init__(self, owner: str, reason: str, tables: int, deadline: float | None = None):
        self.owner = owner
        self.reason = reason
        self.deadline = deadline
        self.since = time.monotonic()
        self.blocks: list[list[int]] = [[] for _ in range(tables)]


class Keeper(Protocol):
    """Who knows what idle blocks are worth."""

    def idle(self, table: int, block: int) -> bool:
        """Nobody holds the block any more; whether it is to be kept."""

    def busy(self, table: int, block: int) -> None:
        """A kept block is held again."""

    def victim(self, table: int) -> int:
        """Give up a kept block: there is one."""


class Audit(NamedTuple):
    """Blocks per state, per table; ``faults`` names what does not add up."""

    total: list[int]
    free: list[int]
    active: list[int]
    cached: list[int]
    transfer: list[int]
    quarantined: list[int]
    faults: list[str]


class LedgerError(Exception):
    """Seen by the allocator's supervisor: a block was released twice or taken while in use."""


class Ledger:
    """Counts references; a block without any is free, or cached if the keeper keeps it."""

    def __init__(self, blocks: tuple[int, ...], keeper: Keeper | None = None):
        self.total = list(blocks)
        self.free = [list(range(n - 1, -1, -1)) for n in blocks]  # stacks: the block freed last is reused first
        self.references = [[0] * n for n in blocks]  # lists: one number is faster to reach than in an array
        self.held = [0 for _ in blocks]  # blocks with references
        self.cached: list[set[int]] = [set() for _ in blocks]
        self.holds: dict[int, Hold] = {}
        self.keeper = keeper
        self._numbers = itertools.count(-1, -1)

    def number(self) -> int:
        """A key for a hold that is no sequence's: negative, never the same."""
        return next(self._numbers)

    def open(self, key: int, hold: Hold) -> None:
        """Begin a hold without blocks."""
        if key in self.holds:
            raise LedgerError(f"hold {key} is open already ({self.holds[key].owner})")
        self.holds[key] = hold

    def available(self) -> int:
        """Blocks that every table could still give, cached ones included."""
        return min(len(free) + len(cached) for free, cached in zip(self.free, self.cached, strict=True))

    def take(self, key: int, count: int) -> list[tuple[int, int, int]]:
        """Extend a hold to ``count`` blocks in every table; the new (table, index, block).

        Raises LedgerError: a free block is referenced. The caller has looked whether so many are ``available``.
        """
        hold, fresh = self.holds[key], []
        for table, blocks in enumerate(hold.blocks):
            while len(blocks) < count:
                fresh.append((table, len(blocks), self.fresh(key, table)))
        return fresh

    def fresh(self, key: int, table: int) -> int:
        """Append one block that nobody holds to a hold; a cached one gives way if none is free."""
        block = self._unused(table)
        self.holds[key].blocks[table].append(block)
        return block

    def replace(self, key: int, table: int, index: int) -> int:
        """Put a block that nobody holds in the place of another one, which is released."""
        block = self._unused(table)
        self._put(key, table, index, block)
        return block

    def share(self, key: int, table: int, block: int) -> None:
        """Append a block that others hold too, or that is cached."""
        self._retain(table, block)
        self.holds[key].blocks[table].append(block)

    def exchange(self, key: int, table: int, index: int, block: int) -> None:
        """Put a block that others hold, or that is cached, in the place of one's own; HOLE: put none."""
        if block != HOLE:
            self._retain(table, block)
        self._put(key, table, index, block)

    def give_back(self, key: int, table: int) -> None:
        """Release the last block of a hold."""
        self._release(table, self.holds[key].blocks[table].pop())

    def shared(self, table: int, block: int) -> bool:
        """Whether more than one hold has the block."""
        return self.references[table][block] > 1

    def clear(self, key: int) -> None:
        """Release a hold's blocks, the last ones first; the hold stays."""
        for table, blocks in enumerate(self.holds[key].blocks):
            for block in reversed(blocks):
                if block != HOLE:
                    self._release(table, block)
            blocks.clear()

    def close(self, key: int) -> None:
        """End a hold. An unknown key is no error: Close is idempotent."""
        if key in self.holds:
            self.clear(key)
            del self.holds[key]

    def drop(self, table: int, block: int) -> None:
        """A cached block is not worth keeping any more: it is free."""
        self.cached[table].remove(block)
        self.free[table].append(block)

    def whole(self) -> bool:
        """Quick check for when nobody holds anything: no references, and every block is somewhere."""
        return not any(self.held) and all(
            len(self.free[t]) + len(self.cached[t]) == total for t, total in enumerate(self.total))

    def audit(self) -> Audit:
        """Count every block and compare references with holds."""
        faults = []
        expected = [np.zeros(n, dtype=np.int64) for n in self.total]
        owned, moving = ([np.zeros(n, dtype=bool) for n in self.total] for _ in range(2))
        now = time.monotonic()
        for key, hold in self.holds.items():
            if hold.deadline is not None and hold.deadline < now:
                faults.append(f"hold {key} of {hold.owner} ({hold.reason}) is past its deadline")
            for table, blocks in enumerate(hold.blocks):
                numbers = np.array([b for b in blocks if b != HOLE], dtype=np.int64)
                np.add.at(expected[table], numbers, 1)
                if hold.reason == TRANSFER:
                    moving[table][numbers] = True
                elif hold.reason != QUARANTINE:
                    owned[table][numbers] = True
        states: list[tuple[int, int, int]] = []
        for table, total in enumerate(self.total):
            references = np.array(self.references[table], dtype=np.int64)
            if not np.array_equal(expected[table], references):
                wrong = np.flatnonzero(expected[table] != references)[:5].tolist()
                faults.append(f"table {table}: references of blocks {wrong} differ from the holds")
            held = references > 0
            idle = self.free[table], self.cached[table]
            every = np.concatenate([np.flatnonzero(held), *(np.array(list(i), dtype=np.int64) for i in idle)])
            if not np.array_equal(np.sort(every), np.arange(total)) or self.held[table] != int(held.sum()):
                faults.append(f"table {table}: {int(held.sum())} held + {[len(i) for i in idle]} free, cached "
                              f"are not {total} blocks")
            states.append((int(owned[table].sum()), int((moving[table] & ~owned[table]).sum()),
                           int((held & ~moving[table] & ~owned[table]).sum())))
        active, transfer, quarantined = ([s[i] for s in states] for i in range(3))
        return Audit(self.total, [len(f) for f in self.free], active, [len(c) for c in self.cached], transfer,
                     quarantined, faults)

    def _unused(self, table: int) -> int:
        if self.free[table]:
            block = self.free[table].pop()
        else:
            if self.keeper is None or not self.cached[table]:
                raise LedgerError(f"table {table} has no block left to give")
            block = self.keeper.victim(table)
            self.cached[table].remove(block)
        if self.references[table][block]:
            raise LedgerError(f"block {block} of table {table} was free and referenced")
        self.references[table][block] = 1
        self.held[table] += 1
        return block

    def _put(self, key: int, table: int, index: int, block: int) -> None:
        blocks = self.holds[key].blocks[table]
        if blocks[index] != HOLE:
            self._release(table, blocks[index])
        blocks[index] = block

    def _retain(self, table: int, block: int) -> None:
        references = self.references[table]
        if not references[block]:
            if block not in self.cached[table]:
                raise LedgerError(f"block {block} of table {table} is shared, but nobody holds or keeps it")
            self.cached[table].remove(block)
            self.held[table] += 1
            if self.keeper is not None:
                self.keeper.busy(table, block)
        references[block] += 1

    def _release(self, table: int, block: int) -> None:
        references = self.references[table]
        if references[block] <= 0:
            raise LedgerError(f"block {block} of table {table} is released more often than it was taken")
        references[block] -= 1
        if not references[block]:
            self.held[table] -= 1
            if self.keeper is not None and self.keeper.idle(table, block):
                self.cached[table].add(block)
            else:
                self.free[table].append(block)
