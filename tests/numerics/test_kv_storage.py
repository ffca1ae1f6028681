"""How the torch backend stores keys and values: other dtypes, 8 bits, whole blocks on the move, moving windows."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.checkpoints import hf_checkpoint, tiny_llama
from tests.numerics.driver import Driver, Rows
from tokenizers import Tokenizer

from antiphon.actors.blocks import BlockAccess
from antiphon.actors.device import Device
from antiphon.plugins.backends.torch import TorchOptions
from antiphon.plugins.quantizations.int8 import pack, unpack
from antiphon.runtime.plugin import find

WINDOWED: dict[str, Any] = {
    "family": "ministral", "head_dim": 16, "num_hidden_layers": 3, "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS: dict[str, dict[str, Any]] = {"llama": {}, "two groups": WINDOWED}
INT8 = {"plugin": "int8"}
CHANNEL = {"plugin": "int8", "keys": "channel"}
STORAGES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"kv_dtype": "bfloat16"},
    "float16": {"kv_dtype": "float16"},
    "int8": {"quantization": INT8},
    "int8 by channel": {"quantization": CHANNEL},
    "bfloat16 under bfloat16": {"dtype": "bfloat16"},
    "int8 under bfloat16": {"dtype": "bfloat16", "quantization": CHANNEL},
    "float32 under bfloat16": {"dtype": "bfloat16", "kv_dtype": "float32"},
}
# Greatest difference of a logit to float32 KV that is let pass; logits of the tiny models spread over some 10.
TINY_MOST = {"bfloat16": 0.5, "float16": 0.05, "int8": 0.8, "int8 by channel": 0.8}
# The same for the default model, and for the mean difference.
REAL_MOST = {"bfloat16": (0.6, 0.03), "float16": (0.1, 0.005), "int8": (2.0, 0.15), "int8 by channel": (2.0, 0.15)}


def prompt(length: int, seed: int = 0) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, 256, length)))


@pytest.fixture(params=MODELS)
def path(request: Any, tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "m", tokenizer=False, **MODELS[request.param])


def held(driver: Driver, sequence: int) -> list[Any]:
    """Blocks of a sequence by table."""
    return [table[table >= 0] for table in driver.tables[sequence]]


@pytest.mark.parametrize("storage", STORAGES)
def test_a_sequence_goes_on_bitwise_from_blocks_that_were_away(path: Path, storage: str) -> None:
    """All blocks are read, their places overwritten, the records written to other places and some copied again."""
    left, moved = (Driver(path, **STORAGES[storage]) for _ in range(2))
    for driver in (left, moved):
        driver.feed([prompt(45), prompt(19, seed=1)], (7, 16))
    backend = moved.backend
    for t, blocks in enumerate(held(moved, 0)):
        data = backend.read(t, blocks)
        assert [d.shape for d in data] == [
            (len(blocks), g.slot_bytes() * moved.layout.block_size) for g in moved.layout.groups[t]
        ]
        backend.write(t, blocks, [np.full_like(d, 0xFF) for d in data])  # NaN, were anyone to read it
        places = np.array([moved.free[t].pop() for _ in range(2 * len(blocks))], np.int32)
        for array in data:
            array.setflags(write=False)  # as what came in a frame
        backend.write(t, places[: len(blocks)], [*data])
        backend.copy(t, places[: len(blocks)], places[len(blocks) :])
        again = backend.read(t, places[len(blocks) :])
        assert all((a == b).all() for a, b in zip(again, data, strict=True))
        moved.tables[0][t][moved.tables[0][t] >= 0] = places[len(blocks) :]
    for ids in ([3], [1, 2, 3, 4], [9]):
        expected, found = (driver.step([Rows(0, ids), Rows(1, [5])]).logits for driver in (left, moved))
        assert torch.equal(found, expected)
        for driver in (left, moved):
            driver.commit(0, range(len(ids)))
            driver.commit(1, [0])


@pytest.mark.parametrize("storage", STORAGES)
def test_a_record_lies_by_layer_then_keys_and_values_then_token(path: Path, storage: str) -> None:
    driver = Driver(path, **STORAGES[storage])
    driver.feed([prompt(20)])
    for t, blocks in enumerate(held(driver, 0)):
        for group, found in zip(driver.layout.groups[t], driver.backend.read(t, blocks), strict=True):
            slots = driver.backend._pools[group.name].slots
            for n, block in enumerate(blocks):
                record = slots[:, :, int(block)].contiguous().view(torch.uint8).reshape(-1)
                assert record.numpy().tobytes() == found[n].tobytes()


@pytest.mark.parametrize("storage", ["float32", "int8"])
async def test_blocks_move_while_steps_run(path: Path, storage: str) -> None:
    """A sequence's blocks are moved back and forth while another one is computed on the device thread."""
    driver, alone = (Driver(path, **STORAGES[storage]) for _ in range(2))
    for each in (driver, alone):
        each.feed([prompt(45), prompt(19, seed=1)])
    device = Device("cell", 1)
    access = BlockAccess(device, driver.backend)
    access.pools = driver.layout
    found = []

    def step(n: int) -> None:
        found.append(driver.step([Rows(1, [n])]).logits)
        driver.commit(1, [0])

    steps = [device.submit(lambda n=n: step(n), "execute") for n in range(60)]
    for t, blocks in enumerate(held(driver, 0)):
        here, there = blocks, np.array([driver.free[t].pop() for _ in blocks], np.int32)
        for _ in range(9):
            [data] = await access.read([(t, here)])
            await access.write(t, there, [*data])
            await access.write(t, here, [np.full_like(array, 0xFF) for array in data])
            here, there = there, here
        driver.tables[0][t][driver.tables[0][t] >= 0] = here
    await asyncio.gather(*steps)
    for n, logits in enumerate(found):
        assert torch.equal(logits, alone.step([Rows(1, [n])]).logits)
        alone.commit(1, [0])
    assert torch.equal(driver.step([Rows(0, [7])]).logits, alone.step([Rows(0, [7])]).logits)
    device.close()


