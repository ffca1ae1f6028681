"""The allocator's half of the tiers: what it asks, loads, saves, writes through, and does when nothing comes back."""

from pathlib import Path

import pytest
from tests.memory import allocator, close, commit, compute, opening, reserve, told

from antiphon.actors.allocator import Allocator
from antiphon.actors.columns import pack, unpack
from antiphon.actors.protocol import (
    LOAD,
    SAVE,
    Arrived,
    Find,
    Found,
    Mount,
    Mounted,
    Ready,
    Reserve,
    Reserved,
    Store,
    Stored,
)

PROMPT = list(range(100, 118))
MOVING = ("pager", "pager")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))


def mounted(through: bool = False, back: bool = False, blocks: int = 12, **options: object) -> Allocator:
    made = allocator("hash", blocks=blocks, **options)
    made.on_mounted(Mounted(True, through, back))
    return made


def moves(reserved: Reserved) -> list[list[int]]:
    found: list[list[int]] = unpack(reserved.moves).reshape(-1, 4).tolist()
    return found


def ready(made: Allocator) -> list[int]:
    return [s for message in told(made, Ready) for s in unpack(message.sequences).tolist()]


def wanting(made: Allocator, number: int, present: list[int], rate: float = 1e9, **rates: float) -> Reserved:
    """Open a sequence, answer what it asks the tiers, and let it ask for its slots."""
    made.on_open(opening(number, PROMPT))
    (find,) = told(made, Find)
    made.on_found(Found(find.sequence, pack(present), 0.001, rate))
    return reserve(made, number, 18, **rates)


def arrive(made: Allocator, loads: list[list[int]], good: list[int]) -> None:
    made.on_arrived(Arrived(pack([t for _, t, _, _ in loads]), pack([b for _, _, b, _ in loads]), pack(good)))


def test_only_a_cache_that_keeps_blocks_tells_the_pager_of_its_pools() -> None:
    assert not told(allocator("plain"), Mount)
    made = allocator("hash")
    (mount,) = told(made, Mount)
    assert mount.pools.blocks == (64,)
    made.on_open(opening(1, PROMPT))
    assert not told(made, Find)  # no tiers


def test_blocks_of_a_tier_are_loaded_and_then_hit() -> None:
    made = mounted()
    reserved = wanting(made, 1, [1, 1, 1, 1])
    assert unpack(reserved.waits).tolist() == [1]
    assert [(what, key) for what, _, _, key in moves(reserved)] == [(LOAD, 0), (LOAD, 1), (LOAD, 2), (LOAD, 3)]
    assert reserved.keys == b"".join(made.contexts[1].keys)
    assert made.ledger.audit().active == [4]
    arrive(made, moves(reserved)[:3], [1, 1, 1])
    assert not ready(made)
    arrive(made, moves(reserved)[3:], [1])
    assert ready(made) == [1]
    reserved = reserve(made, 1, 18)
    assert unpack(reserved.hits).tolist() == [16]
    assert (made.counters()["tier_slots"], made.counters()["hit_slots"]) == (16, 0)


def test_a_bad_block_shortens_the_hit() -> None:
    made = mounted()
    arrive(made, moves(wanting(made, 1, [1, 1, 1, 1])), [1, 1, 0, 1])
    assert ready(made) == [1]
    assert unpack(reserve(made, 1, 18).hits).tolist() == [8]
    assert made.counters()["loads_bad"] == 1
    commit(made, 1, 18)
    close(made, 1)
    assert made.ledger.whole()


def test_a_hole_in_a_tier_ends_the_hit_and_the_device_fills_others() -> None:
    made = mounted()
    compute(made, 1, PROMPT[:9])
    told(made, Find)
    reserved = wanting(made, 2, [0, 0, 1, 0])
    assert [(what, table) for what, table, _, _ in moves(reserved)] == [(LOAD, 0)]
    arrive(made, moves(reserved), [1])
    assert unpack(reserve(made, 2, 18).hits).tolist() == [12]


def test_nothing_is_asked_of_tiers_when_the_device_has_it_all() -> None:
    made = mounted()
    compute(made, 1, [*PROMPT, 1])
    told(made, Find)
    made.on_open(opening(2, PROMPT))
    assert not told(made, Find)


def test_who_waits_for_a_look_up_is_told_when_it_is_answered_or_late() -> None:
    for answered in (True, False):
        made = mounted()
        made.on_open(opening(1, PROMPT))
        assert unpack(reserve(made, 1, 18).waits).tolist() == [1]
        if answered:
            made.on_found(Found(1, pack([0] * 4)))
        else:
            made.expire(1e12)
        assert ready(made) == [1]
        made.on_found(Found(1, pack([1] * 4)))  # late: it is passed over
        assert not reserve(made, 1, 18).waits


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    # 4 blocks of 4 slots of 8 bytes: 128 bytes; 16 rows.
    for rate, row_s, loads in ((1e4, 1e-4, 0), (1e6, 1e-4, 4), (1e4, 0.0, 4), (1e4, 2e-3, 4)):
        made = mounted()
        assert len(moves(wanting(made, 1, [1, 1, 1, 1], rate, row_s=row_s))) == loads
        assert made.counters()["loads_declined"] == (not loads)


def test_one_load_serves_all_who_need_it() -> None:
    made = mounted()
    for number in (1, 2):
        made.on_open(opening(number, PROMPT))
        made.on_found(Found(number, pack([1] * 4), 0.001, 1e9))
    reserved = made.on_reserve(Reserve(1, pack([1, 2]), pack([18, 18]), pack([18, 18])))
    assert unpack(reserved.waits).tolist() == [1, 2]
    assert len(moves(reserved)) == 4
    arrive(made, moves(reserved), [1] * 4)
    assert ready(made) == [1, 2]
    reserved = made.on_reserve(Reserve(1, pack([1, 2]), pack([18, 18]), pack([18, 18])))
    assert unpack(reserved.hits).tolist() == [16, 16]


