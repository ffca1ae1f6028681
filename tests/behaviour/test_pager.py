"""The pager: blocks come back bit for bit, in the device's order, and a bad tier only makes it keep and find less."""

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers import FACTS, POOLS, Pagers, RedisServer, key, until

from antiphon.actors.columns import unpack
from antiphon.actors.pager import PagerActor
from antiphon.actors.protocol import COPY, LOAD, SAVE, Arrived, Configured, Mounted, Page, Stored

RAM = {"plugin": "ram", "size": "16MiB"}
SLOW = {"plugin": "throttled", "tier": RAM, "write": "back"}
QUICK = {"retry": "50ms", "longest": "200ms"}  # a tier that failed is opened again soon


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


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
    present, found = await pager.find(*range(9))
    assert present == [[1] * 8 + [0]] * 2
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


# ---- round trips


@pytest.mark.parametrize("read_back", [True, False], ids=["written", "under way"])
@pytest.mark.parametrize("name", ["ram", "disk", "redis", "throttled", "ram and disk", "all", "back only"])
async def test_blocks_come_back_bit_for_bit(name: str, read_back: bool, tmp_path: Path,
                                            request: pytest.FixtureRequest) -> None:
    url = request.getfixturevalue("redis").url if name in ("redis", "all") else ""
    store = {"plugin": "redis", "url": url}
    tiers: dict[str, list[dict[str, Any]]] = {
        "ram": [RAM], "disk": [disk(tmp_path)], "redis": [store], "throttled": [SLOW],
        "ram and disk": [RAM, disk(tmp_path)], "all": [RAM, disk(tmp_path), store],
        "back only": [{**RAM, "size": "12KB"}, disk(tmp_path, write="back")]}
    async with Pagers(*tiers[name]) as pager:
        await round_trip(pager, read_back)


async def test_mounted_says_what_the_tiers_want(tmp_path: Path) -> None:
    for tiers, wanted in (((), Mounted(False)), ((RAM,), Mounted(True)), ((disk(tmp_path),), Mounted(True, True))):
        async with Pagers(*tiers) as pager:
            assert await pager.hear(Mounted) == wanted


async def test_what_was_stored_is_found_after_a_restart_by_the_same_model_only(tmp_path: Path) -> None:
    async with Pagers(disk(tmp_path)) as pager:
        wanted = [pager.device.block(0, b) for b in range(4)]
        pager.store(0, [0, 1, 2, 3], [0, 1, 2, 3])
        told = await pager.hear(Stored)
        assert unpack(told.blocks).tolist() == [0, 1, 2, 3]
    async with Pagers(disk(tmp_path)) as pager:
        assert (await pager.find(0, 1, 2, 3, 4))[0] == [[1, 1, 1, 1, 0], [0] * 5]
        pager.load(0, [10, 11, 12, 13], [0, 1, 2, 3])
        await good(pager, 0, [10, 11, 12, 13])
        assert [pager.device.block(0, b) for b in range(10, 14)] == wanted
    for other in ({"digest": "d2"}, {"name": "toy"}):
        facts = type(FACTS)(**{f: getattr(FACTS, f) for f in FACTS.__struct_fields__} | other)
        async with Pagers(disk(tmp_path), facts=facts) as pager:
            assert (await pager.find(0))[0] == [[int("name" in other)], [0]]
    async with Pagers(disk(tmp_path), pools=Configured(8, POOLS.blocks, POOLS.groups)) as pager:
        assert (await pager.find(0))[0] == [[0], [0]]


# ---- order


