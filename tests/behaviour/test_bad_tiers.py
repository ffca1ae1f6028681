"""Tiers that are slow, full, damaged or dead: the pager keeps and finds less, and takes them back in time."""

import asyncio
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiers import QUICK, RAM, SLOW, Pagers, RedisServer, arrivals, disk, good, round_trip, until


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


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
        await pager.store(1, list(range(8)), list(range(8)))
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
        await pager.store(1, list(range(8)), list(range(8)))  # computed anew, and kept again
        await pager.written()
        assert (await pager.find(*range(8)))[0][1] == [1] * 8


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
        await pager.store(0, [0], [50])
        pager.save(0, [0], [51])
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
        await pager.store(0, [1], [60])
        await pager.written()
        assert pager.levels()[1]["saved"] == 2


async def test_redis_that_hangs_in_mid_load_costs_the_load_only(redis: RedisServer) -> None:
    async with Pagers({"plugin": "redis", "url": redis.url, "timeout": "200ms"}, **QUICK) as pager:
        await pager.store(0, [0, 1], [0, 1])
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
        await pager.store(0, [0], [0])
        await pager.written()
        redis.limit(1)
        await pager.store(0, [1], [1])
        await pager.written()
        assert pager.levels()[0]["dropped"] == 2
        assert pager.levels()[0]["state"] == "ok"
        pager.load(0, [9], [0])
        await good(pager, 0, [9])
        redis.limit(0)

        async def stored() -> bool:
            await pager.store(0, [1], [1])
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


async def test_a_tier_that_was_slow_once_is_measured_again() -> None:
    async with Pagers(SLOW, **QUICK, stuck="80ms") as pager:
        pager.save(0, [0], [0])
        await pager.written()
        level = pager.actor.pager.levels[0]
        level.reads.observe(1000, 30.0)
        level.reads.observe(1 << 20, 30.0)
        assert (await pager.find(0))[1].latency > 1
        # Nobody would load at such a price, so no load would show that it is quick again.
        await until(lambda: level.reads.seconds(1 << 18) < 1)
        assert level.state == "ok"


async def test_a_device_that_stopped_first_does_not_hold_up_the_stop() -> None:
    pager = Pagers(RAM)
    await pager.__aenter__()
    gate = threading.Event()
    pager.device.device.enqueue(gate.wait, "busy")
    pager.save(0, [0], [0])
    closing = asyncio.get_running_loop().run_in_executor(None, pager.device.device.close)
    gate.set()
    await closing
    await pager.__aexit__(None)
    assert pager.levels()[0]["state"] == "closed"
