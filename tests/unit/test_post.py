"""The post between real sockets: order, asks and their ends, credits, epochs, hostile frames; and direct delivery."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
from tests.probes import Boom, Echo, Echoed, Misfit, Note, Recorder, Side, Urge, introduce, settled

from antiphon.runtime import link, post
from antiphon.runtime.errors import AskFailed, AskTimeout, Overloaded, Oversized, PeerRestarted
from antiphon.runtime.message import (
    ASK,
    CONTROL,
    CREDIT,
    DATA,
    FAILURE,
    MAX_FRAMES,
    REPLY,
    TELL,
    Buffer,
    Codec,
    Header,
    Message,
)

Make = Callable[..., Side]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Sides that are closed afterwards; closing must be quick and complete."""
    context: zmq.Context[Any] = zmq.Context()
    sides: list[Side] = []

    def new(name: str, *instances: str, **options: Any) -> Side:
        sides.append(Side(context, name, *instances, **options))
        return sides[-1]

    yield new
    for side in sides:
        side.post.close()
    context.destroy(linger=0)


@pytest.fixture(params=["far", "near", "direct"])
async def pair(request: pytest.FixtureRequest, make: Make) -> tuple[Side, Side]:
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


async def test_messages_wait_for_a_mailbox_to_open(make: Make, pair: tuple[Side, Side]) -> None:
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


