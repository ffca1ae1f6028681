"""What every cache and every eviction in the tree keeps to."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.actors.cache import Entry, shared_ids
from antiphon.actors.columns import pack
from antiphon.actors.keys import chain
from antiphon.runtime import plugin

SITE: Any = SimpleNamespace(instance="allocator")


def made(kind: str, name: str) -> Any:
    found = plugin.find(kind, name)
    return found(found.options_type(), SITE)


def entry(parent: bytes, ids: list[int], position: int = 0) -> Entry:
    return Entry(chain(parent, pack(ids), 4 * len(ids))[0], parent, pack(ids), position, 1)


@pytest.mark.parametrize("name", plugin.kinds()["cache"])
def test_a_cache_finds_what_was_put_in_until_it_is_taken_out(name: str) -> None:
    cache = made("cache", name)
    assert cache.find(b"nothing") is None
    if not cache.keeps:
        return
    entries = [entry(b"root", [i, 1, 2, 3]) for i in range(9)]
    for one in entries:
        cache.insert(one)
    for one in entries[::2]:
        cache.remove(one)
    assert [cache.find(e.key) for e in entries] == [None if i % 2 == 0 else e for i, e in enumerate(entries)]


@pytest.mark.parametrize("name", plugin.kinds()["cache"])
def test_what_is_near_shares_most_first(name: str) -> None:
    cache, draw = made("cache", name), random.Random(2)
    if not cache.keeps:
        return
    entries: dict[bytes, Entry] = {}
    for _ in range(300):
        one = entry(draw.choice((b"one", b"two")), [draw.randrange(3) for _ in range(draw.choice((8, 8, 5)))])
        if one.key in entries:
            cache.remove(entries.pop(one.key))
        else:
            entries[one.key] = one
            cache.insert(one)
        ids = pack([draw.randrange(3) for _ in range(8)])
        near = cache.near(b"one", ids)
        best = max((shared_ids(e.ids, ids) for e in entries.values() if e.parent_key == b"one"), default=0)
        assert all(e.parent_key == b"one" for e in near)
        if cache.ends:
            assert (shared_ids(near[0].ids, ids) if near else 0) == best
        else:
            assert not near


@pytest.mark.parametrize("name", plugin.kinds()["eviction"])
def test_an_eviction_names_each_block_once_and_none_that_is_taken_back(name: str) -> None:
    eviction, draw = made("eviction", name), random.Random(3)
    idle: list[set[int]] = [set(), set()]
    for _ in range(3000):
        table, block = draw.randrange(2), draw.randrange(40)
        if draw.random() < 0.3:
            picked = eviction.pick(table)
            assert (picked in idle[table]) if idle[table] else picked is None
            idle[table].discard(picked)
        elif block in idle[table] or draw.random() < 0.1:
            eviction.discard(table, block)
            idle[table].discard(block)
        else:
            one = entry(b"root", [block])
            one.uses, one.cost = draw.randrange(3), draw.random()
            eviction.add(table, block, one)
            idle[table].add(block)
    for table in range(2):
        while idle[table]:
            idle[table].remove(eviction.pick(table))
        assert eviction.pick(table) is None


def test_two_columns_have_in_common_what_they_begin_with() -> None:
    draw = random.Random(4)
    for _ in range(500):
        one, other = ([draw.randrange(1 << 20) if draw.random() < 0.1 else 7 for _ in range(draw.randrange(20))]
                      for _ in range(2))
        most = min(len(one), len(other))
        expected = next((i for i in range(most) if one[i] != other[i]), most)
        assert shared_ids(pack(one), pack(other)) == expected
