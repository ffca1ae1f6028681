"""Every tier keeps, finds, forgets and bounds records in the same way."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tiers import RedisServer, ToySite, key, make

from antiphon.actors.tier import Tier, TierError, TierFull
from antiphon.plugins.pagers.records import wrap

TIERS = ("ram", "disk", "redis", "throttled")


def table(name: str, home: Path, redis: Any, size: int | str = "4MiB") -> dict[str, Any]:
    tables: dict[str, dict[str, Any]] = {
        "ram": {"plugin": "ram", "size": size},
        "disk": {"plugin": "disk", "path": str(home / "kv"), "size": size},
        "throttled": {"plugin": "throttled", "tier": {"plugin": "ram", "size": size}, "bandwidth": "1GB/s"},
    }
    return tables[name] if name in tables else {"plugin": "redis", "url": redis().url}


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Callable[[], RedisServer]]:
    """Starts a server when it is called."""
    made: list[RedisServer] = []

    def start() -> RedisServer:
        made.append(RedisServer(tmp_path))
        return made[-1]

    yield start
    for server in made:
        server.kill()


@pytest.fixture(params=TIERS)
def tier(request: pytest.FixtureRequest, tmp_path: Path, redis: Any) -> Iterator[Tier[Any]]:
    made = make("tier", table(request.param, tmp_path, redis), ToySite())
    made.open()
    yield made
    made.close()


def test_random_records_come_back_bit_for_bit(tier: Tier[Any]) -> None:
    rng = np.random.default_rng(3)
    records = [(key(i), rng.bytes(int(rng.integers(0, 100_000)))) for i in range(30)]
    assert tier.put(records) == []
    order = rng.permutation(30).tolist()
    assert tier.get([key(i) for i in order]) == [records[i][1] for i in order]


def test_what_is_not_there_is_none(tier: Tier[Any]) -> None:
    tier.put([(key(1), b"one")])
    assert tier.get([key(2), key(1), key(3)]) == [None, b"one", None]
    assert tier.has([key(2), key(1)]) == [False, True]
    assert tier.get([]) == []
    assert tier.has([]) == []


def test_a_record_is_replaced_and_dropped(tier: Tier[Any]) -> None:
    tier.put([(key(1), b"one")])
    tier.put([(key(1), b"another"), (key(2), b"two")])
    assert tier.get([key(1)]) == [b"another"]
    tier.drop([key(1), key(9)])
    tier.drop([])
    assert tier.has([key(1), key(2)]) == [False, True]
    assert tier.usage().records == 1
    assert tier.usage().bytes > 0


def test_opening_again_keeps_what_was_there(tier: Tier[Any]) -> None:
    tier.put([(key(1), b"one")])
    tier.open()
    assert tier.get([key(1)]) == [b"one"]


@pytest.mark.parametrize("name", ["ram", "disk"])
def test_the_least_recently_used_make_room(name: str, tmp_path: Path) -> None:
    tier = make("tier", table(name, tmp_path, None, "41KiB"), ToySite())
    tier.open()
    record = bytes(8000)
    gone: list[bytes] = []
    for i in range(4):
        gone += [k for k, _ in tier.put([(key(i), record)])]
    tier.get([key(0)])
    for i in range(4, 7):
        gone += [k for k, _ in tier.put([(key(i), record)])]
        assert tier.usage().bytes <= 41 << 10 == tier.usage().capacity
    assert gone == [key(1), key(2)]
    assert tier.has([key(0), key(1)]) == [True, False]
    with pytest.raises(TierFull, match="larger than size"):
        tier.put([(key(9), bytes(42 << 10))])
    assert tier.has([key(0)]) == [True]
    tier.close()


def test_ram_hands_over_what_it_evicts(tmp_path: Path) -> None:
    tier = make("tier", table("ram", tmp_path, None, "10KiB"), ToySite())
    tier.put([(key(1), b"a" * 6000)])
    assert tier.put([(key(2), b"b" * 6000)]) == [(key(1), b"a" * 6000)]


# ---- disk


def disk(home: Path, size: str = "4MiB") -> Any:
    return make("tier", table("disk", home, None, size), ToySite())


def test_the_disk_s_records_and_their_order_survive_a_restart(tmp_path: Path) -> None:
    one = disk(tmp_path)
    one.open()
    for i in range(5):
        one.put([(key(i), bytes([i]) * 5000)])
    one.get([key(0)])
    one.close()
    two = disk(tmp_path)
    two.open()
    assert two.get([key(i) for i in range(5)]) == [bytes([i]) * 5000 for i in range(5)]
    two.close()
    small = disk(tmp_path, "16KiB")  # it shrank: the most recently used two files of 8 KiB stay
    small.open()
    assert small.usage().bytes == 16 << 10
    assert small.has([key(3), key(4), key(2)]) == [True, True, False]
    small.close()


def test_a_second_server_is_refused_the_directory(tmp_path: Path) -> None:
    one, two = disk(tmp_path), disk(tmp_path)
    one.open()
    with pytest.raises(TierError, match="in use by another server: give each a path of its own"):
        two.open()
    one.close()
    two.open()
    two.close()


def test_the_disk_s_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier.open()
    tier.put([(key(1), b"x")])
    assert all(p.stat().st_mode & 0o077 == 0 for p in [tmp_path / "kv", *(tmp_path / "kv").rglob("*")])
    tier.close()


def test_foreign_files_and_removed_ones_do_no_harm(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    tier.open()
    tier.put([(key(1), b"x"), (key(2), b"y")])
    (tmp_path / "kv" / "notes.txt").write_text("mine")
    (tmp_path / "kv" / "00" / "notes.txt").write_text("mine")
    (tmp_path / "kv" / "00" / key(1).hex()).unlink()
    assert tier.get([key(1), key(2)]) == [None, b"y"]
    assert tier.has([key(1)]) == [False]
    tier.open()
    assert tier.usage().records == 1
    assert (tmp_path / "kv" / "00" / "notes.txt").exists()
    tier.close()


def test_a_full_disk_is_told_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = disk(tmp_path)
    tier.open()
    tier.put([(key(1), b"x")])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(TierFull, match="No space left"):
        tier.put([(key(2), b"y")])
    monkeypatch.undo()
    assert tier.has([key(2)]) == [False]
    assert not (tmp_path / "kv" / "writing").exists()
    tier.close()


WRITER = """
import sys
from tests.tiers import ToySite, key, make
from antiphon.plugins.pagers.records import wrap
tier = make("tier", {"plugin": "disk", "path": sys.argv[1], "size": "2MiB"}, ToySite())
tier.open()
i = 0
while True:
    tier.put([(key(i % 500), wrap(key(i % 500), bytes([i % 251]) * (20_000 + i % 7)))])
    print(i, flush=True)
    i += 1
