"""Greedy-dual with frequency: what is cheap to compute again, seldom used and long unused goes first.

It does not know time: its clock is the worth of what went last (Cherkasova, "Improving WWW proxies performance with
greedy-dual-size-frequency caching policy", 1998; all blocks of a table are of one size).
"""

import heapq
import itertools

from antiphon.actors.cache import Entry, Eviction
from antiphon.runtime.plugin import Options, Site


class Cost(Eviction[Options]):
    """A heap per table of (worth, number, block); an item whose number is no longer the block's is passed over."""

    def __init__(self, options: Options, site: Site):
        super().__init__(options, site)
        self.heaps: dict[int, list[tuple[float, int, int]]] = {}
        self.current: dict[int, dict[int, int]] = {}  # table -> block -> number of its valid item
        self.clock: dict[int, float] = {}
        self.number = itertools.count()

    def add(self, table: int, block: int, entry: Entry) -> None:
        """Worth: the clock at this moment + uses * cost."""
        heap, current = self.heaps.setdefault(table, []), self.current.setdefault(table, {})
        current[block] = number = next(self.number)
        heapq.heappush(heap, (self.clock.get(table, 0.0) + (1 + entry.uses) * entry.cost, number, block))
        if len(heap) > 64 + 2 * len(current):  # items passed over must not fill the memory
            heap[:] = [item for item in heap if current.get(item[2]) == item[1]]
            heapq.heapify(heap)

    def discard(self, table: int, block: int) -> None:
        """The block may not go."""
        self.current.get(table, {}).pop(block, None)

    def pick(self, table: int) -> int | None:
        """The one worth least; the clock moves on to its worth, which ages all others."""
        heap, current = self.heaps.get(table, []), self.current.get(table, {})
        while heap:
            worth, number, block = heapq.heappop(heap)
            if current.get(block) == number:
                del current[block]
                self.clock[table] = worth
                return block
        return None
