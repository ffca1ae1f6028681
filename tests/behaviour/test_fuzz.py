"""Hostile frames on every kind of socket: each costs itself, and right tokens come afterwards.

What is well formed but meant ill is another matter: at the door it is checked (test_limits.py); a cell's inbox lies
in a directory of mode 0700, and who can write there is the deployment's own user.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.callers import POOL, Ask, asks, assert_owed, at_once, owed
from tests.harness import Server, until

from antiphon.plugins.doors import wire
from antiphon.plugins.doors.client import AsyncClient
from antiphon.runtime.message import ASK, CREDIT, FAILURE, REPLY, TELL, Header

CI, SOAK = 5_000, 100_000
BURST = 200  # frames after which the target may catch up

counts = pytest.mark.parametrize("count", [
    pytest.param(CI, id="quick"),
    pytest.param(SOAK, id="soak", marks=[pytest.mark.soak, pytest.mark.timeout(1200)]),
])


class Frames:
    """Hostile frames: noise, msgpack that means nothing, and valid ones with something broken."""

    def __init__(self, seed: int, valid: list[bytes]):
        self.draw = random.Random(seed)
        self.valid = valid

    def frame(self) -> bytes:
        """One frame."""
        return self.draw.choice([self._noise, self._mutant, self._mutant, self._value, self._deep, self._lying])()

    def _noise(self) -> bytes:
        return self.draw.randbytes(self.draw.choice([0, 1, 2, 7, 60, 300, 5000]))

    def _mutant(self) -> bytes:
        frame = bytearray(self.draw.choice(self.valid))
        for _ in range(self.draw.randint(1, 4)):
            at = self.draw.randrange(len(frame) + 1)
            match self.draw.randrange(5):
                case 0:
                    frame[at:at + 1] = self.draw.randbytes(1)
                case 1:
                    del frame[at:]
                case 2:
                    frame[at:at] = self.draw.randbytes(self.draw.randint(1, 9))
                case 3:
                    frame[at:at] = self.draw.choice(self.valid)
                case _:
                    del frame[at:at + self.draw.randint(1, 9)]
        return bytes(frame)

    def _value(self) -> bytes:
        return msgspec.msgpack.encode(self._any(3))

    def _any(self, depth: int) -> Any:
        draw = self.draw
        leaf = [None, True, -1, 1 << 63, -(1 << 63), 1.5, float("nan"), "type", "Hello", "\ufffd", b"", b"\xff" * 9]
        if not depth or draw.random() < 0.4:
            return draw.choice(leaf)
        if draw.random() < 0.5:
            return [self._any(depth - 1) for _ in range(draw.randrange(5))]
        return {draw.choice(["type", "id", "ids", "text", "x"]): self._any(depth - 1) for _ in range(draw.randrange(4))}

    def _deep(self) -> bytes:
        """Nested lists or maps, as deep as a parser may be foolish."""
        level = self.draw.choice([b"\x91", b"\x81\xa1a", b"\xdc\x00\x01"])
        return level * self.draw.choice([10, 500, 20_000]) + b"\xc0"

    def _lying(self) -> bytes:
        """A head that promises more than there is, or an extension."""
        return self.draw.choice([
            b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
            b"\xc7\x05\x01abcde", b"\xd4\x00x", b"\xc1", b"\x84\xa4type\xa5Hello\xa5major\xdd\xff\xff\xff\xff",
        ]) + self.draw.randbytes(self.draw.randrange(20))

    def parts(self) -> list[bytes]:
        """A message: mostly of one frame, sometimes of many."""
        many = self.draw.choice([1, 1, 1, 1, 1, 1, 2, 3, 80])
        return [self.frame() for _ in range(many)]


class Attacker:
    """A DEALER that sends and, with care, reads what comes back."""

    def __init__(self, address: str):
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._address = address
        self._connect()

    def _connect(self) -> None:
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 1000)
        self.socket.connect(self._address)

    def attack(self, messages: Iterator[list[bytes]], count: int, alive: Callable[[], None]) -> None:
        """Send ``count`` messages in bursts, from new connections now and then; ``alive`` looks at the target."""
        for number in range(count):
            self.socket.send_multipart(next(messages))
            if number % BURST == BURST - 1:
                while self.socket.poll(0):
                    self.socket.recv_multipart()
            if number % (10 * BURST) == 10 * BURST - 1:
                alive()
                self.socket.close()
                self._connect()
        alive()
        self._context.destroy(linger=1000)


ID = bytes(range(16))
FROM_CLIENT: list[wire.FromClient] = [
    wire.Hello(wire.MAJOR, wire.MINOR, "fuzz"), wire.Generate(ID, text="hi", max_tokens=3),
    wire.Generate(ID, ids=wire.pack((1, 2)), max_tokens=2, temperature=0.5, stop_ids=(4,)), wire.Cancel(ID),
    wire.Resume(wire.Generate(ID, max_tokens=3, seed=1), wire.pack((1,)), wire.pack((2,))), wire.Grant(5), wire.Ping(),
    wire.Query(b"q", "health"),
]


def serving(server: Server) -> Callable[[], None]:
    """What must hold while and after frames rain: the server answers rightly, in the processes it began with."""
    cells = {name: process.pid for name, process in server.cells().items()}
    requests = asks(4, 51, longest=10, most=8)

    def alive() -> None:
        assert_owed(requests, at_once(server.address, requests))
        assert {name: process.pid for name, process in server.cells().items()} == cells, server.text()[-2000:]

    return alive


def fresh(seed: object) -> int:
    number = time.time_ns() % 1_000_000
    print(f"seed {number} of {seed}")
    return number


@counts
def test_the_door_bears_hostile_frames(tmp_path: Path, count: int) -> None:
    frames = Frames(fresh("the door"), [wire.encode(m) for m in FROM_CLIENT])
    with Server(tmp_path, "actors.gateway.options.client_grace=3.0", *POOL) as server:

        def messages() -> Iterator[list[bytes]]:
            while True:
                yield [wire.encode(FROM_CLIENT[0])] if frames.draw.random() < 0.01 else frames.parts()

        Attacker(server.address).attack(messages(), count, serving(server))
        with server.client() as client:
            found = client.stats()
            assert found["door"]["frames_bad"] > count // 4
            until(lambda: client.stats()["allocator"]["holds"] == 0, 30, "what the frames began has ended")
        assert server.stop() == 0


class Envelopes(Frames):
    """Frames for a cell's inbox: a header that is broken, or one that is right and a body that is not."""

    def __init__(self, seed: int, cell: str, epoch: int, targets: list[str]):
        header = Header(TELL, targets[0], targets[-1], cell, epoch, 1, 0, epoch)
        super().__init__(seed, [msgspec.msgpack.encode(header)])
        self.cell, self.epoch, self.targets = cell, epoch, targets

    def parts(self) -> list[bytes]:
        """Header, body and sometimes buffers."""
        draw = self.draw
        if draw.random() < 0.4:
            return super().parts()
        sort = draw.choice([TELL, ASK, REPLY, FAILURE, CREDIT, 7, -1])
        # A right epoch and a real target get as far as the body; replies and credits come from no cell that is known.
        cell = draw.choice([self.cell, "nowhere", ""]) if sort in (TELL, ASK) else "nowhere"
        epoch = draw.choice([self.epoch, self.epoch, self.epoch, 0, self.epoch - 1, 1 << 62])
        header = Header(sort, draw.choice([*self.targets, "nobody", ""]), draw.choice([*self.targets, "nobody"]), cell,
                        draw.choice([epoch, 0]), draw.choice([0, 1, 9]), draw.choice([0, 1, 5, 1 << 40]), epoch)
        body = draw.choice([
            draw.randbytes(20), msgspec.msgpack.encode(self._any(3)), self._deep(), self._lying(), b"",
            msgspec.msgpack.encode([draw.choice(["Commit", "Open", "Emit", "Nothing", "Halt"])]),
            msgspec.msgpack.encode(["Close", 5, None]), msgspec.msgpack.encode(["Execute", b"", -1] * 9),
        ])
        return [msgspec.msgpack.encode(header), body, *(self._noise() for _ in range(draw.choice([0, 0, 0, 1, 70])))]


