"""The tiered pager keeps blocks in a stack of tiers, the fastest first: RAM, disks, a shared store.

It does not know why blocks move; a tier that is slow, full, damaged or dead only makes it keep and find less.
"""

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from antiphon.actors.model import Facts
from antiphon.actors.pager import U8, BlockAccess, Blocks, Pager, Places
from antiphon.actors.protocol import Configured
from antiphon.plugins.pagers.level import Item, Level, Patience
from antiphon.plugins.pagers.records import Layout, storage_keys
from antiphon.runtime.counters import Counters
from antiphon.runtime.plugin import Options, Site
from antiphon.runtime.quantities import Seconds

CHUNK = 8 << 20  # bytes that are read before they are written to the device, while the next are read
COUNTERS = ("auxiliary_missing", "refused")


class TieredOptions(Options, frozen=True):
    """``tiers`` from fast to slow, each ``{ plugin = NAME, ... }``.

    ``look`` is the longest a look-up may take, ``load`` the longest a load may; a tier in which one call lasts longer
    than ``stuck`` is given up. One that failed is opened again after ``retry``, then after twice as long, at most
    ``longest``.
    """

    tiers: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    look: Seconds = 0.1
    load: Seconds = 10.0
    stuck: Seconds = 5.0
    retry: Seconds = 1.0
    longest: Seconds = 60.0

    def __post_init__(self) -> None:
        paths = [os.path.realpath(str(table["path"])) if "path" in table else "" for table in self.tiers]
        for i, path in enumerate(paths):
            if path and path in paths[:i]:
                raise ValueError(f"tiers {paths.index(path)} and {i} have the same path: "
                                 "give each a directory of its own")


class _Pending:
    """A record that is being written somewhere: until it is, it is found here."""

    __slots__ = ("payload", "read")

    def __init__(self, payload: Any = None):
        self.payload = payload  # None: not yet read from the device
        self.read: asyncio.Future[Any] | None = None


class _Save(NamedTuple):
    """A block to be kept, its records by key and the levels that have room reserved."""

    block: int
    records: dict[bytes, _Pending]
    levels: list[Level]


class _Reading(NamedTuple):
    """What is being read from the device, by table, and the future of its bytes."""

    saves: dict[int, list[_Save]]
    done: "asyncio.Future[list[list[U8]]]"


