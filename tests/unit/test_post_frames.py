"""Frames that no post of ours would send: each costs itself, is counted, and keeps nobody waiting."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
import zmq
from tests.recorders import Echo, Echoed, Note, Side, Sides, introduce, settled, sides

from antiphon.runtime.errors import AskFailed, Oversized
from antiphon.runtime.message import (
    ASK,
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


@pytest.fixture
async def make() -> AsyncIterator[Sides]:
    with sides() as made:
        yield made


async def ask(side: Side, message: Message, timeout: float = 5.0, to: str = "b") -> Any:
    return await side["a"].ask(to, message, Echoed, timeout)


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
async def stranger(make: Sides) -> AsyncIterator[Stranger]:
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


async def test_a_bad_ask_is_answered_at_once(make: Sides) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    two.post.local["b2"] = two.post.local.pop("b")  # b has moved without a's knowing
    began = time.monotonic()
    with pytest.raises(AskFailed, match="BadFrame: no actor 'b' here"):
        await ask(one, Echo("x"), 30.0)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("sort", [REPLY, FAILURE])
@pytest.mark.parametrize("frames", [[b""], [b"\xff"], [NOTE], [Codec(()).encode(Echoed("x"))[0], b"left over"]])
async def test_a_bad_reply_fails_the_ask_at_once(make: Sides, sort: int, frames: list[bytes]) -> None:
    one, two = make("one", "a"), make("two", "b")
    introduce(one, two)
    answer = one.post.request("a", "b", Echo("x", later=60.0), 60.0)
    with closing(Stranger(one)) as stranger:
        stranger.speak(sort, *frames, target="a", sender="b", cell="two", ask=1)
        await settled(lambda: one.post.counters["frames_in"] == 1)
    with pytest.raises(AskFailed, match="Echo to b: the reply does not decode"):
        await asyncio.wait_for(answer, 5)
    assert one.post.counters["frames_bad"] == 1


async def test_only_the_cell_that_was_asked_can_answer(make: Sides) -> None:
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


async def test_a_reply_that_cannot_travel_fails_the_ask_at_once(make: Sides, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_an_unreasonably_long_cause_is_cut(make: Sides) -> None:
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
