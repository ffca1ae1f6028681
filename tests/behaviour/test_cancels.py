"""Callers that leave, vanish, do not read or talk nonsense: afterwards everything they took is back."""

import asyncio
import random
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from tests.callers import POOL, Ask, Raw, asks, assert_owed, gather
from tests.harness import DELIVERIES, Server, graph, until

from antiphon.actors.gateway import Output
from antiphon.plugins.doors import wire
from antiphon.plugins.doors.client import AsyncClient
from antiphon.plugins.doors.zmq import ZmqDoor, ZmqOptions

RUNNING = 32


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


def running(seed: int) -> list[Ask]:
    """Thirty-two requests that last as long as the chaos."""
    return [a._replace(max_tokens=300 + 5 * i) for i, a in enumerate(asks(RUNNING, seed, longest=30))]


async def bear(address: str, chaos: Chaos, requests: Sequence[Ask], actions: int) -> None:
    """All requests get what they are owed while others misbehave."""
    async with AsyncClient(address, timeout=60) as client, AsyncClient(address) as rude:
        work = asyncio.ensure_future(gather(client, requests))
        await chaos.run(rude, actions)
        assert_owed(requests, await work)


def assert_whole(found: dict[str, dict[str, object]]) -> None:
    assert (found["gateway"]["open"], found["gateway"]["clients"], found["tokenizer"]["requests"]) == (0, 0, 0)
    assert (found["scheduler"]["running"], found["scheduler"]["waiting"]) == (0, 0)
    assert (found["allocator"]["holds"], found["allocator"]["faults"]) == (0, [])
    assert found["allocator"]["free"] == found["allocator"]["total"]
    assert found["drafter"]["mirrors"] == 0


GRACE = ("actors.gateway.options.client_grace=2.0", "actors.gateway.options.starved_grace=1.0")


def test_two_hundred_bad_manners_beside_thirty_two_requests(tmp_path: Path) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    settings = (*GRACE, "actors.executor.options.step_seconds=0.002", *POOL)
    with Server(tmp_path, *settings) as server, server.client() as client:
        chaos = Chaos(server.address, seed)

        def settled() -> bool:
            found = client.stats()
            return found["gateway"]["open"] == 0 and found["allocator"]["holds"] == 0

        def cells() -> dict[str, tuple[int, int]]:
            return {n: (p.num_fds(), p.memory_info().rss) for n, p in server.cells().items()}

        asyncio.run(bear(server.address, chaos, running(1)[:8], 40))  # what stays after a first time is no leak
        until(settled, 30, "the rehearsal's requests have ended")
        before = cells()
        asyncio.run(bear(server.address, chaos, running(2), 200))
        until(settled, 30, "everything has ended")
        assert_whole(client.stats())
        until(lambda: all(cells()[n][0] <= fds for n, (fds, _) in before.items()), 20, "file descriptors are back")
        for name, (_, rss) in before.items():
            assert cells()[name][1] < rss + (24 << 20), name
        assert psutil.Process(server.process.pid).num_fds() < 64
        assert server.stop() == 0


@pytest.mark.feature("preemption", "sampling", "one-ahead", "direct-delivery", "chunked-prefill")
@pytest.mark.parametrize("name", DELIVERIES)
def test_bad_manners_in_a_small_pool(name: str) -> None:
    settings = (f"delivery={name!r}", *GRACE, "actors.allocator.options.blocks=110",
                "actors.scheduler.options.max_chunk=8")
    requests = [a._replace(max_tokens=120) for a in running(3)[:6]]
    with graph(*settings) as llm:
        asyncio.run(bear(llm.address, Chaos(llm.address, 7), requests, 40))

        def settled() -> bool:
            found = llm.stats()
            return found["gateway"]["open"] == 0 and found["allocator"]["holds"] == 0

        until(settled, 30, "everything has ended")
        found = llm.stats()
        found["gateway"]["clients"] = 0  # this one asks
        assert_whole(found)


def test_a_client_that_does_not_grant_keeps_only_its_own_output(tmp_path: Path) -> None:
    """Its requests run to their end and wait in the ledger; when it grants it gets all of it, in few frames."""
    ask = Ask((1, 2, 3), 700)
    with graph(*POOL) as llm, Raw(llm.address) as raw:
        request = raw.generate(ask)
        until(lambda: llm.stats()["scheduler"]["steps"] >= 700, 30, "the request has run")
        assert llm.stats()["gateway"]["open"] == 1
        frames = 0
        while raw.socket.poll(300):
            frames += isinstance(raw.receive(), wire.Deltas)
        assert frames == wire.WINDOW
        raw.send(wire.Grant(2))
        message = raw.receive()
        assert isinstance(message, wire.Deltas)
        delta = message.deltas[0]
        assert (delta.id, delta.index, delta.finish) == (request, wire.WINDOW, "length")
        assert len(wire.unpack(delta.ids)) == 700 - wire.WINDOW
        until(lambda: llm.stats()["gateway"]["open"] == 0, what="the ledger is empty")


def test_a_client_that_never_takes_its_output_is_given_up(tmp_path: Path) -> None:
    with graph("actors.gateway.options.starved_grace=1.0", *POOL) as llm, Raw(llm.address) as raw:
        raw.generate(Ask((1, 2, 3), 700))
        until(lambda: llm.stats()["scheduler"]["steps"] >= 300, 30, "the request runs")

        def given_up() -> bool:
            raw.send(wire.Ping())  # it lives, it only does not grant
            found = llm.stats()
            return found["gateway"]["open"] == 0 and found["allocator"]["holds"] == 0

        until(given_up, 20, "its request is dropped")


class FakeGate:
    """A gateway with or without output for its one client."""

    def __init__(self, door: ZmqDoor) -> None:
        self.door, self.waiting = door, True

    def flush(self, client: bytes) -> None:
        if self.waiting:
            self.door.deliver(client, [Output(b"r" * 16, 0, [1], "", "")])


def test_a_client_is_starved_as_long_as_something_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    door = ZmqDoor(ZmqOptions(), None)  # type: ignore[arg-type]
    taking = [True]
    monkeypatch.setattr(door, "_send", lambda *_: taking[0])
    door.gate = gate = FakeGate(door)  # type: ignore[assignment]
    door._frame([b"c", wire.encode(wire.Hello(wire.MAJOR, wire.MINOR))])
    client = door.clients[b"c"]
    taking[0] = False
    gate.flush(b"c")
    since = client.starved
    assert since > 0
    door._frame([b"c", wire.encode(wire.Grant(5))])
    assert client.starved == since, "it lives and grants, but it still takes nothing"
    gate.waiting = False  # what waited has gone
    door._frame([b"c", wire.encode(wire.Grant(5))])
    assert client.starved == 0
    gate.waiting = True
    gate.flush(b"c")
    assert client.starved >= since
    taking[0] = True
    door._frame([b"c", wire.encode(wire.Grant(5))])
    assert client.starved == 0
