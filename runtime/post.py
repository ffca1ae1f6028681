"""The post of one cell: tells, asks and replies, by ZeroMQ or handed over directly.

It owns correlation, deadlines and epochs. It does not know what messages mean; sockets are in link.py.
"""

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any

import msgspec

from antiphon.runtime.actor import Envelope, Runner
from antiphon.runtime.counters import POST, Counters
from antiphon.runtime.errors import AskFailed, AskTimeout, BadFrame, PeerRestarted
from antiphon.runtime.link import GRANT, Inbox, Link
from antiphon.runtime.message import ASK, CONTROL, CREDIT, DATA, FAILURE, REPLY, TELL, Codec, Header, Message

SWEEP = 0.05  # seconds between looks at the deadlines of asks in flight


class Failed(Message, frozen=True):
    """Answers an ask whose handler raised."""

    cause: str


class Peer(msgspec.Struct, frozen=True):
    """Where a cell's inbox is and which incarnation it is."""

    address: str
    epoch: int


class _Pending:
    __slots__ = ("cell", "codec", "deadline", "future", "what")

    def __init__(self, future: "asyncio.Future[Any]", codec: Codec | None, cell: str, deadline: float, what: str):
        self.future, self.codec, self.cell, self.deadline, self.what = future, codec, cell, deadline, what