@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize("storage", TINY_MOST)
def test_what_storage_loses_is_bounded(path: Path, storage: str, attention: str) -> None:
    ids, chunks = prompt(90), (7, 1, 16, 30)
    [(_, exact)] = Driver(path).feed([ids], chunks)
    [(_, found)] = Driver(path, attention={"plugin": attention}, **STORAGES[storage]).feed([ids], chunks)
    off = float((found - exact).abs().max())
    print(f"{storage}: greatest difference of a logit {off:.4f}, logits spread over {float(exact.std()):.2f}")
    assert 0 < off < TINY_MOST[storage]


def test_factors_per_channel_save_keys_with_large_channels(tmp_path: Path) -> None:
    """Two rotary pairs of the keys are made 40 times larger, and of the queries smaller: the model stays the same."""
    path = tiny_llama(tmp_path / "m", tokenizer=False)
    file = path / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        large = 40.0 if "k_proj" in name else 1 / 40 if "q_proj" in name else 1.0
        heads = tensor.reshape(-1, 16, 64) if large != 1 else tensor
        if large != 1:
            heads[:, [0, 3, 8, 11]] *= large
    save_file(tensors, file, {"format": "pt"})
    [(_, exact)] = Driver(path).feed([prompt(90)])
    off = {}
    for keys in ("token", "channel"):
        [(_, found)] = Driver(path, quantization={"plugin": "int8", "keys": keys}).feed([prompt(90)])
        off[keys] = float((found - exact).abs().mean())
    print(f"mean difference of logits by way of keys: {off}")
    assert off["channel"] < off["token"] / 4


def test_paths_read_the_stored_form_alike(path: Path) -> None:
    for storage in STORAGES:
        runs = [
            Driver(path, attention={"plugin": plugin}, **STORAGES[storage]).feed([prompt(50), prompt(9)], (11, 3))
            for plugin in ("cpu", "reference")
        ]
        atol = 0.2 if "under bfloat16" in storage else 1e-3
        for (_, a), (_, b) in zip(*runs, strict=True):
            torch.testing.assert_close(a, b, atol=atol, rtol=0.05 if atol > 0.1 else 1e-3)


@pytest.mark.parametrize("storage", ["float16", "int8", "int8 by channel"])
def test_kept_rows_of_a_tree_move_with_their_scales(path: Path, storage: str) -> None:
    parents, tokens, kept = [-1, 0, 0, 1, 2, 4], [11, 21, 22, 33, 34, 45], [0, 2, 4, 5]
    tree, chain = (Driver(path, **STORAGES[storage]) for _ in range(2))
    for driver in (tree, chain):
        driver.feed([prompt(29)])
    tree.step([Rows(0, tokens, parents)])
    chain.step([Rows(0, [tokens[row] for row in kept])])
    tree.commit(0, kept)
    chain.commit(0, range(len(kept)))
    # Each row's keys were computed among other rows, which changes the last bits; then 8 bits may round elsewhere.
    found, expected = (driver.step([Rows(0, [77])]).logits for driver in (tree, chain))
    torch.testing.assert_close(found, expected, atol=0.1 if "int8" in storage else 0.02, rtol=0.01)
    for t in range(len(tree.windows)):
        for a, b in zip(tree.backend.read(t, held(tree, 0)[t]), chain.backend.read(t, held(chain, 0)[t]), strict=True):
            assert float((a == b).mean()) > 0.9  # but the rejected rows' slots


