"""The pager: blocks come back bit for bit, in the device's order, from the fastest tier that has them."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers import (
    FACTS,
    POOLS,
    RAM,
    SLOW,
    Pagers,
    RedisServer,
    arrivals,
    disk,
    good,
    key,
    round_trip,
    until,
)

from antiphon.actors.pager import PagerActor
from antiphon.actors.protocol import COPY, LOAD, SAVE, Configured, Mounted, Page


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


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


@pytest.mark.parametrize("read_back", [True, False], ids=["written", "under way"])
async def test_blocks_come_back_from_a_device_that_answers_at_once(read_back: bool, tmp_path: Path) -> None:
    async with Pagers(RAM, disk(tmp_path), instant=True) as pager:
        await round_trip(pager, read_back)
        await pager.store(0, [0, 1], [70, 71])
        await pager.written()
        assert pager.levels()[1]["saved"] >= 4


async def test_mounted_says_what_the_tiers_want(tmp_path: Path) -> None:
    cases: list[tuple[tuple[Any, ...], Mounted]] = [
        ((), Mounted(False)), ((RAM,), Mounted(True, False, True)), ((disk(tmp_path),), Mounted(True, True)),
        ((RAM, disk(tmp_path)), Mounted(True, True, True))]
    for tiers, wanted in cases:
        async with Pagers(*tiers) as pager:
            assert await pager.hear(Mounted) == wanted


async def test_what_was_stored_is_found_after_a_restart_by_the_same_model_only(tmp_path: Path) -> None:
    async with Pagers(disk(tmp_path)) as pager:
        wanted = [pager.device.block(0, b) for b in range(4)]
        await pager.store(0, [0, 1, 2, 3], [0, 1, 2, 3])
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
        await until(lambda: len(pager.device.log) == 2)
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
        await pager.store(0, [0, 1], [0, 1])
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
        await pager.store(0, [0, 1], [0, 1])
        await pager.written()
        pager.device.log.clear()
        pager.save(0, [0, 1, 2], [0, 1, 2])
        await pager.written()
        assert pager.device.log == [("read", 0, [2])]
        await pager.store(0, [0, 1], [0, 1])


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


# ---- estimates and facts


async def test_found_tells_how_long_a_load_would_take() -> None:
    async with Pagers({**SLOW, "latency": "20ms", "bandwidth": "10MB/s"}) as pager:
        pager.save(0, [0, 1], [0, 1])
        await pager.written()
        _, found = await pager.find(0, 1)
        assert 0.01 < found.latency < 0.1
        assert 5e6 < found.rate < 20e6
        pager.load(0, [8, 9], [0, 1])
        await arrivals(pager, 2)
        _, none = await pager.find(5)
        assert none.rate > 0, "what a load will take is told even when nothing is there"


async def test_a_load_under_way_makes_the_next_one_wait() -> None:
    async with Pagers({**SLOW, "latency": "20ms", "bandwidth": "2MB/s"}) as pager:
        level = pager.actor.pager.levels[0]
        idle = level.delay()
        level.reading += 1_000_000
        assert level.delay() > idle + 0.2
        level.reading -= 1_000_000


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
        await pager.store(0, [0, 1, 2], [0, 1, 2])
    async with Pagers(disk(tmp_path)) as pager:
        assert (await pager.find(0, 1, 2))[0][0] == [1, 1, 1]
