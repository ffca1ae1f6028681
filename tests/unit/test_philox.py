"""Philox against its published vectors, the uniform against its bits, rows against single ids."""

import math

import numpy as np
import pytest

from antiphon.kernels import philox
from antiphon.kernels.philox import Stream

# Random123 1.09, kat_vectors, "philox4x32 10".
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


def stream(seeds, samples, positions):
    return Stream(np.array(seeds, np.uint64), np.array(samples), np.array(positions))


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_published_vectors(counter, key, expected):
    words = philox.philox(
        tuple(np.array([c], np.uint64) for c in counter), tuple(np.array([k], np.uint64) for k in key)
    )
    assert tuple(int(word[0]) for word in words) == expected


def test_the_layout_of_key_and_counter_is_the_documented_one():
    seed, sample, position, purpose, token = 0x299F31D0_A4093822, 0x13198A2E, 0x85A308D3, 0x03707344, 4 * 0x43F6A88 + 2
    words = philox.words_at(np.array([token]), stream([seed], [sample], [position]), purpose)
    parts = [token // 4, position, sample, purpose]
    key = (np.array([0xA4093822], np.uint64), np.array([0x299F31D0], np.uint64))
    assert words[0] == philox.philox(tuple(np.array([part], np.uint64) for part in parts), key)[2][0]


def test_the_uniform_is_defined_by_its_bits():
    words = np.array([0, 1, 2, 3, 1 << 23, (1 << 24) + 1, (1 << 24) + 3, 1 << 31, 0xFFFFFF7F, 0xFFFFFF80, 0xFFFFFFFF])
    expected = [
        2.0**-33,
        2.0**-32,
        2.0**-31,
        3 * 2.0**-32,
        2.0**-9,
        2.0**-8,  # 2^24 + 1 is halfway: to even
        2.0**-8 + 2.0**-30,  # 2^24 + 3 to 2^24 + 4
        0.5,
        1 - 2.0**-24,
        1 - 2.0**-24,  # rounds to 2^32, which is clipped
        1 - 2.0**-24,
    ]
    v = philox.uniform(words.astype(np.uint64))
    assert v.dtype == np.float32
    assert v.tolist() == expected


def test_gumbel_is_minus_log_of_minus_log_of_one_minus_v():
    words = np.random.default_rng(1).integers(0, 1 << 32, 1000).astype(np.uint32)
    exact = [-math.log(-math.log1p(-float(v))) for v in philox.uniform(words)]
    assert philox.gumbel(words).tolist() == np.array(exact).astype(np.float32).tolist()
    assert philox.gumbel(np.zeros(1, np.uint32))[0] <= philox.LARGEST < 33 * math.log(2) + 1e-9


@pytest.mark.parametrize("vocabulary", [1, 3, 4, 5, 1000, 20001])
def test_rows_and_single_ids_have_the_same_noise(vocabulary):
    rows = stream([0, 1, 2**64 - 1], [0, 3, 0], [0, 17, 2**31 - 1])
    full = philox.noise_of_rows(vocabulary, rows)
    assert full.shape == (3, vocabulary)
    ids = np.random.default_rng(2).integers(0, vocabulary, (3, 50))
    for row in range(3):
        one = rows.at(np.array([row]))
        assert np.array_equal(philox.noise_at(ids[row], one), full[row, ids[row]])
    flat = np.repeat(np.arange(3), 50)
    assert np.array_equal(philox.noise_at(ids.ravel(), rows.at(flat)), full[flat, ids.ravel()])


def test_every_part_of_the_key_changes_the_noise():
    base = {"seeds": [7], "samples": [0], "positions": [5]}
    plain = philox.words_of_rows(64, stream(**base))
    others = [base | {"seeds": [8]}, base | {"seeds": [7 + 2**32]}, base | {"samples": [1]}, base | {"positions": [6]}]
    for other in others:
        assert (philox.words_of_rows(64, stream(**other)) != plain).mean() > 0.95
    assert (philox.words_of_rows(64, stream(**base), purpose=1) != plain).mean() > 0.95


def test_uniforms_are_uniform_and_gumbels_have_their_mean():
    rows = stream([11] * 8, [0] * 8, range(8))
    v = philox.uniform(philox.words_of_rows(25_000, rows)).ravel()
    counts = np.histogram(v, bins=100, range=(0, 1))[0]
    chi = ((counts - v.size / 100) ** 2 / (v.size / 100)).sum()
    assert chi < 99 + 5 * math.sqrt(2 * 99)
    noise = philox.noise_of_rows(25_000, rows)
    assert abs(noise.mean() - 0.5772156649) < 5 * (math.pi / math.sqrt(6)) / math.sqrt(noise.size)
