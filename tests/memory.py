"""An allocator alone, with a device, a pager and a scheduler that are simulated slot by slot.

Every slot of every block says which token of which tenant was written there and at which position, so that whoever
reads a wrong block is found out. It does not know how hits are chosen.
"""

import random
from collections.abc import Sequence as Ids
from typing import Any

from antiphon.actors import protocol
from antiphon.actors.allocator import Allocator, AllocatorOptions
from antiphon.actors.columns import pack, sequence, unpack
from antiphon.actors.ledger import HOLE
from antiphon.actors.model import Facts, KVGroup
from antiphon.actors.protocol import (
    COPY,
    SAVE,
    Arrived,
    Close,
    Commit,
    Configure,
    Find,
    Fork,
    Found,
    Mount,
    Mounted,
    Open,
    Ready,
    Reserve,
    Reserved,
    Sampling,
    Store,
    Stored,
)
from antiphon.runtime import plugin
from antiphon.runtime.actor import ActorSite
from antiphon.runtime.log import logger
from antiphon.runtime.message import Message

Slot = tuple[str, int, int] | None  # tenant, token, position; None: nothing that anyone may read


class Office:
    """Takes what the allocator tells."""

    def __init__(self) -> None:
        self.told: list[tuple[str, Message]] = []

    def tell(self, sender: str, to: str, message: Message, lane: int = 0) -> None:
        self.told.append((to, message))


def facts(*windows: int, digest: str = "model") -> Facts:
    """A model with a group that keeps everything, a drafter's, and one for each window; window -1: only windows."""
    whole = (KVGroup("whole", 1, 1, 1, "float32"), KVGroup("draft", 1, 1, 1, "float32", owner="drafter"))
    groups = () if -1 in windows else whole
    groups += tuple(KVGroup(f"window{w}", 1, 1, 1, "float32", window=w) for w in windows if w > 0)
    return Facts("test", 1000, 1 << 20, 1, 1, groups, digest=digest)


def allocator(cache: str = "hash", eviction: str = "lru", windows: Ids[int] = (), digest: str = "model",
              **options: Any) -> Allocator:
    """A configured allocator without a runtime around it; its office is ``site.post``."""
    site = ActorSite("allocator", Office(), logger(), {"pager": "pager"}, lambda *_: None)  # type: ignore[arg-type]
    for kind, name in (("cache", cache), ("eviction", eviction)):
        found = plugin.find(kind, name)
        site.built[kind] = found(found.options_type(), site)
    made = Allocator(AllocatorOptions(**{"block_size": 4, "blocks": 64, **options}), site)
    made.sender = "scheduler"
    made.on_configure(Configure(facts(*windows, digest=digest)))
    return made


def told(made: Allocator, kind: type[Message]) -> list[Any]:
    """Messages of a kind that were told since the last look; they are taken away."""
    office: Any = made.site.post
    found = [m for _, m in office.told if isinstance(m, kind)]
    office.told = [(to, m) for to, m in office.told if not isinstance(m, kind)]
    return found


def opening(number: int, ids: Ids[int], tenant: str = "local", **sampling: Any) -> Open:
    """An Open."""
    return Open(number, number.to_bytes(16, "little"), tenant, 0, pack(ids), len(ids), Sampling(**sampling), 0)


def reserve(made: Allocator, number: int, need: int, want: int = 0, **rates: float) -> Reserved:
    """Reserve for one sequence."""
    return made.on_reserve(Reserve(1, pack([number]), pack([need]), pack([max(want, need)]), **rates))


def commit(made: Allocator, number: int, length: int, ids: Ids[int] = ()) -> None:
    """A step of one sequence that leaves ``length`` slots and ``ids`` after them (the last rows' tokens)."""
    start = length - max(1, len(ids))
    made.on_commit(Commit(1, pack([number]), pack([start]), pack([0, 0]), b"", pack([0, len(ids)]), pack(ids),
                          pack([length])))


def compute(made: Allocator, number: int, ids: Ids[int], tenant: str = "local", **sampling: Any) -> int:
    """Open a sequence and compute all its ids; the hit it had."""
    made.on_open(opening(number, ids, tenant, **sampling))
    for find in told(made, Find):
        made.on_found(Found(find.sequence, b""))
    reserved = reserve(made, number, len(ids))
    assert not reserved.waits
    assert not reserved.short
    commit(made, number, len(ids))
    return int(unpack(reserved.hits)[0])


def close(made: Allocator, *numbers: int, reason: str = "finished") -> None:
    """Close sequences."""
    made.on_close(Close(pack(numbers), reason))


