"""The ledger of KV blocks: every block is free, active, cached, in transfer or quarantined, every hold has an owner.

It does not know which tokens a block holds.
"""

import time
from typing import NamedTuple

import numpy as np


class Hold:
    """Blocks that one owner keeps, per table, in order. ``deadline`` (monotonic seconds) None: as long as it lives."""

    __slots__ = ("blocks", "deadline", "owner", "reason", "since")

    def __init__(self, owner: str, reason: str, tables: int, deadline: float | None = None):
        self.owner = owner
        self.reason = reason
        self.deadline = deadline
        self.since = time.monotonic()
        self.blocks: list[list[int]] = [[] for _ in range(tables)]


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
    """Counts references; a block without any is free unless it is cached, in transfer or quarantined."""

    def __init__(self, blocks: tuple[int, ...]):
        self.total = list(blocks)
        self.free = [list(range(n - 1, -1, -1)) for n in blocks]  # stacks: the block freed last is reused first
        self.references = [np.zeros(n, dtype=np.int32) for n in blocks]
        self.cached: list[set[int]] = [set() for _ in blocks]
        self.transfer: list[set[int]] = [set() for _ in blocks]
        self.quarantined: list[set[int]] = [set() for _ in blocks]
        self.holds: dict[int, Hold] = {}

    def open(self, key: int, hold: Hold) -> None:
        """Begin a hold without blocks."""
        if key in self.holds:
            raise LedgerError(f"hold {key} is open already ({self.holds[key].owner})")
        self.holds[key] = hold

    def available(self) -> int:
        """Blocks that every table could still give."""
        return min(len(free) for free in self.free)

    def take(self, key: int, count: int) -> list[tuple[int, int, int]]:
        """Extend a hold to ``count`` blocks in every table; the new (table, index, block).

        Raises LedgerError: a free block is referenced. The caller has looked whether so many are ``available``.
        """
        hold, fresh = self.holds[key], []
        for table, blocks in enumerate(hold.blocks):
            while len(blocks) < count:
                block = self.free[table].pop()
                if self.references[table][block]:
                    raise LedgerError(f"block {block} of table {table} was free and referenced")
                self.references[table][block] = 1
                fresh.append((table, len(blocks), block))
                blocks.append(block)
        return fresh

    def share(self, key: int, table: int, block: int) -> None:
        """Add a block that others hold too."""
        self.references[table][block] += 1
        self.holds[key].blocks[table].append(block)

    def close(self, key: int) -> None:
        """End a hold; blocks without another reference become free. An unknown key is no error: Close is idempotent."""
        hold = self.holds.pop(key, None)
        if hold is None:
            return
        for table, blocks in enumerate(hold.blocks):
            for block in reversed(blocks):
                self._release(table, block)

    def whole(self) -> bool:
        """Quick check for when nobody holds anything: no references, and every block is somewhere."""
        return not any(r.any() for r in self.references) and all(
            len(self.free[t]) + len(self.cached[t]) + len(self.transfer[t]) + len(self.quarantined[t]) == total
            for t, total in enumerate(self.total))

    def audit(self) -> Audit:
        """Count every block and compare references with holds."""
        faults = []
        expected = [np.zeros(n, dtype=np.int32) for n in self.total]
        now = time.monotonic()
        for key, hold in self.holds.items():
            if hold.deadline is not None and hold.deadline < now:
                faults.append(f"hold {key} of {hold.owner} ({hold.reason}) is past its deadline")
            for table, blocks in enumerate(hold.blocks):
                np.add.at(expected[table], blocks, 1)
        active = [int(np.count_nonzero(r)) for r in self.references]
        for table, total in enumerate(self.total):
            if not np.array_equal(expected[table], self.references[table]):
                wrong = np.flatnonzero(expected[table] != self.references[table])[:5].tolist()
                faults.append(f"table {table}: references of blocks {wrong} differ from the holds")
            idle = [self.free[table], self.cached[table], self.transfer[table], self.quarantined[table]]
            if active[table] + sum(map(len, idle)) != total or len(set().union(*idle)) != sum(map(len, idle)):
                faults.append(f"table {table}: {active[table]} active + {[len(i) for i in idle]} free, cached, "
                              f"in transfer, quarantined are not {total} blocks")
        return Audit(self.total, [len(f) for f in self.free], active, [len(c) for c in self.cached],
                     [len(t) for t in self.transfer], [len(q) for q in self.quarantined], faults)

    def _release(self, table: int, block: int) -> None:
        references = self.references[table]
        if references[block] <= 0:
            raise LedgerError(f"block {block} of table {table} is released more often than it was taken")
        references[block] -= 1
        if not references[block]:
            self.free[table].append(block)
