"""The ledger: every block is in one state, every reference has a hold, and what does not add up is named."""

import random

import pytest

from antiphon.actors.ledger import Hold, Ledger, LedgerError


def ledger(*blocks: int) -> Ledger:
    return Ledger(blocks)


def hold(made: Ledger, key: int, blocks: int) -> list[tuple[int, int, int]]:
    made.open(key, Hold(f"owner {key}", "test", len(made.total)))
    return made.take(key, blocks)


def test_blocks_are_taken_in_every_table_and_given_back() -> None:
    made = ledger(8, 5)
    fresh = hold(made, 1, 3)
    assert [(table, index) for table, index, _ in fresh] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert made.available() == 2
    assert [index for _, index, _ in made.take(1, 4)] == [3, 3]
    assert made.take(1, 2) == []  # it has more already
    audit = made.audit()
    assert (audit.active, audit.free, audit.faults) == ([4, 4], [4, 1], [])
    made.close(1)
    made.close(1)  # idempotent
    assert made.whole()
    assert made.audit().free == [8, 5]


def test_a_shared_block_is_free_when_the_last_hold_ends() -> None:
    made = ledger(4)
    ((_, _, block),) = hold(made, 1, 1)
    made.open(2, Hold("two", "shares", 1))
    made.share(2, 0, block)
    made.close(1)
    assert made.available() == 3
    assert not made.audit().faults
    made.close(2)
    assert made.whole()


def test_a_hold_is_opened_once() -> None:
    made = ledger(4)
    hold(made, 1, 1)
    with pytest.raises(LedgerError, match="hold 1 is open already \\(owner 1\\)"):
        made.open(1, Hold("again", "test", 1))


def test_a_block_released_twice_or_free_while_in_use_is_an_error() -> None:
    made = ledger(4)
    ((_, _, block),) = hold(made, 1, 1)
    made.references[0][block] = 0
    with pytest.raises(LedgerError, match=f"block {block} of table 0 is released more often"):
        made.close(1)
    made = ledger(4)
    ((_, _, block),) = hold(made, 1, 1)
    made.free[0].append(block)
    with pytest.raises(LedgerError, match=f"block {block} of table 0 was free and referenced"):
        hold(made, 2, 1)


def test_the_audit_names_what_does_not_add_up() -> None:
    made = ledger(6)
    hold(made, 1, 2)
    made.references[0][made.holds[1].blocks[0][0]] = 2
    assert "references of blocks" in made.audit().faults[0]
    made = ledger(6)
    hold(made, 1, 2)
    made.free[0].pop()
    assert "are not 6 blocks" in made.audit().faults[0]
    made = ledger(6)
    made.cached[0].add(made.free[0][0])
    assert "are not 6 blocks" in made.audit().faults[0]
    assert not made.whole()
    made = ledger(6)
    made.open(1, Hold("late", "transfer", 1, deadline=0.0))
    assert made.audit().faults == ["hold 1 of late (transfer) is past its deadline"]


def test_whatever_is_taken_shared_and_closed_the_sum_is_right() -> None:
    draw = random.Random(1)
    made = ledger(40, 30)
    for step in range(2000):
        key = draw.randrange(12)
        if key not in made.holds:
            made.open(key, Hold(str(key), "test", 2))
        elif draw.random() < 0.3:
            made.close(key)
        elif draw.random() < 0.3 and made.holds[other := draw.choice(list(made.holds))].blocks[0]:
            for table in range(2):
                made.share(key, table, draw.choice(made.holds[other].blocks[table]))
        else:
            wanted = len(made.holds[key].blocks[0]) + draw.randrange(3)
            if wanted - len(made.holds[key].blocks[0]) <= made.available():
                made.take(key, wanted)
        if step % 50 == 0:
            assert not made.audit().faults
    for key in list(made.holds):
        made.close(key)
    assert made.whole()
    assert made.audit().free == [40, 30]
