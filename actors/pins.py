"""Pins: prefixes that an operator or a caller has kept on the device for some time.

It does not know who may ask for one.
"""

from antiphon.actors import keys
from antiphon.actors.index import Index
from antiphon.actors.ledger import Hold

PIN = "pin"  # reason of a hold


class Pins:
    """Holds with a deadline; together they keep at most a ``share`` of each table's blocks."""

    def __init__(self, index: Index, block_size: int, share: float):
        self.index, self.ledger, self.size, self.share = index, index.ledger, block_size, share

    def pin(self, owner: str, root: bytes, ids: bytes, deadline: float) -> tuple[int, int, str]:
        """Keep what is on the device of a prefix until a monotonic second: number, slots, and why there are none."""
        size, index = self.size, self.index
        names = keys.chain(root, ids, 4 * size)
        entries = index.entries(names, ids, 4 * size, gaps=False)
        blocks = index.longest(index.present(entries, len(names)), size)
        if not blocks:
            return 0, 0, "no block of this prefix is on the device: let a request compute it first"
        wanted = [{e.blocks[t] for e in entries[index.needed(t, blocks * size, size):blocks] if e is not None}
                  for t in range(len(index.windows))]
        pinned = [hold.blocks for hold in self.ledger.holds.values() if hold.reason == PIN]
        for table, total in enumerate(self.ledger.total):
            taken = wanted[table].union(*(blocks[table] for blocks in pinned))
            if len(taken) > total * self.share:
                return 0, 0, (f"pins would keep {len(taken)} of {total} blocks, more than the share of "
                              f"{self.share} that the option pin_share allows: unpin another prefix")
        number = self.ledger.number()
        self.ledger.open(number, Hold(owner, PIN, len(self.ledger.total), deadline))
        for table, chosen in enumerate(wanted):
            for block in sorted(chosen):
                self.ledger.share(number, table, block)
        return -number, blocks * size, ""

    def unpin(self, number: int) -> bool:
        """Let a pin go; false: there is none of this number."""
        hold = self.ledger.holds.get(-number)
        if hold is None or hold.reason != PIN:
            return False
        self.ledger.close(-number)
        return True

    def expire(self, now: float) -> None:
        """Let go of those that are past their deadline."""
        late = [key for key, hold in self.ledger.holds.items()
                if hold.reason == PIN and hold.deadline is not None and hold.deadline <= now]
        for key in late:
            self.ledger.close(key)