async def test_moves_are_queued_before_paged_and_in_their_order() -> None:
    async with Pagers(RAM) as pager:
        old = pager.device.block(0, 5)
        source = pager.device.block(0, 1)
        moves = [(SAVE, 0, 5, 0), (COPY, 0, 1, 5), (SAVE, 0, 5, 1), (COPY, 0, 2, 5)]
        gate = threading.Event()
        pager.device.device.enqueue(gate.wait, "busy")
        pager.actor.on_page(Page(1, np.array(moves, "<i4").tobytes(), key(0) + key(1)))
        pager.device.scribble(0, 1, 2, 5)
        gate.set()
        await pager.written()
        assert [line[0] for line in pager.device.log] == ["read", "copy", "read", "copy"]
        pager.load(0, [8, 9], [0, 1])
        await good(pager, 0, [8, 9])
        assert [pager.device.block(0, 8), pager.device.block(0, 9)] == [old, source]


async def test_a_load_behind_its_own_save_in_one_page_gets_what_was_saved() -> None:
    async with Pagers({**SLOW, "latency": "20ms"}) as pager:
        old = pager.device.block(0, 5)
        moves = [(SAVE, 0, 5, 0), (LOAD, 0, 6, 0), (LOAD, 0, 7, 1)]
        pager.actor.on_page(Page(1, np.array(moves, "<i4").tobytes(), key(0) + key(1)))
        assert await arrivals(pager, 2) == {(0, 6): 1, (0, 7): 0}
        assert pager.device.block(0, 6) == old


@pytest.mark.parametrize("tiers", [(), (RAM,)], ids=["plain", "tiered"])
async def test_chained_copies_see_each_other(tiers: tuple[Any, ...]) -> None:
    async with Pagers(*tiers) as pager:
        first = [pager.device.block(t, 0) for t in (0, 1)]
        for table in (0, 1):
            pager.page(COPY, table, [0, 1, 2], [1, 2, 3])
        await until(lambda: len(pager.device.log) == 6)
        assert [[pager.device.block(t, b) for b in (1, 2, 3)] for t in (0, 1)] == [[f] * 3 for f in first]


async def test_the_plain_pager_copies_and_says_what_it_cannot() -> None:
    async with Pagers() as pager:
        with pytest.raises(ValueError, match="name a pager that has some"):
            pager.save(0, [0], [0])
        pager.page(COPY, 0, [0, 2], [1, 3])
        await until(lambda: pager.device.block(0, 3) == pager.device.block(0, 2))
        pager.load(0, [0], [0])
        await until(lambda: pager.failures)
        assert "cannot be loaded" in str(pager.failures.pop())
    async with Pagers(blocks=False) as pager:
        with pytest.raises(LookupError, match="place the pager in the executor's cell"):
            pager.page(COPY, 0, [0], [1])


async def test_a_copy_that_fails_is_the_actor_s_failure() -> None:
    async with Pagers() as pager:
        pager.page(COPY, 0, [99], [1])
        await until(lambda: pager.failures)
        assert isinstance(pager.failures.pop(), IndexError)


# ---- the hierarchy


async def test_a_hit_in_a_slower_tier_is_promoted(tmp_path: Path) -> None:
    async with Pagers(RAM, disk(tmp_path)) as pager:
        pager.store(0, [0, 1], [0, 1])
        await pager.written()
        assert [t["records"] for t in pager.levels()] == [0, 4]
        pager.load(0, [8, 9], [0, 1])
        await good(pager, 0, [8, 9])
        await pager.written()
        assert [t["records"] for t in pager.levels()] == [4, 4]
        pager.load(0, [10, 11], [0, 1])
        await good(pager, 0, [10, 11])
        assert [t["hits"] for t in pager.levels()] == [4, 4]


async def test_what_ram_evicts_goes_to_the_next_tier_that_writes_back(tmp_path: Path) -> None:
    async with Pagers({**RAM, "size": "6KiB"}, disk(tmp_path, write="back")) as pager:
        wanted = [pager.device.block(0, b) for b in range(8)]
        for b in range(8):
            pager.save(0, [b], [b])
        await pager.written()
        ram, below = pager.levels()
        assert ram["bytes"] <= 6 << 10
        assert ram["records"] + below["records"] >= 16
        assert below["saved"] > 0
        pager.load(0, list(range(10, 18)), list(range(8)))
        await good(pager, 0, list(range(10, 18)))
        assert [pager.device.block(0, b) for b in range(10, 18)] == wanted


