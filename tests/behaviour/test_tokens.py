"""Tokens do not depend on how they are computed: batch, chunks, blocks, windows, steps in flight, delivery."""

import pytest
from tests.callers import POOL, Ask, asks, assert_owed, at_once, owed
from tests.harness import DELIVERIES, graph, null_continuation

from antiphon.plugins.backends.null import NullOptions
from antiphon.plugins.doors.llm import LLM


def delivery(name: str) -> str:
    return f"delivery={name!r}"


def whole(llm: LLM) -> bool:
    """Nothing is held any more and every block is free."""
    found = llm.stats()["allocator"]
    return found["holds"] == 0 and found["idle"] == found["total"] and not found["faults"]


@pytest.mark.feature("sampling", "direct-delivery", "one-ahead", "windows")
@pytest.mark.parametrize("name", DELIVERIES)
def test_sixty_four_at_once_equal_one_at_a_time(name: str) -> None:
    requests = asks(64, seed=1)
    with graph(delivery(name), *POOL) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        for ask in requests[:8]:
            assert llm.generate(ask.prompt, **ask.options()).ids == owed(ask).ids
        facts = llm.stats()["scheduler"]
        assert facts["peak_flight"] == 2
        assert whole(llm)


def test_what_is_owed_is_the_continuation_of_the_hash() -> None:
    assert owed(Ask((5, 6, 7), 20)).ids == null_continuation([5, 6, 7], 20)


@pytest.mark.feature("sampling", "chunked-prefill", "one-ahead", "windows", "direct-delivery")
@pytest.mark.parametrize("name", DELIVERIES)
@pytest.mark.parametrize(("chunk", "room"), [(3, 2048), (0, 16), (5, 7)])
def test_prefill_in_chunks_and_beyond_the_step_s_budget(name: str, chunk: int, room: int) -> None:
    requests = asks(12, seed=2, longest=90, most=12)
    step = (f"actors.scheduler.options.max_chunk={chunk}", f"actors.scheduler.options.max_step_tokens={room}")
    with graph(delivery(name), *step, *POOL) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        assert whole(llm)


@pytest.mark.feature("windows", "sampling", "one-ahead", "chunked-prefill")
@pytest.mark.parametrize(("size", "window"), [(1, 0), (1, 24), (2, 1), (16, 0), (16, 1), (16, 24)])
def test_any_block_size_and_window(size: int, window: int) -> None:
    requests = asks(8, seed=3, longest=50, most=30)
    settings = (f"actors.allocator.options.block_size={size}", f"actors.executor.options.window={window}",
                "actors.scheduler.options.max_chunk=17", *POOL)
    with graph(delivery("direct"), *settings) as llm:
        assert_owed(requests, at_once(llm.address, requests), NullOptions(window=window))
        assert whole(llm)


@pytest.mark.parametrize("name", DELIVERIES)
@pytest.mark.parametrize("ahead", [0, 1])
def test_steps_in_flight(name: str, ahead: int) -> None:
    requests = asks(6, seed=4)
    with graph(delivery(name), f"actors.scheduler.options.ahead={ahead}", *POOL) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        assert llm.stats()["scheduler"]["peak_flight"] == 1 + ahead


@pytest.mark.feature("one-ahead", "sampling")
@pytest.mark.parametrize("name", DELIVERIES)
def test_every_way_to_end(name: str) -> None:
    plain = Ask((1, 2, 3), 24)
    ids = owed(plain).ids
    eos = ids[9]
    options = NullOptions(eos=(eos,))
    requests = [
        plain,
        plain._replace(ignore_eos=True),
        plain._replace(max_tokens=1),
        plain._replace(stop_ids=(ids[4],)),
        plain._replace(stop_ids=(ids[0],)),
        plain._replace(stop_ids=(ids[23],), ignore_eos=True),
        plain._replace(stop_ids=(ids[4],), max_tokens=ids.index(ids[4]) + 1),
        plain._replace(temperature=0.9, seed=5, max_tokens=200),
    ]
    with graph(delivery(name), f"actors.executor.options.eos=[{eos}]", *POOL) as llm:
        completions = at_once(llm.address, requests)
        assert_owed(requests, completions, options)
        assert [c.finish_reason for c in completions[:6]] == ["stop", "length", "length", "stop", "stop", "stop"]
        assert whole(llm)


@pytest.mark.parametrize("name", DELIVERIES)
def test_a_request_may_fill_the_context_and_the_pool_to_the_last_slot(name: str) -> None:
    ask = Ask(tuple(range(40)), 24)
    settings = ("actors.executor.options.context=64", "actors.allocator.options.block_size=4",
                "actors.allocator.options.blocks=16")
    with graph(delivery(name), *settings) as llm:
        assert_owed([ask], at_once(llm.address, [ask]))
        assert whole(llm)


def test_the_same_seed_gives_the_same_ids_alone_and_in_a_batch() -> None:
    asked = Ask((9, 8, 7), 30, temperature=1.0, seed=1234)
    with graph(*POOL) as llm:
        alone = llm.generate(asked.prompt, **asked.options())
        batch = at_once(llm.address, [asked, *asks(15, seed=6), asked._replace(seed=99)])
        drawn = llm.generate(asked.prompt, max_tokens=30, temperature=1.0)
        again = llm.generate(asked.prompt, max_tokens=30, temperature=1.0, seed=drawn.seed)
    assert alone.ids == batch[0].ids
    assert batch[-1].ids != alone.ids
    assert again.ids == drawn.ids
    assert again.text == drawn.text
