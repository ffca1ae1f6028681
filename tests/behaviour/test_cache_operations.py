"""KV memory as callers and operators tend it: surveys, flushes, pins, and what is refused."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.callers import POOL, Raw
from tests.harness import DELIVERIES, Server, graph, until

from antiphon import ProtocolMismatch, Refused
from antiphon.actors.columns import pack
from antiphon.actors.protocol import Pin
from antiphon.plugins.doors import wire
from antiphon.plugins.doors.llm import LLM

HASH = ("actors.allocator.plugin='hash'", *POOL)
PROMPT = list(range(7, 47))  # two blocks and a half
NAME = b"12345678"


@pytest.fixture
def llm() -> Iterator[LLM]:
    with graph(*HASH) as found:
        yield found
        assert found.graph.call(lambda cell: cell.runners["allocator"].actor.ledger.audit().faults) == []


def memory(llm: LLM, top: int = 10) -> dict[str, Any]:
    found: dict[str, Any] = llm.cache(top)["allocators"]["allocator"]
    return found


def hits(llm: LLM) -> int:
    return int(memory(llm)["counters"]["hit_slots"])


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_a_survey_tells_pools_hits_and_prefixes(delivery: str) -> None:
    with graph(f"delivery={delivery!r}", *HASH) as llm:
        first = llm.generate(PROMPT, max_tokens=4)
        assert llm.generate(PROMPT, max_tokens=4).ids == first.ids
        found = memory(llm)
        assert set(llm.cache()["pagers"]) == {"pager"}
        assert len(memory(llm, top=1)["prefixes"]) == 1
        assert memory(llm, top=0)["prefixes"] == []
    assert found["block_size"] == 16
    for pool in found["pools"]:
        states = ("free", "active", "cached", "transfer", "quarantined")
        assert sum(pool[state] for state in states) == pool["total"] == 4096
        assert pool["cached"] > 0
    assert [pool["groups"] for pool in found["pools"]] == [["context", "draft"], ["window"]]
    assert found["counters"]["queried_slots"] == 80
    assert found["counters"]["hit_slots"] == 32
    assert found["prefixes"][0]["slots"] == 32
    assert found["prefixes"][0]["hits"] == 1
    assert found["pins"] == []


def test_a_pinned_prefix_stays_where_others_give_way() -> None:
    with graph("actors.allocator.plugin='hash'", "actors.allocator.options.blocks=16") as llm:
        llm.generate(PROMPT, max_tokens=4)
        pin = llm.pin(PROMPT)
        assert pin.slots == 32
        for other in range(6):
            llm.generate([other * 50 + i % 50 for i in range(150)], max_tokens=4)
        before = hits(llm)
        llm.generate(PROMPT, max_tokens=4)
        assert hits(llm) == before + 32
        assert llm.unpin(pin)
        for other in range(6):
            llm.generate([other * 50 + i % 50 for i in range(150)], max_tokens=4)
        before = hits(llm)
        llm.generate(PROMPT, max_tokens=4)
        assert hits(llm) == before


def test_a_flush_leaves_what_is_pinned(llm: LLM) -> None:
    other = PROMPT[::-1]
    llm.generate(PROMPT, max_tokens=4)
    llm.generate(other, max_tokens=4)
    pin = llm.pin(PROMPT)
    assert llm.flush() > 0
    assert [pool["cached"] for pool in memory(llm)["pools"]] == [0, 0]
    llm.generate(other, max_tokens=4)
    assert hits(llm) == 0
    llm.generate(PROMPT, max_tokens=4)
    assert hits(llm) == 32
    assert llm.unpin(pin.number)
    llm.flush()
    assert llm.stats()["allocator"]["free"] == [4096, 4096]


def test_a_pin_is_renewed_shown_and_let_go_once(llm: LLM) -> None:
    llm.generate(PROMPT, max_tokens=4)
    first = llm.pin(PROMPT, seconds=5)
    again = llm.pin(PROMPT, seconds=5000)
    assert again == first
    (shown,) = memory(llm)["pins"]
    assert (shown["pin"], shown["tenant"]) == (first.number, "local")
    assert "blocks" in shown["keeps"]
    assert int(shown["keeps"].split(", ")[1].split()[0]) > 4000
    assert llm.unpin(first)
    assert not llm.unpin(first)
    assert memory(llm)["pins"] == []
    assert llm.pin(PROMPT).number > first.number  # an old number means no other pin


def test_a_pin_ends_by_itself(llm: LLM) -> None:
    llm.generate(PROMPT, max_tokens=4)
    llm.pin(PROMPT, seconds=0.05)
    until(lambda: memory(llm)["pins"] == [], what="the pin's end")
    assert llm.stats()["allocator"]["holds"] == 0


def test_text_is_pinned_as_it_is_asked(llm: LLM) -> None:
    text = "A system prompt that is longer than three blocks of sixteen bytes. " * 2
    llm.generate(text, max_tokens=2)
    slots = llm.pin(text).slots
    assert slots >= 128
    with pytest.raises(Refused, match="no block of this prefix"):
        llm.pin(text, raw=True)
    llm.generate(text, max_tokens=2, raw=True)
    assert llm.pin(text, raw=True).slots >= 128
    long = "x" * 10_000  # encoded on a worker thread
    with pytest.raises(Refused, match="no block of this prefix"):
        llm.pin(long)


def test_what_cannot_be_pinned_is_refused_with_the_reason(llm: LLM) -> None:
    llm.generate(PROMPT, max_tokens=4)
    for seconds in (0.0, -1.0, math.nan, math.inf, 1e9):
        with pytest.raises(Refused, match="a pin lasts more than 0 and at most 86400 s"):
            llm.pin(PROMPT, seconds=seconds)
    with pytest.raises(Refused, match="invalid: the prefix is empty"):
        llm.pin([])
    with pytest.raises(Refused, match="unavailable: no block of this prefix is on the device"):
        llm.pin([1, 2, 3])
    with pytest.raises(Refused, match="32-bit integers"):
        llm.pin([1 << 40])
    assert memory(llm)["pins"] == []


def test_a_tenant_s_pins_are_limited_in_number_and_length() -> None:
    limits = ("actors.gateway.options.max_pins=2", "actors.gateway.options.max_pin_tokens=40",
              "actors.gateway.options.max_pin_seconds='1m'")
    with graph(*HASH, *limits) as llm:
        prompts = [[number, *PROMPT[1:]] for number in range(3)]
        for prompt in prompts:
            llm.generate(prompt, max_tokens=4)
        first, _ = llm.pin(prompts[0], seconds=60), llm.pin(prompts[1], seconds=60)
        with pytest.raises(Refused, match="overloaded: 2 prefixes are pinned; unpin one first"):
            llm.pin(prompts[2], seconds=60)
        llm.pin(prompts[0], seconds=60)  # to renew one takes no other's place
        assert llm.unpin(first)
        llm.pin(prompts[2], seconds=60)
        with pytest.raises(Refused, match="too_long: the prefix has 41 tokens; a pin may have 40"):
            llm.pin([*PROMPT, 1], seconds=60)
        with pytest.raises(Refused, match="at most 60 s"):
            llm.pin(PROMPT, seconds=61)


def test_a_tenant_cannot_let_another_s_pin_go(llm: LLM) -> None:
    llm.generate(PROMPT, max_tokens=4)
    pin = Pin("other/7/ab", "local", pack(PROMPT), 60.0)
    llm.graph.call(lambda cell: cell.runners["allocator"].actor.on_pin(pin))
    assert [(p["pin"], p["tenant"]) for p in memory(llm)["pins"]] == [(7, "other")]
    assert not llm.unpin(7)
    assert len(memory(llm)["pins"]) == 1
    assert llm.pin(PROMPT).number == 8


def test_a_cache_that_keeps_nothing_says_so() -> None:
    with graph("actors.allocator.plugin='plain'", *POOL) as llm:
        llm.generate(PROMPT, max_tokens=4)
        with pytest.raises(Refused, match="unavailable: this allocator keeps no prefixes"):
            llm.pin(PROMPT)
        assert llm.flush() == 0
        assert memory(llm)["prefixes"] == []


def test_operations_in_bad_frames_are_refused(llm: LLM) -> None:
    with Raw(llm.address) as raw:
        for frame, words in [
            (wire.Pin(NAME), "either text or token ids"), (wire.Pin(NAME, text="a", ids=b"1234"), "either text"),
            (wire.Pin(NAME, ids=b"12345"), "packed int32"), (wire.Query(NAME, "weather"), "unknown query"),
        ]:
            raw.send(frame)
            answer = raw.receive()
            assert isinstance(answer, wire.Refused)
            assert (answer.id, answer.kind) == (NAME, "invalid")
            assert words in answer.reason
        raw.send(wire.Survey(NAME, 1 << 60))
        assert isinstance(raw.receive(), wire.Answer)
        raw.send(wire.Unpin(NAME, -(1 << 60)))
        assert raw.receive() == wire.Answer(NAME, {"found": False})


def test_an_older_server_is_not_asked_what_it_does_not_know(llm: LLM) -> None:
    llm._client._minor = 0
    with pytest.raises(ProtocolMismatch, match=r"door version 1\.0; survey needs 1\.1"):
        llm.cache()
    assert llm.health()["ready"]


def test_pins_outlive_the_gateway(tmp_path: Path) -> None:
    with Server(tmp_path, *HASH) as server:
        with server.client() as client:
            client.generate(PROMPT, max_tokens=4)
            pin = client.pin(PROMPT)
            server.kill("front")
            client.wait_ready(30)
            found = client.cache()["allocators"]["allocator"]
            assert [p["pin"] for p in found["pins"]] == [pin.number]
            assert client.pin(PROMPT) == pin
            assert client.unpin(pin)
        assert server.stop() == 0
