"""Drafts change when tokens come, never which: chains and trees, right and wrong, greedy and sampled."""

from pathlib import Path
from typing import Any

import pytest
from tests.callers import POOL, Ask, asks, assert_owed, at_once, owed
from tests.drafters import plugin
from tests.harness import DELIVERIES, Server, graph, until

SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 77}


def drafting(name: str = "Oracle", **options: Any) -> tuple[str, ...]:
    """The standard graph with a drafter of tests/drafters.py and room for its drafts."""
    table = ", ".join(f"{key}={value!r}" for key, value in options.items())
    length = "actors.scheduler.options.length={plugin='fixed', max=32}"
    return plugin(name), f"actors.drafter.options={{{table}}}", length


def alike(count: int, number: int, **sampling: Any) -> list[Ask]:
    """Varied prompts, one way to sample, so that the drafter can know what will be chosen."""
    return [Ask(a.prompt, a.max_tokens, **sampling) for a in asks(count, number)]


def assert_both_happened(facts: dict[str, Any]) -> None:
    assert facts["accepted"] > 0
    assert facts["drafted"] > facts["accepted"]


@pytest.mark.feature("drafts", "sampling", "direct-delivery", "windows", "trees")
@pytest.mark.parametrize("name", DELIVERIES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "coupled"])
def test_tokens_are_those_of_the_plain_run(name: str, shape: str, sampling: dict[str, Any]) -> None:
    requests = alike(10, 1, **sampling)
    with graph(f"delivery={name!r}", *drafting(shape=shape, depth=8, **sampling), *POOL) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        for ask in requests[:3]:
            assert llm.generate(ask.prompt, **ask.options()).ids == owed(ask).ids
        assert_both_happened(llm.stats()["scheduler"])
        found = llm.stats()
        assert (found["allocator"]["holds"], found["allocator"]["faults"], found["drafter"]["mirrors"]) == (0, [], 0)


def test_drafts_save_steps() -> None:
    ask = Ask((1, 2, 3), 64)
    with graph(*drafting(wrong=0, depth=7), *POOL) as llm:
        assert llm.generate(ask.prompt, **ask.options()).ids == owed(ask).ids
        facts = llm.stats()["scheduler"]
    # The prompt's step drafts nothing; then 8 tokens a step, the last step fewer.
    assert facts["steps"] <= 10
    assert facts["accepted"] >= 54


@pytest.mark.feature("drafts", "trees", "one-ahead", "direct-delivery", "sampling", "chunked-prefill")
@pytest.mark.parametrize("name", DELIVERIES)
def test_a_drafter_with_lag_leaves_room_for_two_steps_in_flight(name: str) -> None:
    requests = alike(12, 2, **SAMPLED)
    settings = ("actors.scheduler.options.max_chunk=9", "actors.scheduler.options.max_step_tokens=64", *POOL)
    with graph(f"delivery={name!r}", *drafting("Ahead", shape="tree", depth=3, **SAMPLED), *settings) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        facts = llm.stats()["scheduler"]
        assert_both_happened(facts)
        assert facts["peak_flight"] == 2


