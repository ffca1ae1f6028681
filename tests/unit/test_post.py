"""The post, the same over every delivery: order, turns, asks and how they end; and deaths of peers."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from tests.recorders import Boom, Echo, Echoed, Misfit, Note, Recorder, Side, Sides, Urge, introduce, settled, sides

from antiphon.runtime.errors import AskFailed, AskTimeout, Overloaded, PeerRestarted
from antiphon.runtime.message import (
    CONTROL,
    DATA,
    Buffer,
    Message,
)


@pytest.fixture
async def make() -> AsyncIterator[Sides]:
    with sides() as made:
        yield made


@pytest.fixture(params=["far", "near", "direct"])
async def pair(request: pytest.FixtureRequest, make: Sides) -> tuple[Side, Side]:
    """Where actor "a" and where actor "b" lives: two cells, one cell over its own socket, one cell directly."""
    if request.param == "far":
        one, two = make("one", "a"), make("two", "b")
        introduce(one, two)
        return one, two
    side = make("one", "a", "b", direct=request.param == "direct")
    return side, side


async def ask(side: Side, message: Message, timeout: float = 5.0, to: str = "b") -> Any:
    return await side["a"].ask(to, message, Echoed, timeout)


# ---- the same over every delivery


async def test_messages_of_one_sender_come_in_order(pair: tuple[Side, Side]) -> None:
    one, two = pair
    for i in range(500):
        one["a"].tell("b", Note(str(i)))
    await settled(lambda: len(two["b"].heard) == 500)
    assert two["b"].heard == [str(i) for i in range(500)]


async def test_an_ask_keeps_its_place_among_tells(pair: tuple[Side, Side]) -> None:
    one, two = pair
    one["a"].tell("b", Note("before"))
    answer = one.post.request("a", "b", Echo("asked"), 5.0)
    one["a"].tell("b", Note("after"))
    assert await answer == Echoed("asked")
    await settled(lambda: len(two["b"].heard) == 3)
    assert two["b"].heard == ["before", "asked", "after"]


async def test_what_an_actor_sends_in_a_turn_never_interrupts_one(pair: tuple[Side, Side]) -> None:
    """b answers a while a still runs; Recorder.turn asserts that no turn begins inside another."""
    one, two = pair
    one["a"].forward = [("b", Note("ping")), ("a", Note("self")), ("b", Note("ping 2"))]
    two["b"].forward = [("a", Note("pong"))]
    two["b"].tell("a", Note("begin"))
    await settled(lambda: len(one["a"].heard) + len(two["b"].heard) == 5)
    assert one["a"].heard[0] == "begin"
    assert sorted(one["a"].heard[1:]) == ["pong", "self"]
    assert two["b"].heard == ["ping", "ping 2"]
    assert one.failures == two.failures == []


async def test_no_turn_of_an_actor_runs_inside_its_activity(pair: tuple[Side, Side]) -> None:
    """An activity applies its results without awaits; what comes back meanwhile must wait until it awaits again."""
    one, two = pair
    seen: list[list[str]] = []

    async def activity() -> None:
        two["b"].forward = [("a", Note("cancel"))]
        one["a"].tell("b", Note("emit"))
        one["a"].tell("a", Note("self"))
        seen.append(list(one["a"].heard))
        answer = one.post.request("a", "b", Echo("asked"), 5.0)
        seen.append(list(one["a"].heard))
        await answer
        await asyncio.sleep(0.01)
        seen.append(list(one["a"].heard))

    await one["a"].spawn(activity(), "step")
    assert seen[:2] == [[], []]
    assert sorted(seen[2]) == ["cancel", "self"]


async def test_a_long_rally_eats_neither_the_stack_nor_the_loop(pair: tuple[Side, Side]) -> None:
    one, two = pair
    limit = 3000

    def turn(mine: Recorder, other: str) -> Callable[[str], None]:
        def hit(text: str) -> None:
            mine.heard.append(text)
            if int(text) < limit:
                mine.tell(other, Note(str(int(text) + 1)))
        return hit

    one["a"].turn = turn(one["a"], "b")  # type: ignore[method-assign]
    two["b"].turn = turn(two["b"], "a")  # type: ignore[method-assign]
    two["b"].tell("a", Note("0"))
    ticks = 0
    while len(one["a"].heard) + len(two["b"].heard) <= limit:
        ticks += 1
        await asyncio.sleep(0)
    assert ticks > 1, "others had their chance"
    assert one["a"].heard == [str(i) for i in range(0, limit + 1, 2)]


async def test_a_failing_ask_brings_the_cause(pair: tuple[Side, Side]) -> None:
    one, two = pair
    for message in (Echo("x", wrong="raise"), Echo("x", wrong="late raise", later=0.001)):
        with pytest.raises(AskFailed, match=r"^Echo to b: Boom: x$"):
            await ask(one, message)
    assert two.failures == one.failures == []
    assert await ask(one, Echo("still here")) == Echoed("still here")
    assert one.post.counters["asks_failed"] == 2 or pair[0] is pair[1]


@pytest.mark.parametrize("wrong", ["type", "none", "late type"])
async def test_an_answer_of_another_type_fails_the_ask_at_once(pair: tuple[Side, Side], wrong: str) -> None:
    with pytest.raises(AskFailed, match=r"b answers Echo with \w+, not Echoed"):
        await ask(pair[0], Echo("x", wrong=wrong, later=0.001 if "late" in wrong else 0.0))


async def test_a_late_answer_does_not_block_other_turns(pair: tuple[Side, Side]) -> None:
    one, _ = pair
    slow = one.post.request("a", "b", Echo("slow", later=0.05), 5.0)
    assert await ask(one, Echo("quick")) == Echoed("quick")
    assert not slow.done()
    assert await slow == Echoed("slow")


async def test_an_ask_ends_at_its_deadline(pair: tuple[Side, Side]) -> None:
    one, two = pair
    began = time.monotonic()
    with pytest.raises(AskTimeout, match="Echo to b: no reply within its deadline"):
        await ask(one, Echo("x", later=0.2), 0.1)
    assert time.monotonic() - began >= 0.1
    assert one.post.counters["asks_timed_out"] == 1
    await asyncio.sleep(0.15)  # the answer arrives, late, and harms nobody
    assert await ask(one, Echo("next")) == Echoed("next")
    assert two.failures == one.failures == []


async def test_an_asker_that_gives_up_is_no_trouble(pair: tuple[Side, Side]) -> None:
    one, _ = pair
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(ask(one, Echo("x", later=0.1)), 0.02)
    await asyncio.sleep(0.2)
    assert one.post._pending == {}
    assert await ask(one, Echo("next")) == Echoed("next")


async def test_a_failed_tell_is_the_receivers_failure(pair: tuple[Side, Side]) -> None:
    one, two = pair
    one["a"].tell("b", Note("fail"))
    one["a"].tell("b", Note("after"))
    await settled(lambda: two.failures)
    assert [(name, type(cause)) for name, cause in two.failures] == [("b", Boom)]
    await asyncio.sleep(0.01)
    assert two["b"].heard == ["fail"]


async def test_a_message_that_the_receiver_does_not_take_costs_that_message(pair: tuple[Side, Side]) -> None:
    one, two = pair
    one["a"].tell("b", Misfit())
    with pytest.raises(AskFailed, match="Misfit to b: BadFrame: "):
        await ask(one, Misfit())
    assert two.post.counters["frames_bad"] == 2
    assert two.failures == one.failures == []
    assert await ask(one, Echo("next")) == Echoed("next")


async def test_an_actor_that_is_nowhere_is_a_mistake_of_the_sender(pair: tuple[Side, Side]) -> None:
    one, _ = pair
    with pytest.raises(LookupError, match="no actor named 'c'"):
        one["a"].tell("c", Note("x"))
    with pytest.raises(LookupError, match="no actor named 'c'"):
        await ask(one, Echo("x"), to="c")
    with pytest.raises(TypeError, match="Note has no reply: tell it"):
        await ask(one, Note("x"))
    assert one.post._pending == {}


async def test_the_asker_wants_the_type_it_asked_for(pair: tuple[Side, Side]) -> None:
    with pytest.raises(TypeError, match="b answered Echo with Echoed"):
        await pair[0]["a"].ask("b", Echo("x"), Note)


async def test_large_buffers_travel_both_ways(pair: tuple[Side, Side]) -> None:
    blob = random.Random(0).randbytes(3_000_000)
    answer = await ask(pair[0], Echo("x", Buffer(blob)))
    assert answer.data == Buffer(blob)
    later = await ask(pair[0], Echo("x", Buffer(blob), later=0.001))
    assert later.data == Buffer(blob)


async def test_messages_wait_for_a_mailbox_to_open(make: Sides, pair: tuple[Side, Side]) -> None:
    one, two = pair
    two.post.local["b"].close()
    one["a"].tell("b", Note("data"))
    one["a"].tell("b", Urge("control"), CONTROL)
    answer = one.post.request("a", "b", Echo("asked"), 5.0)
    await asyncio.sleep(0.02)
    assert two["b"].heard == []
    two.post.local["b"].open()
    assert await answer == Echoed("asked")
    assert two["b"].heard == ["!control", "data", "asked"]


async def test_a_direct_receiver_that_never_opens_refuses(make: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.runtime.actor.MAILBOX", 10)
    side = make("one", "a", "b", direct=True, closed=True)
    for _ in range(10):
        side["a"].tell("b", Note("x"))
    with pytest.raises(Overloaded):
        side["a"].tell("b", Note("x"))
    with pytest.raises(Overloaded):
        await ask(side, Echo("x"))


async def test_direct_delivery_hands_over_the_object_at_once(make: Sides) -> None:
    side = make("one", "a", "b", direct=True)
    blob = Buffer(bytearray(10))
    answer = side.post._begin("a", "b", Echo("x", blob), 5.0, DATA)
    assert answer.data is blob, "neither encoded nor awaited"
    assert side.post.counters["frames_out"] == 0


# ---- deaths


async def test_an_ask_in_flight_fails_when_its_peer_dies(make: Sides) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    answers = [one.post.request("a", "b", Echo("x", later=1.0), 5.0) for _ in range(2)]
    await settled(lambda: len(two["b"].heard) == 2)
    one.post.disconnect("two")
    for answer in answers:
        with pytest.raises(PeerRestarted, match="two died while Echo to b was in flight"):
            await answer
    with pytest.raises(PeerRestarted, match="b is not up"):
        await ask(one, Echo("x"))
    one["a"].tell("b", Note("lost"))
    assert one.post.counters["tells_dropped"] == 1


async def test_an_ask_in_flight_fails_when_its_peer_has_another_epoch(make: Sides) -> None:
    one, two, reborn = make("one", "a"), make("two", "b"), make("two", "b", epoch=2)
    introduce(one, two)
    answer = one.post.request("a", "b", Echo("x", later=0.05), 5.0)
    await settled(lambda: two["b"].heard == ["x"])
    introduce(one, reborn)
    with pytest.raises(PeerRestarted):
        await answer
    await asyncio.sleep(0.1)  # the old incarnation's answer arrives and is dropped
    assert one.post.counters["frames_stale"] == 1
    assert await ask(one, Echo("y")) == Echoed("y")
    assert reborn["b"].heard == ["y"]


async def test_nothing_of_a_dead_incarnation_is_handled(make: Sides) -> None:
    one, two = make("one", "a", closed=True), make("two", "b")
    introduce(one, two)
    two["b"].tell("a", Note("in the mailbox"))
    await settled(lambda: one.post.local["a"].waiting() == 1)
    one.post.disconnect("two")
    two["b"].tell("a", Note("on its way"))
    await settled(lambda: one.post.counters["frames_stale"] == 1)
    one.post.local["a"].open()
    assert one["a"].heard == []


async def test_a_message_for_an_earlier_incarnation_is_dropped_and_counted(make: Sides) -> None:
    one, two = make("one", "a"), make("two", "b", epoch=7)
    introduce(one, two)
    for epoch in (6, 8, 0):
        one.post.peers["two"] = msgspec.structs.replace(two.peer, epoch=epoch)
        one["a"].tell("b", Note("not for you"))
    await settled(lambda: two.post.counters["frames_stale"] == 3)
    assert two["b"].heard == []


async def test_closing_fails_what_is_in_flight(make: Sides) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    answer = one.post.request("a", "b", Echo("x", later=1.0), 5.0)
    one.post.close()
    with pytest.raises(AskFailed, match="the cell is closing"):
        await answer
