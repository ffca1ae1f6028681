"""Positions beyond 2^16: a long prompt on a tiny model of one layer gives HF's logits, in float32.

With one layer a key depends on its own token and position alone, so HF's cache is filled without attending: its own
projections and rotation make it, and only the last rows are run as a whole.
"""

import inspect
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.checkpoints import tiny_llama
from tests.numerics.driver import Driver, Rows
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.utils import logging

logging.disable_progress_bar()  # type: ignore[no-untyped-call]

LENGTH, LAST, SIZE = 66_000, 40, 16
MOST = 1e-3  # as for short prompts


class Long(NamedTuple):
    """A prompt of LENGTH ids and HF's word on it."""

    path: Path
    ids: list[int]
    logits: torch.Tensor  # of the LAST rows
    keys: torch.Tensor  # [LENGTH, kv heads, width], turned
    values: torch.Tensor


@pytest.fixture(scope="module", params=[0, 100])
def long(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Long:
    window = request.param
    path = tiny_llama(
        tmp_path_factory.mktemp("long"), tokenizer=False, num_hidden_layers=1, hidden_size=32, intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1 << 17,
        **({"family": "mistral", "sliding_window": window} if window else {}),
    )
    ids = np.random.default_rng(0).integers(0, 256, LENGTH).tolist()
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        layer, tokens = model.model.layers[0], torch.tensor([ids])
        normed = layer.input_layernorm(model.model.embed_tokens(tokens))
        keys, values = (
            projection(normed).view(1, LENGTH, 1, 16).transpose(1, 2)
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        angles = model.model.rotary_emb(normed, torch.arange(LENGTH)[None])
        keys = apply_rotary_pos_emb(keys, keys, *angles)[1]
        cache = DynamicCache(config=model.config)
        head = LENGTH - LAST
        cache.update(keys[:, :, :head], values[:, :, :head], 0)
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        places = torch.arange(head, LENGTH)[None]
        logits = model(tokens[:, head:], position_ids=places, use_cache=True, **{name: cache}).logits[0]
    return Long(path, ids, logits, keys[0].transpose(0, 1), values[0].transpose(0, 1))


def records(driver: Driver, long: Long, blocks: int) -> np.ndarray[Any, Any]:
    """HF's keys and values of the first blocks as they leave a device: [layer][K, V][token][head][width]."""
    parts = [part[: blocks * SIZE].reshape(blocks, -1) for part in (long.keys, long.values)]
    return torch.cat(parts, dim=1).contiguous().view(torch.uint8).numpy()


@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_rows_beyond_two_to_the_sixteen_agree(long: Long, attention: str) -> None:
    """The context before them is HF's own, written in blocks."""
    driver = Driver(long.path, blocks=LENGTH // SIZE + 2, block_size=SIZE, attention={"plugin": attention})
    sequence, full = driver.open(), (LENGTH - LAST) // SIZE
    table = driver.tables[sequence][0]
    table[:full] = driver.free[0][:full]
    del driver.free[0][:full]
    driver.backend.write(0, table[:full], [records(driver, long, full)])
    driver.lengths[sequence] = full * SIZE
    found = []
    at = full * SIZE
    for count in (LENGTH - at - 13, 12, 1):
        found.append(driver.step([Rows(sequence, long.ids[at : at + count])]).logits)
        driver.commit(sequence, range(count))
        at += count
    off = (torch.cat(found)[-LAST:] - long.logits).abs().max()
    print(f"greatest difference {float(off):.1e}")
    assert float(off) < MOST


@pytest.mark.slow
def test_a_whole_prompt_in_chunks_agrees(long: Long) -> None:
    driver = Driver(long.path, blocks=LENGTH // SIZE + 2, block_size=SIZE)
    sequence = driver.open()
    for at in range(0, LENGTH, 2048):
        ids = long.ids[at : at + 2048]
        logits = driver.step([Rows(sequence, ids)], "all" if len(ids) < 2048 else "none").logits
        driver.commit(sequence, range(len(ids)))
    off = (logits[-LAST:] - long.logits).abs().max()
    print(f"greatest difference {float(off):.1e}")
    assert float(off) < MOST
    if not driver.windows[0]:
        blocks = np.concatenate([driver.backend.read(0, driver.tables[sequence][0][at : at + 1])[0]
                                 for at in range(LENGTH // SIZE)])
        exact = records(driver, long, LENGTH // SIZE)
        np.testing.assert_allclose(blocks.view(np.float32), exact.view(np.float32), atol=1e-4)
