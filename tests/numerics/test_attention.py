"""Attention back ends against a dense computation in float64 that knows nothing of blocks and is written here."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch

from antiphon.kernels import attention as contract
from antiphon.kernels import attention_cpu, trees
from antiphon.kernels.attention import Attended, Block, Causal, NotSupported, Tree, Window, merge

PATHS = {"reference": contract.attention, "cpu": attention_cpu.attention}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

# (context, own rows) of each sequence
BATCHES = {
    "decode": [(0, 1), (5, 1), (16, 1), (31, 1), (100, 1)],
    "long decode": [(700, 1), (3, 1), (1030, 1), (690, 1)],
    "prefill": [(0, 40), (0, 1), (17, 33)],
    "mixed": [(9, 4), (0, 20), (64, 1), (0, 0), (130, 7), (33, 1), (15, 2)],
    "one": [(0, 1)],
}


class Step(NamedTuple):
    q: torch.Tensor
    kv: torch.Tensor
    tables: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    parents: list[np.ndarray]

    def arguments(self):
        return self.q, self.kv, self.tables, self.offsets, self.positions


def make(
    batch, heads=4, kv_heads=2, width=32, block_size=16, dtype=torch.float32, runs=False, tree=False, latent=False
):
    """A step over a pool whose unused slots hold numbers that would show, with blocks in shuffled order or in runs."""
    rng = np.random.default_rng(len(batch) + width + heads)
    torch.manual_seed(width + heads)
    counts = [-(-(context + rows) // block_size) for context, rows in batch]
    ids = np.arange(sum(counts) + 3) if runs else rng.permutation(sum(counts) + 3)
    tables = np.full((len(batch), max(counts) + 2), -1, np.int32)
    at = 1
    for r, count in enumerate(counts):
        tables[r, :count] = ids[at : at + count]
        at += count
    parents, positions = [], []
    for context, rows in batch:
        above = np.arange(rows) - 1
        if tree and 1 < rows <= 64:
            above = np.array([-1] + [int(rng.integers(0, row)) for row in range(1, rows)])
        parents.append(above)
        positions.append(context + (trees.depths(above) if rows <= 64 else np.arange(rows)))
    total = sum(rows for _, rows in batch)
    kv = torch.randn(1 if latent else 2, len(ids), block_size, kv_heads, width).to(dtype)
    kv[:, int(ids[0])] = 1e4
    return Step(
        torch.randn(total, heads, width).to(dtype),
        kv,
        torch.from_numpy(tables),
        torch.tensor([0, *np.cumsum([rows for _, rows in batch])], dtype=torch.int32),
        torch.from_numpy(np.concatenate(positions).astype(np.int32)),
        parents,
    )


def naive(step, mask, scale=None, softcap=0.0, sinks=None, tiled=False, value_width=None, blocks_read=None):
    """One row, one head, one key at a time in float64: (out, lse, mass per block)."""
    q, kv = step.q.double().numpy(), step.kv.double().numpy()
    rows, heads, width = q.shape
    block_size, kv_heads = kv.shape[2:4]
    out = np.zeros((rows, heads, value_width or width))
    lse = np.full((rows, heads), -math.inf)
    mass = np.zeros((rows, heads, step.tables.shape[1]))
    window = mask if isinstance(mask, Window) else getattr(mask, "window", None)
    for r, parents in enumerate(step.parents):
        first = int(step.offsets[r])
        start = int(step.positions[first]) if len(parents) else 0
        for i in range(len(parents)):
            line = {i}
            while parents[min(line)] >= 0:
                line.add(int(parents[min(line)]))
            own = int(step.positions[first + i])
            for h in range(heads):
                g = h % kv_heads if tiled else h // (heads // kv_heads)
                scores, values, homes = [], [], []
                for slot in range(start + len(parents)):
                    j = slot - start
                    place = slot if j < 0 else int(step.positions[first + j])
                    if j >= 0 and not isinstance(mask, Block) and (j not in line if isinstance(mask, Tree) else j > i):
                        continue
                    if window and not (place > own - window.size or place < window.sinks):
                        continue
                    home = slot // block_size
                    if blocks_read is not None and home not in blocks_read[r]:
                        continue
                    block = int(step.tables[r, home])
                    score = q[first + i, h] @ kv[0, block, slot % block_size, g] * (scale or width**-0.5)
                    scores.append(softcap * math.tanh(score / softcap) if softcap else score)
                    values.append(kv[-1, block, slot % block_size, g, : out.shape[2]])
                    homes.append(home)
                if sinks is not None:
                    scores.append(float(sinks[h]))
                    values.append(np.zeros(out.shape[2]))
                    homes.append(None)
                if not scores:
                    continue
                top = max(scores)
                weights = np.exp(np.array(scores) - top)
                lse[first + i, h] = top + math.log(weights.sum())
                weights /= weights.sum()
                out[first + i, h] = weights @ np.array(values)
                for home, weight in zip(homes, weights, strict=True):
                    if home is not None:
                        mass[first + i, h, home] += weight
    return out, lse, mass


def close(got, expected, dtype=torch.float32):
    tolerance = TOLERANCE[dtype]
    np.testing.assert_allclose(got.float().numpy(), expected, rtol=tolerance, atol=tolerance)


def tree_of(step, window=None):
    return Tree(trees.ancestors_of_columns(step.offsets.numpy(), np.concatenate(step.parents)), window)


@pytest.fixture(params=PATHS)
def attention(request):
    path = PATHS[request.param]
    if request.param == "reference":
        return path
    return lambda *args, **options: path(*args, **options, want_lse=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("path", PATHS)
def test_causal_rows_of_every_kind_of_batch(path, batch, dtype):
    step = make(BATCHES[batch], dtype=dtype, runs=batch == "long decode")
    got = PATHS[path](*step.arguments(), Causal())
    out, lse, _ = naive(step, Causal())
    assert got.out.dtype == dtype
    close(got.out, out, dtype)
    if path == "reference":
        close(got.lse, lse, dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "block_size"),
    [(9, 3, 64, 16), (1, 1, 8, 1), (6, 1, 24, 5), (8, 8, 16, 32), (4, 2, 7, 3)],
)
@pytest.mark.parametrize("tiled", [False, True])
def test_shapes_and_head_mappings(attention, heads, kv_heads, width, block_size, tiled):
    step = make([(11, 3), (0, 1), (20, 18)], heads, kv_heads, width, block_size)
    got = attention(*step.arguments(), Causal(), tiled=tiled, scale=0.3)
    out, lse, _ = naive(step, Causal(), scale=0.3, tiled=tiled)
    close(got.out, out)
    close(got.lse, lse)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("size", "sinks"), [(1, 0), (7, 0), (16, 4), (40, 20), (5000, 0), (3, 1)])
def test_windows_with_and_without_sinks(size, sinks, lse, dtype):
    step = make(BATCHES["mixed"], dtype=dtype)
    expected = naive(step, Window(size, sinks))
    close(contract.attention(*step.arguments(), Window(size, sinks)).out, expected[0], dtype)
    got = attention_cpu.attention(*step.arguments(), Window(size, sinks), want_lse=lse)
    close(got.out, expected[0], dtype)
    if lse:
        close(got.lse, expected[1], dtype)


def test_blocks_that_a_window_has_left_may_be_absent(attention):
    step = make([(90, 1), (70, 20)])
    step.tables[0, :4] = -1  # positions up to 63; the window of position 90 begins at 81
    step.tables[1, 1:3] = -1  # 16 to 47; that of position 70 at 61, sinks up to 4
    expected = naive(step, Window(10, 4), blocks_read=[{4, 5}, {0, 3, 4, 5}])
    close(attention(*step.arguments(), Window(10)).out[:1], naive(step, Window(10))[0][:1])
    step.tables[0, 0] = step.tables[1, 0]
    got = attention(*step.arguments(), Window(10, 4))
    close(got.out[1:], expected[0][1:])
    with pytest.raises(ValueError, match="sequence 0: a visible slot"):
        attention(*step.arguments(), Causal())


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("window", [None, Window(6), Window(4, 3)])
def test_trees_see_their_ancestors_and_the_context(window, lse, dtype):
    step = make([(9, 5), (0, 12), (40, 1), (30, 64), (3, 70)], tree=True, dtype=dtype)
    mask = tree_of(step, window)
    expected = naive(step, mask)
    close(contract.attention(*step.arguments(), mask).out, expected[0], dtype)
    got = attention_cpu.attention(*step.arguments(), mask, want_lse=lse)
    close(got.out, expected[0], dtype)
    if lse:
        close(got.lse, expected[1], dtype)
    as_tensor = Tree(torch.from_numpy(mask.ancestors.view(np.int64)), window)
    assert torch.equal(
        contract.attention(*step.arguments(), as_tensor).out, contract.attention(*step.arguments(), mask).out
    )


@pytest.mark.parametrize("mask", ["causal", Window(9), Window(20, 3), "tree", Block()])
def test_chunks_far_into_a_prompt_are_computed_in_parts(mask, monkeypatch):
    """Bounded masks: parts of a chain that see the parts before them; what is no chain stays whole."""
    step = make([(40, 90), (3, 5), (0, 70), (100, 33)], tree=mask == "tree")
    mask = {"causal": Causal(), "tree": tree_of(step) if mask == "tree" else None}.get(mask, mask)
    whole = attention_cpu.plan(*step.arguments()[2:], mask, 16, torch.float32)
    monkeypatch.setattr(attention_cpu, "_SEEN", 3000)
    parts = attention_cpu.plan(*step.arguments()[2:], mask, 16, torch.float32)
    assert (len(parts.calls) > len(whole.calls)) is not isinstance(mask, Block)
    assert isinstance(mask, Block) or all(c.seen is None or c.seen.numel() <= 3 * 3000 for c in parts.calls)
    got = attention_cpu.attention(*step.arguments(), mask, want_lse=True)
    out, lse, _ = naive(step, mask)
    close(got.out, out)
    close(got.lse, lse)


@pytest.mark.parametrize("window", [None, Window(12, 2)])
def test_block_rows_see_each_other(attention, window):
    step = make([(9, 8), (0, 30), (40, 1)])
    got = attention(*step.arguments(), Block(window))
    out, lse, _ = naive(step, Block(window))
    close(got.out, out)
    close(got.lse, lse)


@pytest.mark.parametrize("mask", [Causal(), Window(9, 2)])
@pytest.mark.parametrize("tiled", [False, True])
def test_softcap_and_sink_logits(attention, mask, tiled):
    step = make(BATCHES["mixed"], heads=6)
    sinks = torch.tensor([0.0, 1.0, -2.0, 5.0, 0.3, -math.inf])
    got = attention(*step.arguments(), mask, softcap=1.5, sinks=sinks, tiled=tiled)
    out, lse, _ = naive(step, mask, softcap=1.5, sinks=sinks, tiled=tiled)
    close(got.out, out)
    close(got.lse, lse)


@pytest.mark.parametrize("lse", [False, True])
def test_the_latent_form_takes_values_from_the_keys(lse):
    step = make([(20, 1), (0, 25), (33, 3)], heads=5, kv_heads=1, width=48, latent=True)
    expected = naive(step, Causal(), scale=0.2, value_width=40)
    close(contract.attention(*step.arguments(), Causal(), scale=0.2, value_width=40).out, expected[0])
    got = attention_cpu.attention(*step.arguments(), Causal(), scale=0.2, value_width=40, want_lse=lse)
    assert got.out.shape == (29, 5, 40)
    close(got.out, expected[0])


def test_masses_are_the_weights_of_the_blocks():
    step = make(BATCHES["mixed"])
    got = contract.attention(*step.arguments(), Causal(), want_mass=True)
    close(got.block_mass, naive(step, Causal())[2])
    close(got.block_mass.sum(dim=-1), np.ones((35, 4)))
    sinks = torch.zeros(4)
    got = contract.attention(*step.arguments(), Causal(), want_mass=True, sinks=sinks)
    close(got.block_mass, naive(step, Causal(), sinks=sinks)[2])


def test_selected_blocks_are_read_and_no_others():
    step = make([(60, 4), (0, 20), (100, 1)])
    select = torch.tensor([[0, 3, -1], [1, -1, -1], [5, 6, 2]], dtype=torch.int32)
    chosen = [{0, 3}, {1}, {2, 5, 6}]
    got = contract.attention(*step.arguments(), Causal(), select, want_mass=True)
    out, lse, mass = naive(step, Causal(), blocks_read=chosen)
    close(got.out, out)
    close(got.lse, lse)
    close(got.block_mass, mass)
    blind = slice(4, 20)  # of sequence 1 only block 1 is read: its first 16 rows see nothing
    assert (got.out[blind] == 0).all()
    assert (got.lse[blind] == -math.inf).all()
    with pytest.raises(ValueError, match="sequence 0: selected block 99"):
        contract.attention(*step.arguments(), Causal(), torch.full((3, 1), 99, dtype=torch.int32))


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_parts_merge_into_the_whole(dtype):
    step = make([(60, 4), (0, 20), (100, 1)], dtype=dtype)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    whole = contract.attention(*step.arguments(), Causal(), want_mass=True, sinks=sinks)
    even, odd = torch.arange(0, 9, 2, dtype=torch.int32), torch.arange(1, 9, 2, dtype=torch.int32)
    parts = [
        contract.attention(*step.arguments(), Causal(), even.expand(3, -1), want_mass=True, sinks=sinks),
        contract.attention(*step.arguments(), Causal(), odd.expand(3, -1), want_mass=True),
    ]
    merged = merge(parts)
    assert merged.out.dtype == dtype
    close(merged.out, whole.out.float().numpy(), dtype)
    close(merged.lse, whole.lse.numpy())
    close(merged.block_mass, whole.block_mass.numpy())
    nothing = Attended(torch.zeros(1, 2, 3), torch.full((1, 2), -math.inf))
    assert (merge([nothing, nothing]).out == 0).all()
    assert merge([parts[0], parts[1]._replace(block_mass=None)]).block_mass is None


@pytest.mark.parametrize(("path", "stale"), [("reference", math.nan), ("cpu", 1e4)])
def test_stale_numbers_in_slots_that_nobody_sees_do_no_harm(path, stale):
    step = make([(20, 1), (0, 3), (40, 1)])
    expected = naive(step, Causal())[0]
    seen = torch.zeros(step.kv.shape[1:3], dtype=torch.bool)
    for r, slots in enumerate((21, 3, 41)):
        for slot in range(slots):
            seen[int(step.tables[r, slot // 16]), slot % 16] = True
    step.kv[:, ~seen] = stale
    close(PATHS[path](*step.arguments(), Causal()).out, expected)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("kind", ["causal", "tree", "block", "softcap"])
def test_a_beginning_that_sequences_share_is_read_once(kind, lse, dtype, monkeypatch):
    """Two groups with beginnings of their own, one of them not in a run, beside others that share nothing."""
    step = make([(330, 1), (200, 1), (300, 4), (150, 3), (20, 1), (290, 1), (0, 30), (160, 1)], dtype=dtype,
                tree=kind == "tree")
    tables = step.tables.clone()
    tables[2, :17], tables[5, :16], tables[3, :9] = tables[0, :17], tables[0, :16], tables[7, :9]
    step = step._replace(tables=tables)
    mask = {"tree": tree_of(step), "block": Block()}.get(kind, Causal())
    options = {"softcap": 3.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])} if kind == "softcap" else {}
    made = attention_cpu.plan(*step.arguments()[2:], mask, 16, dtype)
    assert sorted((call.shape[1], call.slots) for call in made.calls if call.prefix) == [(4, 144), (6, 256)]
    got = attention_cpu.attention(*step.arguments(), mask, want_lse=lse, **options)
    out, total, _ = naive(step, mask, **options)
    close(got.out, out, dtype)
    assert len(got.lse) == (len(out) if lse else 0)
    if lse:
        close(got.lse, total, dtype)


def test_a_plan_serves_every_layer_of_its_step():
    step = make(BATCHES["mixed"])
    made = attention_cpu.plan(
        step.tables.numpy(), step.offsets.numpy(), step.positions.numpy(), Causal(), 16, step.q.dtype
    )
    other = step._replace(q=step.q.flip(0), kv=step.kv.flip(4))
    for layer in (step, other):
        close(attention_cpu.attend(layer.q, layer.kv, made).out, naive(layer, Causal())[0])


def test_blocks_in_a_run_are_read_in_place():
    step = make([(2000, 1), (1900, 1), (0, 30)], runs=True)
    made = attention_cpu.plan(step.tables, step.offsets, step.positions, Causal(), 16, step.q.dtype)
    assert all(isinstance(call.blocks, slice) for call in made.calls)
    assert sorted(call.shape for call in made.calls) == [(1, 1), (1, 1), (1, 30)]


def test_what_the_cpu_path_cannot_do_it_refuses():
    step = make(BATCHES["one"])
    with pytest.raises(NotSupported):
        attention_cpu.attention(*step.arguments(), Causal(), torch.zeros(1, 1, dtype=torch.int32))
    with pytest.raises(NotSupported):
        attention_cpu.attention(*step.arguments(), Causal(), want_mass=True)


def test_shapes_that_do_not_fit_are_refused(attention):
    step = make([(3, 2)])
    q, kv, tables, offsets, positions = step.arguments()
    with pytest.raises(ValueError, match="and kv"):
        attention(q, kv[0], tables, offsets, positions, Causal())
    with pytest.raises(ValueError, match="do not fit"):
        attention(q[:, :3], kv, tables, offsets, positions, Causal())
    with pytest.raises(ValueError, match="value_width"):
        attention(q, kv, tables, offsets, positions, Causal(), value_width=3)
    with pytest.raises(ValueError, match="value_width"):
        attention(q, kv[:1], tables, offsets, positions, Causal())
    with pytest.raises(ValueError, match="row offsets"):
        attention(q, kv, tables, offsets[:1], positions, Causal())
    with pytest.raises(ValueError, match="sinks"):
        attention(q, kv, tables, offsets, positions, Causal(), sinks=torch.zeros(3))
    with pytest.raises(ValueError, match="sequence 0"):
        attention(q, kv, tables[:, :0], offsets, positions, Causal())
    for wrong in ((0, 0), (4, -1)):
        with pytest.raises(ValueError, match="window"):
            Window(*wrong)