class _Slot:
    """Where a directly delivered ask finds its answer: at once, or in a future."""

    __slots__ = ("cause", "done", "future", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: Any = None
        self.cause: BaseException | None = None
        self.future: asyncio.Future[Any] | None = None

    def answer(self, value: Any, cause: BaseException | None) -> None:
        self.done, self.value, self.cause = True, value, cause
        if self.future is not None and not self.future.done():
            if cause is None:
                self.future.set_result(value)
            else:
                self.future.set_exception(_asked(cause))


class Post:
    """Delivers messages from and to the actors of one cell."""

    def __init__(self, cell: str, epoch: int, inbox: Inbox, direct: bool, log: Any):
        self.cell = cell
        self.epoch = epoch
        self.direct = direct
        self.local: dict[str, Runner] = {}
        self.where: dict[str, str] = {}  # instance -> cell
        self.peers: dict[str, Peer] = {}
        self.counters = Counters(POST)
        self._inbox = inbox
        self._log = log
        self._links: dict[str, Link] = {}
        self._codecs: dict[str, Codec] = {}
        self._replies: dict[type[Message] | None, Codec] = {}
        self._any = Codec(())
        self._header_out = msgspec.msgpack.Encoder()
        self._header_in = msgspec.msgpack.Decoder(Header)
        self._owed: dict[str, int] = {}
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._sweeper: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        inbox.attach(self._receive)

    def host(self, instance: str, runner: Runner) -> None:
        """Take an actor of this cell into the directory."""
        self.local[instance] = runner
        self.where[instance] = self.cell
        self._codecs[instance] = Codec(runner.actor.handlers)

    def connect(self, cell: str, peer: Peer) -> None:
        """Know a cell's present incarnation; asks in flight to an earlier one fail with PeerRestarted."""
        if self.peers.get(cell) == peer:
            return
        self.disconnect(cell)
        self.peers[cell] = peer
        self._links[cell] = Link(self._inbox.context, peer.address, f"{self.cell}.{self.epoch}", self._loop)

    def disconnect(self, cell: str) -> None:
        """Forget a dead cell."""
        self.peers.pop(cell, None)
        self._owed.pop(cell, None)
        if (link := self._links.pop(cell, None)) is not None:
            link.close()
        for number, pending in list(self._pending.items()):
            if pending.cell == cell:
                self._fail(number, PeerRestarted(f"{cell} died while {pending.what} was in flight"))

    def tell(self, sender: str, to: str, message: Message, lane: int = DATA) -> None:
        """Send without an answer. A message to a dead cell is dropped: its sender hears of the death."""
        self.counters.add("tells")
        runner = self.local.get(to)
        if runner is not None and self.direct:
            runner.deliver(Envelope(sender, message, None), lane)
        else:
            self._send(TELL, sender, to, message, lane, 0)

    async def ask(self, sender: str, to: str, message: Message, timeout: float) -> Any:
        """Send and await the reply. An answer that is there at once costs neither a future nor a turn of the loop."""
        answer = self._begin(sender, to, message, timeout)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def request(self, sender: str, to: str, message: Message, timeout: float) -> "asyncio.Future[Any]":
        """Send now and return the reply's future, for an asker that has more to send before it awaits."""
        try:
            answer = self._begin(sender, to, message, timeout)
        except AskFailed as cause:
            answer = self._loop.create_future()
            answer.set_exception(cause)
        if isinstance(answer, asyncio.Future):
            return answer
        future: asyncio.Future[Any] = self._loop.create_future()
        future.set_result(answer)
        return future

    def _begin(self, sender: str, to: str, message: Message, timeout: float) -> Any:
        """Send an ask; its answer if a direct delivery gave it at once, else a future."""
        self.counters.add("asks")
        runner = self.local.get(to)
        what = f"{type(message).__name__} to {to}"
        if runner is not None and self.direct:
            slot = _Slot()
            runner.deliver(Envelope(sender, message, slot.answer), DATA)
            if slot.done:
                if slot.cause is not None:
                    self.counters.add("asks_failed")
                    raise _asked(slot.cause)
                return slot.value
            slot.future = self._loop.create_future()
            self._expect(slot.future, None, self.cell, timeout, what)
            return slot.future
        codec = self._replies.get(message.reply)
        if codec is None:
            codec = self._replies[message.reply] = Codec([message.reply] if message.reply else [])
        future: asyncio.Future[Any] = self._loop.create_future()
        number = self._expect(future, codec, self.where.get(to, ""), timeout, what)
        try:
            self._send(ASK, sender, to, message, DATA, number)
        except BaseException:
            self._pending.pop(number, None)
            raise
        return future

    def close(self) -> None:
        """Fail what is in flight and close every link."""
        for number in list(self._pending):
            self._fail(number, AskFailed("the cell is closing"))
        if self._sweeper is not None:
            self._sweeper.cancel()
        for link in self._links.values():
            link.close()
        self._links.clear()
        self._inbox.close()

    # ---- sending

    def _send(self, sort: int, sender: str, to: str, message: Message, lane: int, number: int) -> None:
        cell = self.where.get(to)
        link = self._links.get(cell) if cell is not None else None
        if cell is None or link is None:
            if sort == ASK:
                raise PeerRestarted(f"{to} is not up")
            return
        header = Header(sort, to, sender, self.cell, self.epoch, lane, number, self.peers[cell].epoch)
        self.counters.add("frames_out")
        if link.send([self._header_out.encode(header), *self._any.encode(message)], counted=lane == DATA and sort < REPLY):
            self.counters.add("frames_waited")

    def _answer(self, header: Header) -> Callable[[Any, BaseException | None], None]:
        def answer(value: Any, cause: BaseException | None) -> None:
            if cause is not None:
                self._send_back(FAILURE, header, Failed(f"{type(cause).__name__}: {cause}"))
            else:
                self._send_back(REPLY, header, value)

        return answer

    def _send_back(self, sort: int, asked: Header, message: Message) -> None:
        peer = self.peers.get(asked.cell)
        link = self._links.get(asked.cell)
        if peer is None or link is None or peer.epoch != asked.epoch:
            return  # the asker is gone
        header = Header(sort, asked.sender, asked.target, self.cell, self.epoch, DATA, asked.ask, peer.epoch)
        self.counters.add("frames_out")
        link.send([self._header_out.encode(header), *self._any.encode(message)], counted=False)

    # ---- receiving

    def _receive(self, frames: list[Any]) -> None:
        self.counters.add("frames_in")
        try:
            self._accept(frames)
        except (BadFrame, msgspec.MsgspecError, LookupError, UnicodeDecodeError) as cause:
            self.counters.add("frames_bad")
            self._log.warning("bad frame dropped", cause=str(cause)[:200])

    def _accept(self, frames: list[Any]) -> None:
        header = self._header_in.decode(frames[0])
        known = self.peers.get(header.cell)
        if header.target_epoch != self.epoch or (known is not None and header.epoch < known.epoch):
            self.counters.add("frames_stale")
            return
        if header.sort in (TELL, ASK):
            runner = self.local[header.target]
            message = self._codecs[header.target].decode(frames[1:])
            answer = self._answer(header) if header.sort == ASK else None
            lane = CONTROL if header.lane == CONTROL else DATA
            runner.deliver(Envelope(header.sender, message, answer), lane)
            if lane == DATA:
                self._consumed(header.cell)
        elif header.sort in (REPLY, FAILURE):
            pending = self._pending.pop(header.ask, None)
            if pending is None or pending.codec is None or pending.future.done():
                return  # late: its deadline has passed
            if header.sort == REPLY:
                pending.future.set_result(pending.codec.decode(frames[1:]))
            else:
                self.counters.add("asks_failed")
                cause = msgspec.msgpack.decode(frames[1], type=Failed)
                pending.future.set_exception(AskFailed(f"{pending.what}: {cause.cause}"))
        elif header.sort == CREDIT:
            if (link := self._links.get(header.cell)) is not None:
                link.grant(min(header.ask, GRANT))
        else:
            raise BadFrame(f"unknown sort {header.sort}")

    def _consumed(self, cell: str) -> None:
        """Grant credit back once enough is consumed; not while messages wait in this cell's mailboxes."""
        owed = self._owed[cell] = self._owed.get(cell, 0) + 1
        link = self._links.get(cell)
        if owed >= GRANT and link is not None and not any(r.waiting() for r in self.local.values()):
            self._owed[cell] = owed - GRANT
            header = Header(CREDIT, "", "", self.cell, self.epoch, CONTROL, GRANT, self.peers[cell].epoch)
            link.send([self._header_out.encode(header), b""], counted=False)

    # ---- deadlines

    def _expect(self, future: "asyncio.Future[Any]", codec: Codec | None, cell: str, timeout: float, what: str) -> int:
        number = next(self._numbers)
        self._pending[number] = _Pending(future, codec, cell, time.monotonic() + timeout, what)
        if self._sweeper is None:
            self._sweeper = self._loop.call_later(SWEEP, self._sweep)
        return number

    def _sweep(self) -> None:
        now = time.monotonic()
        for number, pending in list(self._pending.items()):
            if pending.future.done():  # answered directly, or its asker gave up
                del self._pending[number]
            elif pending.deadline < now:
                self.counters.add("asks_timed_out")
                self._fail(number, AskTimeout(f"{pending.what}: no reply within its deadline"))
        self._sweeper = self._loop.call_later(SWEEP, self._sweep) if self._pending else None

    def _fail(self, number: int, cause: Exception) -> None:
        pending = self._pending.pop(number, None)
        if pending is not None and not pending.future.done():
            pending.future.set_exception(cause)


def _asked(cause: BaseException) -> AskFailed:
    """What the asker sees of a handler's exception: the cause as text, the same over every delivery."""
    failure = AskFailed(f"{type(cause).__name__}: {cause}")
    failure.__cause__ = cause
    return failure
