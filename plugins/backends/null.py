"""The null backend: paged memory without a model. Its next token is a hash of the slots it reads.

It does not know arithmetic beyond integers. A wrong block, a missed rollback or a foreign prefix changes the token,
so control plane, memory, transfers and failures are tested in milliseconds and without torch.
"""

import time
from typing import Any, NamedTuple

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

    vocabulary: int = 512
    context: int = 4096
    window: int = 24
    eos: tuple[int, ...] = ()
    step_seconds: float = 0.0


class Null(Backend[NullOptions]):
    """Writes (token id, position) into the slots of every group; hashes what the target's groups show."""

    def __init__(self, options: NullOptions, site: Site):
        super().__init__(options, site)
        self.pools: list[npt.NDArray[np.int64]] = []  # per table [groups, blocks, block_size, 2]
        self.windows: list[int] = []  # per table, 0: the whole context
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

    def reduce(self, logits: F32, params: RowParams) -> list[Any]:
        """Cut logits to what a verifier elsewhere needs."""
        rows = sampling.sampling(len(params.position), **params._asdict())
        return reduction.to_frames(logits, rows)

    def _write(self, batch: Batch) -> None:
        counts = np.diff(batch.row_offsets)
        owner = np.repeat(np.arange(len(counts)), counts)
        local = np.arange(len(batch.ids)) - np.repeat(batch.row_offsets[:-1], counts)
        slots = batch.starts[owner] + local
        values = np.stack([batch.ids, batch.positions], axis=1)
        for table, pool in zip(batch.tables, self.pools, strict=True):
            blocks = table[owner, slots // self.size]
            if (blocks < 0).any():
                raise LookupError("a row has no block in its table")
            pool[:, blocks, slots % self.size] = values

    def _logits(self, batch: Batch) -> F32:
        masks = None if batch.parents is None else trees.ancestors_of_columns(batch.row_offsets, batch.parents)
        wanted = np.zeros(len(batch.ids), dtype=bool)
        wanted[batch.logit_rows] = True
        sums = np.zeros((len(self.pools), len(batch.ids)), dtype=np.uint64)
        for r, (begin, end) in enumerate(zip(batch.row_offsets[:-1], batch.row_offsets[1:], strict=True)):
            rows = np.flatnonzero(wanted[begin:end])
            if not len(rows):
                continue
            start = int(batch.starts[r])
            slots = np.arange(start + end - begin)
            positions = batch.positions[begin:end]
            for t, (table, pool) in enumerate(zip(batch.tables, self.pools, strict=True)):
                read = mix(pool[0, table[r, slots // self.size], slots % self.size])
                view = _View(read, start, positions, rows, self.windows[t])
                bits = None if masks is None or masks[begin + rows[0]] == trees.CAUSAL else masks[begin:end]
                sums[t, begin + rows] = _chain(view) if bits is None else _tree(view, bits)
        return logits_of(sums[:, batch.logit_rows], self.options.vocabulary)


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
        sums[i] += view.read[view.start + np.array(seen, dtype=np.int64)].sum(dtype=np.uint64)
    return sums


__all__ = ["ModelSection", "Null", "NullOptions", "expected", "logits_of", "mix"]
