"""Kept prefixes and tiers beside what else a deployment does: drafts, trees, other cells, crashes, KV in 8 bits."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.callers import Ask, asks, assert_owed, at_once
from tests.checkpoints import tiny_llama
from tests.drafters import plugin
from tests.harness import DELIVERIES, Server, graph, until
from tests.sessions import QUICK
from tests.talk import Results, Work, run, settled

from antiphon.plugins.doors.client import AsyncClient, Completion
from antiphon.plugins.doors.llm import LLM

SAMPLED = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "seed": 21}
BEGINNING = tuple(range(5, 45))
REQUESTS = [Ask((*BEGINNING, *a.prompt), a.max_tokens, **SAMPLED) for a in asks(10, 31)]  # type: ignore[arg-type]
SMALL = ("actors.allocator.options.block_size=8", "actors.allocator.options.blocks=40",
         "actors.scheduler.options.max_chunk=16")


def drafting(shape: str) -> tuple[str, ...]:
    table = ", ".join(f"{key}={value!r}" for key, value in {"shape": shape, "depth": 4, **SAMPLED}.items())
    return (plugin("Oracle"), f"actors.drafter.options={{{table}}}",
            "actors.scheduler.options.length={plugin='fixed', max=12}")


def kept(cache: str, place: Path) -> tuple[str, ...]:
    """A cache with the tiers ram and disk behind it."""
    disk = f"{{plugin='disk', path={str(place / 'kv')!r}, size='64MiB'}}"
    return (f"actors.allocator.plugin={cache!r}", "actors.pager.plugin='tiered'",
            f"actors.allocator.options.secret={str(place / 'secret')!r}",
            f"actors.pager.options.tiers=[{{plugin='ram', size='1MiB'}}, {disk}]")


def second_turns(first: list[Completion]) -> list[Ask]:
    return [Ask((*a.prompt, *c.ids, 7, 8), 12, **SAMPLED)  # type: ignore[arg-type]
            for a, c in zip(REQUESTS, first, strict=True)]


@pytest.mark.feature("prefix-cache", "tiers", "drafts", "trees", "sampling", "chunked-prefill", "preemption", "windows",
                     "direct-delivery")
@pytest.mark.parametrize("name", DELIVERIES)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_drafts_beside_kept_prefixes(tmp_path: Path, cache: str, shape: str, name: str) -> None:
    with graph(f"delivery={name!r}", *drafting(shape), *kept(cache, tmp_path), *SMALL) as llm:
        first = at_once(llm.address, REQUESTS)
        assert_owed(REQUESTS, first)
        more = second_turns(first)
        assert_owed(more, at_once(llm.address, more))
        found = settled(llm)
    assert found["scheduler"]["accepted"] > 0
    assert found["scheduler"]["preempted"] > 0
    assert found["allocator"]["hit_slots"] > 0
    assert found["allocator"]["faults"] == []


@pytest.mark.feature("prefix-cache", "tiers", "placement", "crash-replay", "one-ahead", "sampling", "windows",
                     "direct-delivery")
@pytest.mark.parametrize("name", DELIVERIES)
def test_after_a_crash_of_the_step_cell_the_disk_still_has_what_was_computed(tmp_path: Path, name: str) -> None:
    settings = (f"delivery={name!r}", *kept("hash", tmp_path), "actors.tokenizer.cell='text'",
                "actors.executor.options.step_seconds=0.01", "supervision.backoff='10ms'", *QUICK)

    async def main(server: Server) -> list[Completion]:
        async with AsyncClient(server.address, timeout=60) as client:
            work = asyncio.gather(*(client.generate(a.prompt, **a.options()) for a in REQUESTS))
            while (await client.stats())["pager"]["tiers"][1]["saved"] < 40:
                await asyncio.sleep(0.02)
            server.kill("step")
            return await work

    with Server(tmp_path, *settings) as server:
        first = asyncio.run(main(server))
        assert_owed(REQUESTS, first)
        # The replayed ones may have been computed anew before the disk was open again; what comes now finds it.
        with server.client() as client:
            until(lambda: client.stats()["pager"]["tiers"][1]["state"] == "ok", 20, "the disk is open")
            client.flush()
        second = second_turns(first)
        assert_owed(second, at_once(server.address, second))
        with server.client() as client:
            found = client.stats()
        assert found["allocator"]["tier_slots"] > 0, found  # of the life after the crash
        assert server.stop() == 0


@pytest.mark.feature("prefix-cache", "tiers", "sampling", "chunked-prefill", "preemption",
                     "one-ahead", "direct-delivery")
@pytest.mark.parametrize("name", DELIVERIES)
@pytest.mark.parametrize("storage", ["kv_dtype='bfloat16'", "quantization={plugin='int8'}"])
def test_blocks_stored_otherwise_are_kept_and_come_back(tmp_path: Path, storage: str, name: str) -> None:
    """Lossy against float32, but what is kept and moved is bit for bit what was computed: the same tokens."""
    path = tiny_llama(tmp_path / "model")
    base = [f"model.path={str(path)!r}", "model.dtype='float32'", f"actors.executor.options.{storage}"]

    def results(*settings: str) -> tuple[Results, dict[str, Any]]:
        with LLM(settings=[*base, *settings]) as llm:
            return asyncio.run(run(llm.address, Work())), llm.stats()

    plain, _ = results("actors.allocator.plugin='plain'")
    found, stats = results(f"delivery={name!r}", *kept("radix", tmp_path), *SMALL)
    assert found == plain
    assert stats["scheduler"]["preempted"] > 0
    assert stats["allocator"]["hit_slots"] > 0
