"""Filtering against Hugging Face's warpers, the pruned choice against the plain one, the reduced against the full."""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from antiphon.kernels import philox
from antiphon.kernels.sampling import BadLogits, choose, choose_reduced, filter, reduce, sampling  # noqa: A004

CUTS = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 50, "temperature": 0.9},
    {"top_p": 0.05},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.7},
    {"top_k": 20, "top_p": 0.6},
    {"top_k": 10**6, "top_p": 0.95, "temperature": 0.3},
]


def random_logits(rows, vocabulary, seed=0, spread=3.0):
    return (np.random.default_rng(seed).standard_normal((rows, vocabulary)) * spread).astype(np.float32)


def plain_choice(logits, params):
    """The definition without any shortcut: noise for every token, argmax over the survivors."""
    left = filter(logits, params)
    chosen = []
    for row in range(len(logits)):
        ids = left.ids[left.offsets[row] : left.offsets[row + 1]]
        if params.temperature[row] == 0:
            chosen.append(int(ids[0]))
            continue
        noise = philox.noise_of_rows(logits.shape[1], params.stream().at(np.array([row])))[0]
        z = (logits[row] - logits[row].max()) / params.temperature[row]
        scores = np.full(logits.shape[1], -np.inf)
        scores[ids] = z[ids].astype(np.float64) + noise[ids]
        chosen.append(int(scores.argmax()))
    return chosen


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("vocabulary", [7, 300, 5000])
def test_filter_agrees_with_hugging_face(cut, vocabulary):
    logits = random_logits(4, vocabulary, vocabulary)
    left = filter(logits, sampling(4, **cut))
    scores = torch.from_numpy(logits).double()
    if "temperature" in cut:
        scores = TemperatureLogitsWarper(cut["temperature"])(None, scores)
    if "top_k" in cut:
        scores = TopKLogitsWarper(cut["top_k"])(None, scores)
    if "top_p" in cut:
        scores = TopPLogitsWarper(cut["top_p"])(None, scores)
    expected = torch.log_softmax(scores, dim=-1).numpy()
    for row in range(4):
        part = slice(left.offsets[row], left.offsets[row + 1])
        assert left.ids[part].tolist() == np.flatnonzero(expected[row] > -np.inf).tolist()
        np.testing.assert_allclose(left.logprobs[part], expected[row][left.ids[part]], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("logits", "cut", "expected"),
    [
        ([1, 2, 2, 2, 0], {"top_k": 2}, [1, 2]),
        ([1, 1, 1, 1], {"top_k": 3}, [0, 1, 2]),
        ([0, 0, 0, 0], {"top_p": 0.5}, [0, 1]),
        ([0, 0, 0, 0], {"top_p": 0.51}, [0, 1, 2]),
        ([0] * 10, {"top_p": 0.3}, [0, 1, 2]),
        ([0, 5, 0, 5], {"top_p": 0.4}, [1]),
        ([0, 5, 0, 5], {"top_p": 1e-9}, [1]),
        ([0, 5, 0, 5], {"temperature": 0}, [1]),
        ([-math.inf, 1, -math.inf, 0], {}, [1, 3]),
        ([-math.inf, 1, -math.inf, 0], {"top_k": 3}, [1, 3]),
        ([-math.inf, 1, -math.inf, 0], {"top_p": 0.9999999}, [1, 3]),
        ([1000.0, -1000.0, 0.0], {"temperature": 1e-37}, [0]),
        ([3], {"top_p": 0.5, "top_k": 1}, [0]),
    ],
)
def test_ties_masks_and_edges(logits, cut, expected):
    assert filter(np.array([logits], np.float32), sampling(1, **cut)).ids.tolist() == expected


@pytest.mark.parametrize("k", [1, 3, 100, 1000, 4000])
def test_top_k_keeps_the_smaller_ids_of_many_equal_logits(k):
    logits = np.random.default_rng(k).integers(0, 9, (1, 50_001)).astype(np.float32)
    order = np.lexsort((np.arange(50_001), -logits[0]))[:k]
    assert filter(logits, sampling(1, top_k=k)).ids.tolist() == sorted(order.tolist())


@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 8.0])
@pytest.mark.parametrize("p", [0.01, 0.5, 0.9, 0.9999])
def test_top_p_is_the_smallest_set_that_reaches_p(spread, p):
    logits = np.round(random_logits(1, 20_000, 5, spread), 2)  # rounding makes ties
    order = np.lexsort((np.arange(20_000), -logits[0]))
    mass = np.exp(logits[0, order].astype(np.float64) - logits.max())
    sums = np.cumsum(mass) / mass.sum()
    left = filter(logits, sampling(1, top_p=p))
    count = left.ids.size
    assert left.ids.tolist() == sorted(order[:count].tolist())
    assert sums[count - 1] >= p - 1e-6
    assert count == 1 or sums[count - 2] < p + 1e-6


def test_greedy_takes_the_first_of_equal_logits():
    logits = np.array([[0, 3, 3], [3, 3, 3], [-math.inf, -5, -5]], np.float32)
    assert choose(logits, sampling(3, temperature=0)).tolist() == [1, 0, 1]


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("vocabulary", [1, 6, 1021, 30_000])
def test_the_quick_choice_is_the_plain_one(cut, vocabulary):
    rows = 6
    logits = random_logits(rows, vocabulary, vocabulary + 1)
    logits[1] = np.round(logits[1])  # ties
    logits[2, 1:] = -np.inf if vocabulary > 2 else logits[2, 1:]
    logits[3] += 1e4
    params = sampling(rows, seed=np.arange(rows) * 2**40, sample=[0, 1, 2, 0, 1, 2], position=range(rows), **cut)
    assert choose(logits, params).tolist() == plain_choice(logits, params)


