"""Lanes and credits between two posts: what overtakes, what waits, and that all goes on."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.recorders import Echo, Echoed, Misfit, Note, Side, Sides, Urge, introduce, settled, sides

from antiphon.runtime import link, post
from antiphon.runtime.errors import Overloaded
from antiphon.runtime.message import (
    CONTROL,
    Buffer,
    Message,
)


@pytest.fixture
async def make() -> AsyncIterator[Sides]:
    with sides() as made:
        yield made


async def ask(side: Side, message: Message, timeout: float = 5.0, to: str = "b") -> Any:
    return await side["a"].ask(to, message, Echoed, timeout)


async def test_control_overtakes_data_that_has_already_arrived(make: Sides) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    await ask(one, Echo("connected"))
    for i in range(50):
        one["a"].tell("b", Note(str(i)))
    one["a"].tell("b", Urge("cancel"), CONTROL)
    time.sleep(0.05)  # everything is in the receiver's socket before it looks
    await settled(lambda: len(two["b"].heard) == 52)
    assert two["b"].heard == ["connected", "!cancel", *(str(i) for i in range(50))]


async def test_an_ask_may_take_the_control_lane(make: Sides) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    two.post.local["b"].close()
    one["a"].tell("b", Note("data"))
    answer = one.post.request("a", "b", Echo("health"), 5.0, CONTROL)
    await asyncio.sleep(0.02)
    two.post.local["b"].open()
    assert await answer == Echoed("health")
    assert two["b"].heard == ["health", "data"]


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows small enough to be used up in a test."""
    for module in (link, post):
        monkeypatch.setattr(module, "WINDOW", 40)
        monkeypatch.setattr(module, "GRANT", 10)
    monkeypatch.setattr(link, "OUTBOX", 100)


@pytest.mark.usefixtures("narrow")
async def test_order_holds_when_credit_runs_out_again_and_again(make: Sides) -> None:
    one, two = make("one", "a"), make("two", "b", "c")
    introduce(one, two)
    sent = 0
    while sent < 1000:
        for _ in range(90):
            one["a"].tell("b" if sent % 2 else "c", Note(str(sent)))
            sent += 1
        await asyncio.sleep(0.001)
        await settled(lambda: one.post._links["two"].waiting() < 10)
    await settled(lambda: len(two["b"].heard) + len(two["c"].heard) == sent)
    assert two["c"].heard == [str(i) for i in range(0, sent, 2)]
    assert two["b"].heard == [str(i) for i in range(1, sent, 2)]
    assert one.post.counters["frames_waited"] > 0


@pytest.mark.usefixtures("narrow")
async def test_a_receiver_that_opens_late_holds_up_its_senders_and_then_all_goes_on(make: Sides) -> None:
    """All credit is used up before the first turn: it must be granted by turns, not by arrivals."""
    one, two = make("one", "a"), make("two", "b", closed=True)
    introduce(one, two)
    for i in range(140):  # 40 in flight, 100 in the outbox
        one["a"].tell("b", Note(str(i)))
    with pytest.raises(Overloaded, match="the peer takes no messages"):
        one["a"].tell("b", Note("too many"))
    with pytest.raises(Overloaded):
        await ask(one, Echo("too many"))
    assert one.post._pending == {}
    await settled(lambda: two.post.local["b"].waiting() == 40)
    await asyncio.sleep(0.05)
    assert two.post.local["b"].waiting() == 40, "not one more than the window"
    one["a"].tell("b", Urge("stop"), CONTROL)
    await settled(lambda: two.post.local["b"].waiting() == 41)
    two.post.local["b"].open()
    await settled(lambda: len(two["b"].heard) == 141)
    assert two["b"].heard == ["!stop", *(str(i) for i in range(140))]
    assert await ask(one, Echo("next")) == Echoed("next")


@pytest.mark.usefixtures("narrow")
async def test_replies_do_not_wait_for_credit(make: Sides) -> None:
    """b is starting: its mailbox is closed and it asks a, whose tells to it have used up the window."""
    one, two = make("one", "a"), make("two", "b", closed=True)
    introduce(one, two)
    for i in range(60):
        one["a"].tell("b", Note(str(i)))
    assert await two["b"].ask("a", Echo("who are you?"), Echoed) == Echoed("who are you?")


@pytest.mark.usefixtures("narrow")
async def test_bad_frames_do_not_use_up_credit(make: Sides) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    for _ in range(120):
        one["a"].tell("b", Misfit())
    await settled(lambda: two.post.counters["frames_bad"] == 120)
    for i in range(100):
        one["a"].tell("b", Note(str(i)))
    await settled(lambda: len(two["b"].heard) == 100)


async def test_a_flood_both_ways_through_full_sockets(make: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets that hold 10 messages: multipart sends that find no room, edges, retries."""
    monkeypatch.setattr(link, "HIGH_WATER", 10)
    monkeypatch.setattr(link, "BURST", 7)
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    blob = Buffer(bytes(200_000))
    answers = [one.post.request("a", "b", Echo(str(i), blob), 20.0) for i in range(300)]
    for i in range(300):
        two["b"].tell("a", Note(str(i)))
    assert [(await a).text for a in answers] == [str(i) for i in range(300)]
    await settled(lambda: len(one["a"].heard) == 300)
    assert one["a"].heard == [str(i) for i in range(300)]
    assert one.post.counters["frames_bad"] == two.post.counters["frames_bad"] == 0
