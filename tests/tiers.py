"""A pager on a device of numpy pools, and real Redis servers, for tests of tiers.

It does not know what is tested.
"""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import pytest
import redis

from antiphon.actors.columns import I32, pack, unpack
from antiphon.actors.device import Device
from antiphon.actors.model import Facts, KVGroup
from antiphon.actors.pager import U8, PagerActor, PagerOptions
from antiphon.actors.protocol import COPY, LOAD, SAVE, Arrived, Configured, Find, Found, Mount, Page, Store, Stored
from antiphon.runtime import plugin
from antiphon.runtime.actor import ActorSite
from antiphon.runtime.message import Message
from antiphon.runtime.options import nested, read_options
from antiphon.runtime.tables import Findings

M = TypeVar("M", bound=Message)
T = TypeVar("T")
RAM = {"plugin": "ram", "size": "16MiB"}
SLOW = {"plugin": "throttled", "tier": RAM, "write": "back"}
QUICK = {"retry": "50ms", "longest": "200ms"}  # a tier that failed is opened again soon
WHOLE = KVGroup("whole", 2, 2, 8, "float32")
DRAFT = KVGroup("draft", 1, 1, 8, "float16", owner="drafter")
WINDOW = KVGroup("window", 1, 2, 4, "bfloat16", window=8)
FACTS = Facts("toy", 100, 1000, 3, 16, (WHOLE, DRAFT, WINDOW), digest="d1")
POOLS = Configured(4, (32, 32), ((WHOLE, DRAFT), (WINDOW,)))


def key(i: int) -> bytes:
    """A block key."""
    return i.to_bytes(32, "big")


def make(kind: str, table: Mapping[str, Any], site: Any) -> Any:
    """A plugin from ``{plugin = NAME, ...}``, its options read as a config's are."""
    findings = Findings("test.toml")
    use = nested(kind, table, "test", findings)
    assert use is not None
    cls = plugin.find(kind, use.name)
    options = read_options(cls, use, findings)
    findings.raise_any()
    return cls(options, site)


class Log:
    """Remembers what is logged."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def bind(self, **_: Any) -> "Log":
        return self

    def __getattr__(self, level: str) -> Any:
        return lambda event, **_: self.lines.append(event)


class ToySite:
    """Where a tier is made alone."""

    instance = "pager"

    def __init__(self) -> None:
        self.log = Log()

    def build(self, kind: str, use: Mapping[str, Any]) -> Any:
        return make(kind, use, self)

    def section(self, name: str) -> Any:
        raise LookupError(name)

    def service(self, name: str) -> Any:
        raise LookupError(name)


class Instant:
    """A device whose stages run where they are submitted, at once."""

    def submit(self, stage: Callable[[], T], name: str) -> "asyncio.Future[T]":
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        future.set_result(stage())
        return future

    def enqueue(self, stage: Callable[[], object], name: str) -> None:
        stage()

    def close(self) -> None:
        pass


class ToyBlocks:
    """The service "blocks" over pools of bytes, on a real device thread; ``log`` is the order of the stages."""

    def __init__(self, pools: Configured, instant: bool):
        rng = np.random.default_rng(0)
        self.device: Any = Instant() if instant else Device("test", 1)
        self.pools: list[list[U8]] = [
            [rng.integers(0, 256, (count, g.slot_bytes() * pools.block_size), dtype=np.uint8) for g in groups]
            for count, groups in zip(pools.blocks, pools.groups, strict=True)]
        self.log: list[tuple[str, int, list[int]]] = []

    def read(self, wanted: list[tuple[int, I32]]) -> "asyncio.Future[list[list[U8]]]":
        def stage() -> list[list[U8]]:
            self.log += [("read", table, blocks.tolist()) for table, blocks in wanted]
            return [[pool[blocks] for pool in self.pools[table]] for table, blocks in wanted]

        return self.device.submit(stage, "read")

    def write(self, table: int, blocks: I32, data: list[U8 | None]) -> "asyncio.Future[None]":
        def stage() -> None:
            self.log.append(("write", table, blocks.tolist()))
            for pool, rows in zip(self.pools[table], data, strict=True):
                if rows is not None:
                    pool[blocks] = rows

        return self.device.submit(stage, "write")

    def copy(self, table: int, sources: I32, targets: I32) -> "asyncio.Future[None]":
        def stage() -> None:
            self.log.append(("copy", table, targets.tolist()))
            for pool in self.pools[table]:
                for source, target in zip(sources, targets, strict=True):
                    pool[target] = pool[source]

        return self.device.submit(stage, "copy")

    def block(self, table: int, block: int) -> list[bytes]:
        """Bytes of a block in every group."""
        return [pool[block].tobytes() for pool in self.pools[table]]

    def scribble(self, table: int, *blocks: int) -> None:
        """A later step's write to blocks, as a stage."""
        def stage() -> None:
            for pool in self.pools[table]:
                pool[list(blocks)] = 0xEE

        self.device.enqueue(stage, "step")


