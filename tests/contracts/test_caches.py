"""What every cache and every eviction in the tree keeps to."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from antiphon.actors.cache import Entry, shared_ids
from antiphon.actors.columns import pack
from antiphon.actors.idle import Idle
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
def test_blocks_that_give_way_one_by_one_never_make_a_newer_one_worth_less(name: str) -> None:
    eviction, draw, order = made("eviction", name), random.Random(3), Idle()
    for number in range(3000):
        one = entry(b"root", [number])
        one.uses, one.cost = draw.randrange(3), draw.random()
        before = eviction.worth(0, one)
        order.add(number, eviction.worth(0, one), True)
        if draw.random() < 0.4:
            picked = order.pick(lambda _: True)
            assert picked is not None
            eviction.gave_way(0, picked[1])
        assert eviction.worth(0, one) >= before


def test_idle_blocks_go_in_the_order_of_worth_and_of_letting_go() -> None:
    order, draw = Idle(), random.Random(5)
    idle: dict[int, tuple[float, int]] = {}
    held_back: set[int] = set()
    for number in range(20_000):
        block, step = draw.randrange(40), draw.random()
        if step < 0.3:
            may = {b: w for b, w in idle.items() if b not in held_back}
            expected = min(may, key=lambda b: may[b], default=None)
            picked = order.pick(may.__contains__)
            assert (picked and picked[0]) == expected
            if expected is not None:
                assert picked == (expected, idle.pop(expected)[0])
        elif step < 0.5 and block in idle:
            if block in held_back:
                held_back.remove(block)
                order.ready(block)
            else:
                held_back.add(block)
        elif block in idle or step < 0.6:
            order.discard(block)
            idle.pop(block, None)
            held_back.discard(block)
        else:
            worth, may_go = float(draw.randrange(3)), draw.random() < 0.8
            order.add(block, worth, may_go)
            idle[block] = (worth, number)
            held_back -= {block}
            held_back |= set() if may_go else {block}
        assert len(order.heap) <= 65 + 2 * len(idle)


def test_two_columns_have_in_common_what_they_begin_with() -> None:
    draw = random.Random(4)
    for _ in range(500):
        one, other = ([draw.randrange(1 << 20) if draw.random() < 0.1 else 7 for _ in range(draw.randrange(20))]
                      for _ in range(2))
        most = min(len(one), len(other))
        expected = next((i for i in range(most) if one[i] != other[i]), most)
        assert shared_ids(pack(one), pack(other)) == expected
