"""Work that exercises KV memory: shared beginnings, second turns, samples, callers who leave.

It does not know what keeps the memory; each test compares the tokens with those of a plain run.
"""

import asyncio
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.harness import until

from antiphon.plugins.doors.client import AsyncClient, Completion
from antiphon.plugins.doors.sync import Client


class Work(NamedTuple):
    """Sizes of one workload. ``vocabulary``: ids are drawn below it."""

    vocabulary: int = 200
    shared: int = 50  # tokens that all prompts of a group begin with
    groups: int = 2
    requests: int = 5  # of each group
    own: int = 24  # most tokens after the shared ones
    answer: int = 12
    seed: int = 1


class Results(NamedTuple):
    """Generated ids: of first turns, of second turns after them, of samples of one prompt."""

    first: list[list[int]]
    second: list[list[int]]
    samples: list[list[int]]


def settled(client: Client) -> dict[str, Any]:
    """Facts of every actor once nobody holds a block, writes to tiers included."""
    until(lambda: client.stats()["allocator"]["holds"] == 0, 20, "every hold has ended")
    return client.stats()


def prompts(work: Work) -> list[list[int]]:
    """Prompts of all groups, shuffled."""
    draw = random.Random(work.seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(work.vocabulary) for _ in range(count)]

    made = []
    for _ in range(work.groups):
        beginning = ids(work.shared)
        made += [[*beginning, *ids(draw.randint(1, work.own))] for _ in range(work.requests)]
    draw.shuffle(made)
    return made


def talk(work: Work, answers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Second turns: each prompt, its answer, and five tokens more."""
    draw = random.Random(work.seed + 2)
    return [[*prompt, *answer, *(draw.randrange(work.vocabulary) for _ in range(5))]
            for prompt, answer in zip(prompts(work), answers, strict=True)]


async def run(address: str, work: Work) -> Results:
    """First turns at once, with callers among them who leave; then second turns; then samples."""
    draw = random.Random(work.seed + 1)
    asked = prompts(work)
    async with AsyncClient(address) as client:

        async def leave(prompt: Sequence[int], after: int) -> None:
            stream = client.stream(prompt, max_tokens=60, ignore_eos=True)
            async for delta in stream:
                after -= len(delta.ids)
                if after <= 0:
                    break
            await stream.aclose()

        async def turn(some: list[list[int]]) -> list[list[int]]:
            leaving = [asyncio.ensure_future(leave(draw.choice(some), draw.randint(1, 6))) for _ in range(3)]
            answers = await asyncio.gather(*(
                client.generate(p, max_tokens=work.answer, ignore_eos=True) for p in some))
            await asyncio.gather(*leaving)
            return [a.ids for a in answers]

        first = await turn(asked)
        second = await turn(talk(work, first))
        sampled: list[Completion] = await client.samples(
            asked[0], 3, max_tokens=work.answer, ignore_eos=True, temperature=0.8, seed=5)
    return Results(first, second, [c.ids for c in sampled])
