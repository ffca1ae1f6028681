"""Inbox and link over real sockets: edges, bursts, full queues, frames too long, and closing."""

import asyncio
import gc
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq
from tests.recorders import settled

from antiphon.runtime import link
from antiphon.runtime.errors import Overloaded
from antiphon.runtime.link import Inbox, Link
from antiphon.runtime.message import MAX_FRAMES


@pytest.fixture
def context() -> Iterator["zmq.Context[Any]"]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture(params=["inproc", "ipc", "tcp"])
async def address(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="l") as directory:
        yield {"inproc": "inproc://box", "ipc": f"ipc://{directory}/box", "tcp": f"tcp://127.0.0.1:{_port()}"}[request.param]


def _port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Heard:
    """An inbox that keeps what comes."""

    def __init__(self, context: "zmq.Context[Any]", address: str):
        self.messages: list[list[Any]] = []
        self.bursts = 0
        self.inbox = Inbox(context, [address])
        self.inbox.attach(self.receive, self.drained)

    def receive(self, frames: list[Any]) -> None:
        self.messages.append(frames)

    def drained(self) -> None:
        self.bursts += 1

    def texts(self) -> list[str]:
        return [bytes(frames[-1]).decode() for frames in self.messages]


def loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


async def test_every_message_arrives_in_order_whatever_the_rhythm(context: "zmq.Context[Any]", address: str) -> None:
    """The descriptor is edge-triggered: a message that comes while another is handled must not be forgotten."""
    heard = Heard(context, address)
    sender = Link(context, address, "me", loop())
    sent = 0
    for pause in (0.0, 0.0005, 0.0, 0.002, 0.0) * 8:
        for _ in range(sent % 7 + 1):
            sender.send([b"h", str(sent).encode()], counted=False)
            sent += 1
        await asyncio.sleep(pause)
    await settled(lambda: len(heard.messages) == sent)
    assert heard.texts() == [str(i) for i in range(sent)]
    sender.close()
    heard.inbox.close()


async def test_what_arrives_during_a_turn_is_seen(context: "zmq.Context[Any]", address: str) -> None:
    heard = Heard(context, address)
    sender = Link(context, address, "me", loop())

    def receive(frames: list[Any]) -> None:
        heard.messages.append(frames)
        if len(heard.messages) < 50:
            sender.send([b"h", str(len(heard.messages)).encode()], counted=False)

    heard.receive = receive  # type: ignore[method-assign]
    heard.inbox.attach(receive, heard.drained)
    sender.send([b"h", b"0"], counted=False)
    await settled(lambda: len(heard.messages) == 50)
    sender.close()
    heard.inbox.close()


async def test_a_receiver_that_raises_does_not_stop_the_inbox(context: "zmq.Context[Any]", address: str) -> None:
    seen: list[bytes] = []

    def receive(frames: list[Any]) -> None:
        seen.append(frames[1])
        if frames[1] == b"bad":
            raise RuntimeError("bug in a receiver")

    reported: list[Any] = []
    loop().set_exception_handler(lambda _loop, context: reported.append(context))
    inbox = Inbox(context, [address])
    inbox.attach(receive)
    sender = Link(context, address, "me", loop())
    for text in (b"bad", b"good", b"bad", b"good"):
        sender.send([b"h", text], counted=False)
    await settled(lambda: len(seen) == 4)
    assert len(reported) == 2
    sender.close()
    inbox.close()


async def test_the_loop_goes_round_between_bursts(context: "zmq.Context[Any]", address: str) -> None:
    heard = Heard(context, address)
    sender = Link(context, address, "me", loop())
    for i in range(5 * link.BURST):
        sender.send([b"h", str(i).encode()], counted=False)
    time.sleep(0.05)  # all of it is there before the loop looks
    rounds = 0
    while len(heard.messages) < 5 * link.BURST:
        rounds += 1
        await asyncio.sleep(0)
    assert heard.bursts >= 5
    assert rounds >= 3, "a burst from the descriptor and one from the loop at most between two of ours"
    sender.close()
    heard.inbox.close()


async def test_an_inbox_may_be_closed_by_what_it_hears(context: "zmq.Context[Any]", address: str) -> None:
    heard = Heard(context, address)

    def receive(frames: list[Any]) -> None:
        heard.messages.append(frames)
        heard.inbox.close()

    heard.inbox.attach(receive)
    sender = Link(context, address, "me", loop())
    for _ in range(10):
        sender.send([b"h", b"x"], counted=False)
    await settled(lambda: heard.messages)
    await asyncio.sleep(0.01)
    assert len(heard.messages) == 1
    heard.inbox.close()
    sender.close()


async def test_large_frames_are_not_copied_on_either_side(context: "zmq.Context[Any]") -> None:
    """Over inproc the receiver's frame is the sender's memory, if neither side copies."""
    heard = Heard(context, "inproc://box")
    sender = Link(context, "inproc://box", "me", loop())
    memory = bytearray(link.LARGE)
    sender.send([b"h", b"body", memoryview(memory)], counted=False)
    await settled(lambda: heard.messages)
    memory[7] = 42
    assert heard.messages[0][2][7] == 42
    small = bytearray(100)
    sender.send([b"h", b"body", memoryview(small)], counted=False)
    await settled(lambda: len(heard.messages) == 2)
    small[7] = 42
    assert heard.messages[1][2][7] == 0, "small ones are copied: that is cheaper than to count references"
    sender.close()
    heard.inbox.close()


