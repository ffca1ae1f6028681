"""Callers for tests: what they ask for, many of them at once, and the tokens a null deployment owes them.

It does not know how deployments are started.
"""

import asyncio
import functools
import random
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import zmq

from antiphon.kernels import sampling
from antiphon.plugins.backends.null import NullOptions, expected
from antiphon.plugins.doors import wire
from antiphon.plugins.doors.client import AsyncClient, Completion
from antiphon.plugins.doors.errors import Refused
from antiphon.plugins.vocabularies.bytes import Bytes, BytesOptions

POOL = ("actors.allocator.options.blocks=4096",)  # 64 Ki slots: the default pool takes 60 ms to fill with nothing


class Ask(NamedTuple):
    """One request by token ids."""

    prompt: tuple[int, ...]
    max_tokens: int = 32
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    priority: int = 0
    cache: bool = True

    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``generate`` and ``stream``."""
        return {name: value for name, value in self._asdict().items() if name != "prompt"}


class Answer(NamedTuple):
    """What a correct deployment generates."""

    ids: list[int]
    finish: str
    text: str


VOCABULARY = Bytes(BytesOptions(), None)  # type: ignore[arg-type]  # it asks nothing of its site


def text_of(prompt: Sequence[int], ids: Sequence[int]) -> str:
    """Text of ``ids`` after ``prompt``, in one piece."""
    decoder = VOCABULARY.decoder(prompt)
    return decoder.push(ids) + decoder.finish()


def answered(completion: Completion) -> Answer:
    """A completion as an answer, to compare."""
    return Answer(completion.ids, completion.finish_reason, completion.text)


def owed(ask: Ask, options: NullOptions | None = None, sample: int = 0) -> Answer:
    """The answer that the null backend must give, computed without pages, batches or drafts."""
    return _owed(ask._replace(priority=0, cache=True), options or NullOptions(), sample)


@functools.lru_cache(10_000)
def _owed(ask: Ask, options: NullOptions, sample: int) -> Answer:
    stops = {*ask.stop_ids, *(() if ask.ignore_eos else options.eos)}
    ids = list(ask.prompt)
    for _ in range(ask.max_tokens):
        params = sampling.sampling(1, ask.temperature, ask.top_k, ask.top_p, ask.seed, sample, len(ids))
        ids.append(int(sampling.choose(expected(np.array(ids), options)[None], params)[0]))
        if ids[-1] in stops:
            break
    new = ids[len(ask.prompt):]
    return Answer(new, "stop" if new[-1] in stops else "length", text_of(ask.prompt, new))


def asks(count: int, seed: int = 0, *, longest: int = 60, most: int = 40, vocabulary: int = 512) -> list[Ask]:
    """Varied requests: half greedy, half sampled in several ways."""
    draw = random.Random(seed)
    made = []
    for i in range(count):
        prompt = tuple(draw.randrange(vocabulary) for _ in range(draw.randint(1, longest)))
        ask = Ask(prompt, draw.randint(1, most))
        if i % 2:
            ask = ask._replace(temperature=draw.choice([0.2, 0.7, 1.0, 1.5]), top_k=draw.choice([0, 1, 5, 50]),
                               top_p=draw.choice([1.0, 0.95, 0.5]), seed=draw.getrandbits(64))
        made.append(ask)
    return made


async def gather(client: AsyncClient, requests: Iterable[Ask]) -> list[Completion]:
    """All requests at once through one client."""
    return await asyncio.gather(*(client.generate(a.prompt, **a.options()) for a in requests))


def at_once(address: str, requests: Iterable[Ask], **client: float) -> list[Completion]:
    """All requests at once."""

    async def main() -> list[Completion]:
        async with AsyncClient(address, **client) as caller:
            return await gather(caller, requests)

    return asyncio.run(main())


def assert_owed(requests: Sequence[Ask], completions: Sequence[Completion], options: NullOptions | None = None) -> None:
    """Every completion has exactly the tokens, the text and the finish that are owed."""
    for number, (ask, completion) in enumerate(zip(requests, completions, strict=True)):
        assert answered(completion) == owed(ask, options), f"request {number} of {len(requests)}: {ask}"


class Raw:
    """A client without the SDK's manners: it sends what it is told, and takes and grants nothing by itself."""

    def __init__(self, address: str, identity: bytes = b"", hello: bool = True):
        self._context = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 200)
        if identity:
            self.socket.set(zmq.IDENTITY, identity)
        self.socket.connect(address)
        if hello:
            self.send(wire.Hello(wire.MAJOR, wire.MINOR, "raw"))
            assert isinstance(self.receive(), wire.Welcome)

    def send(self, *frames: wire.FromClient | bytes) -> None:
        """One message of one or more frames."""
        self.socket.send_multipart([f if isinstance(f, bytes) else wire.encode(f) for f in frames])

    def receive(self, timeout: float = 10.0) -> wire.FromServer:
        """The next message. Raises TimeoutError."""
        if not self.socket.poll(int(timeout * 1000)):
            raise TimeoutError(f"nothing came within {timeout} s")
        return wire.decode_from_server(self.socket.recv())

    def generate(self, ask: Ask, request: bytes = b"", **fields: Any) -> bytes:
        """Ask; the request's id."""
        request = request or secrets.token_bytes(16)
        options = {**ask.options(), **fields}
        self.send(wire.Generate(request, ids=wire.pack(ask.prompt), **options))
        return request

    def resume(self, request: bytes, ask: Ask, done: Sequence[int]) -> None:
        """Take up a request after the ids ``done``."""
        self.send(wire.Resume(wire.Generate(request, **ask.options()), wire.pack(ask.prompt), wire.pack(done)))

    def follow(self, request: bytes, have: int = 0, until: int | None = None, timeout: float = 10.0) -> Answer:
        """A request's output from ``have`` generated ids on, to its end or to at least ``until`` ids in all.

        Output that does not follow is skipped, as a client that was sent things twice must. Raises Refused.
        """
        ids: list[int] = []
        text = ""
        while True:
            message = self.receive(timeout)
            if isinstance(message, wire.Refused) and message.id == request:
                raise Refused(message.kind, message.reason, message.retry_after)
            if not isinstance(message, wire.Deltas):
                continue
            self.send(wire.Grant(1))
            for delta in message.deltas:
                if delta.id != request or delta.index != have + len(ids):
                    continue
                ids += wire.unpack(delta.ids)
                text += delta.text
                if delta.finish or (until is not None and have + len(ids) >= until):
                    return Answer(ids, delta.finish, text)

    def close(self) -> None:
        """Vanish without a word."""
        self._context.destroy(linger=200)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Chaos:
    """Two hundred bad manners, and the raw clients that show them."""

    def __init__(self, address: str, seed: int):
        self.address = address
        self.draw = random.Random(seed)
        self.silent: list[Raw] = []

    async def run(self, client: AsyncClient, actions: int) -> None:
        """Do them beside what ``client`` has open."""
        for _ in range(actions):
            await self.draw.choice([self._cancel, self._cancel_late, self._vanish, self._slow, self._nonsense])(client)
            await asyncio.sleep(self.draw.uniform(0, 0.004))
        for raw in self.silent:
            raw.close()
        self.silent.clear()

    def _ask(self) -> Ask:
        prompt = tuple(self.draw.randrange(512) for _ in range(self.draw.randint(1, 30)))
        return Ask(prompt, self.draw.randint(50, 600), temperature=self.draw.choice([0.0, 1.0]))

    async def _cancel(self, client: AsyncClient) -> None:
        task = asyncio.ensure_future(client.generate(self._ask().prompt, max_tokens=600))
        await asyncio.sleep(self.draw.choice([0, 0, 0.001, 0.02]))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def _cancel_late(self, client: AsyncClient) -> None:
        async for delta in client.stream(self._ask().prompt, max_tokens=600):
            if delta.index >= 2:
                break

    async def _vanish(self, _client: AsyncClient) -> None:
        raw = Raw(self.address, hello=False)
        raw.send(wire.Hello(wire.MAJOR, wire.MINOR))
        for _ in range(self.draw.randint(1, 3)):
            raw.generate(self._ask())
        await asyncio.sleep(self.draw.choice([0, 0.01]))
        await asyncio.to_thread(raw.close)

    async def _slow(self, _client: AsyncClient) -> None:
        """A client that takes nothing and grants nothing; at most a few at once, each is a thread and a socket."""
        if len(self.silent) < 8:
            raw = Raw(self.address, hello=False)
            raw.send(wire.Hello(wire.MAJOR, wire.MINOR))
            raw.generate(self._ask())
            self.silent.append(raw)

    async def _nonsense(self, _client: AsyncClient) -> None:
        raw = Raw(self.address, hello=False)
        if self.draw.random() < 0.5:
            raw.send(wire.Hello(wire.MAJOR, wire.MINOR))
        raw.generate(self._ask())
        for _ in range(3):
            raw.send(self.draw.choice([
                self.draw.randbytes(40), b"", wire.encode(wire.Generate(b"x", text="hi")), wire.Grant(-5),
                wire.Grant(1 << 60), wire.Cancel(self.draw.randbytes(16)), wire.Query(b"q", "secrets"),
                wire.Resume(wire.Generate(self.draw.randbytes(16)), b"\x01\x00\x00\x00", b"\x09\x00\x00\x00"),
            ]))
        raw.send(b"two", b"frames")
        await asyncio.to_thread(raw.close)
