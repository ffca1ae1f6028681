"""The ZeroMQ door: one ROUTER for all clients, typed frames, credits, heartbeats.

It owns what it knows of each client. It does not know requests beyond their ids.
"""

import asyncio
import contextlib
import secrets
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from antiphon.actors.gateway import Door, Gateway, Output
from antiphon.actors.protocol import Sampling
from antiphon.actors.upkeep import Denied
from antiphon.plugins.doors import wire
from antiphon.runtime.counters import Counters
from antiphon.runtime.plugin import Options, Site

BURST = 256  # frames handled before the loop gets a turn
MAX_CLIENTS = 4096
MAX_GRANT = 1 << 20
MAX_QUERIES = 256  # that are being answered
# Frames waiting for one client. Output is bounded by credit; the rest (Accepted, Refused, Pong) are small answers to
# the client's own frames, and a burst of requests must not lose any of them.
HIGH_WATER = 16384


class ZmqOptions(Options, frozen=True):
    """``listen``: ``tcp://127.0.0.1:PORT`` or ``ipc://PATH``; anything beyond this machine needs keys."""

    listen: str = "tcp://127.0.0.1:5777"


class _Client:
    __slots__ = ("credit", "frames", "seen", "starved")

    def __init__(self) -> None:
        self.seen = time.monotonic()
        self.greet()

    def greet(self) -> None:
        """Begin anew, as the client does when it is welcomed."""
        self.credit = wire.WINDOW
        self.frames = 0  # sent since, Pongs left out
        self.starved = 0.0  # monotonic second since which output waits for it; 0: none does


