"""A prompt longer than 2^16 tokens is computed in chunks, paged out by other work and resumed from a tier."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from tests.checkpoints import tiny_llama
from tests.harness import NULL, null_continuation

from antiphon.plugins.backends.null import NullOptions
from antiphon.plugins.doors.llm import LLM

LENGTH, CONTEXT, SIZE = 66_000, 70_000, 16
POOL = LENGTH // SIZE + 40  # blocks: one such prompt and little else
OTHERS = 9  # prompts of OTHER tokens, which together need the whole pool
OTHER = 7_600


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, count).tolist()


def turns(llm: LLM, others: bool) -> list[list[int]]:
    """The long turn, then other work, then the turn after it."""
    prompt = ids(LENGTH, 0)
    first = llm.generate(prompt, max_tokens=8, ignore_eos=True).ids
    if others:
        for seed in range(1, OTHERS + 1):
            llm.generate(ids(OTHER, seed), max_tokens=1, ignore_eos=True)
    second = llm.generate([*prompt, *first, *ids(50, 99)], max_tokens=8, ignore_eos=True).ids
    return [first, second]


def resumed(settings: Sequence[str], tier: str, home: Path) -> list[list[int]]:
    """Both turns' tokens, with the long prompt's blocks out of the device and back between them."""
    with LLM(settings=[
        *settings, "actors.allocator.plugin='hash'", f"actors.allocator.options.block_size={SIZE}",
        f"actors.allocator.options.blocks={POOL}", "actors.allocator.options.bring='always'",
        f"actors.allocator.options.secret={str(home / 'secret')!r}",
        "actors.pager.plugin='tiered'", f"actors.pager.options.tiers=[{tier}]",
        "actors.pager.options.look='10s'", "actors.allocator.options.find_deadline='20s'",
    ]) as llm:
        found = turns(llm, others=True)
        stats = llm.stats()
    assert stats["scheduler"]["steps"] > LENGTH / 2048, "it was not computed in chunks"
    assert stats["allocator"]["evicted"] > LENGTH // SIZE * 0.9
    assert stats["allocator"]["tier_slots"] > LENGTH * 0.9
    assert stats["allocator"]["loads_bad"] == 0
    assert stats["allocator"]["faults"] == []
    return found


@pytest.mark.parametrize("window", [0, 24])
def test_the_null_backend_sees_every_slot_of_it_again(window: int, tmp_path: Path) -> None:
    settings = (*NULL, f"actors.executor.options={{context={CONTEXT}, window={window}}}")
    first, second = resumed(settings, "{plugin='ram', size='64MiB'}", tmp_path)
    options, prompt = NullOptions(context=CONTEXT, window=window), ids(LENGTH, 0)
    assert first == null_continuation(prompt, 8, options)
    assert second == null_continuation([*prompt, *first, *ids(50, 99)], 8, options)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_model_goes_on_as_if_it_had_never_left(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", num_hidden_layers=1, hidden_size=32, intermediate_size=32,
                      num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=CONTEXT)
    settings = (f"model.path={str(path)!r}", "model.dtype='float32'", "actors.scheduler.options.max_chunk=2048")
    with LLM(settings=[*settings, "actors.allocator.plugin='plain'", f"actors.allocator.options.blocks={POOL}",
                       f"actors.allocator.options.block_size={SIZE}"]) as llm:
        expected = turns(llm, others=False)
    disk = f"{{plugin='disk', path={str(tmp_path / 'kv')!r}, size='1GiB'}}"
    assert resumed(settings, disk, tmp_path) == expected
