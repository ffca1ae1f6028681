"""Chooses what a sequence begins with: cached blocks, blocks of a tier, the work of another sequence, or nothing.

It does not know messages; the allocator turns what it leaves behind (moves, who is ready) into some.
"""

from typing import NamedTuple

from antiphon.actors import keys
from antiphon.actors.cache import Entry
from antiphon.actors.claims import Claims
from antiphon.actors.contexts import Context
from antiphon.actors.index import Bools, Index
from antiphon.actors.ledger import HOLE, Hold
from antiphon.actors.moves import Move
from antiphon.actors.progress import NEVER, Progress
from antiphon.actors.protocol import COPY, LOAD
from antiphon.actors.transfers import Transfers

WAITS, SHORT = -1, -2  # instead of a hit


class Tiers(NamedTuple):
    """What is known of the pager's tiers. ``latency`` and ``rate`` (bytes a second) as last told."""

    through: bool
    back: bool = False
    latency: float = 0.0
    rate: float = 0.0


class Prefixes:
    """The rules of hits and of filling the index."""

    def __init__(self, index: Index, size: int, table_bytes: tuple[int, ...], load_s: float, author_s: float,
                 bring: str = "auto"):
        self.index, self.ledger = index, index.ledger
        self.size, self.block_bytes = size, 4 * size  # of a block: slots, bytes of packed ids
        self.table_bytes = table_bytes  # bytes of one block, per table: what a load moves
        self.claims = Claims()
        self.transfers = Transfers(index)
        self.progress = Progress(size)
        self.tiers: Tiers | None = None
        self.row_s = self.row_slot_s = 0.0
        self.changes: dict[int, list[int]] = {}  # sequence -> quadruples (sequence, table, index, block) to be told
        self.moves: list[Move] = []
        self.full: list[tuple[int, int, Entry]] = []  # (table, block, entry) newly in the index
        self.bring = bring  # "auto", "always", "never"
        self.load_s, self.author_s = load_s, author_s  # seconds a sequence waits at most for blocks, for an author
        self.counters = dict.fromkeys(
            ("queried_slots", "hit_slots", "tier_slots", "waits", "copies", "deduplicated", "loads_declined"), 0)
        self._turn = self.ledger.number()  # hold of the blocks that moves of this turn read

    @property
    def brings(self) -> bool:
        """Whether blocks may come from tiers."""
        return self.tiers is not None and self.bring != "never"

    # ---- beginning

    def begin(self, context: Context, need: int, want: int, now: float) -> int:
        """Give a sequence its first blocks; its hit in slots, or WAITS or SHORT: then it holds nothing new."""
        if context.forked:
            return self._begin_fork(context, need, want)
        if context.loading:
            return WAITS
        if context.finding:
            if now < context.until:
                return WAITS
            context.finding = False
        self.ledger.clear(context.sequence)
        entries, blocks = self._match(context, now)
        if blocks == WAITS:
            self.counters["waits"] += 1
            return WAITS
        hit = self._share(context, entries, blocks)
        inside = self._inside(context, blocks)
        for source in (inside, None) if inside is not None else (None,):
            # With a block to copy from a pool may be just too small: then that block is worth more as an empty one.
            slots = hit + (source[1] if source else 0)
            if source is not None:
                self._keep_for_turn(source[0].blocks)
            if self.grant(context.sequence, max(need, min(slots + need, context.total)), want):
                if source is not None:
                    places = self.ledger.holds[context.sequence].blocks
                    self.moves += [Move(COPY, t, block, places[t][blocks]) for t, block in enumerate(source[0].blocks)]
                    self.counters["copies"] += 1
                    self._touch([source[0]], now)
                self._begun(context, slots, blocks, [e for e in entries[:blocks] if e is not None], now)
                return slots
            for table in range(len(self.index.windows)) if source is not None else ():
                self.ledger.give_back(self._turn, table)
        self.ledger.clear(context.sequence)
        return SHORT

    def grant(self, sequence: int, need: int, want: int) -> bool:
        """Extend a sequence's blocks to ``need`` slots and, while there is plenty, to ``want``; false: short."""
        ledger = self.ledger
        have = len(ledger.holds[sequence].blocks[0])
        needed, wanted = -(-need // self.size), -(-want // self.size)
        available = ledger.available()
        if needed - have > available:
            return False
        plenty = min(ledger.total) // 8
        count = max(have, needed, wanted if available - (wanted - have) > plenty else needed)
        for table, index, block in ledger.take(sequence, count):
            self.change(sequence, table, index, block)
        return True

    def change(self, sequence: int, table: int, index: int, block: int) -> None:
        """Note a change of a block table."""
        self.changes.setdefault(sequence, []).extend((sequence, table, index, block))

    def end_turn(self) -> None:
        """Moves of this turn are told: from now on what they read may give way."""
        self.ledger.close(self._turn)

    def _match(self, context: Context, now: float) -> tuple[list[Entry | None], int]:
        """Entries and how many full blocks of them are the hit; WAITS with loads begun or an author waited for."""
        cap = min(len(context.keys), (context.total - 1) // self.size) if context.cached else 0
        if not cap:
            return [], 0
        entries = self.index.entries(context.keys[:cap], context.ids, self.block_bytes, context.present is not None)
        here = self.index.present(entries, cap)
        blocks = self.index.longest(here, self.size)
        if blocks < cap and not context.resolute and self._author(context, blocks) is not None:
            self.claims.wait(context.sequence, context.keys[blocks:cap])
            context.until = now + self.author_s
            return entries, WAITS
        if context.present is not None and self.tiers is not None:
            more = self.index.longest([h | p for h, p in zip(here, context.present, strict=True)], self.size)
            if more > blocks and self._load(context, entries, here, blocks, more, now):
                return entries, WAITS
        return entries, blocks

    def _author(self, context: Context, block: int) -> int | None:
        author = self.claims.author(context.keys[block])
        return None if author == context.sequence else author

    def _share(self, context: Context, entries: list[Entry | None], blocks: int) -> int:
        """Hold the blocks of a hit."""
        for table in range(len(self.index.windows)):
            first = self.index.needed(table, blocks * self.size, self.size)
            places = self.ledger.holds[context.sequence].blocks[table]
            places += [HOLE] * min(first, blocks)
            for entry in entries[first:blocks]:
                assert entry is not None
                self.ledger.share(context.sequence, table, entry.blocks[table])
        return blocks * self.size

    def _inside(self, context: Context, blocks: int) -> tuple[Entry, int] | None:
        """A block whose first slots are those that follow the hit."""
        if not context.cached:
            return None
        begin = blocks * self.block_bytes
        ids = context.ids[begin:min(begin + self.block_bytes, 4 * (context.total - 1))]
        return self.index.inside(context.key_before(blocks), ids) if ids else None

    def _begun(self, context: Context, slots: int, blocks: int, entries: list[Entry], now: float) -> None:
        sequence = context.sequence
        for table, places in enumerate(self.ledger.holds[sequence].blocks):
            for index, block in enumerate(places[:blocks]):
                if block != HOLE:
                    self.change(sequence, table, index, block)
        self._touch(entries, now)
        self.counters["queried_slots"] += context.total
        tier = min(blocks, context.loaded) * self.size
        self.counters["tier_slots"] += tier
        self.counters["hit_slots"] += slots - tier
        context.begun, context.hit, context.published, context.present = True, slots, blocks, None
        self.progress.set_length(sequence, slots)
        if context.cached:
            self.claims.take(sequence, context.keys[blocks:])
        self.watch(context)

    def _begin_fork(self, context: Context, need: int, want: int) -> int:
        """Copy the block that the fork shares only the first slots of.

        The fork copies, once, before its first row, and not whoever writes first: the source has been granted its block
        already and writes on in steps in flight. Whether the source lives on or not, the fork's beginning stays.
        """
        sequence, slots = context.sequence, context.hit
        hold = self.ledger.holds[sequence]
        last = slots // self.size
        blocks = len(hold.blocks[0])
        copies = bool(slots % self.size) and any(
            self.ledger.shared(t, places[last]) or self.index.owner[t][places[last]] is not None
            for t, places in enumerate(hold.blocks))
        need = max(need, min(slots + need, max(context.total, slots + 1)))
        if max(0, -(-need // self.size) - blocks) + copies > self.ledger.available():
            return SHORT
        for table in range(len(hold.blocks)) if copies else ():
            source = hold.blocks[table][last]
            self._keep_for_turn([HOLE] * table + [source])
            block = self.ledger.replace(sequence, table, last)
            self.moves.append(Move(COPY, table, source, block))
        self.counters["copies"] += copies
        self.grant(sequence, need, want)
        context.begun, context.forked = True, False
        for table, places in enumerate(hold.blocks):
            for index, block in enumerate(places[:blocks]):
                if block != HOLE:
                    self.change(sequence, table, index, block)
        self.claims.take(sequence, context.keys[last:])
        self.watch(context)
        return slots

    def _keep_for_turn(self, blocks: list[int]) -> None:
        """No later grant of this turn may take what its moves read."""
        if self._turn not in self.ledger.holds:
            self.ledger.open(self._turn, Hold("moves", "turn", len(self.ledger.total)))
        for table, block in enumerate(blocks):
            if block != HOLE:
                self.ledger.share(self._turn, table, block)

    def _touch(self, entries: list[Entry], now: float) -> None:
        for entry in entries:
            entry.uses += 1
            entry.used = now

    # ---- tiers

    def _load(self, context: Context, entries: list[Entry | None], here: list[Bools], blocks: int, more: int,
              now: float) -> bool:
        """Begin to bring the blocks that a hit of ``more`` blocks lacks, if that is quicker than computing them."""
        first = [self.index.needed(t, more * self.size, self.size) for t in range(len(here))]
        lacking = [[i for i in range(first[t], more) if not here[t][i]] for t in range(len(here))]
        if self.bring == "auto" and self.row_s and not self._worth(context, lacking, blocks, more):
            self.counters["loads_declined"] += 1
            return False
        sequence, made = context.sequence, dict[int, Entry]()
        coming: list[tuple[int, int, Entry]] = []
        present = [{i: e.blocks[t] for i, e in enumerate(entries[:more]) if e and i >= first[t] and here[t][i]}
                   for t in range(len(here))]
        for table, lack in enumerate(lacking):
            free, cached = self.ledger.free[table], self.ledger.cached[table]
            if len(lack) > len(free) + len(cached.difference(present[table].values())):
                return False  # no room: the sequence is short of memory anyway
        for table, lack in enumerate(lacking):
            self.ledger.holds[sequence].blocks[table] += [HOLE] * more
            for i, block in present[table].items():  # first, so that what is here does not give way to what comes
                self.ledger.exchange(sequence, table, i, block)
            for i in lack:
                if i not in made:
                    ids = context.ids[i * self.block_bytes:(i + 1) * self.block_bytes]
                    made[i] = Entry(context.keys[i], context.key_before(i), ids, i * self.size, len(here))
                block = self.ledger.replace(sequence, table, i)
                coming.append((table, block, made[i]))
                self.moves.append(Move(LOAD, table, block, -1, context.keys[i]))
        context.until = now + self.load_s
        context.loading, context.loaded, context.resolute = len(coming), len(made), True
        context.present = None
        self.transfers.load(context.owner, sequence, coming, context.until)
        self.claims.take(sequence, context.keys[blocks:])
        return True

    def _worth(self, context: Context, lacking: list[list[int]], blocks: int, more: int) -> bool:
        moved = sum(len(lack) * size for lack, size in zip(lacking, self.table_bytes, strict=True))
        load = context.latency + (moved / context.rate if context.rate else 0.0)
        return load < self.compute_s(blocks * self.size, more * self.size)

    def compute_s(self, begin: int, end: int) -> float:
        """Seconds to compute the slots from ``begin`` to ``end``, as measured."""
        return (end - begin) * self.row_s + (end * end - begin * begin) / 2 * self.row_slot_s

    # ---- filling the index

    def watch(self, context: Context) -> None:
        """Have the sequence named again when a block is full or a window has moved past one."""
        length = self.progress.length(context.sequence)
        due = (context.published + 1) * self.size if context.cached else NEVER
        for window in self.index.windows:
            if window:  # the next length at which the block that the window begins in is behind it
                due = min(due, (max(0, length - window) // self.size + 1) * self.size + window)
        self.progress.look_at(context.sequence, due)

    def advance(self, context: Context) -> list[int]:
        """Put full blocks into the index and let go of what windows have passed; the sequences that waited for it."""
        sequence, ready = context.sequence, []
        if context.cached:
            for number in range(context.published, self.progress.end(sequence) // self.size):
                ready += self._publish(context, number)
        length = self.progress.length(sequence)
        for table, window in enumerate(self.index.windows):
            places = self.ledger.holds[sequence].blocks[table]
            passed = min(len(places), max(0, length - window) // self.size) if window else 0
            first = passed
            while first and places[first - 1] != HOLE:
                first -= 1
            for index in range(first, passed):
                self.ledger.exchange(sequence, table, index, HOLE)
        self.watch(context)
        return ready

    def _publish(self, context: Context, number: int) -> list[int]:
        sequence, begin = context.sequence, number * self.size
        ids = context.ids[number * self.block_bytes:(number + 1) * self.block_bytes]
        if len(ids) < self.block_bytes:
            ids = self.progress.ids(sequence, begin, begin + self.size)
        parent = context.key_before(number)
        if number == len(context.keys):
            context.keys += keys.chain(parent, ids, self.block_bytes)
        entry = Entry(context.keys[number], parent, ids, begin, len(self.index.windows))
        for table, places in enumerate(self.ledger.holds[sequence].blocks):
            if places[number] == HOLE:
                continue
            there = self.index.put(table, places[number], entry)
            if there is None:
                continue
            if there.blocks[table] == places[number]:
                self.full.append((table, places[number], there))
            else:  # someone else has computed the same: one block is enough
                self.ledger.exchange(sequence, table, number, there.blocks[table])
                self.change(sequence, table, number, there.blocks[table])
                self.counters["deduplicated"] += 1
        context.published = number + 1
        return self.claims.settle(context.keys[number])

    # ---- ending

    def settle(self, context: Context) -> list[int]:
        """A sequence's loads have ended: who waited for a block that came."""
        ready: list[int] = []
        for key in context.keys:
            entry = self.index.cache.find(key)
            if entry is not None and all(b >= 0 or self.index.windows[t] for t, b in enumerate(entry.blocks)):
                ready += self.claims.settle(key)
        return ready

    def keep_end(self, context: Context) -> None:
        """Put the last, partly filled block of a sequence that ends into the index."""
        sequence, size = context.sequence, self.size
        number, end = context.published, self.progress.end(sequence)
        places = self.ledger.holds[sequence].blocks
        if end <= number * size or any(
                p[number] == HOLE or self.ledger.shared(t, p[number]) or self.index.owner[t][p[number]] is not None
                for t, p in enumerate(places)):
            return
        ids = context.ids[number * self.block_bytes:4 * end]
        if len(ids) < 4 * (end - number * size):
            ids = self.progress.ids(sequence, number * size, end)
        parent = context.key_before(number)
        entry = Entry(keys.chain(parent, ids, len(ids))[0], parent, ids, number * size, len(places))
        for table, blocks in enumerate(places):
            self.index.put(table, blocks[number], entry)

    def forget(self, sequence: int) -> None:
        """Take what only this sequence holds out of the index."""
        for table, places in enumerate(self.ledger.holds[sequence].blocks):
            for block in places:
                if block != HOLE and not self.ledger.shared(table, block):
                    self.index.forget(table, block)