class ZmqDoor(Door[ZmqOptions]):
    """Serves the client SDK."""

    def __init__(self, options: ZmqOptions, site: Site):
        super().__init__(options, site)
        self.clients: dict[bytes, _Client] = {}
        self.counters = Counters(("frames_in", "frames_bad", "frames_out", "unroutable"))
        self.epoch = secrets.randbits(31)
        self._queries: set[asyncio.Task[None]] = set()

    async def open(self, gate: Gateway) -> None:
        """Bind and listen."""
        self.gate = gate
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        self._socket.set(zmq.ROUTER_HANDOVER, 1)  # a client that reconnects takes its identity with it
        self._socket.set(zmq.MAXMSGSIZE, wire.MAX_FRAME)
        self._socket.set(zmq.SNDHWM, HIGH_WATER)
        self._socket.set(zmq.LINGER, 1000)
        self._bind()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._ticker = self._loop.call_later(1.0, self._tick)
        self.gate.log.info("listening", address=self.options.listen)

    async def close(self) -> None:
        """Stop listening; frames already sent have a second to leave."""
        self._ticker.cancel()
        for task in self._queries:
            task.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        await self._loop.run_in_executor(None, self._context.term)
        if self.options.listen.startswith("ipc://"):
            Path(self.options.listen.removeprefix("ipc://")).unlink(missing_ok=True)

    def accepted(self, client: bytes, request: bytes, prompt: bytes, seed: int) -> bool:
        """Tell the client what it needs to resume."""
        sent = self._send(client, wire.Accepted(request, prompt, seed))
        if not sent:
            self._starve(client)
        return sent

    def deliver(self, client: bytes, outputs: list[Output]) -> bool:
        """Send one frame if the client has credit."""
        known = self.clients.get(client)
        if known is None or known.credit < 1:
            self._starve(client)
            return False
        deltas = tuple(wire.Delta(o.id, o.index, wire.pack(o.ids), o.text, o.finish) for o in outputs)
        if not self._send(client, wire.Deltas(deltas)):
            self._starve(client)
            return False
        known.credit -= 1
        known.starved = 0.0
        return True

    def refused(self, client: bytes, request: bytes, kind: str, reason: str, retry_after: float) -> None:
        """Tell the client why."""
        self._send(client, wire.Refused(request, kind, reason, retry_after))

    # ---- receiving

    def _readable(self) -> None:
        for _ in range(BURST):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self.counters.add("frames_in")
            self._frame(frames)
        self._loop.call_soon(self._readable)

    def _frame(self, frames: list[bytes]) -> None:
        client = frames[0]
        try:
            if len(frames) != 2:
                raise msgspec.DecodeError(f"{len(frames) - 1} frames, expected one")
            message = wire.decode_from_client(frames[1])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as cause:
            self.counters.add("frames_bad")
            self._send(client, wire.Refused(b"", "invalid", f"bad frame: {cause}"[:200]))
            return
        known = self.clients.get(client)
        if known is None:
            if not isinstance(message, wire.Hello):
                self._send(client, wire.Pong(self.epoch, known=False))
                return
            if len(self.clients) >= MAX_CLIENTS:
                self._send(client, wire.Refused(b"", "overloaded", f"{MAX_CLIENTS} clients are connected", 5.0))
                return
            known = self.clients[client] = _Client()
        known.seen = time.monotonic()
        try:
            self._message(client, known, message)
        except Exception as cause:  # noqa: BLE001 - whatever one frame leads to, the frames behind it are served
            self.counters.add("frames_bad")
            self.gate.log.error("frame failed", message_type=type(message).__name__, cause=repr(cause))
            self._send(client, wire.Refused(getattr(message, "id", b""), "unavailable", "the server failed on it", 1.0))
        if known.starved and known.credit > 0:
            since, known.starved = known.starved, 0.0
            self.gate.flush(client)
            known.starved = known.starved and since  # what is not taken even now has waited since then

    def _message(self, client: bytes, known: _Client, message: wire.FromClient) -> None:
        match message:
            case wire.Generate():
                self._generate(client, message)
            case wire.Resume(request=request):
                sampling = _sampling(request)
                self.gate.resume(client, request.id, message.prompt, message.done, sampling, request.seed or 0,
                                 request.sample)
            case wire.Cancel():
                self.gate.cancel(client, message.id)
            case wire.Grant():
                known.credit = min(MAX_GRANT, known.credit + max(0, message.frames))
            case wire.Ping():
                self._send(client, wire.Pong(self.epoch, frames=known.frames))
            case wire.Hello():
                self._send(client, wire.Welcome(self.epoch, wire.MAJOR, wire.MINOR, "antiphon"))
                known.greet()
            case _ if len(self._queries) >= MAX_QUERIES:
                self._send(client, wire.Refused(message.id, "overloaded", f"{MAX_QUERIES} queries are open", 1.0))
            case _:
                task = self._loop.create_task(self._answer(client, message), name="query")
                self._queries.add(task)
                task.add_done_callback(self._queries.discard)

    def _generate(self, client: bytes, message: wire.Generate) -> None:
        self.gate.generate(client, message.id, message.text, message.ids, message.raw, _sampling(message), message.seed,
                           message.sample, message.like)

    async def _answer(self, client: bytes, asked: wire.Asked) -> None:
        try:
            self._send(client, wire.Answer(asked.id, await self._facts(asked)))
        except Denied as cause:
            self._send(client, wire.Refused(asked.id, *cause.args))

    async def _facts(self, asked: wire.Asked) -> dict[str, Any]:
        upkeep = self.gate.upkeep
        match asked:
            case wire.Query(what="health"):
                return {"ready": self.gate.ready(), "down": sorted(self.gate.down), "draining": self.gate.draining}
            case wire.Query(what="stats"):
                return {**await self.gate.stats(), "door": dict(self.counters)}
            case wire.Query():
                raise Denied("invalid", f"unknown query {asked.what[:40]!r}")
            case wire.Survey():
                return await upkeep.survey(asked.top)
            case wire.Flush():
                return await upkeep.flush()
            case wire.Pin():
                return await upkeep.pin(asked.text, asked.ids, asked.raw, asked.seconds)
            case wire.Unpin():
                return await upkeep.unpin(asked.pin)

    # ---- sending

    def _starve(self, client: bytes) -> None:
        if (known := self.clients.get(client)) is not None and not known.starved:
            known.starved = time.monotonic()

    def _send(self, client: bytes, message: wire.FromServer) -> bool:
        if self._socket.closed:
            return False
        try:
            self._socket.send_multipart([client, wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as cause:
            # EHOSTUNREACH: the client has left; EAGAIN: it does not read. Its silence ends it (see _tick).
            self.counters.add("unroutable")
            if cause.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            return False
        finally:
            # The descriptor is edge-triggered: a send may have consumed the edge of what arrived meanwhile.
            if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:
                self._loop.call_soon(self._readable)
        self.counters.add("frames_out")
        if not isinstance(message, wire.Pong) and (known := self.clients.get(client)) is not None:
            known.frames += 1
        return True

    def _tick(self) -> None:
        """Forget clients that have been silent, or have left output untaken, for longer than their grace."""
        now, options = time.monotonic(), self.gate.options
        for client, known in list(self.clients.items()):
            if known.seen < now - options.client_grace or 0 < known.starved < now - options.starved_grace:
                del self.clients[client]
                self.gate.gone(client)
        self._ticker = self._loop.call_later(1.0, self._tick)

    def _bind(self) -> None:
        listen = self.options.listen
        if listen.startswith("ipc://"):
            path = Path(listen.removeprefix("ipc://"))
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _free(path)  # ZeroMQ would remove whatever is there
            self.gate.site.leaves(str(path))  # also if this process is killed
        try:
            self._socket.bind(listen)
        except zmq.ZMQError as cause:
            raise OSError(f"cannot listen on {listen}: {cause}; is another server running there?") from cause
        if listen.startswith("ipc://"):
            with contextlib.suppress(OSError):
                path.chmod(0o600)


def _free(path: Path) -> None:
    """Make sure that nothing but a dead server's socket lies at ``path``. Raises OSError."""
    if not path.exists():
        return
    if not path.is_socket():
        raise OSError(f"cannot listen on ipc://{path}: a file is there; name a path that is free")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return  # nobody listens: its server was killed
    raise OSError(f"cannot listen on ipc://{path}: another server is running there")


def _sampling(message: wire.Generate) -> Sampling:
    return Sampling(message.max_tokens, message.temperature, message.top_k, message.top_p, message.stop_ids,
                    message.ignore_eos, message.priority, message.cache)
