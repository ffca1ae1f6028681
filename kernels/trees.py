"""Draft trees as columns: from parents to ancestor masks and depths, and the walk that accepts drafts.

It does not know tokens' meaning, KV memory or how the chosen tokens were chosen.

A sequence's rows are numbered from 0 in the order of the step. ``parents[i]`` is the local row of row i's parent;
a parent comes before its children; -1 says that the parent lies before the sequence's rows (the usual root, row 0,
is the last committed token). A tree has at most 64 rows, so a row's ancestors, itself included, fit one uint64.
Only a chain, such as a chunk of a prompt, may be longer; its rows have the mask CAUSAL.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.integer]

MOST_ROWS = 64
"""Rows a tree can have, the root included."""

CAUSAL = 0
"""Mask of a row that sees all rows up to itself, whatever their number. A tree's row has its own bit: never 0."""

_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)


class TreeError(ValueError):
    """Parents that describe no tree: the drafter that sent them is at fault."""


class Walked(NamedTuple):
    """What the walks of R sequences accepted; ``offsets[r]:offsets[r + 1]`` is sequence r's share of both columns."""

    counts: I32  # [R] tokens emitted, at least 1: accepted drafts plus the token chosen after the last of them
    ids: I32  # [sum counts] the emitted tokens
    rows: I32  # [sum counts] kept local rows, row 0 first: ids[j] was chosen at rows[j]

    @property
    def offsets(self) -> I64:
        """Where each sequence's share begins, [R + 1]."""
        return np.concatenate(([0], np.cumsum(self.counts, dtype=np.int64)))


def check(offsets: Ints, parents: Ints, *, rooted: bool = False) -> None:
    """Raise TreeError unless each sequence of ``parents`` [N] is a tree of at most 64 rows or a chain.

    ``offsets`` [R + 1] says which rows are a sequence's; with ``rooted`` row 0 must be the only root. Messages name
    the sequence and the local row.
    """
    sizes = np.diff(offsets)
    if len(parents) != int(offsets[-1]) or (sizes < 0).any():
        raise TreeError(f"offsets end at {int(offsets[-1])}, found {len(parents)} parents")
    local = _local(offsets)
    if sizes.size and sizes.max() > MOST_ROWS:
        for row in np.flatnonzero(np.repeat(sizes > MOST_ROWS, sizes) & (parents != local - 1))[:1]:
            owner = _owner(offsets, row)
            raise TreeError(f"sequence {owner}: {sizes[owner]} rows, a tree has at most {MOST_ROWS}")
    for row in np.flatnonzero((parents < -1) | (parents >= local))[:1]:
        found = f"parent of row {local[row]} is {parents[row]}"
        raise TreeError(f"sequence {_owner(offsets, row)}: {found}, expected -1 or an earlier row")
    if rooted:
        for row in np.flatnonzero((parents == -1) != (local == 0))[:1]:
            raise TreeError(f"sequence {_owner(offsets, row)}: row {local[row]} is a second root beside row 0")


def ancestors(parents: Ints) -> U64:
    """Return the mask of each row of one sequence, [n]: bit j = row j is an ancestor or the row itself.

    More than 64 rows must be a chain, whose masks are CAUSAL. Raises TreeError for what ``check`` refuses.
    """
    return ancestors_of_columns(np.array([0, len(parents)]), parents)


def depths(parents: Ints) -> I32:
    """Return each row's distance from its root, [n]; a root has 0. Raises TreeError as ``ancestors`` does."""
    return depths_of_columns(np.array([0, len(parents)]), parents)


def chain(rows: int) -> U64:
    """Return the masks of a chain, [rows]: row i sees rows 0 to i. Raises TreeError for more than 64 rows."""
    if rows > MOST_ROWS:
        raise TreeError(f"{rows} rows, a tree has at most {MOST_ROWS}")
    return _up_to(np.arange(rows))


def is_chain(offsets: Ints, parents: Ints) -> bool:
    """Say whether every row's parent is the row before it, so that causal attention is enough."""
    return bool((parents == _local(offsets) - 1).all())


