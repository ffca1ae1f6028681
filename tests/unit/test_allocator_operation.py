"""What an operator asks of an allocator: pins, flushes, surveys, and the layout of the pools."""

from pathlib import Path

import pytest
from tests.memory import allocator, close, compute, facts, opening, reserve

from antiphon.actors.columns import pack, unpack
from antiphon.actors.protocol import Configure, Flush, Pin, Survey, Unpin

PROMPT = list(range(100, 118))  # four blocks of 4 and two tokens


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))


def test_a_pin_keeps_a_prefix_until_its_deadline() -> None:
    made = allocator("hash", blocks=10)
    compute(made, 1, PROMPT)
    close(made, 1)
    pinned = made.on_pin(Pin("operator", "local", pack(PROMPT), 60.0))
    assert (pinned.slots, pinned.problem) == (16, "")
    assert made.on_flush(Flush()).blocks == pack([0])
    made.on_open(opening(2, [1]))
    assert unpack(reserve(made, 2, 28).short).tolist() == [2]
    close(made, 2)
    assert compute(made, 3, PROMPT) == 16
    close(made, 3)
    assert "operator: 4 blocks" in made.on_survey(Survey()).pins[pinned.pin]
    made.expire(1e12)
    assert not made.on_unpin(Unpin(pinned.pin)).found
    assert made.on_flush(Flush()).blocks == pack([4])
    assert made.ledger.audit().free == [10]


def test_pins_are_bounded_and_say_what_is_wrong() -> None:
    made = allocator("hash", blocks=10, pin_share=0.3)
    assert "no block of this prefix" in made.on_pin(Pin("me", "local", pack(PROMPT), 60.0)).problem
    compute(made, 1, PROMPT)
    assert "more than the share" in made.on_pin(Pin("me", "local", pack(PROMPT), 60.0)).problem
    first = made.on_pin(Pin("me", "local", pack(PROMPT[:8]), 60.0))
    assert first.slots == 8
    assert made.on_pin(Pin("you", "local", pack(PROMPT[:12]), 60.0)).slots == 12  # shared blocks count once
    assert made.on_unpin(Unpin(first.pin)).found
    assert "keeps no prefixes" in allocator("plain").on_pin(Pin("me", "local", pack(PROMPT), 1.0)).problem


def test_a_survey_tells_pools_prefixes_and_counters() -> None:
    made = allocator("hash", windows=(6,))
    compute(made, 1, PROMPT)
    compute(made, 2, [*PROMPT[:8], 1, 2])
    found = made.on_survey(Survey(2))
    assert [p.groups for p in found.pools] == [("whole", "draft"), ("window6",)]
    assert [(p.total, p.active + p.free + p.cached + p.transfer + p.quarantined) for p in found.pools] == [(64, 64)] * 2
    assert found.pools[0].waste == 2 + 2
    assert (found.counters["queried_slots"], found.counters["hit_slots"]) == (28, 8)
    close(made, 1, 2)
    compute(made, 3, PROMPT)
    assert [(p.slots, p.hits) for p in made.on_survey(Survey(2)).prefixes] == [(8, 2), (16, 1)]
    assert made.facts()["waste_slots"] == [2, 2 + 0]


def test_configuring_lays_out_one_table_for_whole_contexts_and_one_for_each_window() -> None:
    made = allocator("plain", blocks=0, memory="64KiB")
    pools = made.on_configure(Configure(facts(8, 16)))
    assert [[g.name for g in table] for table in pools.groups] == [["whole", "draft"], ["window8"], ["window16"]]
    assert pools.blocks == (512, 512, 512)
