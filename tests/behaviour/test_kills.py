"""``kill -9`` at any moment: every stream ends with exactly the tokens of an undisturbed run."""

import asyncio
import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from tests.callers import POOL, Answer, Ask, Chaos, Raw, answered, asks, gather, owed
from tests.drafters import plugin
from tests.harness import DELIVERIES, Server, until

from antiphon.plugins.doors.client import AsyncClient, Completion
from antiphon.plugins.doors.errors import Disconnected

STREAMS = 16
# Deaths are many here and mean nothing: the limit of the supervisor is for those that do.
PATIENT = ("supervision.restarts=1000", "supervision.within='1s'", "supervision.backoff='10ms'")
SLOW = ("actors.executor.options.step_seconds=0.005",)  # 40 tokens take at least 0.2 s
NULL = (*PATIENT, *SLOW, *POOL)


class Stream(NamedTuple):
    """A request and the answer that an undisturbed run gives."""

    prompt: Sequence[int] | str
    options: dict[str, Any]
    answer: Answer


def null_streams(number: int) -> list[Stream]:
    """Half greedy, half sampled, none shorter than 40 tokens."""
    requests = [a._replace(max_tokens=40 + i) for i, a in enumerate(asks(STREAMS, number, longest=30))]
    return [Stream(a.prompt, a.options(), owed(a)) for a in requests]


class Disturbed:
    """Streams during which cells are killed, once a share of all their tokens has come."""

    def __init__(self, server: Server, cells: Sequence[str], streams: Sequence[Stream]):
        self.server, self.cells, self.streams = server, cells, streams
        self.came = 0  # tokens
        self.moment = asyncio.Event()

    async def run(self, share: float) -> None:
        """Start all streams, kill, and compare what comes in the end."""
        wanted = share * sum(len(s.answer.ids) for s in self.streams)
        async with AsyncClient(self.server.address, timeout=300) as client:
            work = asyncio.gather(*(self._follow(client, s, wanted) for s in self.streams))
            await (self.moment.wait() if share else asyncio.sleep(0.01))  # 0: while prompts are computed
            for cell in self.cells:
                self.server.kill(cell)
            await work

    async def _follow(self, client: AsyncClient, stream: Stream, wanted: float) -> None:
        ids: list[int] = []
        text = finish = ""
        async for delta in client.stream(stream.prompt, **stream.options):
            ids += delta.ids
            text += delta.text
            finish = delta.finish_reason
            self.came += len(delta.ids)
            if self.came >= wanted:
                self.moment.set()
        assert Answer(ids, finish, text) == stream.answer


async def kills(server: Server, cells: Sequence[str], streams: Sequence[Stream], shares: Sequence[float]) -> None:
    for share in shares:
        await Disturbed(server, cells, streams).run(share)


@pytest.mark.feature("crash-replay", "sampling", "one-ahead", "windows", "direct-delivery", "placement")
@pytest.mark.parametrize("cell", ["step", "front"])
def test_twenty_kills_at_random_moments(tmp_path: Path, cell: str) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    draw = random.Random(seed)
    streams = null_streams(1)
    shares = [[draw.uniform(0, 0.8) for _ in range(5)] for _ in range(4)]  # four deployments side by side

    async def main(servers: Sequence[Server]) -> None:
        await asyncio.gather(*(kills(s, [cell], streams, m) for s, m in zip(servers, shares, strict=True)))

    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(Server(tmp_path / str(n), *NULL, f"delivery={DELIVERIES[n % 2]!r}", wait=False))
                   for n in range(4)]
        for server in servers:
            with server.client() as client:
                client.wait_ready(60)
        asyncio.run(main(servers))
        for server in servers:
            with server.client() as client:
                found = client.stats()
            assert found["gateway"]["open"] == found["tokenizer"]["requests"] == 0
            assert (found["allocator"]["holds"], found["allocator"]["faults"]) == (0, [])
            assert server.text().count('"cell died"') == 5
            assert server.stop() == 0


