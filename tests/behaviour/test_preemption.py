"""A pool too small for all: sequences give way, are computed anew, and nothing of it shows in the tokens."""

import asyncio

import pytest
from tests.callers import Ask, asks, assert_owed, at_once, gather
from tests.harness import DELIVERIES, graph, until

from antiphon.plugins.backends.null import NullOptions
from antiphon.plugins.doors.client import AsyncClient


def memory(blocks: int, size: int, ahead: int = 4) -> tuple[str, ...]:
    return (f"actors.allocator.options.block_size={size}", f"actors.allocator.options.blocks={blocks}",
            f"actors.scheduler.options.reserve_ahead={ahead}")


@pytest.mark.feature("preemption", "sampling", "chunked-prefill", "one-ahead", "direct-delivery", "windows")
@pytest.mark.parametrize("name", DELIVERIES)
@pytest.mark.parametrize(("blocks", "size", "window"), [(110, 1, 24), (30, 4, 0), (9, 16, 24)])
def test_forty_requests_in_a_pool_for_two(name: str, blocks: int, size: int, window: int) -> None:
    requests = asks(40, seed=11, longest=50, most=40)
    settings = (*memory(blocks, size), f"actors.executor.options.window={window}",
                "actors.scheduler.options.max_chunk=13")
    with graph(f"delivery={name!r}", *settings) as llm:
        assert_owed(requests, at_once(llm.address, requests), NullOptions(window=window))
        found = llm.stats()
        assert found["scheduler"]["preempted"] > 0
        assert found["scheduler"]["peak_flight"] == 2
        assert (found["allocator"]["holds"], found["allocator"]["faults"]) == (0, [])
        assert found["allocator"]["idle"] == found["allocator"]["total"]


def test_one_request_that_needs_the_whole_pool_passes_among_others() -> None:
    whole = Ask(tuple(range(60)), 36)  # 96 slots of 96
    requests = [*asks(6, seed=12, longest=20, most=20), whole, *asks(6, seed=13, longest=20, most=20)]
    with graph("delivery='direct'", *memory(24, 4)) as llm:
        assert_owed(requests, at_once(llm.address, requests))


@pytest.mark.parametrize("name", DELIVERIES)
def test_cancels_among_preemptions(name: str) -> None:
    requests = asks(32, seed=14, longest=40, most=60)

    async def main(address: str) -> None:
        async with AsyncClient(address) as client:
            kept = asyncio.ensure_future(gather(client, requests[::2]))
            leaving = [asyncio.ensure_future(client.generate(a.prompt, **a.options())) for a in requests[1::2]]
            for task in leaving:
                await asyncio.sleep(0.003)
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
            assert_owed(requests[::2], await kept)

    with graph(f"delivery={name!r}", *memory(30, 4)) as llm:
        asyncio.run(main(llm.address))

        def free() -> bool:
            found = llm.stats()["allocator"]
            return found["holds"] == 0 and found["idle"] == found["total"] and not found["faults"]

        until(free, what="all blocks are free")
        assert llm.stats()["scheduler"]["preempted"] > 0
