"""What an allocator answers: hits, waits, copies, windows and memory, one at a time."""

from pathlib import Path

import pytest
from tests.memory import allocator, close, commit, compute, opening, reserve, told

from antiphon.actors.columns import pack, unpack
from antiphon.actors.ledger import HOLE
from antiphon.actors.protocol import (
    COPY,
    Fork,
    Open,
    Ready,
    Reserve,
    Reserved,
    Sampling,
)

PROMPT = list(range(100, 118))  # four blocks of 4 and two tokens


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))


def moves(reserved: Reserved) -> list[list[int]]:
    found: list[list[int]] = unpack(reserved.moves).reshape(-1, 4).tolist()
    return found


def ready(made: object) -> list[int]:
    return [s for message in told(made, Ready) for s in unpack(message.sequences).tolist()]  # type: ignore[arg-type]


def hit(reserved: Reserved) -> int:
    return int(unpack(reserved.hits)[0])


# ---- hits


@pytest.mark.parametrize(("cache", "slots"), [("plain", 0), ("hash", 16), ("radix", 17)])
def test_the_second_request_finds_what_the_first_one_computed(cache: str, slots: int) -> None:
    made = allocator(cache)
    assert compute(made, 1, PROMPT) == 0
    assert compute(made, 2, PROMPT) == (0 if cache == "plain" else 16)  # the first one's end is still its own
    close(made, 1, 2)
    assert compute(made, 3, PROMPT) == slots


def test_a_hit_leaves_the_last_token_to_be_computed() -> None:
    for cache, slots in (("hash", 12), ("radix", 15)):
        made = allocator(cache)
        compute(made, 1, PROMPT[:16])
        assert compute(made, 2, PROMPT[:16]) == slots


def test_radix_hits_inside_a_block_where_hash_does_not() -> None:
    other = [*PROMPT[:7], 1, 2, 3]
    for cache, slots in (("hash", 4), ("radix", 7)):
        made = allocator(cache)
        compute(made, 1, PROMPT)
        made.on_open(opening(2, other))
        reserved = reserve(made, 2, 10)
        assert hit(reserved) == slots
        if cache == "radix":
            block = made.ledger.holds[1].blocks[0][1]
            assert moves(reserved) == [[COPY, 0, block, made.ledger.holds[2].blocks[0][1]]]
            assert made.ledger.holds[2].blocks[0][1] != block
        else:
            assert not moves(reserved)


def test_a_copy_is_given_up_where_it_would_take_the_last_block() -> None:
    made = allocator("radix", blocks=4)
    compute(made, 1, PROMPT[:16])
    close(made, 1)
    made.on_open(opening(2, [*PROMPT[:6], *range(10)]))  # needs all four blocks, one of which it would copy from
    reserved = reserve(made, 2, 16)
    assert not reserved.short
    assert hit(reserved) == 4
    assert not moves(reserved)


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    made = allocator("hash")
    compute(made, 1, PROMPT[:6])
    said = [7, 8, 9, 10, 11]
    reserve(made, 1, 11)
    for length, token in enumerate(said, start=6):
        commit(made, 1, length, [token])
    close(made, 1)
    assert compute(made, 2, [*PROMPT[:6], *said[:3], 99, 98, 97, 96]) == 8


def test_what_a_cancelled_sequence_wrote_without_anyone_knowing_the_tokens_is_not_kept() -> None:
    made = allocator("hash")
    compute(made, 1, PROMPT[:7])
    reserve(made, 1, 12)
    commit(made, 1, 8)  # its token was never told
    close(made, 1, reason="cancelled")
    assert made.ledger.audit().cached == [1]


def test_a_request_may_opt_out() -> None:
    made = allocator("radix")
    assert compute(made, 1, PROMPT, cache=False) == 0
    close(made, 1)
    assert made.ledger.audit().cached == [0]
    compute(made, 2, PROMPT)
    assert compute(made, 3, PROMPT, cache=False) == 0


def test_two_tenants_share_nothing_and_one_shares_with_itself_after_a_restart(tmp_path: Path) -> None:
    made = allocator("radix")
    compute(made, 1, PROMPT, "ada")
    assert compute(made, 2, PROMPT, "bob") == 0
    assert compute(made, 3, PROMPT, "ada") == 16
    again = allocator("radix")
    again.on_open(opening(1, PROMPT, "ada"))
    assert again.contexts[1].keys == made.contexts[1].keys
    assert again.contexts[1].keys != made.contexts[2].keys
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert allocator("hash", secret=str(tmp_path / "other" / "secret")).secret != made.secret


def test_another_model_finds_nothing() -> None:
    made, other = allocator(digest="one"), allocator(digest="two")
    for one in (made, other):
        one.on_open(opening(1, PROMPT))
    assert made.contexts[1].keys != other.contexts[1].keys


def test_a_collision_of_keys_is_no_hit() -> None:
    made = allocator("hash")
    compute(made, 1, PROMPT)
    for entry in made.cache.entries.values():  # type: ignore[attr-defined]
        entry.ids = entry.ids[:-1] + b"?"
    assert compute(made, 2, PROMPT) == 0