class Tiered(Pager[TieredOptions]):
    """A hierarchy of tiers."""

    requires = ("blocks",)
    gives = frozenset({"tiers"})
    holds = True

    def __init__(self, options: TieredOptions, site: Site):
        super().__init__(options, site)
        self.tiers = [(table["plugin"], site.build("tier", table)) for table in options.tiers]
        writes = {tier.options.write for _, tier in self.tiers}
        self.through, self.back = "through" in writes, "back" in writes
        self.levels: list[Level] = []
        self.counts = Counters(COUNTERS)
        self.pending: dict[bytes, _Pending] = {}
        self._layout: Layout | None = None
        self._access: BlockAccess | None = None

    def mount(self, facts: Facts, pools: Configured) -> None:
        """Learn the layout; the first time, make the levels."""
        self._layout = Layout(facts, pools)
        self._access = self.site.service("blocks")
        options = self.options
        patience = Patience(options.look, options.stuck, options.retry, options.longest)
        self.levels = self.levels or [Level(name, tier, patience, self.site.log) for name, tier in self.tiers]

    async def run(self) -> None:
        """Keep the tiers open."""
        await asyncio.gather(*(level.keep() for level in self.levels))

    async def close(self, deadline: float) -> None:
        """Write what is queued, once the device has been read; it may have stopped already, and then never will be."""
        if reading := {p.read for p in self.pending.values() if p.read is not None and not p.read.done()}:
            await asyncio.wait(reading, timeout=min(1.0, deadline / 2))
        await asyncio.sleep(0)
        await asyncio.gather(*(level.close(deadline) for level in self.levels))

    def facts(self) -> dict[str, Any]:
        """Tiers from fast to slow."""
        return {**self.counts, "pending": len(self.pending), "tiers": [level.facts() for level in self.levels]}

    @property
    def layout(self) -> Layout:
        """Raises ValueError: nothing is mounted."""
        if self._layout is None:
            raise ValueError(f"{self.site.instance} moves no blocks before Mount")
        return self._layout

    # ---- find

    async def find(self, keys: Sequence[bytes]) -> Places:
        """Ask all levels at once; the fastest that has a record counts."""
        layout, wanted, weights = self.layout, list[bytes](), []
        for table, needed in enumerate(layout.needed):
            for g in needed:
                wanted += storage_keys(layout.tables[table][g].digest, keys)
                weights.append(layout.bytes(table) / len(needed))
                await asyncio.sleep(0)  # some milliseconds for a long prompt: others have their turn
        shape = len(weights), len(keys)
        held = self._under_way(wanted)  # now: it may be in its tier when that has answered already
        answers = await asyncio.gather(*(level.has(wanted) for level in self.levels))
        held |= self._under_way(wanted)
        used: list[tuple[Level, float]] = []
        for level, answer in zip(self.levels, answers, strict=True):
            fresh = np.array(answer, dtype=bool) & ~held
            held |= fresh
            if fresh.any():
                used.append((level, float(fresh.reshape(shape).sum(axis=1) @ np.array(weights))))
        tables = np.repeat(np.arange(len(layout.needed)), [len(needed) for needed in layout.needed])
        rows = held.reshape(shape)
        present = np.array([rows[tables == t].all(axis=0) for t in range(len(layout.needed))], dtype=np.int32)
        if not used:  # what is evicted now will come from the fastest
            up = next((level for level in self.levels if level.up), None)
            return Places(present, up.delay(), up.reads.rate) if up else Places(present)
        seconds = sum(amount / max(1.0, level.reads.rate) for level, amount in used)
        return Places(present, max(level.delay() for level, _ in used), sum(amount for _, amount in used) / seconds)

    def _under_way(self, wanted: list[bytes]) -> npt.NDArray[np.bool_]:
        """Which records are being written somewhere."""
        if not self.pending:
            return np.zeros(len(wanted), dtype=bool)
        return np.fromiter(map(self.pending.__contains__, wanted), dtype=bool, count=len(wanted))

    # ---- save

    def save(self, blocks: Blocks) -> Coroutine[Any, Any, None]:
        """To the first level that writes back; to those that write through goes what they lack."""
        back = next((level for level in self.levels if level.back and level.up), None)
        return self._save(self._read(blocks, [level for level in self.levels if level is back or not level.back]))

    async def store(self, blocks: Blocks, stored: Callable[[Sequence[int]], None]) -> None:
        """To the levels that write through, piece by piece: the device's steps come between."""
        through = [level for level in self.levels if not level.back]
        writing = []
        async with asyncio.TaskGroup() as tasks:
            for chunk in self._chunks(blocks):
                read = self._read(_some(blocks, chunk), through)
                if read.saves:
                    await asyncio.wait([read.done])
                    writing.append(tasks.create_task(self._save(read)))
                stored(chunk)

    def _read(self, blocks: Blocks, levels: Sequence[Level]) -> _Reading:
        """Queue the reading of what some level takes: whatever writes these blocks next runs after it."""
        saves: dict[int, list[_Save]] = {}
        for table, block, key in zip(*blocks, strict=True):
            keys, size = self.layout.keys(table, key), self.layout.bytes(table)
            if takers := [level for level in levels if level.takes(keys, size)]:
                saves.setdefault(table, []).append(_Save(block, {key: _Pending() for key in keys}, takers))
        if not saves:
            return _Reading(saves, asyncio.get_running_loop().create_future())
        assert self._access is not None
        done = self._access.read([(table, np.array([save.block for save in of], dtype=np.int32))
                                  for table, of in saves.items()])
        for of in saves.values():
            for save in of:
                self.pending.update(save.records)
                for pending in save.records.values():
                    pending.read = done
        done.add_done_callback(functools.partial(_hand_over, saves))
        return _Reading(saves, done)

    async def _save(self, reading: _Reading) -> None:
        saves, done = reading
        if not saves:
            return
        offered: dict[int, list[Item]] = {}
        room: dict[int, int] = {}
        await done
        _hand_over(saves, done)  # the callback that does it as well may not have had its turn
        for table, of in saves.items():
            for save in of:
                items: list[Item] = [(key, pending.payload) for key, pending in save.records.items()]
                for level in save.levels:
                    n = self.levels.index(level)
                    offered.setdefault(n, []).extend(items)
                    room[n] = room.get(n, 0) + self.layout.bytes(table)
        try:
            await asyncio.gather(*(self._put(n, items, room[n]) for n, items in offered.items()))
        finally:
            for of in saves.values():
                for save in of:
                    self._settled(save.records)

    async def _put(self, n: int, items: list[Item], reserved: int) -> None:
        """Write to a level; what that pushes out goes to the next one below that writes back."""
        spilled = await self.levels[n].put(items, reserved)
        below = next((i for i in range(n + 1, len(self.levels)) if self.levels[i].back and self.levels[i].up), None)
        if not spilled or below is None:
            return
        fitting = [(key, payload) for key, payload in spilled if self.levels[below].takes([key], len(payload))]
        records = {key: _Pending(payload) for key, payload in fitting}
        self.pending.update(records)
        try:
            await self._put(below, fitting, sum(len(payload) for _, payload in fitting))
        finally:
            self._settled(records)

    def _settled(self, records: dict[bytes, _Pending]) -> None:
        for key, pending in records.items():
            if self.pending.get(key) is pending:  # else it is being written once more
                del self.pending[key]

    # ---- load

    async def load(self, blocks: Blocks, arrived: Callable[[Sequence[int], bool], None]) -> None:
        """Read chunk by chunk, the next while the device takes the last; promote what came from below."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + self.options.load
        promoted: dict[int, list[Item]] = {}
        writing: list[tuple[list[int], asyncio.Future[None]]] = []
        for chunk in self._chunks(blocks):
            stored = {i: self.layout.keys(blocks.tables[i], blocks.keys[i]) for i in chunk}
            wanted = [k for keys in stored.values() for k in keys]
            found = await self._fetch(wanted, blocks.tables[chunk[0]], ends, promoted)
            await self._arrive(writing, arrived)
            writing = self._write(blocks, stored, found)
            sent = {i for indexes, _ in writing for i in indexes}
            arrived([i for i in chunk if i not in sent], False)
        await self._arrive(writing, arrived)
        await asyncio.gather(*(self._put(n, items, sum(len(p) for _, p in items)) for n, items in promoted.items()))

    def _chunks(self, blocks: Blocks) -> list[list[int]]:
        """Indexes of blocks of one table each, in order, about CHUNK bytes together."""
        chunks: list[list[int]] = []
        for table in sorted(set(blocks.tables)):
            of = [i for i, t in enumerate(blocks.tables) if t == table]
            count = max(1, CHUNK // self.layout.bytes(table))
            chunks += [of[begin:begin + count] for begin in range(0, len(of), count)]
        return chunks

    async def _fetch(self, keys: list[bytes], table: int, ends: float, promoted: dict[int, list[Item]],
                     ) -> dict[bytes, Any]:
        """Payloads by storage key: of what is being saved, else from the fastest level that has it, until ``ends``."""
        found: dict[bytes, Any] = {}
        waiting = {key: pending for key in keys if (pending := self.pending.get(key)) is not None}
        if reading := {p.read for p in waiting.values() if p.payload is None and p.read is not None}:
            await asyncio.wait(reading, timeout=max(0.0, ends - asyncio.get_running_loop().time()))
            await asyncio.sleep(0)  # the payloads are handed over when the loop comes to it
        found |= {key: p.payload for key, p in waiting.items() if p.payload is not None}
        size = self.layout.bytes(table) // max(1, len(self.layout.tables[table]))
        for n, level in enumerate(self.levels):
            missing = [key for key in keys if key not in found]
            if not missing:
                break
            got = await level.get(missing, size, ends)
            found |= got
            for above in range(n):
                if items := [item for item in got.items() if self.levels[above].takes(item[:1], len(item[1]))]:
                    promoted.setdefault(above, []).extend(items)
        return found

    def _write(self, blocks: Blocks, stored: dict[int, list[bytes]], found: dict[bytes, Any],
               ) -> list[tuple[list[int], "asyncio.Future[None]"]]:
        """Queue writes of the blocks whose target groups are there; those that lack the same groups (0) go together."""
        alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        for i, keys in stored.items():
            table = blocks.tables[i]
            if all(keys[g] in found for g in self.layout.needed[table]):
                alike.setdefault((table, tuple(len(found.get(key, b"")) for key in keys)), []).append(i)
        assert self._access is not None
        writing = []
        for (table, there), indexes in alike.items():
            self.counts.add("auxiliary_missing", len(indexes) * there.count(0))
            data = [np.stack([np.frombuffer(found[stored[i][g]], np.uint8) for i in indexes]) if has else None
                    for g, has in enumerate(there)]
            targets = np.array([blocks.blocks[i] for i in indexes], dtype=np.int32)
            writing.append((indexes, self._access.write(table, targets, data)))
        return writing

    async def _arrive(self, writing: list[tuple[list[int], "asyncio.Future[None]"]],
                      arrived: Callable[[Sequence[int], bool], None]) -> None:
        for indexes, written in writing:
            try:
                await written
            except Exception as cause:  # noqa: BLE001 - bytes that the device refuses are computed anew
                self.counts.add("refused", len(indexes))
                self.site.log.warning("stored blocks do not fit the device", blocks=len(indexes), cause=repr(cause))
                arrived(indexes, False)
            else:
                arrived(indexes, True)


def _hand_over(saves: dict[int, list[_Save]], done: "asyncio.Future[list[list[U8]]]") -> None:
    """Give what was read from the device to whoever waits for it."""
    if done.cancelled() or done.exception() is not None:
        return  # told to who awaits it
    for of, groups in zip(saves.values(), done.result(), strict=True):
        rows = [np.ascontiguousarray(group) for group in groups]
        for i, save in enumerate(of):
            for pending, row in zip(save.records.values(), rows, strict=True):
                if pending.payload is None:
                    pending.payload = row[i]


def _some(blocks: Blocks, which: Sequence[int]) -> Blocks:
    return Blocks([blocks.tables[i] for i in which], [blocks.blocks[i] for i in which], [blocks.keys[i] for i in which])
