"""Least recently used: the block that was let go longest ago goes first.

It does not know what a block would cost to compute again.
"""

from collections import OrderedDict

from antiphon.actors.cache import Entry, Eviction
from antiphon.runtime.plugin import Options, Site


class Lru(Eviction[Options]):
    """In the order of letting go. A sequence lets go of its last block first, so it is the oldest."""

    def __init__(self, options: Options, site: Site):
        super().__init__(options, site)
        self.idle: dict[int, OrderedDict[int, None]] = {}  # table -> blocks, oldest first; taken from the front in O(1)

    def add(self, table: int, block: int, entry: Entry) -> None:
        """The block may go from now on."""
        self.idle.setdefault(table, OrderedDict())[block] = None

    def discard(self, table: int, block: int) -> None:
        """The block may not go."""
        if table in self.idle:
            self.idle[table].pop(block, None)

    def pick(self, table: int) -> int | None:
        """The oldest."""
        idle = self.idle.get(table)
        return idle.popitem(last=False)[0] if idle else None
