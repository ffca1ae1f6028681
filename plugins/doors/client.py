"""The async client: streaming, cancelling, and surviving a crash on the other side.

It loads neither torch nor numpy and knows nothing of the server beyond the wire.
"""

import asyncio
import contextlib
import secrets
import struct
import time
from collections.abc import AsyncGenerator
from typing import Any, Self

import msgspec
import zmq

from antiphon.plugins.doors import wire
from antiphon.plugins.doors.answers import Completion, Delta, Open, Pin
from antiphon.plugins.doors.asking import Prompt, generation, pinning
from antiphon.plugins.doors.errors import AntiphonError, Disconnected, ProtocolMismatch, Refused, Timeout

DEFAULT = "tcp://127.0.0.1:5777"
BURST = 512  # frames handled before the loop gets a turn
ANSWER = 20.0  # seconds for what is no request; the server asks its parts with shorter deadlines
AGAIN = 0.5  # seconds before what may have been lost is sent again


class AsyncClient:
    """Talks to one server. Use as ``async with AsyncClient() as client``.

    ``timeout``: seconds without news of a request after which it is cancelled and Timeout raised.
    ``patience``: seconds without any sign of the server after which open requests end with Disconnected.
    """

    def __init__(self, address: str = DEFAULT, *, timeout: float = 120.0, patience: float = 30.0):
        self.address = address
        self.timeout = timeout
        self.patience = patience
        self._open: dict[bytes, Open] = {}
        self._queries: dict[bytes, tuple[wire.Asked, asyncio.Future[dict[str, Any]]]] = {}
        self._epoch: int | None = None
        self._minor = 0  # version of the server's door
        self._owed = 0  # Deltas frames not yet granted back
        self._frames = 0  # since Welcome, Pongs left out
        self._greeted = 0.0  # monotonic second of a Hello that waits for its Welcome; 0: none does
        self._bad = 0  # frames that were dropped
        self._started = False

    async def __aenter__(self) -> Self:
        await self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def connect(self) -> None:
        """Reach the server and agree on a version. Raises Disconnected, ProtocolMismatch."""
        if self._started:
            return
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, b"c" + secrets.token_bytes(16))
        self._socket.set(zmq.LINGER, 500)
        self._socket.set(zmq.RECONNECT_IVL, 50)
        self._socket.set(zmq.RECONNECT_IVL_MAX, 1000)
        self._socket.set(zmq.SNDHWM, 65536)
        self._socket.set(zmq.MAXMSGSIZE, wire.MAX_FRAME)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as cause:
            self._context.destroy(linger=0)
            raise Disconnected(f"{self.address!r} is no ZeroMQ address such as {DEFAULT!r}: {cause}") from cause
        self._started = True
        self._welcome: asyncio.Future[None] = self._loop.create_future()
        self._heard = time.monotonic()
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._greet()
        self._heart = self._loop.create_task(self._beat(), name="antiphon-client")
        try:
            async with asyncio.timeout(self.patience):
                await asyncio.shield(self._welcome)
        except TimeoutError:
            await self.close()
            raise Disconnected(f"no Antiphon server answers at {self.address}; "
                               "start one with 'antiphon serve'") from None
        except AntiphonError:
            await self.close()
            raise

    async def close(self) -> None:
        """Cancel what is open and let the socket go."""
        if not self._started:
            return
        self._started = False
        for request in list(self._open):
            self._send(wire.Cancel(request))
        self._end_all(Disconnected("the client was closed"))
        self._heart.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._heart
        self._loop.remove_reader(self._socket.fileno())
        self._context.destroy(linger=500)

    async def generate(self, prompt: Prompt, **options: Any) -> Completion:
        """The whole answer to ``prompt``, a user message or token ids; options as in ``stream``."""
        return await self._whole(Open(generation(prompt, options)))

    async def samples(self, prompt: Prompt, n: int, **options: Any) -> list[Completion]:
        """``n`` answers to one prompt that share what was computed for it; options as in ``stream``.

        Sample i of a seed is the same whatever ``n`` is, and sample 0 is what ``generate`` gives.
        """
        if n < 1:
            raise Refused("invalid", f"n is {n}; it must be at least 1")
        options.setdefault("seed", secrets.randbits(63))
        first = Open(generation(prompt, {**options, "sample": 0}))
        more = [Open(generation(prompt, {**options, "sample": i, "like": first.message.id})) for i in range(1, n)]
        tasks = [asyncio.ensure_future(self._whole(request)) for request in (first, *more)]
        try:
            return await asyncio.gather(*tasks)
        finally:  # one that failed takes the others with it
            for task in tasks:
                task.cancel()

    async def _whole(self, request: Open) -> Completion:
        text, finish = [], ""
        async for delta in self._follow(request):
            text.append(delta.text)
            finish = delta.finish_reason or finish
        seconds = request.last - request.first
        return Completion(
            "".join(text), request.ids, finish, wire.unpack(request.prompt or b""), request.message.seed or 0,
            request.first - request.began, request.last - request.began,
            (len(request.ids) - 1) / seconds if seconds > 0 and len(request.ids) > 1 else 0.0,
        )

    def stream(self, prompt: Prompt, **options: Any) -> AsyncGenerator[Delta, None]:
        """Deltas as they come; leaving the loop cancels on the server.

        Options: max_tokens, temperature (0: greedy), top_k, top_p, seed, stop_ids, ignore_eos, raw (text without
        the chat template), priority (-100..100, higher is served first), cache (false: keep out of the prefix cache).
        Raises Refused, Timeout, Disconnected.
        """
        return self._follow(Open(generation(prompt, options)))

    def cancel(self, request: bytes) -> None:
        """Cancel by id; idempotent. A stream is cancelled by leaving its loop."""
        self._send(wire.Cancel(request))

    async def stats(self) -> dict[str, Any]:
        """Facts of every actor of the deployment."""
        return await self._query(wire.Query(secrets.token_bytes(8), "stats"))

    async def health(self) -> dict[str, Any]:
        """``{"ready": bool, ...}``."""
        return await self._query(wire.Query(secrets.token_bytes(8), "health"))

    async def wait_ready(self, timeout: float = 300.0) -> None:
        """Wait until the server can serve. Raises Timeout."""
        ends = time.monotonic() + timeout
        while not (await self.health())["ready"]:
            if time.monotonic() > ends:
                raise Timeout(f"the server was not ready within {timeout:g} s")
            await asyncio.sleep(0.05)

    async def cache(self, top: int = 10) -> dict[str, Any]:
        """What is in the server's KV memory, as plain data, with the ``top`` prefixes by hits.

        ``{"allocators": {NAME: {"block_size", "pools", "counters", "prefixes", "pins"}}, "pagers": {NAME: facts}}``;
        a pool counts blocks ("total", "free", "active", "cached", "transfer", "quarantined") and the slots of active
        ones that hold nothing ("waste"). docs/counters.md explains the counters. Raises Refused, Timeout, Disconnected,
        ProtocolMismatch: the server is older than that.
        """
        return await self._query(wire.Survey(secrets.token_bytes(8), top))

    async def pin(self, prompt: Prompt, *, seconds: float = 3600.0, raw: bool = False) -> Pin:
        """Keep what is cached of a prompt on the device for some time, whatever else wants its place.

        The prompt is a user message or token ids, as in ``generate``; whole blocks of what some request has computed
        are kept. Pinned once more, it is kept for ``seconds`` from now. Raises Refused ("unavailable": nothing of it is
        cached, or the server keeps no prefixes; "overloaded": too many pins) and what ``cache`` raises.
        """
        facts = await self._query(pinning(prompt, seconds, raw))
        return Pin(facts["pin"], facts["slots"])

    async def unpin(self, pin: int | Pin) -> bool:
        """Let a pin go; false: there was no such pin any more. Raises what ``cache`` raises."""
        number = pin.number if isinstance(pin, Pin) else pin
        return bool((await self._query(wire.Unpin(secrets.token_bytes(8), number)))["found"])

    async def flush(self) -> int:
        """Have all cached blocks that nobody holds forgotten; how many there were. Raises what ``cache`` raises."""
        return int((await self._query(wire.Flush(secrets.token_bytes(8))))["blocks"])

    # ---- requests

    async def _follow(self, request: Open) -> AsyncGenerator[Delta, None]:
        if not self._started:
            await self.connect()
        key = request.message.id
        self._open[key] = request
        request.began = time.perf_counter()
        self._send(request.message)
        done = False
        try:
            while not done:
                item = request.queue.get_nowait() if not request.queue.empty() else await self._news(request)
                if isinstance(item, AntiphonError):
                    done = isinstance(item, Refused)  # else the server may still have it, if it comes back
                    raise item
                done = bool(item.finish_reason)
                yield item
        finally:
            self._open.pop(key, None)
            if not done and self._started:
                self._send(wire.Cancel(key))

    async def _news(self, request: Open) -> Delta | AntiphonError:
        # Not asyncio.wait_for: in Python 3.11 it swallows a cancellation that comes together with an item.
        try:
            async with asyncio.timeout(self.timeout):
                return await request.queue.get()
        except TimeoutError:
            raise Timeout(f"no news of the request for {self.timeout:g} s") from None

    async def _query(self, query: wire.Asked) -> dict[str, Any]:
        if not self._started:
            await self.connect()
        what = query.what if isinstance(query, wire.Query) else type(query).__name__.lower()
        if self._minor < 1 and not isinstance(query, wire.Query):
            raise ProtocolMismatch(f"the server speaks door version {wire.MAJOR}.{self._minor}; {what} needs 1.1")
        future: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._queries[query.id] = query, future
        self._send(query)
        try:
            async with asyncio.timeout(ANSWER):
                return await future
        except TimeoutError:
            raise Timeout(f"the server did not answer {what} within {ANSWER:g} s") from None
        finally:
            del self._queries[query.id]

    # ---- the connection

    async def _beat(self) -> None:
        """Ping, so that the server knows we live and we notice when it does not."""
        while True:
            await asyncio.sleep(wire.HEARTBEAT)
            self._send(wire.Ping())
            if self._open and time.monotonic() - self._heard > self.patience:
                self._end_all(Disconnected(f"{self.address} has been silent for {self.patience:g} s"))

    def _send(self, message: wire.FromClient) -> None:
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            self._end_all(Disconnected("the server takes no more requests"))
        if int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN:  # edge-triggered: the send may have consumed the edge
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        for _ in range(BURST):
            if not self._started:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.ZMQError:
                break
            self._heard = time.monotonic()
            self._frames += 1
            try:
                if len(frames) != 1:
                    raise ValueError(f"{len(frames)} frames, expected one")
                self._message(wire.decode_from_server(frames[0]))
            except (msgspec.MsgspecError, ValueError, RecursionError, struct.error):
                self._bad += 1  # a newer server's message, or nonsense: it costs that frame
        else:
            self._loop.call_soon(self._readable)
        if self._started and self._owed >= wire.WINDOW // 2:
            owed, self._owed = self._owed, 0
            self._send(wire.Grant(owed))

    def _message(self, message: wire.FromServer) -> None:
        match message:
            case wire.Deltas():
                self._owed += 1
                now = time.perf_counter()
                for delta in message.deltas:
                    self._delta(delta, now)
            case wire.Accepted():
                if (request := self._open.get(message.id)) is not None:
                    wire.unpack(message.prompt)
                    request.prompt = message.prompt
                    request.message = msgspec.structs.replace(request.message, seed=message.seed)
            case wire.Refused():
                self._refused(message)
            case wire.Answer():
                if message.id in self._queries and not (future := self._queries[message.id][1]).done():
                    future.set_result(dict(message.facts))
            case wire.Pong():
                # A door that is new, has forgotten us, or has sent what did not come; or a Welcome that did not.
                self._frames -= 1
                lost = message.frames > self._frames or self._greeted
                if lost or not message.known or message.epoch != self._epoch:
                    self._greet()
            case wire.Welcome():
                self._welcomed(message)

    def _refused(self, message: wire.Refused) -> None:
        refusal = Refused(message.kind, message.reason, message.retry_after)
        if (request := self._open.get(message.id)) is not None:
            request.queue.put_nowait(refusal)
        elif message.id in self._queries and not (future := self._queries[message.id][1]).done():
            future.set_exception(refusal)
        elif not message.id and not self._welcome.done():
            self._welcome.set_exception(refusal)

    def _greet(self) -> None:
        """Say Hello, unless one is on its way."""
        now = time.monotonic()
        if now - self._greeted > AGAIN:
            self._greeted = now
            self._send(wire.Hello(wire.MAJOR, wire.MINOR, "antiphon-python"))

    def _welcomed(self, message: wire.Welcome) -> None:
        if not self._greeted:
            return  # we did not greet
        if message.major != wire.MAJOR:
            mismatch = ProtocolMismatch(f"the server speaks door version {message.major}.{message.minor}, "
                                        f"this client {wire.MAJOR}.{wire.MINOR}")
            if not self._welcome.done():
                self._welcome.set_exception(mismatch)
            self._end_all(mismatch)
            return
        # The server counts anew and has granted itself a full window.
        self._epoch, self._minor, self._owed, self._frames, self._greeted = message.epoch, message.minor, 0, 0, 0.0
        for request in self._open.values():
            self._send(request.again())
        for query, _ in self._queries.values():
            self._send(query)
        if not self._welcome.done():
            self._welcome.set_result(None)

    def _delta(self, delta: wire.Delta, now: float) -> None:
        request = self._open.get(delta.id)
        if request is None:
            return
        ids = wire.unpack(delta.ids)
        have = len(request.ids)
        if delta.index != have or (ids and request.prompt is None):
            # From before a Resume, or something before it was lost; a text cannot be cut where ids can.
            if delta.index + len(ids) > have and time.monotonic() > request.asked_again + AGAIN:
                request.asked_again = time.monotonic()
                self._send(request.again())
            return
        request.ids += ids
        if ids and not request.first:
            request.first = now
        request.last = now
        request.queue.put_nowait(Delta(delta.text, ids, have, delta.finish))

    def _end_all(self, cause: AntiphonError) -> None:
        for request in self._open.values():
            request.queue.put_nowait(cause)
        for _, future in self._queries.values():
            if not future.done():
                future.set_exception(cause)


__all__ = ["DEFAULT", "AsyncClient", "Completion", "Delta"]
