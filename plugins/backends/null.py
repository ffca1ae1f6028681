"""The null backend: paged memory without a model. Its next token is a hash of the slots it reads.

It does not know arithmetic beyond integers. A wrong block, a missed rollback or a foreign prefix changes the token,
so control plane, memory, transfers and failures are tested in milliseconds and without torch.
"""

import time
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from antiphon.actors.executor import Backend, Batch, Move, Output, Pools
from antiphon.actors.model import Facts, KVGroup, ModelSection
from antiphon.actors.rows import RowParams
from antiphon.kernels import reduction, sampling, trees
from antiphon.runtime.plugin import Options, Site

U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
_A, _B, _C = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9)


class NullOptions(Options, frozen=True):
    """``window`` 0 leaves the window group out; ``step_seconds`` makes a step last."""

    vocabulary: Annotated[int, msgspec.Meta(ge=1)] = 512
    context: Annotated[int, msgspec.Meta(ge=2)] = 4096
    window: Annotated[int, msgspec.Meta(ge=0)] = 24
    eos: tuple[int, ...] = ()
    step_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class Null(Backend[NullOptions]):
    """Writes (token id, position) into the slots of every group; hashes what the target's groups show."""

    def __init__(self, options: NullOptions, site: Site):
        super().__init__(options, site)
        self.pools: list[npt.NDArray[np.int64]] = []  # per table [groups, blocks, block_size, 2]
        self.hashes: list[U64] = []  # per table [blocks, block_size]: mix of what the first group's slot holds
        self.windows: list[int] = []  # per table, 0: the whole context
        self.instant = not options.step_seconds
        self.size = 0
        self.seconds = 0.0  # spent computing, so that a bench can take it off

    def facts(self) -> Facts:
        """Three groups: the context, a window, and a drafter's."""
        groups = [KVGroup("context", 1, 1, 1, "int64"), KVGroup("draft", 1, 1, 1, "int64", owner="drafter")]
        if self.options.window:
            groups.insert(1, KVGroup("window", 1, 1, 1, "int64", window=self.options.window))
        options = self.options
        return Facts("null", options.vocabulary, options.context, 1, 1, tuple(groups), options.eos, "int64", "null")

    def load(self, pools: Pools) -> None:
        """Allocate; fresh slots hold what no sequence ever wrote."""
        self.size = pools.block_size
        self.windows = [groups[0].window for groups in pools.groups]
        self.pools = [np.full((len(groups), blocks, self.size, 2), -7, dtype=np.int64)
                      for groups, blocks in zip(pools.groups, pools.blocks, strict=True)]
        self.hashes = [mix(pool[0]) for pool in self.pools]

    def execute(self, batch: Batch) -> Output:
        """Write all rows, then read through the block tables and hash."""
        began = time.perf_counter()
        self._write(batch)
        logits = self._logits(batch)
        if self.options.step_seconds:
            time.sleep(self.options.step_seconds)
        hidden = {name: np.stack([batch.ids, batch.positions], axis=1) for name in batch.capture}
        self.seconds += time.perf_counter() - began
        return Output(logits, hidden)

    def move(self, moves: list[Move]) -> None:
        """Copy slots in order."""
        for table, from_block, from_slot, to_block, to_slot in moves:
            self.pools[table][:, to_block, to_slot] = self.pools[table][:, from_block, from_slot]
            self.hashes[table][to_block, to_slot] = self.hashes[table][from_block, from_slot]

    def reduce(self, logits: F32, params: RowParams) -> list[Any]:
        """Cut logits to what a verifier elsewhere needs."""
        rows = sampling.sampling(len(params.position), **params._asdict())
        return reduction.to_frames(logits, rows)

    def _write(self, batch: Batch) -> None:
        counts = np.diff(batch.row_offsets)
        owner = np.repeat(np.arange(len(counts)), counts)
        slots = batch.starts[owner] + np.arange(len(batch.ids)) - np.repeat(batch.row_offsets[:-1], counts)
        values = np.stack([batch.ids, batch.positions], axis=1).astype(np.int64)
        for table, pool, read in zip(batch.tables, self.pools, self.hashes, strict=True):
            blocks = table[owner, slots // self.size]
            if (blocks < 0).any():
                raise LookupError("a row has no block in its table")
            pool[:, blocks, slots % self.size] = values
            read[blocks, slots % self.size] = mix(values)

    def _logits(self, batch: Batch) -> F32:
        if batch.parents is None or trees.is_chain(batch.row_offsets, batch.parents):
            sums = [self._chains(batch, t) for t in range(len(self.pools))]
        else:
            sums = [self._trees(batch, t) for t in range(len(self.pools))]
        return logits_of(np.array(sums, dtype=np.uint64).reshape(len(sums), -1), self.options.vocabulary)

    def _chains(self, batch: Batch, t: int) -> U64:
        """Sums of what the logit rows read in a table when all rows are chains: one gather for all sequences."""
        rows = batch.logit_rows
        owner = np.searchsorted(batch.row_offsets, rows, side="right") - 1
        last = batch.positions[rows].astype(np.int64)  # slots are positions
        low = np.maximum(0, last + 1 - self.windows[t]) if self.windows[t] else np.zeros_like(last)
        counts = last + 1 - low
        ends = np.cumsum(counts)
        slots = np.arange(ends[-1] if len(ends) else 0) + np.repeat(low - ends + counts, counts)
        blocks = batch.tables[t][np.repeat(owner, counts), slots // self.size]
        read = self.hashes[t].reshape(-1)[blocks.astype(np.int64) * self.size + slots % self.size]
        return np.add.reduceat(read, ends - counts) if len(rows) else np.zeros(0, np.uint64)

    def _trees(self, batch: Batch, t: int) -> U64:
        """The same where a step has trees: sequence by sequence."""
        assert batch.parents is not None
        masks = trees.ancestors_of_columns(batch.row_offsets, batch.parents)
        sums = []
        for r, (begin, end) in enumerate(zip(batch.row_offsets[:-1], batch.row_offsets[1:], strict=True)):
            rows = batch.logit_rows[(batch.logit_rows >= begin) & (batch.logit_rows < end)] - begin
            start = int(batch.starts[r])
            slots = np.arange(start + end - begin)
            read = self.hashes[t][batch.tables[t][r, slots // self.size], slots % self.size]
            view = _View(read, start, batch.positions[begin:end], rows, self.windows[t])
            sums.append(_chain(view) if masks[begin] == trees.CAUSAL else _tree(view, masks[begin:end]))
        return np.concatenate(sums)


class _View(NamedTuple):
    """What rows of one sequence can see in one group."""

    read: U64  # [slots]
    start: int
    positions: npt.NDArray[np.int32]  # of the sequence's rows in this step
    rows: npt.NDArray[np.int64]  # local rows wanted
    window: int

    def low(self) -> npt.NDArray[np.int64]:
        """First slot that each wanted row sees; slots before ``start`` are positions."""
        positions = self.positions[self.rows].astype(np.int64)
        return np.maximum(0, positions + 1 - self.window) if self.window else np.zeros_like(positions)


def mix(slots: npt.NDArray[np.int64]) -> U64:
    """Hash each slot (token id, position) [..., 2] to 64 bits."""
    value = slots[..., 0].astype(np.uint64) * _A + slots[..., 1].astype(np.uint64) * _B + _C
    value = (value ^ (value >> np.uint64(29))) * _A
    return value ^ (value >> np.uint64(32))


def logits_of(sums: U64, vocabulary: int) -> F32:
    """Logits [L, vocabulary] of the sums of what each row reads, [tables, L]."""
    state = np.zeros(sums.shape[1], dtype=np.uint64)
    for table in sums:
        state = (state ^ table) * _B
        state ^= state >> np.uint64(31)
    tokens = np.arange(vocabulary, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    value = state[:, None] * tokens
    value ^= value >> np.uint64(33)
    return ((value * _C) >> np.uint64(40)).astype(np.float32) * np.float32(8.0 / (1 << 24))


def expected(ids: npt.NDArray[np.integer], options: NullOptions) -> F32:
    """Logits [vocabulary] after ``ids``, computed without pages: what a correct runtime must find."""
    slots = np.stack([np.asarray(ids, np.int64), np.arange(len(ids))], axis=1)
    read = mix(slots)
    sums = [read.sum(dtype=np.uint64)]
    if options.window:
        sums.append(read[-options.window:].sum(dtype=np.uint64))
    row: F32 = logits_of(np.array(sums, dtype=np.uint64)[:, None], options.vocabulary)[0]
    return row


def _chain(view: _View) -> U64:
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(view.read, dtype=np.uint64)])
    sums: U64 = total[view.start + view.rows + 1] - total[view.low()]
    return sums


def _tree(view: _View, masks: U64) -> U64:
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(view.read[:view.start], dtype=np.uint64)])
    sums: U64 = total[-1] - total[np.minimum(view.low(), view.start)]
    for i, row in enumerate(view.rows):
        seen = [j for j in range(len(masks)) if int(masks[row]) >> j & 1]
        if view.window:
            seen = [j for j in seen if view.positions[j] > view.positions[row] - view.window]
        # A slice, because sums wrap around: numpy warns of that for scalars and not for arrays.
        sums[i:i + 1] += view.read[view.start + np.array(seen, dtype=np.int64)].sum(dtype=np.uint64)
    return sums


__all__ = ["ModelSection", "Null", "NullOptions", "expected", "logits_of", "mix"]
