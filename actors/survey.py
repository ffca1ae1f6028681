"""What an operator sees of the KV memory: pools, waste, prefixes and pins.

It changes nothing, and tells no salts and no ids.
"""

import time

from antiphon.actors.ledger import HOLE
from antiphon.actors.prefixes import Prefixes
from antiphon.actors.protocol import Pool, Prefix, Surveyed


def unused(prefixes: Prefixes) -> list[int]:
    """Slots per table that active blocks have and no sequence can read: granted ahead, or behind a window."""
    waste = []
    for table, window in enumerate(prefixes.index.windows):
        count = 0
        for sequence, hold in prefixes.ledger.holds.items():
            if sequence < 0:
                continue
            places, length = hold.blocks[table], prefixes.progress.length(sequence)
            count += max(0, len(places) * prefixes.size - length)
            if window and length > window:
                held = sum(block != HOLE for block in places[:-(-length // prefixes.size)])
                count += max(0, held * prefixes.size - (-length % prefixes.size) - window)
        waste.append(count)
    return waste


def survey(prefixes: Prefixes, groups: tuple[tuple[str, ...], ...], counters: dict[str, int], top: int) -> Surveyed:
    """Plain data for ``antiphon cache``."""
    audit, waste, now = prefixes.ledger.audit(), unused(prefixes), time.monotonic()
    pools = tuple(
        Pool(names, audit.total[t], audit.free[t], audit.active[t], audit.cached[t], audit.transfer[t],
             audit.quarantined[t], waste[t]) for t, names in enumerate(groups))
    found = tuple(Prefix(e.key.hex()[:16], e.position + len(e.ids) // 4, e.uses, now - e.used)
                  for e in prefixes.index.top(top))
    pins = {-key: f"{hold.owner}: {sum(map(len, hold.blocks))} blocks, {(hold.deadline or now) - now:.0f} s left"
            for key, hold in prefixes.ledger.holds.items() if hold.reason == "pin"}
    return Surveyed(prefixes.size, pools, counters, found, pins)
