"""The ``ram`` tier keeps records in this process's memory, the least recently used leave first.

It does not survive the process.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Literal

from antiphon.actors.tier import Record, Tier, TierFull, TierOptions, Usage
from antiphon.runtime.plugin import Site
from antiphon.runtime.quantities import Bytes

OVERHEAD = 256  # bytes a record takes beside its own: two bytes objects and a place in an ordered dictionary


class RamOptions(TierOptions, frozen=True, kw_only=True):
    """``size`` bounds what records and their bookkeeping take."""

    size: Bytes
    write: Literal["back", "through"] = "back"

    def __post_init__(self) -> None:
        if not self.size:
            raise ValueError("size is 0, so nothing could be kept")


class Ram(Tier[RamOptions]):
    """Bounded memory with least-recently-used eviction; what it evicts it hands over."""

    def __init__(self, options: RamOptions, site: Site):
        super().__init__(options, site)
        self.records: OrderedDict[bytes, bytes] = OrderedDict()  # the least recently used first
        self.bytes = 0

    def open(self) -> None:
        """Memory is always there."""

    def put(self, records: Sequence[Record]) -> list[tuple[bytes, bytes | None]]:
        """Keep records, in the place of the least recently used ones."""
        if too_large := [len(record) for _, record in records if len(record) + OVERHEAD > self.options.size]:
            raise TierFull(f"a record of {max(too_large)} bytes is larger than size, {self.options.size}")
        evicted: list[tuple[bytes, bytes | None]] = []
        for key, record in records:
            self.drop([key])
            while self.bytes + len(record) + OVERHEAD > self.options.size:
                oldest = self.records.popitem(last=False)
                self.bytes -= len(oldest[1]) + OVERHEAD
                evicted.append(oldest)
            self.records[key] = record
            self.bytes += len(record) + OVERHEAD
        return evicted

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Records, which are now the most recently used."""
        found = [self.records.get(key) for key in keys]
        for key, record in zip(keys, found, strict=True):
            if record is not None:
                self.records.move_to_end(key)
        return found

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether they are there."""
        return [key in self.records for key in keys]

    def drop(self, keys: Sequence[bytes]) -> None:
        """Forget."""
        for key in keys:
            if (record := self.records.pop(key, None)) is not None:
                self.bytes -= len(record) + OVERHEAD

    def usage(self) -> Usage:
        """Bytes with their overhead."""
        return Usage(self.bytes, len(self.records), self.options.size)

    def close(self) -> None:
        """Give the memory back."""
        self.records.clear()
        self.bytes = 0
