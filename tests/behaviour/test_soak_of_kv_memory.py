"""Everything at once for a long time, in a pool of half the memory that is wanted, over tiers that fail.

    ANTIPHON_SOAK_S=1200 ANTIPHON_SOAK_SEED=7 pytest -m soak -s tests/behaviour/test_soak_of_kv_memory.py

The seed is printed; given again, the same callers ask the same things in the same order, and the tiers fail alike.
"""

import asyncio
import gc
import os
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests import soak
from tests.callers import Answer, answered, owed
from tests.harness import graph
from tests.tiers import RedisServer

from antiphon.actors.columns import pack
from antiphon.actors.protocol import Flush, Pin, Unpin
from antiphon.plugins.doors.client import AsyncClient

SECONDS = float(os.environ.get("ANTIPHON_SOAK_S", "1200"))
SEED = int(os.environ.get("ANTIPHON_SOAK_SEED", "0")) or time.time_ns() % 1_000_000
ROUND = 6.0  # seconds of arrivals, then all is left to end
STALL = 30.0  # seconds: a quarter of the deadline after which the root kills a cell
NEWS = 120.0  # seconds in which every caller must hear something
POOL = 200  # blocks of 8 tokens: two bursts of 24 callers, some 200 tokens each, want more than twice as much


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    server.limit(8 << 20)
    yield server
    server.kill()


def settings(cache: str, home: Path, store: RedisServer) -> tuple[str, ...]:
    disk = f"{{plugin='disk', path={str(home / 'kv')!r}, size='12MiB'}}"
    tiers = (
        "{plugin='ram', size='256KiB'}",
        (f"{{plugin='throttled', bandwidth='20MB/s', latency='1ms', corrupt=0.02, fail=0.0005, seed={SEED}, "
         f"tier={disk}}}"),
        f"{{plugin='redis', url={store.url!r}, timeout='500ms'}}")
    eviction, delivery = ("lru", "zmq") if cache == "hash" else ("cost", "direct")
    return (
        f"delivery={delivery!r}", f"actors.allocator.plugin={cache!r}",
        f"actors.allocator.options.eviction={{plugin={eviction!r}}}", "actors.allocator.options.block_size=8",
        f"actors.allocator.options.blocks={POOL}", f"actors.allocator.options.secret={str(home / 'secret')!r}",
        "actors.scheduler.options.max_chunk=64", "actors.pager.plugin='tiered'",
        f"actors.pager.options.tiers=[{', '.join(tiers)}]", "actors.pager.options.retry='50ms'",
        "actors.pager.options.longest='500ms'", "actors.pager.options.stuck='2s'",
        # A prompt takes so long that some loads are worth it and others are not.
        "actors.executor.options.step_seconds=0.001", "actors.executor.options.prefill_row_s=0.0001",
    )


