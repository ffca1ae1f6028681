"""A conversation goes on where it was: after ``kill -9`` of everything, on another server, with a tier that fails."""

import random
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis
from tests.callers import assert_owed, at_once
from tests.harness import Server, until
from tests.sessions import after, answer, kept, kill_all, opening, stats, tier, whole, written
from tests.tiers import RedisServer


def disk(home: Path) -> str:
    return f"{{plugin='disk', path={str(home / 'kv')!r}, size='64MiB'}}"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


def on(store: RedisServer) -> str:
    return f"{{plugin='redis', url={store.url!r}}}"


@pytest.mark.parametrize(("moment", "cache"), [("at rest", "hash"), ("while it writes", "radix")])
def test_second_turns_after_kill_nine_of_everything(tmp_path: Path, moment: str, cache: str) -> None:
    settings = kept(tmp_path, disk(tmp_path), cache=cache)
    turns = opening(12, seed=1)
    with Server(tmp_path, *settings) as server:
        answer(server, turns)
        if moment == "at rest":
            written(server)
        kill_all(server)
    with Server(tmp_path, *settings) as server:
        answer(server, after(turns))
        found = whole(server)
        if moment == "at rest":
            assert found["tier_slots"] >= 12 * 60
            assert found["loads_bad"] == 0
        assert tier(server)["corrupt"] == 0  # a killed process leaves whole records, or none


def spoil_files(home: Path, draw: random.Random) -> None:
    """One byte of every third record, wherever it lies; some records lose their end, some all they have."""
    for number, path in enumerate(sorted((home / "kv").glob("??/*"))):
        record = bytearray(path.read_bytes())
        if number % 3 == 0:
            record[draw.randrange(len(record))] ^= 1 << draw.randrange(8)
        elif number % 30 == 1:
            record = record[:draw.randrange(len(record))]
        elif number % 30 == 2:
            record = bytearray()
        path.write_bytes(record)


def spoil_values(url: str, draw: random.Random) -> None:
    with redis.Redis.from_url(url) as client:
        for number, key in enumerate(sorted(client.scan_iter())):
            record = client.get(key)
            if number % 3 == 0 and record:
                at = draw.randrange(len(record))
                client.setrange(key, at, bytes([record[at] ^ 1 << draw.randrange(8)]))


@pytest.mark.parametrize("place", ["disk", "redis"])
def test_flipped_bytes_are_computed_again_and_counted(
    tmp_path: Path, place: str, request: pytest.FixtureRequest,
) -> None:
    draw = random.Random(3)
    if place == "disk":
        table, spoil = disk(tmp_path), partial(spoil_files, tmp_path, draw)
    else:
        shared: RedisServer = request.getfixturevalue("store")
        table, spoil = on(shared), partial(spoil_values, shared.url, draw)
    settings, turns = kept(tmp_path, table), opening(12, seed=2)
    with Server(tmp_path, *settings) as server:
        answer(server, turns)
        written(server)
        assert server.stop() == 0
    spoil()
    with Server(tmp_path, *settings) as server:
        second = after(turns)
        answer(server, second)
        found, kept_there = whole(server), tier(server)
        assert found["loads_bad"] > 0
        assert found["loads_good"] > 0
        assert kept_there["corrupt"] > 0
        assert kept_there["state"] == "ok"
        assert stats(server)["pager"]["loads_bad"] == found["loads_bad"]
        written(server)
        assert server.stop() == 0
    with Server(tmp_path, *settings) as server:  # what was damaged was dropped, and written again
        answer(server, after(second))
        assert tier(server)["corrupt"] == 0
        assert whole(server)["loads_bad"] == 0


def test_redis_killed_in_mid_load(tmp_path: Path, store: RedisServer) -> None:
    slow = f"{{plugin='throttled', latency='50ms', tier={on(store)}}}"
    settings = kept(tmp_path, slow, blocks=80)  # some five conversations
    turns = opening(16, seed=4)
    with Server(tmp_path, *settings) as server:
        answer(server, turns)
        written(server)
        second, got = after(turns), list[Any]()
        before = stats(server)["pager"]["loads"]
        asking = threading.Thread(target=lambda: got.extend(at_once(server.address, second)))
        asking.start()
        until(lambda: tier(server)["reading_bytes"] and stats(server)["pager"]["loads"] > before, what="a load")
        store.signal(signal.SIGSTOP)  # what it is asked now it will never answer
        time.sleep(0.1)
        store.kill()
        asking.join(60)
        assert_owed(second, got)
        until(lambda: tier(server)["state"] == "degraded", what="the tier is degraded")
        store.start()
        until(lambda: tier(server)["state"] == "ok", what="the tier is back")
        fresh = opening(16, seed=5)
        answer(server, fresh)
        written(server)
        brought = stats(server)["allocator"]["tier_slots"]
        answer(server, after(fresh))
        assert whole(server)["tier_slots"] > brought


def test_another_server_goes_on_with_the_session(tmp_path: Path, store: RedisServer) -> None:
    settings, turns = kept(tmp_path, on(store)), opening(8, seed=6)
    with Server(tmp_path / "one", *settings) as one, Server(tmp_path / "two", *settings) as two:
        answer(one, turns)
        written(one)
        second = after(turns)
        answer(two, second)
        assert whole(two)["tier_slots"] >= 8 * 60
        written(two)
        before = whole(one)["tier_slots"]
        answer(one, after(second))  # and back again
        assert whole(one)["tier_slots"] > before