ACTORS = {"step": ["scheduler", "allocator", "executor", "drafter", "verifier", "pager", "@step"],
          "front": ["gateway", "tokenizer", "@front"], "root": ["@root"]}


@counts
def test_the_inboxes_of_cells_and_root_bear_hostile_frames(tmp_path: Path, count: int) -> None:
    with Server(tmp_path, *POOL) as server:
        alive = serving(server)
        for name, actors in ACTORS.items():
            inbox = next(server.sockets.glob(f"antiphon-*/{name}.*"))
            epoch = int(inbox.suffix.removeprefix("."), 16)
            frames = Envelopes(fresh(f"the inbox of {name}"), name, epoch, actors)
            Attacker(f"ipc://{inbox}").attack(iter(frames.parts, []), count, alive)
        assert server.stop() == 0


def says_goodbye(frame: bytes) -> bool:
    """A Welcome of another major version ends everything, and is meant to."""
    try:
        message = wire.decode_from_server(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return False
    return isinstance(message, wire.Welcome) and message.major != wire.MAJOR


@counts
def test_the_client_bears_a_hostile_server(tmp_path: Path, count: int) -> None:
    """A server that says anything whatever, and in the end answers as it should."""
    ask = Ask((1, 2, 3), 4)
    ids, seed = owed(ask).ids, fresh("the client")
    valid: list[wire.FromServer] = [
        wire.Welcome(5, wire.MAJOR, wire.MINOR, "x"), wire.Accepted(ID, wire.pack((1,)), 7), wire.Pong(5),
        wire.Deltas((wire.Delta(ID, 0, wire.pack((65,)), "A"), wire.Delta(ID, 1, finish="stop"))),
        wire.Refused(ID, "invalid", "no", 1.0), wire.Answer(b"12345678", {"ready": True}), wire.Pong(9, False, 1 << 40),
    ]
    frames = Frames(seed, [wire.encode(m) for m in valid])
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.SNDHWM, 0)
    socket.bind(f"ipc://{tmp_path}/door")
    heard: list[wire.FromClient] = []

    def listen(block: int) -> bytes:
        client = b""
        while socket.poll(block):
            client, frame = socket.recv_multipart()
            heard.append(wire.decode_from_client(frame))
            block = 0
        return client

    def serve() -> None:
        client = listen(10_000)
        socket.send_multipart([client, wire.encode(valid[0])])
        while not any(isinstance(m, wire.Generate) for m in heard):
            listen(1000)
        first = next(m for m in heard if isinstance(m, wire.Generate))
        for number in range(count):
            parts = frames.parts()
            if number % 3 == 0:  # about the request that is open: nonsense with its id
                column = frames.draw.choice([b"", b"abc", wire.pack((5,)), b"\xff" * 4001])
                parts = [wire.encode(frames.draw.choice([
                    wire.Deltas((wire.Delta(first.id, frames.draw.choice([1, 7, -1, 1 << 60]), column, "?"),)),
                    wire.Deltas((wire.Delta(first.id, 0, b"odd", "?"),)), wire.Accepted(first.id, b"odd", -1),
                    wire.Pong(frames.draw.choice([5, 6]), frames.draw.random() < 0.5, 1 << 60),
                ]))]
            if not says_goodbye(parts[0]):
                socket.send_multipart([client, *parts])
            if number % BURST == 0:
                listen(0)
        for message in (wire.Welcome(5, wire.MAJOR, wire.MINOR), wire.Accepted(first.id, wire.pack(ask.prompt), 3)):
            socket.send_multipart([client, wire.encode(message)])
        final = wire.Deltas((wire.Delta(first.id, 0, wire.pack(ids), "text", "length"),))
        socket.send_multipart([client, wire.encode(final)])
        listen(500)

    async def main() -> list[int]:
        async with AsyncClient(f"ipc://{tmp_path}/door", timeout=60) as client:
            return (await client.generate(ask.prompt, max_tokens=4)).ids

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert asyncio.run(main()) == ids
    finally:
        thread.join()
        context.destroy(linger=0)
    # It asks again for what seems lost, but nonsense is no amplifier.
    assert len(heard) < count // 10
