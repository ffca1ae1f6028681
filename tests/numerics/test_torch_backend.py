"""The torch backend's steps: trees, moves, mixed batches, refusals, and what it keeps in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.checkpoints import tiny_llama
from tests.numerics.driver import Driver, Rows

from antiphon.actors.executor import Move
from antiphon.actors.model import ModelSection
from antiphon.plugins.backends.alone import Bare, pools, run_alone
from antiphon.plugins.backends.torch import Torch, TorchOptions, native_bfloat16

#      0
#    1   2
#   3 4   5
#          6
PARENTS = [-1, 0, 0, 1, 1, 2, 5]
TOKENS = [11, 21, 22, 33, 34, 35, 46]
PATHS = {3: [0, 1, 3], 4: [0, 1, 4], 6: [0, 2, 5, 6], 2: [0, 2], 0: [0]}


@pytest.fixture(params=["llama", "mistral"])
def path(request: Any, tmp_path: Path) -> Path:
    window: dict[str, Any] = {"sliding_window": 12} if request.param == "mistral" else {}
    return tiny_llama(tmp_path / "m", tokenizer=False, family=request.param, **window)


def prompt(length: int, seed: int = 0) -> list[int]:
    return list(map(int, np.random.default_rng(seed).integers(0, 256, length)))


def chain_logits(path: Path, ids: list[int], **options: Any) -> torch.Tensor:
    logits: torch.Tensor = Driver(path, **options).feed([ids])[0][1]
    return logits


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("attention", ["cpu", "reference"])
@pytest.mark.parametrize("leaf", PATHS)
def test_a_tree_s_paths_and_what_follows_equal_the_chains(path: Path, leaf: int, attention: str) -> None:
    head = prompt(29)
    driver = Driver(path, attention={"plugin": attention})
    (sequence, _), (other, _) = driver.feed([head, prompt(13, seed=1)], (6, 11))
    # A tree, a single row and a chunk of a prompt share the step.
    late = driver.open()
    output = driver.step([Rows(other, [5]), Rows(sequence, TOKENS, PARENTS), Rows(late, prompt(20, seed=2))])
    kept = PATHS[leaf]
    expected = chain_logits(path, [*head, *(TOKENS[row] for row in kept), 77, 78])
    close(output.logits[1:8][kept], expected[29 : 29 + len(kept)])
    close(output.logits[0], chain_logits(path, [*prompt(13, seed=1), 5])[-1])
    close(output.logits[8:], chain_logits(path, prompt(20, seed=2)))
    # The kept rows move into line; the chain goes on, one row and then another.
    driver.commit(sequence, kept)
    for i, id_ in enumerate((77, 78)):
        found = driver.step([Rows(sequence, [id_])]).logits
        driver.commit(sequence, [0])
        close(found[0], expected[29 + len(kept) + i])


def test_rejected_rows_leave_no_trace(path: Path) -> None:
    head = prompt(29)
    driver = Driver(path)
    [(sequence, _)] = driver.feed([head])
    driver.step([Rows(sequence, [1, 2, 3, 4, 5])])
    driver.commit(sequence, [0, 1])  # three of five are rejected
    found = driver.step([Rows(sequence, [9, 8])]).logits
    close(found, chain_logits(path, [*head, 1, 2, 9, 8])[-2:])


def test_sequences_do_not_touch_each_other(path: Path) -> None:
    prompts = [prompt(n, seed=n) for n in (1, 8, 17, 40)]
    together = Driver(path).greedy(prompts, 12, (5, 3))
    for ids, (chosen, logits) in zip(prompts, together, strict=True):
        alone_ids, alone_logits = Driver(path).greedy([ids], 12, (1 << 20,))[0]
        assert chosen == alone_ids
        close(logits, alone_logits)


def test_moves_act_as_if_made_one_after_the_other(path: Path) -> None:
    driver = Driver(path, blocks=6, block_size=4)
    random = np.random.default_rng(3)
    backend = driver.backend
    for pool in backend._pools.values():
        pool.slots.copy_(torch.randn(pool.slots.shape))
    for _ in range(30):
        moves = [Move(0, *map(int, random.integers(0, (6, 4, 6, 4)))) for _ in range(8)]  # chains and cycles
        expected = {name: pool.slots.clone() for name, pool in backend._pools.items()}
        for move in moves:
            for slots in expected.values():
                slots[:, :, move.to_block, move.to_slot] = slots[:, :, move.from_block, move.from_slot]
        backend.move(moves)
        for name, pool in backend._pools.items():
            assert torch.equal(pool.slots, expected[name])


def test_a_row_without_a_block_is_refused(path: Path) -> None:
    driver = Driver(path)
    [(sequence, _)] = driver.feed([prompt(8)])  # fills its only block
    driver._grow = lambda sequence, slots: None  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="no block"):
        driver.step([Rows(sequence, [1])])


@pytest.mark.parametrize("name", ["input:2", "output:-1", "middle:0", "output"])
def test_a_hidden_state_no_layer_has_is_refused(path: Path, name: str) -> None:
    driver = Driver(path)
    with pytest.raises(ValueError, match="no layer has"):
        driver.step([Rows(driver.open(), [1])], "last", (name,))


def test_pools_without_the_model_s_group_are_refused(path: Path) -> None:
    backend = Torch(TorchOptions(threads=1), Bare(ModelSection(path=str(path), dtype="float32")))
    layout = pools(backend.facts(), 4)
    group = layout.groups[0][0]
    with pytest.raises(ValueError, match=group.name):
        backend.load(type(layout)(layout.block_size, layout.blocks, ((),)))


def test_describing_reads_no_weights(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Torch(TorchOptions(threads=1), Bare(ModelSection(path=str(path), dtype="bfloat16")))
    monkeypatch.setattr(torch, "empty", None)
    facts = backend.facts()
    assert (facts.vocabulary, facts.layers, facts.dtype, facts.groups[0].dtype) == (272, 2, "bfloat16", "bfloat16")
    assert facts.digest == Torch(TorchOptions(), Bare(ModelSection(path=str(path)))).facts().digest


def test_automatic_dtype_follows_the_processor(path: Path, tmp_path: Path) -> None:
    for flags, native in (("fpu avx512f avx512_bf16", True), ("fpu avx2", False), ("fpu amx_bf16 amx_tile", True)):
        (tmp_path / "cpuinfo").write_text(f"processor : 0\nflags\t\t: {flags}\n")
        assert native_bfloat16(tmp_path / "cpuinfo") is native
    assert native_bfloat16(tmp_path / "nothing") is False
    expected = "bfloat16" if native_bfloat16() else "float32"
    assert Torch(TorchOptions(), Bare(ModelSection(path=str(path)))).facts().dtype == expected


def test_untouched_blocks_cost_no_memory(path: Path) -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    driver = Driver(path, blocks=1 << 17, block_size=16)  # 1 GiB of float32 slots
    assert resident() - before < 100 << 20
    pool = next(iter(driver.backend._pools.values())).slots
    assert pool.numel() * 4 >= 1 << 30
    assert not pool[0, 0, 5].any()


def test_running_alone_gives_the_same_ids(path: Path) -> None:
    prompts = [prompt(n, seed=n) for n in (5, 19)]
    backend = Torch(
        TorchOptions(threads=1, attention={"plugin": "reference"}), Bare(ModelSection(str(path), "float32"))
    )
    layout = pools(backend.facts(), 16)
    backend.load(layout)
    found = run_alone(backend, layout, prompts, 9, chunk=8)
    assert found.ids == [ids for ids, _ in Driver(path).greedy(prompts, 9, (4,))]
    assert (len(found.prefill), len(found.steps)) == (1 + 3, 8)
    with pytest.raises(ValueError, match="do not fit"):
        run_alone(backend, layout, [prompt(200)] * 2, 9, chunk=8)
