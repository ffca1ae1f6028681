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
LARGE = 1 << 16  # bytes from which a frame is sent without copying
GRANT = 1024  # messages consumed after which the receiver grants credit anew
BURST = 512  # frames handled before the loop gets a turn


class Inbox:
    """The ROUTER of a cell. Receives only, so its edge-triggered descriptor needs no second look after a send."""

    def __init__(self, context: "zmq.Context[Any]", addresses: list[str]):
        self.context = context
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVHWM, HIGH_WATER)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME)
        self._receive: Callable[[list[Any]], None] | None = None
        self._loop = asyncio.get_running_loop()
        self._open = True
        for address in addresses:
            self._socket.bind(address)

    def attach(self, receive: Callable[[list[Any]], None]) -> None:
        """Hand every message (without its identity frame) to ``receive``."""
        self._receive = receive
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._loop.call_soon(self._readable)

    def close(self) -> None:
        """Stop receiving."""
        if self._open:
            self._open = False
            self._loop.remove_reader(self._socket.fileno())
            self._socket.close()

    def _readable(self) -> None:
        # The descriptor says only that events may have changed: drain until nothing is left.
        for _ in range(BURST):
            if not self._open:
                return
            try:
                frames = [self._socket.recv(zmq.NOBLOCK), self._socket.recv(zmq.NOBLOCK)]
                while self._socket.get(zmq.RCVMORE):
                    # header and body are small; what follows are buffers, kept where ZeroMQ received them
                    frames.append(self._socket.recv(zmq.NOBLOCK) if len(frames) < 3 else
                                  self._socket.recv(zmq.NOBLOCK, copy=False).buffer)
            except zmq.Again:
                return
            if self._receive is not None:
                self._receive(frames[1:MAX_FRAMES])
        self._loop.call_soon(self._readable)


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
            self._retry = self._loop.call_later(0.002, self._flush)

    def _flush(self) -> None:
        self._retry = None
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
        try:
            if len(frames) == 2:
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            else:
                last = len(frames) - 1
                for i, frame in enumerate(frames):
                    self._socket.send(frame, zmq.NOBLOCK | (zmq.SNDMORE if i < last else 0), copy=len(frame) < LARGE)
        except zmq.Again:
            return False
        self._outstanding += counted
        return True
