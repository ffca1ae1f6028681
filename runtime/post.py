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
from antiphon.runtime.errors import AskFailed, AskTimeout, BadFrame, Overloaded, Oversized, PeerRestarted
from antiphon.runtime.link import GRANT, WINDOW, Inbox, Link
from antiphon.runtime.message import (
    ASK,
    CONTROL,
    CREDIT,
    DATA,
    FAILURE,
    MAX_FRAMES,
    MAX_HEADER,
    REPLY,
    TELL,
    Codec,
    Header,
    Message,
)

SWEEP = 0.05  # seconds between looks at the deadlines of asks in flight
CAUSE = 2000  # characters of a cause that travel
QUIET = 1.0  # seconds between log lines about bad frames; the counter counts them all


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

    __slots__ = ("cause", "done", "future", "value", "what")

    def __init__(self, what: str) -> None:
        self.what = what
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
                self.future.set_exception(_asked(self.what, cause))


class Post:
    """Delivers messages from and to the actors of one cell."""

    def __init__(self, cell: str, epoch: int, inbox: Inbox, direct: bool, log: Any):
        self.cell = cell
        self.epoch = epoch
        self.direct = direct
        self.local: dict[str, Runner] = {}
        self.where: dict[str, str] = {}  # instance -> cell
        self.kinds: dict[str, str] = {}  # instance -> kind
        self.peers: dict[str, Peer] = {}
        self.degraded: tuple[str, ...] = ()  # actors of the deployment whose stand-ins run; the root says so
        self.counters = Counters(POST)
        self._inbox = inbox
        self._log = log
        self._links: dict[str, Link] = {}
        self._floor: dict[str, int] = {}  # by cell: the oldest incarnation that may still speak
        self._codecs: dict[str, Codec] = {}
        self._replies: dict[type[Message], Codec] = {}
        self._any = Codec(())
        self._failure = Codec([Failed])
        self._header_out = msgspec.msgpack.Encoder()
        self._header_in = msgspec.msgpack.Decoder(Header)
        self._touched: list[Runner] = []  # runners whose mailboxes this burst filled
        self._owed: dict[str, int] = {}
        self._pending: dict[int, _Pending] = {}
        self._numbers = itertools.count(1)
        self._sweeper: asyncio.TimerHandle | None = None
        self._complained = 0.0
        self._loop = asyncio.get_running_loop()
        inbox.attach(self._receive, self._run_touched)

    def host(self, instance: str, runner: Runner) -> None:
        """Take an actor of this cell into the directory."""
        self.local[instance] = runner
        self.where[instance] = self.cell
        self._codecs[instance] = Codec(runner.actor.handlers)
        runner.consumed = self._consumed

    def connect(self, cell: str, peer: Peer) -> None:
        """Know a cell's present incarnation; asks in flight to an earlier one fail with PeerRestarted."""
        if self.peers.get(cell) == peer:
            return
        self.disconnect(cell)
        self.peers[cell] = peer
        self._floor[cell] = peer.epoch
        self._links[cell] = Link(self._inbox.context, peer.address, f"{self.cell}.{self.epoch}", self._loop)

    def disconnect(self, cell: str) -> None:
        """Forget a dead cell: nothing that incarnation sent is handled from now on."""
        if (peer := self.peers.pop(cell, None)) is not None:
            self._floor[cell] = peer.epoch + 1
            self._owed.pop(cell, None)
        if (link := self._links.pop(cell, None)) is not None:
            link.close()
        for runner in self.local.values():
            runner.forget(cell)
        for number, pending in list(self._pending.items()):
            if pending.cell == cell and pending.codec is not None:
                self._fail(number, PeerRestarted(f"{cell} died while {pending.what} was in flight"))

    def tell(self, sender: str, to: str, message: Message, lane: int = DATA) -> None:
        """Send without an answer. A message to a dead cell is dropped: its sender hears of the death."""
        self.counters.add("tells")
        runner = self.local.get(to)
        if runner is None or not self.direct:
            self._send(TELL, sender, to, message, lane, 0)
        elif runner.takes(type(message)):
            self._hand_over(sender, runner, Envelope(sender, message, None), lane)
        else:
            self._bad(f"{to} takes no {type(message).__name__}")

    async def ask(self, sender: str, to: str, message: Message, timeout: float, lane: int = DATA) -> Any:
        """Send and await the reply. An answer that is there at once costs neither a future nor a turn of the loop."""
        answer = self._begin(sender, to, message, timeout, lane)
        return await answer if isinstance(answer, asyncio.Future) else answer

    def request(self, sender: str, to: str, message: Message, timeout: float,
                lane: int = DATA) -> "asyncio.Future[Any]":
        """Send now and return the reply's future, for an asker that has more to send before it awaits."""
        try:
            answer = self._begin(sender, to, message, timeout, lane)
        except AskFailed as cause:
            answer = self._loop.create_future()
            answer.set_exception(cause)
        if isinstance(answer, asyncio.Future):
            return answer
        future: asyncio.Future[Any] = self._loop.create_future()
        future.set_result(answer)
        return future

    def _begin(self, sender: str, to: str, message: Message, timeout: float, lane: int) -> Any:
        """Send an ask; its answer if a direct delivery gave it at once, else a future."""
        self.counters.add("asks")
        if message.reply is None:
            raise TypeError(f"{type(message).__name__} has no reply: tell it")
        runner = self.local.get(to)
        what = f"{type(message).__name__} to {to}"
        if runner is not None and self.direct:
            if not runner.takes(type(message)):
                self.counters.add("asks_failed")
                raise AskFailed(f"{what}: BadFrame: {self._bad(f'{to} takes no {type(message).__name__}')}")
            slot = _Slot(what)
            self._hand_over(sender, runner, Envelope(sender, message, slot.answer), lane)
            if slot.done:
                if slot.cause is not None:
                    self.counters.add("asks_failed")
                    raise _asked(what, slot.cause)
                return slot.value
            slot.future = self._loop.create_future()
            self._expect(slot.future, None, self.cell, timeout, what)
            return slot.future
        codec = self._replies.get(message.reply)
        if codec is None:
            codec = self._replies[message.reply] = Codec([message.reply])
        future: asyncio.Future[Any] = self._loop.create_future()
        number = self._expect(future, codec, self.where.get(to, ""), timeout, what)
        try:
            self._send(ASK, sender, to, message, lane, number)
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

    def _hand_over(self, sender: str, to: Runner, envelope: Envelope, lane: int) -> None:
        """Deliver directly. An activity of the sender is not interrupted by turns of its own actor."""
        own = self.local.get(sender)
        entered = own is not None and own.enter()
        try:
            to.deliver(envelope, lane)
        finally:
            if entered and own is not None:
                own.leave()

    def _send(self, sort: int, sender: str, to: str, message: Message, lane: int, number: int) -> None:
        cell = self.where.get(to)
        if cell is None:
            raise LookupError(f"no actor named {to!r} in this deployment")
        link = self._links.get(cell)
        if link is None:
            if sort == ASK:
                raise PeerRestarted(f"{to} is not up")
            self.counters.add("tells_dropped")
            return
        header = Header(sort, to, sender, self.cell, self.epoch, lane, number, self.peers[cell].epoch)
        self.counters.add("frames_out")
        if link.send([self._header_out.encode(header), *self._any.encode(message)], counted=lane == DATA):
            self.counters.add("frames_waited")

    def _answer(self, header: Header) -> Callable[[Any, BaseException | None], None]:
        def answer(value: Any, cause: BaseException | None) -> None:
            if cause is None:
                try:
                    self._send_back(REPLY, header, self._any.encode(value))
                    return
                except (Oversized, TypeError, ValueError, NotImplementedError, RecursionError) as problem:
                    self._log.error("reply cannot travel", to=header.sender, cause=repr(problem))
                    cause = problem
            self._send_back(FAILURE, header, self._any.encode(Failed(_text(cause))))

        return answer

    def _send_back(self, sort: int, asked: Header, frames: list[Any]) -> None:
        """Send a reply. It is outside the lanes: where tells wait for credit it overtakes them, or nothing moved."""
        peer = self.peers.get(asked.cell)
        link = self._links.get(asked.cell)
        if peer is None or link is None or peer.epoch != asked.epoch:
            return  # the asker is gone
        header = Header(sort, asked.sender, asked.target, self.cell, self.epoch, DATA, asked.ask, peer.epoch)
        self.counters.add("frames_out")
        self._uncounted(link, [self._header_out.encode(header), *frames])

    def _uncounted(self, link: Link, frames: list[Any]) -> None:
        try:
            link.send(frames, counted=False)
        except Overloaded:
            self.counters.add("replies_dropped")  # the asker's deadline tells it

    # ---- receiving

    def _receive(self, frames: list[Any]) -> None:
        """Take one message off the wire; whatever is wrong with it costs that message."""
        self.counters.add("frames_in")
        try:
            if not 2 <= len(frames) <= MAX_FRAMES or len(frames[0]) > MAX_HEADER:
                raise BadFrame(f"{len(frames)} frames, a header of {len(frames[0])} bytes")
            self._accept(self._header_in.decode(frames[0]), frames)
        except (BadFrame, msgspec.MsgspecError, ValueError, RecursionError) as cause:
            self._bad(str(cause))

    def _bad(self, cause: str) -> str:
        self.counters.add("frames_bad")
        if (now := time.monotonic()) - self._complained >= QUIET:
            self._complained = now
            self._log.warning("bad frame dropped", cause=cause[:200], bad=self.counters["frames_bad"])
        return cause

    def _accept(self, header: Header, frames: list[Any]) -> None:
        if header.target_epoch != self.epoch or header.epoch < self._floor.get(header.cell, 0):
            self.counters.add("frames_stale")
        elif header.sort in (TELL, ASK):
            self._accept_message(header, frames)
        elif header.sort in (REPLY, FAILURE):
            self._accept_reply(header, frames)
        elif header.sort == CREDIT and 0 < header.ask <= WINDOW:
            if (link := self._links.get(header.cell)) is not None:
                link.grant(header.ask)
        else:
            raise BadFrame(f"sort {header.sort} with number {header.ask}")

    def _accept_message(self, header: Header, frames: list[Any]) -> None:
        lane = CONTROL if header.lane == CONTROL else DATA
        runner = self.local.get(header.target)
        try:
            if runner is None:
                raise BadFrame(f"no actor {header.target[:40]!r} here")
            if header.sender not in self.where:
                raise BadFrame(f"no actor {header.sender[:40]!r} in this deployment")
            message = self._codecs[header.target].decode(frames[1:])
        except BadFrame as cause:
            if lane == DATA:
                self._consumed(header.cell)  # its sender has counted it
            if header.sort == ASK:
                self._answer(header)(None, cause)
            raise
        answer = self._answer(header) if header.sort == ASK else None
        if not runner.waiting():
            self._touched.append(runner)
        runner.put(Envelope(header.sender, message, answer, header.cell), lane)

    def _accept_reply(self, header: Header, frames: list[Any]) -> None:
        pending = self._pending.get(header.ask)
        if pending is None or pending.future.done():
            return  # late: its deadline has passed
        if pending.codec is None or pending.cell != header.cell:
            raise BadFrame(f"a reply from {header.cell[:40]!r}, which was not asked")
        del self._pending[header.ask]
        try:
            if header.sort == REPLY:
                pending.future.set_result(pending.codec.decode(frames[1:]))
            else:
                self.counters.add("asks_failed")
                failed: Failed = self._failure.decode(frames[1:])
                pending.future.set_exception(AskFailed(f"{pending.what}: {failed.cause}"))
        except BadFrame as cause:
            pending.future.set_exception(AskFailed(f"{pending.what}: the reply does not decode: {cause}"))
            raise

    def _run_touched(self) -> None:
        """Run the turns of a burst: all of it lies in the mailboxes now, so the control lane goes first."""
        while self._touched:
            touched, self._touched = self._touched, []
            for runner in touched:
                runner.drain()

    def _consumed(self, cell: str) -> None:
        """Grant credit back once enough messages of a cell have had their turn."""
        if cell not in self.peers and cell not in self.where.values():
            return  # an invented name must not stay in our books
        owed = self._owed[cell] = self._owed.get(cell, 0) + 1
        link = self._links.get(cell)
        if owed >= GRANT and link is not None:
            self._owed[cell] = owed - GRANT
            header = Header(CREDIT, "", "", self.cell, self.epoch, CONTROL, GRANT, self.peers[cell].epoch)
            self._uncounted(link, [self._header_out.encode(header), b""])

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


def _text(cause: BaseException) -> str:
    return f"{type(cause).__name__}: {cause}"[:CAUSE]


def _asked(what: str, cause: BaseException) -> AskFailed:
    """What the asker sees of a handler's exception: the cause as text, the same over every delivery."""
    failure = AskFailed(f"{what}: {_text(cause)}")
    failure.__cause__ = cause
    return failure