@pytest.mark.feature("crash-replay", "preemption", "chunked-prefill", "sampling", "windows", "one-ahead")
def test_kills_of_both_cells_and_during_prefill_and_among_preemptions(tmp_path: Path) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    draw = random.Random(seed)
    long = [a._replace(max_tokens=12) for a in asks(STREAMS, 2, longest=100)]
    streams = [Stream(a.prompt, a.options(), owed(a)) for a in long]
    small = ("actors.allocator.options.block_size=4", "actors.allocator.options.blocks=60",
             "actors.scheduler.options.max_chunk=16", "actors.scheduler.options.max_step_tokens=64")
    with Server(tmp_path, *PATIENT, *SLOW, *small) as server:
        for cells in (["step", "front"], ["step"], ["front"]):
            asyncio.run(kills(server, cells, streams, [draw.choice([0, draw.uniform(0, 0.5)])]))
        assert server.stop() == 0


@pytest.mark.feature("crash-replay", "placement", "sampling")
def test_kills_of_cells_with_one_actor(tmp_path: Path) -> None:
    alone = ("actors.tokenizer.cell='text'", "actors.verifier.cell='verdicts'", "actors.drafter.cell='drafts'")
    draw = random.Random(3)
    streams = null_streams(3)
    with Server(tmp_path, *NULL, *alone) as server:
        for cells in (["text"], ["verdicts", "drafts"], ["text", "step"], ["verdicts", "step"]):
            asyncio.run(kills(server, cells, streams, [draw.uniform(0, 0.8)]))
        assert server.stop() == 0


def test_a_request_that_arrives_while_the_step_cell_is_down_is_served(tmp_path: Path) -> None:
    """Nothing was in flight at the death, so nothing is replayed; what comes meanwhile must not be lost."""
    ask = Ask((1, 2, 3), 5)
    with Server(tmp_path, *PATIENT, *POOL) as server, server.client(timeout=30) as client:
        for _ in range(2):
            server.kill("step")
            until(lambda: not client.health()["ready"], what="the death is noticed")
            assert client.generate(ask.prompt, max_tokens=5).ids == owed(ask).ids
        assert server.stop() == 0


def test_requests_that_arrive_while_suspects_are_tried_are_served(tmp_path: Path) -> None:
    streams = null_streams(4)

    async def main(server: Server) -> None:
        async with AsyncClient(server.address, timeout=60) as client:
            first = [asyncio.ensure_future(client.generate(s.prompt, **s.options)) for s in streams[:8]]
            await asyncio.sleep(0.1)
            server.kill("step")
            while not (await client.stats())["gateway"]["suspects"]:
                await asyncio.sleep(0.01)
            second = [asyncio.ensure_future(client.generate(s.prompt, **s.options)) for s in streams[8:]]
            cancelled = asyncio.ensure_future(client.generate((1, 2, 3), max_tokens=1000))
            await asyncio.sleep(0.1)
            cancelled.cancel()
            done = await asyncio.gather(*first, *second)
            assert list(map(answered, done)) == [s.answer for s in streams]

    with Server(tmp_path, *NULL) as server:
        asyncio.run(main(server))
        assert server.stop() == 0


@pytest.mark.parametrize("cell", ["front", "door"])
def test_requests_of_a_client_that_does_not_come_back_end_after_the_grace(tmp_path: Path, cell: str) -> None:
    """With the front cell the scheduler's tokenizer dies, with the door alone the tokenizer's gateway."""
    grace = ("actors.scheduler.options.orphan_grace=1.0", "actors.tokenizer.options.orphan_grace=1.0")
    place = f"actors.gateway.cell={cell!r}"
    with Server(tmp_path, *NULL, *grace, place) as server:
        with Raw(server.address) as raw:
            for number in range(4):
                raw.generate(Ask((number, 2), 4000))
            raw.receive()
            with server.client() as client:
                until(lambda: client.stats()["scheduler"]["running"] == 4, what="the requests run")
            server.kill(cell)
        with server.client() as client:
            client.wait_ready(30)

            def ended() -> bool:
                found = client.stats()
                return (found["scheduler"]["running"], found["tokenizer"]["requests"], found["allocator"]["holds"]) == (
                    0, 0, 0)

            until(ended, 20, "the orphans have ended")
        assert server.stop() == 0