# ---- waiting for another sequence


def test_a_prompt_that_is_being_computed_is_awaited_and_not_computed_twice() -> None:
    made = allocator("hash")
    for number in (1, 2, 3):
        made.on_open(opening(number, PROMPT))
    reserved = made.on_reserve(Reserve(1, pack([1, 2, 3]), pack([8, 8, 8]), pack([8, 8, 8])))
    assert (unpack(reserved.waits).tolist(), unpack(reserved.granted).tolist()) == ([2, 3], [8, 0, 0])
    commit(made, 1, 8)
    assert not ready(made)  # the rest of what they need is on its way
    reserve(made, 1, 18)
    commit(made, 1, 18, [5])
    assert ready(made) == [2, 3]
    assert [hit(reserve(made, number, 8)) for number in (2, 3)] == [16, 16]


@pytest.mark.parametrize("reason", ["finished", "cancelled", "preempted"])
def test_when_an_author_is_gone_the_next_one_goes_on_where_it_stopped(reason: str) -> None:
    made = allocator("hash", preemption="auto")
    for number in (1, 2, 3):
        made.on_open(opening(number, PROMPT))
    made.on_reserve(Reserve(1, pack([1, 2, 3]), pack([8, 8, 8]), pack([8, 8, 8])))
    commit(made, 1, 8)
    close(made, 1, reason=reason)
    assert ready(made) == [2, 3]
    reserved = made.on_reserve(Reserve(1, pack([2, 3]), pack([8, 8]), pack([8, 8])))
    assert (unpack(reserved.hits).tolist(), unpack(reserved.waits).tolist()) == ([8, 0], [3])
    close(made, 2)
    assert ready(made) == [3]


def test_who_waits_and_leaves_is_told_nothing() -> None:
    made = allocator("hash")
    made.on_open(opening(1, PROMPT))
    made.on_open(opening(2, PROMPT))
    made.on_reserve(Reserve(1, pack([1, 2]), pack([8, 8]), pack([8, 8])))
    close(made, 2)
    close(made, 1)
    assert not ready(made)
    assert made.ledger.whole()


def test_nobody_waits_longer_than_the_deadline() -> None:
    made = allocator("hash")
    made.on_open(opening(1, PROMPT))
    made.on_open(opening(2, PROMPT))
    made.on_reserve(Reserve(1, pack([1, 2]), pack([8, 8]), pack([8, 8])))
    made.expire(1e12)
    assert ready(made) == [2]
    assert not reserve(made, 2, 8).waits  # it computes for itself
    for number in (1, 2):
        commit(made, number, 8)
    assert made.counters()["deduplicated"] == 2  # and then one copy is enough
    assert made.ledger.audit().active == [2]


# ---- forks and samples


def test_samples_share_full_blocks_and_copy_the_partly_filled_one() -> None:
    made = allocator("plain")
    compute(made, 1, PROMPT)
    made.on_open(Open(2, b"2", "local", 1, pack(PROMPT), 18, Sampling(), 0, source=1, shared=17))
    reserved = reserve(made, 2, 1)
    mine, its = made.ledger.holds[2].blocks[0], made.ledger.holds[1].blocks[0]
    assert hit(reserved) == 17
    assert mine[:4] == its[:4]
    assert mine[4] != its[4]
    assert moves(reserved) == [[COPY, 0, its[4], mine[4]]]
    assert [c[1:] for c in unpack(reserved.changes).reshape(-1, 4).tolist()] == [[0, i, b] for i, b in enumerate(mine)]
    assert not made.ledger.audit().faults


def test_a_fork_keeps_its_beginning_when_its_source_is_gone() -> None:
    made = allocator("plain")
    compute(made, 1, PROMPT)
    made.on_fork(Fork(2, 1, 1, 17))
    blocks = list(made.ledger.holds[1].blocks[0])
    close(made, 1)
    reserved = reserve(made, 2, 18)
    assert hit(reserved) == 17
    assert made.ledger.holds[2].blocks[0] == blocks  # nobody else holds the last one: it needs no copy
    assert not moves(reserved)


def test_a_fork_of_a_block_that_has_entered_the_cache_copies_it() -> None:
    made = allocator("hash")
    compute(made, 1, PROMPT)
    made.on_fork(Fork(2, 1, 1, 17, pack([*PROMPT[:17], 9])))
    reserve(made, 1, 21)
    for length in (19, 20):
        commit(made, 1, length, [3])
    last = made.ledger.holds[1].blocks[0][4]
    close(made, 1)
    reserved = reserve(made, 2, 18)
    assert moves(reserved) == [[COPY, 0, last, made.ledger.holds[2].blocks[0][4]]]