async def test_an_evicted_block_that_was_written_through_is_not_read_again(tmp_path: Path) -> None:
    async with Pagers(disk(tmp_path)) as pager:
        pager.store(0, [0, 1], [0, 1])
        await pager.written()
        pager.device.log.clear()
        pager.save(0, [0, 1, 2], [0, 1, 2])
        await pager.written()
        assert pager.device.log == [("read", 0, [2])]
        pager.store(0, [0, 1], [0, 1])
        await pager.hear(Stored)
        await pager.hear(Stored)


# ---- groups


async def test_a_drafters_group_that_is_missing_is_left_alone_and_counted(tmp_path: Path) -> None:
    async with Pagers(RAM) as pager:
        tiered: Any = pager.actor.pager
        target, draft = tiered.layout.keys(0, key(0))
        whole = pager.device.block(0, 0)[0]
        pager.save(0, [0], [0])
        await pager.written()
        tiered.tiers[0][1].drop([draft])
        kept = pager.device.block(0, 9)[1]
        assert (await pager.find(0))[0] == [[1], [0]]
        pager.load(0, [9], [0])
        await good(pager, 0, [9])
        assert pager.device.block(0, 9) == [whole, kept]
        assert pager.actor.facts()["auxiliary_missing"] == 1
        tiered.tiers[0][1].drop([target])
        assert (await pager.find(0))[0] == [[0], [0]]
        pager.load(0, [9], [0])
        assert await arrivals(pager, 1) == {(0, 9): 0}


# ---- bad tiers


def flip(home: Path, share: float = 1.0) -> int:
    """Flip a byte in stored files; how many."""
    rng = np.random.default_rng(1)
    files = [p for p in (home / "kv").rglob("*") if len(p.name) == 64 and rng.random() < share]
    for path in files:
        data = bytearray(path.read_bytes())
        data[int(rng.integers(len(data)))] ^= 0xFF
        path.write_bytes(data)
    return len(files)


async def test_flipped_bytes_are_counted_dropped_and_reported_missing(tmp_path: Path) -> None:
    async with Pagers(disk(tmp_path)) as pager:
        wanted = [pager.device.block(1, b) for b in range(8)]
        pager.store(1, list(range(8)), list(range(8)))
        await pager.written()
        damaged = flip(tmp_path, 0.5)
        assert 0 < damaged < 8
        before = [pager.device.block(1, b) for b in range(10, 18)]
        pager.load(1, list(range(10, 18)), list(range(8)))
        got = await arrivals(pager, 8)
        for i in range(8):
            assert pager.device.block(1, 10 + i) == (wanted if got[1, 10 + i] else before)[i]
        (level,) = pager.levels()
        assert (list(got.values()).count(0), level["corrupt"], level["state"]) == (damaged, damaged, "ok")
        assert sum((await pager.find(*range(8)))[0][1]) == 8 - damaged


async def test_a_store_that_lies_never_reaches_the_device() -> None:
    async with Pagers({**SLOW, "corrupt": 0.5, "seed": 3}) as pager:
        wanted = [pager.device.block(1, b) for b in range(16)]
        pager.save(1, list(range(16)), list(range(16)))
        await pager.written()
        pager.load(1, list(range(16, 32)), list(range(16)))
        got = await arrivals(pager, 16)
        assert {got[1, 16 + i] for i in range(16)} == {0, 1}
        assert all(pager.device.block(1, 16 + i) == wanted[i] for i in range(16) if got[1, 16 + i])


