"""The index of cached blocks: which block holds which tokens in each table, and in what order idle ones give way.

It does not know sequences or tiers; the ``cache`` plugin finds entries, the ``eviction`` plugin weighs blocks.
"""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from antiphon.actors.cache import NONE, AnyCache, AnyEviction, Entry, shared_ids
from antiphon.actors.idle import Idle
from antiphon.actors.ledger import Ledger

Bools = npt.NDArray[np.bool_]
GROWTH = 1 / 4096  # cost of a row grows by this share for each slot before it, until it has been measured


class Evicted(NamedTuple):
    """A block that gave way, and what it held."""

    table: int
    block: int
    entry: Entry


class Index:
    """Keeps entries and blocks in step. Satisfies ``ledger.Keeper``.

    In table 0, if it keeps the whole context, a block goes only after those that go on from it: without it they
    would be out of reach.
    """

    def __init__(self, cache: AnyCache, eviction: AnyEviction, windows: Sequence[int], blocks: Sequence[int]):
        self.cache, self.eviction = cache, eviction
        self.windows = tuple(windows)
        self.owner: list[list[Entry | None]] = [[None] * n for n in blocks]
        self.order = [Idle() for _ in blocks]
        self.evicted: list[Evicted] = []  # since the last look
        self.evictions = 0
        self.growth = GROWTH
        self.ledger = Ledger(tuple(blocks), self)

    # ---- as the ledger's keeper

    def idle(self, table: int, block: int) -> bool:
        """Keep what is in the index."""
        entry = self.owner[table][block]
        if entry is None:
            return False
        self.order[table].add(block, self.eviction.worth(table, entry), bool(table) or not entry.children)
        return True

    def busy(self, table: int, block: int) -> None:
        """It may not go."""
        self.order[table].discard(block)

    def victim(self, table: int) -> int:
        """Give up a kept block."""
        picked = self.order[table].pick(lambda block: self._may_go(table, block))
        if picked is None:  # all that is left has kept blocks that go on from it and are held, or are gone
            block = next(iter(self.ledger.cached[table]))
            self.order[table].discard(block)
        else:
            block, worth = picked
            self.eviction.gave_way(table, worth)
        entry = self.owner[table][block]
        assert entry is not None
        self.evicted.append(Evicted(table, block, entry))
        self.evictions += 1
        self._detach(table, block, entry)
        return block

    # ---- putting in and taking out

    def put(self, table: int, block: int, entry: Entry) -> Entry | None:
        """Let a held block stand for what ``entry`` says; the entry that does now, which may have another block.

        None: the key is there with other ids, which happens to no one.
        """
        there = self.cache.find(entry.key)
        if there is None:
            there = entry
            there.cost = 1.0 + entry.position * self.growth
            there.used = time.monotonic()
            self.cache.insert(entry)
        elif there.ids != entry.ids:
            return None
        if there.blocks[table] == NONE:
            there.blocks[table] = block
            self.owner[table][block] = there
            if not table and not self.windows[0]:
                self._link(there)
        return there

    def forget(self, table: int, block: int) -> None:
        """The block stands for nothing any more; if it was cached, it is free."""
        entry = self.owner[table][block]
        if entry is not None:
            self.order[table].discard(block)
            self._detach(table, block, entry)
            if block in self.ledger.cached[table]:
                self.ledger.drop(table, block)

    def flush(self) -> list[int]:
        """Forget all cached blocks; how many, per table."""
        counts = [len(cached) for cached in self.ledger.cached]
        for table, cached in enumerate(self.ledger.cached):
            for block in sorted(cached):
                self.forget(table, block)
        return counts

    def _may_go(self, table: int, block: int) -> bool:
        """In table 0 no kept block goes on from it."""
        entry = self.owner[table][block]
        return bool(table) or entry is None or not entry.children

    def _link(self, entry: Entry) -> None:
        parent = self.cache.find(entry.parent_key)
        if parent is not None and parent.blocks[0] != NONE:
            entry.parent = parent
            parent.children += 1

    def _detach(self, table: int, block: int, entry: Entry) -> None:
        self.owner[table][block] = None
        entry.blocks[table] = NONE
        if not table and (parent := entry.parent) is not None:
            entry.parent = None
            parent.children -= 1
            if not parent.children and parent.blocks[0] in self.ledger.cached[0]:
                self.order[0].ready(parent.blocks[0])
        if all(b == NONE for b in entry.blocks):
            self.cache.remove(entry)

    # ---- looking up

    def entries(self, keys: Sequence[bytes], ids: bytes, block_bytes: int, gaps: bool) -> list[Entry | None]:
        """What is there for each key, compared by ids; without ``gaps`` up to the first miss in table 0.

        A miss in the table of the whole context ends every hit, but a tier may fill it.
        """
        find, found = self.cache.find, []
        stop = not gaps and not self.windows[0]
        for number, key in enumerate(keys):
            entry = find(key)
            if entry is not None and entry.ids != ids[number * block_bytes:(number + 1) * block_bytes]:
                entry = None
            if stop and (entry is None or entry.blocks[0] == NONE):
                break
            found.append(entry)
        return found

    def present(self, entries: Sequence[Entry | None], count: int) -> list[Bools]:
        """Per table whether each of ``count`` entries has a block there."""
        found = [np.zeros(count, dtype=bool) for _ in self.windows]
        for table, has in enumerate(found):
            has[:len(entries)] = [e is not None and e.blocks[table] != NONE for e in entries]
        return found

    def needed(self, table: int, length: int, size: int) -> int:
        """First block that continuing at ``length`` slots needs of a table."""
        window = self.windows[table]
        return max(0, length - window) // size if window else 0

    def longest(self, has: Sequence[Bools], size: int) -> int:
        """Most full blocks at which every table has what continuing there needs."""
        count = len(has[0])
        lengths = np.arange(count + 1)
        valid = np.ones(count + 1, dtype=bool)
        for held, window in zip(has, self.windows, strict=True):
            last_miss = np.full(count + 1, -1)
            last_miss[1:] = np.maximum.accumulate(np.where(held, -1, lengths[:-1]))
            first = np.maximum(0, lengths * size - window) // size if window else 0
            valid &= last_miss < first
        return int(np.flatnonzero(valid)[-1])  # nothing is always valid

    def inside(self, parent: bytes, ids: bytes) -> tuple[Entry, int] | None:
        """The entry in all tables that shares most of ``ids``, less than a block's worth, and how many slots."""
        for entry in self.cache.near(parent, ids):
            if NONE not in entry.blocks:
                shared = shared_ids(entry.ids, ids)
                return (entry, shared) if shared else None
        return None

    def top(self, count: int) -> Iterator[Entry]:
        """Entries with most hits, of those with equally many the longest; none whose continuation was named."""
        entries = {id(e): e for owner in self.owner for e in owner if e is not None}
        named: set[int] = set()
        for entry in sorted(entries.values(), key=lambda e: (-e.uses, -e.position)):
            if count and id(entry) not in named:
                count -= 1
                yield entry
                above: Entry | None = entry
                while above is not None and above.uses == entry.uses:
                    named.add(id(above))
                    above = above.parent
