"""The radix cache shares inside a block too: two sequences that part in the middle of a block share its beginning.

It does not know how the common slots are copied. Chained keys lead to a node of the tree, a sorted list of its
children leads on: whoever shares most with given ids is a neighbour of the place where they would stand.
"""

from bisect import bisect_left
from collections.abc import Sequence
from typing import ClassVar

from antiphon.actors.cache import Entry, common
from antiphon.plugins.caches.hash import Chained
from antiphon.runtime.plugin import Options, Site

REACH = 4  # neighbours looked at on each side: the nearest may lack the block of a window


class Radix(Chained[Options]):
    """Shares slots, from the ends of finished sequences too."""

    ends: ClassVar[bool] = True

    def __init__(self, options: Options, site: Site):
        super().__init__(options, site)
        self.children: dict[bytes, tuple[list[bytes], list[Entry]]] = {}  # parent's key -> sorted ids, their entries

    def near(self, parent: bytes, ids: bytes) -> Sequence[Entry]:
        """Neighbours in the order of their ids, those that share most first."""
        if parent not in self.children:
            return ()
        names, entries = self.children[parent]
        at = bisect_left(names, ids)
        around = range(max(0, at - REACH), min(len(names), at + REACH))
        shared = {i: common(names[i], ids) for i in around}
        return [entries[i] for i in sorted(around, key=lambda i: -shared[i]) if shared[i]]

    def insert(self, entry: Entry) -> None:
        """Take in an entry, and make it a child."""
        super().insert(entry)
        names, entries = self.children.setdefault(entry.parent_key, ([], []))
        at = bisect_left(names, entry.ids)
        names.insert(at, entry.ids)
        entries.insert(at, entry)

    def remove(self, entry: Entry) -> None:
        """The entry has lost its last block."""
        super().remove(entry)
        names, entries = self.children[entry.parent_key]
        at = bisect_left(names, entry.ids)
        del names[at], entries[at]
        if not names:
            del self.children[entry.parent_key]
