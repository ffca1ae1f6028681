"""Whatever keeps, moves, shares or drops KV, the tokens are those of a plain run: 42 combinations, two backends.

The default model answers to a pairwise cover of them, which is marked slow.
"""

import asyncio
from collections.abc import Callable, Iterator
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoints import hf_checkpoint, tiny_llama
from tests.harness import NULL, graph, null_continuation
from tests.near_ties import close
from tests.talk import Results, Work, prompts, run, settled, talk
from tests.tiers import RedisServer

from antiphon.plugins.doors.llm import LLM

CACHES, TIERS, CHUNKS, PREEMPTIONS = ("hash", "radix"), ("none", "ram", "disk", "redis"), (32, 256, 0), \
    ("recompute", "swap")
# Swapping needs somewhere to swap to; without a tier the graph check refuses it.
ALL = [c for c in product(CACHES, TIERS, CHUNKS, PREEMPTIONS) if c[1] != "none" or c[3] != "swap"]
WORK = Work()
LARGE = Work(vocabulary=49152, shared=260, requests=4, answer=16)  # chunks of 256 and of all are two things
SIZE = 8  # tokens of a block
Settings = tuple[str, ...]
Combination = tuple[Any, ...]


def few(work: Work) -> int:
    """Blocks in which two of the longest sequences fit at once: so many requests cannot but push each other out."""
    return 2 * -(-(work.shared + 2 * work.own + 2 * work.answer) // SIZE) + 4


def pairwise(everything: list[Combination]) -> list[Combination]:
    """Some of them, in which every two values that occur together do so: each next one adds most new pairs."""
    def pairs(one: Combination) -> set[Any]:
        return set(combinations(enumerate(one), 2))

    left = set[Any]().union(*map(pairs, everything))
    chosen = []
    while left:
        chosen.append(max(everything, key=lambda one: len(pairs(one) & left)))
        left -= pairs(chosen[-1])
    return chosen


COVER = pairwise(ALL)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def backends(tiny: Path) -> dict[str, Settings]:
    return {"null": NULL, "torch": of_model(tiny)}


def of_model(path: Path) -> Settings:
    return (f"model.path={str(path)!r}", "model.dtype='float32'")


@pytest.fixture(scope="session")
def plain(backends: dict[str, Settings]) -> Callable[[str], Results]:
    """What a run without any of this gives, by backend."""
    known: dict[str, Results] = {}

    def of(backend: str) -> Results:
        if backend not in known:
            with LLM(settings=[*backends[backend], "actors.allocator.plugin='plain'"]) as llm:
                known[backend] = asyncio.run(run(llm.address, WORK))
        return known[backend]

    return of


@pytest.fixture(scope="session")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


def tiers(kind: str, place: Path, request: pytest.FixtureRequest) -> Settings:
    """Settings for a pager with one tier. The pools are small: what is saved comes back."""
    if kind == "none":
        return ()
    use = "{plugin='ram', size='512MiB'}"
    if kind == "disk":
        use = f"{{plugin='disk', path={str(place / 'kv')!r}, size='512MiB'}}"
    elif kind == "redis":
        use = f"{{plugin='redis', url={request.getfixturevalue('redis').url!r}, prefix={place.name!r}}}"
    return ("actors.pager.plugin='tiered'", f"actors.pager.options.tiers=[{use}]")


def settings_of(combination: Combination, work: Work, place: Path, request: pytest.FixtureRequest) -> Settings:
    cache, tier, chunk, preemption = combination
    return (
        f"actors.allocator.plugin={cache!r}", f"actors.scheduler.options.max_chunk={chunk}",
        f"actors.allocator.options.preemption={preemption!r}", f"actors.allocator.options.block_size={SIZE}",
        f"actors.allocator.options.blocks={few(work)}", f"actors.allocator.options.secret={str(place / 'secret')!r}",
        *tiers(tier, place, request),
    )


def answers(settings: Settings, work: Work) -> tuple[Results, int]:
    """What a small pool gives, and how many slots came from tiers; afterwards nothing may be held."""
    with LLM(settings=settings) as llm:
        found = asyncio.run(run(llm.address, work))
        stats = settled(llm)
    assert stats["allocator"]["faults"] == []
    assert stats["allocator"]["hit_slots"] > 0
    assert stats["scheduler"]["preempted"] > 0
    assert stats["scheduler"]["waiting"] == stats["scheduler"]["running"] == 0
    return found, stats["allocator"]["tier_slots"]


def named(one: Combination) -> str:
    return "-".join(map(str, one))


@pytest.mark.feature("prefix-cache", "tiers", "sampling", "chunked-prefill", "preemption", "one-ahead", "windows")
@pytest.mark.parametrize("backend", ["null", "torch"])
@pytest.mark.parametrize("combination", ALL, ids=named)
def test_the_tokens_are_those_of_a_plain_run(
    combination: Combination, backend: str, backends: dict[str, Settings], plain: Callable[[str], Results],
    tmp_path: Path, request: pytest.FixtureRequest,
) -> None:
    settings = settings_of(combination, WORK, tmp_path, request)
    assert answers((*backends[backend], *settings), WORK)[0] == plain(backend)


class Known:
    """The default model's plain run, and which of its answers hang on a near tie."""

    def __init__(self) -> None:
        path = hf_checkpoint()
        self.settings = of_model(path)
        with LLM(settings=[*self.settings, "actors.allocator.plugin='plain'"]) as llm:
            self.results = asyncio.run(run(llm.address, LARGE))
        first = prompts(LARGE)
        asked = (first, talk(LARGE, self.results.first), [first[0]] * len(self.results.samples))
        self.close = [close(path, *part) for part in zip(asked, self.results, strict=True)]
        self.close[1] |= self.close[0]  # a second turn goes on from the first one's answer
        assert sum(map(len, self.close)) * 3 < sum(map(len, self.results)), "too many near ties to tell anything"


@pytest.fixture(scope="session")
def known() -> Known:
    return Known()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("combination", COVER, ids=named)
def test_the_default_model_gives_the_tokens_of_a_plain_run(
    combination: Combination, known: Known, tmp_path: Path, request: pytest.FixtureRequest,
) -> None:
    found, brought = answers((*known.settings, *settings_of(combination, LARGE, tmp_path, request)), LARGE)
    assert bool(brought) == (combination[1] != "none"), "computing anew takes much longer here"
    for name, got, expected, left_out in zip(Results._fields, found, known.results, known.close, strict=True):
        for i, (ids, right) in enumerate(zip(got, expected, strict=True)):
            assert i in left_out or ids == right, f"answer {i} of {name} differs from that of a plain run"


@pytest.mark.parametrize("cache", ["hash", "radix"])
def test_a_model_of_two_groups_with_a_window_has_prefix_hits(cache: str, tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", family="ministral", num_hidden_layers=3, head_dim=16, sliding_window=24,
                      layer_types=["full_attention", "sliding_attention", "sliding_attention"])
    with LLM(settings=[*of_model(path), "actors.allocator.plugin='plain'"]) as llm:
        expected = asyncio.run(run(llm.address, WORK))
    ram = ("actors.pager.plugin='tiered'", "actors.pager.options.tiers=[{plugin='ram', size='64MiB'}]",
           "actors.allocator.options.bring='always'")
    for more in ((), (*ram, f"actors.allocator.options.blocks={few(WORK)}")):
        with LLM(settings=[*of_model(path), f"actors.allocator.plugin={cache!r}",
                           f"actors.allocator.options.block_size={SIZE}", *more]) as llm:
            assert asyncio.run(run(llm.address, WORK)) == expected
            stats = llm.stats()
        assert stats["allocator"]["faults"] == []
        assert stats["allocator"]["hit_slots"] > 0
        assert bool(more) == bool(stats["allocator"]["tier_slots"])


@pytest.mark.parametrize(("cache", "hit"), [("hash", 0), ("radix", 12)])
def test_radix_hits_inside_a_block_and_hash_does_not(cache: str, hit: int) -> None:
    shared = list(range(12))  # less than a block
    with graph(f"actors.allocator.plugin={cache!r}", "actors.allocator.options.block_size=16") as llm:
        for own in (100, 200):
            prompt = [*shared, *range(own, own + 20)]
            assert llm.generate(prompt, max_tokens=8).ids == null_continuation(prompt, 8)
        found = llm.stats()["allocator"]
    assert (found["hit_slots"], found["copies"]) == (hit, int(hit > 0))
