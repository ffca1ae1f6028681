"""From logits to token ids: temperature, top-k, top-p, and the coupled (Gumbel-max) choice.

It does not know sequences, drafts or where the logits came from; host and device use this one implementation.

One row is processed as ``z = (logit - largest logit) / temperature`` in float32; z is the log-probability up to a
constant of the row, which no argmax sees. -inf marks a forbidden token. All ties go to the smaller id.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from antiphon.kernels import philox

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Bools = npt.NDArray[np.bool_]

_SLACK = 1e-3  # far above the float32 rounding of z + 22.87 - log(v), far below what would prune less
_BINS = 2048.0  # of z between 0 and the smallest token that a nucleus can need
_MANY = 1024  # survivors; with more, the pruned search is quicker than noise for each, which draws a block per id
_CHUNK = 4096  # Philox blocks per round of the pruned search


class BadLogits(ValueError):
    """Rows hold NaN or +inf, or nothing but -inf: the model or a mask is at fault, no token can be chosen."""

    def __init__(self, rows: list[int], reason: str) -> None:
        super().__init__(f"logits of row {', '.join(map(str, rows))}: {reason}")
        self.rows = rows


class Sampling(NamedTuple):
    """How to choose in each of R rows."""

    temperature: F32  # [R] 0 = greedy
    top_k: I32  # [R] 0 = off
    top_p: F64  # [R] 1 = off
    seed: U64  # [R] effective seed
    sample: I64  # [R] sample index within the request
    position: I64  # [R] absolute position of the token to choose

    def take(self, rows: I64 | I32) -> "Sampling":
        """Return the parameters of ``rows`` [M]."""
        return Sampling(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.seed[rows],
            self.sample[rows],
            self.position[rows],
        )

    def stream(self) -> philox.Stream:
        """Return what keys the rows' noise."""
        return philox.Stream(self.seed, self.sample, self.position)


class Survivors(NamedTuple):
    """Tokens that a row's filter leaves, ragged: row r owns ``offsets[r]:offsets[r + 1]``, ids ascending."""

    offsets: I64  # [R + 1]
    ids: I32  # [M]
    logprobs: F32  # [M] processed log-probabilities, normalised over the survivors; 0 for a greedy row's one token


class Reduced(NamedTuple):
    """What a verifier without the logits needs: argmax, survivors or, where nothing is cut, the full row."""

    offsets: I64  # [R + 1] into logits
    logits: F32  # [M] as the model gave them
    ids: I32  # ids of the logits of all rows that are not full, in row order, ascending within a row
    full: Bools  # [R] the row's logits are the whole vocabulary in order


def sampling(
    rows: int,
    temperature: npt.ArrayLike = 1.0,
    top_k: npt.ArrayLike = 0,
    top_p: npt.ArrayLike = 1.0,
    seed: npt.ArrayLike = 0,
    sample: npt.ArrayLike = 0,
    position: npt.ArrayLike = 0,
) -> Sampling:
    """Return checked parameters of ``rows`` rows; scalars serve all rows.

    Raises ValueError for a temperature below 0 or not finite, a negative top_k, a top_p outside (0, 1].
    """
    made = Sampling(
        _column(temperature, rows, np.float32),
        _column(top_k, rows, np.int32),
        _column(top_p, rows, np.float64),
        _column(seed, rows, np.uint64),
        _column(sample, rows, np.int64),
        _column(position, rows, np.int64),
    )
    if not (np.isfinite(made.temperature) & (made.temperature >= 0)).all():
        raise ValueError("temperature must be finite and at least 0")
    if (made.top_k < 0).any():
        raise ValueError("top_k must be at least 0 (0 = off)")
    if not ((made.top_p > 0) & (made.top_p <= 1)).all():
        raise ValueError("top_p must be above 0 and at most 1 (1 = off)")
    return made


def choose(logits: F32, params: Sampling) -> I32:
    """Return the chosen token id of each row, [R] int32, from ``logits`` [R, V] float32.

    A greedy row takes its largest logit; a sampled row the argmax over its survivors of processed log-probability
    plus Gumbel noise keyed by (seed, sample index, position, token id): the Gumbel-max trick with the noise fixed
    in advance, so that drafts can be checked by equality. Raises BadLogits.
    """
    ids, tops = _tops(logits, params)
    sampled = np.flatnonzero(params.temperature > 0)
    if sampled.size == 0:
        return ids
    cut = _is_cut(params, logits.shape[1])[sampled]
    rows = sampled[~cut]
    if rows.size:
        ids[rows] = _choose_uncut(_processed(logits[rows], tops[rows], params.temperature[rows]), params.take(rows))
    rows = sampled[cut]
    if rows.size:
        z = _processed(logits[rows], tops[rows], params.temperature[rows])
        taken = params.take(rows)
        kept = [_keep(z[i], int(taken.top_k[i]), float(taken.top_p[i])) for i in range(len(rows))]
        ids[rows] = _choose_ragged(_offsets(kept), np.concatenate(kept), _gather(z, kept), taken)
    return ids


