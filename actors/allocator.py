"""The allocator owns block tables, reference counts and holds of the KV pools.

It does not know tensors or devices; it hands out numbers of blocks.
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from antiphon.actors.columns import pack, unpack
from antiphon.actors.ledger import Hold, Ledger, LedgerError
from antiphon.actors.model import Facts, KVGroup
from antiphon.actors.protocol import (
    Close,
    Commit,
    Configure,
    Configured,
    Fork,
    Inspect,
    Open,
    Report,
    Reserve,
    Reserved,
)
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.plugin import O, Options, Plugin
from antiphon.runtime.quantities import size

MOST_BLOCKS = 1 << 17  # per table, unless ``blocks`` asks for more: a tiny model would fill the memory with bookkeeping


class Cache(Plugin[O]):
    """Contract of a ``cache``: finds blocks that already hold the beginning of a sequence."""

    kind: ClassVar[str] = "cache"

    def match(self, tenant: str, ids: Sequence[int]) -> list[list[int]]:
        """Blocks per table that hold the first tokens of ``ids``; empty lists: nothing is cached."""
        raise NotImplementedError


class AllocatorOptions(Options, frozen=True):
    """``blocks`` (per table) wins over ``memory``, the bytes that all KV pools may take together."""

    block_size: Annotated[int, msgspec.Meta(ge=1)] = 16  # tokens
    blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    memory: str = "2GiB"


class Allocator(Actor[AllocatorOptions]):
    """Grants slots to sequences and takes them back."""

    kind = "allocator"
    plugs = ("cache",)

    def __init__(self, options: AllocatorOptions, site: ActorSite):
        super().__init__(options, site)
        self.cache: Cache[Any] = site.plugin("cache")
        self.ledger = Ledger(())
        self.lengths: dict[int, int] = {}  # sequence -> valid KV slots
        self.hits: dict[int, int] = {}  # newly opened sequence -> slots found in the cache
        self.changes: list[int] = []  # of shared blocks, told with the next Reserved

    def facts(self) -> dict[str, Any]:
        """The ledger's sums and the memory taken but not used."""
        audit = self.ledger.audit()
        granted = sum(len(h.blocks[0]) for h in self.ledger.holds.values()) * self.options.block_size
        used = sum(self.lengths.get(s, 0) for s in self.ledger.holds)
        return {**audit._asdict(), "holds": len(self.ledger.holds), "granted_slots": granted, "used_slots": used}

    def on_configure(self, message: Configure) -> Configured:
        """Lay out the pools for a model's groups."""
        options = self.options
        tables = tables_of(message.facts.groups)
        block_bytes = sum(g.slot_bytes() for g in message.facts.groups) * options.block_size
        count = options.blocks or min(MOST_BLOCKS, size(options.memory) // block_bytes)
        if count < 1:
            raise ValueError(f"memory {options.memory!r} holds no KV block of {block_bytes} bytes")
        self.ledger = Ledger(tuple(count for _ in tables))
        return Configured(options.block_size, tuple(count for _ in tables), tables)

    def on_open(self, message: Open) -> None:
        """Begin a sequence's hold with the blocks that the prefix cache has."""
        self.ledger.open(message.sequence, Hold(message.request.hex(), "sequence", len(self.ledger.total)))
        found = self.cache.match(message.tenant, unpack(message.ids).tolist())
        for table, blocks in enumerate(found):
            for index, block in enumerate(blocks):
                self.ledger.share(message.sequence, table, block)
                self.changes += (message.sequence, table, index, block)
        self.lengths[message.sequence] = self.hits[message.sequence] = (
            len(found[0]) * self.options.block_size if found else 0)

    def on_reserve(self, message: Reserve) -> Reserved:
        """Grant what is needed and, while there is plenty, what is wanted."""
        size, ledger = self.options.block_size, self.ledger
        plenty = min(ledger.total) // 8
        hits, granted, short = [], [], []
        changes, self.changes = self.changes, []
        columns = (unpack(message.sequences).tolist(), unpack(message.need).tolist(), unpack(message.want).tolist())
        for sequence, need, want in zip(*columns, strict=True):
            hold = ledger.holds.get(sequence)
            if hold is None:
                raise LedgerError(f"Reserve for sequence {sequence}, which is not open")
            hits.append(self.hits.pop(sequence, 0))
            have = len(hold.blocks[0])
            needed, wanted = -(-need // size), -(-want // size)
            if needed - have > ledger.available():
                short.append(sequence)
            else:
                count = max(have, wanted if ledger.available() - (wanted - have) > plenty else needed)
                for table, index, block in ledger.take(sequence, count):
                    changes += (sequence, table, index, block)
            granted.append(len(hold.blocks[0]) * size)
        return Reserved(pack(hits), pack(granted), pack(changes), b"", pack(short))

    def on_commit(self, message: Commit) -> None:
        """Note how many slots are valid."""
        for sequence, length in zip(unpack(message.sequences).tolist(), unpack(message.lengths).tolist(), strict=True):
            if sequence in self.lengths:
                self.lengths[sequence] = length

    def on_fork(self, message: Fork) -> None:
        """Share the source's full blocks; the fork's last, partly filled block is its own once it writes."""
        source = self.ledger.holds[message.source]
        self.ledger.open(message.sequence, Hold(source.owner, "fork", len(self.ledger.total)))
        full = self.lengths[message.source] // self.options.block_size
        for table, blocks in enumerate(source.blocks):
            for index, block in enumerate(blocks[:full]):
                self.ledger.share(message.sequence, table, block)
                self.changes += (message.sequence, table, index, block)
        self.lengths[message.sequence] = self.hits[message.sequence] = full * self.options.block_size

    def on_close(self, message: Close) -> None:
        """Take a sequence's blocks back; with none left the ledger must be whole."""
        for sequence in unpack(message.sequences).tolist():
            self.ledger.close(sequence)
            self.lengths.pop(sequence, None)
            self.hits.pop(sequence, None)
        if not self.ledger.holds and not self.ledger.whole():
            raise LedgerError("; ".join(self.ledger.audit().faults))

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())


def tables_of(groups: tuple[KVGroup, ...]) -> tuple[tuple[KVGroup, ...], ...]:
    """Groups by block table: those that keep the whole context share the first, each window group has its own."""
    whole = tuple(g for g in groups if not g.window)
    return (*((whole,) if whole else ()), *((g,) for g in groups if g.window))


__all__ = ["Allocator", "AllocatorOptions", "Cache", "Facts", "tables_of"]