async def test_redis_killed_and_started_again_comes_back_by_itself(redis: RedisServer) -> None:
    async with Pagers({"plugin": "redis", "url": redis.url}, **QUICK) as pager:
        await round_trip(pager)
        redis.kill()
        pager.load(0, [10, 11], [0, 1])
        assert await arrivals(pager, 2) == {(0, 10): 0, (0, 11): 0}
        assert (await pager.find(0, 1))[0] == [[0, 0], [0, 0]]
        pager.store(0, [0], [50])
        pager.save(0, [0], [51])
        await pager.hear(Stored)
        (level,) = pager.levels()
        assert (level["state"], level["errors"], level["failures"]) == ("degraded", 1, 1)
        assert level["cause"]
        redis.start()
        await until(lambda: pager.levels()[0]["state"] == "ok")
        await round_trip(pager)
        assert [line for line in pager.log.lines if "tier" in line] == [
            "tier is degraded: it holds nothing until it opens again", "tier is back"]


async def test_redis_that_is_not_there_at_the_start_is_found_later(redis: RedisServer) -> None:
    redis.kill()
    async with Pagers(RAM, {"plugin": "redis", "url": redis.url}, **QUICK) as pager:
        assert [t["state"] for t in pager.levels()] == ["ok", "degraded"]
        await round_trip(pager)
        redis.start()
        await until(lambda: pager.levels()[1]["state"] == "ok")
        pager.store(0, [1], [60])
        await pager.written()
        assert pager.levels()[1]["saved"] == 2


async def test_redis_that_hangs_in_mid_load_costs_the_load_only(redis: RedisServer) -> None:
    async with Pagers({"plugin": "redis", "url": redis.url, "timeout": "200ms"}, **QUICK) as pager:
        pager.store(0, [0, 1], [0, 1])
        await pager.written()
        redis.signal(signal.SIGSTOP)
        pager.load(0, [10, 11], [0, 1])
        assert await arrivals(pager, 2) == {(0, 10): 0, (0, 11): 0}
        redis.signal(signal.SIGCONT)
        await until(lambda: pager.levels()[0]["state"] == "ok")
        pager.load(0, [10, 11], [0, 1])
        await good(pager, 0, [10, 11])


async def test_a_slow_tier_is_not_waited_for_when_looking() -> None:
    async with Pagers(RAM, {**SLOW, "latency": "400ms"}, look="50ms") as pager:
        pager.save(0, [0], [0])
        present, _ = await pager.find(0, 1)
        assert present == [[1, 0], [0, 0]]
        assert pager.levels()[1]["late"] == 1
        await pager.find(0)
        assert pager.levels()[1]["late"] == 1, "while a look-up is late no other is begun"
        await until(lambda: not pager.actor.pager.levels[1]._looks)


async def test_a_load_ends_at_its_deadline_and_writes_nothing_later() -> None:
    async with Pagers({**SLOW, "latency": "300ms"}, load="100ms") as pager:
        pager.save(0, [0], [0])
        await pager.written()
        before = pager.device.block(0, 9)
        pager.load(0, [9], [0])
        assert await arrivals(pager, 1) == {(0, 9): 0}
        await until(lambda: not pager.actor.pager.levels[0]._worker.busy_since)
        pager.load(0, [], [])
        assert pager.device.block(0, 9) == before
        assert pager.levels()[0]["late"] == 1


async def test_a_stuck_tier_is_given_up_and_taken_back() -> None:
    async with Pagers(SLOW, **QUICK, stuck="100ms") as pager:
        inner = pager.actor.pager.tiers[0][1].inner
        gate, get = threading.Event(), inner.get
        inner.get = lambda keys: (gate.wait(20), get(keys))[1]
        pager.save(0, [0], [0])
        await pager.written()
        pager.load(0, [9], [0])
        assert await arrivals(pager, 1) == {(0, 9): 0}
        assert "no answer within 0.1 s" in pager.levels()[0]["cause"]
        pager.save(0, [1], [1])
        assert (await pager.find(0))[0] == [[0], [0]]
        inner.get = get
        gate.set()
        await until(lambda: pager.levels()[0]["state"] == "ok")
        pager.load(0, [9], [0])
        await good(pager, 0, [9])