@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize("stale", [False, True])
def test_blocks_before_the_window_are_not_looked_at(tmp_path: Path, stale: bool, attention: str) -> None:
    """They hold NaN as soon as they are let go, and the table may still name them."""
    path = tiny_llama(tmp_path / "m", tokenizer=False, **WINDOWED)
    driver, plain = Driver(path, attention={"plugin": attention}), Driver(path)
    ids, at, table = prompt(120), 0, driver.windows.index(12)
    for each in (driver, plain):
        each.open()
    entries = driver.tables[0][table]
    for n in (30, 1, 9, 1, 20, 1, 40):
        rows = [Rows(0, ids[at : at + n])]
        torch.testing.assert_close(driver.step(rows).logits, plain.step(rows).logits, atol=1e-4, rtol=1e-4)
        named = entries.copy()
        for each in (driver, plain):
            each.commit(0, range(n))
        at += n
        gone = np.flatnonzero((named >= 0) & (entries < 0))
        records = driver.backend.read(table, named[gone])
        driver.backend.write(table, named[gone], [np.full_like(d, 0xFF) for d in records])
        if stale:
            entries[gone] = named[gone]
            driver.free[table] = [block for block in driver.free[table] if block not in named]  # no second owner
    assert (entries[:12] >= 0).all() == stale


def test_slots_take_the_bytes_that_they_say(path: Path) -> None:
    sizes = {
        storage: [g.slot_bytes() // (2 * g.layers * g.heads) for g in Driver(path, **options).facts.groups]
        for storage, options in STORAGES.items()
    }
    assert {storage: set(found) for storage, found in sizes.items()} == {
        "float32": {64}, "bfloat16": {32}, "float16": {32}, "int8": {18}, "int8 by channel": {18},
        "bfloat16 under bfloat16": {32}, "int8 under bfloat16": {18}, "float32 under bfloat16": {64},
    }
    kinds = ("float32", "int8", "int8 by channel")
    names = {g.quantization for kind in kinds for g in Driver(path, **STORAGES[kind]).facts.groups}
    assert names == {"", "int8-token", "int8-channel"}


def test_the_compute_dtype_is_stored_as_it_is(path: Path) -> None:
    assert all(place.codec is None for place in Driver(path, kv_dtype="float32").backend._places)
    assert all(place.codec is None for place in Driver(path).backend._places)


def test_two_ways_of_storing_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="leave `kv_dtype` out"):
        msgspec.convert({"kv_dtype": "float16", "quantization": INT8}, TorchOptions)


def test_heads_of_odd_width_are_refused(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path / "m", tokenizer=False, head_dim=9, partial_rotary_factor=8 / 9)
    with pytest.raises(ValueError, match="even width"):
        Driver(path, quantization=INT8)


def test_packed_numbers_are_within_half_a_step() -> None:
    x = torch.randn(50, 3, 16) * torch.logspace(-6, 6, 50)[:, None, None]
    x[7] = 0
    for given in (x, torch.full((1, 1, 16), 1e30), torch.full((1, 1, 16), 1e-30), torch.full((1, 1, 16), -3e38)):
        found = unpack(pack(given), torch.float32)
        step = given.abs().amax(-1, keepdim=True) / 127
        assert ((found - given).abs() <= step * 0.51).all()
    assert unpack(pack(torch.tensor([[[torch.inf, 1.0]]])), torch.float32).isfinite().all()
    assert not unpack(torch.zeros(4, 1, 18, dtype=torch.int8), torch.float32).any()


def test_int8_says_that_it_loses() -> None:
    assert find("quantization", "int8").lossy


def test_what_storage_loses_on_the_default_model() -> None:
    path = hf_checkpoint()
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    text = (Path(__file__).parents[2] / "docs" / "one-request.md").read_text(encoding="utf-8")
    ids = tokenizer.encode(text, add_special_tokens=False).ids[:200]
    [(_, truth)] = Driver(path, blocks=40).feed([ids], (128,))
    for storage, (most, mean) in REAL_MOST.items():
        [(_, found)] = Driver(path, blocks=40, **STORAGES[storage]).feed([ids], (128,))
        off = (found - truth).abs()
        agree = float((found.argmax(1) == truth.argmax(1)).float().mean())
        loss = [float(torch.nn.functional.cross_entropy(x[:-1], torch.tensor(ids[1:]))) for x in (truth, found)]
        print(f"{storage}: logits differ by at most {float(off.max()):.4f}, in the mean {float(off.mean()):.5f}; "
              f"{agree:.1%} of the greedy tokens agree; loss {loss[0]:.4f} -> {loss[1]:.4f}")
        assert float(off.max()) < most
        assert float(off.mean()) < mean
        assert agree > 0.9