@pytest.mark.feature("drafts", "trees", "preemption", "chunked-prefill", "windows", "sampling", "direct-delivery")
@pytest.mark.parametrize("name", DELIVERIES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_preemption_among_drafts(name: str, shape: str) -> None:
    requests = alike(16, 3, **SAMPLED)
    memory = ("actors.allocator.options.block_size=4", "actors.allocator.options.blocks=40",
              "actors.scheduler.options.reserve_ahead=4", "actors.scheduler.options.max_chunk=11")
    with graph(f"delivery={name!r}", *drafting(shape=shape, depth=6, **SAMPLED), *memory) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        facts = llm.stats()["scheduler"]
        assert facts["preempted"] > 0
        assert_both_happened(facts)


@pytest.mark.feature("drafts", "preemption", "one-ahead", "chunked-prefill", "windows")
def test_preemption_among_drafts_and_steps_in_flight() -> None:
    requests = alike(16, 3)
    memory = ("actors.allocator.options.block_size=4", "actors.allocator.options.blocks=40",
              "actors.scheduler.options.reserve_ahead=4", "actors.scheduler.options.max_step_tokens=24",
              "actors.scheduler.options.max_chunk=5")
    with graph("delivery='direct'", *drafting("Ahead", depth=6), *memory) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        facts = llm.stats()["scheduler"]
        assert facts["preempted"] > 0
        assert facts["peak_flight"] == 2
        assert_both_happened(facts)


def test_a_lost_mirror_is_opened_anew() -> None:
    requests = alike(8, 4)
    with graph(*drafting("Forgetful", depth=4, every=3), *POOL) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        assert_both_happened(llm.stats()["scheduler"])


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_stop_or_the_limit_among_accepted_drafts(shape: str) -> None:
    plain = Ask((4, 5, 6), 40)
    ids = owed(plain).ids
    requests = [plain._replace(stop_ids=(ids[i],)) for i in range(12)]
    requests += [plain._replace(max_tokens=n) for n in range(1, 12)]
    with graph("delivery='direct'", *drafting(shape=shape, depth=8, wrong=0), *POOL) as llm:
        completions = at_once(llm.address, requests)
        assert_owed(requests, completions)
        for ask in requests:
            assert llm.generate(ask.prompt, **ask.options()).ids == owed(ask).ids
        found = llm.stats()["allocator"]
        assert (found["holds"], found["faults"]) == (0, [])


@pytest.mark.parametrize("name", DELIVERIES)
def test_drafts_up_to_the_last_slot_of_context_and_pool(name: str) -> None:
    ask = Ask(tuple(range(40)), 24)
    settings = ("actors.executor.options.context=64", "actors.allocator.options.block_size=4",
                "actors.allocator.options.blocks=64")
    with graph(f"delivery={name!r}", *drafting(depth=8, wrong=0), *settings) as llm:
        assert_owed([ask] * 3, at_once(llm.address, [ask] * 3))


@pytest.mark.parametrize("name", ["Raising", "Nonsense"])
def test_a_drafter_that_always_fails_costs_its_drafts_only(name: str) -> None:
    requests = alike(6, 5)
    with graph(*drafting(name, every=1), *POOL) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        assert llm.stats()["scheduler"]["degraded"] == 1


def test_a_drafter_that_fails_now_and_then_goes_on_drafting() -> None:
    requests = alike(6, 6)
    with graph(*drafting("Raising", every=7), *POOL) as llm:
        assert_owed(requests, at_once(llm.address, requests))
        facts = llm.stats()["scheduler"]
        assert facts["degraded"] == 0
        assert_both_happened(facts)


ALONE = ("actors.drafter.cell='drafts'", "actors.verifier.cell='verdicts'", "supervision.backoff='10ms'")


@pytest.mark.feature("drafts", "trees", "placement", "sampling", "windows", "chunked-prefill", "preemption")
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_drafter_and_verifier_in_cells_of_their_own(tmp_path: Path, shape: str) -> None:
    requests = alike(8, 7, **SAMPLED)
    memory = ("actors.allocator.options.block_size=4", "actors.allocator.options.blocks=32",
              "actors.scheduler.options.max_chunk=9")
    with Server(tmp_path, *ALONE, *drafting(shape=shape, depth=5, **SAMPLED), *memory) as server:
        assert_owed(requests, at_once(server.address, requests))
        with server.client() as client:
            facts = client.stats()["scheduler"]
        assert_both_happened(facts)
        assert facts["peak_flight"] == 1
        assert facts["preempted"] > 0
        assert server.stop() == 0


@pytest.mark.feature("drafts", "trees", "placement", "crash-replay", "sampling")
def test_the_drafter_s_cell_dies_and_is_opened_anew(tmp_path: Path) -> None:
    requests = alike(8, 8, **SAMPLED)
    mortal = drafting("Mortal", shape="tree", depth=3, every=6, once=str(tmp_path / "died"), **SAMPLED)
    slow = "actors.executor.options.step_seconds=0.02"  # so that streams last longer than the cell is away
    longer = [a._replace(max_tokens=80) for a in requests]
    with Server(tmp_path, *ALONE, *mortal, slow, *POOL) as server:
        assert_owed(longer, at_once(server.address, longer))
        with server.client() as client:
            facts = client.stats()
        assert (tmp_path / "died").exists()
        assert facts["drafter"]["mirrors"] == 0
        assert facts["scheduler"]["accepted"] > 0
        assert server.stop() == 0


@pytest.mark.feature("drafts", "placement", "crash-replay")
def test_a_drafter_that_keeps_dying_is_replaced_by_the_plain_one(tmp_path: Path) -> None:
    requests = [a._replace(max_tokens=60) for a in alike(4, 9)]
    slow = "actors.executor.options.step_seconds=0.02"
    fatal = (*drafting("Fatal", depth=2, every=2), "supervision.restarts=1")
    with Server(tmp_path, *ALONE, *fatal, slow, *POOL) as server:
        assert_owed(requests, at_once(server.address, requests))
        until(lambda: "the plain stand-in takes over" in server.text(), 30, "the drafter is replaced")
        assert_owed(requests[:1], at_once(server.address, requests[:1]))
        assert server.stop() == 0