def filter(logits: F32, params: Sampling) -> Survivors:  # noqa: A001 - the literature's name
    """Apply temperature, then top-k, then top-p, and return what is left of ``logits`` [R, V].

    top-k keeps the k largest; top-p keeps the smallest set, largest first, whose probability (after top-k,
    renormalised) reaches p, the token that reaches it included. At least one token is left. A greedy row keeps its
    argmax. Ties at a cut keep the smaller ids. Holtzman et al. 2019 (top-p), Fan et al. 2018 (top-k). Raises BadLogits.
    """
    ids, tops = _tops(logits, params)
    kept: list[I64] = []
    logprobs: list[F32] = []
    for row in range(len(ids)):
        if params.temperature[row] == 0:
            kept.append(ids[row : row + 1].astype(np.int64))
            logprobs.append(np.zeros(1, np.float32))
            continue
        one = slice(row, row + 1)
        z = _processed(logits[one], tops[one], params.temperature[one])[0]
        kept.append(_keep(z, int(params.top_k[row]), float(params.top_p[row])))
        left = z[kept[-1]].astype(np.float64)
        logprobs.append((left - np.log(np.exp(left).sum())).astype(np.float32))
    return Survivors(_offsets(kept), _joined(kept, np.int32), _joined(logprobs, np.float32))


def reduce(logits: F32, params: Sampling) -> Reduced:
    """Return of ``logits`` [R, V] what ``choose_reduced`` needs to choose as ``choose`` does. Raises BadLogits."""
    ids, tops = _tops(logits, params)
    cut = _is_cut(params, logits.shape[1])
    full = ~cut & (params.temperature > 0)
    kept: list[I64] = []
    parts: list[F32] = []
    sizes = np.empty(len(ids), np.int64)
    for row in range(len(ids)):
        if full[row]:
            parts.append(logits[row])
        else:
            if params.temperature[row] == 0:
                kept.append(ids[row : row + 1].astype(np.int64))
            else:
                one = slice(row, row + 1)
                z = _processed(logits[one], tops[one], params.temperature[one])[0]
                kept.append(_keep(z, int(params.top_k[row]), float(params.top_p[row])))
            parts.append(logits[row][kept[-1]])
        sizes[row] = parts[-1].size
    return Reduced(
        np.concatenate(([0], np.cumsum(sizes))),
        _joined(parts, np.float32),
        _joined(kept, np.int32),
        full,
    )


def choose_reduced(reduced: Reduced, params: Sampling) -> I32:
    """Return the ids [R] that ``choose`` returns for the logits that ``reduced`` was made from.

    Raises ValueError for columns that do not fit together: they may have come in a message.
    """
    sizes = np.diff(reduced.offsets)
    whole = reduced.offsets.size == reduced.full.size + 1 == params.seed.size + 1 and (sizes > 0).all()
    if not whole or reduced.offsets[0] != 0 or reduced.offsets[-1] != reduced.logits.size:
        raise ValueError(f"reduced logits of {params.seed.size} rows: their columns do not fit together")
    if reduced.ids.size != sizes[~reduced.full].sum() or (reduced.ids < 0).any():
        raise ValueError(f"reduced logits of {params.seed.size} rows: ids are missing or negative")
    tops = np.maximum.reduceat(reduced.logits, reduced.offsets[:-1]) if sizes.size else reduced.logits
    if not np.isfinite(tops).all():
        raise BadLogits(np.flatnonzero(~np.isfinite(tops)).tolist(), "NaN, +inf, or every token masked (-inf)")
    chosen = np.empty(len(sizes), np.int32)
    rows = np.flatnonzero(reduced.full)
    if rows.size:
        logits = np.stack([reduced.logits[reduced.offsets[r] : reduced.offsets[r + 1]] for r in rows])
        taken = params.take(rows)
        chosen[rows] = _choose_uncut(_processed(logits, tops[rows], taken.temperature), taken)
    rows = np.flatnonzero(~reduced.full)
    if rows.size:
        counts = sizes[rows]
        offsets = np.concatenate(([0], np.cumsum(counts)))
        logits = reduced.logits[np.repeat(~reduced.full, sizes)]
        taken = params.take(rows)
        # A greedy row has one token: any temperature gives the same choice.
        heat = np.where(taken.temperature > 0, taken.temperature, np.float32(1))
        z = logits - np.repeat(tops[rows], counts)
        z /= np.repeat(heat, counts)  # cannot overflow: survivors have a finite z
        chosen[rows] = _choose_ragged(offsets, reduced.ids.astype(np.int64), z, taken)
    return chosen


