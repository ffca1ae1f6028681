"""Contracts of the allocator's plugins: a ``cache`` finds blocks by what they hold, an ``eviction`` weighs them.

It does not know sequences, holds or devices.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from antiphon.runtime.plugin import O, Plugin

NONE = -1  # in ``Entry.blocks``: the table has no block for the entry


class Entry:
    """What is known of one block of tokens: its key, its ids, and the block that holds it in each table."""

    __slots__ = ("blocks", "children", "cost", "ids", "key", "parent", "parent_key", "position", "stored", "used",
                 "uses")

    def __init__(self, key: bytes, parent_key: bytes, ids: bytes, position: int, tables: int, cost: float = 1.0):
        self.key = key
        self.parent_key = parent_key
        self.ids = ids  # packed int32, less than a block's worth for the end of a sequence
        self.position = position  # slots before the block
        self.blocks = [NONE] * tables
        self.parent: Entry | None = None  # whose ``children`` counts this one
        self.children = 0  # entries that go on from this one and have a block in table 0
        self.cost = cost  # of computing the block anew, in seconds or relative
        self.uses = 0  # hits
        self.used = 0.0  # monotonic second of the last hit, or of the beginning
        self.stored = 0  # bit per table: a tier has it already

    def __repr__(self) -> str:
        return f"Entry({self.key[:4].hex()}, slot {self.position}, blocks {self.blocks}, {self.uses} uses)"


class Cache(Plugin[O]):
    """Contract of a ``cache``: an index of entries. ``keeps`` false: nothing is ever put in.

    The allocator compares an entry's ids with those it looked for, so a cache may err but not lie.
    """

    kind: ClassVar[str] = "cache"
    keeps: ClassVar[bool] = True
    ends: ClassVar[bool] = False  # the partly filled last blocks of sequences are worth keeping too

    def find(self, key: bytes) -> Entry | None:
        """The entry with this key."""
        return None

    def near(self, parent: bytes, ids: bytes) -> Sequence[Entry]:
        """Entries that go on from ``parent`` and share the first of ``ids``, those that share most first.

        A cache that shares whole blocks only leaves it out.
        """
        return ()

    def insert(self, entry: Entry) -> None:
        """Take in an entry whose key is not there yet."""
        raise NotImplementedError

    def remove(self, entry: Entry) -> None:
        """The entry has lost its last block."""
        raise NotImplementedError


class Eviction(Plugin[O]):
    """Contract of an ``eviction``: what a block that nobody holds is worth; the one worth least goes first.

    Of equals the one that was let go first goes first. In the table of the whole context a prefix goes from its end,
    whatever its blocks are worth.
    """

    kind: ClassVar[str] = "eviction"

    def worth(self, table: int, entry: Entry) -> float:
        """Asked once, when nobody holds the entry's block in this table any more."""
        raise NotImplementedError

    def gave_way(self, table: int, worth: float) -> None:
        """A block worth this much was given up."""


def shared_ids(one: bytes, other: bytes) -> int:
    """How many packed ids two columns have in common at their beginning."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most // 4
    low, high = 0, most  # bytes known to agree, bytes known to differ somewhere
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low // 4


AnyCache = Cache[Any]
AnyEviction = Eviction[Any]
