"""The hash cache finds whole blocks by their chained keys, as vLLM's automatic prefix caching does.

It does not know which blocks nearly match.
"""

from typing import ClassVar

from antiphon.actors.cache import Cache, Entry
from antiphon.runtime.plugin import O, Options, Site


class Chained(Cache[O]):
    """A dictionary from key to entry."""

    gives: ClassVar[frozenset[str]] = frozenset({"prefixes"})

    def __init__(self, options: O, site: Site):
        super().__init__(options, site)
        self.entries: dict[bytes, Entry] = {}

    def find(self, key: bytes) -> Entry | None:
        """The entry with this key."""
        return self.entries.get(key)

    def insert(self, entry: Entry) -> None:
        """Take in an entry whose key is not there yet."""
        self.entries[entry.key] = entry

    def remove(self, entry: Entry) -> None:
        """The entry has lost its last block."""
        del self.entries[entry.key]


class Hash(Chained[Options]):
    """Shares whole blocks."""
