"""Greedy-dual with frequency: what is cheap to compute again, seldom used and long unused goes first.

It does not know time: its clock is the worth of what went last (Cherkasova, "Improving WWW proxies performance with
greedy-dual-size-frequency caching policy", 1998; all blocks of a table are of one size).
"""

from antiphon.actors.cache import Entry, Eviction
from antiphon.runtime.plugin import Options, Site


class Cost(Eviction[Options]):
    """Blocks let go later count from a later clock, which ages all others."""

    def __init__(self, options: Options, site: Site):
        super().__init__(options, site)
        self.clock: dict[int, float] = {}  # by table

    def worth(self, table: int, entry: Entry) -> float:
        """The clock at this moment + uses * cost."""
        return self.clock.get(table, 0.0) + (1 + entry.uses) * entry.cost

    def gave_way(self, table: int, worth: float) -> None:
        """The clock moves on to its worth. A prefix goes from its end, so the end may have been worth more."""
        self.clock[table] = max(worth, self.clock.get(table, 0.0))