def _tops(logits: F32, params: Sampling) -> tuple[I32, F32]:
    """Return argmax [R] and largest logit [R]; numpy's argmax stops at the first NaN and takes the first of equals."""
    if logits.ndim != 2 or logits.dtype != np.float32 or logits.shape[1] == 0:
        raise ValueError(f"logits must be float32 [rows, vocabulary], found {logits.dtype} {logits.shape}")
    if len(logits) != len(params.temperature):
        raise ValueError(f"{len(logits)} rows of logits, parameters of {len(params.temperature)}")
    ids = logits.argmax(axis=1)
    tops = logits[np.arange(len(ids)), ids]
    if not np.isfinite(tops).all():
        wrong = np.flatnonzero(np.isnan(tops) | (tops == np.inf))
        if wrong.size:
            raise BadLogits(wrong.tolist(), "NaN or +inf")
        raise BadLogits(np.flatnonzero(tops == -np.inf).tolist(), "every token is masked (-inf)")
    return ids.astype(np.int32), tops


def _is_cut(params: Sampling, vocabulary: int) -> Bools:
    cut: Bools = ((params.top_k > 0) & (params.top_k < vocabulary)) | (params.top_p < 1)
    return cut


def _processed(logits: F32, tops: F32, temperature: F32) -> F32:
    """Return z [R, V] <= 0, its largest exactly 0: no temperature, however small, can overflow upwards."""
    z: F32 = logits - tops[:, None]
    with np.errstate(over="ignore"):  # to -inf: the token has probability 0 at so low a temperature
        z /= temperature[:, None]
    return z


def _keep(z: F32, k: int, p: float) -> I64:
    """Return the ascending ids of the survivors of one processed row [V]."""
    order: I64 | None = None
    if 0 < k < z.size:
        order = _largest(z, k)
    if p < 1:
        order = _nucleus(z, p) if order is None else order[: _reach(np.exp(z[order]), p)]
    return np.flatnonzero(z > -np.inf) if order is None else np.sort(order)


def _descending(z: F32, ids: I64) -> I64:
    """Return ascending ``ids`` by falling z; the stable sort leaves the smaller id first among equals."""
    return ids[np.argsort(-z[ids], kind="stable")]


def _largest(z: F32, k: int) -> I64:
    """Return the ids of the k largest of z [V], largest first, forbidden tokens left out."""
    values, groups = z, 1 << max(10, (8 * k).bit_length())
    if groups * 4 <= z.size:
        # k groups have a member >= the k-th largest of the groups' maxima, so k tokens lie at or above that value.
        values = z[: z.size - z.size % groups].reshape(-1, groups).max(axis=0)
    kth = np.partition(values, values.size - k)[values.size - k]
    ids = np.flatnonzero(z >= kth) if kth > -np.inf else np.flatnonzero(z > -np.inf)
    return _descending(z, ids)[:k]


def _reach(mass: F32, p: float) -> int:
    """Return how many of ``mass``, largest first, it takes to reach p of their sum."""
    sums = np.cumsum(mass, dtype=np.float64)
    return min(int(np.searchsorted(sums, p * sums[-1])) + 1, mass.size)


def _nucleus(z: F32, p: float) -> I64:
    """Return the ids of the smallest set that reaches p; in no order. Only one bin of a histogram is sorted."""
    mass = np.exp(z)
    goal = p * float(mass.sum(dtype=np.float64))
    # Tokens below floor hold less than V * floor = (1 - p) / 2 of the total, so p is reached before the first of them.
    floor = 0.5 * (1 - p) * goal / p / z.size
    ids = np.flatnonzero(mass >= floor)
    near = z[ids]
    bins = (near * (_BINS / (near.min() - np.float32(1e-3)))).astype(np.int64)  # monotone: larger z, smaller bin
    sums = np.cumsum(np.bincount(bins, mass[ids]))
    last = min(int(np.searchsorted(sums, goal)), sums.size - 1)
    within = _descending(z, ids[bins == last])
    inner = np.cumsum(mass[within], dtype=np.float64) + (sums[last - 1] if last else 0.0)
    count = min(int(np.searchsorted(inner, goal)) + 1, within.size)
    return np.concatenate((ids[bins < last], within[:count]))


