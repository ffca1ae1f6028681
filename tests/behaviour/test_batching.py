"""Continuous batching: requests come and go between steps, and a long prompt holds nobody up."""

import asyncio
import random

import pytest
from tests.callers import POOL, Ask, asks, assert_owed, owed
from tests.harness import DELIVERIES, graph

from antiphon.plugins.doors.client import AsyncClient, Completion


@pytest.mark.feature("one-ahead", "sampling", "chunked-prefill", "direct-delivery")
@pytest.mark.parametrize("name", DELIVERIES)
def test_requests_join_and_leave_a_running_batch(name: str) -> None:
    requests = asks(40, seed=21)
    draw = random.Random(21)

    async def later(client: AsyncClient, ask: Ask, seconds: float) -> Completion:
        await asyncio.sleep(seconds)
        return await client.generate(ask.prompt, **ask.options())

    async def main(address: str) -> list[Completion]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(*(later(client, ask, draw.uniform(0, 0.3)) for ask in requests))

    with graph(f"delivery={name!r}", "actors.scheduler.options.max_chunk=16", *POOL) as llm:
        assert_owed(requests, asyncio.run(main(llm.address)))
        facts = llm.stats()["scheduler"]
        assert facts["steps"] < sum(a.max_tokens for a in requests)  # they shared steps
        assert (facts["running"], facts["waiting"], facts["flight"]) == (0, 0, 0)


def test_a_long_prompt_does_not_hold_up_those_who_decode() -> None:
    """While the long prompt is computed in 100 chunks, the short request gets its 50 tokens."""
    short, long = Ask((1, 2, 3), 50), Ask(tuple(i % 500 for i in range(1000)), 4)
    order: list[str] = []

    async def follow(client: AsyncClient, name: str, ask: Ask) -> list[int]:
        completion = await client.generate(ask.prompt, **ask.options())
        order.append(name)
        return completion.ids

    async def main(address: str) -> list[list[int]]:
        async with AsyncClient(address) as client:
            return list(await asyncio.gather(follow(client, "long", long), follow(client, "short", short)))

    with graph("actors.scheduler.options.max_chunk=10", *POOL) as llm:
        assert asyncio.run(main(llm.address)) == [owed(long).ids, owed(short).ids]
    assert order == ["short", "long"]


@pytest.mark.parametrize("name", DELIVERIES)
def test_no_more_run_at_once_than_allowed(name: str) -> None:
    requests = asks(20, seed=22)
    seen: list[int] = []

    async def main(address: str) -> list[Completion]:
        async with AsyncClient(address) as client:
            work = asyncio.ensure_future(asyncio.gather(*(client.generate(a.prompt, **a.options()) for a in requests)))
            while not work.done():
                seen.append((await client.stats())["scheduler"]["running"])
                await asyncio.sleep(0.002)
            return await work

    slow = "actors.executor.options.step_seconds=0.001"
    settings = (f"delivery={name!r}", "actors.scheduler.options.max_running=3", slow)
    with graph(*settings, *POOL) as llm:
        assert_owed(requests, asyncio.run(main(llm.address)))
    assert max(seen) == 3


@pytest.mark.parametrize("name", DELIVERIES)
def test_more_run_than_a_step_has_rows(name: str) -> None:
    requests = asks(16, seed=23)

    async def main(address: str) -> list[Completion]:
        async with AsyncClient(address) as client:
            return await asyncio.gather(*(client.generate(a.prompt, **a.options()) for a in requests))

    with graph(f"delivery={name!r}", "actors.scheduler.options.max_step_tokens=5", *POOL) as llm:
        assert_owed(requests, asyncio.run(main(llm.address)))
