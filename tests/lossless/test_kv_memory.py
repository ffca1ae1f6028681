"""Whatever keeps, moves, shares or drops KV, the tokens are those of a plain run: 42 combinations, two backends."""

import asyncio
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest
from tests.checkpoints import tiny_llama
from tests.harness import NULL
from tests.talk import Results, Work, run, settled
from tests.tiers import RedisServer

from antiphon.plugins.doors.llm import LLM

CACHES, TIERS, CHUNKS, PREEMPTIONS = ("hash", "radix"), ("none", "ram", "disk", "redis"), (32, 256, 0), \
    ("recompute", "swap")
# Swapping needs somewhere to swap to; without a tier the graph check refuses it.
ALL = [c for c in product(CACHES, TIERS, CHUNKS, PREEMPTIONS) if c[1] != "none" or c[3] != "swap"]
WORK = Work()
SIZE = 8  # tokens of a block
# Two of the longest sequences fit at once: ten requests cannot but push each other out.
FEW = 2 * -(-(WORK.shared + 2 * WORK.own + 2 * WORK.answer) // SIZE) + 4
Settings = tuple[str, ...]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def backends(tiny: Path) -> dict[str, Settings]:
    return {"null": NULL, "torch": (f"model.path={str(tiny)!r}", "model.dtype='float32'")}


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
    use = "{plugin='ram', size='64MiB'}"
    if kind == "disk":
        use = f"{{plugin='disk', path={str(place / 'kv')!r}, size='64MiB'}}"
    elif kind == "redis":
        use = f"{{plugin='redis', url={request.getfixturevalue('redis').url!r}, prefix={place.name!r}}}"
    return ("actors.pager.plugin='tiered'", f"actors.pager.options.tiers=[{use}]")


@pytest.mark.feature("prefix-cache", "tiers", "sampling", "chunked-prefill", "preemption", "one-ahead", "windows")
@pytest.mark.parametrize("backend", ["null", "torch"])
@pytest.mark.parametrize(("cache", "tier", "chunk", "preemption"), ALL, ids=["-".join(map(str, c)) for c in ALL])
def test_the_tokens_are_those_of_a_plain_run(
    cache: str, tier: str, chunk: int, preemption: str, backend: str, backends: dict[str, Settings],
    plain: Callable[[str], Results], tmp_path: Path, request: pytest.FixtureRequest,
) -> None:
    settings = [
        *backends[backend], f"actors.allocator.plugin={cache!r}", f"actors.scheduler.options.max_chunk={chunk}",
        f"actors.allocator.options.preemption={preemption!r}", f"actors.allocator.options.block_size={SIZE}",
        f"actors.allocator.options.blocks={FEW}", f"actors.allocator.options.secret={str(tmp_path / 'secret')!r}",
        *tiers(tier, tmp_path, request),
    ]
    with LLM(settings=settings) as llm:
        assert asyncio.run(run(llm.address, WORK)) == plain(backend)
        stats = settled(llm)
    found = stats["allocator"]
    assert found["faults"] == []
    assert found["hit_slots"] > 0
    assert stats["scheduler"]["preempted"] > 0
    assert stats["scheduler"]["waiting"] == stats["scheduler"]["running"] == 0