def _choose_ragged(offsets: I64, ids: I64, z: F32, params: Sampling) -> I64:
    """Return the best id of each row's survivors, by z plus noise; no row is empty, ids ascend within a row."""
    counts = np.diff(offsets)
    if ids.size == counts.size:  # one survivor each
        return ids
    rows = np.repeat(np.arange(counts.size), counts)
    chosen = np.empty(counts.size, np.int64)
    many = counts > _MANY
    if many.any():
        dense = np.flatnonzero(many)
        taken = many[rows]
        full = np.full((dense.size, int(ids.max()) + 1), -np.inf, np.float32)
        full[np.repeat(np.arange(dense.size), counts[dense]), ids[taken]] = z[taken]
        chosen[dense] = _choose_uncut(full, params.take(dense))
        rows, ids, z = rows[~taken], ids[~taken], z[~taken]
    if rows.size:
        scores = z.astype(np.float64) + philox.noise_at(ids, params.stream().at(rows))
        few = np.flatnonzero(~many)
        best = np.full(counts.size, -np.inf)
        best[few] = np.maximum.reduceat(scores, np.concatenate(([0], np.cumsum(counts[few])[:-1])))
        hits = np.flatnonzero(scores == best[rows])
        owners, first = np.unique(rows[hits], return_index=True)  # the first hit of a row is its smallest id
        chosen[owners] = ids[hits[first]]
    return chosen


def _choose_uncut(z: F32, params: Sampling) -> I64:
    """Return argmax(z + noise) of each full row [R, V], drawing noise only where it can matter.

    ``best`` is a lower bound of each row's winning score, at first from the block of the most likely token. Two
    tests skip work, both exact: (1) noise never exceeds LARGEST, so a block of four ids with
    ``max z + LARGEST < best`` cannot win and needs no Philox word; (2) -log1p(-v) >= v, so noise <= -log(v), and a
    token with ``z - log(v) < best`` cannot win and needs no float64 noise. _SLACK covers the float32 rounding of
    both sides, so that equal scores always reach the exact comparison.
    """
    rows, vocabulary = z.shape
    blocks = -(-vocabulary // philox.LANES)
    if vocabulary % philox.LANES:
        z = np.pad(z, ((0, 0), (0, blocks * philox.LANES - vocabulary)), constant_values=-np.inf)
    fours = z.reshape(rows * blocks, philox.LANES)
    stream = params.stream()
    every = np.arange(rows)
    likely = every * blocks + z.argmax(axis=1) // philox.LANES
    noise = philox.gumbel(np.stack(philox.block_words(likely - every * blocks, stream), axis=1))
    best = (fours[likely].astype(np.float64) + noise).max(axis=1)

    highest = np.maximum(np.maximum(z[:, 0::4], z[:, 1::4]), np.maximum(z[:, 2::4], z[:, 3::4]))
    open_blocks = np.flatnonzero(highest >= (best - philox.LARGEST - _SLACK).astype(np.float32)[:, None])
    found: list[tuple[I64, I64, F64]] = []
    for start in range(0, open_blocks.size, _CHUNK):
        chunk = open_blocks[start : start + _CHUNK]
        owner = chunk // blocks
        words = np.stack(philox.block_words(chunk - owner * blocks, stream.at(owner)), axis=1)
        bound = fours[chunk] - np.log(philox.uniform(words))
        hits = np.flatnonzero(bound >= (best - _SLACK).astype(np.float32)[owner][:, None])
        who = owner[hits // philox.LANES]
        places = chunk[hits // philox.LANES] * philox.LANES + hits % philox.LANES
        scores = z.ravel()[places].astype(np.float64) + philox.gumbel(words.ravel()[hits])
        np.maximum.at(best, who, scores)
        found.append((who, places, scores))
    who, places, scores = (np.concatenate(column) for column in zip(*found, strict=True))
    wins = np.flatnonzero(scores == best[who])
    first = np.unique(who[wins], return_index=True)[1]  # places ascend within a row
    ids: I64 = places[wins[first]] - every * (blocks * philox.LANES)
    return ids


def _column(values: npt.ArrayLike, rows: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.ascontiguousarray(np.broadcast_to(np.asarray(values, dtype), (rows,)))


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts]).astype(dtype)


def _offsets(parts: list[I64]) -> I64:
    return np.concatenate(([0], np.cumsum([part.size for part in parts], dtype=np.int64)))


def _gather(z: F32, kept: list[I64]) -> F32:
    return np.concatenate([z[row][ids] for row, ids in enumerate(kept)])