def test_blocks_on_their_way_outlive_the_sequence_that_wanted_them() -> None:
    made = mounted()
    reserved = wanting(made, 1, [1, 1, 1, 1])
    close(made, 1)
    assert (made.ledger.audit().transfer, made.ledger.audit().free) == ([4], [8])
    arrive(made, moves(reserved), [1, 1, 1, 0])
    assert (made.ledger.audit().cached, made.ledger.audit().free) == ([3], [9])


def test_late_blocks_are_quarantined_until_the_pager_answers() -> None:
    made = mounted()
    loads = moves(wanting(made, 1, [1, 1, 1, 1]))
    arrive(made, loads[:2], [1, 1])
    made.expire(1e12)
    assert ready(made) == [1]
    assert unpack(reserve(made, 1, 18).hits).tolist() == [8]
    audit = made.ledger.audit()
    assert (audit.active, audit.quarantined) == ([5], [2])
    assert not audit.faults
    late = {block for _, _, block, _ in loads[2:]}
    assert not late & set(made.ledger.holds[1].blocks[0])
    arrive(made, loads[2:], [1, 0])
    assert made.ledger.audit().quarantined == [0]
    assert made.counters()["loads_late"] == 2


def test_a_pager_that_dies_leaves_nobody_waiting() -> None:
    made = mounted()
    wanting(made, 1, [1, 1, 1, 1])
    made.on_open(opening(2, PROMPT[::-1]))
    assert reserve(made, 2, 18).waits
    made.on_peer(*MOVING, False)
    assert sorted(ready(made)) == [1, 2]
    assert [unpack(reserve(made, n, 18).hits).tolist() for n in (1,)] == [[0]]
    assert made.ledger.audit().quarantined == [4]
    told(made, Mount)
    made.on_peer(*MOVING, True)
    assert len(told(made, Mount)) == 1


def test_loads_that_do_not_fit_are_not_begun() -> None:
    made = mounted(blocks=6)
    made.on_open(opening(9, [1]))
    made.on_found(Found(9, b""))
    reserve(made, 9, 12)
    assert unpack(wanting(made, 1, [1, 1, 1, 1]).short).tolist() == [1]
    assert made.ledger.available() == 3


# ---- saving


def full(made: Allocator) -> None:
    """Compute and leave a prompt, then take all blocks but the last two."""
    compute(made, 1, PROMPT, cache=True)
    close(made, 1)


def test_what_gives_way_is_saved_once_before_it_is_written_over() -> None:
    made = mounted(blocks=6)
    made.on_open(opening(1, PROMPT))
    made.on_found(Found(1, pack([0] * 4)))
    reserve(made, 1, 18)
    commit(made, 1, 18)
    names = list(made.contexts[1].keys)
    close(made, 1)
    made.on_open(opening(2, [1, 2]))
    reserved = reserve(made, 2, 16)
    assert [what for what, *_ in moves(reserved)] == [SAVE, SAVE]
    assert reserved.keys == names[3] + names[2]  # from the end
    assert {block for _, _, block, _ in moves(reserved)} <= set(made.ledger.holds[2].blocks[0])
    assert made.counters()["saves"] == 2


@pytest.mark.parametrize("back", [False, True])
def test_what_was_written_through_is_saved_again_only_where_that_is_wanted(back: bool) -> None:
    made = mounted(through=True, back=back, blocks=32)
    made.on_open(opening(1, PROMPT))
    made.on_found(Found(1, pack([0] * 4)))
    reserve(made, 1, 18)
    commit(made, 1, 18)
    (store,) = told(made, Store)
    sent = unpack(store.moves).reshape(-1, 4).tolist()
    assert [(what, key) for what, _, _, key in sent] == [(SAVE, i) for i in range(4)]
    close(made, 1)
    assert (made.ledger.audit().transfer, made.ledger.audit().cached) == ([4], [0])
    made.on_stored(Stored(pack([0] * 4), pack([block for _, _, block, _ in sent])))
    assert (made.ledger.audit().transfer, made.ledger.audit().cached) == ([0], [4])
    made.on_open(opening(2, [1, 2]))
    assert len(moves(reserve(made, 2, 128))) == (4 if back else 0)


def test_write_through_never_holds_more_than_an_eighth_and_the_rest_is_saved_when_it_gives_way() -> None:
    made = mounted(through=True, blocks=16)
    made.on_open(opening(1, PROMPT))
    made.on_found(Found(1, pack([0] * 4)))
    reserve(made, 1, 18)
    commit(made, 1, 18)
    (store,) = told(made, Store)
    assert len(unpack(store.moves)) == 2 * 4
    close(made, 1)
    made.expire(1e12)  # the pager does not answer: they stay out of reach, the others do not
    assert (made.ledger.audit().quarantined, made.ledger.available()) == ([2], 14)
    made.on_open(opening(2, [1, 2]))
    assert [what for what, *_ in moves(reserve(made, 2, 56))] == [SAVE, SAVE]


@pytest.mark.parametrize(("rate", "cached"), [(1e9, 4), (1.0, 0)])
def test_preemption_by_measured_cost_keeps_what_is_quicker_to_bring_back(rate: float, cached: int) -> None:
    made = mounted(preemption="auto")
    made.on_open(opening(1, PROMPT))
    made.on_found(Found(1, pack([0] * 4), 0.0, rate))
    reserve(made, 1, 18, row_s=1e-3)
    commit(made, 1, 18)
    close(made, 1, reason="preempted")
    assert made.ledger.audit().cached == [cached]