"""


@pytest.mark.parametrize("trial", range(3))
def test_a_killed_writer_leaves_whole_records_only(tmp_path: Path, trial: int) -> None:
    from antiphon.plugins.pagers.records import unwrap

    process = subprocess.Popen([sys.executable, "-P", "-c", WRITER, str(tmp_path / "kv")], stdout=subprocess.PIPE,
                               cwd=Path(__file__).parents[2], env={**os.environ, "PYTHONPATH": _path()})
    assert process.stdout is not None
    for _ in range(60 + 37 * trial):
        last = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    process.stdout.close()
    tier = disk(tmp_path, "2MiB")
    tier.open()
    held = list(tier.sizes)
    assert len(held) > 30
    assert tier.usage().bytes <= 2 << 20
    for k, record in zip(held, tier.get(held), strict=True):
        assert unwrap(k, record)
    assert tier.has([key(last % 500)]) == [True]
    assert not (tmp_path / "kv" / "writing").exists()
    tier.close()


def _path() -> str:
    return os.pathsep.join([str(Path(__file__).parents[2]), *(p for p in sys.path if p)])


# ---- redis


def test_redis_keys_have_the_prefix_and_expire(tmp_path: Path, redis: Any) -> None:
    server = redis()
    tier = make("tier", {"plugin": "redis", "url": server.url, "prefix": "here:", "ttl": "100ms"}, ToySite())
    other = make("tier", {"plugin": "redis", "url": server.url}, ToySite())
    tier.open()
    other.open()
    tier.put([(key(1), b"x")])
    assert tier.has([key(1)]) == [True]
    assert other.has([key(1)]) == [False]
    ends = time.monotonic() + 10
    while tier.has([key(1)])[0]:
        assert time.monotonic() < ends
        time.sleep(0.02)
    tier.close()
    other.close()


def test_two_clients_of_one_redis_share(tmp_path: Path, redis: Any) -> None:
    server = redis()
    one, two = (make("tier", {"plugin": "redis", "url": server.url}, ToySite()) for _ in range(2))
    one.open()
    two.open()
    record = wrap(key(5), bytes(100_000))
    one.put([(key(5), record)])
    assert two.get([key(5)]) == [record]
    one.close()
    two.close()


def test_a_full_redis_is_told_as_full(tmp_path: Path, redis: Any) -> None:
    server = redis()
    tier = make("tier", {"plugin": "redis", "url": server.url}, ToySite())
    tier.open()
    tier.put([(key(0), b"x")])
    server.limit(1)
    with pytest.raises(TierFull, match="memory is full"):
        tier.put([(key(1), b"x")])
    assert tier.has([key(0)]) == [True]
    tier.close()


def test_a_dead_redis_is_an_error_and_opens_again(tmp_path: Path, redis: Any) -> None:
    server = redis()
    tier = make("tier", {"plugin": "redis", "url": server.url}, ToySite())
    tier.open()
    server.kill()
    for call in (lambda: tier.get([key(1)]), lambda: tier.has([key(1)]), lambda: tier.put([(key(1), b"")]), tier.open):
        with pytest.raises(TierError):
            call()
    server.start()
    tier.open()
    assert tier.has([key(1)]) == [False]
    tier.close()


def test_a_redis_that_hangs_is_an_error_after_the_timeout(tmp_path: Path, redis: Any) -> None:
    server = redis()
    tier = make("tier", {"plugin": "redis", "url": server.url, "timeout": "100ms"}, ToySite())
    tier.open()
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(TierError, match=r"[Tt]imeout"):
            tier.get([key(1)])
    finally:
        server.signal(signal.SIGCONT)
    tier.close()


# ---- throttled


def test_faults_are_drawn_from_the_seed(tmp_path: Path) -> None:
    def outcomes(seed: int) -> list[object]:
        options = {"plugin": "throttled", "fail": 0.2, "corrupt": 0.5, "seed": seed,
                   "tier": {"plugin": "ram", "size": "1MiB"}}
        tier = make("tier", options, ToySite())
        tier.inner.put([(key(1), bytes(100))])
        found: list[object] = []
        for _ in range(50):
            try:
                found += tier.get([key(1)])
            except TierError:
                found.append("failed")
        return found

    assert outcomes(1) == outcomes(1) != outcomes(2)
    kinds = {o if isinstance(o, str) else o == bytes(100) for o in outcomes(1)}
    assert kinds == {"failed", True, False}