async def test_memory_of_a_sent_frame_is_let_go(context: "zmq.Context[Any]", address: str) -> None:
    heard = Heard(context, address)
    sender = Link(context, address, "me", loop())
    before = psutil.Process().memory_info().rss
    for i in range(40):
        sender.send([b"h", b"body", bytes(8_000_000)], counted=False)
        await settled(lambda: len(heard.messages) == i + 1)  # noqa: B023 - awaited here
        heard.messages[-1] = []
    gc.collect()
    assert psutil.Process().memory_info().rss - before < 160_000_000, "of 320 MB sent"
    sender.close()
    heard.inbox.close()


async def test_a_message_of_too_many_frames_is_cut_not_kept(context: "zmq.Context[Any]", address: str) -> None:
    heard = Heard(context, address)
    sender = Link(context, address, "me", loop())
    sender.send([b"x"] * MAX_FRAMES, counted=False)
    sender.send([b"x"] * 10_000, counted=False)
    sender.send([b"h", b"next"], counted=False)
    await settled(lambda: len(heard.messages) == 3)
    assert [len(frames) for frames in heard.messages] == [MAX_FRAMES, MAX_FRAMES + 1, 2]
    sender.close()
    heard.inbox.close()


async def test_a_frame_beyond_the_limit_costs_its_peer_the_connection_and_no_one_else(
        context: "zmq.Context[Any]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MAX_FRAME", 10_000)
    with tempfile.TemporaryDirectory(prefix="l") as directory:
        address = f"ipc://{directory}/box"
        heard = Heard(context, address)
        good, bad = Link(context, address, "good", loop()), context.socket(zmq.DEALER)
        bad.connect(address)
        bad.send_multipart([b"h", b"x" * 10_001])
        good.send([b"h", b"y" * 10_000], counted=False)
        await settled(lambda: heard.messages)
        await asyncio.sleep(0.05)
        assert [bytes(frames[1][:1]) for frames in heard.messages] == [b"y"]
        good.close()
        bad.close(linger=0)
        heard.inbox.close()


async def test_without_credit_data_waits_and_the_rest_goes_on(
        context: "zmq.Context[Any]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "WINDOW", 3)
    monkeypatch.setattr(link, "OUTBOX", 4)
    heard = Heard(context, "inproc://box")
    sender = Link(context, "inproc://box", "me", loop())
    waited = [sender.send([b"h", str(i).encode()], counted=True) for i in range(7)]
    assert waited == [False] * 3 + [True] * 4
    with pytest.raises(Overloaded):
        sender.send([b"h", b"7"], counted=True)
    assert not sender.send([b"h", b"control"], counted=False)
    await settled(lambda: len(heard.messages) == 4)
    await asyncio.sleep(0.02)
    assert heard.texts() == ["0", "1", "2", "control"]
    assert sender.waiting() == 4
    sender.grant(2)
    await settled(lambda: len(heard.messages) == 6)
    sender.grant(100)  # more than was ever used does no harm
    await settled(lambda: len(heard.messages) == 8)
    assert heard.texts()[4:] == ["3", "4", "5", "6"]
    assert [sender.send([b"h", b"x"], counted=True) for _ in range(2)] == [False, True], "2 of 3 are outstanding"
    sender.close()
    heard.inbox.close()


async def test_a_full_socket_is_tried_again_in_order(
        context: "zmq.Context[Any]", monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "HIGH_WATER", 4)
    heard = Heard(context, "inproc://box")
    sender = Link(context, "inproc://box", "me", loop())
    waited = [sender.send([b"h", b"body", b"%d" % i], counted=bool(i % 2)) for i in range(40)]
    assert any(waited)
    await settled(lambda: len(heard.messages) == 40)
    texts = heard.texts()
    assert [t for t in texts if int(t) % 2] == [str(i) for i in range(1, 40, 2)]
    assert [t for t in texts if not int(t) % 2] == [str(i) for i in range(0, 40, 2)]
    assert all(len(frames) == 3 for frames in heard.messages), "no message is torn"
    sender.close()
    heard.inbox.close()


async def test_closing_with_a_peer_that_never_came_is_quick(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    sender = Link(context, f"ipc://{tmp_path}/nobody", "me", loop())
    for _ in range(100):
        sender.send([b"h", b"x"], counted=True)
    sender.close()
    sender.close()
    assert not sender.send([b"h", b"x"], counted=False), "what is sent to the dead is gone"
    sender.grant(5)
    began = time.monotonic()
    context.destroy(linger=0)
    assert time.monotonic() - began < 10


async def test_an_address_that_cannot_be_bound_leaves_no_socket() -> None:
    context: zmq.Context[Any] = zmq.Context()
    with pytest.raises(zmq.ZMQError):
        Inbox(context, ["inproc://fine", "ipc:///no/such/directory/box"])
    context.term()  # would hang if the socket were open


async def test_sockets_come_and_go_without_a_trace(context: "zmq.Context[Any]", address: str) -> None:
    async def once(number: int) -> None:
        heard = Heard(context, address if address.startswith("tcp") else f"{address}-{number}")
        sender = Link(context, address if address.startswith("tcp") else f"{address}-{number}", f"me.{number}", loop())
        sender.send([b"h", b"x"], counted=True)
        await settled(lambda: heard.messages)
        sender.close()
        heard.inbox.close()
        if address.startswith("tcp"):
            await asyncio.sleep(0.02)  # the port is free once the reaper has run

    await once(0)
    await asyncio.sleep(0.05)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for number in range(1, 20):
        await once(number)
    await settled(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before + 2)
