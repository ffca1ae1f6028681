"""The sockets of a cell: one inbox (ROUTER) that receives, one link (DEALER) to every peer that sends.

It owns high-water marks, credits and frame limits. It does not decode what it carries.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

from antiphon.runtime.errors import Overloaded
from antiphon.runtime.message import MAX_FRAME, MAX_FRAMES

WINDOW = 4096  # counted messages a sender may have unacknowledged at one receiver
OUTBOX = 65536  # messages that may wait for credit or for the socket before the sender is told Overloaded
HIGH_WATER = 16384
LINGER = 500  # ms
LARGE = 1 << 16  # bytes from which a frame is neither copied when sent nor when received
GRANT = 1024  # messages consumed after which the receiver grants credit anew
BURST = 128  # messages taken from the socket before their turns run; the loop goes round between bursts


class Inbox:
    """The ROUTER of a cell. Receives only, so its edge-triggered descriptor needs no second look after a send."""

    def __init__(self, context: "zmq.Context[Any]", addresses: list[str]):
        self.context = context
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # nothing is sent here; if it ever is, no peer may miss it silently
        self._receive: Callable[[list[Any]], None] | None = None
        self._drained: Callable[[], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._open = True
        try:
            for address in addresses:
                self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close()
            raise

    def attach(self, receive: Callable[[list[Any]], None], drained: Callable[[], None] | None = None) -> None:
        """Hand every message (without its identity frame) to ``receive``, and call ``drained`` after each burst.

        A message of more than MAX_FRAMES frames arrives cut to one more than that.
        """
        self._receive, self._drained = receive, drained
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._later()

    def close(self) -> None:
        """Stop receiving."""
        if self._open:
            self._open = False
            if self._again is not None:
                self._again.cancel()
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _later(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._take_up)

    def _take_up(self) -> None:
        self._again = None
        self._readable()

    def _readable(self) -> None:
        # The descriptor says only that events may have changed: drain until nothing is left, or come back for it,
        # also when a receiver raises, because no new edge will tell of what is already here.
        more = True
        try:
            more = self._burst()
        finally:
            if more and self._open:
                self._later()

    def _burst(self) -> bool:
        """Hand over at most BURST messages; false once the socket is empty."""
        assert self._receive is not None
        more = True
        try:
            for _ in range(BURST):
                if not self._open:
                    return False
                try:
                    self._socket.recv(zmq.NOBLOCK)  # identity; the header names the sender
                except zmq.Again:
                    more = False
                    break
                self._receive(self._message())
        finally:
            if self._drained is not None:
                self._drained()
        return more

    def _message(self) -> list[Any]:
        # The parts of a message arrive together, so none of these receives waits. Header and body are copied, for
        # bytes decode fastest; a large body and the buffers behind it stay where ZeroMQ received them.
        frame = self._socket.recv(zmq.NOBLOCK, copy=False)
        frames: list[Any] = [frame.bytes]
        while frame.more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= MAX_FRAMES:
                frames.append(frame.bytes if len(frames) == 1 and len(frame) < LARGE else frame.buffer)
        return frames


class Link:
    """The DEALER to one incarnation of one peer. Sends only; what finds no room waits in order."""

    def __init__(self, context: "zmq.Context[Any]", address: str, identity: str, loop: asyncio.AbstractEventLoop):
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, identity.encode())
        self._socket.set(zmq.LINGER, LINGER)
        self._socket.set(zmq.SNDHWM, HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        self._socket.connect(address)
        self._loop = loop
        self._outstanding = 0  # counted messages not yet granted back
        self._counted: deque[list[Any]] = deque()
        self._uncounted: deque[list[Any]] = deque()  # replies and the control lane: never wait for credit
        self._retry: asyncio.TimerHandle | None = None
        self._open = True

    def send(self, frames: list[Any], counted: bool) -> bool:
        """Send, or queue in order behind what waits; true if it had to wait. Raises Overloaded."""
        queue = self._counted if counted else self._uncounted
        if not queue and self._try(frames, counted):
            return False
        if len(queue) >= OUTBOX:
            raise Overloaded("the peer takes no messages: its queue and ours are full")
        queue.append(frames)
        self._later()
        return True

    def grant(self, count: int) -> None:
        """The peer has consumed ``count`` messages."""
        self._outstanding = max(0, self._outstanding - count)
        self._flush()

    def waiting(self) -> int:
        """Messages that wait for credit or for the socket."""
        return len(self._counted) + len(self._uncounted)

    def close(self) -> None:
        """Close; what is queued in the socket has ``LINGER`` ms to leave."""
        if self._open:
            self._open = False
            if self._retry is not None:
                self._retry.cancel()
            self._socket.close()

    def _later(self) -> None:
        # Without credit a grant wakes the queue; a full socket is tried again soon.
        if self._retry is None and self._open and (self._uncounted or self._outstanding < WINDOW):
            self._retry = self._loop.call_later(0.002, self._retried)

    def _retried(self) -> None:
        self._retry = None
        self._flush()

    def _flush(self) -> None:
        if not self._open:
            return
        for queue, counted in ((self._uncounted, False), (self._counted, True)):
            while queue and self._try(queue[0], counted):
                queue.popleft()
        if self._uncounted or self._counted:
            self._later()

    def _try(self, frames: list[Any], counted: bool) -> bool:
        if counted and self._outstanding >= WINDOW:
            return False
        if not self._open:
            return True  # the peer is gone, and with it whatever was meant for it
        send, last = self._socket.send, len(frames) - 1
        try:
            # Only the first part can find the socket full: ZeroMQ counts whole messages.
            for i, frame in enumerate(frames):
                send(frame, zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0), len(frame) < LARGE)
        except zmq.Again:
            return False
        self._outstanding += counted
        return True
