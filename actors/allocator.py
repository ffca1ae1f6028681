"""The allocator owns block tables, reference counts and holds of the KV pools, and the index of what they hold.

It does not know tensors or devices; it hands out numbers of blocks and says what is to be moved.
"""

import time
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from antiphon.actors import keys
from antiphon.actors.cache import Cache, Eviction
from antiphon.actors.columns import pack, unpack
from antiphon.actors.contexts import Context
from antiphon.actors.index import Index
from antiphon.actors.ledger import HOLE, Hold, LedgerError
from antiphon.actors.model import Facts, KVGroup
from antiphon.actors.moves import columns, saves
from antiphon.actors.pins import Pins
from antiphon.actors.prefixes import SHORT, WAITS, Prefixes, Tiers
from antiphon.actors.protocol import (
    Arrived,
    Close,
    Commit,
    Configure,
    Configured,
    Find,
    Flush,
    Flushed,
    Fork,
    Found,
    Inspect,
    Mount,
    Mounted,
    Open,
    Pin,
    Pinned,
    Ready,
    Report,
    Reserve,
    Reserved,
    Store,
    Stored,
    Survey,
    Surveyed,
    Unpin,
    Unpinned,
)
from antiphon.actors.survey import sums, survey
from antiphon.actors.waits import Waits
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.plugin import Options
from antiphon.runtime.quantities import Seconds, size

MOST_BLOCKS = 1 << 17  # per table, unless ``blocks`` asks for more: a tiny model would fill the memory with bookkeeping
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class AllocatorOptions(Options, frozen=True):
    """``blocks`` (per table) wins over ``memory``, the bytes that all KV pools may take together."""

    block_size: Annotated[int, msgspec.Meta(ge=1)] = 16  # tokens
    blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    memory: str = "2GiB"
    preemption: Literal["auto", "recompute", "swap"] = "auto"  # what becomes of a preempted sequence's blocks
    bring: Literal["auto", "always", "never"] = "auto"  # what tiers hold: auto, if that is quicker than computing it
    secret: str = ""  # file of the deployment's secret, which salts tenants' keys; empty: in Antiphon's home
    pin_share: Share = 0.5  # of a table's blocks that pins may keep together
    find_deadline: Seconds = 2.0  # how long a sequence waits for tiers to say what they hold
    transfer_deadline: Seconds = 30.0  # after which a block on its way is quarantined and its sequence goes on
    wait_deadline: Seconds = 60.0  # how long a sequence waits for another one to compute what both need