async def test_saves_beyond_the_queue_are_dropped_counted_and_not_read() -> None:
    size = 2200  # a block of table 0 with its headers is 1,376 bytes
    async with Pagers({**SLOW, "latency": "100ms", "queue": size}) as pager:
        pager.save(0, [0], [0])
        pager.save(0, [1, 2], [1, 2])
        assert pager.levels()[0]["dropped"] == 4
        await pager.written()
        assert pager.device.log == [("read", 0, [0])]
        pager.save(0, [1], [1])
        await pager.written()
        assert pager.levels()[0]["saved"] == 4


async def test_a_full_tier_is_left_alone_for_a_while_and_still_read(redis: RedisServer) -> None:
    async with Pagers({"plugin": "redis", "url": redis.url}, **QUICK) as pager:
        pager.store(0, [0], [0])
        await pager.written()
        redis.limit(1)
        pager.store(0, [1], [1])
        await pager.written()
        assert pager.levels()[0]["dropped"] == 2
        assert pager.levels()[0]["state"] == "ok"
        pager.load(0, [9], [0])
        await good(pager, 0, [9])
        redis.limit(0)

        async def stored() -> bool:
            pager.store(0, [1], [1])
            await pager.written()
            return bool(pager.levels()[0]["saved"] == 4)

        while not await stored():
            pass


async def test_random_faults_never_lose_a_block_s_answer() -> None:
    rng = np.random.default_rng(7)
    faulty = {**SLOW, "fail": 0.1, "corrupt": 0.2, "seed": 5}
    async with Pagers({**RAM, "size": "8KiB"}, faulty, retry="5ms", longest="20ms") as pager:
        truth = {i: pager.device.block(1, i) for i in range(16)}
        for _ in range(60):
            some = rng.choice(16, 4, replace=False).tolist()
            pager.save(1, some, some)
            keys = rng.choice(16, 4, replace=False).tolist()
            pager.load(1, list(range(20, 24)), keys)
            for (_, block), ok in (await arrivals(pager, 4)).items():
                assert not ok or pager.device.block(1, block) == truth[keys[block - 20]]
        await pager.written()
        assert pager.levels()[1]["failures"] > 0


# ---- estimates and facts


async def test_found_tells_how_long_a_load_would_take() -> None:
    async with Pagers({**SLOW, "latency": "20ms", "bandwidth": "10MB/s"}) as pager:
        pager.save(0, [0, 1], [0, 1])
        await pager.written()
        _, found = await pager.find(0, 1)
        assert 0.01 < found.latency < 0.1
        assert 5e6 < found.rate < 20e6
        pager.load(0, [8, 9], [0, 1])
        _, busy = await pager.find(0, 1)
        await arrivals(pager, 2)
    async with Pagers(RAM) as pager:
        assert (await pager.find(0))[1].rate == 0


async def test_facts_name_every_tier(tmp_path: Path) -> None:
    async with Pagers(RAM, disk(tmp_path)) as pager:
        await round_trip(pager)
        ram, below = pager.levels()
        for level in (ram, below):
            assert {"tier", "write", "state", "since", "bytes", "records", "capacity", "hits", "misses", "saved",
                    "dropped", "corrupt", "errors", "latency_s", "bytes_per_s", "reading_bytes", "writing_bytes",
                    } <= level.keys()
            assert (level["reading_bytes"], level["writing_bytes"]) == (0, 0)
        assert (ram["write"], below["write"]) == ("back", "through")
        facts = pager.actor.facts()
        assert (facts["saves"], facts["loads"], facts["loads_bad"], facts["finds"]) == (16, 16, 0, 1)


def test_the_server_degrades_to_the_plain_pager() -> None:
    assert PagerActor.stand_in == "plain"


async def test_closing_writes_what_is_queued(tmp_path: Path) -> None:
    slow = {"plugin": "throttled", "tier": disk(tmp_path), "latency": "50ms"}
    async with Pagers(slow) as pager:
        pager.store(0, [0, 1, 2], [0, 1, 2])
        await pager.hear(Stored)
    async with Pagers(disk(tmp_path)) as pager:
        assert (await pager.find(0, 1, 2))[0][0] == [1, 1, 1]
