"""Callers that leave, vanish, do not read or talk nonsense: afterwards everything they took is back."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from tests.callers import POOL, Ask, Chaos, Raw, asks, assert_owed, gather
from tests.harness import DELIVERIES, Server, graph, until

from antiphon.actors.gateway import Output
from antiphon.plugins.doors import wire
from antiphon.plugins.doors.client import AsyncClient
from antiphon.plugins.doors.zmq import ZmqDoor, ZmqOptions

RUNNING = 32


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
    assert found["allocator"]["idle"] == found["allocator"]["total"]
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