@pytest.mark.parametrize("spread", [0.0, 0.3, 2.0, 10.0])
def test_pruning_is_exact_on_flat_and_steep_rows(spread):
    logits = random_logits(24, 9001, 3, spread)
    params = sampling(24, seed=5, position=np.arange(24))
    assert choose(logits, params).tolist() == plain_choice(logits, params)


def test_a_batch_of_unlike_rows_gives_what_each_row_gives_alone():
    rows = 24
    rng = np.random.default_rng(9)
    logits = random_logits(rows, 4001, 8)
    params = sampling(
        rows,
        temperature=rng.choice([0, 0.5, 1.0, 1.5], rows),
        top_k=rng.choice([0, 1, 7, 3000], rows),
        top_p=rng.choice([0.3, 0.95, 1.0], rows),
        seed=rng.integers(0, 2**63, rows),
        sample=rng.integers(0, 4, rows),
        position=rng.integers(0, 9999, rows),
    )
    together = choose(logits, params).tolist()
    assert together == plain_choice(logits, params)
    for row in range(rows):
        alone = np.array([row])
        assert choose(logits[alone], params.take(alone)).tolist() == [together[row]]


@pytest.mark.parametrize("vocabulary", [5, 4001])
def test_the_reduced_form_chooses_the_same(vocabulary):
    cuts = [cut | {"temperature": heat} for cut in CUTS for heat in (0.0, 0.8, 1.0)]
    logits = random_logits(len(cuts), vocabulary, 4)
    logits[::4, ::3] = -np.inf
    params = sampling(
        len(cuts),
        temperature=[cut["temperature"] for cut in cuts],
        top_k=[cut.get("top_k", 0) for cut in cuts],
        top_p=[cut.get("top_p", 1.0) for cut in cuts],
        seed=77,
        position=np.arange(len(cuts)),
    )
    reduced = reduce(logits, params)
    assert choose_reduced(reduced, params).tolist() == choose(logits, params).tolist()
    sizes = np.diff(reduced.offsets)
    assert (sizes[params.temperature == 0] == 1).all()
    assert (sizes[reduced.full] == vocabulary).all()
    assert reduced.ids.size == sizes[~reduced.full].sum()
    only = np.flatnonzero(params.temperature == 0)
    assert reduce(logits[only], params.take(only)).ids.tolist() == logits[only].argmax(axis=1).tolist()


def test_choices_have_the_distribution_of_the_filtered_softmax():
    logits = np.array([[0.0, 1.0, -1.0, 2.0, -3.0]], np.float32)
    draws = 20_000
    for cut in ({}, {"temperature": 2.0}, {"top_p": 0.9}, {"top_k": 3, "temperature": 0.5}):
        params = sampling(draws, seed=3, position=np.arange(draws), **cut)
        counts = np.bincount(choose(np.repeat(logits, draws, axis=0), params), minlength=5)
        left = filter(logits, sampling(1, **cut))
        expected = np.zeros(5)
        expected[left.ids] = np.exp(left.logprobs) * draws
        assert (counts[expected == 0] == 0).all()
        live = expected > 0
        chi = ((counts[live] - expected[live]) ** 2 / expected[live]).sum()
        assert chi < 25  # 4 degrees of freedom: chance 5e-5


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "reason"), [([0, math.nan, math.inf], "NaN"), ([math.inf, 0, 0], "inf"), ([-math.inf] * 3, "masked")]
)
def test_rows_that_cannot_be_chosen_from_are_named(heat, row, reason):
    logits = np.zeros((3, 3), np.float32)
    logits[1] = row
    for function in (choose, filter, reduce):
        with pytest.raises(BadLogits, match=rf"row 1: .*{reason}") as caught:
            function(logits, sampling(3, temperature=heat))
        assert caught.value.rows == [1]


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1}, {"temperature": math.nan}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.1}]
)
def test_wrong_parameters_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sampling(2, **wrong)


def test_logits_of_another_shape_or_type_are_refused():
    with pytest.raises(ValueError, match="float32"):
        choose(np.zeros((2, 3)), sampling(2))
    with pytest.raises(ValueError, match="2 rows"):
        choose(np.zeros((2, 3), np.float32), sampling(3))


def test_reduced_columns_that_do_not_fit_are_refused():
    params = sampling(3, temperature=[0, 1, 1], top_k=[0, 2, 0])
    good = reduce(random_logits(3, 9), params)
    for wrong in (
        good._replace(offsets=good.offsets[:-1]),
        good._replace(offsets=good.offsets[::-1].copy()),
        good._replace(logits=good.logits[:-1]),
        good._replace(ids=good.ids[:-1]),
        good._replace(ids=-1 - good.ids),
        good._replace(full=good.full[:-1]),
    ):
        with pytest.raises(ValueError, match="reduced logits of 3 rows"):
            choose_reduced(wrong, params)
    logits = good.logits.copy()
    logits[1] = math.nan
    with pytest.raises(BadLogits, match="row 1"):
        choose_reduced(good._replace(logits=logits), params)


def test_no_rows_give_no_ids():
    nothing = np.zeros((0, 5), np.float32)
    assert choose(nothing, sampling(0)).size == 0
    assert choose_reduced(reduce(nothing, sampling(0)), sampling(0)).size == 0
    assert filter(nothing, sampling(0)).ids.size == 0