async def test_a_direct_receiver_that_never_opens_refuses(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("antiphon.runtime.actor.MAILBOX", 10)
    side = make("one", "a", "b", direct=True, closed=True)
    for _ in range(10):
        side["a"].tell("b", Note("x"))
    with pytest.raises(Overloaded):
        side["a"].tell("b", Note("x"))
    with pytest.raises(Overloaded):
        await ask(side, Echo("x"))


async def test_direct_delivery_hands_over_the_object_at_once(make: Make) -> None:
    side = make("one", "a", "b", direct=True)
    blob = Buffer(bytearray(10))
    answer = side.post._begin("a", "b", Echo("x", blob), 5.0, DATA)
    assert answer.data is blob, "neither encoded nor awaited"
    assert side.post.counters["frames_out"] == 0


# ---- lanes and credits


async def test_control_overtakes_data_that_has_already_arrived(make: Make) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    await ask(one, Echo("connected"))
    for i in range(50):
        one["a"].tell("b", Note(str(i)))
    one["a"].tell("b", Urge("cancel"), CONTROL)
    time.sleep(0.05)  # everything is in the receiver's socket before it looks
    await settled(lambda: len(two["b"].heard) == 52)
    assert two["b"].heard == ["connected", "!cancel", *(str(i) for i in range(50))]


async def test_an_ask_may_take_the_control_lane(make: Make) -> None:
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
async def test_order_holds_when_credit_runs_out_again_and_again(make: Make) -> None:
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
async def test_a_receiver_that_opens_late_holds_up_its_senders_and_then_all_goes_on(make: Make) -> None:
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
async def test_replies_do_not_wait_for_credit(make: Make) -> None:
    """b is starting: its mailbox is closed and it asks a, whose tells to it have used up the window."""
    one, two = make("one", "a"), make("two", "b", closed=True)
    introduce(one, two)
    for i in range(60):
        one["a"].tell("b", Note(str(i)))
    assert await two["b"].ask("a", Echo("who are you?"), Echoed) == Echoed("who are you?")


@pytest.mark.usefixtures("narrow")
async def test_bad_frames_do_not_use_up_credit(make: Make) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    for _ in range(120):
        one["a"].tell("b", Misfit())
    await settled(lambda: two.post.counters["frames_bad"] == 120)
    for i in range(100):
        one["a"].tell("b", Note(str(i)))
    await settled(lambda: len(two["b"].heard) == 100)


async def test_a_flood_both_ways_through_full_sockets(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- deaths


async def test_an_ask_in_flight_fails_when_its_peer_dies(make: Make) -> None:
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


async def test_an_ask_in_flight_fails_when_its_peer_has_another_epoch(make: Make) -> None:
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


async def test_nothing_of_a_dead_incarnation_is_handled(make: Make) -> None:
    one, two = make("one", "a", closed=True), make("two", "b")
    introduce(one, two)
    two["b"].tell("a", Note("in the mailbox"))
    await settled(lambda: one.post.local["a"].waiting() == 1)
    one.post.disconnect("two")
    two["b"].tell("a", Note("on its way"))
    await settled(lambda: one.post.counters["frames_stale"] == 1)
    one.post.local["a"].open()
    assert one["a"].heard == []


async def test_a_message_for_an_earlier_incarnation_is_dropped_and_counted(make: Make) -> None:
    one, two = make("one", "a"), make("two", "b", epoch=7)
    introduce(one, two)
    for epoch in (6, 8, 0):
        one.post.peers["two"] = msgspec.structs.replace(two.peer, epoch=epoch)
        one["a"].tell("b", Note("not for you"))
    await settled(lambda: two.post.counters["frames_stale"] == 3)
    assert two["b"].heard == []


async def test_closing_fails_what_is_in_flight(make: Make) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    answer = one.post.request("a", "b", Echo("x", later=1.0), 5.0)
    one.post.close()
    with pytest.raises(AskFailed, match="the cell is closing"):
        await answer


# ---- frames that no post of ours would send


class Stranger:
    """A raw socket on a side's inbox."""

    def __init__(self, side: Side):
        self.side = side
        self.socket = side.post._inbox.context.socket(zmq.DEALER)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.connect(side.peer.address)

    def close(self) -> None:
        self.socket.close(linger=0)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def speak(self, sort: int, *frames: bytes, **changes: Any) -> None:
        header: dict[str, Any] = {"sort": sort, "target": "b", "sender": "a", "cell": "one", "epoch": 1, "lane": DATA,
                                  "ask": 0, "target_epoch": 1, **changes}
        self.send(msgspec.msgpack.encode(Header(**header)), *frames)


@pytest.fixture
async def stranger(make: Make) -> AsyncIterator[Stranger]:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    with closing(Stranger(two)) as stranger:
        yield stranger


NOTE = Codec(()).encode(Note("x"))[0]
NESTED = b"\x98" + b"\x91" * 5000


async def test_bad_frames_are_counted_and_cost_only_themselves(stranger: Stranger) -> None:
    side = stranger.side
    stranger.send(b"")
    stranger.send(b"", b"")
    stranger.send(b"only a header")
    stranger.send(b"\xff" * 100, NOTE)
    stranger.send(b"\x91" * 4000, NOTE)
    stranger.send(NESTED[:4000], NOTE)
    stranger.send(b"x" * 5_000_000, NOTE)
    stranger.send(*[b"x"] * (MAX_FRAMES + 1))
    stranger.send(*[b"x"] * 100_000)
    stranger.speak(TELL, NOTE, target="nobody")
    stranger.speak(TELL, NOTE, sender="nobody")
    stranger.speak(TELL, NOTE, target="x" * 4090)
    stranger.speak(TELL, NOTE, NOTE)
    stranger.speak(TELL, b"\x92\xa4Note\x07")
    stranger.speak(TELL, b"")
    stranger.speak(99, NOTE)
    stranger.speak(-1, NOTE)
    for count in (0, -5, 1 << 40):
        stranger.speak(CREDIT, b"", ask=count)
    await settled(lambda: side.post.counters["frames_bad"] == 20)
    stranger.speak(TELL, NOTE)
    await settled(lambda: side["b"].heard == ["x"])
    assert side.post._owed.keys() <= {"one", "two"}, "invented names do not stay"


async def test_a_bad_ask_is_answered_at_once(make: Make) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    two.post.local["b2"] = two.post.local.pop("b")  # b has moved without a's knowing
    began = time.monotonic()
    with pytest.raises(AskFailed, match="BadFrame: no actor 'b' here"):
        await ask(one, Echo("x"), 30.0)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("sort", [REPLY, FAILURE])
@pytest.mark.parametrize("frames", [[b""], [b"\xff"], [NOTE], [Codec(()).encode(Echoed("x"))[0], b"left over"]])
async def test_a_bad_reply_fails_the_ask_at_once(make: Make, sort: int, frames: list[bytes]) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    answer = one.post.request("a", "b", Echo("x", later=60.0), 60.0)
    with closing(Stranger(one)) as stranger:
        stranger.speak(sort, *frames, target="a", sender="b", cell="two", ask=1)
        await settled(lambda: one.post.counters["frames_in"] == 1)
    with pytest.raises(AskFailed, match="Echo to b: the reply does not decode"):
        await asyncio.wait_for(answer, 5)
    assert one.post.counters["frames_bad"] == 1


async def test_only_the_cell_that_was_asked_can_answer(make: Make) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    answer = one.post.request("a", "b", Echo("x", later=0.05), 5.0)
    body = Codec(()).encode(Echoed("forged"))[0]
    with closing(Stranger(one)) as stranger:
        stranger.speak(REPLY, body, target="a", cell="three", ask=1)
        stranger.speak(REPLY, body, target="a", cell="two", ask=77)
        await settled(lambda: one.post.counters["frames_in"] == 2)
    assert await answer == Echoed("x")
    assert one.post.counters["frames_bad"] == 1


async def test_a_reply_that_cannot_travel_fails_the_ask_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    with pytest.raises(AskFailed, match="Echo to b: NotImplementedError: object cannot travel"):
        await ask(one, Echo("x", wrong="unsendable"), 30.0)
    blob = Buffer(bytes(2000))
    monkeypatch.setattr("antiphon.runtime.message.MAX_FRAME", 1000)
    with pytest.raises(Oversized, match="Echo has 2000 bytes"):
        await ask(one, Echo("x", blob))
    assert two.failures == []
    assert await ask(one, Echo("next")) == Echoed("next")


async def test_an_unreasonably_long_cause_is_cut(make: Make) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    with pytest.raises(AskFailed) as failure:
        await ask(one, Echo("x" * 1_000_000, wrong="raise"))
    assert len(str(failure.value)) < 3000


async def test_a_hundred_thousand_hostile_frames(stranger: Stranger) -> None:
    side = stranger.side
    rng = random.Random(7)
    good = [msgspec.msgpack.encode(Header(TELL, "b", "a", "one", 1, DATA, 0, 1)), NOTE]
    total = 100_000
    for i in range(total):
        match i % 4:
            case 0:
                frames = [rng.randbytes(rng.randrange(30)) for _ in range(rng.randrange(1, 4))]
            case 1:
                frames = [good[0], rng.randbytes(rng.randrange(40))]
            case 2:
                damaged = bytearray(good[0])
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
                frames = [bytes(damaged), NOTE]
            case _:
                frames = [good[0], NOTE[:rng.randrange(len(NOTE))], *[b"?"] * rng.randrange(2)]
        stranger.send(*frames)
        if i % 500 == 499:
            await settled(lambda: side.post.counters["frames_in"] == i + 1)  # noqa: B023 - awaited here
    assert side.failures == []
    assert side.post.counters["frames_bad"] > total // 2
    stranger.speak(TELL, Codec(()).encode(Note("unharmed"))[0])
    await settled(lambda: side["b"].heard[-1:] == ["unharmed"])
    assert len(side.post._owed) <= 2
    assert side.post._pending == {}


async def test_asks_that_no_one_can_be_told_about_are_dropped(stranger: Stranger) -> None:
    stranger.speak(ASK, Codec(()).encode(Echo("x"))[0], cell="elsewhere", ask=1)
    stranger.speak(ASK, b"", cell="elsewhere", ask=1)
    await settled(lambda: stranger.side["b"].heard == ["x"])
    assert stranger.side.failures == []
