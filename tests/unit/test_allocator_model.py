"""Whatever happens in whatever order: a sequence reads its own tokens, the ledger adds up, and no block is lost."""

import pytest
from tests.memory import World

SEEDS = range(6)
STEPS = 400


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setenv("ANTIPHON_HOME", str(tmp_path))


@pytest.mark.parametrize("tiers", ["", "back", "through"])
@pytest.mark.parametrize("windows", [(), (6,), (-1, 5), (4, 9)], ids=str)
@pytest.mark.parametrize(("cache", "eviction"), [("plain", "lru"), ("hash", "lru"), ("radix", "cost")])
def test_sequences_read_their_own_tokens_and_no_block_is_lost(cache: str, eviction: str, windows: tuple[int, ...],
                                                             tiers: str) -> None:
    if cache == "plain" and tiers:
        pytest.skip("a cache that keeps nothing mounts no tiers")
    hits = waited = 0
    for seed in SEEDS:
        world = World(seed, cache, eviction, windows, tiers, blocks=24)
        for step in range(STEPS):
            try:
                world.step()
            except Exception as cause:
                raise AssertionError(f"seed {seed}, step {step}: {cause!r}") from cause
        world.settle()
        hits, waited = hits + world.hits, waited + world.waited
    assert hits  # of forks at least
    assert bool(waited) == (cache != "plain")