class Soak:
    """One deployment in this process, and what happens to it."""

    def __init__(self, llm: Any, client: AsyncClient, store: RedisServer):
        self.llm, self.client, self.store = llm, client, store
        self.pins: list[int] = []
        self.answers = 0

    async def round(self, events: list[soak.Event]) -> None:
        """All of it, then what is left open is let go."""
        began, tasks = time.monotonic(), []
        for event in events:
            await asyncio.sleep(max(0.0, began + event.at - time.monotonic()))
            if event.kind in ("ask", "leave", "samples"):
                tasks.append(asyncio.ensure_future(getattr(self, event.kind)(event)))
            elif event.kind in ("pin", "unpin", "flush"):
                getattr(self, event.kind)(event)
            else:
                self.fault(event.kind)
        for kind in ("cont", "start"):
            self.fault(kind)
        await asyncio.gather(*tasks)
        while self.pins:
            self.unpin(None)

    async def ask(self, event: soak.Event) -> None:
        completion = await self.client.generate(event.ask.prompt, **event.ask.options())
        assert answered(completion) == owed(event.ask), event
        self.answers += 1

    async def leave(self, event: soak.Event) -> None:
        ids: list[int] = []
        stream = self.client.stream(event.ask.prompt, **event.ask.options())
        async for delta in stream:
            ids += delta.ids
            if len(ids) >= event.number:
                break
        await stream.aclose()
        assert ids == owed(event.ask).ids[:len(ids)], event

    async def samples(self, event: soak.Event) -> None:
        ask = event.ask._replace(temperature=1.0)
        made = await self.client.samples(ask.prompt, int(event.number), **ask.options())
        expected: list[Answer] = [owed(ask, sample=i) for i in range(int(event.number))]
        assert list(map(answered, made)) == expected, event
        self.answers += len(made)

    def pin(self, event: soak.Event) -> None:
        message = Pin("soak", "local", pack(event.ask.prompt), event.number)
        if pin := self._allocator(lambda a: a.on_pin(message)).pin:
            self.pins.append(pin)

    def unpin(self, _event: soak.Event | None) -> None:
        if self.pins:
            number = self.pins.pop(0)
            self._allocator(lambda a: a.on_unpin(Unpin(number)))

    def flush(self, _event: soak.Event) -> None:
        self._allocator(lambda a: a.on_flush(Flush()))

    def fault(self, kind: str) -> None:
        """Of the store; what makes no sense now does not happen."""
        process = self.store.process
        alive = process is not None and process.poll() is None
        if kind == "kill":
            self.store.kill()
        elif kind == "start" and not alive:
            self.store.start()
        elif kind in ("stop", "cont") and alive:
            self.store.signal(signal.SIGSTOP if kind == "stop" else signal.SIGCONT)

    async def idle(self) -> None:
        """Soon nothing is left of anybody, and the books agree."""
        ends = time.monotonic() + 2 * STALL
        while (left := self.llm.graph.call(lambda cell: list(soak.left(cell)))) and time.monotonic() < ends:
            await asyncio.sleep(0.05)
        assert not left, left
        audit = self._allocator(lambda a: a.ledger.audit())
        assert audit.faults == []
        facts = self._allocator(lambda a: a.facts())
        assert facts["claims"] == 0

    def _allocator(self, work: Any) -> Any:
        return self.llm.graph.call(lambda cell: work(cell.runners["allocator"].actor))


@pytest.mark.soak
@pytest.mark.timeout(SECONDS + 600)
@pytest.mark.parametrize("cache", ["hash", "radix"])
async def test_callers_faults_and_half_the_memory(cache: str, tmp_path: Path, store: RedisServer) -> None:
    print(f"\nANTIPHON_SOAK_SEED={SEED} ({cache})")
    life, process, sizes = soak.Life(SEED), psutil.Process(), list[float]()
    ends = time.monotonic() + SECONDS / 2
    with graph(*settings(cache, tmp_path, store)) as llm, soak.Watch(llm) as watch:
        async with AsyncClient(llm.address, timeout=NEWS) as client:
            run = Soak(llm, client, store)
            while time.monotonic() < ends:
                events = life.round(ROUND)
                began = time.monotonic()
                try:
                    await run.round(events)
                    await run.idle()
                except BaseException:
                    print(f"round {len(sizes)}: {await client.stats()}")
                    raise
                gc.collect()
                sizes.append(process.memory_info().rss / 2**20)
                print(f"round {len(sizes)}: {len(events)} events, {time.monotonic() - began:.1f} s, "
                      f"{sizes[-1]:.1f} MiB, longest silence {watch.longest:.2f} s ({watch.where})", flush=True)
            found = await client.stats()
    print(f"{run.answers} answers; {found}")
    assert watch.longest < STALL, watch.where
    assert found["scheduler"]["preempted"] > 0
    assert found["allocator"]["tier_slots"] > 0
    assert found["pager"]["tiers"][1]["corrupt"] > 0
    assert found["pager"]["tiers"][2]["failures"] > 0
    third = len(sizes) // 3
    if third >= 4:
        early, late = statistics.median(sizes[third:2 * third]), statistics.median(sizes[2 * third:])
        assert late < 1.05 * early + 2, f"memory grew from {early:.0f} to {late:.0f} MiB"
