"""Counter-based randomness: Philox4x32-10 words, and how a word becomes a uniform and a Gumbel number.

It does not know logits, filters or requests; every number is a function of what the caller names.

**Key and counter.** key = effective seed (low word first); counter = (token id // 4, absolute position, sample
index, purpose); the word of token id t is word t % 4 of that block, so that one block serves four ids.

**Uniform.** A word w becomes ``v = clip(float32(w) * 2^-32, 2^-33, 1 - 2^-24)``: the conversion rounds to nearest
even, the product is exact, so every device gets the same bits. v counts from the top: u = 1 - v is the uniform
of the Gumbel number -log(-log(u)). A small v, which makes a large Gumbel number, therefore has a resolution of
2^-33; a float32 u near 1 would have 2^-24, and with 150 000 ids of equal weight one argmax in a hundred would be a tie.

**Gumbel.** ``g = -log(-log1p(-v))`` in float64, rounded once to float32: two maths libraries that differ by an ulp of
float64 round to the same float32 but for about one word in 2^28.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]
U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.integer]

COUPLED = 0
"""Purpose word of the noise that ``coupled`` acceptance and coupled drafters share. Other uses take other words."""

LANES = 4  # words, and token ids, per block

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))  # golden ratio, sqrt(3) - 1
_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_CHUNK = 4096  # blocks: eight 32 KiB arrays, which stay in the second-level cache

_V_MIN = np.float32(2.0**-33)
_V_MAX = np.float32(1.0 - 2.0**-24)  # the largest float32 below 1


class Stream(NamedTuple):
    """What keys a row's noise; equal-length columns or arrays that broadcast. Units: index; position in tokens."""

    seed: U64  # effective seed, all 64 bits used
    sample: Ints  # sample index within the request, 0 <= n < 2^32
    position: Ints  # absolute position of the token that is being chosen

    def at(self, rows: Ints) -> "Stream":
        """Return the streams of ``rows`` [M]."""
        return Stream(self.seed[rows], self.sample[rows], self.position[rows])


def philox(counter: tuple[U64, U64, U64, U64], key: tuple[U64, U64]) -> tuple[U64, U64, U64, U64]:
    """Return the four output words, as uint64 arrays of values below 2^32, in the broadcast shape of the inputs.

    Philox4x32 with 10 rounds: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    All inputs hold 32-bit values in uint64 arrays.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0 = c0 * _MULTIPLIERS[0]
        p1 = c2 * _MULTIPLIERS[1]
        c0, c1 = (p1 >> _SHIFT) ^ (c1 ^ k0), p1 & _LOW
        c2, c3 = (p0 >> _SHIFT) ^ (c3 ^ k1), p0 & _LOW
        k0 = (k0 + _WEYL[0]) & _LOW
        k1 = (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def block_words(blocks: Ints, stream: Stream, purpose: int = COUPLED) -> tuple[U64, U64, U64, U64]:
    """Return the words of token ids 4b, 4b+1, 4b+2, 4b+3 for each block b; ``blocks`` and ``stream`` broadcast."""
    seed = np.asarray(stream.seed, np.uint64)
    counter = (_u64(blocks), _u64(stream.position), _u64(stream.sample), np.asarray(purpose, np.uint64) & _LOW)
    return philox(counter, (seed & _LOW, seed >> _SHIFT))


def words_at(ids: Ints, stream: Stream, purpose: int = COUPLED) -> U32:
    """Return one word per token id; ``ids`` and the columns of ``stream`` broadcast, e.g. all [M]."""
    lane = np.asarray(ids) % LANES
    lanes = block_words(np.asarray(ids) // LANES, stream, purpose)
    return np.choose(lane, lanes).astype(np.uint32)


def words_of_rows(vocabulary: int, stream: Stream, purpose: int = COUPLED) -> U32:
    """Return [R, vocabulary] words, one per token id and row; the columns of ``stream`` are [R]."""
    rows = len(stream.seed)
    blocks = -(-vocabulary // LANES)
    out = np.empty((rows, blocks, LANES), np.uint32)
    for row in range(rows):
        one = stream.at(np.array([row]))
        for start in range(0, blocks, _CHUNK):
            end = min(start + _CHUNK, blocks)
            for lane, words in enumerate(block_words(np.arange(start, end), one, purpose)):
                out[row, start:end, lane] = words
    return out.reshape(rows, blocks * LANES)[:, :vocabulary]


def uniform(words: U32 | U64) -> F32:
    """Return v in (0, 1), see the module's docstring; the shape of ``words``, whose values are below 2^32."""
    v: F32 = words.astype(np.uint32, copy=False).astype(np.float32) * np.float32(2.0**-32)
    return np.minimum(np.maximum(v, _V_MIN), _V_MAX)


def gumbel(words: U32 | U64) -> F32:
    """Return standard Gumbel numbers, see the module's docstring; the shape of ``words``."""
    v = uniform(words).astype(np.float64)
    noise: F32 = (-np.log(-np.log1p(-v))).astype(np.float32)
    return noise


def noise_at(ids: Ints, stream: Stream, purpose: int = COUPLED) -> F32:
    """Return the Gumbel number of each token id; the same values that ``noise_of_rows`` has in those places."""
    return gumbel(words_at(ids, stream, purpose))


def noise_of_rows(vocabulary: int, stream: Stream, purpose: int = COUPLED) -> F32:
    """Return Gumbel numbers [R, vocabulary] for R streams."""
    return gumbel(words_of_rows(vocabulary, stream, purpose))


LARGEST = math.nextafter(-math.log(-math.log1p(-(2.0**-33))), math.inf)
"""No Gumbel number is above this (33 log 2 = 22.87): it belongs to the word 0."""


def _u64(values: Ints) -> U64:
    return np.asarray(values).astype(np.uint64) & _LOW