def ancestors_of_columns(offsets: Ints, parents: Ints) -> U64:
    """Return ``ancestors`` of R sequences in columns, [N]. Raises TreeError."""
    check(offsets, parents)
    local = _local(offsets)
    masks = _up_to(np.minimum(local, MOST_ROWS - 1))
    long = np.repeat(np.diff(offsets) > MOST_ROWS, np.diff(offsets))
    masks[long] = CAUSAL
    if (parents == local - 1).all():
        return masks
    masks = np.where(long, masks, masks & ~(masks >> np.uint64(1)))  # the own bit alone
    for rows, above in _levels(offsets, parents):
        masks[rows] |= masks[above]
    return masks


def depths_of_columns(offsets: Ints, parents: Ints) -> I32:
    """Return ``depths`` of R sequences in columns, [N]. Raises TreeError."""
    check(offsets, parents)
    local = _local(offsets)
    if (parents == local - 1).all():
        return local.astype(np.int32)
    deep = np.where(np.repeat(np.diff(offsets) > MOST_ROWS, np.diff(offsets)), local, 0).astype(np.int32)
    for rows, above in _levels(offsets, parents):
        deep[rows] = deep[above] + 1
    return deep


def walk(tokens: Ints, parents: Ints, chosen: Ints) -> tuple[I32, I32]:
    """Return (kept local rows, emitted ids), of equal length, of one sequence.

    From row 0, the last committed token, go to the first child in row order that carries the token chosen at the
    current row, until none does. Kept are the rows passed, row 0 first; emitted is the token chosen at each, so all
    but the last are accepted drafts. ``tokens[0]`` is not looked at. Raises TreeError.
    """
    walked = walk_columns(np.array([0, len(parents)]), tokens, parents, chosen)
    return walked.rows, walked.ids


def walk_columns(offsets: Ints, tokens: Ints, parents: Ints, chosen: Ints) -> Walked:
    """Walk R sequences at once; ``tokens``, ``parents``, ``chosen`` are [N]; no sequence is empty. Raises TreeError."""
    if not len(tokens) == len(parents) == len(chosen):
        raise TreeError(f"{len(tokens)} tokens, {len(parents)} parents, {len(chosen)} chosen")
    check(offsets, parents, rooted=True)
    starts, sizes = np.asarray(offsets[:-1]), np.diff(offsets)
    if sizes.size and sizes.min() == 0:
        raise TreeError(f"sequence {int(sizes.argmin())} has no rows")
    if len(tokens) == starts.size:  # nothing drafted
        return Walked(np.ones(starts.size, np.int32), chosen.astype(np.int32), np.zeros(starts.size, np.int32))
    # One pass in row order finds the walk: a row is on it iff it is a child of the walk's tip and carries the token
    # chosen there. Once the tip has moved on, later children of the old tip no longer match; children follow parents.
    kept = np.zeros(len(tokens), np.bool_)
    kept[starts] = True
    tip = starts.copy()
    for row in range(1, int(sizes.max())):
        live = np.flatnonzero(sizes > row)
        at = starts[live] + row
        on = (starts[live] + parents[at] == tip[live]) & (tokens[at] == chosen[tip[live]])
        tip[live[on]] = at[on]
        kept[at[on]] = True
    rows = np.flatnonzero(kept)
    counts = np.add.reduceat(kept, starts, dtype=np.int32)
    return Walked(counts, chosen[rows].astype(np.int32), (rows - np.repeat(starts, counts)).astype(np.int32))


def _levels(offsets: Ints, parents: Ints) -> list[tuple[I64, I64]]:
    """Return, by local row from 1 on, the trees' rows that have a parent and those parents, as places in columns."""
    starts, sizes = np.asarray(offsets[:-1], np.int64), np.diff(offsets)
    starts, sizes = starts[sizes <= MOST_ROWS], sizes[sizes <= MOST_ROWS]
    levels = []
    for row in range(1, int(sizes.max(initial=0))):
        at = (starts + row)[sizes > row]
        at = at[parents[at] >= 0]
        levels.append((at, at - row + parents[at]))
    return levels


def _local(offsets: Ints) -> I64:
    """Return each row's number within its sequence, [N]."""
    return np.arange(int(offsets[-1])) - np.repeat(offsets[:-1], np.diff(offsets))


def _up_to(local: I64) -> U64:
    """Return masks with bits 0 to ``local`` set; shifting right keeps the shift below 64 for row 63."""
    return _ALL >> (np.uint64(MOST_ROWS - 1) - local.astype(np.uint64))


def _owner(offsets: Ints, row: int | np.integer) -> int:
    return int(np.searchsorted(offsets, row, side="right")) - 1