class Run:
    """A sequence as the simulated scheduler and executor know it."""

    def __init__(self, handle: int, tenant: str, ids: list[int], tables: int, cached: bool):
        self.handle, self.tenant, self.ids, self.cached = handle, tenant, ids, cached
        self.prompt = len(ids)
        self.computed = 0  # slots written and committed
        self.planned = 0  # with the step in flight
        self.granted = 0
        self.state = "new"  # new, waits, runs
        self.commits: list[Commit] = []  # in flight
        self.tables: list[dict[int, int]] = [{} for _ in range(tables)]


class World:
    """Draws what happens next. ``tiers``: "", "back" or "through"."""

    def __init__(self, seed: int, cache: str, eviction: str, windows: Ids[int], tiers: str, blocks: int = 40,
                 **options: Any):
        self.draw = random.Random(seed)
        self.made = allocator(cache, eviction, windows, blocks=blocks, **options)
        self.size = self.made.options.block_size
        self.windows = self.made.index.windows
        self.content: list[list[list[Slot]]] = [[[None] * self.size for _ in range(blocks)] for _ in self.windows]
        self.tier: dict[bytes, dict[int, list[Slot]]] = {}
        self.tiers = tiers
        self.runs: dict[int, Run] = {}
        self.finds: list[Find] = []
        self.loads: list[tuple[int, int, bytes]] = []
        self.stores: list[tuple[int, int, bytes]] = []
        self.generation = 0
        self.free = list(range(12))
        self.hits = self.waited = self.late = self.forks = 0
        self.stems = [[self.draw.randrange(1, 6) for _ in range(self.draw.randrange(4, 40))] for _ in range(4)]
        assert len(told(self.made, Mount)) == int(self.made.cache.keeps)
        if tiers:
            self.made.on_mounted(Mounted(True, tiers == "through"))

    # ---- what may happen

    def step(self) -> None:
        """One random event, then the books are looked at."""
        events = [self.open, self.reserve, self.reserve, self.reserve, self.commit, self.commit, self.close, self.fork,
                  self.find, self.arrive, self.store, self.pin, self.expire]
        weights = [4, 8, 8, 8, 10, 10, 2, 1, 4, 4, 4, 1, 0.3]
        self.draw.choices(events, weights)[0]()
        self.hear()
        audit = self.made.ledger.audit()
        assert not audit.faults, audit.faults

    def open(self) -> None:
        """A request comes: it shares a stem, or a part of one, with others."""
        if not self.free:
            return
        stem = self.draw.choice(self.stems)
        ids = stem[:self.draw.randrange(len(stem) + 1)] + [self.draw.randrange(1, 6)
                                                          for _ in range(self.draw.randrange(1, 12))]
        run = self.enter(self.draw.choice(("ada", "ada", "bob")), ids, self.draw.random() < 0.9)
        self.made.on_open(opening(run.handle, ids, run.tenant, cache=run.cached))

    def enter(self, tenant: str, ids: list[int], cached: bool) -> Run:
        self.generation += 1
        run = Run(sequence(self.free.pop(), self.generation), tenant, ids, len(self.windows), cached)
        self.runs[run.handle] = run
        return run

    def reserve(self) -> None:
        """A step of some sequences: grants, moves, rows; with drafts that are rejected."""
        able = [r for r in self.runs.values() if r.state != "waits" and len(r.commits) < 2 and r.planned < len(r.ids)]
        chosen = self.draw.sample(able, min(len(able), self.draw.randrange(1, 5)))
        parts = [(r, min(self.draw.randrange(1, 9), len(r.ids) - r.planned)) for r in chosen]
        drafts = {r.handle: self.draw.randrange(3) if r.planned + c == len(r.ids) else 0 for r, c in parts}
        asked = [(r, c) for r, c in parts if r.planned + c + drafts[r.handle] > r.granted]
        if asked:
            need = [r.planned + c + drafts[r.handle] for r, c in asked]
            reserved = self.made.on_reserve(Reserve(
                1, pack([r.handle for r, _ in asked]), pack(need), pack([n + self.draw.choice((0, 8)) for n in need]),
                *self.draw.choice(((0.0, 0.0), (1e-3, 1e-6), (1e-9, 1e-12)))))
            self.page(reserved)
            for handle, table, index, block in unpack(reserved.changes).reshape(-1, 4).tolist():
                self.runs[handle].tables[table][index] = block
            parts = self.granted(parts, reserved, asked)
        for run, count in parts:
            self.execute(run, count, drafts[run.handle])

    def granted(self, parts: list[tuple[Run, int]], reserved: Reserved,
                asked: list[tuple[Run, int]]) -> list[tuple[Run, int]]:
        waits, short = unpack(reserved.waits).tolist(), unpack(reserved.short).tolist()
        left = dict(parts)
        for (run, count), hit, granted in zip(asked, unpack(reserved.hits).tolist(), unpack(reserved.granted).tolist(),
                                              strict=True):
            run.granted = granted
            if run.handle in waits or run.handle in short:
                del left[run]
                assert not hit
                if run.handle in waits:
                    run.state, self.waited = "waits", self.waited + 1
                continue
            if run.state == "new" and hit:
                assert hit < len(run.ids)
                run.computed = run.planned = hit
                left[run] = min(count, len(run.ids) - hit)
                self.hits += hit
                self.read(run, hit)
            run.state = "runs"
        if short and self.draw.random() < 0.7:
            idle = [r for r in self.runs.values() if not r.commits]
            if idle:
                self.end(self.draw.choice(idle), "preempted")
        return [(r, c) for r, c in left.items() if r.handle in self.runs and r.state == "runs"]

    def page(self, reserved: Reserved) -> None:
        """The device's share of Page, in order; loads come later."""
        keys = [reserved.keys[i:i + 32] for i in range(0, len(reserved.keys), 32)]
        for what, table, block, place in unpack(reserved.moves).reshape(-1, 4).tolist():
            if what == COPY:
                self.content[table][place] = list(self.content[table][block])
            elif what == SAVE:
                assert None not in self.content[table][block], "a block was saved that is not full"
                self.tier.setdefault(keys[place], {})[table] = list(self.content[table][block])
            else:
                self.loads.append((table, block, keys[place]))

    def execute(self, run: Run, count: int, drafts: int) -> None:
        """Write rows, look at what each row reads, and make the commit that says what stays."""
        start = run.planned
        assert start + count + drafts <= run.granted
        last = start + count == len(run.ids)
        rows = run.ids[start:start + count] + [self.draw.randrange(1, 6) for _ in range(drafts)]
        for slot, token in enumerate(rows, start=start):
            for table, mirror in enumerate(run.tables):
                self.content[table][mirror[slot // self.size]][slot % self.size] = (run.tenant, token, slot)
        run.planned = start + count
        kept = self.draw.randrange(drafts + 1) if last else 0
        new = [*rows[count:count + kept], self.draw.randrange(1, 6)] if last else []
        run.ids += new
        run.planned += kept
        self.read(run, run.planned)
        first = start + count - 1
        run.commits.append(Commit(1, pack([run.handle]), pack([first]), pack([0, kept]), pack(range(1, kept + 1)),
                                  pack([0, len(new)]), pack(new), pack([run.planned])))

    def read(self, run: Run, length: int) -> None:
        """Every slot that the row at ``length - 1`` or a later one reads must be the sequence's own."""
        for table, window in enumerate(self.windows):
            for slot in range(max(0, length - window) if window else 0, length):
                seen = self.content[table][run.tables[table][slot // self.size]][slot % self.size]
                assert seen == (run.tenant, run.ids[slot], slot), f"slot {slot} of table {table} shows {seen}"

    def commit(self) -> None:
        """What is in flight is committed; several sequences in one message."""
        flying = [r for r in self.runs.values() if r.commits]
        chosen = self.draw.sample(flying, self.draw.randrange(1, len(flying) + 1)) if flying else []
        parts = [r.commits.pop(0) for r in chosen]
        if not parts:
            return
        offsets = [0]
        for part in parts:
            offsets.append(offsets[-1] + len(part.ids) // 4)
        self.made.on_commit(Commit(
            1, b"".join(p.sequences for p in parts), b"".join(p.starts for p in parts), b"", b"", pack(offsets),
            b"".join(p.ids for p in parts), b"".join(p.lengths for p in parts)))
        for run, part in zip(chosen, parts, strict=True):
            run.computed = int(unpack(part.lengths)[0])

    def close(self) -> None:
        """Somebody ends, in whatever state."""
        idle = [r for r in self.runs.values() if not r.commits]
        if idle:
            self.end(self.draw.choice(idle), self.draw.choice(("finished", "cancelled", "preempted")))

    def end(self, run: Run, reason: str) -> None:
        close(self.made, run.handle, reason=reason)
        del self.runs[run.handle]
        self.free.append(run.handle & 0xFFFF)

    def fork(self) -> None:
        """A sequence begins as a copy of another one's beginning."""
        sources = [r for r in self.runs.values() if r.computed > 1 and r.state == "runs"]
        if not sources or not self.free:
            return
        source = self.draw.choice(sources)
        length = self.draw.choice((-1, self.draw.randrange(1, source.computed + 1)))
        valid = source.computed if length < 0 else length
        told_ids = self.draw.random() < 0.6
        ids = [*source.ids[:valid], self.draw.randrange(1, 6)]
        run = self.enter(source.tenant, ids, source.cached)
        run.tables = [dict(t) for t in source.tables]
        self.made.on_fork(Fork(run.handle, source.handle, 1, length, pack(ids) if told_ids else b""))
        self.forks += 1

    def find(self) -> None:
        """The pager looks a sequence's keys up, or takes too long."""
        if self.finds:
            find = self.finds.pop(self.draw.randrange(len(self.finds)))
            keys = [find.keys[i:i + 32] for i in range(0, len(find.keys), 32)]
            present = [int(table in self.tier.get(key, ())) for table in range(len(self.windows)) for key in keys]
            self.made.on_found(Found(find.sequence, pack(present), 1e-3, 1e6))

    def arrive(self, good: bool | None = None) -> None:
        """A load ends; a bad one leaves rubbish in the block."""
        if self.loads:
            table, block, key = self.loads.pop(self.draw.randrange(len(self.loads)))
            if self.draw.random() < 0.1:
                self.tier.get(key, {}).pop(table, None)  # the tier has lost it meanwhile
            stored = self.tier.get(key, {}).get(table)
            fine = stored is not None and (self.draw.random() < 0.8 if good is None else good)
            self.content[table][block] = list(stored) if stored and fine else [("rubbish", -1, -1)] * self.size
            self.made.on_arrived(Arrived(pack([table]), pack([block]), pack([int(fine)])))

    def store(self) -> None:
        """A block is read by the write-through, late perhaps: what it holds must still be there."""
        if self.stores:
            table, block, key = self.stores.pop(self.draw.randrange(len(self.stores)))
            assert None not in self.content[table][block]
            self.tier.setdefault(key, {})[table] = list(self.content[table][block])
            self.made.on_stored(Stored(pack([table]), pack([block])))

    def pin(self) -> None:
        """Somebody keeps a prefix, or lets it go, or all is flushed."""
        pins = [-k for k, h in self.made.ledger.holds.items() if h.reason == "pin"]
        if pins and self.draw.random() < 0.7:
            assert self.made.on_unpin(protocol.Unpin(self.draw.choice(pins))).found
        elif self.draw.random() < 0.3:
            self.made.on_flush(protocol.Flush())
        elif self.made.cache.keeps:
            self.made.on_pin(protocol.Pin("operator", "ada", pack(self.draw.choice(self.stems)), 60.0))

    def expire(self) -> None:
        """Much time passes."""
        self.late += len(self.loads) + len(self.stores)
        self.made.expire(1e12)

    def hear(self) -> None:
        """What the allocator told its peers."""
        for ready in told(self.made, Ready):
            for handle in unpack(ready.sequences).tolist():
                assert self.runs[handle].state == "waits"
                self.runs[handle].state = "new"
        self.finds += told(self.made, Find)
        for store in told(self.made, Store):
            keys = [store.keys[i:i + 32] for i in range(0, len(store.keys), 32)]
            self.stores += [(t, b, keys[k]) for _, t, b, k in unpack(store.moves).reshape(-1, 4).tolist()]

    def settle(self) -> None:
        """All that is under way ends and everybody leaves: then no one waits, and every block is free."""
        while self.finds or self.loads or self.stores or any(r.commits for r in self.runs.values()):
            self.commit()
            self.find()
            self.arrive(good=True)
            self.store()
            self.hear()
        order = list(self.runs.values())
        self.draw.shuffle(order)
        for run in order:
            states = {r.state for r in self.runs.values()}
            assert states != {"waits"}, "all wait for each other"
            self.end(run, "cancelled")
            self.hear()
        assert not self.made.waits.waiting
        assert not len(self.made.prefixes.claims)
        self.made.expire(1e12)
        assert not self.made.ledger.holds
        assert self.made.ledger.whole()
        self.made.on_flush(protocol.Flush())
        assert [len(f) for f in self.made.ledger.free] == self.made.ledger.total
        entries = getattr(self.made.cache, "entries", {})
        assert not entries
        assert not getattr(self.made.cache, "children", {})
        assert HOLE not in {b for free in self.made.ledger.free for b in free}
