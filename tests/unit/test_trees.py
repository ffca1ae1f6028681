"""Ancestor masks, depths and walks against definitions written out by hand."""

import numpy as np
import pytest

from antiphon.kernels import trees
from antiphon.kernels.trees import TreeError


def random_tree(rng, rows):
    return np.array([-1] + [int(rng.integers(0, row)) for row in range(1, rows)], np.int32)


def path(parents, row):
    out = [row]
    while parents[out[-1]] >= 0:
        out.append(int(parents[out[-1]]))
    return out


def plain_walk(tokens, parents, chosen):
    rows, ids, at = [0], [], 0
    while True:
        ids.append(int(chosen[at]))
        children = [row for row in range(len(parents)) if parents[row] == at and tokens[row] == chosen[at]]
        if not children:
            return rows, ids
        at = children[0]
        rows.append(at)


@pytest.mark.parametrize("rows", [1, 2, 5, 33, 63, 64])
def test_masks_and_depths_are_those_of_the_path_to_the_root(rows):
    for seed in range(5):
        parents = random_tree(np.random.default_rng(seed), rows)
        masks, deep = trees.ancestors(parents), trees.depths(parents)
        assert masks.dtype == np.uint64
        for row in range(rows):
            assert int(masks[row]) == sum(1 << above for above in path(parents, row))
            assert deep[row] == len(path(parents, row)) - 1


def test_a_chain_sees_all_rows_up_to_itself():
    parents = np.arange(64, dtype=np.int32) - 1
    assert trees.ancestors(parents).tolist() == [(2 << row) - 1 for row in range(64)] == trees.chain(64).tolist()
    assert trees.depths(parents).tolist() == list(range(64))
    assert trees.chain(0).size == 0
    assert trees.is_chain(np.array([0, 64]), parents)
    assert not trees.is_chain(np.array([0, 3]), np.array([-1, 0, 0]))


def test_columns_give_what_each_sequence_gives():
    rng = np.random.default_rng(3)
    parts = [random_tree(rng, rows) for rows in (1, 64, 7, 1, 20)] + [np.array([-1, -1, 0, 1], np.int32)]
    offsets = np.concatenate(([0], np.cumsum([len(part) for part in parts])))
    masks = trees.ancestors_of_columns(offsets, np.concatenate(parts))
    deep = trees.depths_of_columns(offsets, np.concatenate(parts))
    assert masks.tolist() == np.concatenate([trees.ancestors(part) for part in parts]).tolist()
    assert deep.tolist() == np.concatenate([trees.depths(part) for part in parts]).tolist()


def test_a_long_chain_beside_trees_is_plainly_causal():
    chunk = np.arange(100, dtype=np.int32) - 1
    parents = np.concatenate((chunk, np.array([-1, 0, 0], np.int32)))
    offsets = np.array([0, 100, 103])
    masks = trees.ancestors_of_columns(offsets, parents)
    assert (masks[:100] == trees.CAUSAL).all()
    assert masks[100:].tolist() == [0b1, 0b11, 0b101]
    assert trees.depths_of_columns(offsets, parents).tolist() == [*range(100), 0, 1, 1]


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([0], "parent of row 0 is 0"),
        ([-1, 2, 0], "parent of row 1 is 2"),
        ([-1, -2], "parent of row 1 is -2"),
        ([-1] * 65, "65 rows"),
    ],
)
def test_what_is_no_tree_is_refused(parents, message):
    with pytest.raises(TreeError, match=message):
        trees.ancestors(np.array(parents, np.int32))
    with pytest.raises(TreeError, match=f"sequence 1: .*{message}"):
        trees.ancestors_of_columns(np.array([0, 2, 2 + len(parents)]), np.array([-1, 0, *parents], np.int32))


def test_a_walk_needs_row_0_as_its_only_root_and_no_empty_sequence():
    with pytest.raises(TreeError, match="sequence 0: row 1 is a second root"):
        trees.walk(np.array([1, 2]), np.array([-1, -1]), np.array([2, 3]))
    with pytest.raises(TreeError, match="sequence 1 has no rows"):
        trees.walk_columns(np.array([0, 2, 2]), np.array([1, 2]), np.array([-1, 0]), np.array([2, 3]))
    with pytest.raises(TreeError, match="2 tokens"):
        trees.walk(np.array([1, 2]), np.array([-1]), np.array([2]))
    with pytest.raises(TreeError, match="65 rows"):
        trees.chain(65)


def test_walks_by_hand():
    def walk(tokens, parents, chosen):
        rows, ids = trees.walk(np.array(tokens), np.array(parents), np.array(chosen))
        return rows.tolist(), ids.tolist()

    assert walk([5], [-1], [9]) == ([0], [9])
    assert walk([5, 6, 7], [-1, 0, 1], [6, 7, 8]) == ([0, 1, 2], [6, 7, 8])
    assert walk([5, 6, 7], [-1, 0, 1], [6, 0, 8]) == ([0, 1], [6, 0])
    assert walk([5, 6, 7], [-1, 0, 1], [7, 7, 8]) == ([0], [7])
    # equal tokens among siblings: the first in row order is taken, though only the second has a child that fits
    assert walk([5, 6, 6, 7], [-1, 0, 0, 2], [6, 7, 7, 8]) == ([0, 1], [6, 7])
    assert walk([5, 1, 2, 3, 4], [-1, 0, 0, 1, 2], [2, 3, 4, 0, 9]) == ([0, 2, 4], [2, 4, 9])


@pytest.mark.parametrize("choices", [1, 2, 3])
def test_columns_walk_as_each_sequence_does(choices):
    rng = np.random.default_rng(choices)
    for _ in range(20):
        parts = [random_tree(rng, int(rng.integers(1, 65))) for _ in range(int(rng.integers(1, 9)))]
        offsets = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int32)
        tokens = rng.integers(0, choices, offsets[-1]).astype(np.int32)
        chosen = rng.integers(0, choices, offsets[-1]).astype(np.int32)
        walked = trees.walk_columns(offsets, tokens, np.concatenate(parts), chosen)
        for r, part in enumerate(parts):
            rows, ids = plain_walk(tokens[offsets[r] :], part, chosen[offsets[r] :])
            share = slice(walked.offsets[r], walked.offsets[r + 1])
            assert walked.rows[share].tolist() == rows
            assert walked.ids[share].tolist() == ids
            assert walked.counts[r] == len(ids)


def test_empty_drafts_emit_what_was_chosen():
    offsets = np.arange(5)
    walked = trees.walk_columns(offsets, np.zeros(4, np.int32), np.full(4, -1, np.int32), np.array([3, 1, 4, 1]))
    assert walked.counts.tolist() == [1] * 4
    assert walked.ids.tolist() == [3, 1, 4, 1]
    assert walked.rows.tolist() == [0] * 4
    assert trees.walk_columns(np.array([0]), *[np.zeros(0, np.int32)] * 3).counts.size == 0