def test_without_the_root_clients_hear_of_it_and_nothing_stays(tmp_path: Path) -> None:
    async def main(server: Server) -> None:
        async with AsyncClient(server.address, patience=1) as client:
            work = asyncio.ensure_future(gather(client, [Ask((1, 2), 4000)] * STREAMS))
            await asyncio.sleep(0.2)
            began = time.monotonic()
            server.kill("root")
            with pytest.raises(Disconnected):
                await work
            assert time.monotonic() - began < 10  # patience and a heartbeat, on a loaded machine

    with Server(tmp_path, *NULL) as server:
        processes = list(server.cells().values())
        assert len(processes) == 2
        asyncio.run(main(server))
        psutil.wait_procs(processes, timeout=10)
        assert not [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        left = [*server.sockets.glob("antiphon-*"), Path(server.address.removeprefix("ipc://"))]
        until(lambda: not any(path.exists() for path in left), what="the sockets are gone")


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", DELIVERIES)
def test_kills_among_bad_manners_in_a_small_pool_with_drafts(tmp_path: Path, name: str) -> None:
    """Everything at once: cells die one after the other while callers cancel, vanish and talk nonsense."""
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    draw = random.Random(seed)
    settings = (
        *PATIENT, *SLOW, f"delivery={name!r}", plugin("Forgetful"),
        "actors.drafter.options={shape='tree', depth=3, every=9}", "actors.drafter.cell='drafts'",
        "actors.scheduler.options.length={plugin='fixed', max=12}", "actors.scheduler.options.max_chunk=16",
        "actors.allocator.options.block_size=4", "actors.allocator.options.blocks=180",
        "actors.gateway.options.client_grace=4.0", "actors.gateway.options.starved_grace=2.0",
    )

    async def misbehave(server: Server, until_done: asyncio.Event) -> None:
        chaos = Chaos(server.address, seed)
        async with AsyncClient(server.address, timeout=300) as rude:
            while not until_done.is_set():
                await chaos.run(rude, 20)
                await asyncio.sleep(0.2)

    async def main(server: Server) -> None:
        done = asyncio.Event()
        rude = asyncio.ensure_future(misbehave(server, done))
        cells = [draw.sample(["step", "front", "drafts"], draw.choice([1, 1, 1, 2, 3])) for _ in range(30)]
        for number, dying in enumerate(cells):
            await Disturbed(server, dying, null_streams(100 + number)).run(draw.uniform(0, 0.8))
        done.set()
        await rude

    with Server(tmp_path, *settings) as server:
        asyncio.run(main(server))
        with server.client() as client:
            until(lambda: client.stats()["allocator"].get("holds") == 0, 60, "everything has ended")
            found = client.stats()
        assert (found["gateway"]["open"], found["tokenizer"]["requests"], found["allocator"]["faults"]) == (0, 0, [])
        assert server.stop() == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("cell", ["step", "front"])
def test_twenty_kills_of_a_deployment_with_the_real_model(tmp_path: Path, cell: str) -> None:
    seed = time.time_ns() % 1_000_000
    print(f"seed {seed}")
    draw = random.Random(seed)
    subjects = ["the sea", "bread", "a clock", "rain", "prime numbers", "a lighthouse", "tea", "glass"]
    questions = [f"{verb} {subject}." for verb in ("Describe", "Tell a story about") for subject in subjects]
    options = [{"max_tokens": 48, **({"temperature": 0.8, "top_p": 0.95, "seed": i} if i % 2 else {})}
               for i in range(STREAMS)]

    async def undisturbed(server: Server) -> list[Completion]:
        async with AsyncClient(server.address, timeout=600) as client:
            return list(await asyncio.gather(
                *(client.generate(q, **o) for q, o in zip(questions, options, strict=True))))

    with Server(tmp_path, *PATIENT, "model.dtype='float32'", null=False) as server:
        answers = asyncio.run(undisturbed(server))
        streams = [Stream(q, o, answered(c))
                   for q, o, c in zip(questions, options, answers, strict=True)]
        asyncio.run(kills(server, [cell], streams, [draw.uniform(0, 0.8) for _ in range(20)]))
        assert server.stop() == 0