class Pagers:
    """A pager actor outside of a cell: what it tells lands in ``heard``."""

    def __init__(self, *tiers: Mapping[str, Any], facts: Facts = FACTS, pools: Configured = POOLS, blocks: bool = True,
                 instant: bool = False, **options: Any):
        self.log = Log()
        self.failures: list[BaseException] = []
        self.heard: list[Message] = []
        self.site = ActorSite("pager", self, self.log, {}, lambda _, cause: self.failures.append(cause))  # type: ignore[arg-type]
        self.device = ToyBlocks(pools, instant)
        if blocks:
            self.site.services["blocks"] = self.device
        self.site.builder = lambda kind, use: make(kind, use, self.site)
        name = "tiered" if tiers else "plain"
        table = {"plugin": name, **({"tiers": [dict(t) for t in tiers]} if tiers else {}), **options}
        self.site.built["pager"] = make("pager", table, self.site)
        self.actor = PagerActor(PagerOptions(), self.site)
        self.actor.sender = "allocator"
        self.facts, self.pools = facts, pools

    def tell(self, sender: str, to: str, message: Message, lane: int) -> None:
        """As Post does."""
        assert (sender, to) == ("pager", "allocator")
        self.heard.append(message)

    async def __aenter__(self) -> Self:
        self.actor.on_mount(Mount(self.facts, self.pools))
        if self.levels():
            await until(lambda: all(level["state"] != "opening" for level in self.levels()))
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        await self.actor.stop(2.0)
        await self.site.cancel_tasks()
        self.device.device.close()
        if kind is None:
            assert not self.failures, self.failures

    def levels(self) -> list[dict[str, Any]]:
        """Facts of the tiers."""
        found: list[dict[str, Any]] = self.actor.facts().get("tiers", [])
        return found

    def page(self, what: int, table: int, blocks: list[int], places: list[int]) -> None:
        """One Page; places of SAVE and LOAD are numbers of keys."""
        keys = [] if what == COPY else places
        numbers = places if what == COPY else range(len(places))
        moves = [n for block, place in zip(blocks, numbers, strict=True) for n in (what, table, block, place)]
        self.actor.on_page(Page(1, pack(moves), b"".join(map(key, keys))))

    def save(self, table: int, blocks: list[int], keys: list[int]) -> None:
        self.page(SAVE, table, blocks, keys)

    async def store(self, table: int, blocks: list[int], keys: list[int]) -> None:
        """Until every block was told to be read, or given up."""
        moves = [n for i, block in enumerate(blocks) for n in (SAVE, table, block, i)]
        self.actor.on_store(Store(pack(moves), b"".join(map(key, keys))))
        told: list[int] = []
        while len(told) < len(blocks):
            told += unpack((await self.hear(Stored)).blocks).tolist()
        assert sorted(told) == sorted(blocks)

    def load(self, table: int, blocks: list[int], keys: list[int]) -> None:
        self.page(LOAD, table, blocks, keys)

    async def find(self, *keys: int) -> tuple[list[list[int]], Found]:
        """Present [table][key] and the whole message."""
        self.actor.on_find(Find(7, b"".join(map(key, keys))))
        found = await self.hear(Found)
        return unpack(found.present).reshape(len(self.pools.blocks), -1).tolist(), found

    async def hear(self, kind: type[M]) -> M:
        """The first message of a kind that was told, taken out."""
        await until(lambda: any(isinstance(m, kind) for m in self.heard) or bool(self.failures))
        assert not self.failures, self.failures
        message = next(m for m in self.heard if isinstance(m, kind))
        self.heard.remove(message)
        return message

    async def written(self) -> None:
        """Everything that was to be saved is, or was dropped."""
        await until(lambda: not self.actor.facts()["pending"] and not any(t["writing_bytes"] for t in self.levels()))


async def until(condition: Any, timeout: float = 20.0) -> None:
    ends = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < ends, "it did not come true in time"
        await asyncio.sleep(0.005)


class RedisServer:
    """A Redis of its own on a unix socket, without persistence."""

    def __init__(self, home: Path):
        found = shutil.which("redis-server") or shutil.which("valkey-server")
        if found is None:
            assert not os.environ.get("ANTIPHON_NEEDS_REDIS"), "redis-server is not installed"
            pytest.skip("needs redis-server: apt-get install redis-server")
        self.socket = home / "redis.sock"
        self.url = f"unix://{self.socket}"
        self.command = [found, "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--appendonly", "no",
                        "--dir", str(home)]
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.socket.unlink(missing_ok=True)
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        ends = time.monotonic() + 10
        while not self.socket.exists():
            assert time.monotonic() < ends, "redis-server does not listen"
            time.sleep(0.01)

    def limit(self, bytes_: int) -> None:
        """maxmemory; 0: none."""
        with redis.Redis.from_url(self.url) as client:
            client.config_set("maxmemory", bytes_)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """kill -9, and a server that was stopped goes on dying."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(10)


def disk(home: Path, **options: Any) -> dict[str, Any]:
    return {"plugin": "disk", "path": str(home / "kv"), "size": "16MiB", **options}


async def round_trip(pager: Pagers, read_back: bool = True) -> None:
    """Save blocks of both tables, let later steps overwrite them, load them elsewhere."""
    device = pager.device
    wanted = {table: [device.block(table, b) for b in range(8)] for table in (0, 1)}
    for table in (0, 1):
        pager.save(table, list(range(8)), list(range(8)))
        device.scribble(table, *range(8))
    if read_back:
        await pager.written()
    assert (await pager.find(*range(9)))[0] == [[1] * 8 + [0]] * 2
    for table in (0, 1):
        pager.load(table, list(range(20, 28)), list(range(8)))
        await good(pager, table, list(range(20, 28)))
        assert [device.block(table, b) for b in range(20, 28)] == wanted[table]


async def arrivals(pager: Pagers, count: int) -> dict[tuple[int, int], int]:
    """(table, block) -> good, of so many blocks."""
    got: dict[tuple[int, int], int] = {}
    while len(got) < count:
        told = await pager.hear(Arrived)
        for table, block, ok in zip(*map(unpack, (told.tables, told.blocks, told.good)), strict=True):
            assert (int(table), int(block)) not in got, "told twice"
            got[int(table), int(block)] = int(ok)
    return got


async def good(pager: Pagers, table: int, blocks: list[int]) -> None:
    assert await arrivals(pager, len(blocks)) == {(table, b): 1 for b in blocks}
