"""Least recently used: the block that was let go longest ago goes first.

It does not know what a block would cost to compute again.
"""

from antiphon.actors.cache import Entry, Eviction
from antiphon.runtime.plugin import Options


class Lru(Eviction[Options]):
    """All blocks are worth the same, so they go in the order in which they were let go."""

    def worth(self, table: int, entry: Entry) -> float:
        """Nothing."""
        return 0.0