class Allocator(Actor[AllocatorOptions]):
    """Grants slots to sequences and takes them back."""

    kind = "allocator"
    plugs = ("cache", "eviction")
    defaults: ClassVar[dict[str, str]] = {"eviction": "lru"}
    uses = ("pager",)

    def __init__(self, options: AllocatorOptions, site: ActorSite):
        super().__init__(options, site)
        self.cache: Cache[Any] = site.plugin("cache")
        self.eviction: Eviction[Any] = site.plugin("eviction")
        self.contexts: dict[int, Context] = {}
        self.waits = Waits()
        self.roots: dict[str, bytes] = {}  # tenant -> key before a first block
        self.secret = b""  # empty: nothing is kept, or the pools are not laid out
        self.saves = 0
        self.pools = Configured(options.block_size, (0,), ((),))
        self._lay_out((0,), (0,), (0,))

    @classmethod
    def needing(cls, options: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        """Swapping needs an index that keeps blocks, and a place to put them."""
        return {"preemption": ("prefixes", "tiers")} if options.get("preemption") == "swap" else {}

    def _lay_out(self, blocks: tuple[int, ...], windows: tuple[int, ...], table_bytes: tuple[int, ...]) -> None:
        options = self.options
        self.index = Index(self.cache, self.eviction, windows, blocks)
        self.ledger = self.index.ledger
        self.prefixes = Prefixes(self.index, options.block_size, table_bytes, options.transfer_deadline,
                                 options.wait_deadline, options.bring)
        self.progress, self.transfers = self.prefixes.progress, self.prefixes.transfers
        self.pins = Pins(self.index, options.block_size, options.pin_share)

    async def start(self) -> None:
        """Watch deadlines."""
        self.spawn(self.waits.watch(self.expire), "deadlines")

    def facts(self) -> dict[str, Any]:
        """The ledger's sums, the memory taken but not used, and what the cache has done."""
        return {**sums(self.prefixes), "waiting": len(self.waits.waiting), **self.counters()}

    def counters(self) -> dict[str, int]:
        """What has happened so far."""
        return {**self.prefixes.counters, **self.transfers.counters, "evicted": self.index.evictions,
                "saves": self.saves, "claims": len(self.prefixes.claims)}

    # ---- start

    def on_configure(self, message: Configure) -> Configured:
        """Lay out the pools for a model's groups, and tell the pager of them."""
        options = self.options
        tables = tables_of(message.facts.groups)
        block_bytes = sum(g.slot_bytes() for g in message.facts.groups) * options.block_size
        count = options.blocks or min(MOST_BLOCKS, size(options.memory) // block_bytes)
        if count < 1:
            raise ValueError(f"memory {options.memory!r} holds no KV block of {block_bytes} bytes")
        moved = tuple(sum(g.slot_bytes() for g in t if g.owner == "target") * options.block_size for t in tables)
        self._lay_out(tuple(count for _ in tables), tuple(t[0].window for t in tables), moved)
        self.model, self.roots = message.facts, {}
        self.pools = Configured(options.block_size, tuple(count for _ in tables), tables, shares=self.cache.keeps)
        if self.cache.keeps:
            self.secret = keys.secret_at(options.secret)
            self.tell(self.peer("pager"), Mount(self.model, self.pools))
        return self.pools

    def on_mounted(self, message: Mounted) -> None:
        """The pager says whether it has tiers."""
        self.prefixes.tiers = Tiers(message.through, message.back) if message.holds else None

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        """A pager that is back is told of the pools; nobody waits for one that is gone."""
        if instance != self.site.edges.get("pager"):
            return
        if up and self.secret:
            self.tell(instance, Mount(self.model, self.pools))
        elif not up:
            self.prefixes.tiers = None
            self.transfers.hurry()
            for context in self.contexts.values():
                context.until *= not context.finding
            self.expire(time.monotonic())

    # ---- sequences

    def on_open(self, message: Open) -> None:
        """Begin a sequence; what it begins with is chosen when it first asks for slots."""
        cached = self.cache.keeps and message.sampling.cache
        root = self._root(message.tenant) if cached else b""
        context = Context(message.sequence, message.request.hex(), message.tenant, root, message.ids,
                          self.prefixes.block_bytes, cached)
        source, shared = self.contexts.get(message.source), 4 * message.shared
        if source is not None and source.tenant == message.tenant and source.ids[:shared] == message.ids[:shared]:
            self._open_beside(context, source, min(message.shared, self.progress.length(message.source)))
        else:
            self._open(context)

    def _open(self, context: Context) -> None:
        sequence, size = context.sequence, self.options.block_size
        self.ledger.open(sequence, Hold(context.owner, "sequence", len(self.ledger.total)))
        self.contexts[sequence] = context
        tail = context.ids[context.total // size * size * 4:]
        self.progress.open(sequence, 0, tail, context.total)
        cap = min(len(context.keys), (context.total - 1) // size)
        if self.prefixes.brings and not context.forked and context.cached and cap > 0:
            entries = self.index.entries(context.keys[:cap], context.ids, self.prefixes.block_bytes, gaps=False)
            if self.index.longest(self.index.present(entries, cap), size) < cap:
                context.finding, context.until = True, time.monotonic() + self.options.find_deadline
                self.waits.arm(context.until)
                self.tell(self.peer("pager"), Find(sequence, b"".join(context.keys[:cap])))

    def _root(self, tenant: str) -> bytes:
        if tenant not in self.roots:
            if len(self.roots) >= 1024:  # as many as are cheap to keep; they can be made again
                self.roots.clear()
            self.roots[tenant] = keys.root(self.model.digest, "", keys.salt(self.secret, tenant))
        return self.roots[tenant]

    def on_reserve(self, message: Reserve) -> Reserved:
        """Grant what is needed and, while there is plenty, what is wanted; begin those that were opened."""
        prefixes, now = self.prefixes, time.monotonic()
        hits, granted, short, waits = [], [], list[int](), list[int]()
        if message.row_s:
            prefixes.row_s, prefixes.row_slot_s = message.row_s, message.row_slot_s
            self.index.growth = message.row_slot_s / message.row_s
        asked = (unpack(message.sequences).tolist(), unpack(message.need).tolist(), unpack(message.want).tolist())
        for sequence, need, want in zip(*asked, strict=True):
            context = self.contexts.get(sequence)
            if context is None:
                raise LedgerError(f"Reserve for sequence {sequence}, which is not open")
            if context.begun:
                hit = 0 if prefixes.grant(sequence, need, want) else SHORT
            else:
                hit = prefixes.begin(context, need, want, now)
            if hit < 0:
                (short if hit == SHORT else waits).append(sequence)
            if hit == WAITS:
                self.waits.add(context, self.sender)
            hits.append(max(hit, 0))
            granted.append(len(self.ledger.holds[sequence].blocks[0]) * prefixes.size if context.begun else 0)
        prefixes.end_turn()
        moves, names = self._moves()
        changes, prefixes.changes = [number for four in prefixes.changes.values() for number in four], {}
        return Reserved(pack(hits), pack(granted), pack(changes), moves, pack(short), pack(waits), names,
                        self.ledger.available())

    def _moves(self) -> tuple[bytes, bytes]:
        """Moves of this turn; first of all what gave way is saved, before anything is written over it."""
        moves, evicted = self.prefixes.moves, self.index.evicted
        self.prefixes.moves, self.index.evicted = [], []
        if self.prefixes.tiers is not None and evicted:
            saved = saves(evicted, self.prefixes.block_bytes, self.prefixes.tiers.back)
            self.saves += len(saved)
            moves = saved + moves
        return columns(moves)

    def on_commit(self, message: Commit) -> None:
        """Note what is valid. Few sequences fill a block in a step: only those are looked at one by one."""
        due = self.progress.commit(message)
        ready = [r for sequence in due for r in self.prefixes.advance(self.contexts[sequence])]
        if self.prefixes.full:
            self._store()
        if ready:
            self._ready(ready)

    def _store(self) -> None:
        """Write full blocks through, while few are under way; the others are saved when they give way."""
        full, self.prefixes.full = self.prefixes.full, []
        if self.prefixes.tiers is None or not self.prefixes.tiers.through:
            return
        deadline = time.monotonic() + self.options.transfer_deadline
        if moves := self.transfers.store(full, deadline):
            self.waits.arm(deadline)
            self.tell(self.peer("pager"), Store(*columns(moves)))

    def on_fork(self, message: Fork) -> None:
        """Share the source's blocks, the last, partly filled one until the fork copies it."""
        source = self.contexts.get(message.source)
        if source is None:
            raise LedgerError(f"Fork of sequence {message.source}, which is not open")
        cached = source.cached and bool(message.ids)
        context = Context(message.sequence, source.owner, source.tenant, source.root, message.ids,
                          self.prefixes.block_bytes, cached)
        valid = self.progress.length(message.source)
        self._open_beside(context, source, valid if message.length < 0 else min(message.length, valid))

    def _open_beside(self, context: Context, source: Context, slots: int) -> None:
        """Begin a sequence with the first, valid ``slots`` of another one."""
        size, places = self.options.block_size, self.ledger.holds[source.sequence].blocks
        count = -(-slots // size)
        if any(HOLE in places[t][self.index.needed(t, slots, size):count] for t in range(len(places))):
            slots = 0  # the source's window has moved on: the fork begins as any sequence does
        context.forked, context.hit, context.published = bool(slots), slots, slots // size
        self._open(context)
        if slots:
            for table, blocks in enumerate(places):
                first = self.index.needed(table, slots, size)
                self.ledger.holds[context.sequence].blocks[table] += [HOLE] * first
                for block in blocks[first:count]:
                    self.ledger.share(context.sequence, table, block)
            self.progress.set_length(context.sequence, slots)

    def on_close(self, message: Close) -> None:
        """Take sequences' blocks back; with none left the ledger must be whole."""
        for sequence in unpack(message.sequences).tolist():
            context = self.contexts.pop(sequence, None)
            if context is None:
                continue  # Close is idempotent
            self.waits.discard(sequence)
            self.prefixes.changes.pop(sequence, None)
            if message.reason == "preempted" and not self._keeps(self.progress.length(sequence)):
                self.prefixes.forget(sequence)
            elif context.begun and context.cached and self.cache.ends:
                self.prefixes.keep_end(context)
            self.ledger.close(sequence)
            self.progress.close(sequence)
            self._ready(self.prefixes.claims.drop(sequence))
        if not self.ledger.holds and not self.ledger.whole():
            raise LedgerError("; ".join(self.ledger.audit().faults))

    def _keeps(self, length: int) -> bool:
        """Whether a preempted sequence's blocks are worth keeping: to bring them back may be quicker."""
        prefixes = self.prefixes
        if self.options.preemption != "auto":
            return self.options.preemption == "swap"
        if prefixes.tiers is None or not prefixes.tiers.rate or not prefixes.row_s:
            return True
        moved = sum(prefixes.table_bytes) * length / prefixes.size
        return prefixes.tiers.latency + moved / prefixes.tiers.rate < prefixes.compute_s(0, length)

    # ---- tiers

    def on_found(self, message: Found) -> None:
        """Tiers hold some of a sequence's blocks."""
        if self.prefixes.tiers is not None:
            self.prefixes.tiers = self.prefixes.tiers._replace(latency=message.latency, rate=message.rate)
        context = self.contexts.get(message.sequence)
        if context is None or not context.finding:
            return  # closed, or it has waited long enough
        context.finding = False
        present = unpack(message.present).reshape(len(self.ledger.total), -1).astype(bool)
        if present.any():
            context.present, context.latency, context.rate = list(present), message.latency, message.rate
        self._ready([message.sequence])

    def on_arrived(self, message: Arrived) -> None:
        """Loads have ended: blocks that came are in the index, and who waited for them is told."""
        ready: list[int] = []
        for table, block, good in zip(*map(unpack, (message.tables, message.blocks, message.good)), strict=True):
            load = self.transfers.arrived(int(table), int(block), bool(good))
            if load is None:
                self.log.warning("a block arrived that nobody awaits", table=int(table), block=int(block))
                continue
            context = self.contexts.get(load.sequence)
            if context is not None and context.loading:
                context.loading -= 1
                if not context.loading:
                    ready += [load.sequence, *self.prefixes.settle(context)]
        self._ready(ready)

    def on_stored(self, message: Stored) -> None:
        """Blocks have been written through."""
        for table, block in zip(unpack(message.tables), unpack(message.blocks), strict=True):
            self.transfers.stored(int(table), int(block))

    def _ready(self, sequences: Iterable[int]) -> None:
        for asker, ready in self.waits.take(sequences).items():
            self.tell(asker, Ready(pack(ready)))

    # ---- deadlines

    def expire(self, now: float) -> None:
        """End waits, pins and transfers that are past their deadline."""
        ready = list(self.transfers.expire(now))
        for sequence in ready:
            if (context := self.contexts.get(sequence)) is not None:
                context.loading = 0
        for context in self.waits.late(now):
            # Who waited for another sequence computes for itself; who waited for a look-up goes on without tiers.
            context.resolute = context.resolute or not context.finding
            context.finding = False
            ready.append(context.sequence)
        self._ready(ready)
        self.pins.expire(now)
        self.waits.rearm(hold.deadline for hold in self.ledger.holds.values())

    # ---- operation

    def on_pin(self, message: Pin) -> Pinned:
        """Keep what there is of a prefix."""
        if not self.cache.keeps:
            return Pinned(0, 0, "this allocator keeps no prefixes: choose a cache such as 'hash'")
        deadline = time.monotonic() + message.seconds
        number, slots, problem = self.pins.pin(message.owner, self._root(message.tenant), message.ids, deadline)
        self.waits.arm(deadline)
        return Pinned(number, slots, problem)

    def on_unpin(self, message: Unpin) -> Unpinned:
        """Let a pin go."""
        return Unpinned(self.pins.unpin(message.pin))

    def on_flush(self, message: Flush) -> Flushed:
        """Forget what nobody holds."""
        return Flushed(pack(self.index.flush()))

    def on_survey(self, message: Survey) -> Surveyed:
        """What an operator wants to see."""
        return survey(self.prefixes, self.pools, self.counters(), message.top)

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())


def tables_of(groups: tuple[KVGroup, ...]) -> tuple[tuple[KVGroup, ...], ...]:
    """Groups by block table: those that keep the whole context share the first, each window group has its own."""
    whole = tuple(g for g in groups if not g.window)
    return (*((whole,) if whole else ()), *((g,) for g in groups if g.window))


__all__ = ["Allocator", "AllocatorOptions", "Cache", "Facts", "tables_of"]
