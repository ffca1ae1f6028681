"""Many requests at once give the tokens of one at a time, on real arithmetic in float32, through the whole graph.

The tiny model runs in CI; the default model is marked slow. One at a time is checked against HF transformers, so both
runs are right and not only alike.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.checkpoints import gguf_file, hf_checkpoint, tiny_llama
from tests.harness import DELIVERIES
from tests.near_ties import GAP, gaps, reference

from antiphon.plugins.doors.client import AsyncClient, Completion
from antiphon.plugins.doors.llm import LLM

REQUESTS = 64
Asked = tuple[Sequence[int], dict[str, Any]]


def prompts(count: int, vocabulary: int, longest: int) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, vocabulary, int(random.integers(3, longest))).tolist() for _ in range(count)]


async def answers(address: str, asked: Sequence[Asked], at_once: int) -> list[Completion]:
    gate = asyncio.Semaphore(at_once)
    async with AsyncClient(address) as client:

        async def one(prompt: Sequence[int], options: dict[str, Any]) -> Completion:
            async with gate:
                return await client.generate(prompt, ignore_eos=True, **options)

        return list(await asyncio.gather(*(one(p, o) for p, o in asked)))


def check(path: Path, requests: int, tokens: int, vocabulary: int, longest: int, blocks: int) -> None:
    base = [f"actors.allocator.options.blocks={blocks}", "actors.allocator.options.block_size=8"]
    asked: list[Asked] = []
    for i, prompt in enumerate(prompts(requests, vocabulary, longest)):
        cut = ({}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 60, "top_p": 0.95})[i // 2 % 4]
        sampled = {"temperature": 0.9, "seed": 1000 + i, **cut}
        asked.append((prompt, {"max_tokens": tokens, **(sampled if i % 2 else {})}))
    with LLM(str(path), dtype="float32", settings=base) as llm:
        alone = asyncio.run(answers(llm.address, asked, 1))
    model = reference(path)
    close = set()
    for i, (prompt, options) in enumerate(asked):
        choice, gap = gaps(model, prompt, alone[i].ids)
        if gap < GAP:
            close.add(i)
            print(f"prompt {i}: smallest gap {gap:.1e}, left out")
        elif "seed" not in options:
            assert alone[i].ids == choice, f"prompt {i} differs from HF"
    assert len(close) < requests // 3
    del model
    reference.cache_clear()
    small = [*base, f"actors.allocator.options.blocks={blocks // 6}", "actors.scheduler.options.max_chunk=16",
             "actors.scheduler.options.max_step_tokens=256"]
    for delivery in DELIVERIES:
        with LLM(str(path), dtype="float32", settings=[*small, f"delivery='{delivery}'"]) as llm:
            together = asyncio.run(answers(llm.address, asked, requests))
            facts = llm.stats()
        assert facts["scheduler"]["preempted"] > 0, "the pool was not small enough"
        assert facts["allocator"]["idle"] == facts["allocator"]["total"]
        assert not facts["allocator"]["faults"]
        for i, (one, many) in enumerate(zip(alone, together, strict=True)):
            assert i in close or one.ids == many.ids, f"{delivery}: prompt {i} differs from its run alone"


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_tiny_model_answers_many_as_it_answers_one(tmp_path: Path, family: str) -> None:
    window = {"sliding_window": 24} if family == "mistral" else {}
    path = tiny_llama(tmp_path / "m", family=family, **window)
    check(path, REQUESTS, 24, 256, 60, 6 * 60)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_the_default_model_answers_many_as_it_answers_one(form: str) -> None:
    check(hf_checkpoint() if form == "hf" else gguf_file(), REQUESTS, 32, 49152, 90, 6 * 180)
