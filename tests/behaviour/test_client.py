"""The client: what it survives between it and the server, what it cancels, and how it says what went wrong."""

import asyncio
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest
import zmq
from tests.callers import POOL, Ask, answered, asks, assert_owed, at_once, owed
from tests.harness import graph, until

from antiphon.plugins.doors import wire
from antiphon.plugins.doors.client import AsyncClient
from antiphon.plugins.doors.errors import Disconnected, ProtocolMismatch, Refused, Timeout
from antiphon.plugins.doors.llm import LLM
from antiphon.plugins.doors.sync import Client


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    # A Resume that comes when its request has just ended begins it anew: for a client that left, until its grace ends.
    with graph("actors.executor.options.step_seconds=0.002", "actors.gateway.options.client_grace=4.0", *POOL) as found:
        yield found
        until(lambda: found.stats()["gateway"]["open"] == 0, what="nothing is open")
        assert found.stats()["allocator"]["holds"] == 0


class Wire:
    """A bad connection: stands between clients and a server and loses or repeats what the server says."""

    def __init__(self, home: Path, server: str, seed: int, lose: float = 0.0, repeat: float = 0.0):
        self.address = f"ipc://{home}/wire"
        self.lost = self.repeated = 0
        self._draw = random.Random(seed)
        self._lose, self._repeat = lose, repeat
        self._server = server
        self._context = zmq.Context()
        self._front = self._context.socket(zmq.ROUTER)
        self._front.bind(self.address)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind("inproc://stop")
        self._stopper = self._context.socket(zmq.PAIR)
        self._stopper.connect("inproc://stop")
        self._thread = threading.Thread(target=self._carry)
        self._thread.start()

    def _carry(self) -> None:
        backs: dict[bytes, zmq.Socket[bytes]] = {}
        while True:
            ready = self._poll(backs)
            if self._stop in ready:
                break
            if self._front in ready:
                client, *frames = self._front.recv_multipart()
                if client not in backs:
                    backs[client] = self._context.socket(zmq.DEALER)
                    backs[client].connect(self._server)
                backs[client].send_multipart(frames)
            for client, back in backs.items():
                if back in ready:
                    self._answer(client, back.recv_multipart())
        for socket in (*backs.values(), self._front, self._stop):
            socket.close(linger=0)

    def _poll(self, backs: dict[bytes, "zmq.Socket[bytes]"]) -> dict[object, int]:
        poller = zmq.Poller()
        for socket in (self._stop, self._front, *backs.values()):
            poller.register(socket, zmq.POLLIN)
        return dict(poller.poll())

    def _answer(self, client: bytes, frames: list[bytes]) -> None:
        message = wire.decode_from_server(frames[0])
        if isinstance(message, wire.Answer):
            pass
        elif self._draw.random() < self._lose:
            self.lost += 1
            return
        elif self._draw.random() < self._repeat:
            self.repeated += 1
            self._front.send_multipart([client, *frames])
        self._front.send_multipart([client, *frames])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopper.send(b"")
        self._thread.join()
        self._stopper.close(linger=0)
        self._context.term()


@pytest.mark.parametrize("fault", ["lose", "repeat"])
def test_frames_lost_or_repeated_on_the_way_change_nothing(llm: LLM, tmp_path: Path, fault: str) -> None:
    requests = [a._replace(max_tokens=50) for a in asks(3, 31, longest=20)]
    with Wire(tmp_path, llm.address, 1, **{fault: 0.1}) as between:
        assert_owed(requests, at_once(between.address, requests, timeout=30))
        assert between.lost + between.repeated > 3


def test_leaving_the_loop_cancels_on_the_server(llm: LLM) -> None:
    for count, _ in enumerate(llm.stream((1, 2, 3), max_tokens=3000)):
        if count == 3:
            break
    until(lambda: llm.stats()["scheduler"]["running"] == 0, what="the request is cancelled")


def test_cancelling_the_task_cancels_on_the_server(llm: LLM) -> None:
    async def main() -> None:
        async with AsyncClient(llm.address) as client:
            task = asyncio.ensure_future(client.generate((1, 2, 3), max_tokens=3000))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while (await client.stats())["scheduler"]["running"]:
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_closing_the_client_ends_its_streams_with_disconnected(llm: LLM) -> None:
    async def main() -> None:
        client = AsyncClient(llm.address)
        await client.connect()
        task = asyncio.ensure_future(client.generate((1, 2, 3), max_tokens=3000))
        await asyncio.sleep(0.05)
        await client.close()
        with pytest.raises(Disconnected, match="closed"):
            await task

    asyncio.run(main())
    until(lambda: llm.stats()["scheduler"]["running"] == 0, what="the request is cancelled")


def test_several_threads_share_one_client(llm: LLM) -> None:
    requests = asks(12, 32, longest=20)
    with Client(llm.address) as client:
        got: dict[int, object] = {}
        threads = [threading.Thread(target=lambda i=i, a=a: got.update({i: client.generate(a.prompt, **a.options())}))
                   for i, a in enumerate(requests)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [answered(got[i]) for i in range(12)] == [owed(a) for a in requests]  # type: ignore[arg-type]


def test_no_server_no_client(tmp_path: Path) -> None:
    with pytest.raises(Disconnected, match="antiphon serve"):
        Client(f"ipc://{tmp_path}/nobody", patience=0.3)
    with pytest.raises(Disconnected, match="no ZeroMQ address"):
        Client("nonsense")


def test_a_request_without_news_is_cancelled_after_its_timeout(llm: LLM) -> None:
    slow = graph("actors.executor.options.step_seconds=1.5", *POOL)
    with slow as server, Client(server.address, timeout=0.5) as client:
        with pytest.raises(Timeout, match="no news"):
            client.generate((1, 2), max_tokens=5)
        until(lambda: server.stats()["gateway"]["open"] == 0, what="the request is cancelled")


def test_what_a_caller_may_not_ask(llm: LLM) -> None:
    with pytest.raises(TypeError, match="unknown option heat; options are raw, max_tokens, temperature"):
        llm.generate("hello", heat=1)
    with pytest.raises(Refused, match="invalid"):
        llm.generate([1, 2, 1 << 40])
    with pytest.raises(Refused, match="invalid"):
        llm.generate([1, "two"])  # type: ignore[list-item]
    with pytest.raises(Refused, match="max_tokens"):
        llm.generate([1], max_tokens="many")
    assert llm.generate([1], max_tokens=2).ids == owed(Ask((1,), 2)).ids


@pytest.mark.parametrize("major", [0, 2])
def test_a_server_of_another_major_version_is_refused(tmp_path: Path, major: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/door")

    def serve() -> None:
        client, _ = socket.recv_multipart()
        socket.send_multipart([client, wire.encode(wire.Welcome(1, major, 7))])

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ProtocolMismatch, match=rf"version {major}\.7, this client 1\."):
        Client(f"ipc://{tmp_path}/door", patience=5)
    thread.join()
    context.destroy(linger=0)