def test_a_source_of_another_tenant_or_with_other_tokens_is_not_shared() -> None:
    made = allocator("plain")
    compute(made, 1, PROMPT, "ada")
    made.on_open(Open(2, b"2", "bob", 1, pack(PROMPT), 18, Sampling(), 0, source=1, shared=17))
    made.on_open(Open(3, b"3", "ada", 1, pack(PROMPT[::-1]), 18, Sampling(), 0, source=1, shared=17))
    assert [hit(reserve(made, n, 18)) for n in (2, 3)] == [0, 0]


def test_a_fork_that_does_not_fit_gets_nothing_and_may_ask_again() -> None:
    made = allocator("plain", blocks=6)
    compute(made, 1, PROMPT)
    made.on_open(opening(3, [1]))
    reserve(made, 3, 1)
    made.on_fork(Fork(2, 1, 1, 17))
    assert unpack(reserve(made, 2, 18).short).tolist() == [2]
    close(made, 3)
    assert hit(reserve(made, 2, 18)) == 17


# ---- windows


def test_a_window_gives_its_blocks_back_as_it_moves() -> None:
    made = allocator("plain", windows=(6,))
    compute(made, 1, PROMPT)
    whole, window = made.ledger.holds[1].blocks
    assert len(whole) == len(window) == 5
    assert window[:3] == [HOLE] * 3  # 18 - 6 = 12: three blocks have been passed
    assert HOLE not in window[3:]
    assert made.ledger.audit().free == [59, 62]


def test_a_window_table_needs_only_the_end_of_a_hit() -> None:
    made = allocator("hash", windows=(6,))
    compute(made, 1, PROMPT)
    close(made, 1)
    for entry in list(made.cache.entries.values()):  # type: ignore[attr-defined]
        if entry.position < 8:  # a hit of 16 slots needs the slots from 10 on
            made.index.forget(1, entry.blocks[1])
    made.on_open(opening(2, PROMPT))
    assert hit(reserve(made, 2, 18)) == 16
    assert made.ledger.holds[2].blocks[1][:2] == [HOLE] * 2
    close(made, 2)
    entry = next(e for e in made.cache.entries.values() if e.position == 12)  # type: ignore[attr-defined]
    made.index.forget(1, entry.blocks[1])
    made.on_open(opening(3, PROMPT))
    assert hit(reserve(made, 3, 18)) == 0  # 12 needs the slots from 6 on, 8 those from 2, 4 the first


# ---- memory


def test_cached_blocks_are_available_and_give_way_from_the_end_of_a_prefix() -> None:
    for cache, eviction in (("hash", "lru"), ("radix", "lru"), ("radix", "cost")):
        made = allocator(cache, eviction, blocks=6)
        compute(made, 1, PROMPT[:16])
        close(made, 1)
        made.on_open(opening(2, [1, 2, 3]))
        reserved = reserve(made, 2, 12)
        assert reserved.available == 3
        assert not reserved.short
        close(made, 2)
        assert compute(made, 3, PROMPT[:16]) == 12


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_an_old_prefix_has_gone_before_a_newer_one_loses_a_block(cache: str) -> None:
    made = allocator(cache, blocks=12)
    for number in (1, 2):
        compute(made, number, [number] * 20)
        close(made, number)
    made.on_open(opening(3, [9]))
    reserve(made, 3, 28)
    close(made, 3)
    assert compute(made, 4, [2] * 21) == 20


def test_the_cheaper_to_compute_goes_first_by_cost_and_the_older_by_lru() -> None:
    left = {}
    for eviction in ("lru", "cost"):
        made = allocator("hash", eviction, blocks=12)
        compute(made, 1, PROMPT[:5])
        close(made, 1)
        for number in (2, 3):  # it is used again, and then unused the longest
            assert compute(made, number, PROMPT[:5]) == 4
            close(made, number)
        for number in (4, 5):
            compute(made, number, [number] * 20)
            close(made, number)
        made.on_open(opening(6, [9]))
        reserve(made, 6, 8)
        left[eviction] = compute(made, 7, PROMPT[:5])
    assert left == {"lru": 0, "cost": 4}


def test_short_of_memory_nothing_is_held() -> None:
    made = allocator("hash", blocks=6)
    compute(made, 1, PROMPT)
    made.on_open(opening(2, [*PROMPT[:8], *range(30)]))
    reserved = reserve(made, 2, 38)
    assert unpack(reserved.short).tolist() == [2]
    assert made.ledger.holds[2].blocks == [[]]
    assert unpack(reserved.hits).tolist() == [0]


@pytest.mark.parametrize(("preemption", "cached"), [("recompute", 0), ("swap", 4), ("auto", 4)])
def test_preemption_gives_blocks_back_or_keeps_them(preemption: str, cached: int) -> None:
    made = allocator("hash", preemption=preemption)
    compute(made, 1, PROMPT)
    close(made, 1, reason="preempted")
    assert made.ledger.audit().cached == [cached]
    assert made.ledger.available() == 64


def test_preemption_leaves_what_others_hold() -> None:
    made = allocator("hash", preemption="recompute")
    compute(made, 1, PROMPT)
    compute(made, 2, PROMPT)
    close(made, 2, reason="preempted")
    close(made, 1)
    assert made.ledger.audit().cached == [4]
