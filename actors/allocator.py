"""The allocator owns block tables, reference counts and holds of the KV pools, and the index of what they hold.

It does not know tensors or devices; it hands out numbers of blocks and says what is to be moved.
"""

import asyncio
import time
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from antiphon.actors import keys
from antiphon.actors.cache import Cache, Entry, Eviction
from antiphon.actors.columns import pack, unpack
from antiphon.actors.contexts import Context
from antiphon.actors.index import Index
from antiphon.actors.ledger import HOLE, Hold, LedgerError
from antiphon.actors.model import Facts, KVGroup
from antiphon.actors.prefixes import SHORT, WAITS, Move, Prefixes, Tiers
from antiphon.actors.protocol import (
    SAVE,
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
from antiphon.actors.survey import survey, unused
from antiphon.runtime.actor import Actor, ActorSite
from antiphon.runtime.plugin import Options
from antiphon.runtime.quantities import Seconds, size

MOST_BLOCKS = 1 << 17  # per table, unless ``blocks`` asks for more: a tiny model would fill the memory with bookkeeping
STORING = 8  # one in so many blocks of a table may be held by write-through: the last ones must stay free for progress
PIN = "pin"  # reason of a hold
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class AllocatorOptions(Options, frozen=True):
    """``blocks`` (per table) wins over ``memory``, the bytes that all KV pools may take together."""

    block_size: Annotated[int, msgspec.Meta(ge=1)] = 16  # tokens
    blocks: Annotated[int, msgspec.Meta(ge=0)] = 0
    memory: str = "2GiB"
    preemption: Literal["auto", "recompute", "swap"] = "auto"  # what becomes of a preempted sequence's blocks
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
        self.waiting: dict[int, Context] = {}  # those with an ``asker``
        self.roots: dict[str, bytes] = {}  # tenant -> key before a first block
        self.secret = b""
        self.saves = 0
        self.quickest = float("inf")  # monotonic second of the next deadline
        self.armed = asyncio.Event()
        self.pools = Configured(options.block_size, (0,), ((),))
        self._lay_out((0,), (0,), (0,))

    @classmethod
    def needing(cls, options: dict[str, Any]) -> dict[str, tuple[str, ...]]:
        """Swapping needs an index that keeps blocks, and a place to put them."""
        return {"preemption": ("prefixes", "tiers")} if options.get("preemption") == "swap" else {}

    def _lay_out(self, blocks: tuple[int, ...], windows: tuple[int, ...], table_bytes: tuple[int, ...]) -> None:
        self.index = Index(self.cache, self.eviction, windows, blocks)
        self.ledger = self.index.ledger
        self.prefixes = Prefixes(self.index, self.options.block_size, table_bytes)
        self.prefixes.patience = {"load": self.options.transfer_deadline, "author": self.options.wait_deadline}
        self.progress, self.transfers = self.prefixes.progress, self.prefixes.transfers

    async def start(self) -> None:
        """Watch deadlines."""
        self.spawn(self._deadlines(), "deadlines")

    def facts(self) -> dict[str, Any]:
        """The ledger's sums, the memory taken but not used, and what the cache has done."""
        audit = self.ledger.audit()
        holds = {s: self.ledger.holds[s] for s in self.contexts}
        granted = sum(len(h.blocks[0]) for h in holds.values()) * self.options.block_size
        used = sum(self.progress.length(s) for s in holds)
        return {**audit._asdict(), "holds": len(self.ledger.holds), "granted_slots": granted, "used_slots": used,
                "waste_slots": unused(self.prefixes), "waiting": len(self.waiting), **self.counters()}

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
        self.pools = Configured(options.block_size, tuple(count for _ in tables), tables)
        if self.cache.keeps:
            self.secret = keys.secret_at(options.secret)
            self.tell(self.peer("pager"), Mount(self.model, self.pools))
        return self.pools

    def on_mounted(self, message: Mounted) -> None:
        """The pager says whether it has tiers."""
        self.prefixes.tiers = Tiers(message.through) if message.holds else None

    def on_peer(self, instance: str, kind: str, up: bool) -> None:
        """A pager that is back is told of the pools; nobody waits for one that is gone."""
        if instance != self.site.edges.get("pager") or not self.cache.keeps:
            return
        if up and self.secret:
            self.tell(instance, Mount(self.model, self.pools))
        elif not up:
            self.prefixes.tiers = None
            for hold in self.ledger.holds.values():
                hold.deadline = 0.0 if hold.reason == "transfer" else hold.deadline
            for context in self.contexts.values():
                context.until = 0.0 if context.finding else context.until
            self.expire(time.monotonic())

    # ---- sequences

    def on_open(self, message: Open) -> None:
        """Begin a sequence; what it begins with is chosen when it first asks for slots."""
        cached = self.cache.keeps and message.sampling.cache
        root = self._root(message.tenant) if cached else b""
        block_bytes = self.prefixes.block_bytes
        self._open(Context(message.sequence, message.request.hex(), root, message.ids, block_bytes, cached))

    def _open(self, context: Context) -> None:
        sequence, size = context.sequence, self.options.block_size
        self.ledger.open(sequence, Hold(context.owner, "sequence", len(self.ledger.total)))
        self.contexts[sequence] = context
        tail = context.ids[context.total // size * size * 4:]
        self.progress.open(sequence, 0, tail, context.total)
        cap = min(len(context.keys), (context.total - 1) // size)
        if self.prefixes.tiers is not None and not context.forked and context.cached and cap > 0:
            entries = self.index.entries(context.keys[:cap], context.ids, self.prefixes.block_bytes, gaps=False)
            if self.index.longest(self.index.present(entries, cap), size) < cap:
                context.finding, context.until = True, time.monotonic() + self.options.find_deadline
                self._arm(context.until)
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
        hits, granted = [], []
        short: list[int] = []
        waits: list[int] = []
        if message.row_s:
            prefixes.row_s, prefixes.row_slot_s = message.row_s, message.row_slot_s
            self.index.growth = message.row_slot_s / message.row_s
        columns = (unpack(message.sequences).tolist(), unpack(message.need).tolist(), unpack(message.want).tolist())
        for sequence, need, want in zip(*columns, strict=True):
            context = self.contexts.get(sequence)
            if context is None:
                raise LedgerError(f"Reserve for sequence {sequence}, which is not open")
            if context.begun:
                hit = 0 if prefixes.grant(sequence, need, want) else SHORT
            else:
                hit = prefixes.begin(context, need, want, now)
                self._await(context, self.sender if hit == WAITS else "")
            if hit == SHORT:
                short.append(sequence)
            elif hit == WAITS:
                waits.append(sequence)
            hits.append(max(hit, 0))
            granted.append(len(self.ledger.holds[sequence].blocks[0]) * prefixes.size if context.begun else 0)
        prefixes.end_turn()
        moves, names = self._moves()
        changes = [number for four in prefixes.changes.values() for number in four]
        prefixes.changes = {}
        return Reserved(pack(hits), pack(granted), pack(changes), moves, pack(short), pack(waits), names,
                        self.ledger.available())

    def _await(self, context: Context, asker: str) -> None:
        context.asker = asker
        if asker:
            self.waiting[context.sequence] = context
            self._arm(context.until)
        else:
            self.waiting.pop(context.sequence, None)

    def _moves(self) -> tuple[bytes, bytes]:
        """Moves of this turn as columns and the keys that they name; first of all what gave way is saved."""
        moves, names = self.prefixes.moves, dict[bytes, int]()
        evicted, self.index.evicted, self.prefixes.moves = self.index.evicted, [], []
        if self.prefixes.tiers is not None:
            saves = [Move(SAVE, t, block, -1, e.key) for t, block, e in evicted
                     if not e.stored >> t & 1 and len(e.ids) == self.prefixes.block_bytes]
            self.saves += len(saves)
            moves = saves + moves
        column: list[int] = []
        for move in moves:
            place = names.setdefault(move.key, len(names)) if move.key else move.place
            column += (move.what, move.table, move.block, place)
        return pack(column) if column else b"", b"".join(names)

    def on_commit(self, message: Commit) -> None:
        """Note what is valid. Few sequences fill a block in a step: only those are looked at one by one."""
        ready: list[int] = []
        for sequence in self.progress.commit(message):
            ready += self.prefixes.advance(self.contexts[sequence])
        if self.prefixes.full:
            self._store()
        if ready:
            self._ready(ready)

    def _store(self) -> None:
        """Write full blocks through, while few are under way; the others are saved when they give way."""
        full, self.prefixes.full = self.prefixes.full, []
        if self.prefixes.tiers is None or not self.prefixes.tiers.through:
            return
        room = [total // STORING - self.transfers.storing(t) for t, total in enumerate(self.ledger.total)]
        chosen: list[tuple[int, int, Entry]] = []
        names: dict[bytes, int] = {}
        moves: list[int] = []
        for table, block, entry in full:
            # A block that has left its hold since is cached or gone: it is not worth a hold of its own.
            if room[table] > 0 and not entry.stored >> table & 1 and self.ledger.references[table][block]:
                room[table] -= 1
                chosen.append((table, block, entry))
                moves += (SAVE, table, block, names.setdefault(entry.key, len(names)))
        if chosen:
            deadline = time.monotonic() + self.options.transfer_deadline
            self.transfers.store("write-through", chosen, deadline)
            self._arm(deadline)
            self.tell(self.peer("pager"), Store(pack(moves), b"".join(names)))

    def on_fork(self, message: Fork) -> None:
        """Share the source's blocks, the last, partly filled one until the fork copies it."""
        source = self.contexts.get(message.source)
        if source is None:
            raise LedgerError(f"Fork of sequence {message.source}, which is not open")
        size, valid = self.options.block_size, self.progress.length(message.source)
        slots = valid if message.length < 0 else min(message.length, valid)
        cached = source.cached and bool(message.ids)
        context = Context(message.sequence, source.owner, source.root, message.ids, self.prefixes.block_bytes, cached,
                          source.keys[:slots // size] if cached else None)
        places = self.ledger.holds[message.source].blocks
        count = -(-slots // size)
        if any(HOLE in places[t][self.index.needed(t, slots, size):count] for t in range(len(places))):
            slots = 0  # the source's window has moved on: the fork begins as any sequence does
        context.forked, context.hit, context.published = bool(slots), slots, slots // size
        self._open(context)
        if slots:
            for table, blocks in enumerate(places):
                first = self.index.needed(table, slots, size)
                self.ledger.holds[message.sequence].blocks[table] += [HOLE] * first
                for block in blocks[first:count]:
                    self.ledger.share(message.sequence, table, block)
            self.progress.set_length(message.sequence, slots)

    def on_close(self, message: Close) -> None:
        """Take sequences' blocks back; with none left the ledger must be whole."""
        for sequence in unpack(message.sequences).tolist():
            context = self.contexts.pop(sequence, None)
            if context is None:
                continue
            self.waiting.pop(sequence, None)
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
        columns = (unpack(message.tables).tolist(), unpack(message.blocks).tolist(), unpack(message.good).tolist())
        for table, block, good in zip(*columns, strict=True):
            load = self.transfers.arrived(table, block, bool(good))
            if load is None:
                self.log.warning("a block arrived that nobody awaits", table=table, block=block)
                continue
            context = self.contexts.get(load.sequence)
            if context is not None and context.loading:
                context.loading -= 1
                if not context.loading:
                    ready += [load.sequence, *self.prefixes.settle(context)]
        self._ready(ready)

    def on_stored(self, message: Stored) -> None:
        """Blocks have been written through."""
        for table, block in zip(unpack(message.tables).tolist(), unpack(message.blocks).tolist(), strict=True):
            self.transfers.stored(table, block)

    def _ready(self, sequences: Iterable[int]) -> None:
        askers: dict[str, list[int]] = {}
        for sequence in dict.fromkeys(sequences):
            context = self.waiting.pop(sequence, None)
            if context is not None:
                askers.setdefault(context.asker, []).append(sequence)
                context.asker = ""
        for asker, ready in askers.items():
            self.tell(asker, Ready(pack(ready)))

    # ---- deadlines

    def _arm(self, deadline: float) -> None:
        if deadline < self.quickest:
            self.quickest = deadline
            self.armed.set()

    async def _deadlines(self) -> None:
        while True:
            try:
                left = self.quickest - time.monotonic()
                async with asyncio.timeout(left if left < float("inf") else None):
                    await self.armed.wait()
                self.armed.clear()
            except TimeoutError:
                self.expire(time.monotonic())

    def expire(self, now: float) -> None:
        """End waits, pins and transfers that are past their deadline."""
        for sequence in self.transfers.expire(now):
            if (context := self.contexts.get(sequence)) is not None:
                context.loading = 0
                self._ready([sequence])
        for context in [c for c in self.waiting.values() if c.until <= now]:
            # Who waited for another sequence computes for itself; who waited for a look-up goes on without tiers.
            context.resolute = context.resolute or not context.finding
            context.finding = False
            self._ready([context.sequence])
        for key in [k for k, h in self.ledger.holds.items() if h.reason == PIN and (h.deadline or now) <= now]:
            self.ledger.close(key)
        ends = [c.until for c in self.waiting.values()]
        ends += [h.deadline for h in self.ledger.holds.values() if h.deadline is not None]
        self.quickest = min(ends, default=float("inf"))

    # ---- operation

    def on_pin(self, message: Pin) -> Pinned:
        """Keep what there is of a prefix."""
        if not self.cache.keeps:
            return Pinned(0, 0, "this allocator keeps no prefixes: choose a cache such as 'hash'")
        prefixes = self.prefixes
        names = keys.chain(self._root(message.tenant), message.ids, prefixes.block_bytes)
        entries = self.index.entries(names, message.ids, prefixes.block_bytes, gaps=False) if names else []
        blocks = self.index.longest(self.index.present(entries, len(names)), prefixes.size) if names else 0
        if not blocks:
            return Pinned(0, 0, "no block of this prefix is on the device: let a request compute it first")
        number, deadline = self.ledger.number(), time.monotonic() + message.seconds
        wanted = [{e.blocks[t] for e in entries[self.index.needed(t, blocks * prefixes.size, prefixes.size):blocks]
                   if e is not None} for t in range(len(self.ledger.total))]
        pinned = [h.blocks for h in self.ledger.holds.values() if h.reason == PIN]
        for table, total in enumerate(self.ledger.total):
            taken = wanted[table].union(*(blocks[table] for blocks in pinned))
            if len(taken) > total * self.options.pin_share:
                return Pinned(0, 0, f"pins would keep {len(taken)} of {total} blocks, more than pin_share "
                                    f"{self.options.pin_share} allows: unpin another prefix")
        self.ledger.open(number, Hold(message.owner, PIN, len(self.ledger.total), deadline))
        for table, numbers in enumerate(wanted):
            for block in sorted(numbers):
                self.ledger.share(number, table, block)
        self._arm(deadline)
        return Pinned(-number, blocks * prefixes.size)

    def on_unpin(self, message: Unpin) -> Unpinned:
        """Let a pin go."""
        hold = self.ledger.holds.get(-message.pin)
        if hold is None or hold.reason != PIN:
            return Unpinned(False)
        self.ledger.close(-message.pin)
        return Unpinned(True)

    def on_flush(self, message: Flush) -> Flushed:
        """Forget what nobody holds."""
        return Flushed(pack(self.index.flush()))

    def on_survey(self, message: Survey) -> Surveyed:
        """What an operator wants to see."""
        groups = tuple(tuple(g.name for g in table) for table in self.pools.groups)
        return survey(self.prefixes, groups, self.counters(), message.top)

    def on_inspect(self, message: Inspect) -> Report:
        """Facts for an operator."""
        return Report(self.facts())


def tables_of(groups: tuple[KVGroup, ...]) -> tuple[tuple[KVGroup, ...], ...]:
    """Groups by block table: those that keep the whole context share the first, each window group has its own."""
    whole = tuple(g for g in groups if not g.window)
    return (*((whole,) if whole else ()), *((g,) for g in groups if g.window))


__all__ = ["Allocator", "AllocatorOptions", "Cache", "Facts", "tables_of"]
